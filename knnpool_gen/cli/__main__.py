"""``python -m knnpool_gen.cli``."""

from knnpool_gen.cli import app

app()

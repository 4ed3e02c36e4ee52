"""The jinja templates that say how a kernel is written."""

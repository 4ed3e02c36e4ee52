"""From specs and templates to text. Nothing here imports torch or cupy."""

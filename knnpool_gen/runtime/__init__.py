"""From tables and tensors to launches. Nothing here reads YAML or templates."""

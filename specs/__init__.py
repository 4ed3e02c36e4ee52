"""The YAML files that say which kernels exist."""

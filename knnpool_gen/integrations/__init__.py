"""Other packages' layers on these kernels."""

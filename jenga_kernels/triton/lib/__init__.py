"""Functions that all kernels share: addresses, rows, products, conversions, tiles."""

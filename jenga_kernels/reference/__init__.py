"""What each operation does, in plain PyTorch: same names, same signatures.

Tests and benchmarks compare the kernels with these; nothing here is fast.
"""

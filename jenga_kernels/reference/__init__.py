"""References: each operation in plain PyTorch, with the same name and signature.

Tests and benchmarks compare the kernels with these. Nothing here is fast.
"""

"""What benchmarks share: timing, the machine, compiled kernels and their limits."""

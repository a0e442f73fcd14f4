"""Common code of benchmarks: timing, the machine, compiled kernels and their limits."""

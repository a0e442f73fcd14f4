"""Workloads in time, ours beside vLLM's manager at its best: `python -m perf.serving`."""

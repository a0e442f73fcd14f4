"""Serving over time: Jenga and vLLM's manager in its best setting, by `python -m perf.serving`."""

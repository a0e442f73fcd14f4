"""Measure real engines: vLLM's own memory manager against ours, on the same requests.

Engines run one after another. `python -m perf.engine` works through an ordered plan while a machine
is available, and continues where an earlier call ended. `README.md` in this folder has the commands
for a machine that is offline.
"""

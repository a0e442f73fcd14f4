"""vLLM's own memory manager beside ours: engines that serve the same requests, one after another.

`python -m perf.engine` runs an ordered plan for as long as a machine can be had, and goes on where
an earlier call ended. `README.md` in this folder has the commands for a machine that is offline.
"""

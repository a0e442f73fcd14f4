"""`jenga demo`: a real hybrid model served by vLLM on this package's manager and kernels.

`weights` prepares the model. `run` serves prompts with it. `stock` replays the same requests on
vLLM's own memory manager. `ending` asks both engines questions on documents. `report` writes the
results as text.
"""

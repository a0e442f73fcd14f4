"""Paged kernels for serving language models: attention caches and recurrent states in one arena.

Each operation is one module with one public function of the same name, for example
`jenga_kernels.kv_store.kv_store`. Its Triton kernels are in `jenga_kernels.triton`, and
`jenga_kernels.reference` holds a PyTorch version with the same signature, which defines what the
operation does. The package stands alone: it needs torch and Triton and knows no engine.

A cache is a strided view: pages need not be contiguous, only the last dimension. On a machine
without a GPU, set `TRITON_INTERPRET=1` before the first import and the same kernels run on the CPU.
"""

"""Paged kernels for serving language models: attention caches and recurrent states in one arena.

Each operation is one module with one public function of the same name, for example
`jenga_kernels.kv_store.kv_store`. Its Triton kernels are in `jenga_kernels.triton`, and
`jenga_kernels.reference` holds a PyTorch version with the same signature, which defines what the
operation does. The package stands alone: it needs torch and Triton and knows no engine.

A cache is a strided view. Its pages need not be contiguous; only the last dimension must be. On
tensors of a GPU, an operation launches its kernels. On tensors of a CPU, it calls its reference
after the same checks. If `TRITON_INTERPRET=1` is set before the first import, Triton's interpreter
runs the kernels on the CPU instead.
"""

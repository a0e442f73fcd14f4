"""The Triton kernels, one module per operation, and their shared functions.

In `lib`, `addressing` turns page ids into 64-bit offsets. `matmul` holds the matrix product that is
also right in the interpreter, `softmax` one step of online softmax, and `tiles` the tile sizes.
"""

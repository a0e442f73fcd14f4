"""The matrix product of all kernels."""

import triton
import triton.language as tl

from jenga_kernels.triton.lib.device import device_function

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels of this process run in Triton's interpreter."""


@device_function
def matmul(a, b):
    """Product of a [M, K] and b [K, N], accumulated and returned in float32.

    In the interpreter, operands of less than 32 bits are widened, because it holds bfloat16 as
    integers and would multiply those. On a GPU they go to the tensor cores as they are.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="ieee")


@device_function
def matmul_add(a, b, c, IS_TF32: tl.constexpr = False):  # noqa: FBT002
    """Product of a [M, K] and b [K, N] added to c, f32[M, N]; see `matmul`.

    With IS_TF32, operands in float32 go to the tensor cores too, which read their first 19 bits.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    elif IS_TF32:
        return tl.dot(a, b, c, input_precision="tf32")
    else:
        return tl.dot(a, b, c, input_precision="ieee")

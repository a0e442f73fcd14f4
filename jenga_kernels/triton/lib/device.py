"""Functions that kernels call, and that are never launched."""

import dataclasses
import functools
from collections.abc import Callable

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_HALF_OVERFLOW = tl.constexpr(65520.0)
"""Least magnitude that float16 rounds to infinity."""


def device_function(function: Callable) -> Callable:
    """Compile a function with `triton.jit` that kernels call, and that is never launched.

    In the interpreter, each nested call of a jitted function would patch Triton's language again,
    which costs more than most bodies. A launch has patched it already, so the interpreter calls the
    function directly.
    """
    compiled = triton.jit(function)
    if not triton.knobs.runtime.interpret:
        return compiled

    @functools.wraps(function)
    def interpreted(*args: object, **kwargs: object) -> object:
        return compiled.rewrite()(*args, **kwargs)

    return interpreted


def skip_overflow_checks() -> None:
    """Switch off the interpreter's check of every 32-bit sum and product, for this process.

    The check takes a third of the interpreter's time. Tests need it; an engine on a CPU does not.
    """
    # Only the interpreter has these options, so its module is not imported elsewhere.
    from triton.runtime.interpreter import interpreter_builder  # noqa: PLC0415

    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, sanitize_overflow=False
    )


@device_function
def let_next_begin(IS_FOLLOWED: tl.constexpr):
    """Let the next kernel begin once all programs of this one have begun.

    It does so if it is launched to overlap, and if this kernel leaves room on the GPU. It then
    waits in `await_kernel_before`.
    """
    if IS_FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()


@device_function
def await_kernel_before(IS_OVERLAPPED: tl.constexpr):
    """Wait until the previous kernel has ended and all its stores are visible.

    If this kernel is launched to overlap with the previous one, every program has to call this, and
    before it stores. Later kernels take the previous one as ended when this one has. All kernels
    before the previous one have ended.
    """
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@device_function
def ceil_div(dividend, divisor):
    """Quotient of non-negative integers, rounded up."""
    return (dividend + divisor - 1) // divisor


@device_function
def reciprocal(values):
    """1 / values, for values of about 1 and more; 0 for infinity. Approximate."""
    if _INTERPRETED:
        return 1 / values
    else:
        # One instruction; an exact quotient handles the greatest divisors too.
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@device_function
def quotient(values, divisors):
    """Values over divisors that are broadcast to them, rounded to nearest.

    Divisors must not be 0, nor so small that a reciprocal is infinite. The product with the rounded
    reciprocal is corrected by its remainder, which takes a few instructions a value. The compiler's
    rounded quotient takes more than twice as many. Its usual quotient may be two units in the last
    place off.

    Source: Markstein, Computation of elementary functions on the IBM RISC System/6000 (1990).
    """
    if _INTERPRETED:
        return tl.div_rn(values, tl.broadcast_to(divisors, values.shape))
    else:
        inverses = tl.div_rn(tl.full(divisors.shape, 1.0, tl.float32), divisors)
        inverses = tl.broadcast_to(inverses, values.shape)
        found = values * inverses
        rest = tl.fma(-found, tl.broadcast_to(divisors, values.shape), values)
        # Zero keeps its sign. For infinity, the remainder is NaN, so there is no correction.
        return tl.where(tl.abs(rest) > 0.0, tl.fma(rest, inverses, found), found)


@device_function
def log2(values):
    """Logarithms of values of about 1 and more, within 2**-22, or within that share of them."""
    if _INTERPRETED:
        return tl.log2(values)
    else:
        # One instruction. The library's takes thirty, for the last place of small logarithms.
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@device_function
def widened(values):
    """Values in float32.

    Two bfloat16 in a register take one instruction each. The compiler takes a third one, to move
    the second to the place of the first.
    """
    if _INTERPRETED or values.dtype != tl.bfloat16 or values.numel == 1:
        return values.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=f,=f,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@device_function
def rounded_product(a, b):
    """A times b, rounded before anything is added to it.

    The compiler would fuse the product with a sum that follows. Then two threads that sum the same
    two products might each fuse another one, and get different sums. A product that is rounded to
    an integer by a sum would be rounded once instead of twice.
    """
    return tl.fma(a, b, tl.zeros_like(a))


@device_function
def rounded(values, dtype: tl.constexpr):
    """Values in float32 as the nearest ones in `dtype`.

    The interpreter truncates to bfloat16 instead, so that errors of a chain of products all have
    the same sign, and it turns zero into a small number. So the bits are rounded here. It also
    warns of float16 overflows, which are avoided here.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        # For some NaN the sum would overflow.
        is_number = values == values  # noqa: PLR0124
        bits = tl.where(is_number, values.to(tl.int32, bitcast=True), 0x7FC00000)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    elif _INTERPRETED and dtype == tl.float16:
        overflowed = tl.where(values > 0, float("inf"), float("-inf"))
        return tl.where(tl.abs(values) >= _HALF_OVERFLOW, overflowed, values).to(dtype)
    else:
        return values.to(dtype)


@device_function
def in_float(values, dtype: tl.constexpr):
    """Values of bfloat16, float16 or float32 as the nearest ones in such a `dtype`."""
    if values.dtype == dtype:
        return values
    else:
        return rounded(widened(values), dtype)

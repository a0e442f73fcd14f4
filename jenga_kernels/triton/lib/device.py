"""Functions that kernels call."""

import dataclasses
import functools
from collections.abc import Callable

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_HALF_OVERFLOW = tl.constexpr(65520.0)
"""Least magnitude that float16 rounds to infinity."""


def device_function(function: Callable) -> Callable:
    """`triton.jit` for what kernels call but nobody launches.

    The interpreter patches Triton's language anew at each nested call, which costs more than most
    bodies. A launch has done that already, so there such a function is called as it stands.
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

    It takes a third of the interpreter's time: tests want it, an engine on a CPU does not.
    """
    # Only the interpreter has these options; importing it elsewhere would be for nothing.
    from triton.runtime.interpreter import interpreter_builder  # noqa: PLC0415

    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, sanitize_overflow=False
    )


@device_function
def let_next_begin(IS_FOLLOWED: tl.constexpr):
    """Let the next kernel begin, if it is launched so, once all programs of this one are here.

    There it waits in `await_kernel_before`. The GPU has room for it where this kernel leaves some.
    """
    if IS_FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()


@device_function
def await_kernel_before(IS_OVERLAPPED: tl.constexpr):
    """Wait until the kernel before this one has ended, with all that it stored.

    Where this one is launched to overlap with it, every program has to, and before it stores:
    what comes after both takes both for done when this one is. The kernel before them has ended.
    """
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@device_function
def ceil_div(dividend, divisor):
    """Quotient of non-negative integers, rounded up."""
    return (dividend + divisor - 1) // divisor


@device_function
def reciprocal(values):
    """1 / values, for values of about 1 and more; 0 for infinity."""
    if _INTERPRETED:
        return 1 / values
    else:
        # One instruction, where a quotient takes care of the greatest divisors too.
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@device_function
def quotient(values, divisors):
    """Values over divisors that are broadcast to them, rounded to nearest.

    Divisors are neither 0 nor so small that a reciprocal is infinite. What their rounded
    reciprocals leave is added: a few instructions a value, where the compiler's rounded quotient
    takes more than twice as many, and its usual one may be two units in the last place away.

    Source: Markstein, Computation of elementary functions on the IBM RISC System/6000 (1990).
    """
    if _INTERPRETED:
        return tl.div_rn(values, tl.broadcast_to(divisors, values.shape))
    else:
        inverses = tl.div_rn(tl.full(divisors.shape, 1.0, tl.float32), divisors)
        inverses = tl.broadcast_to(inverses, values.shape)
        found = values * inverses
        rest = tl.fma(-found, tl.broadcast_to(divisors, values.shape), values)
        # Zero keeps its sign, and infinity leaves no number.
        return tl.where(tl.abs(rest) > 0.0, tl.fma(rest, inverses, found), found)


@device_function
def log2(values):
    """Logarithms of values of about 1 and more, within 2**-22 or that share of them."""
    if _INTERPRETED:
        return tl.log2(values)
    else:
        # One instruction, where the library's takes thirty for the last place of small logarithms.
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@device_function
def widened(values):
    """Values in float32.

    Each of two bfloat16 in a register is one instruction away; the compiler takes a third one for
    the two, to move the second where the first was.
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

    The compiler would not: where a thread has one product of a sum and another thread the other,
    they would have sums that differ, and what is rounded next would be rounded once.
    """
    return tl.fma(a, b, tl.zeros_like(a))


@device_function
def rounded(values, dtype: tl.constexpr):
    """Values in float32 as the nearest ones in `dtype`.

    The interpreter cuts bfloat16 off instead, so that errors of a chain of products all point the
    same way, and it makes a small number of zero. There, the bits are rounded here. It also warns
    of float16 that overflows.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        # For some of what is not a number the sum would overflow.
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

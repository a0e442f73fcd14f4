# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Functions of `lib.device` for kernels in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_begin(IS_FOLLOWED: gl.constexpr):
    """Do what `device.let_next_begin` does."""
    if IS_FOLLOWED:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def await_kernel_before(IS_OVERLAPPED: gl.constexpr):
    """Do what `device.await_kernel_before` does."""
    if IS_OVERLAPPED:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )

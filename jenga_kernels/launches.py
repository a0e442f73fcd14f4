"""Launches of kernels that take some of the same arguments."""

import triton


def taken_by(kernel: triton.JITFunction, arguments: dict[str, object]) -> dict[str, object]:
    """Arguments that a kernel has, and the options of launches."""
    names = {*kernel.arg_names, "enable_fp_fusion", "num_warps", "num_stages", "launch_pdl"}
    return {name: value for name, value in arguments.items() if name in names}

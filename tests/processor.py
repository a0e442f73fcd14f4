"""What the run of the tests says of its processor, on which some results depend to the last bit."""

import os
from importlib.util import find_spec
from pathlib import Path

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve", "bf16")
"""Those by which vLLM, torch and BLAS choose what they run, as Linux names them."""


def report():
    """Get a line about the processor, its instructions, numpy's BLAS and torch."""
    parts = [_instructions()]
    if find_spec("numpy"):
        parts.append(f"numpy's BLAS {_blas()}")
    if find_spec("torch"):
        import torch

        parts.append(f"torch {torch.backends.cpu.get_cpu_capability()}")
    return f"processor: {'; '.join(parts)}"


def _instructions():
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in described.split("\n\n")[0].splitlines())
    fields = {name.strip(): text.strip() for name, text in fields.items()}
    found = fields.get("flags", fields.get("Features", "")).split()
    known = [name for name in INSTRUCTIONS if name in found]
    return f"{fields.get('model name', 'unknown')}, {' '.join(known) or 'none known'}"


def _blas():
    """Name the library, and the processor that its kernels are for where that can be found out."""
    import numpy as np

    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    text = f"{built['name']} {built['version']}"
    if find_spec("threadpoolctl"):
        import threadpoolctl

        loaded = threadpoolctl.threadpool_info()
        kernels = {each["architecture"] for each in loaded if "architecture" in each}
        text += f" for {', '.join(sorted(kernels))}" if kernels else ""
    asked = os.environ.get("OPENBLAS_CORETYPE")
    return f"{text} (OPENBLAS_CORETYPE={asked})" if asked else text

"""Run tests with kernels as Triton compiles them, in an emulated GPU: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl

ROOT = Path(__file__).parents[1]

_LANGUAGE = [
    (owner, dict(vars(owner)))
    for owner in (tl, tl.core, tl.math, tl.dtype, tl.tensor, tl.core.tensor_descriptor_base)
]
"""Triton's language as it is imported, before a kernel is interpreted."""

only_where_interpreted = pytest.mark.skipif(
    bool(os.environ.get("EMULATED_GPU")) or torch.cuda.is_available(),
    reason="here kernels run compiled anyway",
)


def forget_the_interpreter(monkeypatch):
    """Let kernels be compiled in a process in which others were interpreted.

    The interpreter puts functions of its own into the language, and leaves some of them there.
    """
    for owner, members in _LANGUAGE:
        for name, member in members.items():
            if vars(owner).get(name) is not member:
                monkeypatch.setattr(owner, name, member)


def run_emulated(capability, *arguments):
    """Run pytest where kernels are compiled for a compute capability; they must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"EMULATED_GPU": str(capability)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout

"""Run tests with kernels as Triton compiles them, in an emulated GPU: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

only_where_interpreted = pytest.mark.skipif(
    bool(os.environ.get("EMULATED_GPU")) or torch.cuda.is_available(),
    reason="here kernels run compiled anyway",
)


def run_emulated(capability, *arguments):
    """Run pytest where kernels are compiled for a compute capability; they must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"EMULATED_GPU": str(capability)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout

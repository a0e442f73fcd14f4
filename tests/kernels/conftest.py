"""What every test of a kernel asks of the interpreter, of older GPUs and of a GPU's memory."""

import fcntl
import gc
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton

from jenga_kernels.triton.lib.tiles import has_kernels, machine_of
from tests.conftest import ONLY_REFERENCES
from tests.kernels.support import DEVICE

if has_kernels(DEVICE) == ONLY_REFERENCES:
    msg = "kernels must run on a GPU or in an interpreter, unless ONLY_REFERENCES=1 says otherwise"
    raise RuntimeError(msg)

if triton.knobs.runtime.interpret:
    from triton.runtime.interpreter import InterpreterBuilder

    @pytest.fixture(autouse=True)
    def masks_hold_truth_values(monkeypatch):
        """Refuse masks of numbers in every Triton, as from 3.9 on the interpreter itself does."""
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def checked_load(self, pointers, mask, *args, **kwargs):
            assert mask.data.dtype == bool, mask
            return load(self, pointers, mask, *args, **kwargs)

        def checked_store(self, pointers, values, mask, *args, **kwargs):
            assert mask.data.dtype == bool, mask
            return store(self, pointers, values, mask, *args, **kwargs)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):  # noqa: ARG001
    """Skip what a GPU before float8, of this machine or an emulated one, is right to refuse."""
    try:
        return (yield)
    except (ValueError, AssertionError) as error:
        is_refused = "float8_e4m3fn on a GPU without it" in str(error)
        if is_refused and not machine_of(DEVICE).has_fp8:
            pytest.skip("needs a GPU with float8, of compute capability 8.9 or more")
        raise


MUCH_BYTES = 1 << 30
"""Of a GPU's memory, which a process does not keep from one test to the next."""


@contextmanager
def turn_of(name, worker):
    """Let a test with an arena past 2**31 elements wait for one of another process.

    Unlike on a CPU, all of such an arena is there. There are as many turns as workers of one run,
    however many runs go on beside each other.

    Args:
        name: Of the test.
        worker: Of pytest-xdist.
    """
    if "2_to_the_31" not in name:
        yield
        return
    name = f"jenga-arena-{os.getuid()}-{worker}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


LOST_GPU = 70
"""What a process returns that an illegal access has cost its GPU."""


def end_without_gpu(name):
    """End the process if a test has left it without its GPU: every later one would fail too.

    pytest-xdist puts another in its place, and names the test.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{name} has cost this process its GPU: {error}", file=sys.__stderr__, flush=True)
        os._exit(LOST_GPU)


if DEVICE.type == "cuda":

    @pytest.fixture(autouse=True)
    def gives_back_memory(request):
        """Leave a GPU's memory to the tests that run beside this process's."""
        with turn_of(request.node.name, os.environ.get("PYTEST_XDIST_WORKER", "main")):
            yield
            end_without_gpu(request.node.nodeid)
            if torch.cuda.memory_reserved() > MUCH_BYTES:
                gc.collect()
                torch.cuda.empty_cache()

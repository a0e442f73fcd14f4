"""What every test of a kernel asks of the interpreter, and of older GPUs."""

import pytest
import triton

from jenga_kernels.triton.tiles import machine_of
from tests.kernels.support import DEVICE

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

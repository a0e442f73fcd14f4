"""What every test of a kernel asks of the interpreter."""

import pytest
import triton

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

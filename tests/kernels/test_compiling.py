import os
import sys

import pytest
import torch

from jenga_kernels.recurrent.conv_update import conv_update
from tests.kernels import compiling
from tests.kernels.compiling import compile_job
from tests.kernels.recurrent.state_cases import i32
from tests.kernels.support import DEVICE


def compile_one():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["PATH_OF_LIBRARIES"] in sys.path
    assert DEVICE.type == "cpu"
    x = torch.zeros(1, 16)
    conv_update(x, torch.zeros(2, 16, 3), x, torch.zeros(16, 4), i32([1]), i32([1]))


def compile_nothing():
    msg = "no such job"
    raise LookupError(msg)


def test_compile_job_hides_gpus_and_keeps_the_path(monkeypatch, tmp_path):
    # Tensors of `support` lie on a GPU where there is one, all others of a job on the CPU. Where
    # vLLM was unpacked into a folder, torch and Triton come from there.
    monkeypatch.setattr(compiling, "compiler_for", compiling.Compiler)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH_OF_LIBRARIES", str(tmp_path))

    assert len(compile_job(compile_one, 90)) == 1


def test_a_job_that_fails_says_why_and_leaves_the_process_to_others():
    with pytest.raises(AssertionError, match="LookupError: no such job"):
        compile_job(compile_nothing, 90)

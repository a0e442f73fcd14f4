import os
import sys

import torch

from jenga_kernels.conv_update import conv_update
from tests.kernels.compiling import compile_job
from tests.kernels.state_cases import i32
from tests.kernels.support import DEVICE


def compile_one():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["PATH_OF_LIBRARIES"] in sys.path
    assert DEVICE.type == "cpu"
    x = torch.zeros(1, 16)
    conv_update(x, torch.zeros(2, 16, 3), x, torch.zeros(16, 4), i32([1]), i32([1]))


def test_compile_job_hides_gpus_and_keeps_the_path(monkeypatch, tmp_path):
    # Tensors of `support` lie on a GPU where there is one, all others of a job on the CPU. Where
    # vLLM was unpacked into a folder, torch and Triton come from there.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH_OF_LIBRARIES", str(tmp_path))

    assert len(compile_job(compile_one, 90)) == 1

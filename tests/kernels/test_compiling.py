import os

import torch

from jenga_kernels.conv_update import conv_update
from tests.kernels.compiling import compile_job
from tests.kernels.state_cases import i32
from tests.kernels.support import DEVICE


def compile_with_all_gpus_hidden():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert DEVICE.type == "cpu"
    x = torch.zeros(1, 16)
    conv_update(x, torch.zeros(2, 16, 3), x, torch.zeros(16, 4), i32([1]), i32([1]))


def test_compile_job_keeps_every_tensor_off_a_gpu():
    # Tensors of `support` lie on a GPU where there is one, all others of a job on the CPU.
    assert len(compile_job(compile_with_all_gpus_hidden, 90)) == 1

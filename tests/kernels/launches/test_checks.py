from types import SimpleNamespace

import pytest
import torch

from jenga_kernels.checks.tensors import check_same_device


def tensor_on(device):
    return SimpleNamespace(device=torch.device(device))


def test_tensors_of_a_gpu_that_is_not_the_current_one_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    check_same_device(q=tensor_on("cuda:0"), k=None, v=tensor_on("cuda:0"))
    with pytest.raises(ValueError, match=r"^q must be on the current device, cuda:0, got cuda:1"):
        check_same_device(q=tensor_on("cuda:1"), v=tensor_on("cuda:1"))


def test_tensors_of_two_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    with pytest.raises(ValueError, match=r"^v must be on the device of q, cuda:0, got cpu"):
        check_same_device(q=tensor_on("cuda:0"), v=tensor_on("cpu"))

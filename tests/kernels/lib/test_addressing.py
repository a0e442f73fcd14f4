"""Strides as kernels take them."""

import torch

from jenga_kernels.triton.lib.addressing import named_strides


def test_strides_are_named_by_tensor_and_dimension():
    x, B = torch.empty(5, 4, 8), torch.empty(5, 1, 16)
    dims = {"x": ("token", "head"), "B": ("token", "group"), "z": ("token",), "dt": ("token",)}

    found = named_strides({"x": x, "B": B, "z": None, "scale": 1.0}, dims)

    assert found == {
        "stride_x_token": 32,
        "stride_x_head": 8,
        "stride_B_token": 16,
        "stride_B_group": 0,  # one group, whose stride PyTorch does not define
        "stride_z_token": 0,  # not given
    }

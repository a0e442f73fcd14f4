"""What tiles are chosen by: the GPU of the tensors, and none but NVIDIA's."""

from types import SimpleNamespace

import pytest
import torch
import triton

from jenga_kernels.triton.lib.tiles import Machine, machine_of

GPUS = ((8, 9, 142), (9, 0, 132))
"""Compute capability and processors of each."""


@pytest.fixture
def pretend(monkeypatch):
    """Have Triton compile for a target, and torch see GPUs, of which one is current."""

    def pretend(backend, arch, *, current=0):
        driver = SimpleNamespace(
            get_current_target=lambda: SimpleNamespace(backend=backend, arch=arch),
            utils=SimpleNamespace(
                get_device_properties=lambda index: {"multiprocessor_count": GPUS[index][2]}
            ),
        )
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: GPUS[index][:2])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)

    return pretend


@pytest.mark.parametrize("current", [0, 1])
def test_tiles_are_for_the_gpu_of_the_tensors_and_not_for_the_current_one(current, pretend):
    major, minor, _ = GPUS[current]
    pretend("cuda", 10 * major + minor, current=current)

    machines = [machine_of.__wrapped__(torch.device("cuda", index)) for index in (0, 1)]

    assert machines == [
        Machine(capability=89, num_processors=142),
        Machine(capability=90, num_processors=132),
    ]
    assert machine_of.__wrapped__(torch.device("cuda")) == machines[current]


@pytest.mark.parametrize(("backend", "arch"), [("hip", "gfx942"), ("xpu", {"name": "Max"})])
def test_gpus_but_nvidias_are_refused_by_name(backend, arch, pretend):
    pretend(backend, arch)

    with pytest.raises(ValueError, match=f"NVIDIA GPU, got some on cuda:0.* {backend!r}"):
        machine_of.__wrapped__(torch.device("cuda:0"))

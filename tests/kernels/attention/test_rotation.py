"""Rotations of heads, and what they are for."""

import pytest
import torch

from jenga_kernels.attention.kv_store import kv_store
from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.checks.tensors import INT4_DTYPE
from jenga_kernels.reference.attention.paged_attention import from_int4
from tests.kernels.support import DEVICE, generator, randn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [1, 16, 32, 64, 80, 96, 128, 192, 256, 512])
def test_rotating_back_gives_the_identity_exactly(dim, dtype):
    rotation = hadamard_rotation(dim, dtype, DEVICE)

    # Powers of two with signs: sums of them are exact in float64, and so are they in any dtype.
    forward, back = rotation.forward.double(), rotation.back.double()
    identity = torch.eye(dim, dtype=torch.float64, device=DEVICE)
    assert torch.equal(forward @ back, identity)
    assert torch.equal(forward @ forward.T, rotation.gain * identity)
    assert rotation.gain in (1, 2)
    assert rotation.forward.dtype == rotation.back.dtype == dtype


def test_a_rotation_is_the_same_whoever_asks():
    first = hadamard_rotation(64, torch.float32, DEVICE).forward.clone()
    hadamard_rotation.cache_clear()
    torch.manual_seed(7)

    assert torch.equal(first, hadamard_rotation(64, torch.float32, DEVICE).forward)
    # It is no plain Hadamard matrix: rows have signs of both kinds.
    assert len(first[:, 0].unique()) == 2


@pytest.mark.parametrize("head_dim", [64, 128, 96])
def test_rotation_saves_small_elements_beside_one_that_stands_out(head_dim):
    rng = generator(3)
    k = randn((64, 2, head_dim), torch.float32, rng)
    k[..., 5] *= 30
    rotation = hadamard_rotation(head_dim, torch.float32, DEVICE)

    plain = stored_and_restored(k)
    rotated = stored_and_restored(k @ rotation.forward) @ rotation.back

    others = torch.arange(head_dim, device=DEVICE) != 5
    errors = [(got - k)[..., others].square().mean().sqrt().item() for got in (plain, rotated)]
    # Steps are a fifteenth of the range: that of one element, or four deviations to either side.
    assert errors[1] < errors[0] / 2


def stored_and_restored(rows):
    num_tokens, num_kv_heads, head_dim = rows.shape
    pages = torch.zeros(
        2, num_tokens // 16, 16, num_kv_heads, head_dim // 2, dtype=INT4_DTYPE, device=DEVICE
    )
    scales = torch.zeros(*pages.shape[:-1], 2, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(num_tokens, device=DEVICE)

    kv_store(rows, rows, *pages, slots, k_slot_scales=scales[0], v_slot_scales=scales[1])

    found = zip(pages[0].flatten(0, 1), scales[0].flatten(0, 1), strict=True)
    return torch.stack([from_int4(*row, torch.float32) for row in found])


def test_what_cannot_be_rotated_is_refused():
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        hadamard_rotation(0, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="dtype must be one of floating-point numbers, got torch"):
        hadamard_rotation(64, torch.int8, DEVICE)

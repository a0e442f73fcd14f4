"""The references agree with those of mamba-ssm, which the recurrent layers' models come from."""

import sys
import types

import pytest
import torch

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.reference.recurrent.causal_conv import causal_conv
from jenga_kernels.reference.recurrent.conv_update import conv_update
from jenga_kernels.reference.recurrent.state_scan import state_scan
from jenga_kernels.reference.recurrent.state_update import state_update
from tests.kernels.conv.conv_cases import conv_states, conv_tensors
from tests.kernels.recurrent.state_cases import i32, recurrence_tensors, state_pages
from tests.kernels.support import generator, max_error, randn

LIMIT = 1e-12
"""Of differences in float64, where both sides take the same sums in another order."""


@pytest.fixture(scope="module")
def mamba_ssm():
    """mamba-ssm's references; its compiled scan is absent and not needed."""
    pytest.importorskip("einops")
    if "selective_scan_cuda" not in sys.modules:
        sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
    pytest.importorskip("mamba_ssm", reason="mamba-ssm is not installed (pure Python is enough)")
    from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update_ref
    from mamba_ssm.ops.triton.ssd_combined import ssd_chunk_scan_combined_ref

    return types.SimpleNamespace(
        selective_scan=selective_scan_ref,
        state_update=selective_state_update_ref,
        chunk_scan=ssd_chunk_scan_combined_ref,
        minimal_scan=ssd_minimal_discrete,
    )


def double_tensors(num_tokens, kind, shape, seed=0):
    tensors = recurrence_tensors(num_tokens, kind, shape, torch.float32, generator(seed))
    return {name: value.double() for name, value in tensors.items()}


def test_channel_scan_agrees_with_mamba_ssm(mamba_ssm):
    shape, length = (1, 24, 16, 1), 37
    tensors = double_tensors(length, "channels", shape)
    pages = state_pages(3, shape[:3], torch.float64)
    out = torch.empty_like(tensors["x"])

    state_scan(
        out,
        pages.states,
        **tensors,
        query_starts=i32([0, length]),
        initial_slots=i32([0]),
        state_slots=i32([2]),
    )
    # Their reference computes in float32 whatever it is given.
    x, dt, z = (tensors[name][:, 0].T[None].float() for name in ("x", "dt", "z"))
    B, C = (tensors[name][:, 0].T[None, None].float() for name in ("B", "C"))
    want, want_state = mamba_ssm.selective_scan(
        x,
        dt,
        tensors["A"][0].float(),
        B,
        C,
        D=tensors["D"][0].float(),
        z=z,
        delta_bias=tensors["dt_bias"][0].float(),
        delta_softplus=True,
        return_last_state=True,
    )

    assert max_error(out[:, 0], want[0].T) < 2e-5
    assert max_error(pages.states[2, 0], want_state[0]) < 2e-5


def test_head_scan_agrees_with_mamba_ssm(mamba_ssm):
    shape, length = (4, 16, 24, 2), 64
    tensors = double_tensors(length, "heads", shape)
    pages = state_pages(3, shape[:3], torch.float64)
    out = torch.empty_like(tensors["x"])

    state_scan(
        out,
        pages.states,
        **tensors,
        query_starts=i32([0, length]),
        initial_slots=i32([0]),
        state_slots=i32([2]),
    )
    # Their reference mixes step sizes in float32 with the rest, so it gets all in float32.
    x, dt, B, C, z = (tensors[name][None].float() for name in ("x", "dt", "B", "C", "z"))
    want = mamba_ssm.chunk_scan(
        x,
        dt,
        tensors["A"].float(),
        B,
        C,
        chunk_size=16,
        D=tensors["D"].float(),
        z=z,
        dt_bias=tensors["dt_bias"].float(),
        dt_softplus=True,
    )

    # Sums of 64 tokens times 24 elements, near ten, in float32: a GPU was seen to err by 7e-5.
    assert max_error(out, want[0]) < 2e-4


def test_head_scan_from_state_to_state_agrees_with_mamba_ssm(mamba_ssm):
    shape, length, kept_after = (4, 16, 24, 2), 64, 48
    tensors = double_tensors(length, "heads", shape) | {"D": None, "z": None}
    pages = state_pages(4, shape[:3], torch.float64)
    pages.states[1] = randn(shape[:3], torch.float64, generator(1))
    out = torch.empty_like(tensors["x"])

    state_scan(
        out,
        pages.states,
        **tensors,
        query_starts=i32([0, length]),
        initial_slots=i32([1]),
        state_slots=i32([2]),
        checkpoints=Checkpoints(starts=i32([0, 1]), after_tokens=i32([kept_after]), slots=i32([3])),
    )
    dt = torch.nn.functional.softplus(tensors["dt"] + tensors["dt_bias"])
    theirs = (
        tensors["x"] * dt[..., None],
        dt * tensors["A"],
        *(tensors[name].repeat_interleave(2, 1) for name in ("B", "C")),
    )
    for slot, end in ((3, kept_after), (2, length)):
        want, state = mamba_ssm.minimal_scan(
            *(tensor[None, :end] for tensor in theirs),
            block_len=16,
            initial_states=pages.states[1][None, None],
        )
        assert max_error(out[:end], want[0]) < LIMIT
        assert max_error(pages.states[slot], state[0]) < LIMIT


@pytest.mark.parametrize(
    ("kind", "shape"), [("channels", (1, 24, 16, 1)), ("heads", (4, 16, 24, 2))], ids=str
)
def test_update_agrees_with_mamba_ssm(mamba_ssm, kind, shape):
    num_heads, head_dim, d_state, _ = shape
    tensors = double_tensors(3, kind, shape)
    pages = state_pages(5, shape[:3], torch.float64)
    pages.states[1:4] = randn((3, *shape[:3]), torch.float64, generator(1))
    theirs = pages.states[1:4].clone()
    out = torch.empty_like(tensors["x"])

    state_update(
        out, pages.states, **tensors, initial_slots=i32([1, 2, 3]), state_slots=i32([1, 2, 3])
    )
    wide = (num_heads, head_dim)
    dt, dt_bias, D = tensors["dt"], tensors["dt_bias"], tensors["D"]
    if kind == "heads":
        dt, dt_bias, D = (
            value[..., None].expand(*value.shape, head_dim) for value in (dt, dt_bias, D)
        )
    rates = (
        tensors["A"] if kind == "channels" else tensors["A"][:, None, None].expand(*wide, d_state)
    )
    want = mamba_ssm.state_update(
        theirs,
        tensors["x"],
        dt,
        rates,
        tensors["B"],
        tensors["C"],
        D=D,
        z=tensors["z"],
        dt_bias=dt_bias,
        dt_softplus=True,
    )

    assert max_error(out, want) < LIMIT
    assert max_error(pages.states[1:4], theirs) < LIMIT


@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolutions_agree_with_pytorch(width):
    rng = generator(2)
    tensors = {
        name: value.double()
        for name, value in conv_tensors(20, 8, width, torch.float32, rng).items()
    }
    pages = conv_states(3, 8, width, torch.float64)
    out, stepped = (torch.empty_like(tensors["x"]) for _ in range(2))
    padded = torch.nn.functional.pad(tensors["x"].T, (width - 1, 0))
    want = torch.nn.functional.silu(
        torch.nn.functional.conv1d(
            padded[None], tensors["weight"][:, None], tensors["bias"], groups=8
        )
    )[0].T

    causal_conv(
        out,
        pages.states,
        **tensors,
        query_starts=i32([0, 20]),
        initial_slots=i32([0]),
        state_slots=i32([1]),
    )
    for token in range(20):
        conv_update(
            stepped[token : token + 1],
            pages.states,
            **(tensors | {"x": tensors["x"][token : token + 1]}),
            initial_slots=i32([2 if token else 0]),
            state_slots=i32([2]),
        )

    assert max_error(out, want) < LIMIT
    assert max_error(stepped, want) < LIMIT
    assert torch.equal(pages.states[1], pages.states[2])

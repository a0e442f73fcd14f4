"""The references of the gated delta rule agree with the rules in transformers' models."""

import pytest
import torch

from jenga_kernels.reference.recurrent.delta_scan import delta_scan
from jenga_kernels.reference.recurrent.delta_update import delta_update
from tests.kernels.delta.delta_cases import delta_states, delta_tensors
from tests.kernels.recurrent.state_cases import i32, widened
from tests.kernels.support import generator, max_error, randn

SHAPE, LENGTH = (2, 4, 32, 24), 150
LIMIT = 2e-6
"""Of outputs and states around 1; theirs compute in float32 whatever they are given."""


@pytest.fixture(scope="module")
def rules():
    """The rules of Qwen3-Next and of Kimi-Linear, whose channels decay on their own, by name."""
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    kimi_linear = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    return vars(kimi_linear) | vars(qwen3_next)


def as_theirs(tensors):
    """The tensors with a batch of one, heads repeated, and gates and betas made ready."""
    heads_per_group = tensors["v"].shape[1] // tensors["q"].shape[1]
    gates = torch.nn.functional.softplus(tensors["gates"] + tensors["dt_bias"])
    rate = tensors["A_log"].exp().reshape(-1, *[1] * (gates.dim() - 2))
    return {
        "query": tensors["q"].repeat_interleave(heads_per_group, 1)[None],
        "key": tensors["k"].repeat_interleave(heads_per_group, 1)[None],
        "value": tensors["v"][None],
        "g": -rate * gates[None],
        "beta": tensors["betas"].sigmoid()[None],
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }


def scanned(tensors, initial):
    pages = delta_states(3, SHAPE, torch.float64)
    pages.states[1] = initial
    out = torch.empty_like(tensors["v"])
    delta_scan(
        out,
        pages.states,
        **tensors,
        query_starts=i32([0, LENGTH]),
        initial_slots=i32([1]),
        state_slots=i32([2]),
    )
    return out, pages.states[2]


@pytest.mark.parametrize(
    ("rule", "channels"),
    [
        ("torch_chunk_gated_delta_rule", False),
        ("torch_recurrent_gated_delta_rule", False),
        ("chunk_kimi_delta_attention", True),
        ("recurrent_kimi_delta_attention", True),
    ],
)
def test_delta_scan_agrees_with_transformers(rules, rule, channels):
    rng = generator(0)
    tensors = widened(delta_tensors(LENGTH, SHAPE, torch.float32, rng, channels=channels))
    initial = randn((4, 24, 32), torch.float64, rng)

    got, state = scanned(tensors, initial)
    # Theirs have the elements of keys before those of values.
    want, want_state = rules[rule](**as_theirs(tensors), initial_state=initial.mT[None])

    assert max_error(got, want[0]) < LIMIT
    assert max_error(state, want_state[0].mT) < LIMIT


def test_delta_update_agrees_with_transformers(rules):
    rng = generator(1)
    tensors = widened(delta_tensors(1, SHAPE, torch.float32, rng))
    pages = delta_states(2, SHAPE, torch.float64)
    pages.states[1] = randn((4, 24, 32), torch.float64, rng)
    initial, out = pages.states[1].mT[None].clone(), torch.empty_like(tensors["v"])

    delta_update(out, pages.states, **tensors, initial_slots=i32([1]), state_slots=i32([1]))
    want, want_state = rules["torch_recurrent_gated_delta_rule"](
        **as_theirs(tensors), initial_state=initial
    )

    assert max_error(out, want[0]) < LIMIT
    assert max_error(pages.states[1], want_state[0].mT) < LIMIT


def test_equal_gates_of_all_channels_are_the_gate_of_the_head():
    rng = generator(2)
    tensors = widened(delta_tensors(LENGTH, SHAPE, torch.float32, rng))
    initial = randn((4, 24, 32), torch.float64, rng)
    wide = {
        "gates": tensors["gates"][..., None].expand(LENGTH, 4, 32).contiguous(),
        "dt_bias": tensors["dt_bias"][:, None].expand(4, 32).contiguous(),
    }

    got, state = scanned(tensors | wide, initial)
    want, want_state = scanned(tensors, initial)

    assert max_error(got, want) < 1e-12
    assert max_error(state, want_state) < 1e-12

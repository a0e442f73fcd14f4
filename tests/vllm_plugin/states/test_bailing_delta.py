"""Bailing's (Ling 3's) Kimi delta attention on our kernels: a class of its own."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from jenga_kernels.reference.recurrent.causal_conv import causal_conv as reference_conv
from tests.kernels.support import check_close, generator
from tests.vllm_plugin.states.test_gated_delta import WIDTH, bare, builder_for, scanned
from tests.vllm_plugin.states.test_mamba import (
    NAME,
    REQUESTS,
    config,  # noqa: F401 (a fixture)
    prompts,
    run_in_steps,
    state_pages,
)

pytestmark = pytest.mark.vllm

NUM_HEADS, HEAD_DIM = 2, 32
SIZE = NUM_HEADS * HEAD_DIM
SHAPES = ((WIDTH - 1, 3 * SIZE), (NUM_HEADS, HEAD_DIM, HEAD_DIM))
INPUT_SIZE = 4 * SIZE + NUM_HEADS


def bailing_layer(states=None):
    from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

    rng = generator(13)
    layer = bare(
        BailingMoeV3KimiDeltaAttention, prefix=NAME, kv_cache=states, head_dim=HEAD_DIM, tp_size=1
    )
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        weight = torch.randn(SIZE, 1, WIDTH, generator=rng)
        object.__setattr__(layer, name, SimpleNamespace(weight=weight, bias=None))
    return layer


def parts_of(inputs):
    """Split inputs: queries, keys, values, logarithms of decays by head, strengths of writing."""
    q, k, v, gates, betas = inputs.split([SIZE] * 4 + [NUM_HEADS], dim=-1)
    gates = -torch.nn.functional.softplus(gates).unflatten(-1, (NUM_HEADS, HEAD_DIM))
    return q, k, v, gates, betas.sigmoid()


def run_bailing(layer, inputs, out, metadata):
    """Run a layer on rows of all its inputs side by side."""
    from jenga.vllm_plugin.layers.recurrent.gated_delta import forward_bailing_delta

    q, k, v, gates, betas = parts_of(inputs)
    attended = out.unflatten(-1, (NUM_HEADS, HEAD_DIM))[None]
    forward_bailing_delta(layer, q, k, v, gates[None], betas[None], attended, metadata)


def plain_bailing(inputs, dtype):
    """One request in one piece, by the references: outputs and last states."""
    layer, (q, k, v, gates, betas) = bailing_layer(), parts_of(inputs.to(dtype))
    starts = torch.tensor([0, len(inputs)], dtype=torch.int32)
    null, one = torch.tensor([[0], [1]], dtype=torch.int32)
    outputs, conv_states = [], []
    for x, conv1d in zip((q, k, v), (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), strict=True):
        states, out = torch.zeros(2, SIZE, WIDTH - 1, dtype=dtype), torch.empty_like(x)
        reference_conv(out, states, x, conv1d.weight[:, 0].to(dtype), starts, null, one)
        outputs.append(out.unflatten(-1, (NUM_HEADS, HEAD_DIM)))
        conv_states.append(states[1])
    out, state = scanned(*outputs, gates, betas)
    return out, (torch.cat(conv_states).T, state)


def test_a_layer_cut_anywhere_errs_no_more_than_plain_pytorch(config):  # noqa: F811
    inputs, layer = prompts(INPUT_SIZE), bailing_layer(state_pages(SHAPES))

    builder = builder_for(layer, config, SHAPES)
    ours = run_in_steps(partial(run_bailing, layer), builder, inputs, SIZE)

    for name, (page, _, _) in REQUESTS.items():
        exact, exact_states = plain_bailing(inputs[name], torch.float64)
        naive, naive_states = plain_bailing(inputs[name], torch.float32)
        check_close(ours[name], exact, naive)
        for index in range(2):
            check_close(layer.kv_cache[index][page], exact_states[index], naive_states[index])


def test_the_name_that_vllms_layer_calls_leads_here(config, monkeypatch):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent import recurrence as recurrent
    from jenga.vllm_plugin.patches.all_patches import apply_worker_replacements

    apply_worker_replacements()
    layer, inputs = bailing_layer(state_pages(SHAPES)), prompts(INPUT_SIZE)
    builder = builder_for(layer, config, SHAPES)

    def forward(rows, out, metadata):
        context = SimpleNamespace(attn_metadata={NAME: metadata})
        monkeypatch.setattr(recurrent, "get_forward_context", lambda: context)
        q, k, v, gates, betas = parts_of(rows)
        attended = out.unflatten(-1, (NUM_HEADS, HEAD_DIM))[None]
        # As vLLM's operation does.
        layer._forward(
            q_proj_states=q,
            k_proj_states=k,
            v_proj_states=v,
            g1=gates[None],
            beta=betas[None],
            core_attn_out=attended,
        )

    ours = run_in_steps(forward, builder, inputs, SIZE)
    layer.kv_cache = state_pages(SHAPES)
    wanted = run_in_steps(partial(run_bailing, layer), builder, inputs, SIZE)

    assert all(torch.equal(ours[request], wanted[request]) for request in REQUESTS)

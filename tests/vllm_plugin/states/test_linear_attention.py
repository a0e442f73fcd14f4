"""Linear attention of vLLM (Ling 2.5) on our kernels: numerics, cuts anywhere, states, drafts."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.support import check_close, generator
from tests.vllm_plugin.states import test_drafted_states as drafting
from tests.vllm_plugin.states.test_drafted_states import config as drafting_config  # noqa: F401
from tests.vllm_plugin.states.test_gated_delta import bare
from tests.vllm_plugin.states.test_mamba import (
    NAME,
    REQUESTS,
    config,  # noqa: F401 (a fixture)
    prompts,
    run_in_steps,
    state_pages,
)

pytestmark = pytest.mark.vllm

HIDDEN, NUM_HEADS, HEAD_DIM = 48, 3, 32
INNER = NUM_HEADS * HEAD_DIM
SHAPES = ((NUM_HEADS, HEAD_DIM, HEAD_DIM),)
EPS = 1e-5
OPTIONS = {
    "plain": {},
    "normed_and_rotated": {"use_qk_norm": True, "linear_rope": True},
    "silu_and_norms_of_groups": {"linear_silu": True, "group_norm_size": 3},
}


class Rotation:
    """Rotates pairs of elements of a head by its position; in the dtype of what it is given."""

    def __call__(self, positions, q, k):
        angles = positions.to(q.dtype)[:, None] * torch.linspace(0.1, 1, HEAD_DIM // 2).to(q.dtype)
        sin, cos = angles.sin()[:, None], angles.cos()[:, None]

        def rotated(x):
            first, second = x.unflatten(-1, (NUM_HEADS, 2, HEAD_DIM // 2)).unbind(2)
            parts = (first * cos - second * sin, second * cos + first * sin)
            return torch.cat(parts, -1).flatten(-2)

        return rotated(q), rotated(k)


def rms_normed(x, weight):
    """Norm along the last dimension, as PyTorch has it."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), EPS)


def linear_layer(states=None, dtype=torch.float32, **options):
    from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import (
        BailingMoELinearAttention,
    )
    from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import (
        MiniMaxText01LinearAttention,
    )

    rng = generator(11)

    def linear(rows, columns):
        weight = (torch.randn(rows, columns, generator=rng) / columns**0.5).to(dtype)
        return lambda x: (x.to(dtype) @ weight.T, None)

    def weight(size):
        return 0.5 + torch.rand(size, generator=rng)

    chosen = {"linear_silu": False, "use_qk_norm": False, "linear_rope": False} | options
    num_groups = chosen.setdefault("group_norm_size", 1)
    norm_weight = weight(INNER)

    def g_norm(x, gate=None):
        groups = norm_weight.unflatten(0, (num_groups, -1))
        normed = rms_normed(x.unflatten(-1, (num_groups, -1)), torch.ones(INNER // num_groups))
        normed = (normed * groups.to(x.dtype)).flatten(-2)
        return normed if gate is None else normed * gate.sigmoid()

    layer = bare(
        BailingMoELinearAttention,
        prefix=NAME,
        kv_cache=states,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        linear_scale=True,
        scaling=HEAD_DIM**-0.5,
        tp_slope=MiniMaxText01LinearAttention._build_slope_tensor(NUM_HEADS) * 0.8,
        **chosen,
    )
    for name, value in {
        "query_key_value": linear(3 * INNER, HIDDEN),
        "g_proj": linear(INNER, HIDDEN),
        "dense": linear(HIDDEN, INNER),
        "query_layernorm": SimpleNamespace(weight=weight(HEAD_DIM)),
        "key_layernorm": SimpleNamespace(weight=weight(HEAD_DIM)),
        "g_norm": g_norm,
        "rotary_emb": Rotation(),
    }.items():
        object.__setattr__(layer, name, value)
    return layer


def plain_linear(hidden, dtype, **options):
    """One request token by token, as vLLM's kernel for steps: outputs and the last state."""
    layer = linear_layer(dtype=dtype, **options)
    qkv = layer.query_key_value(hidden)[0]
    if layer.linear_silu:
        qkv = torch.nn.functional.silu(qkv)
    q, k, v = qkv.split(INNER, dim=-1)
    if layer.use_qk_norm:
        q, k = (
            rms_normed(part.unflatten(-1, (NUM_HEADS, -1)), norm.weight).flatten(-2)
            for part, norm in ((q, layer.query_layernorm), (k, layer.key_layernorm))
        )
    if layer.linear_rope:
        q, k = layer.rotary_emb(torch.arange(len(hidden)), q, k)
    q, k, v = (part.unflatten(-1, (NUM_HEADS, -1)) for part in (q * layer.scaling, k, v))
    decays = (-layer.tp_slope.to(dtype)).exp()  # [NUM_HEADS, 1, 1]
    state, outputs = torch.zeros(NUM_HEADS, HEAD_DIM, HEAD_DIM, dtype=dtype), []
    for token in range(len(hidden)):
        state = decays * state + k[token][:, :, None] * v[token][:, None, :]
        outputs.append((q[token][:, None, :] @ state).flatten())
    attended, gate = torch.stack(outputs), layer.g_proj(hidden)[0]
    normed = layer.g_norm(attended, gate) if layer.group_norm_size > 1 else layer.g_norm(attended)
    if layer.group_norm_size == 1:
        normed = gate.sigmoid() * normed
    return layer.dense(normed)[0], state.mT  # ours have a row for each element of a value


def builder_for(engine_config):
    from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import (
        BailingMoELinearAttention,
    )
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from jenga.vllm_plugin.patches.all_patches import apply_worker_replacements

    apply_worker_replacements()
    context, layer = engine_config.compilation_config.static_forward_context, linear_layer()
    spec = MambaSpec(
        block_size=256,
        shapes=SHAPES,
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.LINEAR,
    )
    context[NAME] = layer
    try:
        make = BailingMoELinearAttention.get_attn_backend(layer).get_builder_cls()
        return make(spec, [NAME], engine_config, torch.device("cpu"))
    finally:
        del context[NAME]


def with_positions(inputs):
    """Put the number of each token before its inputs."""
    return {
        name: torch.cat([torch.arange(len(x))[:, None].to(x.dtype), x], dim=1)
        for name, x in inputs.items()
    }


def run_linear(layer, inputs, out, metadata):
    """Run a layer on rows of a position and inputs, its slopes lost as in deep sleep."""
    from jenga.vllm_plugin.layers.recurrent.linear_attention import (
        forward_linear_attention,
        keep_rates,
    )

    keep_rates(layer)
    layer.tp_slope.fill_(float("nan"))
    forward_linear_attention(layer, inputs[:, 1:], out, inputs[:, 0].long(), metadata)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_linear_attention_cut_anywhere_errs_no_more_than_plain_pytorch(options, config):  # noqa: F811
    inputs, layer = prompts(HIDDEN), linear_layer(state_pages(SHAPES), **options)

    ours = run_in_steps(
        partial(run_linear, layer), builder_for(config), with_positions(inputs), HIDDEN
    )

    for name, (page, _, _) in REQUESTS.items():
        exact, exact_state = plain_linear(inputs[name], torch.float64, **options)
        naive, naive_state = plain_linear(inputs[name], torch.float32, **options)
        check_close(ours[name], exact, naive)
        check_close(layer.kv_cache[0][page], exact_state, naive_state)


def test_states_kept_on_the_way_are_those_of_a_prompt_that_ends_there(config):  # noqa: F811
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    inputs, layer = prompts(HIDDEN), linear_layer(state_pages(SHAPES))
    # (request, tokens, page): in a first chunk, two in one, at the end of one.
    wanted = [("a", 16, 1), ("c", 16, 3), ("c", 32, 6), ("d", 32, 7), ("c", 80, 8), ("c", 89, 10)]

    def order(rows):
        writes = tuple(
            CheckpointWrite(running_page=row[1], after_tokens=tokens - row[2], page=page)
            for name, tokens, page in wanted
            for row in rows
            if row[5] == name and row[2] < tokens <= row[2] + row[3]
        )
        if writes:
            builder.mailbox.deliver([], 1, StepOrders(copies=(), checkpoints={NAME: writes}))

    builder = builder_for(config)
    run_in_steps(
        partial(run_linear, layer), builder, with_positions(inputs), HIDDEN, before_step=order
    )

    for name, tokens, page in wanted:
        _, exact = plain_linear(inputs[name][:tokens], torch.float64)
        _, naive = plain_linear(inputs[name][:tokens], torch.float32)
        check_close(layer.kv_cache[0][page], exact, naive)


@pytest.mark.parametrize(
    "order", [drafting.in_order_of_first_runner, drafting.in_order_of_second_runner]
)
def test_random_drafts_in_random_batches_leave_no_trace(order, drafting_config):  # noqa: F811
    source = random.Random(5)
    requests = drafting.requests_of(drafting.LENGTHS, HIDDEN)
    inputs = {request.name: request.inputs for request in requests}
    for request in requests:
        request.inputs = with_positions(inputs)[request.name]
    num_pages = drafting.KEPT_PAGE + 1 + drafting.SLOTS * len(requests)
    layer = linear_layer(state_pages(SHAPES, num_pages=num_pages))
    builder, forward = builder_for(drafting_config), partial(run_linear, layer)

    while running := [each for each in requests if each.done < len(each.inputs)]:
        rows = [drafting.row_of(each, source) for each in running if source.random() < 0.8]
        if rows:
            drafting.run_step(forward, builder, sorted(rows, key=order), HIDDEN)

    for request in requests:
        exact, exact_state = plain_linear(inputs[request.name], torch.float64)
        naive, naive_state = plain_linear(inputs[request.name], torch.float32)
        check_close(torch.cat(request.outputs), exact, naive)
        page = request.pages[request.done % drafting.SLOTS]
        check_close(layer.kv_cache[0][page], exact_state, naive_state)


def test_vllms_own_operations_serve_the_layers_where_the_backend_is_not_selected(config):  # noqa: F811
    from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadataBuilder

    from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadataBuilder

    ours = builder_for(config)
    selected = config.attention_config.backend
    config.attention_config.backend = None
    try:
        stock = builder_for(config)
    finally:
        config.attention_config.backend = selected

    assert isinstance(ours, JengaMambaMetadataBuilder)
    assert isinstance(stock, BailingLinearAttentionMetadataBuilder)


def test_the_name_that_vllms_layer_calls_leads_here(config, monkeypatch):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent import recurrence as recurrent

    layer, inputs = linear_layer(state_pages(SHAPES)), with_positions(prompts(HIDDEN))
    builder = builder_for(config)

    layer.get_attn_backend()  # as vLLM does before any step
    layer.tp_slope.fill_(float("nan"))

    def forward(rows, out, metadata):
        context = SimpleNamespace(attn_metadata={NAME: metadata})
        monkeypatch.setattr(recurrent, "get_forward_context", lambda: context)
        # As vLLM's operation does.
        layer._forward(hidden_states=rows[:, 1:], output=out, positions=rows[:, 0].long())

    ours = run_in_steps(forward, builder, inputs, HIDDEN)
    layer.kv_cache = state_pages(SHAPES)
    wanted = run_in_steps(partial(run_linear, layer), builder, inputs, HIDDEN)

    assert all(torch.equal(ours[request], wanted[request]) for request in REQUESTS)

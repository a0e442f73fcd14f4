"""Short convolutions of vLLM on our kernels: numerics, cuts anywhere, states kept, drafts."""

import inspect
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from jenga_kernels.reference.recurrent.causal_conv import causal_conv as reference_conv
from tests.kernels.support import check_close, generator
from tests.vllm_plugin.states import test_drafted_states as drafting
from tests.vllm_plugin.states.test_drafted_states import config as drafting_config  # noqa: F401
from tests.vllm_plugin.states.test_gated_delta import bare
from tests.vllm_plugin.states.test_mamba import (
    NAME,
    REQUESTS,
    config,  # noqa: F401 (a fixture)
    our_builder,
    prompts,
    run_in_steps,
    state_pages,
    state_spec,
)

pytestmark = pytest.mark.vllm

DIM, HIDDEN, WIDTH = 96, 64, 3
SHAPES = ((WIDTH - 1, DIM),)


def short_conv_layer(states=None, dtype=torch.float32, *, has_bias=True):
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    rng = generator(9)

    def linear(rows, columns):
        weight = (torch.randn(rows, columns, generator=rng) / columns**0.5).to(dtype)
        return lambda x: (x @ weight.T, None)

    weight = torch.randn(DIM, 1, WIDTH, generator=rng).to(dtype)
    bias = torch.randn(DIM, generator=rng).to(dtype) if has_bias else None
    layer = bare(ShortConv, prefix=NAME, kv_cache=states)
    for name, value in {
        "in_proj": linear(3 * DIM, HIDDEN),
        "out_proj": linear(HIDDEN, DIM),
        "conv": SimpleNamespace(weight=weight, bias=bias),
    }.items():
        object.__setattr__(layer, name, value)
    return layer


def plain_short_conv(hidden, dtype, *, has_bias=True):
    """One request by the reference, in one piece: outputs and last state."""
    layer = short_conv_layer(dtype=dtype, has_bias=has_bias)
    gate_in, gate_out, x = layer.in_proj(hidden.to(dtype))[0].chunk(3, dim=-1)
    states = torch.zeros(2, DIM, WIDTH - 1, dtype=dtype)
    starts = torch.tensor([0, len(hidden)], dtype=torch.int32)
    null, one = torch.tensor([[0], [1]], dtype=torch.int32)
    out, weight = torch.empty_like(x), layer.conv.weight[:, 0]
    reference_conv(
        out,
        states,
        gate_in * x,
        weight,
        starts,
        null,
        one,
        bias=layer.conv.bias,
        silu=False,
    )
    return layer.out_proj(gate_out * out)[0], states[1].T


def builder_for(layer, engine_config):
    context = engine_config.compilation_config.static_forward_context
    context[NAME] = layer
    try:
        return our_builder(engine_config, SHAPES, "SHORT_CONV")
    finally:
        del context[NAME]


def stock_short_conv(engine_config, inputs, monkeypatch, *, has_bias):
    """What vLLM's own layer gives, with its own operations."""
    from vllm.model_executor.layers.mamba import short_conv
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

    layer = short_conv_layer((torch.zeros(12, *SHAPES[0]),), has_bias=has_bias)
    original = inspect.unwrap(short_conv.ShortConv.forward_native)

    def forward(hidden, out, metadata):
        context = SimpleNamespace(attn_metadata={NAME: metadata})
        monkeypatch.setattr(short_conv, "get_forward_context", lambda: context)
        original(layer, hidden, out)

    builder = ShortConvAttentionMetadataBuilder(
        state_spec(SHAPES), [NAME], engine_config, torch.device("cpu")
    )
    return run_in_steps(forward, builder, inputs, HIDDEN), layer.kv_cache[0]


@pytest.mark.parametrize("has_bias", [False, True])
def test_short_convolution_cut_anywhere_errs_no_more_than_vllms_own(
    has_bias,
    config,  # noqa: F811
    monkeypatch,
):
    from jenga.vllm_plugin.layers.recurrent.short_conv import forward_short_conv

    inputs = prompts(HIDDEN)
    stock, stock_states = stock_short_conv(config, inputs, monkeypatch, has_bias=has_bias)
    layer = short_conv_layer(state_pages(SHAPES), has_bias=has_bias)

    ours = run_in_steps(
        partial(forward_short_conv, layer), builder_for(layer, config), inputs, HIDDEN
    )

    for name, (page, _, _) in REQUESTS.items():
        exact, exact_state = plain_short_conv(inputs[name], torch.float64, has_bias=has_bias)
        check_close(ours[name], exact, stock[name])
        check_close(layer.kv_cache[0][page], exact_state, stock_states[page])


def test_states_kept_on_the_way_are_those_of_a_prompt_that_ends_there(config):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent.short_conv import forward_short_conv
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    inputs = prompts(HIDDEN)
    layer = short_conv_layer(state_pages(SHAPES))
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

    builder = builder_for(layer, config)
    run_in_steps(partial(forward_short_conv, layer), builder, inputs, HIDDEN, before_step=order)

    for name, tokens, page in wanted:
        _, exact = plain_short_conv(inputs[name][:tokens], torch.float64)
        _, naive = plain_short_conv(inputs[name][:tokens], torch.float32)
        check_close(layer.kv_cache[0][page], exact, naive)
    # Nothing else was written but the running states and what was to be kept.
    untouched = set(range(12)) - {page for page, _, _ in REQUESTS.values()}
    for page in untouched - {page for _, _, page in wanted}:
        assert layer.kv_cache[0][page].isnan().all()


@pytest.mark.parametrize(
    "order", [drafting.in_order_of_first_runner, drafting.in_order_of_second_runner]
)
def test_random_drafts_in_random_batches_leave_no_trace(order, drafting_config):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent.short_conv import forward_short_conv

    source = random.Random(5)
    requests = drafting.requests_of(drafting.LENGTHS, HIDDEN)
    num_pages = drafting.KEPT_PAGE + 1 + drafting.SLOTS * len(requests)
    layer = short_conv_layer(state_pages(SHAPES, num_pages=num_pages))
    builder = builder_for(layer, drafting_config)
    forward = partial(forward_short_conv, layer)

    while running := [each for each in requests if each.done < len(each.inputs)]:
        rows = [drafting.row_of(each, source) for each in running if source.random() < 0.8]
        if rows:
            drafting.run_step(forward, builder, sorted(rows, key=order), HIDDEN)

    for request in requests:
        exact, exact_state = plain_short_conv(request.inputs, torch.float64)
        naive, naive_state = plain_short_conv(request.inputs, torch.float32)
        check_close(torch.cat(request.outputs), exact, naive)
        page = request.pages[request.done % drafting.SLOTS]
        check_close(layer.kv_cache[0][page], exact_state, naive_state)


def test_weights_that_vllm_reordered_for_its_cpu_are_read_as_they_were(config):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent.short_conv import forward_short_conv

    def run(layer):
        builder = builder_for(layer, config)
        return run_in_steps(partial(forward_short_conv, layer), builder, prompts(HIDDEN), HIDDEN)

    layer = short_conv_layer(state_pages(SHAPES))
    wanted = run(layer)
    layer.kv_cache = state_pages(SHAPES)
    layer.conv._cpu_unpacked_conv_weight = layer.conv.weight[:, 0]
    layer.conv.weight = layer.conv.weight.flip(0)
    ours = run(layer)

    assert all(torch.equal(ours[name], wanted[name]) for name in REQUESTS)


def test_vllms_own_operations_serve_layers_that_are_not_known_or_not_selected(config):  # noqa: F811
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

    from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadataBuilder

    layer = short_conv_layer()
    ours = builder_for(layer, config)
    unknown = builder_for(SimpleNamespace(), config)  # vLLM has more layers of the kind
    selected = config.attention_config.backend
    config.attention_config.backend = None
    try:
        stock = builder_for(layer, config)
    finally:
        config.attention_config.backend = selected

    assert isinstance(ours, JengaMambaMetadataBuilder)
    assert isinstance(unknown, ShortConvAttentionMetadataBuilder)
    assert isinstance(stock, ShortConvAttentionMetadataBuilder)


@pytest.mark.parametrize("name", ["forward_native", "forward_cuda"])
def test_the_names_that_vllms_layer_calls_lead_here(name, config, monkeypatch):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent import recurrence as recurrent
    from jenga.vllm_plugin.layers.recurrent.short_conv import forward_short_conv
    from jenga.vllm_plugin.patches.all_patches import apply_worker_replacements

    apply_worker_replacements()
    layer, inputs = short_conv_layer(state_pages(SHAPES)), prompts(HIDDEN)
    builder = builder_for(layer, config)

    def forward(hidden, out, metadata):
        context = SimpleNamespace(attn_metadata={NAME: metadata})
        monkeypatch.setattr(recurrent, "get_forward_context", lambda: context)
        getattr(layer, name)(hidden_states=hidden, output=out)  # as vLLM's operation does

    ours = run_in_steps(forward, builder, inputs, HIDDEN)
    layer.kv_cache = state_pages(SHAPES)
    wanted = run_in_steps(partial(forward_short_conv, layer), builder, inputs, HIDDEN)

    assert all(torch.equal(ours[request], wanted[request]) for request in REQUESTS)

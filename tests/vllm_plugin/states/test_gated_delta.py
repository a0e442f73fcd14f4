"""Layers of the gated delta rule of vLLM on our kernels: numerics, cuts anywhere, states kept."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from jenga_kernels.reference.recurrent.causal_conv import causal_conv as reference_conv
from jenga_kernels.reference.recurrent.delta_scan import delta_scan as reference_scan
from tests.kernels.support import check_close, generator
from tests.vllm_plugin.states.test_mamba import (
    NAME,
    REQUESTS,
    config,  # noqa: F401 (a fixture)
    our_builder,
    prompts,
    run_in_steps,
    scan_options,
    state_pages,
    state_spec,
)
from tests.vllm_plugin.trials.test_tried_kernels import NOT_PASSED, set_kernels, settle_kernels

pytestmark = pytest.mark.vllm

WIDTH, NUM_QK_HEADS, NUM_V_HEADS, HEAD_K_DIM, HEAD_V_DIM = 4, 2, 4, 64, 32
KEY_DIM, VALUE_DIM = NUM_QK_HEADS * HEAD_K_DIM, NUM_V_HEADS * HEAD_V_DIM
INPUT_DIM = 2 * KEY_DIM + VALUE_DIM + 2 * NUM_V_HEADS
KIMI_HEADS, KIMI_DIM = 2, 32
KIMI_SHAPES = ((WIDTH - 1, 3 * KIMI_HEADS * KIMI_DIM), (KIMI_HEADS, KIMI_DIM, KIMI_DIM))


def bare(layer_class, **attributes):
    """A layer of vLLM's with nothing but these attributes."""
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def weights(num_heads, conv_dim, bias_shape, dtype):
    rng = generator(7)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=rng)

    conv1d = torch.nn.Conv1d(conv_dim, conv_dim, WIDTH, groups=conv_dim, bias=False)
    conv1d.weight.data = torch.randn(conv_dim, 1, WIDTH, generator=rng).to(dtype)
    return {
        "prefix": NAME,
        "tp_size": 1,
        "activation": "silu",
        "conv1d": conv1d.requires_grad_(requires_grad=False),
        "A_log": uniform(-4, 1, num_heads),
        "dt_bias": uniform(-1, 1, *bias_shape).to(dtype),
    }


def shapes_of(head_v_dim):
    conv_dim = 2 * KEY_DIM + NUM_V_HEADS * head_v_dim
    return ((WIDTH - 1, conv_dim), (NUM_V_HEADS, head_v_dim, HEAD_K_DIM))


SHAPES = shapes_of(HEAD_V_DIM)


def gated_delta_layer(states=None, dtype=torch.float32, head_v_dim=HEAD_V_DIM):
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    return bare(
        QwenGatedDeltaNetAttention,
        **weights(NUM_V_HEADS, shapes_of(head_v_dim)[0][1], (NUM_V_HEADS,), dtype),
        kv_cache=states,
        key_dim=KEY_DIM,
        value_dim=NUM_V_HEADS * head_v_dim,
        head_k_dim=HEAD_K_DIM,
        head_v_dim=head_v_dim,
    )


def kimi_layer(states=None, *, lower_bound=None):
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
        KimiGatedDeltaNetAttention,
    )

    size = KIMI_HEADS * KIMI_DIM
    return bare(
        KimiGatedDeltaNetAttention,
        **weights(KIMI_HEADS, 3 * size, (size,), torch.float32),
        kv_cache=states,
        head_dim=KIMI_DIM,
        gate_lower_bound=lower_bound,
    )


def parts_of(layer, inputs):
    """Split a gated delta net's inputs: mixed_qkv, b, a."""
    return inputs.split([2 * layer.key_dim + layer.value_dim, NUM_V_HEADS, NUM_V_HEADS], dim=-1)


def run_gated_delta(layer, inputs, out, metadata):
    """Run a layer on rows of mixed_qkv, b and a side by side."""
    from jenga.vllm_plugin.layers.recurrent.gated_delta import forward_gated_delta

    heads = out.unflatten(-1, (NUM_V_HEADS, layer.head_v_dim))
    forward_gated_delta(layer, *parts_of(layer, inputs), heads, metadata)


def run_kimi(layer, inputs, out, metadata):
    """Run a layer on rows of mixed_qkv, gates and betas side by side."""
    from jenga.vllm_plugin.layers.recurrent.gated_delta import forward_kimi_delta

    size = KIMI_HEADS * KIMI_DIM
    mixed_qkv, gates, betas = inputs.split([3 * size, size, KIMI_HEADS], dim=-1)
    heads = (KIMI_HEADS, KIMI_DIM)
    forward_kimi_delta(
        layer, mixed_qkv, gates.unflatten(-1, heads), betas, out.unflatten(-1, heads), metadata
    )


def builder_for(layer, engine_config, shapes):
    context = engine_config.compilation_config.static_forward_context
    context[NAME] = layer
    try:
        return our_builder(engine_config, shapes, "GDN_ATTN")
    finally:
        del context[NAME]


def convolved(layer, mixed_qkv, dtype):
    """Convolve one request by the reference: outputs, and the state after it."""
    states = torch.zeros(2, mixed_qkv.shape[1], WIDTH - 1, dtype=dtype)
    starts = torch.tensor([0, len(mixed_qkv)], dtype=torch.int32)
    null, one = torch.tensor([[0], [1]], dtype=torch.int32)
    x = mixed_qkv.to(dtype)
    out = torch.empty_like(x)
    reference_conv(out, states, x, layer.conv1d.weight[:, 0].to(dtype), starts, null, one)
    return out, states[1].T


def scanned(q, k, v, gates, betas):
    """Apply the rule to one request by the reference: outputs, and the state after it."""
    states = torch.zeros(2, *v.shape[1:], k.shape[2], dtype=v.dtype)
    starts = torch.tensor([0, len(v)], dtype=torch.int32)
    null, one = torch.tensor([[0], [1]], dtype=torch.int32)
    out = torch.empty_like(v)
    reference_scan(out, states, q, k, v, gates, betas, starts, null, one)
    return out.flatten(1), states[1]


def plain_gated_delta(inputs, dtype, *, layer=None, greatest_beta=1.0):
    """One request in one piece: outputs and last states, with gates and betas in plain words."""
    layer = layer or gated_delta_layer()
    mixed_qkv, b, a = parts_of(layer, inputs)
    x, conv_state = convolved(layer, mixed_qkv, dtype)
    q, k, v = x.split([KEY_DIM, KEY_DIM, layer.value_dim], dim=-1)
    rates, bias = layer.A_log.to(dtype).exp(), layer.dt_bias.to(dtype)
    out, state = scanned(
        q.unflatten(1, (NUM_QK_HEADS, HEAD_K_DIM)),
        k.unflatten(1, (NUM_QK_HEADS, HEAD_K_DIM)),
        v.unflatten(1, (NUM_V_HEADS, layer.head_v_dim)),
        -rates * torch.nn.functional.softplus(a.to(dtype) + bias),
        greatest_beta * b.to(dtype).sigmoid(),
    )
    return out, (conv_state, state)


def plain_kimi(inputs, dtype, *, lower_bound=None):
    """One request in one piece: outputs and last states, with gates and betas in plain words."""
    layer, size = kimi_layer(), KIMI_HEADS * KIMI_DIM
    mixed_qkv, gates, betas = inputs.split([3 * size, size, KIMI_HEADS], dim=-1)
    x, conv_state = convolved(layer, mixed_qkv, dtype)
    q, k, v = (part.unflatten(1, (KIMI_HEADS, KIMI_DIM)) for part in x.split(size, dim=-1))
    rates = layer.A_log.to(dtype).exp()[:, None]
    gates = (gates.to(dtype) + layer.dt_bias.to(dtype)).unflatten(1, (KIMI_HEADS, KIMI_DIM))
    if lower_bound is None:
        gates = -rates * torch.nn.functional.softplus(gates)
    else:
        gates = lower_bound * (rates * gates).sigmoid()
    out, state = scanned(q, k, v, gates, betas.to(dtype).sigmoid())
    return out, (conv_state, state)


def check_against_plain(ours, layer, inputs, plain):
    """Check outputs and last states of all requests against the references."""
    for name, (page, _, _) in REQUESTS.items():
        exact, exact_states = plain(inputs[name], torch.float64)
        naive, naive_states = plain(inputs[name], torch.float32)
        check_close(ours[name], exact, naive)
        for index in range(2):
            check_close(layer.kv_cache[index][page], exact_states[index], naive_states[index])


@pytest.mark.parametrize("has_negative_eigenvalues", [False, True])
def test_gated_delta_layer_cut_anywhere_errs_no_more_than_plain_pytorch(
    config,  # noqa: F811
    has_negative_eigenvalues,
):
    inputs = prompts(INPUT_DIM)
    layer = gated_delta_layer(state_pages(SHAPES))
    layer.allow_neg_eigval = has_negative_eigenvalues

    ours = run_in_steps(
        partial(run_gated_delta, layer), builder_for(layer, config, SHAPES), inputs, VALUE_DIM
    )

    plain = partial(plain_gated_delta, greatest_beta=2.0 if has_negative_eigenvalues else 1.0)
    check_against_plain(ours, layer, inputs, plain)


@pytest.mark.parametrize("setting", ["1", "0", "", NOT_PASSED])
def test_prompts_are_scanned_by_the_kernels_that_are_asked_for(
    setting,
    config,  # noqa: F811
    monkeypatch,
):
    from jenga.vllm_plugin.layers.recurrent import gated_delta

    set_kernels(monkeypatch, "JENGA_SPECIALIZED_SCANS", setting)
    layer = gated_delta_layer(state_pages(SHAPES))
    forward, builder = partial(run_gated_delta, layer), builder_for(layer, config, SHAPES)
    settle_kernels(builder, setting)

    asked = scan_options(
        gated_delta.DeltaRule,
        partial(run_in_steps, forward, builder, prompts(INPUT_DIM), VALUE_DIM),
        monkeypatch,
    )

    assert len(asked) == 4
    expected = {"1": False, "": None}.get(setting, True)
    assert {options["is_portable"] for options in asked} == {expected}


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kimi_delta_layer_cut_anywhere_errs_no_more_than_plain_pytorch(
    config,  # noqa: F811
    lower_bound,
):
    size = KIMI_HEADS * KIMI_DIM
    inputs = prompts(4 * size + KIMI_HEADS)
    layer = kimi_layer(state_pages(KIMI_SHAPES), lower_bound=lower_bound)

    ours = run_in_steps(
        partial(run_kimi, layer), builder_for(layer, config, KIMI_SHAPES), inputs, size
    )

    check_against_plain(ours, layer, inputs, partial(plain_kimi, lower_bound=lower_bound))


def stock_gated_delta(engine_config, inputs, shapes):
    """What vLLM's own layer gives on the CPU, which takes bfloat16 and square states alone."""
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _cpu_gdn_attention_nonspec
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    states = tuple(torch.zeros(12, *shape, dtype=torch.bfloat16) for shape in shapes)
    layer = gated_delta_layer(states, torch.bfloat16, HEAD_K_DIM)
    dispatch_cpu_unquantized_gemm(layer.conv1d, remove_weight=False)

    def forward(x, out, metadata):
        num_tokens = metadata.num_actual_tokens
        heads = torch.empty(num_tokens, NUM_V_HEADS, HEAD_K_DIM, dtype=torch.bfloat16)
        parts = parts_of(layer, x[:num_tokens].bfloat16())
        _cpu_gdn_attention_nonspec(layer, metadata, *parts, heads)
        out[:num_tokens] = heads.flatten(1)

    spec = state_spec(shapes)
    builder = GDNAttentionMetadataBuilder(spec, [NAME], engine_config, torch.device("cpu"))
    return run_in_steps(forward, builder, inputs, layer.value_dim)


def test_gated_delta_layer_in_bfloat16_errs_no_more_than_vllms_own(config):  # noqa: F811
    shapes = shapes_of(HEAD_K_DIM)
    pages = tuple(pages.bfloat16() for pages in state_pages(shapes))
    layer = gated_delta_layer(pages, torch.bfloat16, HEAD_K_DIM)
    inputs = prompts(shapes[0][1] + 2 * NUM_V_HEADS)
    inputs = {name: x.bfloat16().float() for name, x in inputs.items()}

    def forward(x, out, metadata):
        half = torch.full(out.shape, float("nan"), dtype=torch.bfloat16)
        run_gated_delta(layer, x.bfloat16(), half, metadata)
        out.copy_(half)

    builder = builder_for(layer, config, shapes)
    ours = run_in_steps(forward, builder, inputs, layer.value_dim)

    stock = stock_gated_delta(config, inputs, shapes)
    for name in REQUESTS:
        exact, _ = plain_gated_delta(inputs[name], torch.float64, layer=layer)
        check_close(ours[name], exact, stock[name])


def test_states_kept_on_the_way_are_those_of_a_prompt_that_ends_there(config):  # noqa: F811
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    inputs = prompts(INPUT_DIM)
    layer = gated_delta_layer(state_pages(SHAPES))
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

    builder = builder_for(layer, config, SHAPES)
    run_in_steps(partial(run_gated_delta, layer), builder, inputs, VALUE_DIM, before_step=order)

    for name, tokens, page in wanted:
        _, exact = plain_gated_delta(inputs[name][:tokens], torch.float64)
        _, naive = plain_gated_delta(inputs[name][:tokens], torch.float32)
        for index in range(2):
            check_close(layer.kv_cache[index][page], exact[index], naive[index])
    # Nothing else was written but the running states and what was to be kept.
    untouched = set(range(12)) - {page for page, _, _ in REQUESTS.values()}
    for page in untouched - {page for _, _, page in wanted}:
        assert all(state[page].isnan().all() for state in layer.kv_cache)


def test_vllms_own_operations_serve_layers_that_are_not_known_or_not_selected(config):  # noqa: F811
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadataBuilder

    layer = gated_delta_layer()
    ours = builder_for(layer, config, SHAPES)
    unknown = builder_for(SimpleNamespace(), config, SHAPES)
    selected = config.attention_config.backend
    config.attention_config.backend = None
    try:
        stock = builder_for(layer, config, SHAPES)
    finally:
        config.attention_config.backend = selected

    assert isinstance(ours, JengaMambaMetadataBuilder)
    assert isinstance(unknown, GDNAttentionMetadataBuilder)
    assert isinstance(stock, GDNAttentionMetadataBuilder)


def test_the_names_that_vllms_layers_call_lead_here(config, monkeypatch):  # noqa: F811
    from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
        OlmoHybridGatedDeltaNetAttention,
    )
    from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated

    from jenga.vllm_plugin.layers.recurrent import recurrence as recurrent
    from jenga.vllm_plugin.patches.all_patches import apply_worker_replacements

    apply_worker_replacements()

    def in_step(forward):
        def run(inputs, out, metadata):
            context = SimpleNamespace(attn_metadata={NAME: metadata})
            monkeypatch.setattr(recurrent, "get_forward_context", lambda: context)
            forward(inputs, out)

        return run

    def check(layer, call, expected, shapes, inputs, out_size):
        builder = builder_for(layer, config, shapes)
        layer.kv_cache = state_pages(shapes)
        ours = run_in_steps(in_step(call), builder, inputs, out_size)
        layer.kv_cache = state_pages(shapes)
        wanted = run_in_steps(expected, builder, inputs, out_size)
        assert all(torch.equal(ours[name], wanted[name]) for name in REQUESTS)

    # What a GPU runs: on the CPU only this test calls these.
    qwen = gated_delta_layer()
    olmo = bare(OlmoHybridGatedDeltaNetAttention, **vars(qwen), conv1d=qwen.conv1d)
    for layer, greatest_beta in ((qwen, 1.0), (olmo, 2.0)):
        layer.allow_neg_eigval = greatest_beta > 1

        def call(x, out, layer=layer):
            heads = out.unflatten(-1, (NUM_V_HEADS, HEAD_V_DIM))
            layer._forward_core(*parts_of(layer, x), heads)

        expected = partial(run_gated_delta, layer)
        check(layer, call, expected, SHAPES, prompts(INPUT_DIM), VALUE_DIM)

    kimi, size = kimi_layer(), KIMI_HEADS * KIMI_DIM
    norm = bare(FusedRMSNormGated, eps=1e-5, activation="sigmoid", weight=torch.rand(KIMI_DIM))
    object.__setattr__(kimi, "o_norm", norm.forward_native)
    heads = (KIMI_HEADS, KIMI_DIM)

    def call_kimi(x, out):
        parts = x.split([3 * size, size, KIMI_HEADS, size], dim=-1)
        gates, gates_out = (part.unflatten(-1, heads) for part in (parts[1], parts[3]))
        attended = out.unflatten(-1, heads)[None]
        kimi._forward(parts[0], gates[None], gates_out, parts[2][None], attended)

    def expected_kimi(x, out, metadata):
        run_kimi(kimi, x[:, :-size], out, metadata)
        gates_out = x[:, -size:].unflatten(-1, heads)
        out.copy_(norm.forward_native(out.unflatten(-1, heads), gates_out).flatten(-2))

    inputs = prompts(5 * size + KIMI_HEADS)
    check(kimi, call_kimi, expected_kimi, KIMI_SHAPES, inputs, size)


def test_drafted_tokens_do_not_go_to_an_operation_of_vllms_that_passes_our_kernels_by(
    config,  # noqa: F811
    monkeypatch,
):
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    from jenga.vllm_plugin.patches.all_patches import IN_WORKERS

    name = "_fused_gdn_decode_unsupported_reason"
    monkeypatch.setattr(QwenGatedDeltaNetAttention, name, lambda self, vllm_config: None)  # noqa: ARG005
    replacement = next(r for r in IN_WORKERS if r.name.endswith(name))
    replacement.apply()
    layer = gated_delta_layer()

    assert "JENGA_TRITON" in layer._fused_gdn_decode_unsupported_reason(config)
    monkeypatch.setattr(config.attention_config, "backend", None)
    assert layer._fused_gdn_decode_unsupported_reason(config) is None


@pytest.mark.parametrize(
    ("layer", "name", "mark"),
    [
        (
            "gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention",
            "_warmup_prefill_kernels",
            "_prefill_kernels_warmed_up",
        ),
        ("mamba_mixer2.MambaMixer2", "_warmup_ssd_kernels", "_ssd_kernels_warmed_up"),
    ],
)
def test_operations_that_our_kernels_take_the_place_of_are_not_warmed_up(
    layer,
    name,
    mark,
    config,  # noqa: F811
    monkeypatch,
):
    from vllm.config import set_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from jenga.vllm_plugin.patches.all_patches import IN_WORKERS

    layer_class = resolve_obj_by_qualname(f"vllm.model_executor.layers.mamba.{layer}")
    monkeypatch.setattr(layer_class, name, getattr(layer_class, name))  # as it was, in the end
    replacement = next(r for r in IN_WORKERS if r.name.endswith(name))
    if not replacement.is_applied:
        replacement.apply()
    inputs = [torch.zeros(1, 8), *([0] if "prefill" in name else [])]
    ours, theirs = bare(layer_class, **{mark: False}), bare(layer_class, **{mark: False})

    with set_current_vllm_config(config):
        getattr(ours, name)(*inputs)
    getattr(ours, name)(*inputs)  # steps before serving come without a configuration
    with pytest.raises(AttributeError):  # a layer without heads has nothing to warm up
        getattr(theirs, name)(*inputs)

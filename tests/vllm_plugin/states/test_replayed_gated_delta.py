"""Layers of the gated delta rule whose steps seldom write a state, alone and in the engine."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.support import check_close
from tests.vllm_plugin.states import test_bailing_delta as bailing
from tests.vllm_plugin.states.test_drafted_states import (
    DRAFTS,
    KEPT_PAGE,
    LENGTHS,
    SLOTS,
    Row,
    in_order_of_first_runner,
    in_order_of_second_runner,
    requests_of,
    row_of,
    run_step,
)
from tests.vllm_plugin.states.test_drafted_states import config as drafting_config  # noqa: F401 (a fixture)
from tests.vllm_plugin.states.test_gated_delta import (
    INPUT_DIM,
    KIMI_DIM,
    KIMI_HEADS,
    KIMI_SHAPES,
    NUM_QK_HEADS,
    NUM_V_HEADS,
    SHAPES,
    VALUE_DIM,
    builder_for,
    gated_delta_layer,
    kimi_layer,
    plain_gated_delta,
    plain_kimi,
    run_gated_delta,
    run_kimi,
)
from tests.vllm_plugin.states.test_mamba import (
    NAME,
    REQUESTS,
    common_metadata,
    config,  # noqa: F401 (a fixture)
    prompts,
    run_in_steps,
    state_pages,
)

pytestmark = pytest.mark.vllm

HISTORY_TOKENS = 4
KIMI_SIZE = KIMI_HEADS * KIMI_DIM


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Layers of one kind: how one is made, run, and computed in plain PyTorch."""

    architecture: str
    shapes: tuple
    input_size: int
    out_size: int
    make: Callable
    run: Callable
    plain: Callable


QWEN = Kind(
    architecture="Qwen3NextForCausalLM",
    shapes=SHAPES,
    input_size=INPUT_DIM,
    out_size=VALUE_DIM,
    make=gated_delta_layer,
    run=run_gated_delta,
    plain=plain_gated_delta,
)
KIMI = Kind(
    architecture="KimiLinearForCausalLM",
    shapes=KIMI_SHAPES,
    input_size=4 * KIMI_SIZE + KIMI_HEADS,
    out_size=KIMI_SIZE,
    make=kimi_layer,
    run=run_kimi,
    plain=plain_kimi,
)
KINDS = pytest.mark.parametrize("kind", [QWEN, KIMI], ids=["qwen", "kimi"])


def olmo_layer(states=None):
    layer = gated_delta_layer(states)
    layer.allow_neg_eigval = True
    return layer


OLMO = replace(
    QWEN,
    architecture="OlmoHybridForCausalLM",
    make=olmo_layer,
    plain=partial(plain_gated_delta, greatest_beta=2.0),
)
BOUNDED_KIMI = replace(
    KIMI,
    make=partial(kimi_layer, lower_bound=-5.0),
    plain=partial(plain_kimi, lower_bound=-5.0),
)
BAILING = Kind(
    architecture="BailingMoeV3ForCausalLM",
    shapes=bailing.SHAPES,
    input_size=bailing.INPUT_SIZE,
    out_size=bailing.SIZE,
    make=bailing.bailing_layer,
    run=bailing.run_bailing,
    plain=bailing.plain_bailing,
)
ALL_KINDS = pytest.mark.parametrize(
    "kind",
    [QWEN, OLMO, KIMI, BOUNDED_KIMI, BAILING],
    ids=["qwen", "olmo", "kimi", "kimi_bounded", "bailing"],
)


def specs_with_histories(specs, architecture, history_tokens=HISTORY_TOKENS, dtype=torch.float32):
    from jenga.vllm_plugin.specs.replay_layout import with_histories

    config = SimpleNamespace(  # noqa: F811
        additional_config={"jenga_history_tokens": history_tokens},
        model_config=SimpleNamespace(architecture=architecture, dtype=dtype),
    )
    return with_histories(config, specs)


def spec_of(shapes, dtypes=(torch.float32,) * 2, kind="GDN_ATTN", num_drafts=0):
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    (taps, channels), *others = shapes
    return MambaSpec(
        block_size=256,
        shapes=((taps + num_drafts, channels), *others),
        dtypes=dtypes,
        mamba_type=MambaAttentionBackendEnum[kind],
        num_speculative_blocks=num_drafts,
    )


def pages_of(spec, num_pages):
    """What a layer has in pages that hold more than it; every byte a NaN's."""
    sizes = [
        prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    arena = torch.full((num_pages, 256 + sum(sizes) // 16 * 16 + 128), 255, dtype=torch.uint8)
    parts, first = [], 256
    for shape, dtype, size in zip(spec.shapes, spec.dtypes, sizes, strict=True):
        assert first % 16 == 0
        parts.append(arena[:, first : first + size].view(dtype).unflatten(1, shape))
        first += size
    return tuple(parts)


def layer_with_histories(
    kind,
    engine_config,
    history_tokens=HISTORY_TOKENS,
    *,
    num_drafts=0,
    num_pages=12,
    dtypes=(torch.float32,) * 2,
    least_requests=1,
):
    """A layer whose pages have room for histories, and what prepares its steps.

    Steps of fewer than `least_requests` requests write every state.
    """
    plain = spec_of(kind.shapes, dtypes, num_drafts=num_drafts)
    specs = specs_with_histories({NAME: plain}, kind.architecture, history_tokens, dtypes[0])
    spec = specs[NAME]
    assert spec.num_speculative_blocks == 0
    pages = pages_of(spec, num_pages)
    layer = kind.make(pages[:2])  # as vLLM binds it
    layer.pages = pages
    engine_config.compilation_config.static_forward_context[NAME] = layer
    engine_config.additional_config["jenga_history_requests"] = least_requests
    return layer, spec.mamba_type.get_class().get_builder_cls()(
        spec, [NAME], engine_config, torch.device("cpu")
    )


@pytest.fixture(autouse=True)
def forget_layers(config, drafting_config):  # noqa: F811
    """Leave no layer of a test in a configuration that others share."""
    yield
    for each in (config, drafting_config):
        each.compilation_config.static_forward_context.pop(NAME, None)


@ALL_KINDS
@pytest.mark.parametrize(
    "history_tokens",
    [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)],
)
def test_a_layer_cut_anywhere_gives_what_one_gives_that_writes_every_state(
    kind,
    history_tokens,
    config,  # noqa: F811
):
    inputs = prompts(kind.input_size)
    plain = kind.make(state_pages(kind.shapes))
    builder = builder_for(plain, config, kind.shapes)
    want = run_in_steps(partial(kind.run, plain), builder, inputs, kind.out_size)

    layer, builder = layer_with_histories(kind, config, history_tokens)
    ours = run_in_steps(partial(kind.run, layer), builder, inputs, kind.out_size)

    for name in REQUESTS:
        exact, _ = kind.plain(inputs[name], torch.float64)
        check_close(ours[name], exact, want[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=["bf16_state_f32", "bf16", "f16"],
)
def test_a_layer_in_16_bits_errs_no_more_than_one_that_writes_every_state(
    dtype,
    stored,
    config,  # noqa: F811
):
    inputs = {name: x.to(dtype).float() for name, x in prompts(QWEN.input_size).items()}

    def run(layer, x, out, metadata):
        half = torch.full(out.shape, float("nan"), dtype=dtype)
        QWEN.run(layer, x.to(dtype), half, metadata)
        out.copy_(half)

    kind = replace(QWEN, make=partial(gated_delta_layer, dtype=dtype))
    conv, states = state_pages(kind.shapes)
    plain = kind.make((conv.to(dtype), states.to(stored)))
    builder = builder_for(plain, config, kind.shapes)
    want = run_in_steps(partial(run, plain), builder, inputs, kind.out_size)

    layer, builder = layer_with_histories(kind, config, 8, dtypes=(dtype, stored))
    ours = run_in_steps(partial(run, layer), builder, inputs, kind.out_size)

    for name in REQUESTS:
        exact, _ = plain_gated_delta(inputs[name], torch.float64, layer=plain)
        check_close(ours[name], exact, want[name])


@KINDS
def test_decoding_goes_on_from_copied_pages_and_prompts_bring_them_up_to_date(
    kind,
    config,  # noqa: F811
):
    inputs = prompts(kind.input_size)["c"]
    layer, builder = layer_with_histories(kind, config, 16)
    writes = []

    def step(page, first, last, *, is_prompt):
        before = layer.kv_cache[1][page].clone()
        out = torch.full((last - first, kind.out_size), float("nan"))
        rows = [(is_prompt, page, first, last - first, last if is_prompt else 0, "")]
        kind.run(layer, inputs[first:last], out, builder.build(0, common_metadata(rows)))
        writes.append(not torch.equal(before.nan_to_num(), layer.kv_cache[1][page].nan_to_num()))
        return out

    outputs = [step(5, 0, 20, is_prompt=True)]
    outputs += [step(5, token, token + 1, is_prompt=False) for token in range(20, 30)]
    assert not any(writes[1:])
    for part in layer.pages:  # as the scheduler orders, for another request
        part[7] = part[5]
        part[9] = part[5]
    outputs.append(step(7, 30, 50, is_prompt=True))
    outputs += [step(7, token, token + 1, is_prompt=False) for token in range(50, 80)]
    again = [step(9, token, token + 1, is_prompt=False) for token in range(30, 50)]

    exact, _ = kind.plain(inputs[:80], torch.float64)
    naive, _ = kind.plain(inputs[:80], torch.float32)
    check_close(torch.cat(outputs), exact, naive)
    check_close(torch.cat(again), exact[30:50], naive[30:50])


@KINDS
def test_states_kept_on_the_way_through_a_prompt_have_as_many_tokens(kind, config):  # noqa: F811
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    inputs = prompts(kind.input_size)["c"]
    layer, builder = layer_with_histories(kind, config)
    writes = tuple(
        CheckpointWrite(running_page=5, after_tokens=tokens, page=page)
        for tokens, page in ((16, 1), (32, 3))
    )
    builder.mailbox.deliver([], 1, StepOrders(copies=(), checkpoints={NAME: writes}))
    rows = [(True, 2, 0, 7, 7, "b"), (True, 5, 0, 40, 40, "c")]
    both = torch.cat([prompts(kind.input_size)["b"][:7], inputs[:40]])

    kind.run(layer, both, torch.empty(47, kind.out_size), builder.build(0, common_metadata(rows)))

    counts = layer.pages[2][:, 0]
    assert counts[[2, 5, 1, 3]].tolist() == [7, 40, 16, 32]
    out = torch.empty(1, kind.out_size)
    metadata = builder.build(0, common_metadata([(False, 3, 32, 1, 0, "c")]))
    kind.run(layer, inputs[32:33], out, metadata)
    exact, _ = kind.plain(inputs[:33], torch.float64)
    naive, _ = kind.plain(inputs[:33], torch.float32)
    check_close(out, exact[32:], naive[32:])


@pytest.mark.slow
@ALL_KINDS
@pytest.mark.parametrize(
    ("order", "history_tokens"),
    [
        pytest.param(in_order_of_first_runner, 2 * SLOTS, marks=pytest.mark.slow),
        (in_order_of_second_runner, 16),
    ],
    ids=["first_runner", "second_runner"],
)
def test_random_drafts_in_one_slot_leave_no_trace(
    kind,
    order,
    history_tokens,
    drafting_config,  # noqa: F811
):
    source = random.Random(history_tokens)
    requests = requests_of(LENGTHS, kind.input_size)
    for request in requests:
        request.pages = request.pages[:1]
    layer, builder = layer_with_histories(
        kind,
        drafting_config,
        history_tokens,
        num_drafts=DRAFTS,
        num_pages=KEPT_PAGE + 1 + SLOTS * len(LENGTHS),
    )

    while running := [each for each in requests if each.done < len(each.inputs)]:
        rows = [row_of(each, source) for each in running if source.random() < 0.8]
        if rows:
            run_step(partial(kind.run, layer), builder, sorted(rows, key=order), kind.out_size)

    for request in requests:
        exact, _ = kind.plain(request.inputs, torch.float64)
        naive, _ = kind.plain(request.inputs, torch.float32)
        check_close(torch.cat(request.outputs), exact, naive)


@KINDS
def test_the_places_of_a_graph_stay_where_they_are_from_step_to_step(
    kind,
    drafting_config,  # noqa: F811
):
    layer, builder = layer_with_histories(kind, drafting_config, 2 * SLOTS, num_drafts=DRAFTS)
    requests = requests_of([(1, 20), (1, 20)], kind.input_size)
    for request in requests:
        request.pages = request.pages[:1]
    forward, places = partial(kind.run, layer), []

    for _ in range(4):
        rows = [Row(request, 2, DRAFTS - 1) for request in requests]
        counts = run_step(forward, builder, rows, kind.out_size).replay_d
        if counts is not None:
            tensors = (counts.computed_tokens, counts.state_tokens, counts.next_state_tokens)
            places.append([tensor.data_ptr() for tensor in tensors])

    assert len(places) >= 3
    assert all(each == places[0] for each in places)


def test_counts_are_not_read_where_vllm_warms_up_in_pages_over_one_another(config):  # noqa: F811
    layer, builder = layer_with_histories(QWEN, config)
    layer.pages[2][3] = 1_071_778_190  # what a key left there
    inputs, out = prompts(QWEN.input_size)["c"][:1], torch.empty(1, QWEN.out_size)
    step = common_metadata([(False, 3, 5, 1, 0, "")])

    with builder.mailbox.warming_up():
        metadata = builder.build(0, step)
        QWEN.run(layer, inputs, out, metadata)
    assert metadata.replay_d.state_tokens.tolist() == [5]

    layer.pages[2][3] = 1_071_778_190
    with pytest.raises(ValueError, match="state_tokens must be 0 to the 5 computed tokens"):
        QWEN.run(layer, inputs, out, builder.build(0, step))


@pytest.mark.parametrize(
    ("kind", "decays"),
    [
        (QWEN, (NUM_V_HEADS, 16)),
        (KIMI, (KIMI_HEADS, 16, KIMI_DIM)),
    ],
    ids=["qwen", "kimi"],
)
@pytest.mark.parametrize(
    ("stored", "changes"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),  # beyond whose range changes may be
    ],
)
def test_a_page_has_room_for_what_the_kernels_keep(kind, decays, stored, changes):
    plain = spec_of(kind.shapes, (torch.bfloat16, stored))

    found = specs_with_histories({NAME: plain}, kind.architecture, 16, torch.bfloat16)[NAME]

    heads, value_elements, key_elements = kind.shapes[1]
    key_heads = NUM_QK_HEADS if kind is QWEN else KIMI_HEADS
    assert found.shapes[2:] == (
        (4,),
        (heads, 16, value_elements),
        (key_heads, 16, key_elements),
        decays,
    )
    assert found.dtypes[2:] == (torch.int32, changes, torch.bfloat16, torch.float32)
    assert found.num_speculative_blocks == 0


def test_histories_are_for_layers_on_our_kernels_with_rows_of_whole_loads():
    mamba1 = {"one": spec_of(((3, 96), (96, 16)), kind="MAMBA1")}
    delta = {"two": spec_of(SHAPES)}
    narrow = {"three": spec_of(((3, 2 * 2 * 6 + 2 * 16), (2, 16, 6)))}
    thin = {"four": spec_of(((3, 2 * 2 * 16 + 2 * 6), (2, 6, 16)))}
    mamba2 = {"five": spec_of(((3, 2 * 8 + 2 * 16), (2, 8, 16)), kind="MAMBA2")}

    layers = "got a model without Mamba-2 layers or layers of the gated delta rule"
    rows = "got rows of 24 bytes in layer {!r} .*rows must be multiples of 16 bytes"
    tokens = "got 65 tokens in layer 'two', which can keep 64 .*at most 64 tokens"
    for specs in (mamba1, delta):  # of a model whose layers run on vLLM's operations
        with pytest.raises(ValueError, match=layers):
            specs_with_histories(specs, "BailingMoeV2_5ForCausalLM")
    with pytest.raises(ValueError, match=rows.format("three")):
        specs_with_histories(narrow, QWEN.architecture)
    with pytest.raises(ValueError, match=rows.format("four")):
        specs_with_histories(thin, QWEN.architecture)
    with pytest.raises(ValueError, match=tokens):
        specs_with_histories(delta, QWEN.architecture, 65)
    assert specs_with_histories(narrow, QWEN.architecture, 0) == narrow
    both = specs_with_histories(delta | mamba2 | mamba1, QWEN.architecture)
    assert {name: len(spec.shapes) for name, spec in both.items()} == {
        "two": 6,
        "five": 6,
        "one": 2,
    }


@pytest.mark.parametrize(
    ("flag", "variable", "want"),
    [
        (None, 0, None),
        (None, None, 16),
        (16, 0, 16),
        (16, None, 16),
        (12, None, 12),
        (None, 8, 8),
        (8, 8, 8),
        (16, 8, "--replayssm-buffer-len 16 beside JENGA_HISTORY_TOKENS 8 .*give the same length"),
        (None, 7, "JENGA_HISTORY_TOKENS 7, .*are 8 .*at least two steps"),
    ],
)
def test_vllms_flag_and_the_variable_ask_for_the_same(flag, variable, want):
    from jenga.vllm_plugin.specs.replay_layout import history_tokens, take_replay

    cache = SimpleNamespace(use_replayssm=flag is not None, replayssm_buffer_len=flag or 16)
    engine = SimpleNamespace(cache_config=cache, additional_config={}, num_speculative_tokens=3)

    if isinstance(want, str):
        with pytest.raises(ValueError, match=f"got {want}"):
            take_replay(engine, variable)
    else:
        take_replay(engine, variable)
        assert history_tokens(engine) == (want or 0)
        assert not cache.use_replayssm
        take_replay(engine, variable)  # in workers, whose configuration was taken on before
        assert history_tokens(engine) == (want or 0)


@pytest.mark.parametrize(
    ("draft_tokens", "history_tokens"), [(0, 0), (1, 16), (7, 16), (8, 18), (31, 64)]
)
def test_drafts_bring_histories_of_two_steps_or_more(draft_tokens, history_tokens):
    from jenga.vllm_plugin.specs.replay_layout import history_tokens as tokens_of
    from jenga.vllm_plugin.specs.replay_layout import take_replay

    engine = SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=False),
        additional_config={},
        num_speculative_tokens=draft_tokens,
    )
    take_replay(engine, None)
    assert tokens_of(engine) == history_tokens


def test_drafts_bring_no_histories_where_options_are_no_mapping(monkeypatch):
    from jenga.vllm_plugin.specs import replay_layout

    told = []
    monkeypatch.setattr(replay_layout.logger, "info_once", lambda _, *words: told.append(words))
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=False),
        additional_config=object(),
        num_speculative_tokens=3,
    )

    replay_layout.take_replay(engine, None)

    assert replay_layout.history_tokens(engine) == 0
    assert told == [("object",)]


def test_layers_that_can_keep_no_history_keep_none_by_default():
    from jenga.vllm_plugin.specs.replay_layout import take_replay, with_histories

    def by_default(specs, architecture=QWEN.architecture, draft_tokens=3):
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(use_replayssm=False),
            additional_config={},
            num_speculative_tokens=draft_tokens,
            model_config=SimpleNamespace(architecture=architecture, dtype=torch.float32),
        )
        take_replay(engine, None)
        return with_histories(engine, specs)

    mamba1 = {"one": spec_of(((3, 96), (96, 16)), kind="MAMBA1")}
    delta = {"two": spec_of(SHAPES)}
    narrow = {"three": spec_of(((3, 2 * 2 * 6 + 2 * 16), (2, 16, 6)))}

    assert by_default(mamba1) == mamba1
    assert by_default(narrow) == narrow
    assert by_default(delta, "BailingMoeV2_5ForCausalLM") == delta
    assert by_default(delta, draft_tokens=32) == delta
    assert len(by_default(delta)["two"].shapes) == 6
    assert by_default(delta, draft_tokens=0) == delta


def test_jenga_plan_counts_the_bytes_that_layers_take(tiny_model):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

    from jenga.models.options import ReadOptions
    from jenga.models.reader import read_model
    from jenga.spec import State
    from jenga.vllm_plugin.specs.replay_layout import with_histories

    model, drafts = tiny_model("qwen3_next"), {"method": "ngram", "num_speculative_tokens": 3}
    engine = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        max_model_len=256,
        skip_tokenizer_init=True,
        attention_backend="JENGA_TRITON",
        speculative_config=drafts | {"prompt_lookup_max": 3},
        use_replayssm=True,  # which vLLM's own kernels refuse for this model
    ).create_engine_config()
    dtypes = Qwen3NextForCausalLM.get_mamba_state_dtype_from_config(engine)
    layer = spec_of(Qwen3NextForCausalLM.get_mamba_state_shape_from_config(engine), dtypes)

    (spec,) = with_histories(engine, {"layer": layer}).values()

    states = str(dtypes[1]).removeprefix("torch.")
    options = ReadOptions(draft_tokens=3, history_tokens=16, state_dtype=states)
    types = read_model(model / "config.json", options=options).layer_types
    (state,) = [each for each in types if isinstance(each, State)]
    assert state.layers[0].slot_bytes == spec.state_content_size_bytes
    assert (state.slots_per_request, spec.num_speculative_blocks) == (1, 0)

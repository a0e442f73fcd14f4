"""Mamba-2 layers whose steps seldom write a state (--use-replayssm), alone and in the engine."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.support import check_close
from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.drafts.test_speculation import MTP, by_draft, check_drafts
from tests.vllm_plugin.drafts.test_speculation import PROMPTS as DRAFTED_PROMPTS
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.states.test_hybrid_engine import CUTS, JENGA, NO_ROOM_LEFT, TURN
from tests.vllm_plugin.states.test_mamba import (
    CONV_DIM,
    INNER,
    MAMBA2_SHAPES,
    NAME,
    NUM_HEADS,
    REQUESTS,
    WIDTH,
    common_metadata,
    config,  # noqa: F401 (a fixture)
    exact_mamba2,
    mamba2_layer,
    our_builder,
    prompts,
    run_in_steps,
    state_pages,
)

pytestmark = pytest.mark.vllm

HISTORY_TOKENS = 4
NUM_INPUTS = INNER + CONV_DIM + NUM_HEADS


def replaying(config, history_tokens=HISTORY_TOKENS):  # noqa: F811
    """What is asked of vLLM's configuration, with a number of tokens in histories."""
    return SimpleNamespace(
        additional_config={"jenga_history_tokens": history_tokens},
        model_config=config.model_config,
    )


def layer_with_histories(
    config,  # noqa: F811
    history_tokens=HISTORY_TOKENS,
    *,
    num_drafts=0,
    num_pages=12,
    least_requests=1,
):
    """A layer whose pages have room for histories, and what prepares its steps.

    Steps of fewer than `least_requests` requests write every state.
    """
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from jenga.vllm_plugin.specs.replay_layout import with_histories

    plain = MambaSpec(
        block_size=256,
        shapes=((WIDTH - 1 + num_drafts, CONV_DIM), *MAMBA2_SHAPES[1:]),
        dtypes=(torch.float32,) * 2,
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
        num_speculative_blocks=num_drafts,
    )
    spec = with_histories(replaying(config, history_tokens), {NAME: plain})[NAME]
    assert spec.num_speculative_blocks == 0
    pages = state_pages(spec.shapes, num_pages)
    layer = mamba2_layer(pages[:2])  # as vLLM binds it
    layer.pages = tuple(
        part.view(dtype)  # counts are as long as the floats that hold nothing
        for part, dtype in zip(pages, spec.dtypes, strict=True)
    )
    config.compilation_config.static_forward_context[NAME] = layer
    config.additional_config["jenga_history_requests"] = least_requests
    kind = MambaAttentionBackendEnum.MAMBA2.get_class()
    return layer, kind.get_builder_cls()(spec, [NAME], config, torch.device("cpu"))


@pytest.mark.parametrize("history_tokens", [2, 4, 16])
def test_a_layer_cut_anywhere_gives_what_one_gives_that_writes_every_state(
    config,  # noqa: F811
    history_tokens,
):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    inputs = prompts(NUM_INPUTS)
    plain = mamba2_layer(state_pages(MAMBA2_SHAPES))
    layer, builder = layer_with_histories(config, history_tokens)

    want = run_in_steps(
        partial(forward_mamba2, plain), our_builder(config, MAMBA2_SHAPES, "MAMBA2"), inputs, INNER
    )
    ours = run_in_steps(partial(forward_mamba2, layer), builder, inputs, INNER)

    for name in REQUESTS:
        exact, _ = exact_mamba2(inputs[name])
        check_close(ours[name], exact, want[name])


def test_decoding_goes_on_from_copied_pages_and_prompts_bring_them_up_to_date(config):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    inputs = prompts(NUM_INPUTS)["c"]
    layer, builder = layer_with_histories(config, 16)
    writes = []

    def step(page, first, last, *, is_prompt):
        before = layer.kv_cache[1][page].clone()
        out = torch.full((last - first, INNER), float("nan"))
        metadata = builder.build(
            0,
            common_metadata([(is_prompt, page, first, last - first, last if is_prompt else 0, "")]),
        )
        forward_mamba2(layer, inputs[first:last], out, metadata)
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

    exact, _ = exact_mamba2(inputs[:80])
    naive = run_alone(config, inputs[:80])
    check_close(torch.cat(outputs), exact, naive)
    check_close(torch.cat(again), exact[30:50], naive[30:50])


def run_alone(config, inputs):  # noqa: F811
    """Outputs of a request that is one prompt, by a layer that writes every state."""
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    layer, out = mamba2_layer(state_pages(MAMBA2_SHAPES)), torch.empty(len(inputs), INNER)
    metadata = our_builder(config, MAMBA2_SHAPES, "MAMBA2").build(
        0, common_metadata([(True, 1, 0, len(inputs), len(inputs), "")])
    )
    forward_mamba2(layer, inputs, out, metadata)
    return out


def test_states_kept_on_the_way_through_a_prompt_have_as_many_tokens(config):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    inputs = prompts(NUM_INPUTS)["c"]
    layer, builder = layer_with_histories(config)
    writes = tuple(
        CheckpointWrite(running_page=5, after_tokens=tokens, page=page)
        for tokens, page in ((16, 1), (32, 3))
    )
    builder.mailbox.deliver([], 1, StepOrders(copies=(), checkpoints={NAME: writes}))
    rows = [(True, 2, 0, 7, 7, "b"), (True, 5, 0, 40, 40, "c")]
    both = torch.cat([prompts(NUM_INPUTS)["b"][:7], inputs[:40]])

    forward_mamba2(layer, both, torch.empty(47, INNER), builder.build(0, common_metadata(rows)))

    counts = layer.pages[2][:, 0]
    assert counts[[2, 5, 1, 3]].tolist() == [7, 40, 16, 32]
    out = torch.empty(1, INNER)
    metadata = builder.build(0, common_metadata([(False, 3, 32, 1, 0, "c")]))
    forward_mamba2(layer, inputs[32:33], out, metadata)
    exact, _ = exact_mamba2(inputs[:33])
    check_close(out, exact[32:], run_alone(config, inputs[:33])[32:])


def test_histories_are_for_mamba2_layers_with_rows_of_whole_loads(config):  # noqa: F811
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from jenga.vllm_plugin.specs.replay_layout import with_histories

    def spec(kind, shapes):
        return MambaSpec(
            block_size=256, shapes=shapes, dtypes=(torch.float32,) * 2, mamba_type=kind
        )

    mamba1 = {"one": spec(MambaAttentionBackendEnum.MAMBA1, ((3, 96), (96, 16)))}
    odd = {"two": spec(MambaAttentionBackendEnum.MAMBA2, ((3, 2 * 6 + 2 * 16), (2, 6, 16)))}
    with pytest.raises(ValueError, match="got a model without Mamba-2 layers or layers of the"):
        with_histories(replaying(config), mamba1)
    rows = "got rows of 24 bytes in layer 'two' .*rows must be multiples of 16 bytes"
    with pytest.raises(ValueError, match=rows):
        with_histories(replaying(config), odd)
    assert with_histories(replaying(config, 0), odd) == odd


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_jenga_plan_counts_the_bytes_that_layers_take(asked, tiny_model):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM as Granite
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from jenga.models.options import ReadOptions
    from jenga.models.reader import read_model
    from jenga.spec import State
    from jenga.vllm_plugin.specs.replay_layout import with_histories

    model, drafts = tiny_model("granite_hybrid"), {"method": "ngram", "num_speculative_tokens": 3}
    engine = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        max_model_len=256,
        skip_tokenizer_init=True,
        attention_backend="JENGA_TRITON",
        speculative_config=drafts | {"prompt_lookup_max": 3},
        use_replayssm=True,
        mamba_ssm_cache_dtype=asked,
    ).create_engine_config()
    # A CPU with instructions for bfloat16 has vLLM choose float32; a GPU has the model's own dtype.
    chosen = engine.cache_config.mamba_ssm_cache_dtype
    assert chosen in (asked, "float32")
    state_dtype = None if chosen == "auto" else chosen
    layer = MambaSpec(
        block_size=256,
        shapes=Granite.get_mamba_state_shape_from_config(engine),
        dtypes=Granite.get_mamba_state_dtype_from_config(engine),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )

    (spec,) = with_histories(engine, {"layer": layer}).values()

    options = ReadOptions(draft_tokens=3, history_tokens=16, state_dtype=state_dtype)
    types = read_model(model / "config.json", options=options).layer_types
    (states,) = [each for each in types if isinstance(each, State)]
    assert states.layers[0].slot_bytes == spec.state_content_size_bytes
    assert (states.slots_per_request, spec.num_speculative_blocks) == (1, 0)


REPLAY = {"use_replayssm": True, "replayssm_buffer_len": 8}
ALWAYS = {"JENGA_HISTORY_REQUESTS": "1"}
"""Steps replay, however few their requests are."""


def hits_of_answers(prompts, answer_tokens):
    """What another turn finds: the last state of every 64 tokens that an answer has reached.

    It is a copy of a page, with the tokens since its states were written.
    """
    return [(len(prompt) + answer_tokens - 2) // 64 * 64 for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("is_second", [False, True], ids=["first_runner", "second_runner_graphs"])
def test_hybrid_generates_what_stock_vllm_generates_and_goes_on_from_its_answers(
    is_second, tiny_model, run_engine
):
    model, prompts = tiny_model("granite_hybrid"), prompts_over_shared_prefixes(3, seed=31)
    options = CUTS | {"max_num_seqs": 2}

    stock = run_engine(model, prompts, max_tokens=70, turns=[TURN], options=options)
    ours = run_engine(
        model,
        prompts,
        max_tokens=70,
        turns=[TURN],
        options=options | JENGA | REPLAY | (graphs_of(1, 2) if is_second else {}),
        fill_arena=True,
        captures=is_second,
        environment=ALWAYS | {V2_RUNNER: str(int(is_second)), "VLLM_LOGGING_LEVEL": "INFO"},
    )

    assert_same_generation(ours, stock)
    assert "Mamba-2 layers keep the inputs of up to 8 tokens" in ours["log"]
    hits = [output["cached_tokens"] for output in ours["outputs"][3:]]
    assert hits == hits_of_answers(prompts, 70)
    assert not is_second or sum(ours["replays"].values()) >= 70


@pytest.mark.slow
def test_hybrid_that_always_evicts_and_preempts_loses_nothing(tiny_model, run_engine):
    model = tiny_model("granite_hybrid")
    prompts = prompts_over_shared_prefixes(6, seed=24)
    options = CUTS | {"max_num_seqs": 6}

    stock = run_engine(model, prompts, max_tokens=60, options=options)
    ours = run_engine(
        model,
        prompts,
        max_tokens=60,
        options=options | JENGA | REPLAY | {"kv_cache_memory_bytes": 8 << 18},
        environment=ALWAYS | NO_ROOM_LEFT,
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, stock)
    assert ours["preemptions"] > 0


@pytest.mark.slow
def test_drafts_take_no_states_and_rejected_ones_leave_no_trace_in_graphs(tiny_model, run_engine):
    model, draft = tiny_model("granite_calm"), tiny_model("granite_echo")
    prompts, job = DRAFTED_PROMPTS[1:3], {"max_tokens": 24}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_engine(
        model,
        prompts * 2,
        rounds=2,
        options=JENGA | REPLAY | by_draft(draft, 3) | graphs_of(4, 8),
        fill_arena=True,
        captures=True,
        report_manager=True,
        environment={V2_RUNNER: "1", "VLLM_LOGGING_LEVEL": "INFO"},
        **job,
    )

    assert_same_generation(ours, theirs | {"outputs": theirs["outputs"] * 2})
    check_drafts(ours)
    hits = [output["cached_tokens"] for output in ours["outputs"][2:]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert ours["replays"]


@pytest.mark.slow
def test_with_drafts_another_turn_starts_near_the_end_of_a_long_answer(tiny_model, run_engine):
    model, prompts = tiny_model("granite_hybrid"), prompts_over_shared_prefixes(2, seed=25)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}

    stock = run_engine(model, prompts, max_tokens=70, turns=[TURN], options=CUTS)
    ours = run_engine(
        model,
        prompts,
        max_tokens=70,
        turns=[TURN],
        options=CUTS | JENGA | REPLAY | {"speculative_config": drafts},
        fill_arena=True,
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
    )

    assert_same_generation(ours, stock)
    assert "Mamba-2 layers keep the inputs of up to 8 tokens" in ours["log"]
    hits = [output["cached_tokens"] for output in ours["outputs"][2:]]
    ends = hits_of_answers(prompts, 70)
    ends_of_prompts = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert all(hit >= end for hit, end in zip(hits, ends_of_prompts, strict=True))
    assert any(hit == end for hit, end in zip(hits, ends, strict=True)), (hits, ends)


@pytest.mark.slow
def test_layers_that_predict_further_tokens_change_no_token_of_a_nemotron(tiny_model, run_engine):
    model, prompts, job = tiny_model("nemotron_h_mtp"), DRAFTED_PROMPTS[:3], {"max_tokens": 24}

    plain = run_engine(model, prompts, options=JENGA, **job)
    ours = run_engine(
        model,
        prompts,
        options=JENGA | MTP | {"use_replayssm": True},
        fill_arena=True,
        report_manager=True,
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
        **job,
    )

    assert_same_generation(ours, plain)
    assert "Mamba-2 layers keep the inputs of up to 16 tokens" in ours["log"]
    check_drafts(ours)

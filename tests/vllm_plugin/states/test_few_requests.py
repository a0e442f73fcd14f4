"""Steps of few requests with histories: all states are written, as without histories."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.support import check_close
from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.states import test_replayed_gated_delta as delta
from tests.vllm_plugin.states import test_replayed_states as mamba2
from tests.vllm_plugin.states.test_drafted_states import DRAFTS, SLOTS
from tests.vllm_plugin.states.test_drafted_states import config as drafting_config  # noqa: F401 (a fixture)
from tests.vllm_plugin.states.test_hybrid_engine import CUTS, JENGA, TURN
from tests.vllm_plugin.states.test_mamba import (
    INNER,
    common_metadata,
    config,  # noqa: F401 (a fixture)
    exact_mamba2,
)
from tests.vllm_plugin.states.test_replayed_gated_delta import (
    forget_layers,  # noqa: F401 (a fixture for each test)
)
from tests.vllm_plugin.states.test_replayed_states import hits_of_answers

pytestmark = pytest.mark.vllm

LENGTHS = [(9, 24), (20, 31), (3, 13), (1, 15)]
"""Tokens of each request's prompt, and of all."""

HISTORY_TOKENS = 8


def mamba2_case(config, **options):  # noqa: F811
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    layer, builder = mamba2.layer_with_histories(config, HISTORY_TOKENS, **options)

    def check(inputs, outputs):
        exact, _ = exact_mamba2(inputs)
        check_close(outputs, exact, mamba2.run_alone(config, inputs))

    return layer, builder, partial(forward_mamba2, layer), (mamba2.NUM_INPUTS, INNER), check


def delta_case(kind, config, **options):  # noqa: F811
    layer, builder = delta.layer_with_histories(kind, config, HISTORY_TOKENS, **options)

    def check(inputs, outputs):
        exact, _ = kind.plain(inputs, torch.float64)
        naive, _ = kind.plain(inputs, torch.float32)
        check_close(outputs, exact, naive)

    sizes = (kind.input_size, kind.out_size)
    return layer, builder, partial(kind.run, layer), sizes, check


KINDS = pytest.mark.parametrize(
    "make",
    [mamba2_case, partial(delta_case, delta.QWEN), partial(delta_case, delta.KIMI)],
    ids=["mamba2", "qwen", "kimi"],
)


@KINDS
def test_requests_that_join_and_leave_get_what_they_would_alone(make, config):  # noqa: F811
    layer, builder, forward, (input_size, out_size), check = make(config, least_requests=3)
    source, rng = random.Random(2), torch.Generator().manual_seed(2)
    inputs = [torch.randn(total, input_size, generator=rng) for _, total in LENGTHS]
    outputs, done, ways, written = [[] for _ in LENGTHS], [0] * len(LENGTHS), [], set()
    while running := [i for i, (_, total) in enumerate(LENGTHS) if done[i] < total]:
        chosen = source.sample(running, source.randint(1, len(running)))
        rows = []
        for i in chosen:
            prompt = LENGTHS[i][0]
            count = 1 if done[i] >= prompt else source.randint(1, prompt - done[i])
            is_prompt = done[i] < prompt and (count > 1 or done[i] == 0)
            rows.append((is_prompt, 1 + i, done[i], count, prompt, i))
        rows.sort()
        metadata = builder.build(0, common_metadata(rows))
        x = torch.cat([inputs[i][first : first + count] for _, _, first, count, _, i in rows])
        out = torch.full((len(x), out_size), float("nan"))
        forward(x, out, metadata)
        for _, page, _, count, _, i in rows:
            row, out = out[:count], out[count:]
            outputs[i].append(row)
            done[i] += count
            written.add(int(layer.pages[2][page, 0]) == done[i])
        if metadata.num_decodes:
            assert metadata.replay_d.writes_states == (metadata.num_decodes < 3)
            ways.append(metadata.replay_d.writes_states)

    # Every request meets both ways, and often changes from one to the other.
    assert sum(one != two for one, two in itertools.pairwise(ways)) > 5, ways
    assert written == {True, False}
    for request_inputs, parts in zip(inputs, outputs, strict=True):
        check(request_inputs, torch.cat(parts))


def test_steps_with_drafts_replay_however_few_requests_they_have(drafting_config):  # noqa: F811
    _, builder = mamba2.layer_with_histories(
        drafting_config, 2 * SLOTS, num_drafts=DRAFTS, least_requests=99
    )

    metadata = builder.build(0, common_metadata([(False, 3, 5, SLOTS, 0, "")]))

    assert not metadata.replay_d.writes_states


def test_the_slots_of_a_graph_decide_and_not_how_many_have_requests(config):  # noqa: F811
    _, builder = mamba2.layer_with_histories(config, least_requests=4)
    step = common_metadata([(False, page, 5, 1, 0, "") for page in (3, 5)])
    slots = torch.tensor([3, 5, 0, 0], dtype=torch.int32)

    def way_of(slots):
        with builder.mailbox.warming_up():
            counts = builder._replay_counts.decode(step, slots, 2, None, is_warming_up=True)
        return counts.writes_states, counts.next_state_tokens[:2].tolist()

    assert way_of(slots[:2]) == (True, [6, 6])
    assert way_of(slots[:3]) == (True, [6, 6])
    assert way_of(slots) == (False, [5, 5])


def configured(**options):
    return SimpleNamespace(
        additional_config=options,
        cache_config=SimpleNamespace(use_replayssm=False, replayssm_buffer_len=16),
        num_speculative_tokens=0,
    )


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "expected"),
    [
        ("MAMBA2", (128, 64, 128), torch.float32, 16),  # Nemotron-H 8B
        ("MAMBA2", (128, 64, 128), torch.bfloat16, 32),
        ("MAMBA2", (24, 128, 256), torch.float32, 22),  # Falcon-H1 7B
        ("GDN_ATTN", (32, 128, 128), torch.float32, 64),  # Qwen3-Next 80B
    ],
)
def test_bytes_of_states_decide_from_how_many_requests_on_steps_replay(
    kind, shape, dtype, expected
):
    from jenga.vllm_plugin.specs.replay_layout import history_requests

    spec = delta.spec_of(((4, 8), shape), (torch.bfloat16, dtype), kind)

    assert history_requests(configured(), spec) == expected
    assert history_requests(configured(jenga_history_requests=5), spec) == 5


def test_the_number_of_requests_is_a_setting_of_histories():
    from jenga.vllm_plugin.settings.environment import read_settings
    from jenga.vllm_plugin.specs.replay_layout import take_replay

    assert read_settings({}).history_requests is None
    assert read_settings({"JENGA_HISTORY_REQUESTS": " 0 "}).history_requests == 0
    with pytest.raises(ValueError, match="JENGA_HISTORY_REQUESTS='few': expected a number of"):
        read_settings({"JENGA_HISTORY_REQUESTS": "few"})
    engine = configured()
    with pytest.raises(ValueError, match="JENGA_HISTORY_REQUESTS=4 has no effect without --use-re"):
        take_replay(engine, 0, 4)
    assert engine.additional_config == {}
    take_replay(engine, 16, 4)
    assert engine.additional_config == {"jenga_history_tokens": 16, "jenga_history_requests": 4}
    take_replay(engine, 0, 4)  # in workers, whose configuration was taken on before


def run_both_ways(run_engine, model, prompts, *, is_second, layers, **job):
    """Run ours with histories, where steps of one and two requests write all states."""
    graphs = graphs_of(1, 2, 4) if is_second else {}
    ours = run_engine(
        model,
        prompts,
        options=CUTS
        | JENGA
        | {"max_num_seqs": 4, "use_replayssm": True, "replayssm_buffer_len": 8}
        | graphs,
        fill_arena=True,
        captures=is_second,
        report_manager=True,
        environment={
            V2_RUNNER: str(int(is_second)),
            "VLLM_LOGGING_LEVEL": "INFO",
            "JENGA_HISTORY_REQUESTS": "3",
        },
        **job,
    )
    assert "error" not in ours, ours["error"][-4000:]
    assert f"{layers} keep the inputs of up to 8 tokens" in ours["log"]
    assert "write all states in steps of fewer than 3 requests" in ours["log"]
    # Graphs of both ways were replayed, each many times.
    assert not is_second or min(ours["replays"][tokens] for tokens in ("2", "4")) > 8
    return ours


BOTH_RUNNERS = pytest.mark.parametrize(
    "is_second", [False, True], ids=["first_runner", "second_runner_graphs"]
)


@pytest.mark.slow
@BOTH_RUNNERS
def test_mamba2_generates_what_stock_vllm_generates_whatever_the_number_of_requests(
    is_second, tiny_model, run_engine
):
    model, prompts = tiny_model("granite_hybrid"), prompts_over_shared_prefixes(6, seed=31)
    job = {"max_tokens": 40, "turns": [TURN]}

    stock = run_engine(model, prompts, options=CUTS, **job)
    ours = run_both_ways(
        run_engine, model, prompts, is_second=is_second, layers="Mamba-2 layers", **job
    )

    assert_same_generation(ours, stock)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(prompts) :]]
    assert hits == hits_of_answers(prompts, 40)


@pytest.mark.slow
@BOTH_RUNNERS
def test_gated_deltas_generate_what_transformers_generates_whatever_the_number_of_requests(
    is_second, tiny_model, run_engine
):
    model, prompts = tiny_model("qwen3_next"), prompts_over_shared_prefixes(6, seed=31)
    job = {"max_tokens": 40, "turns": [TURN]}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_both_ways(
        run_engine,
        model,
        prompts,
        is_second=is_second,
        layers="layers of the gated delta rule",
        **job,
    )

    assert_same_generation(ours, theirs)
    hits = [output["cached_tokens"] for output in ours["outputs"][len(prompts) :]]
    assert hits == hits_of_answers(prompts, 40)

"""Starts that ask for more than the arena has room for: what is said, and that it is exact."""

import json
import re
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from jenga.errors import OutOfPagesError
from jenga.vllm_plugin.settings.shared_arena import Membership
from tests.vllm_plugin.arena.test_layout import HYBRID, MIB, attention, engine_config, mamba
from tests.vllm_plugin.arena.test_pipeline_layout import FIRST, SECOND
from tests.vllm_plugin.conftest import (
    PROGRAMS,
    V2_RUNNER,
    assert_same_generation,
    engine_environment,
    run_with_children,
)
from tests.vllm_plugin.drafts.test_speculation import by_draft
from tests.vllm_plugin.engine.test_engine_numbers import prompt
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.states.test_hybrid_engine import CUTS

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON"}


def length_named(message):
    """Get the length that an error says fits."""
    found = re.search(r"--max-model-len (\d+) fits, and auto finds it", message)
    assert found is not None, message
    return int(found.group(1))


def bytes_named(message):
    """Get the bytes with which an error says that what was asked for fits."""
    found = re.search(r"(\d+) bytes(?: on each worker)? would do", message)
    assert found is not None, message
    return int(found.group(1))


@pytest.fixture(scope="module")
def run_dry(tiny_model, tmp_path_factory):
    """Run vLLM's engine without workers, a job each, and get what each told, and the log."""

    def run(jobs):
        folder = tmp_path_factory.mktemp("dry")
        common = JENGA | {"model": str(tiny_model("llama"))}
        jobs = {
            name: {"rounds": []} | job | {"options": common | job["options"]}
            for name, job in jobs.items()
        }
        (folder / "jobs.json").write_text(json.dumps(jobs))
        is_done, log = run_with_children(
            [PROGRAMS / "dry_process.py", folder / "jobs.json", folder / "told.json"],
            engine_environment(VLLM_LOGGING_LEVEL="INFO"),
        )
        assert is_done, log[-4000:]
        return json.loads((folder / "told.json").read_text()), log

    return run


def options_of(max_model_len, *, step_tokens=64, lookahead_tokens=0, **cache):
    """Make an engine's configuration; a length of -1 is to be found, and at most 2048."""
    from jenga.vllm_plugin.patches.all_patches import apply_replacements
    from jenga.vllm_plugin.settings.switch import backend_member

    apply_replacements()
    config = engine_config(original_max_model_len=max_model_len, **cache)
    config.model_config.max_model_len = 2048 if max_model_len == -1 else max_model_len
    config.max_in_flight_tokens, config.num_lookahead_tokens = step_tokens, lookahead_tokens
    config.num_prefill_lookahead_tokens = 0
    config.attention_config = SimpleNamespace(backend=backend_member(), hisparse_config=None)
    config.device_config = SimpleNamespace(device_type="cpu")
    return config


def planned(workers, memory, config):
    """Get what vLLM plans for workers with these layers and bytes."""
    from vllm.v1.engine import core

    groups = ()
    with suppress(AttributeError):  # 0.32 groups layers in the next call
        groups = (core.get_global_kv_cache_groups(config, workers),)
    return core.get_kv_cache_configs(config, workers, memory, *groups)


def refusal_of(workers, memory, config):
    """Get the words with which a start is refused."""
    with pytest.raises(ValueError, match="JENGA_TRITON") as refused:
        planned(workers, memory, config)
    return str(refused.value)


def chunks(tokens):
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=tokens)


WINDOWS = {"full.0": attention(), "sliding.0": attention(window=32)}
LAYERS = {
    "full": {"full.0": attention()},
    "windows": WINDOWS,
    "chunks": {"full.0": attention(), "chunked.0": chunks(40)},
    "windows_and_states": HYBRID,
    "states_of_drafts": HYBRID
    | {f"mamba.{index}": mamba(num_speculative_blocks=3) for index in range(3)},
    "pages_of_32": {
        "full.0": attention(block_size=32),
        "sliding.0": attention(window=32, block_size=32),
    },
}
STEPS = {
    "short_steps": {"step_tokens": 33},
    "long_steps": {"step_tokens": 700},
    "slots_for_drafts": {"step_tokens": 64, "lookahead_tokens": 7},
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("layers", LAYERS)
def test_the_length_and_the_bytes_named_are_exact(layers, steps):
    workers, steps = [LAYERS[layers]], STEPS[steps]
    page = {"block_size": 32} if layers == "pages_of_32" else {}

    def options(max_model_len):
        return options_of(max_model_len, **steps, **page)

    enough = bytes_named(refusal_of(workers, [10_000], options(2048)))
    assert len(planned(workers, [enough], options(2048))) == 1
    lengths = set()
    for num_bytes in (enough - 1, enough // 2, enough // 3):
        length = length_named(refusal_of(workers, [num_bytes], options(2048)))
        lengths.add(length)
        assert 0 < length < 2048
        assert len(planned(workers, [num_bytes], options(length))) == 1
        assert length_named(refusal_of(workers, [num_bytes], options(length + 1))) == length
        auto = options(-1)
        planned(workers, [num_bytes], auto)
        assert auto.model_config.max_model_len == length
    assert len(lengths) == 3


def test_an_arena_for_no_length_is_refused_with_the_bytes_of_a_token():
    texts = [refusal_of([HYBRID], [10_000], options_of(length)) for length in (2048, -1)]
    token = r"no --max-model-len fits, as one token takes (\d+) bytes"
    ((first,), (second,)) = (re.findall(token, text) for text in texts)

    assert first == second
    num_bytes = int(first)
    fitted = options_of(-1)
    planned([HYBRID], [num_bytes], fitted)
    assert 0 < fitted.model_config.max_model_len < 2048
    assert "no --max-model-len fits" in refusal_of([HYBRID], [num_bytes - 1], options_of(-1))


def test_of_several_ranks_the_one_with_least_room_decides():
    workers, memory = [FIRST, SECOND], [3 * MIB, MIB // 2]

    message = refusal_of(workers, memory, options_of(2048))

    assert " on worker 1 hold" in message
    length = length_named(message)
    assert len(planned(workers, memory, options_of(length))) == 2
    assert length_named(refusal_of(workers, memory, options_of(length + 1))) == length
    enough = bytes_named(message)
    assert len(planned(workers, [enough] * 2, options_of(2048))) == 2
    assert "would do" in refusal_of(workers, [enough - 1] * 2, options_of(2048))


def test_an_engine_that_takes_too_much_beside_a_shared_arena_is_refused():
    share = {
        "folder": "/dev/shm/arena",
        "large_page_bytes": MIB,
        "num_pages": 65,
        "guarantee_pages": 64,
        "limit_pages": 64,
    }

    def options():
        config = options_of(2048, num_gpu_blocks_override=65, gpu_memory_utilization=0.25)
        config.additional_config = {"jenga_shared_arena": share}
        return config

    message = refusal_of([HYBRID], [-4096], options())
    assert "takes 4096 bytes more than --gpu-memory-utilization 0.25 allows" in message
    # All of its allowance may be taken, because the arena is not a part of it.
    share["guarantee_pages"] = 1
    assert "guarantees 1 large pages" in refusal_of([HYBRID], [0], options())


def test_too_few_large_pages_asked_for_are_refused_with_the_length_they_hold():
    workers, memory = [HYBRID], [8 * MIB]

    kept = planned(workers, memory, options_of(2048, num_gpu_blocks_override=69))
    message = refusal_of(workers, memory, options_of(2048, num_gpu_blocks_override=68))

    assert kept[0].num_blocks == 69
    assert "got 68, where 69 are needed: --max-model-len" in message
    length = length_named(message)
    planned(workers, memory, options_of(length, num_gpu_blocks_override=68))
    refusal_of(workers, memory, options_of(length + 1, num_gpu_blocks_override=68))


def test_where_the_length_is_to_be_found_few_large_pages_will_do():
    workers, memory = [HYBRID], [8 * MIB]
    large_pages = planned(workers, memory, options_of(-1))[0].kv_cache_groups
    least = 1 + len(large_pages)

    kept = planned(workers, memory, options_of(-1, num_gpu_blocks_override=least))

    assert kept[0].num_blocks == least
    message = refusal_of(workers, memory, options_of(-1, num_gpu_blocks_override=least - 1))
    assert f"got {least - 1}, where {least} are needed: no --max-model-len fits" in message


def test_a_start_without_any_memory_is_left_to_vllm():
    with pytest.raises(ValueError, match="No available memory for the cache blocks"):
        planned([HYBRID], [-MIB], options_of(2048))


@pytest.mark.slow
def test_an_engine_starts_with_the_length_named_or_found_and_runs_a_request_of_it(run_dry):
    small = {"layers": "windows", "options": {"kv_cache_memory_bytes": 20 << 15}}

    def job(length, *rounds):
        options = small["options"] | {"max_model_len": length}
        return small | {"options": options, "rounds": rounds}

    length = length_named(run_dry({"asked": job(512)})[0]["asked"]["error"])
    whole = [{"prompt": prompt(length - 4), "sampling": {"max_tokens": 4}}]
    told, _ = run_dry({"fits": job(length, whole), "auto": job(-1, whole), "more": job(length + 1)})

    assert 64 < length < 512
    for name in ("fits", "auto"):
        assert "error" not in told[name], told[name]["error"]
        assert told[name]["max_model_len"] == length
        assert len(told[name]["requests"][0]["tokens"]) == 4
        assert told[name]["held"] == {}
    assert length_named(told["more"]["error"]) == length


STATES_LINE = re.compile(r"states of (\d+) requests fit at once.* --max-num-seqs (\d+) wait")


def states_told(config, max_num_seqs, monkeypatch):
    """Get what is logged of states: how many requests' fit, and how many were asked for."""
    from jenga.vllm_plugin.arena import starts

    lines, options = [], options_of(2048)
    options.scheduler_config.max_num_seqs = max_num_seqs
    monkeypatch.setattr(starts.logger, "info", lambda text, *values: lines.append(text % values))
    starts.report_states(options, config)
    return [tuple(map(int, STATES_LINE.search(line).groups())) for line in lines]


@pytest.mark.parametrize("layers", ["windows_and_states", "states_of_drafts"])
def test_as_many_requests_as_are_told_find_states_in_the_manager(layers, monkeypatch):
    from jenga.manager import Manager

    (config,) = planned([LAYERS[layers]], [8 * MIB], options_of(2048))
    ((fit, asked),) = states_told(config, 1000, monkeypatch)
    manager = Manager(config.geometry, num_large_pages=config.num_blocks)

    manager.new_step()
    for number in range(fit):
        manager.allocate(str(number), num_tokens=1)
    with pytest.raises(OutOfPagesError):
        manager.allocate("one more", num_tokens=1)

    assert asked == 1000
    assert fit > 8
    assert states_told(config, fit, monkeypatch) == []
    assert states_told(config, fit + 1, monkeypatch) == [(fit, fit + 1)]


def test_nothing_is_told_of_states_where_there_are_none(monkeypatch):
    (config,) = planned([WINDOWS], [8 * MIB], options_of(2048))

    assert states_told(config, 1000, monkeypatch) == []


@pytest.mark.slow
def test_requests_for_which_there_are_no_states_wait(run_dry):
    short = [{"prompt": prompt(2, seed), "sampling": {"max_tokens": 8}} for seed in range(60)]
    options = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 6 * 294912}
    job = {"layers": "states", "rounds": [short], "options": options | {"max_num_seqs": 60}}

    results, log = run_dry({"many": job})
    told = results["many"]

    assert "error" not in told, told["error"]
    ((fit, asked),) = STATES_LINE.findall(log)
    assert asked == "60"
    assert 4 < int(fit) < 60
    assert max(len(step) for step in told["steps"]) == int(fit)
    assert [len(answer["tokens"]) for answer in told["requests"]] == [8] * 60


@pytest.mark.slow
def test_requests_wait_for_states_and_generate_what_stock_vllm_generates(tiny_model, run_engine):
    model = tiny_model("granite_hybrid")
    prompts = prompts_of_lengths([20 + 3 * i for i in range(24)], seed=31)

    stock = run_engine(model, prompts, options=CUTS)
    ours = run_engine(
        model,
        prompts,
        options=JENGA
        | {"max_num_seqs": 64, "kv_cache_memory_bytes": 4 * 442368, "enable_prefix_caching": True},
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, stock)
    ((fit, asked),) = STATES_LINE.findall(ours["log"])
    assert int(fit) < 24 < int(asked)
    assert ours["request_tokens"] == {}


@pytest.mark.slow
def test_graphs_of_more_requests_than_states_fit_are_captured_and_replayed(tiny_model, run_engine):
    model = tiny_model("granite_hybrid")
    prompts = prompts_of_lengths([20 + 3 * i for i in range(6)], seed=32)

    stock = run_engine(model, prompts, options=CUTS)
    ours = run_engine(
        model,
        prompts,
        options=JENGA
        | graphs_of(1, 2, 4, 16)
        | {"max_num_seqs": 16, "kv_cache_memory_bytes": 3 * 442368, "max_model_len": 128},
        captures=True,
        environment={V2_RUNNER: "1", "VLLM_LOGGING_LEVEL": "INFO"},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, stock)
    ((fit, _),) = STATES_LINE.findall(ours["log"])
    assert int(fit) < 16
    assert ours["replays"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "draft", "arena_bytes"),
    [("gemma2", "gemma2_draft", 3 << 18), ("granite_calm", "granite_echo", 3 << 18)],
    ids=["windows", "states"],
)
def test_the_length_named_runs_in_the_real_engine_with_drafts(
    target, draft, arena_bytes, tiny_model, run_engine
):
    model, options = tiny_model(target), JENGA | by_draft(tiny_model(draft), 3)
    options |= {"kv_cache_memory_bytes": arena_bytes}

    def start(max_model_len, length, **environment):
        return run_engine(
            model,
            prompts_of_lengths([length - 12], seed=33),
            max_tokens=12,
            options=options | {"max_model_len": max_model_len},
            environment={"VLLM_LOGGING_LEVEL": "INFO"} | environment,
            by_references=True,
        )

    length = length_named(start(512, 64)["error"])
    fits = start(length, length)
    auto = start(-1, length, VLLM_ENABLE_V1_MULTIPROCESSING="1")

    assert 64 < length < 512
    assert "error" not in fits, fits["error"][-4000:]
    assert len(fits["outputs"][0]["tokens"]) == 12
    assert length_named(start(length + 1, 64)["error"]) == length
    assert_same_generation(auto, fits)
    assert f"to {length} to fit" in auto["log"]


def test_graphs_are_told_where_they_were_estimated(monkeypatch):
    from jenga.vllm_plugin.arena import starts

    lines = []
    monkeypatch.setattr(starts.logger, "info", lambda text, *values: lines.append(text % values))
    (config,) = planned([WINDOWS], [8 * MIB], options_of(2048))

    starts.report_graphs(0, config, is_left_out=True)
    assert lines == []
    arena_bytes = config.kv_cache_tensors[0].size
    for is_left_out in (True, False):
        starts.report_graphs(arena_bytes // 5, config, is_left_out=is_left_out)
    assert all(
        f" {arena_bytes // 5} bytes, 20.0 % of the arena's {arena_bytes}" in x for x in lines
    )
    assert ["=0" in line for line in lines] == [False, True]

    config.shared_arena = Membership(folder="/dev/shm/arena", name="engine", steps_in_flight=1)
    starts.report_graphs(arena_bytes // 5, config, is_left_out=True)
    assert len(lines) == 2


@pytest.mark.slow
def test_what_graphs_are_estimated_to_take_is_told_beside_the_arena(tiny_model, run_engine):
    def told(**environment):
        result = run_engine(
            tiny_model("llama"),
            prompts_of_lengths([20], seed=34),
            options=JENGA | {"kv_cache_memory_bytes": 5 << 20},
            graph_bytes=1 << 20,
            environment={"VLLM_LOGGING_LEVEL": "INFO"} | environment,
            by_references=True,
        )
        assert "error" not in result, result["error"][-4000:]
        line = r"graphs are estimated to take (\d+) bytes, ([\d.]+) % of the arena's (\d+), (.*)"
        ((taken, share, arena, effect),) = re.findall(line, result["log"])
        assert int(taken) == 1 << 20
        assert float(share) == pytest.approx(100 * (1 << 20) / int(arena), abs=0.05)
        return int(arena), effect

    smaller, effect = told()
    assert "fewer" in effect
    whole, effect = told(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS="0")
    assert "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0" in effect
    assert whole - smaller == pytest.approx(1 << 20, abs=200_000)

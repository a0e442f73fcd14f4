"""Host memory beside the arena: the copies, and in the real engine all comes back as it was."""

import pytest
import torch

from jenga.request import CopyPath, PageCopy
from jenga.vllm_plugin.copy_rounds import CopyRound, copy_rounds, runs_of_copies
from tests.machines.geometries import STATES
from tests.vllm_plugin.conftest import NUM_WORKERS, V2_RUNNER, assert_same_generation
from tests.vllm_plugin.test_hybrid_engine import CUTS, TURN
from tests.vllm_plugin.test_prefix_caching import prompts_over_shared_prefixes

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
ON_V1, ON_V2 = {V2_RUNNER: "0"}, {V2_RUNNER: "1"}


# Copies


def move(path, source, target, table=0):
    return PageCopy(table_index=table, source=source, target=target, path=path)


def rounds_of(*copies):
    return [(r.path, r.source_pages, r.target_pages) for r in copy_rounds(copies, STATES)]


OUT, BACK, WITHIN = CopyPath.TO_HOST, CopyPath.FROM_HOST, CopyPath.IN_ARENA


def test_pages_of_one_number_in_both_memories_are_not_the_same():
    assert rounds_of(move(OUT, 5, 9), move(OUT, 6, 5), move(OUT, 9, 6)) == [
        (OUT, (5, 6, 9), (9, 5, 6))
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(move(OUT, 5, 9), move(BACK, 8, 5), id="a_page_is_saved_then_loaded"),
        pytest.param(move(BACK, 9, 5), move(OUT, 6, 9), id="a_page_there_is_read_then_written"),
        pytest.param(move(BACK, 9, 5), move(OUT, 5, 8), id="what_was_loaded_is_saved"),
        pytest.param(move(OUT, 5, 9), move(BACK, 9, 6), id="what_was_saved_is_loaded"),
        pytest.param(move(OUT, 5, 9), move(WITHIN, 6, 5), id="a_page_is_saved_then_copied_to"),
        pytest.param(move(BACK, 9, 5), move(WITHIN, 5, 6), id="what_was_loaded_is_copied"),
        pytest.param(move(OUT, 5, 9), move(OUT, 6, 9), id="a_page_there_is_written_twice"),
    ],
)
def test_copies_between_memories_that_touch_keep_their_order(first, second):
    rounds = rounds_of(first, second)

    assert [path for path, _, _ in rounds] == [first.path, second.path]


def test_large_pages_that_change_hands_in_either_memory_keep_the_order():
    k, other = [STATES.page_tables[index].small_pages_per_large_page for index in (0, 1)]
    # The same large page of host memory, then of the arena, as one table's and the other's.
    there = (move(OUT, 7 * k, 3 * k), move(OUT, 8 * other, 3 * other, table=1))
    here = (move(BACK, 7 * k, 3 * k), move(BACK, 8 * other, 3 * other, table=1))

    for copies in (there, here):
        assert [r.small_pages_per_large_page for r in copy_rounds(copies, STATES)] == [k, other]
        assert rounds_of(*copies) == rounds_of(copies[0]) + rounds_of(copies[1])
    # Large pages of the same number in both memories have nothing to do with each other.
    assert len({r.path for r in copy_rounds((there[0], here[1]), STATES)}) == 2


def test_neighbours_that_become_neighbours_are_one_copy():
    runs = runs_of_copies((4, 5, 6, 8, 9, 2), (1, 2, 4, 5, 6, 7))

    assert list(runs) == [(4, 1, 2), (6, 4, 1), (8, 5, 2), (2, 7, 1)]
    assert list(runs_of_copies((), ())) == []


@pytest.fixture
def memories():
    """An arena of 4 large pages of 24 bytes, and its first cache."""
    arena = torch.randint(-100, 100, (4 * 24,), dtype=torch.int8)
    return arena, arena.view(4, 24)[:, :8]


def test_pages_go_to_host_memory_and_come_back_elsewhere(memories):
    from jenga.vllm_plugin.host_memory import allocate_host_memory, copy_through_host

    arena, cache = memories
    before = arena.clone().view(12, 8)
    allocate_host_memory([cache], 6 * 24)
    out = CopyRound(
        small_pages_per_large_page=3, source_pages=(4, 5, 9), target_pages=(7, 8, 16), path=OUT
    )
    back = CopyRound(
        small_pages_per_large_page=3, source_pages=(8, 16), target_pages=(3, 4), path=BACK
    )

    copy_through_host([cache], arena, 4, out)
    arena.view(12, 8)[9] = 0
    copy_through_host([cache], arena, 4, back)

    expected = before.clone()
    expected[9] = 0
    expected[3], expected[4] = before[5], before[9]
    assert torch.equal(arena.view(12, 8), expected)


def test_pages_ordered_to_host_memory_that_is_not_there_are_an_error(memories):
    from jenga.errors import InvariantError
    from jenga.vllm_plugin.host_memory import copy_through_host

    arena, cache = memories
    out = CopyRound(small_pages_per_large_page=3, source_pages=(4,), target_pages=(7,), path=OUT)

    with pytest.raises(InvariantError, match="1 pages are to be copied, and there is no host mem"):
        copy_through_host([cache], arena, 4, out)


def test_host_memory_that_cannot_be_had_is_refused_by_the_option(memories):
    from jenga.vllm_plugin.host_memory import allocate_host_memory

    with pytest.raises(MemoryError, match=r"--kv-offloading-size: \d+ bytes of host memory cannot"):
        allocate_host_memory([memories[1]], 1 << 60)


# Engines


def run_thrice(run_engine, model, prompts, *, options, environment=None, reference=None, **job):
    """Run a model by others, by ours, and by ours with host memory.

    Returns:
        The results of the last two, of which the tokens are those of the first.
    """
    theirs = run_engine(model, prompts, options=CUTS, **job | (reference or {}))
    alone, ours = (
        run_engine(
            model,
            prompts,
            options=CUTS | JENGA | options | host,
            environment=environment or {},
            fill_arena=True,
            report_manager=True,
            **job,
        )
        for host in ({}, {"kv_offloading_size": 1 / 32})
    )
    assert_same_generation(alone, theirs)
    assert_same_generation(ours, theirs)
    return alone, ours


def check_host(alone, ours):
    """Check that what the arena lost was found again."""
    assert alone["host"] is None
    assert ours["host"]["loaded_bytes"] > 0
    assert ours["host"]["stored_bytes"] == ours["host"]["cached_bytes"] > 0
    assert ours["cache"]["hit_tokens"] > alone["cache"]["hit_tokens"]
    assert ours["request_tokens"] == {}


@pytest.mark.vllm
def test_windows_find_in_host_memory_what_the_arena_lost(tiny_model, run_engine):
    prompts = prompts_over_shared_prefixes(8, seed=11) * 2
    model, options = tiny_model("gpt_oss"), CUTS | JENGA | {"kv_cache_memory_bytes": 1 << 20}

    stock = run_engine(model, prompts, max_tokens=4, options=CUTS)
    ours = run_engine(
        model,
        prompts,
        max_tokens=4,
        options=options | {"kv_offloading_size": 1 / 32},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, stock)
    assert ours["host"]["loaded_bytes"] > 0
    # All that is found of a prompt the first time is found the second, and its own tokens.
    hits = [output["cached_tokens"] for output in ours["outputs"]]
    for prompt, first, second in zip(prompts, hits[:8], hits[8:], strict=False):
        assert second >= max(first, (len(prompt) - 1) // 16 * 16 - 32)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "arena_bytes", "runner"),
    [
        pytest.param("granite_hybrid", 5 << 19, ON_V1, id="mamba2"),
        pytest.param("granite_hybrid", 5 << 19, ON_V2, id="mamba2_on_v2"),
        pytest.param("jamba", 1 << 20, ON_V2, id="mamba1_on_v2"),
        pytest.param("gemma3", 7 << 18, ON_V2, id="windows_on_v2"),
    ],
)
def test_models_find_in_host_memory_what_the_arena_lost(
    name, arena_bytes, runner, tiny_model, run_engine
):
    alone, ours = run_thrice(
        run_engine,
        tiny_model(name),
        prompts_over_shared_prefixes(12, seed=23),
        turns=[TURN],
        options={"kv_cache_memory_bytes": arena_bytes},
        environment=runner,
        reference={"script": "reference_process.py"} if name == "jamba" else {},
    )

    check_host(alone, ours)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two ranks")
@pytest.mark.parametrize(
    ("name", "arena_bytes", "ranks"),
    [
        pytest.param("gemma3", 7 << 17, {"pipeline_parallel_size": 2}, id="pipeline_of_windows"),
        pytest.param("jamba", 5 << 17, {"pipeline_parallel_size": 2}, id="pipeline_of_states"),
        pytest.param("granite_hybrid", 5 << 18, {"tensor_parallel_size": 2}, id="tensor_parallel"),
    ],
)
def test_ranks_find_in_host_memory_what_their_arenas_lost(
    name, arena_bytes, ranks, tiny_model, run_engine
):
    extension = {"worker_extension_cls": "tests.vllm_plugin.pipeline_worker.RankOfPipeline"}
    is_pipeline = "pipeline_parallel_size" in ranks
    prompts = prompts_over_shared_prefixes(12, seed=32)
    reference = {"script": "reference_process.py"} if name == "jamba" else {}

    theirs = run_engine(tiny_model(name), prompts, turns=[TURN], options=CUTS, **reference)
    ours = run_engine(
        tiny_model(name),
        prompts,
        turns=[TURN],
        options=CUTS
        | JENGA
        | ranks
        | (extension if is_pipeline else {})
        | {"kv_cache_memory_bytes": arena_bytes, "kv_offloading_size": 1 / 16},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PP_LAYER_PARTITION": "3,3"}
        if name == "jamba"
        else {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        fill_arena=is_pipeline,
        report_manager=True,
    )

    assert "error" not in ours, ours["error"][-4000:]
    assert_same_generation(ours, theirs)
    assert ours["host"]["loaded_bytes"] > 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_an_encoder_made_comes_back_from_host_memory(tiny_model, run_engine):
    prompts = prompts_over_shared_prefixes(4, seed=5) * 3
    seeds = [0, 1, 2, 3] * 3
    whisper = {"skip_tokenizer_init": False, "max_num_batched_tokens": 256, "max_num_seqs": 2}
    job = {"audio_seeds": seeds, "max_tokens": 4, "rounds": 3}

    stock = run_engine(tiny_model("whisper"), prompts, options=whisper, **job)
    ours = run_engine(
        tiny_model("whisper"),
        prompts,
        options=whisper | JENGA | {"kv_cache_memory_bytes": 2 << 20, "kv_offloading_size": 1 / 16},
        fill_arena=True,
        report_manager=True,
        **job,
    )

    assert_same_generation(ours, stock)
    assert ours["host"]["loaded_bytes"] > 0
    assert sum(ours["encoded"]) == 4  # each audio once

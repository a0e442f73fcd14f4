"""The replay of vLLM schedules what vLLM's own scheduler schedules, step by step, hit by hit."""

import os
import random
from dataclasses import replace
from importlib.util import find_spec

import pytest

from jenga.sim.arenas.by_name import make_arena
from jenga.sim.arenas.vllm_plan import read_stock_options
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.batching.scheduler import Scheduler
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.replays.row_file import RowFile
from jenga.sim.replays.session import Machine, Running, Settings, Trace, replay_rows, run_row
from jenga.sim.results.rows import StepRow, read_rows
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import (
    ChunkedLocal,
    FullAttention,
    Layer,
    ModelSpec,
    SlidingWindow,
    State,
    StatePart,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

CHUNK_TOKENS = 96
MAX_REQUESTS = 6
MOST_STEPS = 1000


def layers(*names, slot_bytes=64):
    return tuple(Layer(name=name, slot_bytes=slot_bytes) for name in names)


def states(*names, shape):
    part = StatePart(name="recurrent", shape=shape, dtype="bfloat16")
    return tuple(Layer(name=name, slot_bytes=part.num_bytes, parts=(part,)) for name in names)


FULL = FullAttention(name="full", layers=layers("a", "b"))
MODELS = {
    "full": (FULL,),
    "full_and_sliding": (
        FULL,
        SlidingWindow(name="sliding", layers=layers("c", "d", "e", "f"), window_tokens=48),
    ),
    "full_and_chunked": (
        FULL,
        ChunkedLocal(name="chunked", layers=layers("c", "d"), chunk_tokens=64),
    ),
    # 32 tokens of attention are as large as a state.
    "full_and_mamba1": (FULL, State(name="state", layers=states("c", "d", shape=(60, 16)))),
    "full_and_mamba2": (FULL, State(name="state", layers=states("c", "d", shape=(4, 15, 16)))),
    "full_and_drafted_mamba1": (
        FULL,
        State(name="state", layers=states("c", "d", shape=(60, 16)), draft_tokens=2),
    ),
}


def workload(seed):
    """Requests of a few shared beginnings; all there from the start."""
    draw = random.Random(seed)
    requests = []
    for number in range(24):
        pieces = [Piece(f"document {draw.randrange(4)}", draw.choice((64, 100, 130)))]
        if draw.random() < 0.8:
            pieces.append(Piece(f"question {draw.randrange(8)}", draw.randint(1, 80)))
        requests.append(
            Request(name=str(number), prompt=tuple(pieces), output_tokens=draw.randint(1, 40))
        )
    return requests


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory):
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs

    from tests.vllm_plugin.tiny import tiny_checkpoints

    return EngineArgs(
        model=str(tiny_checkpoints.save("gpt_oss", tmp_path_factory.mktemp("models"))),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=MAX_REQUESTS,
        async_scheduling=False,
    ).create_engine_config()


def tokens_of(request):
    """Token ids that are equal where the pieces are."""
    return [
        hash((piece.content, number)) % 1_000_003
        for piece in request.prompt
        for number in range(piece.num_tokens)
    ]


def vllm_schedule(engine_config, plan, requests):
    """What vLLM's scheduler computes in each step, over the arena of a plan, and what it hits."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as StockRequest
    from vllm.v1.structured_output import StructuredOutputManager

    cache_config = engine_config.cache_config
    cache_config.enable_prefix_caching = True
    cache_config.num_gpu_blocks = plan.kv_cache_config.num_blocks
    cache_config.block_size = plan.vllm_config.cache_config.block_size
    cache_config.mamba_cache_mode = plan.vllm_config.cache_config.mamba_cache_mode
    scheduler = StockScheduler(
        vllm_config=engine_config,
        kv_cache_config=plan.kv_cache_config,
        structured_output_manager=StructuredOutputManager(engine_config),
        block_size=plan.scheduler_tokens,
        hash_block_size=plan.hash_tokens,
        log_stats=True,
    )
    init_none_hash(sha256)
    for request in requests:
        scheduler.add_request(
            StockRequest(
                request_id=request.name,
                prompt_token_ids=tokens_of(request),
                sampling_params=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=get_request_block_hasher(plan.hash_tokens, sha256),
            )
        )
    steps, hits = [], {}
    drawn = 0
    while scheduler.has_unfinished_requests():
        assert len(steps) < MOST_STEPS
        step = scheduler.schedule()
        for new in step.scheduled_new_reqs:
            hits.setdefault(new.req_id, new.num_computed_tokens)
        names = list(step.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            drawn += 1
            # No two requests generate the same.
            is_done = request.num_computed_tokens >= request.num_tokens
            sampled.append([2_000_000 + drawn] if is_done else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        steps.append(dict(step.num_scheduled_tokens))
        scheduler.update_from_output(step, output)
    return steps, hits


def our_schedule(arena, requests):
    scheduler = Scheduler(arena, chunk_tokens=CHUNK_TOKENS, max_requests=MAX_REQUESTS)
    active = [ActiveRequest(request) for request in requests]
    scheduler.waiting.extend(active)
    steps = []
    while scheduler.waiting or scheduler.running:
        assert len(steps) < MOST_STEPS
        batch = scheduler.schedule()
        steps.append({chunk.active.name: chunk.num_tokens for chunk in batch.chunks})
        scheduler.finish(batch, 1.0)
    return steps, {each.name: each.hit_tokens for each in active}, scheduler


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_replay_of_vllm_schedules_as_vllm_does(engine_config, name, seed):
    model = ModelSpec(name=name, layer_types=MODELS[name])
    requests = workload(seed)
    # Room for a few requests: some wait, some are preempted, cached blocks are evicted.
    arena_bytes = 60_000 if name == "full" else 120_000
    arena = make_arena("vllm", model, arena_bytes, chunk_tokens=CHUNK_TOKENS)

    wanted_steps, wanted_hits = vllm_schedule(engine_config, arena.plan, requests)
    steps, hits, scheduler = our_schedule(arena, requests)

    assert steps == wanted_steps
    assert hits == wanted_hits
    assert sum(hits.values()) > 0
    assert arena.num_evicted > 0
    if name == "full":
        assert scheduler.num_preemptions > 0


def books(arena):
    """All that vLLM's manager remembers of blocks: of each request, free in order, and cached."""
    manager = arena._manager
    pool = manager.block_pool
    held = [
        {name: [block.block_id for block in blocks] for name, blocks in each.req_to_blocks.items()}
        for each in manager.coordinator.single_type_managers
    ]
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return held, free, [(block.block_hash, block.ref_cnt) for block in pool.blocks]


@pytest.mark.parametrize(
    ("option", "is_asynchronous"), [("default", True), ("retention=0", True), ("match=16", False)]
)
@pytest.mark.parametrize("name", MODELS)
def test_steps_in_which_vllm_is_not_asked_would_change_nothing(
    monkeypatch, name, option, is_asynchronous
):
    model = ModelSpec(name=name, layer_types=MODELS[name])
    draw = random.Random(0)
    requests = [replace(each, output_tokens=draw.randint(1, 150)) for each in workload(seed=1)]

    def run(*, always_asks):
        arena = make_arena(
            "vllm",
            model,
            160_000,
            chunk_tokens=CHUNK_TOKENS,
            steps_in_flight=1 + is_asynchronous,
            stock=read_stock_options(option),
        )
        allocate, num_asked = arena._manager.allocate_slots, []
        arena._manager.allocate_slots = lambda *args, **kwargs: (
            num_asked.append(1),
            allocate(*args, **kwargs),
        )[1]
        with monkeypatch.context() as patch:
            if always_asks:
                patch.setattr(arena._ends, "is_near", lambda _num_tokens: True)
            replay = Replay(
                requests, arena, clock=constant_clock(1.0), is_asynchronous=is_asynchronous
            )
            seen = [(step, books(arena)) for step in replay]
        return seen, replay.hit_tokens, arena.num_evicted, len(num_asked)

    *seen, num_asked = run(always_asks=False)
    *wanted, num_asked_always = run(always_asks=True)

    assert seen == wanted
    assert num_asked < 0.8 * num_asked_always


def test_bytes_of_vllm_add_up_and_shared_blocks_are_used_once():
    model = ModelSpec(name="full", layer_types=MODELS["full"])
    arena = make_arena("vllm", model, 120_000)
    document = Piece("document", 160)
    requests = [
        Request(name=name, prompt=(document, Piece(name, 16)), output_tokens=8) for name in "abc"
    ]
    scheduler = Scheduler(arena)
    scheduler.waiting.extend(map(ActiveRequest, requests))

    for step in range(8):
        batch = scheduler.schedule()
        memory = arena.memory(scheduler.running)
        num_tokens = 176 + step
        # All come in the first step, in which vLLM lets the second already share the first's.
        assert memory.used_bytes == (160 + 3 * (num_tokens - 160)) * 128
        blocks = 10 + 3 * -(-(num_tokens - 160) // 16)
        assert memory.used_bytes + memory.useless_bytes == blocks * 2048
        total = memory.used_bytes + memory.useless_bytes + memory.cached_bytes
        assert total + memory.unallocated_bytes == 57 * 2048
        scheduler.finish(batch, 1.0)

    assert arena.memory([]).used_bytes == 0
    # The last token generated is never computed.
    assert arena.memory([]).cached_bytes == (10 + 3) * 2048


@pytest.mark.parametrize("name", ["full_and_sliding", "full_and_mamba2"])
def test_a_replay_of_vllm_that_was_cut_goes_on_to_the_same_rows(tmp_path, name):
    model = ModelSpec(name=name, layer_types=MODELS[name])
    machine = Machine(model=model, arena_bytes=1 << 19, clock=constant_clock(0.5))
    trace = Trace("made", lambda: iter(workload(0)))
    settings = Settings(every=1, keep_requests=True, chunk_tokens=CHUNK_TOKENS)
    row = run_row(machine, "vllm", trace, settings)
    whole = list(replay_rows(row, machine, trace, settings))
    file = RowFile(tmp_path / "rows.jsonl", snapshot_every_s=0)
    rows = file.written(Running(row, machine, trace, settings))

    # The generator is closed in the middle, as a process that is killed leaves it.
    for each in rows:
        if isinstance(each, StepRow) and each.step == 20:
            break
    rows.close()
    again = RowFile(tmp_path / "rows.jsonl")
    snapshot = again.snapshot_of(row.run)
    num_steps = snapshot.replay.num_steps
    list(again.written(Running(row, machine, trace, settings, snapshot=snapshot)))

    assert num_steps == 18
    assert whole[-1].num_steps > 20
    assert list(read_rows(tmp_path / "rows.jsonl")) == whole

"""Cache events: who follows them knows what is cached, and from which tokens."""

import random

import pytest
import torch

from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.scheduler.test_cache_manager import request

pytestmark = pytest.mark.vllm

MIB = 1 << 20
ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
KINDS = {
    "gpt_oss": [("full_attention", None), ("sliding_window", 32)],
    "granite_hybrid": [("full_attention", None), ("mamba", None)],
    "lfm2": [("full_attention", None), ("mamba", None)],
}


def layers_of(model):
    """Layers like those of a tiny model, in vLLM's words."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    full = {"full": FullAttentionSpec(**ATTENTION)}
    if model == "gpt_oss":
        return full | {
            f"sliding.{n}": SlidingWindowSpec(**ATTENTION, sliding_window=32) for n in range(2)
        }
    mamba2 = {"shapes": ((3, 160), (4, 32, 32)), "dtypes": (torch.float32,) * 2}
    short_conv = {"shapes": ((2, 128),), "dtypes": (torch.float32,)}
    short_conv |= {"mamba_type": MambaAttentionBackendEnum.SHORT_CONV}
    states = {"granite_hybrid": mamba2, "lfm2": short_conv}[model]
    return full | {f"mamba.{n}": MambaSpec(block_size=512, **states) for n in range(2)}


@pytest.fixture
def make_scheduler(tiny_model, monkeypatch):
    """Get a maker of real schedulers that tell of their cache, hashes in full."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core
    from vllm.v1.structured_output import StructuredOutputManager

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")

    def make(model, arena_bytes, **options):
        engine_config = EngineArgs(
            model=str(tiny_model(model)),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_batched_tokens=64,
            max_num_seqs=5,
            attention_backend="JENGA_TRITON",
            kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
            **options,
        ).create_engine_config()
        groups = get_kv_cache_groups(engine_config, layers_of(model))
        config = get_kv_cache_config_from_groups(engine_config, groups, arena_bytes)
        engine_config.cache_config.num_gpu_blocks = config.num_blocks
        block_size, hash_block_size = core.resolve_kv_cache_block_sizes(config, engine_config)
        return Scheduler(
            vllm_config=engine_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(engine_config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )

    return make


class Follower:
    """Knows of a cache what its events tell, as a router does."""

    def __init__(self, scheduler, kinds):
        self.kinds = kinds
        self.found, self.hosted = ([set() for _ in kinds] for _ in range(2))
        self.num_removed = self.num_cleared = 0
        self.batches = []
        scheduler.kv_event_publisher.publish = self.follow

    def follow(self, batch):
        from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

        self.batches.append(batch.events)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.found, self.hosted = ([set() for _ in self.kinds] for _ in range(2))
                self.num_cleared += 1
                continue
            known = (self.hosted if event.medium == "CPU" else self.found)[event.group_idx]
            if not isinstance(event, BlockStored):
                # What goes was there: nothing is told twice, nothing is missing.
                assert set(event.block_hashes) <= known
                known.difference_update(event.block_hashes)
                self.num_removed += len(event.block_hashes)
            elif event.medium == "CPU":
                # A block known by its tokens, which is in the arena still.
                assert not event.token_ids
                assert not event.block_size
                assert set(event.block_hashes) <= self.found[event.group_idx] - known
                known.update(event.block_hashes)
            else:
                self.check_stored(event)
                known.update(event.block_hashes)

    def check_stored(self, event):
        """The hashes are those of the tokens, each block after the one before."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        assert event.medium == "GPU"
        assert event.block_size == 16
        assert len(event.token_ids) == 16 * len(event.block_hashes)
        spec = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        assert spec == self.kinds[event.group_idx]
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[16 * number : 16 * number + 16]
            assert block_hash == hash_block_tokens(sha256, parent, tokens)
            parent = block_hash


def cached(scheduler):
    """What the manager itself has in its caches, for each group."""
    return [
        {key for key in table.cache.keys if key is not None}
        for table in scheduler.kv_cache_manager.manager._tables
    ]


def hosted(scheduler):
    """What the manager itself has in host memory, for each group."""
    host = scheduler.kv_cache_manager.manager.prefix_cache.host
    return [{key for key in cache.keys if key is not None} for cache in host._caches]


def run_step(scheduler, source):
    """Schedule a step and answer it with a random token for each request whose prompt is read."""
    from vllm.v1.outputs import ModelRunnerOutput

    step = scheduler.schedule()
    names = list(step.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    sampled = [
        [source.randrange(3, 500)] if each.num_computed_tokens >= each.num_tokens else []
        for each in requests
    ]
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
    )
    scheduler.update_from_output(step, output)
    return step


def run_traffic(scheduler, follower, source, *, num_requests):
    """Requests over a few prefixes, some of them aborted; the follower is right in every step."""
    prefixes = [[source.randrange(3, 500) for _ in range(120)] for _ in range(4)]
    num_sent = 0
    while num_sent < num_requests or scheduler.requests:
        if num_sent < num_requests and source.random() < 0.5:
            end = source.choice((48, 80, 120))
            tokens = source.choice(prefixes)[:end]
            tokens = tokens + [source.randrange(3, 500) for _ in range(source.randrange(1, 90))]
            scheduler.add_request(request(f"r{num_sent}", tokens, source.randrange(1, 40)))
            num_sent += 1
        if scheduler.requests and source.random() < 0.05:
            from vllm.v1.request import RequestStatus

            name = source.choice(list(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        run_step(scheduler, source)
        # An abort's changes are told with the next step that has an output.
        if scheduler.requests:
            assert follower.found == cached(scheduler)
            if scheduler.kv_cache_manager.manager.prefix_cache.host is not None:
                assert follower.hosted == hosted(scheduler)


@pytest.mark.parametrize(
    ("model", "arena_bytes"),
    [
        ("gpt_oss", MIB),
        ("granite_hybrid", 3 * MIB),
        pytest.param("lfm2", MIB, marks=pytest.mark.slow),
    ],
)
def test_who_follows_the_events_knows_what_is_cached(make_scheduler, model, arena_bytes):
    scheduler = make_scheduler(model, arena_bytes)
    follower = Follower(scheduler, KINDS[model])

    run_traffic(scheduler, follower, random.Random(5), num_requests=60)

    assert all(follower.found)
    assert follower.num_removed > 100  # the arena holds a part of it
    assert not follower.num_cleared


@pytest.mark.parametrize("step_bytes", [30_000, 1 << 20], ids=["a_few_pages", "all"])
def test_what_comes_from_host_memory_ahead_is_told_of_who_waits_for_it(
    make_scheduler, monkeypatch, step_bytes
):
    from jenga.prefix import prefetch

    # As of models whose pages take a step's time to load.
    monkeypatch.setattr(prefetch, "STEP_BYTES", step_bytes)
    monkeypatch.setattr(prefetch, "LOADED_TOKENS", 0)
    scheduler = make_scheduler("gpt_oss", MIB, kv_offloading_size=1 / 32)
    manager = scheduler.kv_cache_manager.manager
    monkeypatch.setattr(manager.prefix_cache.prefetch, "_at_once_bytes", 0)
    follower = Follower(scheduler, KINDS["gpt_oss"])

    run_traffic(scheduler, follower, random.Random(8), num_requests=60)

    assert manager.host_report().ahead_bytes
    assert all(follower.found)


def test_who_follows_the_events_knows_what_host_memory_has(make_scheduler):
    scheduler = make_scheduler("granite_hybrid", 3 * MIB, kv_offloading_size=6 / 1024)
    follower = Follower(scheduler, KINDS["granite_hybrid"])
    source = random.Random(9)

    run_traffic(scheduler, follower, source, num_requests=120)

    report = scheduler.kv_cache_manager.manager.host_report()
    assert report.lost_bytes
    assert all(follower.hosted)
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    run_traffic(scheduler, follower, source, num_requests=4)
    assert follower.num_cleared == 1


def test_a_reset_cache_is_told_as_cleared(make_scheduler):
    scheduler = make_scheduler("gpt_oss", MIB)
    follower = Follower(scheduler, KINDS["gpt_oss"])
    source = random.Random(6)
    run_traffic(scheduler, follower, source, num_requests=4)

    assert scheduler.kv_cache_manager.reset_prefix_cache()
    run_traffic(scheduler, follower, source, num_requests=4)

    assert follower.num_cleared == 1
    assert follower.found == cached(scheduler)


@pytest.mark.parametrize("model", list(KINDS))
def test_hits_are_told_again_to_who_asks_for_all_that_is_read(make_scheduler, model):
    scheduler = make_scheduler(model, 8 * MIB)
    follower = Follower(scheduler, KINDS[model])
    source = random.Random(7)
    tokens = [source.randrange(3, 500) for _ in range(100)]
    scheduler.add_request(request("first", tokens))
    while scheduler.requests:
        run_step(scheduler, source)

    again = request("again", tokens)
    again.kv_cache_report_mode = "full"
    follower.batches.clear()
    scheduler.add_request(again)
    run_step(scheduler, source)

    told = {
        event.group_idx: len(event.token_ids) // 16
        for event in follower.batches[0]
        if event.token_ids[-1] == tokens[95]
    }
    # All of full attention, the pages of a window, the last state.
    assert told == {0: 6, 1: 2 if model == "gpt_oss" else 1}


def stored(result):
    """Block hash -> tokens, parent and kind of a block, of all that an engine told."""
    assert "error" not in result, result["error"][-4000:]
    blocks = {}
    for event in result["events"]:
        assert event["type"] == "BlockStored"
        parent = event["parent_block_hash"]
        for number, name in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][32 * number : 32 * number + 32]
            blocks[name] = (tuple(tokens), parent, event["kv_cache_spec_kind"])
            parent = name
    return blocks


@pytest.mark.slow
def test_an_engine_tells_a_router_what_stock_tells(tiny_model, run_engine, tmp_path):
    prompts = prompts_of_lengths([40, 70, 100, 33], seed=3, shared_tokens=32)

    def run(name, **options):
        return run_engine(
            tiny_model("llama"),
            prompts,
            max_tokens=20,
            by_references=True,
            options={
                "enable_prefix_caching": True,
                "block_size": 32,  # vLLM's attention on a CPU takes no less
                "kv_events_config": {
                    "enable_kv_cache_events": True,
                    "endpoint": f"ipc://{tmp_path}/{name}",
                },
                **options,
            },
        )

    stock = stored(run("stock"))
    ours = stored(run("ours", attention_backend="JENGA_TRITON"))

    assert ours == stock
    assert len(ours) == 1 + sum((length + 19) // 32 - 1 for length in (40, 70, 100, 33))

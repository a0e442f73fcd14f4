"""What an engine tells of itself, and how it schedules under each option, beside stock vLLM.

All of vLLM's engine runs but its workers, so what differs is the plugin's doing.
"""

import json
from collections import Counter

import pytest
import transformers

from tests.once import made_once
from tests.vllm_plugin.conftest import PROGRAMS, engine_environment, run_with_children

pytestmark = pytest.mark.vllm


def prompt(length, seed=0, shared=0):
    """Make a prompt of so many tokens, of which some are the same for every seed."""
    return [20 + 7 * i % 400 for i in range(shared)] + [
        20 + (11 * i + 37 * seed) % 400 for i in range(length - shared)
    ]


def request(length, seed=0, *, shared=0, max_tokens=4, **further):
    return {
        "prompt": prompt(length, seed, shared),
        "sampling": {"max_tokens": max_tokens},
    } | further


MIXED = [
    [request(50, 1, shared=40), request(100, 2, shared=40), request(30, 3)],
    [request(50, 1, shared=40), request(130, 4, shared=40), request(16, 5), request(64, 6)],
    [request(100, 2, shared=40, max_tokens=20), request(64, 6), request(90, 3)],
]
"""Rounds of requests: some with a prefix in common, some again, some of whole blocks."""

UNEVEN = [
    [request(50, 1, shared=40), request(100, 2, shared=40), request(30, 3)],
    [request(50, 1, shared=40), request(130, 4, shared=40), request(17, 5), request(70, 6)],
    [request(100, 2, shared=40, max_tokens=20), request(70, 6), request(90, 3)],
]
"""Prompts of no whole blocks.

Of a window, stock vLLM does not keep the block that ends a prompt of whole ones: the same prompt
computes a token of it again. A longer one finds it here.
"""

WHOLE = [[request(64, 6, shared=64)], [request(90, 7, shared=64)]]

PRIORITIES = [[request(60, i, priority=5 - i, max_tokens=6) for i in range(6)]]

SALTED = [
    [request(60, 1, inputs={"cache_salt": salt}) if salt else request(60, 1)]
    for salt in ("a", "b", "a", None)
]

OPTIONS = {
    "defaults": {},
    "max_num_batched_tokens": {"max_num_batched_tokens": 24},
    "max_num_scheduled_tokens": {"max_num_scheduled_tokens": 20},
    "max_num_seqs": {"max_num_seqs": 2},
    "max_num_active_seqs": {"max_num_active_seqs": 2},
    "long_prefill_token_threshold": {"long_prefill_token_threshold": 16},
    "long_prefill_token_threshold_adaptive": {
        "long_prefill_token_threshold": 16,
        "long_prefill_token_threshold_adaptive": True,
    },
    "enable_chunked_prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    "prefill_schedule_interval": {"prefill_schedule_interval": 3},
    "scheduler_reserve_full_isl": {"scheduler_reserve_full_isl": False},
    "watermark": {"watermark": 0.3, "kv_cache_memory_bytes": 20 << 15, "max_model_len": 160},
    "policy": {"scheduling_policy": "priority", "max_num_seqs": 2},
    "async_scheduling": {"async_scheduling": True},
    "scheduler_cls": {"scheduler_cls": "tests.vllm_plugin.programs.dry_process.NamedScheduler"},
    "enable_prefix_caching": {"enable_prefix_caching": False},
    "prefix_caching_hash_algo": {"prefix_caching_hash_algo": "sha256_cbor"},
    "block_size": {"block_size": 32},
    "prefix_match_unit": {"block_size": 32, "prefix_match_unit": 16},
    "num_gpu_blocks_override": {"num_gpu_blocks_override": 60},
    "kv_cache_memory_bytes": {"kv_cache_memory_bytes": 40 << 15},
    # Each step reads whole prompts: ours lets one of several steps in later than stock does.
    "max_model_len": {
        "max_model_len": -1,
        "kv_cache_memory_bytes": 16 << 15,
        "max_num_batched_tokens": 256,
    },
}
"""Options of an engine, by the field of vLLM's configurations they are for."""

WIDELY_USED = {
    "defaults",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
    "policy",
    "async_scheduling",
    "enable_prefix_caching",
    "block_size",
    "kv_cache_memory_bytes",
    "max_model_len",
}
"""Options whose tests are fast ones."""

SMALL = {"max_model_len": -1, "kv_cache_memory_bytes": 16 << 15}

GROWING = [[request(63, 1, max_tokens=20), request(62, 2, max_tokens=20), request(110, 3)]]
"""Two requests that soon need a page more each, and a prompt that takes several steps and all that
is free."""

LAYERS = ("full", "windows", "states")

BACKENDS = {"ours": {"attention_backend": "JENGA_TRITON"}, "stock": {}}


def jobs_of(model, recurrent_model, option_names):
    """Make the jobs of all tests, of those of options by name: each for both backends."""
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    jobs = {}
    for backend, selected in BACKENDS.items():
        common = {"model": str(model), **selected}
        for name in option_names:
            has_windows = name == "prefix_match_unit"  # it is for several page tables
            rounds = UNEVEN if has_windows else PRIORITIES if name == "policy" else MIXED
            layers = "windows" if has_windows else "full"
            jobs[f"{name} {backend}"] = {
                "options": common | OPTIONS[name],
                "rounds": rounds,
                "layers": layers,
                # Ours lets few requests in where others wait for what is cached; stock does not.
                "environment": {"JENGA_LEFT_SHARE": "0"},
                # The two evict different pages, and what is hit after that would hide the option.
                "resets": name == "watermark",
            }
        for layers in LAYERS:
            jobs[f"{layers} {backend}"] = {
                "options": common | events,
                "rounds": UNEVEN,
                "layers": layers,
            }
            jobs[f"{layers}_of_whole_blocks {backend}"] = {
                "options": common,
                "rounds": WHOLE,
                "layers": layers,
            }
        jobs[f"salts {backend}"] = {"options": common, "rounds": SALTED}
        jobs[f"resets {backend}"] = {"options": common | events, "rounds": MIXED, "resets": True}
        jobs[f"states_alone {backend}"] = {
            "options": common | {"model": str(recurrent_model), "enable_prefix_caching": True},
            "rounds": [[request(length, shared=100)] for length in (100, 100, 130)],
            "layers": "states_alone",
        }
        for name, options, rounds in (
            ("evictions", OPTIONS["watermark"], MIXED),
            ("prompts_in_steps", SMALL, MIXED),
            ("growing", SMALL, GROWING),
        ):
            jobs[f"{name} {backend}"] = {
                "options": common | options,
                "rounds": rounds,
                "environment": {"JENGA_LEFT_SHARE": "0"},
            }
        jobs[f"preemptions {backend}"] = {
            "options": common | {"kv_cache_memory_bytes": 24 << 15, "max_model_len": 256},
            "rounds": [[request(90, i, max_tokens=120) for i in range(4)]],
            "environment": {"JENGA_LEFT_SHARE": "0"},
        }
    return jobs


@pytest.fixture(scope="module")
def told(request, tiny_model, tmp_path_factory):
    """Get what the engine of each job told, by name and backend."""
    tests = [each for each in request.session.items if each.path == request.path]
    asked = {each.callspec.params.get("name") for each in tests if hasattr(each, "callspec")}
    names = [name for name in OPTIONS if name in asked | {"defaults"}]

    def make(folder):
        recurrent = {"vocab_size": 512, "hidden_size": 64, "num_heads": 4, "head_dim": 32}
        transformers.Mamba2Config(
            **recurrent, num_hidden_layers=2, architectures=["Mamba2ForCausalLM"]
        ).save_pretrained(folder / "mamba2")
        jobs = jobs_of(tiny_model("llama"), folder / "mamba2", names)
        (folder / "jobs.json").write_text(json.dumps(jobs))
        is_done, log = run_with_children(
            [PROGRAMS / "dry_process.py", folder / "jobs.json", folder / "results.json"],
            engine_environment(),
        )
        assert is_done, log[-4000:]

    made = made_once("engine-numbers", make, tmp_path_factory)
    results = json.loads((made / "results.json").read_text())

    def get(name):
        ours, stock = (results[f"{name} {backend}"] for backend in BACKENDS)
        assert "error" not in ours, ours["error"]
        assert "error" not in stock, stock["error"]
        assert ours["manager"] == "JengaKVCacheManager"
        assert stock["manager"] == "KVCacheManager"
        assert ours["held"] == {}
        return ours, stock

    return get


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in WIDELY_USED else pytest.mark.slow) for name in OPTIONS],
)
def test_an_option_has_the_effect_that_it_has_in_stock_vllm(name, told):
    ours, stock = told(name)

    assert ours["requests"] == stock["requests"]
    assert ours["steps"] == stock["steps"]
    assert ours["usages"] == pytest.approx(stock["usages"])
    assert ours["metrics"] == stock["metrics"]
    assert ours["scheduler"] == stock["scheduler"]
    assert ours["hash_block_size"] == stock["hash_block_size"]
    info, stock_info = dict(ours["cache_config_info"]), dict(stock["cache_config_info"])
    # Stock vLLM counts the block with it that no request is ever given.
    tokens, stock_tokens = (int(each.pop("kv_cache_size_tokens")) for each in (info, stock_info))
    assert stock_tokens - ours["block_size"] <= tokens < stock_tokens
    concurrency, stock_concurrency = (
        float(each.pop("kv_cache_max_concurrency")) for each in (info, stock_info)
    )
    assert concurrency / stock_concurrency == pytest.approx(tokens / stock_tokens, rel=1e-3)
    assert info == stock_info


@pytest.mark.parametrize("name", ["defaults", "full", "windows", "salts", "resets", "preemptions"])
def test_usage_and_metrics_are_those_of_stock_vllm(name, told):
    ours, stock = told(name)

    assert ours["requests"] == stock["requests"]
    assert ours["steps"] == stock["steps"]
    assert ours["metrics"] == stock["metrics"]


def cached_tokens(told):
    """Count the tokens that requests found in the cache."""
    return sum(each["cached_tokens"] for each in told["requests"])


def computed_tokens(told):
    """Count the tokens that each request computed, by its name."""
    counts = Counter()
    for step in told["steps"]:
        counts.update(step)
    return counts


def answers(told):
    """List the tokens of all answers."""
    return [each["tokens"] for each in told["requests"]]


def test_an_arena_too_small_for_all_that_is_asked_again_keeps_no_less_of_it_than_stock_vllm(told):
    ours, stock = told("evictions")

    assert answers(ours) == answers(stock)
    assert 0 < cached_tokens(stock) <= cached_tokens(ours)
    assert len(ours["steps"]) <= len(stock["steps"])
    assert ours["metrics"]["vllm:prefix_cache_hits"] == cached_tokens(ours)
    prompts = [len(each["prompt"]) for requests in MIXED for each in requests]
    assert ours["metrics"]["vllm:prefix_cache_queries"] == sum(prompts)


def test_a_prompt_read_in_several_steps_may_wait_for_one_but_computes_and_finds_the_same(told):
    ours, stock = told("prompts_in_steps")

    assert ours["requests"] == stock["requests"]
    assert computed_tokens(ours) == computed_tokens(stock)
    assert len(ours["steps"]) == len(stock["steps"])
    assert ours["metrics"] == stock["metrics"]


def test_a_prompt_that_leaves_no_room_to_grow_waits_where_stock_vllm_preempts_it(told):
    ours, stock = told("growing")

    assert answers(ours) == answers(stock)
    assert ours["metrics"]["vllm:num_preemptions"] == 0
    assert stock["metrics"]["vllm:num_preemptions"] > 0
    assert computed_tokens(ours).total() <= computed_tokens(stock).total()
    assert cached_tokens(ours) == cached_tokens(stock)


@pytest.mark.parametrize("layers", LAYERS)
def test_usage_tells_what_the_same_prompt_and_a_longer_one_find(layers, told):
    ours, _ = told(layers)
    first, again = ours["requests"][1], ours["requests"][7]
    assert again["cached_tokens"] == first["cached_tokens"] + first["cache_creation_tokens"]

    (first, longer), _ = (each["requests"] for each in told(f"{layers}_of_whole_blocks"))
    # The state after all of a prompt is kept when its answer goes on from there, which is later.
    assert first["cache_creation_tokens"] == (48 if layers == "states" else 64)
    assert longer["cached_tokens"] == 64


def test_models_of_recurrent_layers_alone_find_their_prefixes(told):
    ours, stock = told("states_alone")

    assert [each["cached_tokens"] for each in ours["requests"]] == [0, 96, 96]
    assert ours["requests"] == stock["requests"]
    assert ours["hash_block_size"] == stock["hash_block_size"] == 16


def told_blocks(events):
    """List what a router learns of each group's blocks: of each when it is told of it first.

    vLLM tells of a block again where a request computes what another has cached; a router keeps
    hashes in a set, and learns nothing.
    """
    known, learned = set(), []
    for event in events:
        if event["type"] == "AllBlocksCleared":
            known.clear()
            learned.append("cleared")
            continue
        if event["type"] == "BlockRemoved":
            hashes = {(event["group_idx"], each) for each in event["block_hashes"]}
            known -= hashes
            learned.append(("removed", sorted(hashes)))
            continue
        size, parent = event["block_size"], event["parent_block_hash"]
        shared = {
            key: value
            for key, value in event.items()
            if key not in {"block_hashes", "parent_block_hash", "token_ids", "extra_keys"}
        }
        keys = event["extra_keys"] or [None] * len(event["block_hashes"])
        for index, (block, key) in enumerate(zip(event["block_hashes"], keys, strict=True)):
            tokens = event["token_ids"][index * size : (index + 1) * size]
            if (event["group_idx"], block) not in known:
                learned.append([block, parent, tokens, key, shared])
                known.add((event["group_idx"], block))
            parent = block
    return learned


@pytest.mark.parametrize("name", ["full", "resets"])
def test_routers_learn_of_the_cache_what_they_learn_of_stock_vllm(name, told):
    ours, stock = told(name)

    assert "BlockStored" in {event["type"] for event in ours["events"]}
    assert told_blocks(ours["events"]) == told_blocks(stock["events"])


def test_routers_learn_of_windows_what_they_learn_of_stock_vllm_and_of_blocks_before_them(told):
    full, windows = range(2)
    ours, stock = (
        [
            [event for event in each["events"] if event["group_idx"] == group]
            for group in (full, windows)
        ]
        for each in told("windows")
    )

    assert told_blocks(ours[full]) == told_blocks(stock[full])
    # Stock vLLM caches no block that has left the window as its prompt's step ends. Its event has
    # no hash of one, but its tokens.
    stored, stock_stored = (
        [block for event in each[windows] for block in event["block_hashes"]]
        for each in (ours, stock)
    )
    assert [block for block in stored if block in stock_stored] == stock_stored
    assert len(stored) > len(stock_stored)


@pytest.mark.parametrize("layers", LAYERS)
def test_groups_are_described_as_stock_vllm_describes_its_own(layers, told):
    ours, stock = told(layers)

    assert ours["groups"] == stock["groups"]
    for each in (ours, stock):
        sizes = {(e["group_idx"], e["block_size"]) for e in each["events"] if "block_size" in e}
        assert sizes == {(group["group_idx"], group["block_size"]) for group in each["groups"]}

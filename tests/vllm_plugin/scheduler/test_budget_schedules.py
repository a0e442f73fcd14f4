"""Steps and pages of requests whose layers have token budgets, under vLLM's real scheduler."""

import pytest
import torch

from tests.vllm_plugin.scheduler.test_cache_manager import MIB, finish_step, request, run_step

pytestmark = pytest.mark.vllm

RECENT_TOKENS = 8
OUTPUT_TOKENS = 20
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


@pytest.fixture(scope="module")
def engine_config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("llama")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=40,
        max_num_seqs=4,
        attention_backend="JENGA_TRITON",
        enable_prefix_caching=True,
    )
    return options.create_engine_config()


@pytest.fixture(params=[False, True], ids=["in_turn", "ahead"])
def make_scheduler(engine_config, request):
    """Get a maker of real schedulers, which schedule in turn or a step ahead."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups
    from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec

    def make(arena_bytes, output_tokens=None):
        kept = {
            "recent_tokens": RECENT_TOKENS,
            "sink_tokens": 2,
            "pool_tokens": 3,
            "output_tokens": output_tokens,
        }
        specs = {
            "layers.0": TokenBudgetSpec(**SHAPE, budget_tokens=64, **kept),
            "layers.1": FullAttentionSpec(**SHAPE),
            "layers.2": TokenBudgetSpec(**SHAPE, budget_tokens=32, **kept),
        }
        groups = get_kv_cache_groups(engine_config, specs)
        config = get_kv_cache_config_from_groups(engine_config, groups, arena_bytes)
        engine_config.cache_config.num_gpu_blocks = config.num_blocks
        return (AsyncScheduler if request.param else Scheduler)(
            vllm_config=engine_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(engine_config),
            block_size=16,
            log_stats=True,
        )

    return make


def pages_of(scheduler, name):
    """Count the pages that a request holds of each budget; None stands for full attention."""
    manager = scheduler.kv_cache_manager
    tables = manager.manager.geometry.page_tables
    budgets = [getattr(table.layer_type, "mean_budget_tokens", None) for table in tables]
    ids = manager.get_block_ids(name)
    return {budget: sum(map(bool, pages)) for budget, pages in zip(budgets, ids, strict=True)}


def starts_of(step):
    starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    cached = step.scheduled_cached_reqs
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def test_pages_come_back_while_a_request_runs(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    scheduler.add_request(request("long", list(range(3, 153)), max_tokens=30))
    scheduler.add_request(request("short", list(range(3, 33)), max_tokens=30))
    most = {None: 0, 64: 0, 32: 0}
    for _ in range(12):
        run_step(scheduler)
        most = {budget: max(most[budget], n) for budget, n in pages_of(scheduler, "long").items()}

    num_tokens = scheduler.requests["long"].num_computed_tokens
    held = pages_of(scheduler, "long")

    assert 150 < num_tokens < 180
    assert most[64] == most[32] == 10  # the whole prompt, until it is read
    end = -(-num_tokens // 16)
    # 86 and 118 tokens too many are 6 and 8 pages.
    assert held == {None: end, 64: end - 6, 32: end - 8}
    short = -(-scheduler.requests["short"].num_computed_tokens // 16)
    assert pages_of(scheduler, "short") == {None: short, 64: short, 32: short}


def test_freed_pages_serve_other_requests(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    scheduler.add_request(request("long", list(range(3, 153)), max_tokens=60))
    manager = scheduler.kv_cache_manager.manager
    used = []
    for _ in range(10):
        run_step(scheduler)
        used.append(manager.memory().used_bytes)

    page_bytes = 2 * 16 * 2 * 64 * 4
    # Steps of 40 tokens read the prompt in four; 14 pages are given up after it.
    assert max(used) - min(used[5:]) >= 13 * page_bytes


def test_pages_come_back_whenever_an_output_has_grown(make_scheduler):
    scheduler = make_scheduler(8 * MIB, OUTPUT_TOKENS)
    scheduler.add_request(request("long", list(range(3, 73)), max_tokens=180))
    scheduler.add_request(request("short", list(range(3, 13)), max_tokens=180))
    most = {(name, budget): 0 for name in ("long", "short") for budget in (64, 32)}
    for _ in range(140):
        run_step(scheduler)
        for name, budget in list(most):
            most[name, budget] = max(most[name, budget], pages_of(scheduler, name)[budget])

    assert scheduler.requests["short"].num_computed_tokens > 130
    # The prompt of 70 tokens is held whole. Then a layer holds its budget and 20 tokens at most,
    # and the page in which a step that is scheduled ahead may begin.
    assert most["long", 32] == 5
    assert most["long", 64] <= 7
    assert most["short", 64] <= 7
    assert most["short", 32] <= 5
    for name in ("long", "short"):
        num_pages = -(-scheduler.requests[name].num_computed_tokens // 16)
        assert pages_of(scheduler, name)[None] == num_pages >= 8


def test_a_request_that_was_preempted_chooses_where_it_chose_before(make_scheduler):
    scheduler = make_scheduler(MIB, OUTPUT_TOKENS)
    lengths = {f"r{number}": 41 + 13 * number for number in range(8)}
    for number, (name, length) in enumerate(lengths.items()):
        tokens = [3 + (number * 31 + place * 7) % 400 for place in range(length)]
        scheduler.add_request(request(name, tokens, max_tokens=70))
    preempted, chunks = 0, 0
    for _ in range(3000):
        before = {name: each.num_preemptions for name, each in scheduler.requests.items()}
        step = scheduler.schedule()
        for name, start in starts_of(step).items():
            end, choice = start + step.num_scheduled_tokens[name], lengths[name]
            while choice <= start:
                choice += OUTPUT_TOKENS
            assert end <= choice
            chunks += start >= lengths[name] and end - start > 1
        preempted += sum(
            each.num_preemptions > before.get(name, 0) for name, each in scheduler.requests.items()
        )
        finish_step(scheduler, step)
        if not scheduler.has_unfinished_requests():
            break

    assert not scheduler.has_unfinished_requests()
    assert preempted > 0
    assert chunks > 0


def test_requests_that_may_outgrow_a_budget_are_not_found_again(make_scheduler):
    scheduler = make_scheduler(8 * MIB, OUTPUT_TOKENS)
    short = list(range(203, 235))
    scheduler.add_request(request("short", short, max_tokens=2))
    for _ in range(6):
        run_step(scheduler)
    assert not scheduler.has_unfinished_requests()

    found = scheduler.kv_cache_manager.get_computed_blocks(request("again", [*short, 2]))[1]

    assert found == 0


def test_a_step_ends_with_the_prompt_and_has_the_queries_that_choose(make_scheduler):
    scheduler = make_scheduler(MIB)
    lengths = {f"r{number}": 41 + 13 * number for number in range(12)}
    for number, (name, length) in enumerate(lengths.items()):
        tokens = [3 + (number * 31 + place * 7) % 400 for place in range(length)]
        scheduler.add_request(request(name, tokens, max_tokens=40))
    preempted, ending = 0, 0
    for _ in range(1200):
        before = {name: each.num_preemptions for name, each in scheduler.requests.items()}
        step = scheduler.schedule()
        for name, start in starts_of(step).items():
            end = start + step.num_scheduled_tokens[name]
            assert not start < lengths[name] < end
            if end == lengths[name]:
                ending += 1
                assert end - start >= RECENT_TOKENS
        preempted += sum(
            each.num_preemptions > before.get(name, 0) for name, each in scheduler.requests.items()
        )
        finish_step(scheduler, step)
        if not scheduler.has_unfinished_requests():
            break

    assert not scheduler.has_unfinished_requests()
    assert preempted > 0
    assert ending >= len(lengths)


def test_only_prompts_within_all_budgets_are_found_again(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    long, short = list(range(3, 153)), list(range(203, 235))
    for number in range(2):
        scheduler.add_request(request(f"long{number}", [*long, number], max_tokens=2))
        scheduler.add_request(request(f"short{number}", short[: 32 - number], max_tokens=2))
        for _ in range(20):
            run_step(scheduler)
    assert not scheduler.has_unfinished_requests()

    manager = scheduler.kv_cache_manager
    found = [
        manager.get_computed_blocks(request("again", tokens))[1]
        for tokens in ([*long, 2], short, [*short, 2])
    ]

    assert found == [0, 16, 0]

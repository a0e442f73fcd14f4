"""States kept for other requests, as vLLM's real scheduler orders them, on a worker of symbols.

The worker holds in each page what a real one would: which tokens went into the state there. A
request must find its own tokens in its running page whenever a step begins.
"""

import pickle
import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from jenga.geometry import exact_lcm
from jenga.manager import Manager
from jenga.policies import RequestFacts
from jenga.spec import FullAttention, Layer, ModelSpec, State
from jenga.state_keeper import KeptInPassing, StateKeeper
from jenga.tables.request import CopyPath, PageCopy
from jenga.vllm_plugin.orders.copy_rounds import CopyRound, copy_rounds
from jenga.vllm_plugin.orders.step_orders import StepOrders, attached_orders
from jenga.vllm_plugin.scheduler.make_orders import make_orders
from jenga.vllm_plugin.worker.warm_up import on_pages_apart, orders_of
from tests.vllm_plugin.scheduler.test_cache_manager import request

pytestmark = pytest.mark.vllm

MIB = 1 << 20
LOST = "lost"


@pytest.fixture(scope="module")
def engine_config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("granite_hybrid")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=48,
        max_num_seqs=5,
        attention_backend="JENGA_TRITON",
    )
    return options.create_engine_config()


@pytest.fixture
def make_scheduler(engine_config):
    """Get a maker of real schedulers of a hybrid over an arena of so many bytes."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups

    def make(arena_bytes, *, num_kinds=2, scheduler_class=Scheduler, num_host_large_pages=0):
        specs = {
            "full": FullAttentionSpec(
                block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
            )
        }
        for kind in range(num_kinds):
            shapes = ((3, 160), (4 + 4 * kind, 32, 32))
            for layer in range(2):
                specs[f"mamba.{kind}.{layer}"] = MambaSpec(
                    block_size=512, shapes=shapes, dtypes=(torch.float32,) * 2
                )
        groups = get_kv_cache_groups(engine_config, specs)
        config = replace(
            get_kv_cache_config_from_groups(engine_config, groups, arena_bytes),
            num_host_large_pages=num_host_large_pages,
        )
        engine_config.cache_config.num_gpu_blocks = config.num_blocks
        block_size, hash_block_size = core.resolve_kv_cache_block_sizes(config, engine_config)
        return scheduler_class(
            vllm_config=engine_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(engine_config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )

    return make


class Worker:
    """Runs steps on states and pages that are the tokens that went into them."""

    def __init__(self, scheduler, source):
        self.scheduler = scheduler
        self.source = source
        self.manager = scheduler.kv_cache_manager.manager
        self.tables = dict(enumerate(self.manager.geometry.page_tables))
        self.pages = {}  # (page table, page) -> tokens, or LOST
        self.host_pages = {}  # the same of host memory
        self.tokens = {}  # request -> its tokens
        self.late, self.ahead, self.num_ahead = random.Random(0), (), 0
        self.is_copying = False  # beside the step before
        self.num_copies = self.num_loads = self.num_writes = self.num_turns = 0

    def plan(self, step):
        """Note what a step runs on: its orders, and tokens and pages of each request."""
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        rows = {
            name: (starts[name], starts[name] + count, self.manager.page_tables(name))
            for name, count in step.num_scheduled_tokens.items()
        }
        sent = pickle.loads(pickle.dumps(step))  # as an executor sends it to its workers
        assert sent.kv_cache_block_copies is None
        return step, attached_orders(sent), rows

    def run(self, planned):
        """Run a planned step; a random token for every request whose prompt is read."""
        _, orders, rows = planned
        # What is copied ahead is waited for by the next orders that come, and they do in any case.
        assert orders is not None or not self.is_copying
        orders = orders or StepOrders()
        self._copy(self.ahead)
        self._copy(orders.copies)
        num_early = self.late.randint(0, len(orders.ahead))
        self._copy(orders.ahead[:num_early])
        self.ahead, self.is_copying = orders.ahead[num_early:], bool(orders.ahead)
        self.num_ahead += len(orders.ahead)
        self._store(rows)
        for index, table in self.tables.items():
            if not table.is_state:
                continue
            writes = list(orders.checkpoints.get(table.layers[0].name, ()))
            for name, (start, end, pages) in rows.items():
                (page,) = pages[index]
                tokens = tuple(self.tokens[name])
                assert end <= len(tokens)
                if start:
                    assert self.pages[index, page] == tokens[:start], (name, start)
                mine = [write for write in writes if write.running_page == page]
                assert not mine or end - start > 1  # one token is decoded, which keeps nothing
                assert mine == sorted(mine, key=lambda write: write.after_tokens)
                for write in mine:
                    assert 0 < write.after_tokens <= end - start
                    self._put(index, write.page, tokens[: start + write.after_tokens])
                    writes.remove(write)
                    self.num_writes += 1
                self._put(index, page, tokens[:end])
            assert not writes
        return [self._sample(name, end) for name, (_, end, _) in rows.items()]

    def _store(self, rows):
        """Write the pages of tokens, then read those of whole prefixes."""
        for index, table in self.tables.items():
            if table.is_state:
                continue
            page_tokens = table.tokens_per_page
            for name, (start, end, pages) in rows.items():
                for number in range(start // page_tokens, -(-end // page_tokens)):
                    last = min(end, (number + 1) * page_tokens)
                    self._put(index, pages[index][number], tuple(self.tokens[name][:last]))
            for name, (_, end, pages) in rows.items():
                tokens = tuple(self.tokens[name])
                for number in range(-(-end // page_tokens)):
                    last = min(end, (number + 1) * page_tokens)
                    assert self.pages[index, pages[index][number]] == tokens[:last], (name, number)

    def _sample(self, name, end):
        if end < len(self.tokens[name]):
            return []
        self.tokens[name].append(self.source.randrange(4))
        return self.tokens[name][-1:]

    def _copy(self, rounds):
        by_number = {
            table.small_pages_per_large_page: index for index, table in self.tables.items()
        }
        assert len(by_number) == len(self.tables)
        for copies in rounds:
            index = by_number[copies.small_pages_per_large_page]
            assert len(set(copies.target_pages)) == len(copies.target_pages)
            is_within = copies.path == CopyPath.IN_ARENA
            assert not is_within or not set(copies.target_pages) & set(copies.source_pages)
            self.num_copies += len(copies.target_pages) * is_within
            self.num_loads += len(copies.target_pages) * (copies.path == CopyPath.FROM_HOST)
            sources = self.host_pages if copies.path == CopyPath.FROM_HOST else self.pages
            targets = self.host_pages if copies.path == CopyPath.TO_HOST else self.pages
            for source, target in zip(copies.source_pages, copies.target_pages, strict=True):
                self._put(index, target, sources[index, source], targets)

    def _put(self, index, page, tokens, memory=None):
        """Write a page; what other page tables had in the same bytes is lost."""
        memory = self.pages if memory is None else memory
        large_page = page // self.tables[index].small_pages_per_large_page
        for other, table in self.tables.items():
            first = large_page * table.small_pages_per_large_page
            for lost in range(first, first + table.small_pages_per_large_page):
                if other != index and (other, lost) in memory:
                    memory[other, lost] = LOST
        memory[index, page] = tokens


def finish_step(scheduler, step, sampled):
    """Hand a step's tokens to the scheduler."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
    )
    scheduler.update_from_output(step, output)
    scheduler.kv_cache_manager.manager.check()


def run_steps(scheduler, source, *, num_steps, prompts, num_ahead=0, resets=False):
    """Run random requests, steps scheduled ahead of those that run; the tokens each hit by name."""
    from vllm.v1.request import RequestStatus

    worker, ahead, hits, num_preempted = Worker(scheduler, source), deque(), {}, 0
    for number in range(num_steps):
        if source.random() < 0.4:
            prefix = source.choice(prompts)
            prefix = prefix[: source.randrange(16, len(prefix))]
            if worker.tokens and source.random() < 0.3:
                # Another turn, after all that was asked and generated.
                prefix = source.choice([*worker.tokens.values()])[:300]
                worker.num_turns += 1
            own = [source.randrange(4, 400) for _ in range(source.randrange(1, 40))]
            tokens = [*prefix, *own]
            scheduler.add_request(request(f"r{number}", tokens, max_tokens=source.randrange(1, 40)))
        if source.random() < 0.05 and scheduler.running:
            victim = source.choice(scheduler.running).request_id
            scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
        if resets and not ahead and source.random() < 0.02:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        step = scheduler.schedule()
        ahead.append(worker.plan(step))
        hits |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        num_preempted += len(step.preempted_req_ids or ())
        if len(ahead) > num_ahead:
            planned = ahead.popleft()
            finish_step(scheduler, planned[0], worker.run(planned))
    return worker, hits, num_preempted


@pytest.mark.parametrize(
    ("arena_bytes", "num_kinds", "is_tight"),
    [
        pytest.param(8 * MIB, 2, False, id="two_kinds_of_states_with_room_for_many"),
        pytest.param(2 * MIB, 2, False, id="two_kinds_of_states_always_evicting"),
        pytest.param(14 << 16, 1, True, id="requests_that_preempt_each_other"),
    ],
)
def test_every_request_goes_on_from_its_own_tokens(
    arena_bytes, num_kinds, is_tight, make_scheduler, monkeypatch
):
    monkeypatch.setattr("jenga.manager.ANSWER_TOKENS", 16)
    source = random.Random(arena_bytes)
    prompts = [[source.randrange(4, 400) for _ in range(length)] for length in (50, 120, 200)]
    scheduler = make_scheduler(arena_bytes, num_kinds=num_kinds)
    assert scheduler.kv_cache_manager.enable_caching

    worker, hits, num_preempted = run_steps(scheduler, source, num_steps=300, prompts=prompts)

    assert sum(hits.values()) > 0
    assert all(hit % 16 == 0 for hit in hits.values())
    assert worker.num_writes > 40
    assert worker.num_copies > 8
    assert bool(num_preempted) == is_tight
    report = scheduler.kv_cache_manager.manager.cache_report()
    assert num_preempted or report.hit_tokens == sum(hits.values())


def test_requests_go_on_from_their_tokens_where_steps_are_scheduled_ahead(
    make_scheduler, monkeypatch
):
    monkeypatch.setattr("jenga.manager.ANSWER_TOKENS", 16)
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    source = random.Random(5)
    prompts = [[source.randrange(4, 400) for _ in range(length)] for length in (50, 120, 200)]
    scheduler = make_scheduler(2 * MIB, scheduler_class=AsyncScheduler)

    worker, hits, _ = run_steps(scheduler, source, num_steps=300, prompts=prompts, num_ahead=1)

    assert sum(hits.values()) > 0
    assert worker.num_writes > 40
    assert worker.num_copies > 8


@pytest.mark.parametrize("is_late", [False, True], ids=["at_once", "when_nothing_runs"])
def test_the_next_turn_of_a_session_reads_no_token_that_it_replaces(is_late, make_scheduler):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    scheduler = make_scheduler(8 * MIB, scheduler_class=AsyncScheduler)
    worker = Worker(scheduler, random.Random(2))

    def say(tokens):
        turn = request("session", tokens, max_tokens=9)
        turn.resumable, turn.sampling_params.stop_token_ids = True, [0, 1, 2, 3]
        scheduler.add_request(turn)

    def plan():
        return worker.plan(scheduler.schedule())

    def finish(planned):
        finish_step(scheduler, planned[0], worker.run(planned))

    say(list(range(4, 74)))
    if not is_late:
        say(list(range(80, 90)))
    finish(plan())  # 48 tokens, and now the others
    first, second = plan(), plan()
    assert second[0].num_scheduled_tokens == {"session": 1}
    # The first token is the last one of the turn, and the second step has read it.
    finish(first)
    finish(second)
    if is_late:
        say(list(range(80, 90)))
    again = plan()
    (turn,) = again[0].scheduled_new_reqs
    assert turn.prompt_token_ids == [*range(4, 74), *range(80, 90)]
    finish(again)

    # What was asked before ends where its state was kept.
    assert turn.num_computed_tokens == 64
    assert again[0].num_scheduled_tokens == {"session": 16}


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize(
    ("arena_bytes", "num_kinds", "num_host_large_pages"),
    [
        pytest.param(2 * MIB, 2, 40, id="two_kinds_of_states"),
        pytest.param(12 << 16, 1, 6, id="requests_that_preempt_each_other"),
    ],
)
def test_requests_go_on_from_their_tokens_with_host_memory(
    arena_bytes, num_kinds, num_host_large_pages, num_ahead, make_scheduler, monkeypatch
):
    monkeypatch.setattr("jenga.manager.ANSWER_TOKENS", 16)
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    source = random.Random(arena_bytes + num_host_large_pages)
    prompts = [[source.randrange(4, 400) for _ in range(length)] for length in (50, 120, 200)]
    scheduler = make_scheduler(
        arena_bytes,
        num_kinds=num_kinds,
        scheduler_class=AsyncScheduler if num_ahead else Scheduler,
        num_host_large_pages=num_host_large_pages,
    )

    worker, hits, _ = run_steps(
        scheduler, source, num_steps=300, prompts=prompts, num_ahead=num_ahead, resets=True
    )

    assert sum(hits.values()) > 0
    assert worker.num_writes > 20
    assert worker.num_loads > 8
    assert worker.num_ahead > 8


def test_a_third_request_starts_where_the_second_left_the_first(make_scheduler):
    scheduler, source = make_scheduler(8 * MIB), random.Random(1)
    worker = Worker(scheduler, source)
    shared = [source.randrange(4, 400) for _ in range(57)]
    prompts = [[*shared, *([3 + number] * 40)] for number in range(3)]
    hits = []

    for number, prompt in enumerate([*prompts, prompts[0]]):
        scheduler.add_request(request(f"r{number}", prompt, max_tokens=2))
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            hits += [new.num_computed_tokens for new in step.scheduled_new_reqs]
            finish_step(scheduler, step, worker.run(worker.plan(step)))

    # The first again starts at the end of its prompt: 96 of 97 tokens.
    assert hits == [0, 0, 48, 96]


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_another_turn_starts_near_the_end_of_the_answer(num_ahead, make_scheduler):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = make_scheduler(8 * MIB, scheduler_class=AsyncScheduler if num_ahead else Scheduler)
    source = random.Random(1)
    worker = Worker(scheduler, source)
    tokens, hits = [source.randrange(4, 400) for _ in range(50)], []

    for number in range(3):
        name = f"r{number}"
        scheduler.add_request(request(name, tokens, max_tokens=100))
        ahead = deque()
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            hits += [new.num_computed_tokens for new in step.scheduled_new_reqs]
            ahead.append(worker.plan(step))
            if len(ahead) > num_ahead:
                planned = ahead.popleft()
                finish_step(scheduler, planned[0], worker.run(planned))
        for planned in ahead:
            finish_step(scheduler, planned[0], worker.run(planned))
        tokens = [*worker.tokens[name][: len(tokens) + 100], 7, 8, 9]

    # Prompts of 50, 153 and 256 tokens, each with 100 generated; a state is kept every 64.
    assert hits == [0, 128, 192]


def geometry():
    state = [Layer(name=f"state.{index}", slot_bytes=4096) for index in range(2)]
    wide = [Layer(name="wide", slot_bytes=3 * 4096)]
    full = [Layer(name="full", slot_bytes=64)]
    return exact_lcm(
        ModelSpec(
            name="model",
            layer_types=(
                State(name="small", layers=tuple(state)),
                State(name="wide", layers=tuple(wide)),
                FullAttention(name="full", layers=tuple(full)),
            ),
        ),
        tokens_per_page=16,
    )


def copies_in(table, **pages):
    return CopyRound(small_pages_per_large_page=table.small_pages_per_large_page, **pages)


def copies_of(*triples):
    return [PageCopy(table_index=t, source=s, target=g) for t, s, g in triples]


def test_copies_that_do_not_touch_are_made_at_once():
    rounds = copy_rounds(copies_of((0, 4, 5), (1, 8, 9), (0, 4, 6)), geometry())

    small, wide = geometry().page_tables[:2]
    assert rounds == (
        copies_in(small, source_pages=(4, 4), target_pages=(5, 6)),
        copies_in(wide, source_pages=(8,), target_pages=(9,)),
    )


@pytest.mark.parametrize(
    "second",
    [
        pytest.param((0, 5, 6), id="reads_what_the_first_wrote"),
        pytest.param((0, 7, 4), id="writes_what_the_first_reads"),
        pytest.param((0, 7, 5), id="writes_what_the_first_wrote"),
    ],
)
def test_copies_that_touch_are_made_one_after_the_other(second):
    rounds = copy_rounds(copies_of((0, 4, 5), second), geometry())

    assert len(rounds) == 2
    assert rounds[0].target_pages == (5,)


def test_copies_of_a_large_page_that_changed_hands_keep_their_order():
    small, wide = geometry().page_tables[:2]
    assert small.small_pages_per_large_page == 3
    assert wide.small_pages_per_large_page == 2
    # Large page 4 is read as one table's, then written as the other's, beside a copy before.
    first, reads, writes = (0, 3, 6), (1, 8, 5), (0, 4, 13)

    rounds = copy_rounds(copies_of(first, reads, writes), geometry())

    assert [(done.source_pages, done.target_pages) for done in rounds] == [
        ((3,), (6,)),
        ((8,), (5,)),
        ((4,), (13,)),
    ]


def test_a_round_of_copies_moves_whole_pages_and_nothing_else():
    from jenga.vllm_plugin.worker.page_copies import arena_of, copy_pages

    arena = torch.randint(-100, 100, (6 * 48,), dtype=torch.int8)
    before = arena.clone().view(6, 48)
    cache = arena.view(6, 48)[:, 16:32]

    copies = CopyRound(small_pages_per_large_page=3, source_pages=(1, 4), target_pages=(3, 2))
    copy_pages(arena_of([(cache,)]), 2, copies)

    expected = before.clone()
    expected[3], expected[2] = before[1], before[4]
    assert torch.equal(arena.view(6, 48), expected)


def test_a_request_that_may_not_read_the_cache_leaves_a_state_of_its_only_step(make_scheduler):
    scheduler, tokens = make_scheduler(8 * MIB), list(range(3, 43))
    worker = Worker(scheduler, random.Random(0))
    first = request("a", tokens, max_tokens=2)
    first.skip_reading_prefix_cache = True
    scheduler.add_request(first)
    while scheduler.has_unfinished_requests():
        planned = worker.plan(scheduler.schedule())
        finish_step(scheduler, planned[0], worker.run(planned))

    scheduler.add_request(request("b", tokens))

    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 32


def fake_request(name, num_tokens, *, num_in_flight_tokens=0):
    hashes = [f"{name}{end}".encode() for end in range(16, num_tokens + 1, 16)]
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=num_tokens,
        num_in_flight_tokens=num_in_flight_tokens,
    )


def admit(manager, one, *, num_tokens, prompt_tokens):
    """Let a request come in without a hit, as the plugin does: it commits before it computes."""
    facts = RequestFacts(prompt_tokens=prompt_tokens)
    manager.allocate(one.request_id, num_tokens=num_tokens, facts=facts)
    manager.commit(one.request_id, one.block_hashes, 0)


def test_a_state_still_to_be_written_keeps_its_page_from_one_that_is_kept_later():
    layers = (
        State(name="state", layers=(Layer(name="state.0", slot_bytes=4096),)),
        FullAttention(name="full", layers=(Layer(name="full", slot_bytes=64),)),
    )
    cut = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    assert [table.small_pages_per_large_page for table in cut.page_tables] == [1, 4]
    # The null page, a page of keys and values, two running states, and one more.
    manager = Manager(cut, num_large_pages=5, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    requests = [fake_request("a", 20), fake_request("b", 20)]
    for one in requests:
        admit(manager, one, num_tokens=20, prompt_tokens=20)
        keeper.schedule(one, 0, 20)

    orders = make_orders(manager, keeper, num_tokens=0)

    (write,) = orders.checkpoints["state.0"]
    assert write.running_page == manager.page_table("a", 0)[0]
    assert write.after_tokens == 16
    assert orders.copies == ()
    assert all(manager.lookup(one.block_hashes, max_tokens=16).num_tokens == 0 for one in requests)
    manager.check()

    keeper.step_ends()
    manager.new_step()
    keeper.step_starts()
    for one in requests:
        manager.commit(one.request_id, one.block_hashes, 16)
    hits = [manager.lookup(one.block_hashes, max_tokens=16) for one in requests]
    assert [hit.num_tokens for hit in hits] == [16, 0]
    assert list(hits[0].pages[0]) == [write.page]
    manager.check()


def test_a_state_after_a_single_token_is_copied_before_the_next_step():
    layers = (State(name="state", layers=(Layer(name="state.0", slot_bytes=4096),)),)
    cut = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=5, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    one = fake_request("a", 20)
    admit(manager, one, num_tokens=15, prompt_tokens=20)
    keeper.schedule(one, 0, 15)
    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()

    keeper.step_starts()
    manager.allocate("a", num_tokens=16, num_processed_tokens=15)
    keeper.schedule(one, 15, 16)
    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()
    keeper.step_starts()
    orders = make_orders(manager, keeper, num_tokens=0)

    (copies,) = orders.copies
    assert copies.source_pages == tuple(manager.page_table("a", 0))
    assert manager.keeps_state(0, one.block_hashes[0], copies.target_pages[0])


def test_with_drafts_states_after_a_few_tokens_are_copied_from_the_slots_of_their_numbers():
    state = State(name="state", layers=(Layer(name="0", slot_bytes=4096),), draft_tokens=3)
    cut = exact_lcm(ModelSpec(name="model", layer_types=(state,)), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=9, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    one = fake_request("a", 18)
    admit(manager, one, num_tokens=15, prompt_tokens=18)
    keeper.schedule(one, 0, 15)
    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()

    # A chunk of three tokens, as many as drafts: the state after 16 is left in its slot.
    keeper.step_starts()
    manager.allocate("a", num_tokens=18, num_processed_tokens=15)
    keeper.schedule(one, 15, 18)
    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()
    keeper.step_starts()
    # The last token, and drafts: nothing of that is kept.
    keeper.schedule(one, 17, 21)
    assert not keeper._passages
    orders = make_orders(manager, keeper, num_tokens=0)

    (copies,) = orders.copies
    assert copies.source_pages == (manager.page_table("a", 0)[16 % 4],)
    assert manager.keeps_state(0, one.block_hashes[0], copies.target_pages[0])


@pytest.mark.parametrize(
    ("first_step_tokens", "num_in_flight_tokens", "is_kept"),
    [
        pytest.param(62, 0, True, id="the_slots_have_it"),
        pytest.param(65, 0, False, id="the_prompt_passed_it"),
        pytest.param(62, 3, False, id="a_step_under_way_writes_over_it"),
    ],
)
def test_with_drafts_an_answers_state_is_kept_where_the_slots_still_have_it(
    first_step_tokens, num_in_flight_tokens, is_kept
):
    state = State(name="state", layers=(Layer(name="0", slot_bytes=4096),), draft_tokens=3)
    cut = exact_lcm(ModelSpec(name="model", layer_types=(state,)), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=9, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    manager.allocate("a", num_tokens=61, facts=RequestFacts(prompt_tokens=61))
    keeper.schedule(fake_request("a", 61), 0, 61)
    make_orders(manager, keeper, num_tokens=0)
    manager.take_copies()
    keeper.step_starts()
    manager.allocate("a", num_tokens=72, num_processed_tokens=61)
    keeper.schedule(fake_request("a", first_step_tokens + 1), first_step_tokens, 66)
    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()

    keeper.step_starts()
    one = fake_request("a", 67, num_in_flight_tokens=num_in_flight_tokens)
    keeper.schedule(one, 66, 70)

    orders = make_orders(manager, keeper, num_tokens=0)
    assert bool(orders.copies) == is_kept
    if is_kept:
        (copies,) = orders.copies
        assert copies.source_pages == (manager.page_table("a", 0)[64 % 4],)
        assert manager.keeps_state(0, one.block_hashes[3], copies.target_pages[0])


def drafting_keeper(num_large_pages, *, answer_tokens):
    """A keeper of states with three slots a request, beside pages of keys and values."""
    layers = (
        State(name="state", layers=(Layer(name="0", slot_bytes=4096),), draft_tokens=2),
        FullAttention(name="full", layers=(Layer(name="full", slot_bytes=64),)),
    )
    cut = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(
        cut,
        num_large_pages=num_large_pages,
        prefix_caching=True,
        answer_interval_tokens=answer_tokens,
    )
    return manager, StateKeeper(manager, hash_tokens=16)


def step_with_drafts(manager, keeper, start_tokens):
    """Run a step of a request's last token and two drafts; the copies made before it."""
    keeper.step_starts()
    manager.new_step()
    one = fake_request("a", start_tokens + 1)
    manager.allocate("a", num_tokens=start_tokens + 3, num_processed_tokens=start_tokens)
    manager.commit("a", one.block_hashes, start_tokens)
    keeper.schedule(one, start_tokens, start_tokens + 3)
    return make_orders(manager, keeper, num_tokens=3).copies


def test_with_drafts_a_state_that_found_no_page_is_not_kept_from_a_slot_written_since():
    manager, keeper = drafting_keeper(8, answer_tokens=16)
    manager.allocate("a", num_tokens=31, facts=RequestFacts(prompt_tokens=20))
    manager.allocate("b", num_tokens=16)
    assert step_with_drafts(manager, keeper, 31) == ()
    # The state after 32 tokens is there, but no page for it; the step writes over its slot.
    assert step_with_drafts(manager, keeper, 32) == ()
    manager.free("b")

    assert step_with_drafts(manager, keeper, 33) == ()
    assert step_with_drafts(manager, keeper, 34) == ()


@pytest.mark.parametrize("accepted_tokens", [1, 2, 3])
def test_with_drafts_an_answer_has_one_state_kept(accepted_tokens):
    manager, keeper = drafting_keeper(40, answer_tokens=16)
    manager.allocate("a", num_tokens=20, facts=RequestFacts(prompt_tokens=20))
    num_copies = 0
    for start_tokens in range(19, 300, accepted_tokens):
        copies = step_with_drafts(manager, keeper, start_tokens)
        num_copies += len(copies)

        assert len([key for key in manager._tables[0].cache.keys if key is not None]) <= 1
        assert not manager._requests["a"].checkpoints.pending
    assert num_copies >= 15


@pytest.mark.parametrize(
    ("last_start", "num_in_flight_tokens", "is_kept"),
    [
        pytest.param(62, 0, True, id="the_last_step_passed_it"),
        pytest.param(63, 0, True, id="the_last_step_began_right_before"),
        # As that step began; since then it may have written the state after one more token.
        pytest.param(64, 0, False, id="the_last_step_began_there"),
        pytest.param(62, 3, False, id="a_step_is_under_way"),
    ],
)
def test_with_histories_an_answers_state_is_kept_where_the_last_step_passed_it(
    last_start, num_in_flight_tokens, is_kept
):
    layers = (State(name="state", layers=(Layer(name="0", slot_bytes=4096),)),)
    cut = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=9, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16, history_query_tokens=4)
    manager.allocate("a", num_tokens=72, facts=RequestFacts(prompt_tokens=20))
    for start_tokens in (58, last_start):
        # Nothing is kept of these: in the first steps its hash is not known yet.
        keeper.schedule(fake_request("a", 63), start_tokens, start_tokens + 4)
        assert make_orders(manager, keeper, num_tokens=0) == StepOrders()
        keeper.step_starts()

    one = fake_request("a", 66, num_in_flight_tokens=num_in_flight_tokens)
    keeper.schedule(one, 65, 69)

    orders = make_orders(manager, keeper, num_tokens=0)
    assert bool(orders.copies) == is_kept
    if is_kept:
        (copies,) = orders.copies
        assert copies.source_pages == tuple(manager.page_table("a", 0))
        assert manager.keeps_state(0, one.block_hashes[3], copies.target_pages[0])


def test_with_drafts_a_state_that_the_next_prompt_of_a_session_passed_is_not_kept():
    state = State(name="state", layers=(Layer(name="0", slot_bytes=4096),), draft_tokens=3)
    cut = exact_lcm(ModelSpec(name="model", layer_types=(state,)), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=9, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    manager.allocate("a", num_tokens=24, facts=RequestFacts(prompt_tokens=20))
    keeper.schedule(fake_request("a", 21), 20, 24)
    make_orders(manager, keeper, num_tokens=0)
    keeper.step_starts()

    # The session's next prompt ends two tokens after where a state would be kept.
    manager.allocate("a", num_tokens=66, num_processed_tokens=24)
    keeper.schedule(fake_request("a", 66), 24, 66)
    make_orders(manager, keeper, num_tokens=0)
    manager.take_copies()
    keeper.step_starts()
    manager.allocate("a", num_tokens=70, num_processed_tokens=66)
    keeper.schedule(fake_request("a", 67), 66, 70)

    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()


def test_an_answers_state_waits_for_the_hash_of_its_tokens():
    layers = (State(name="state", layers=(Layer(name="state.0", slot_bytes=4096),)),)
    cut = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=5, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    manager.allocate("a", num_tokens=65, facts=RequestFacts(prompt_tokens=20))

    keeper.schedule(fake_request("a", 63), 64, 65)

    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()


def test_a_request_that_lost_its_place_in_the_step_keeps_nothing():
    layers = (State(name="state", layers=(Layer(name="state.0", slot_bytes=4096),)),)
    cut = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(cut, num_large_pages=5, prefix_caching=True)
    keeper = StateKeeper(manager, hash_tokens=16)
    manager.allocate("a", num_tokens=20)
    keeper.schedule(fake_request("a", 20), 0, 20)

    manager.free("a")
    keeper.forget("a")

    assert make_orders(manager, keeper, num_tokens=0) == StepOrders()


def test_the_step_that_warms_up_copies_a_state_and_keeps_one(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    geometry = scheduler.kv_cache_manager.manager.geometry
    layers = [(table.layers[0].name,) for table in geometry.page_tables]
    num_large_pages = scheduler.kv_cache_config.num_blocks
    scheduler.add_request(request("short", [5, 6]))
    assert orders_of(scheduler.schedule(), geometry, num_large_pages, layers) is None
    scheduler.add_request(request("long", list(range(3, 43))))
    step = scheduler.schedule()

    orders = orders_of(step, geometry, num_large_pages, layers)

    (new,) = step.scheduled_new_reqs
    states = [(i, table) for i, table in enumerate(geometry.page_tables) if table.is_state]
    assert len(orders.copies) == len(orders.checkpoints) == len(states) == 2
    for (index, table), copies in zip(states, orders.copies, strict=True):
        last = num_large_pages * table.small_pages_per_large_page - 1
        (write,) = orders.checkpoints[table.layers[0].name]
        assert (write.running_page, write.after_tokens, write.page) == (
            *new.block_ids[index],
            16,
            last,
        )
        assert copies == copies_in(table, source_pages=(last - 1,), target_pages=(last,))


def test_orders_are_asked_for_in_the_order_that_the_machine_of_host_memory_proves():
    cut, asked = SimpleNamespace(page_tables=()), []
    copy = PageCopy(table_index=0, source=1, target=2)
    kept = [KeptInPassing(prefix_hash=b"", copy=copy, after_tokens=16)]

    class Asked:
        geometry = cut

        def __getattr__(self, name):
            asked.append(name)
            return lambda *_args: kept if name == "keep_passed" else []

    make_orders(Asked(), Asked(), num_tokens=5, first_layers=[("0",)])

    # As in tests/machines/test_host_machine.py: what is loaded may take the page of a state, which
    # is not written then, and is not taken itself in the same step.
    assert asked == [
        "take_copies",
        "keep_passed",
        "prefetch_pages",
        "take_copies",
        "write_back_pages",
        "keeps_state",
    ]


def test_steps_that_warm_up_run_on_pages_that_do_not_lie_over_one_another(make_scheduler):
    geometry = make_scheduler(8 * MIB).kv_cache_manager.manager.geometry
    tables = geometry.page_tables
    assert len({table.small_page_bytes for table in tables}) > 1
    # As vLLM numbers them: one after the other, whatever the group.
    new = SimpleNamespace(block_ids=tuple([index + 1] for index in range(len(tables))))
    more = tuple([len(tables) + index + 1] for index in range(len(tables)))
    cached = SimpleNamespace(new_block_ids=[None, more])
    steps = []

    on_pages_apart(steps.append, geometry)(
        SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    )

    assert len(steps) == 1
    assert cached.new_block_ids[0] is None
    larges = [
        page / table.small_pages_per_large_page
        for page_ids in (new.block_ids, cached.new_block_ids[1])
        for table, (page,) in zip(tables, page_ids, strict=True)
    ]
    assert larges == list(range(1, 2 * len(tables) + 1))

"""Drafted tokens as vLLM's real schedulers plan them, with workers that know every byte.

The workers write what each slot would hold into a model of the arena, drafts that are rejected too,
and check before each token that every slot it reads holds what a computation from scratch would
have put there.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.vllm_plugin.scheduler.test_cache_manager import request

pytestmark = pytest.mark.vllm

NUM_DRAFTED = 3
MAX_TOKENS = 256
PADDING = 0  # a token that is never said


@pytest.fixture(scope="module")
def engine_config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("gpt_oss")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        attention_backend="JENGA_TRITON",
        speculative_config={
            "method": "draft_model",
            "model": str(tiny_model("llama_draft")),
            "num_speculative_tokens": NUM_DRAFTED,
        },
    )
    return options.create_engine_config()


@pytest.fixture
def make_scheduler(engine_config):
    """Get a maker of real schedulers over an arena that hardly holds one long request."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    from jenga.vllm_plugin.arena.layout import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
        max_memory_usage_bytes_from_groups,
        pool_bytes_per_block,
    )

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}

    def make(scheduler_class):
        specs = {
            "full": FullAttentionSpec(**shape),
            "sliding.0": SlidingWindowSpec(**shape, sliding_window=29),
            "sliding.1": SlidingWindowSpec(**shape, sliding_window=29),
            "chunked": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=48),
            "draft_model.0": FullAttentionSpec(**shape | {"num_kv_heads": 1}),
        }
        groups = get_kv_cache_groups(engine_config, specs)
        arena_bytes = max_memory_usage_bytes_from_groups(engine_config, groups)
        arena_bytes += 2 * pool_bytes_per_block(
            engine_config, groups
        )  # the null page, and one more
        config = get_kv_cache_config_from_groups(engine_config, groups, arena_bytes)
        engine_config.cache_config.num_gpu_blocks = config.num_blocks
        return scheduler_class(
            vllm_config=engine_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(engine_config),
            block_size=16,
            log_stats=True,
        )

    return make


def contents_of(tokens):
    """Get what names the content of each token's slot: all tokens up to it."""
    contents, last = [], 17
    for token in tokens:
        last = hash((last, token))
        contents.append(last)
    return contents


def next_token(tokens):
    """Get the token that the target says after some."""
    return 3 + contents_of(tokens)[-1] % 7


@dataclass
class Row:
    """A request as the workers know it."""

    tokens: list[int]
    num_computed: int
    pages: list[list[int]]
    drafts: list[int] = field(default_factory=list)


class Workers:
    """What the workers of a target and its draft model do to the arena."""

    def __init__(self, scheduler, seed):
        self.random = random.Random(seed)
        self.scheduler = scheduler
        manager = scheduler.kv_cache_manager.manager
        self.tables = manager.geometry.page_tables
        slot_bytes = [table.small_page_bytes // table.tokens_per_page for table in self.tables]
        self.unit = int(np.gcd.reduce(slot_bytes))
        self.slot_units = [size // self.unit for size in slot_bytes]
        arena_bytes = manager.num_large_pages * manager.geometry.large_page_bytes
        self.arena = np.zeros(arena_bytes // self.unit, dtype=np.int64)
        self.rows: dict[str, Row] = {}
        self.counts = Counter()

    def place(self, table_index, row, token):
        """Get where the arena holds a token of a row."""
        table, units = self.tables[table_index], self.slot_units[table_index]
        page = row.pages[table_index][token // table.tokens_per_page]
        assert page > 0, f"token {token} lies in the null page of {table.name}"
        start = page * (table.small_page_bytes // self.unit)
        start += token % table.tokens_per_page * units
        return slice(start, start + units)

    def write(self, table_index, row, start, contents):
        for token, content in enumerate(contents, start):
            self.arena[self.place(table_index, row, token)] = hash((table_index, content))

    def check_reads(self, table_index, row, query, contents):
        """Check every slot that a token reads, itself included."""
        layer_type = self.tables[table_index].layer_type
        first = 0
        if hasattr(layer_type, "window_tokens"):
            first = max(0, query - layer_type.window_tokens + 1)
        if hasattr(layer_type, "chunk_tokens"):
            first = query // layer_type.chunk_tokens * layer_type.chunk_tokens
        for token in range(first, query + 1):
            held = self.arena[self.place(table_index, row, token)]
            expected = hash((table_index, contents[token]))
            assert (held == expected).all(), (self.tables[table_index].name, query, token)

    def take_requests(self, step):
        for name in step.finished_req_ids:
            self.rows.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = list(self.scheduler.requests[new.req_id].all_token_ids)
            pages = [list(pages) for pages in new.block_ids]
            self.rows[new.req_id] = Row(tokens, new.num_computed_tokens, pages)
            self.counts["hit_tokens"] += new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            new_pages, computed = cached.new_block_ids[index], cached.num_computed_tokens[index]
            if name in cached.resumed_req_ids:
                tokens = list(self.scheduler.requests[name].all_token_ids)
                self.rows[name] = Row(tokens, computed, [list(pages) for pages in new_pages])
                self.counts["resumed"] += 1
            elif new_pages is not None:
                for pages, more_pages in zip(self.rows[name].pages, new_pages, strict=True):
                    pages.extend(more_pages)

    def run(self, step):
        """Run a step; get what the target says and what is drafted next."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        self.take_requests(step)
        names = list(step.num_scheduled_tokens)
        sampled = [
            self.run_target(
                self.rows[name],
                step.num_scheduled_tokens[name],
                step.scheduled_spec_decode_tokens.get(name, []),
            )
            for name in names
        ]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        return output, DraftTokenIds(names, [list(self.rows[name].drafts) for name in names])

    def run_target(self, row, num_scheduled, drafts):
        if -1 in drafts:  # drafted in the last step, or padding of a request that just came in
            padding = [PADDING] * (len(drafts) - len(row.drafts))
            drafts = row.drafts[: len(drafts)] + padding
            self.counts["padded"] += len(padding)
        start = row.num_computed
        tokens = row.tokens[: start + num_scheduled - len(drafts)] + drafts
        assert len(tokens) == start + num_scheduled
        contents = contents_of(tokens)
        for index in range(1, len(self.tables)):
            self.write(index, row, start, contents[start:])
            for query in range(start, len(tokens)):
                self.check_reads(index, row, query, contents)
        is_chunk = len(tokens) - len(drafts) < len(row.tokens)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == next_token(
            tokens[: len(tokens) - len(drafts) + accepted]
        ):
            accepted += 1
        tokens = tokens[: len(tokens) - len(drafts) + accepted]
        row.num_computed = len(tokens)
        said = [] if is_chunk else [*drafts[:accepted], next_token(tokens)]
        row.tokens = row.tokens if is_chunk else [*tokens, said[-1]]
        self.counts["accepted"] += accepted
        self.counts["rejected"] += len(drafts) - accepted
        self.run_draft(row, start)
        return said

    def run_draft(self, row, start):
        """Take in what the target has seen and the token after it, then draft more."""
        tokens = row.tokens[: row.num_computed + 1]
        contents = contents_of(tokens)
        self.write(0, row, start, contents[start:])
        for query in range(start, len(tokens)):
            self.check_reads(0, row, query, contents)
        row.drafts = []
        for _ in range(NUM_DRAFTED):
            is_right = self.random.random() < 0.7
            row.drafts.append(next_token(tokens) if is_right else self.random.randrange(3, 10))
            tokens = [*tokens, row.drafts[-1]]
            if len(row.drafts) < NUM_DRAFTED:
                contents = contents_of(tokens)
                self.write(0, row, len(tokens) - 1, contents[-1:])
                self.check_reads(0, row, len(tokens) - 1, contents)


def serve(scheduler, workers, requests, *, num_in_flight, abort_chance=0.0):
    """Serve requests that come in over time, with so many steps running ahead."""
    from vllm.v1.request import RequestStatus

    waiting, in_flight, said = list(requests), [], {}
    manager = scheduler.kv_cache_manager.manager
    for _ in range(3000):
        if waiting and workers.random.random() < 0.6:
            scheduler.add_request(waiting.pop(0))
        running = [running.request_id for running in scheduler.running]
        if running and workers.random.random() < abort_chance:
            name = workers.random.choice(running)
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            workers.counts["aborted"] += 1
        step = scheduler.schedule()
        manager.check()
        in_flight.append((step, *workers.run(step)))
        while len(in_flight) > num_in_flight:
            step, output, drafts = in_flight.pop(0)
            for core_outputs in scheduler.update_from_output(step, output).values():
                for core_output in core_outputs.outputs:
                    said.setdefault(core_output.request_id, []).extend(core_output.new_token_ids)
            if not num_in_flight:
                for tokens in drafts.draft_token_ids:  # fewer in one step than in the last
                    if workers.random.random() < 0.4:
                        del tokens[workers.random.randrange(NUM_DRAFTED) :]
                scheduler.update_draft_token_ids(drafts)
            manager.check()
        if not waiting and not scheduler.has_unfinished_requests():
            break
    assert not scheduler.has_unfinished_requests()
    return said


def make_requests(seed):
    """Make requests over a few shared prefixes, one a continuation of another's answer."""
    source = random.Random(seed)
    prefixes = [[source.randrange(3, 99) for _ in range(count)] for count in (30, 66, 100)]
    requests = []
    for number in range(16):
        own = [source.randrange(3, 99) for _ in range(source.randrange(1, 40))]
        tokens = source.choice(prefixes) + own
        if number % 4 == 3:
            for _ in range(20):
                tokens.append(next_token(tokens))
        requests.append(request(f"r{number}", tokens, max_tokens=source.randrange(10, 96)))
    return requests


def expected_tokens(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 4))]
)
@pytest.mark.parametrize("num_in_flight", [0, 1], ids=["synchronous", "asynchronous"])
def test_no_token_reads_what_was_rejected_or_given_up(num_in_flight, seed, make_scheduler):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = make_scheduler(AsyncScheduler if num_in_flight else Scheduler)
    workers, requests = Workers(scheduler, seed), make_requests(seed)

    said = serve(scheduler, workers, requests, num_in_flight=num_in_flight)

    for asked in requests:
        tokens = expected_tokens(asked.prompt_token_ids, asked.sampling_params.max_tokens)
        assert said[asked.request_id] == tokens
    counts = workers.counts
    assert min(counts[name] for name in ("hit_tokens", "resumed", "accepted", "rejected")) > 0
    assert scheduler.kv_cache_manager.manager.request_tokens() == {}
    assert scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("num_in_flight", [0, 1], ids=["synchronous", "asynchronous"])
def test_aborting_requests_that_draft_loses_nothing(num_in_flight, make_scheduler):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = make_scheduler(AsyncScheduler if num_in_flight else Scheduler)
    workers = Workers(scheduler, 5)

    serve(scheduler, workers, make_requests(5), num_in_flight=num_in_flight, abort_chance=0.05)

    assert workers.counts["aborted"] > 0
    assert scheduler.kv_cache_manager.manager.request_tokens() == {}
    assert scheduler.kv_cache_manager.usage == 0.0
    assert scheduler.kv_cache_manager.reset_prefix_cache()


def test_a_hit_leaves_out_the_page_whose_last_slot_is_made_of_the_next_token(make_scheduler):
    from vllm.v1.core.sched.scheduler import Scheduler

    from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

    config = make_scheduler(Scheduler).kv_cache_manager.kv_cache_config
    manager = JengaKVCacheManager(config, MAX_TOKENS, 16, 16, use_eagle=True)
    first, again = (request(name, list(range(3, 103))) for name in ("first", "again"))
    manager.new_step_starts()
    assert manager.allocate_slots(first, 100, num_lookahead_tokens=NUM_DRAFTED) is not None
    first.num_computed_tokens = 100
    manager.free(first)

    pages, num_tokens, _ = manager.get_computed_blocks(again)

    assert num_tokens == 80  # not 96
    assert manager.allocate_slots(again, 20, num_tokens, pages) is not None
    manager.manager.check()


def test_the_next_turn_of_a_session_reads_no_draft_accepted_after_its_end(make_scheduler):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    scheduler = make_scheduler(Scheduler)

    def say(tokens):
        turn = request("session", tokens, 50)
        turn.resumable, turn.sampling_params.stop_token_ids = True, [9]
        scheduler.add_request(turn)

    def step(sampled):
        planned = scheduler.schedule()
        output = ModelRunnerOutput(
            req_ids=["session"], req_id_to_index={"session": 0}, sampled_token_ids=[sampled]
        )
        scheduler.update_from_output(planned, output)
        return planned

    say(list(range(100, 120)))
    step([50])
    scheduler.update_draft_token_ids(DraftTokenIds(["session"], [[51, 9, 52]]))
    step([51, 9, 52, 53])  # all are right, and the second ends the turn
    say([200])

    planned = step([60])

    # Of what was said the last token is left out, and the one before is the draft that was.
    (turn,) = planned.scheduled_new_reqs
    assert turn.prompt_token_ids[20:] == [50, 51, 200]
    assert turn.num_computed_tokens == 22

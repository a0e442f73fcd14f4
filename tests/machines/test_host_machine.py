"""Requests that come back to what the arena has lost, with the bytes of both memories modelled."""

import random

import pytest

from jenga.errors import OutOfPagesError, TooEarlyError
from jenga.eviction.known import EVICTION_POLICIES
from jenga.manager import Manager
from jenga.policies import Image
from jenga.prefix import prefetch
from jenga.spec import CrossAttention, ImageEmbedding
from jenga.tables.request import CopyPath
from tests.machines.engine_model import EngineModel, Run
from tests.machines.geometries import (
    CACHED,
    GROWING_BUDGETS,
    WINDOWED,
    full,
    geometry,
    in_whole_pages,
    sliding,
    state,
)
from tests.machines.wholeness import assert_checkpoints_are_whole

HASH_TOKENS = 4
NUM_DOCUMENTS = 5
MOST_RUNNING = 3

STATES_FIRST = geometry(
    "states_before_what_is_loaded",
    state("state[0]", slot_bytes=384, per_large=1),
    state("state[1]", slot_bytes=192, per_large=2),
    full(slot_bytes=24, tokens=4, per_large=4),
    sliding(slot_bytes=96, tokens=4, per_large=1, window=9),
)


class Pressure:
    """Some documents, asked again and again, in an arena that holds one or two of them.

    Requests wait, run, keep states as the engine's plugin asks for it, are preempted and come back.
    """

    def __init__(self, geometry, seed, *, num_large_pages, num_host_large_pages):
        self.random, self.late = random.Random(seed), random.Random(seed)
        self.geometry = geometry
        choose = self.random.choice
        self.manager = Manager(
            geometry,
            num_large_pages=num_large_pages,
            prefix_caching=True,
            hash_tokens=HASH_TOKENS,
            eviction_policy=EVICTION_POLICIES[choose(sorted(EVICTION_POLICIES))](),
            answer_interval_tokens=in_whole_pages(geometry, choose([None, 0, 4, 8])),
            ahead_tokens=choose([0, 0, 1, 5]),
            num_host_large_pages=num_host_large_pages,
            load_at_once_bytes=choose([0, 0, 300, 1 << 20]),
            left_share=0.0,
        )
        self.engine = EngineModel(self.manager, HASH_TOKENS)
        self.runs = {}
        self.waiting = []
        states = [table.layer_type for table in geometry.page_tables if table.is_state]
        self.slots = 1 + max((each.draft_tokens for each in states), default=0)
        self.has_states = bool(states)
        self.passed = []  # request, tokens: few enough that slots have the states after each
        self.hit_tokens = self.num_admitted = self.num_named = self.num_ahead = 0
        self.num_loaded_ahead = 0

    # Requests

    def arrive(self):
        choose = self.random.choice
        document = self.random.randrange(NUM_DOCUMENTS)
        prompt = [(document, i) for i in range(choose([8, 16, 16, 20, 24, 24]))]
        prompt += [choose("ab") for _ in range(choose([1, 1, 2, 5]))]
        images = ()
        if document % 2:
            # Behind the text of several documents. Some show it twice.
            content = b"image %d" % self.random.randrange(5)
            images = tuple(
                Image(start_token=start, num_tokens=5, content=content)
                for start in choose([(2,), (2, 9), (2, 7), (12,)])
                if start + 5 <= len(prompt)
            )
        tokens = (*prompt, *(("out", i) for i in range(choose([1, 3, 9, 14]))))
        self.num_named += 1
        self.wait(Run(f"r{self.num_named}", tokens, len(prompt), images))

    def wait(self, run, *, first=False):
        if self.random.random() < 0.7:
            self.manager.announce(
                run.request_id,
                run.hashes(HASH_TOKENS),
                num_tokens=run.prompt,
                facts=run.facts,
                first=first,
            )
        self.waiting.insert(0 if first else len(self.waiting), run)

    def admit(self, run):
        """Let a request run if there is room for it."""
        for other in self.runs.values():
            # From here on the step loses no request.
            self.commit(other, other.processed + other.scheduled - other.rejected)
        hit = self.manager.lookup(
            run.hashes(HASH_TOKENS), max_tokens=run.prompt - 1, facts=run.facts
        )
        num_tokens = min(run.prompt, hit.num_tokens + self.random.choice([4, 9, 40]))
        report = self.manager.host_report()
        try:
            self.manager.allocate(
                run.request_id,
                num_tokens=num_tokens,
                hit=hit,
                full_tokens=self.random.choice([0, run.prompt]),
            )
        except (OutOfPagesError, TooEarlyError):
            assert self.manager.host_report() == report
            return False
        self._note_images(run, hit)
        run.processed, run.scheduled = hit.num_tokens, num_tokens - hit.num_tokens
        self.hit_tokens += hit.num_tokens
        self.num_admitted += 1
        self.runs[run.request_id] = run
        self.commit(run, run.processed)
        return True

    def commit(self, run, num_tokens):
        self.manager.commit(run.request_id, run.hashes(HASH_TOKENS), num_tokens)

    def _note_images(self, run, hit):
        """Note what the encoder need not write: what the hit has, and embeddings already read."""
        for index, table in enumerate(self.geometry.page_tables):
            start = 0
            held = self.manager.page_table(run.request_id, index)
            for image in run.images:
                end = start + -(-image.num_tokens // table.tokens_per_page)
                pages = hit.pages[index][start:end]
                # Of an image that begins after the first step nothing is taken from the hit.
                found = len(pages) == len(held[start:end]) == end - start and all(
                    page > 0 or number in hit.host_pages[index]
                    for number, page in enumerate(pages, start)
                )
                is_embedding = isinstance(table.layer_type, ImageEmbedding)
                if found or (is_embedding and image.end_token <= hit.num_tokens):
                    run.images_written.add((index, image.start_token))
                start = end

    def go_on(self, run):
        """Schedule more of a request, or end it; it gives its place up where there is no room."""
        end = run.prompt if run.processed < run.prompt else len(run.tokens)
        num_tokens = min(end, run.processed + self.random.choice([1, 1, 2, 4, 13]))
        if num_tokens == run.processed:
            self.lose(run)
            return
        self.commit(run, run.processed)
        cached = self._cached_images(run, num_tokens)
        try:
            self.manager.allocate(
                run.request_id, num_tokens=num_tokens, num_processed_tokens=run.processed
            )
        except OutOfPagesError:
            self.preempt(run)
            return
        run.images_written.update(cached)
        run.scheduled = num_tokens - run.processed
        if run.processed >= run.prompt and run.scheduled <= self.slots:
            # The first token of a step is never a draft.
            run.rejected = self.random.randrange(run.scheduled)
        interval = self.manager.answer_interval_tokens
        if run.processed >= run.prompt and interval and run.processed % interval == 0:
            self.keep(run, run.processed)

    def _cached_images(self, run, num_tokens):
        """Images that a step begins and the encoder need not write."""
        return [
            (index, image.start_token)
            for index, table in enumerate(self.geometry.page_tables)
            if isinstance(table.layer_type, CrossAttention | ImageEmbedding)
            for number, image in enumerate(run.images)
            if image.start_token < num_tokens
            and not self.manager.image_pages(run.request_id, index, number)
            and self.manager.is_image_cached(image)
        ]

    def lose(self, run):
        run.scheduled = run.rejected = 0
        self.commit(run, run.processed)
        self.manager.free(run.request_id)
        del self.runs[run.request_id]

    def preempt(self, run):
        """Put a request back to the head of the queue, whatever the step was to do for it."""
        self.lose(run)
        prompt = self.random.choice([run.prompt, max(run.prompt, run.processed)])
        if prompt < len(run.tokens):
            self.wait(Run(run.request_id, run.tokens, prompt, run.images), first=True)

    # States

    def keep(self, run, num_tokens, *, in_passing=False):
        prefix_hash = run.hashes(HASH_TOKENS)[num_tokens // HASH_TOKENS - 1]
        return (
            prefix_hash
            if self.manager.keep_state(
                run.request_id, prefix_hash, num_tokens, in_passing=in_passing
            )
            else None
        )

    def keep_in_passing(self):
        """Give pages to the states that the step passes, as the plugin does when all is scheduled.

        Returns:
            All copies of the step, what layers write on the way, and what is loaded beside them.
        """
        copies = self.manager.take_copies()
        kept = []
        for run in self.runs.values():
            if not self.has_states or run.processed >= run.prompt:
                continue
            for num_tokens in self.manager.checkpoint_tokens(run.request_id):
                if not run.processed < num_tokens <= run.processed + run.scheduled:
                    continue
                if run.scheduled <= self.slots:
                    self.passed.append((run, num_tokens))
                elif (key := self.keep(run, num_tokens, in_passing=True)) is not None:
                    for copy in self.manager.take_copies():
                        if copy.path == CopyPath.IN_ARENA:
                            kept.append((run, copy, num_tokens, key))
                        else:
                            copies.append(copy)
        loaded = self.manager.prefetch_pages(sum(run.scheduled for run in self.runs.values()))
        copies += self.manager.take_copies()
        passed = [
            (run, copy.table_index, copy.target, num_tokens)
            for run, copy, num_tokens, key in kept
            if self.manager.keeps_state(copy.table_index, key, copy.target)
        ]
        return copies, passed, loaded

    # Steps

    def step(self):
        """Serve who runs, lose some of them, admit others, and compute."""
        chance = self.random.random
        self.manager.new_step()
        for run, num_tokens in self.passed:
            if self.runs.get(run.request_id) is run:
                self.keep(run, num_tokens)
        self.passed.clear()
        for run in list(self.runs.values()):
            if self.runs.get(run.request_id) is not run:
                continue
            if chance() < 0.9:
                self.go_on(run)
            if self.runs and chance() < 0.1:
                self.preempt(self.random.choice(list(self.runs.values())))
            self.manager.check()
        while len(self.waiting) < 2 * MOST_RUNNING and chance() < 0.7:
            self.arrive()
        while self.waiting and len(self.runs) < MOST_RUNNING and chance() < 0.8:
            if not self.admit(self.waiting[0]):
                break
            del self.waiting[0]
            self.manager.check()
        copies, passed, ahead = self.keep_in_passing()
        self.num_loaded_ahead += len(ahead)
        self.manager.check()
        saved = self.manager.write_back_pages()
        self.num_ahead += len(saved)
        self.manager.check()
        assert_checkpoints_are_whole(self.manager, HASH_TOKENS)
        ahead += saved
        num_early = self.late.randint(0, len(ahead))
        self.engine.execute(self.runs.values(), copies, passed, ahead, num_early)
        if chance() < 0.01:
            for run in list(self.runs.values()):
                self.preempt(run)
            assert self.manager.reset_prefix_cache()
            self.manager.check()


def served(geometry, seed, *, num_host_large_pages, num_steps=60, per_table=5):
    pressure = Pressure(
        geometry,
        seed,
        # At least a document and a half of one page table.
        num_large_pages=1 + max(9, per_table * len(geometry.page_tables)),
        num_host_large_pages=num_host_large_pages,
    )
    for _ in range(num_steps):
        pressure.step()
    return pressure


LONG = {
    "large_pages_of_one_image",
    "attention_of_two_models",
    "type_from_outside",
    "states_of_drafted_tokens",
    "vision",
}
"""Geometries that take longest. Other ones have page tables of the same kinds."""

GEOMETRIES = [
    pytest.param(each, id=each.name, marks=pytest.mark.slow if each.name in LONG else ())
    for each in (*CACHED, WINDOWED, STATES_FIRST)
    if each is not GROWING_BUDGETS  # none of its content is ever found again
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_what_comes_back_from_host_memory_is_what_went_there(geometry, monkeypatch):
    monkeypatch.setattr(prefetch, "LOADED_TOKENS", 0)
    num_loaded = num_loaded_ahead = num_ahead = num_hit = num_hit_alone = 0
    for seed in range(16):
        # Of what is put off, a small page or two, or all of it.
        monkeypatch.setattr(prefetch, "STEP_BYTES", (1000, 1 << 20)[seed % 2])
        # From less than a document to all of them.
        num_large = 1 + len(geometry.page_tables) * (1, 6, 60)[seed % 3]
        pressure = served(geometry, seed, num_host_large_pages=num_large)
        alone = served(geometry, seed, num_host_large_pages=0)
        num_loaded += pressure.engine.num_loaded
        num_loaded_ahead += pressure.num_loaded_ahead
        num_ahead += pressure.num_ahead
        num_hit += pressure.hit_tokens / max(1, pressure.num_admitted)
        num_hit_alone += alone.hit_tokens / max(1, alone.num_admitted)

    assert num_loaded > 0
    assert num_loaded > num_loaded_ahead > 0
    assert num_ahead > 0
    assert num_hit > num_hit_alone

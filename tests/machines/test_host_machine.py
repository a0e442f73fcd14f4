"""Requests that come back to what the arena has lost, with the bytes of both memories modelled."""

import random

import pytest

from jenga.errors import OutOfPagesError, TooEarlyError
from jenga.eviction_order import EVICTION_ORDERS
from jenga.manager import Manager
from jenga.policies import Image
from jenga.request import is_on_host
from jenga.spec import ImageEmbedding
from tests.machines.engine_model import EngineModel, Run
from tests.machines.geometries import CACHED, WINDOWED

HASH_TOKENS = 4
NUM_DOCUMENTS = 5
MOST_RUNNING = 3


class Pressure:
    """Some documents, asked again and again, in an arena that holds one or two of them."""

    def __init__(self, geometry, seed, *, num_large_pages, num_host_large_pages):
        self.random = random.Random(seed)
        self.geometry = geometry
        self.manager = Manager(
            geometry,
            num_large_pages=num_large_pages,
            prefix_caching=True,
            hash_tokens=HASH_TOKENS,
            eviction_order=EVICTION_ORDERS[self.random.choice(sorted(EVICTION_ORDERS))](),
            num_host_large_pages=num_host_large_pages,
            left_share=0.0,
        )
        self.engine = EngineModel(self.manager, HASH_TOKENS)
        self.runs = {}
        self.has_states = any(table.is_state for table in geometry.page_tables)
        self.hit_tokens = self.num_admitted = 0

    def arrive(self):
        choose = self.random.choice
        document = self.random.randrange(NUM_DOCUMENTS)
        prompt = [(document, i) for i in range(choose([8, 16, 16, 20, 24, 24]))]
        prompt += [choose("ab") for _ in range(choose([1, 1, 2, 5]))]
        images = ()
        if document % 2:
            images = (Image(start_token=2, num_tokens=5, content=b"image %d" % document),)
        tokens = (*prompt, *(("out", i) for i in range(choose([1, 3, 9]))))
        run = Run(f"r{self.num_admitted}", tokens, len(prompt), images)
        hit = self.manager.lookup(
            run.hashes(HASH_TOKENS), max_tokens=len(prompt) - 1, facts=run.facts
        )
        num_tokens = min(len(prompt), hit.num_tokens + choose([4, 9, 40]))
        try:
            self.manager.allocate(run.request_id, num_tokens=num_tokens, hit=hit)
        except (OutOfPagesError, TooEarlyError):
            self.manager.check()
            return
        self._note_images(run, hit)
        run.processed, run.scheduled = hit.num_tokens, num_tokens - hit.num_tokens
        self.hit_tokens += hit.num_tokens
        self.num_admitted += 1
        self.runs[run.request_id] = run
        self.manager.commit(run.request_id, run.hashes(HASH_TOKENS), num_tokens)

    def _note_images(self, run, hit):
        """Note what the encoder need not write: what the hit has, and embeddings already read."""
        for index, table in enumerate(self.geometry.page_tables):
            start = 0
            for image in run.images:
                end = start + -(-image.num_tokens // table.tokens_per_page)
                marks = hit.pages[index][start:end]
                found = len(marks) == end - start and all(
                    mark > 0 or is_on_host(mark) for mark in marks
                )
                is_embedding = isinstance(table.layer_type, ImageEmbedding)
                if found or (is_embedding and image.end_token <= hit.num_tokens):
                    run.images_written.add((index, image.start_token))
                start = end

    def go_on(self, run):
        """Schedule more of a request, or end it; it gives its place up where there is no room."""
        end = run.prompt if run.processed < run.prompt else len(run.tokens)
        num_tokens = min(end, run.processed + self.random.choice([1, 4, 13]))
        if num_tokens == run.processed:
            self.end(run)
            return
        try:
            self.manager.allocate(
                run.request_id, num_tokens=num_tokens, num_processed_tokens=run.processed
            )
        except OutOfPagesError:
            self.end(run)
            return
        run.scheduled = num_tokens - run.processed
        self.manager.commit(run.request_id, run.hashes(HASH_TOKENS), num_tokens)

    def end(self, run):
        self.manager.free(run.request_id)
        del self.runs[run.request_id]

    def step(self):
        """Serve who runs, admit some, compute, and keep states where steps ended."""
        for run in list(self.runs.values()):
            self.go_on(run)
            self.manager.check()
        while len(self.runs) < MOST_RUNNING and self.random.random() < 0.7:
            self.arrive()
            self.manager.check()
        self.engine.execute(self.runs.values())
        self.manager.new_step()
        for run in self.runs.values():
            if self.has_states and run.processed and run.processed % HASH_TOKENS == 0:
                prefix_hash = run.hashes(HASH_TOKENS)[run.processed // HASH_TOKENS - 1]
                self.manager.keep_state(run.request_id, prefix_hash, run.processed)
                self.manager.check()


def served(geometry, seed, *, num_host_large_pages, num_steps=60):
    pressure = Pressure(
        geometry,
        seed,
        num_large_pages=1 + 5 * len(geometry.page_tables),
        num_host_large_pages=num_host_large_pages,
    )
    for _ in range(num_steps):
        pressure.step()
    return pressure


@pytest.mark.parametrize("geometry", [*CACHED, WINDOWED], ids=lambda geometry: geometry.name)
def test_what_comes_back_from_host_memory_is_what_went_there(geometry):
    num_loaded = num_hit = num_hit_alone = 0
    for seed in range(6):
        # From less than a document to all of them.
        num_large = 1 + len(geometry.page_tables) * (1, 6, 60)[seed % 3]
        pressure = served(geometry, seed, num_host_large_pages=num_large)
        alone = served(geometry, seed, num_host_large_pages=0)
        num_loaded += pressure.engine.num_loaded
        num_hit += pressure.hit_tokens / max(1, pressure.num_admitted)
        num_hit_alone += alone.hit_tokens / max(1, alone.num_admitted)

    assert num_loaded > 0
    assert num_hit > num_hit_alone

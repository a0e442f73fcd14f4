"""Engines that compute nothing, on one arena: each knows what its bytes should be."""

import random

from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from tests.machines.engine_model import EngineModel, Run, last_end

HASH_TOKENS = 4


class SharedModel(EngineModel):
    """Content of the arena as one engine left it. What others write destroys it."""

    def __init__(self, manager: Manager, models: list["SharedModel"]) -> None:
        super().__init__(manager, HASH_TOKENS)
        self.models = models
        models.append(self)

    def write(self, index, page, slot, content, memory=None):
        large = page // self.tables[index].small_pages_per_large_page
        for model in self.models:
            if model is not self:
                for other in range(len(model.tables)):
                    model.arena.pop((large, other), None)
        super().write(index, page, slot, content, memory)


class FakeEngine:
    """Random requests over shared prefixes on one manager, step by step."""

    def __init__(self, name, geometry, lender, models, seed):
        self.name = name
        self.lender = lender
        self.random = random.Random(f"{name} {seed}")
        self.manager = Manager(
            geometry,
            num_large_pages=lender.num_pages,
            prefix_caching=True,
            hash_tokens=HASH_TOKENS,
            lender=lender,
        )
        self.model = SharedModel(self.manager, models)
        self.models = models
        self.runs = {}
        self.num_runs = self.num_hit_tokens = self.num_refused = 0

    def step(self, load):
        """Schedule and execute a step with about `load` running requests."""
        self.manager.new_step()
        for run in list(self.runs.values()):
            if not self._grow(run):
                self._end(run)
        while len(self.runs) < load and self._admit():
            pass
        self.model.execute(self.runs.values())
        self.manager.check()

    def rest(self):
        """Do what an engine does while it has no request."""
        self.manager.borrowed.rest()
        self.manager.check()

    def finish(self):
        """End all requests, as after an abort."""
        for run in list(self.runs.values()):
            self._end(run)

    def die(self):
        """Forget everything, as a process that is killed."""
        self.models.remove(self.model)

    def _end(self, run):
        self.manager.free(run.request_id)
        del self.runs[run.request_id]

    def _admit(self):
        prompt = [(self.name, i) for i in range(self.random.choice([0, 8, 16, 24, 32]))]
        prompt += [self.random.randrange(3) for _ in range(self.random.randrange(1, 9))]
        output = [("out", i % 2) for i in range(self.random.randrange(9))]
        self.num_runs += 1
        run = Run(f"{self.name}{self.num_runs}", (*prompt, *output), len(prompt), ())
        hit = self.manager.lookup(
            run.hashes(HASH_TOKENS), max_tokens=run.prompt - 1, facts=run.facts
        )
        num_tokens = min(run.prompt, hit.num_tokens + self.random.choice([4, 8, 40]))
        try:
            self.manager.allocate(
                run.request_id, num_tokens=num_tokens, hit=hit, full_tokens=run.prompt
            )
        except OutOfPagesError:
            self.num_refused += 1
            return False
        self.num_hit_tokens += hit.num_tokens
        run.processed, run.scheduled = hit.num_tokens, num_tokens - hit.num_tokens
        self.runs[run.request_id] = run
        self._commit(run)
        return True

    def _grow(self, run):
        num_tokens = min(
            last_end(self.model.tables, run), run.processed + self.random.choice([1, 1, 4, 8])
        )
        if num_tokens == run.processed:
            return False
        try:
            self.manager.allocate(
                run.request_id, num_tokens=num_tokens, num_processed_tokens=run.processed
            )
        except OutOfPagesError:
            return False
        run.scheduled = num_tokens - run.processed
        self._commit(run)
        return True

    def _commit(self, run):
        num_tokens = run.processed + run.scheduled
        self.manager.commit(run.request_id, run.hashes(HASH_TOKENS), num_tokens)


def assert_no_page_has_two_owners(engines, books):
    """Compare what engines think to have with the books."""
    for engine in engines:
        large_pages = engine.manager._allocator.large_pages
        mine = set(range(1, books.num_pages)) - large_pages._foreign
        leaving = {page for _, pages in engine.manager.borrowed._leaving for page in pages}
        owned = set(books.pages_of(engine.lender.row + 1))
        assert mine | leaving | set(engine.lender.granted) == owned
        assert not mine & leaving

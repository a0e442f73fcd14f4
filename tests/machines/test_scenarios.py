"""Situations that random operation seldom meets, on the model of the arena's bytes."""

import pytest

from jenga.manager import Manager
from tests.machines.engine_model import EngineModel, Run
from tests.machines.geometries import BUDGETED, GROWING_BUDGETS

HASH_TOKENS = 4


class Session:
    """One manager, its engine, and the requests given to both."""

    def __init__(self, geometry):
        self.manager = Manager(
            geometry, num_large_pages=30, prefix_caching=True, hash_tokens=HASH_TOKENS
        )
        self.engine = EngineModel(self.manager, HASH_TOKENS)
        self.runs = {}

    def admit(self, name, tokens, prompt):
        run = self.runs[name] = Run(name, tuple(tokens), prompt, ())
        hit = self.manager.lookup(run.hashes(HASH_TOKENS), max_tokens=prompt - 1, facts=run.facts)
        self.manager.allocate(name, num_tokens=prompt, hit=hit)
        run.processed, run.scheduled = hit.num_tokens, prompt - hit.num_tokens
        self.step(run)
        return hit.num_tokens

    def decode(self, name):
        run = self.runs[name]
        self.manager.allocate(
            name, num_tokens=run.processed + 1, num_processed_tokens=run.processed
        )
        run.scheduled = 1
        self.step(run)

    def step(self, run):
        end = run.processed + run.scheduled
        self.manager.commit(run.request_id, run.hashes(HASH_TOKENS), end)
        self.engine.execute([run])
        self.manager.new_step()
        self.manager.check()


TEXT = range(60)


@pytest.mark.parametrize("free_first", [False, True])
def test_a_prompt_beyond_its_budget_leaves_no_pages_that_it_wrote_over(free_first):
    session = Session(BUDGETED)
    session.admit("long", TEXT, 40)
    session.decode("long")
    if free_first:
        session.manager.free("long")

    assert session.admit("short", TEXT, 18) == 0
    session.decode("short")


@pytest.mark.parametrize("free_first", [False, True])
def test_a_prompt_beyond_its_budget_writes_over_no_page_of_another(free_first):
    session = Session(BUDGETED)
    assert session.admit("short", TEXT, 18) == 0
    if free_first:
        session.manager.free("short")

    assert session.admit("long", TEXT, 40) == 0
    session.decode("long")
    assert session.admit("short again", TEXT, 18) == 16
    session.decode("short again")
    if not free_first:
        session.decode("short")


def test_layers_give_pages_back_whenever_outputs_have_grown():
    session = Session(GROWING_BUDGETS)
    session.admit("one", TEXT, 6)
    run, held = session.runs["one"], []
    while run.processed < len(TEXT):
        session.decode("one")
        session.manager.release_passed("one", run.processed)
        pages = session.manager.page_tables("one")[:3]
        held.append((run.processed, *(sum(page > 0 for page in each) for each in pages)))

    # Choices come at 6 + 5k tokens. The budgets are 8 and 17 tokens, in pages of 4.
    at = {tokens: counts for tokens, *counts in held}
    assert at[10] == [3, 3, 3]
    assert at[11] == [3, 2, 3]
    assert at[21] == [6, 2, 5]
    assert at[26] == [7, 2, 4]
    assert max(counts[1] for counts in at.values()) == 3
    assert max(counts[2] for counts in at.values()) == 6
    assert at[60][0] == 15


def test_requests_that_may_outgrow_a_budget_share_no_pages():
    session = Session(GROWING_BUDGETS)
    session.admit("one", TEXT, 6)

    assert session.admit("two", TEXT, 6) == 0
    session.manager.free("one")
    assert session.admit("three", TEXT, 6) == 0

"""Random requests against the manager, with a naive model of who owns which page beside it."""

import pickle

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from jenga.spec import FullAttention
from tests.machines.geometries import ALL, HOMOGENEOUS, HYBRID, MIXED, WINDOWED


def dump(manager):
    """Everything a manager knows but who was refused, comparable."""
    entry = manager._gate
    refused = entry._refused, entry._refused_alone
    entry._refused = entry._refused_alone = None
    dumped = pickle.dumps(manager.__dict__)
    entry._refused, entry._refused_alone = refused
    return dumped


class ManagerMachine(RuleBasedStateMachine):
    """Admit, grow, slide, preempt, finish and abort, until the arena is full and beyond."""

    geometry = MIXED

    @initialize(num_large_pages=st.integers(7, 24))
    def start(self, num_large_pages):
        self.manager = Manager(self.geometry, num_large_pages=num_large_pages)
        self.tables = self.geometry.page_tables
        # request -> (tokens with slots, tokens processed, final length)
        self.requests = {}
        self.prompts = {}  # of those that came in only if all of it could be held
        self.num_requests = 0

    def _try(self, request_id, **arguments):
        """Allocate; a refusal must leave everything as it was, but for what was given up."""
        if request_id in self.requests:
            self.manager.release_passed(request_id, arguments["num_processed_tokens"])
        before = dump(self.manager)
        try:
            new_pages = self.manager.allocate(request_id, **arguments)
        except OutOfPagesError as refused:
            error = refused
        else:
            return new_pages
        assert error.needed_large_pages > error.available_large_pages
        assert dump(self.manager) == before
        return None

    @rule(
        prompt=st.integers(1, 60),
        chunk=st.integers(1, 40),
        output=st.integers(0, 40),
        gate=st.booleans(),
    )
    def admit(self, prompt, chunk, output, gate):
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        num_tokens = min(prompt, chunk)
        full_tokens = prompt if gate else 0
        new_pages = self._try(request_id, num_tokens=num_tokens, full_tokens=full_tokens)
        if new_pages is not None:
            assert new_pages == self.manager.page_tables(request_id)
            self.requests[request_id] = (num_tokens, 0, prompt + output)
            if gate:
                self.prompts[request_id] = prompt

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), step=st.integers(1, 30))
    def grow(self, data, step):
        self._grow(data, data.draw(st.sampled_from(sorted(self.requests))), step)

    @precondition(lambda self: self._unread())
    @rule(data=st.data(), step=st.integers(1, 5))
    def read_on(self, data, step):
        # Steps of a page or less: the last of a prompt's pages is often taken alone.
        self._grow(data, data.draw(st.sampled_from(self._unread())), step)

    def _unread(self):
        """Requests that were promised pages for more tokens than they have slots for."""
        return sorted(name for name, end in self.prompts.items() if self.requests[name][0] < end)

    def _grow(self, data, request_id, step):
        num_tokens, processed, final = self.requests[request_id]
        processed = data.draw(st.integers(processed, num_tokens))
        before = self.manager.page_tables(request_id)
        wanted = min(num_tokens + step, final)
        if wanted == num_tokens:
            return
        new_pages = self._try(request_id, num_tokens=wanted, num_processed_tokens=processed)
        if new_pages is None:
            self.requests[request_id] = (num_tokens, processed, final)
            return
        for old, new, now in zip(
            before, new_pages, self.manager.page_tables(request_id), strict=True
        ):
            assert len(now) == len(old) + len(new)
            assert now[len(old) :] == new
            assert all(after in (page, 0) for page, after in zip(old, now, strict=False))
        self.requests[request_id] = (wanted, processed, final)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish_or_preempt(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.manager.free(request_id)
        del self.requests[request_id]
        self.prompts.pop(request_id, None)

    @rule()
    def step(self):
        self.manager.new_step()

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check()

    @invariant()
    def pages_are_promised_for_the_rest_of_prompts(self):
        if not hasattr(self, "manager"):
            return
        promised = self.manager._allocation.promised_beside(None)
        for index, table in enumerate(self.tables):
            if not isinstance(table.layer_type, FullAttention):
                continue
            expected = sum(
                max(0, -(-prompt // table.tokens_per_page) - len(pages))
                for request_id, prompt in self.prompts.items()
                for pages in [self.manager.page_table(request_id, index)]
            )
            assert sum(pages[index] for pages in promised) == expected

    @invariant()
    def every_live_token_has_a_page_of_its_own(self):
        if not hasattr(self, "manager"):
            return
        for index, table in enumerate(self.tables):
            owners = {}
            for request_id, (num_tokens, processed, _) in self.requests.items():
                pages = self.manager.page_table(request_id, index)
                live = naive_live_pages(table, processed, num_tokens)
                assert set(live) == {i for i, page in enumerate(pages) if page}
                for number in live:
                    assert (
                        0
                        < pages[number]
                        < table.small_pages_per_large_page * (self.manager.num_large_pages)
                    )
                    assert owners.setdefault(pages[number], request_id) == request_id
        large_owners = {}
        for index, table in enumerate(self.tables):
            for request_id in self.requests:
                for page in self.manager.page_table(request_id, index):
                    large = page // table.small_pages_per_large_page
                    if page:
                        assert large_owners.setdefault(large, index) == index

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.requests):
            self.manager.free(request_id)
        self.manager.check()
        memory = self.manager.memory()
        assert memory.empty_large_bytes + memory.null_bytes == memory.arena_bytes


def naive_live_pages(table, processed, num_tokens):
    """Page numbers that a query from `processed` on reads or writes, token by token."""
    if table.is_state:
        return list(range(1 + table.layer_type.draft_tokens))
    layer_type = table.layer_type
    needed = set(range(processed, num_tokens))
    query = processed
    for token in range(processed):
        if hasattr(layer_type, "window_tokens"):
            read = query - token < layer_type.window_tokens
        elif hasattr(layer_type, "chunk_tokens"):
            read = query // layer_type.chunk_tokens == token // layer_type.chunk_tokens
        else:
            read = True
        if read:
            needed.add(token)
    # A page between is there as well: a page table has no holes after its first live page.
    first = min(needed, default=num_tokens) // table.tokens_per_page
    return list(range(first, -(-num_tokens // table.tokens_per_page)))


@pytest.mark.parametrize("geometry", ALL, ids=lambda geometry: geometry.name)
def test_manager_keeps_its_books_whatever_requests_do(geometry):
    machine = type("Machine", (ManagerMachine,), {"geometry": geometry})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [HOMOGENEOUS, WINDOWED, HYBRID, MIXED], ids=lambda g: g.name)
def test_manager_keeps_its_books_over_long_runs(geometry):
    machine = type("Machine", (ManagerMachine,), {"geometry": geometry})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300,
            stateful_step_count=150,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

"""Random requests over shared prefixes, with the bytes of the arena modelled beside the manager."""

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
from jenga.eviction.known import EVICTION_POLICIES
from jenga.eviction.points import Kind
from jenga.manager import Manager
from jenga.policies import Image
from jenga.prefix.eviction_log import EvictionCause
from jenga.prefix.miss_log import LOOSE, MOST_LOSSES
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    SlidingWindow,
)
from tests.machines.engine_model import EngineModel, Run, last_end
from tests.machines.geometries import CACHED, in_whole_pages
from tests.machines.test_manager_machine import dump
from tests.machines.wholeness import assert_checkpoints_are_whole

HASH_TOKENS = 4
FOR_MEMORY = {EvictionCause.CHECKPOINT, EvictionCause.END}
IMAGE_TOKENS = {b"cat": 5, b"dog": 8, b"bird": 3, None: 4}


class CacheMachine(RuleBasedStateMachine):
    """Wait, admit with hits, grow, fork, keep states, preempt, finish, evict, reset."""

    geometry = CACHED[0]

    @initialize(
        num_large_pages=st.integers(8, 26),
        num_host_large_pages=st.sampled_from([0, 8, 13, 60]),
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        ahead_tokens=st.sampled_from([0, 0, 1, 5]),
        answer_interval_tokens=st.sampled_from([None, 0, 4]),
    )
    def start(
        self, num_large_pages, num_host_large_pages, policy, ahead_tokens, answer_interval_tokens
    ):
        self.manager = Manager(
            self.geometry,
            num_large_pages=num_large_pages,
            prefix_caching=True,
            hash_tokens=HASH_TOKENS,
            eviction_policy=EVICTION_POLICIES[policy](),
            answer_interval_tokens=in_whole_pages(self.geometry, answer_interval_tokens),
            ahead_tokens=ahead_tokens,
            records_changes=True,
            num_host_large_pages=num_host_large_pages,
        )
        self.manager.record_evictions()
        # By what is said to change, in the arena and in host memory.
        self.found, self.hosted = ([set() for _ in self.geometry.page_tables] for _ in range(2))
        self.engine = EngineModel(self.manager, HASH_TOKENS)
        self.runs = {}
        self.waiting = {}
        self.num_runs = self.num_evicted = 0
        # Names of all content that was cached since the last reset, and all losses since the start.
        self.ever = [set() for _ in self.geometry.page_tables]
        self.lost_checkpoints = {}
        self.losses = []
        states = [table.layer_type for table in self.geometry.page_tables if table.is_state]
        self.has_states = bool(states)
        self.draft_tokens = max((state.draft_tokens for state in states), default=0)

    # Prompts are prefixes of two documents, with a tail of few values: they fork everywhere.
    @rule(
        document=st.sampled_from([0, 0, 0, 1]),
        shared=st.sampled_from([0, 4, 8, 12, 15, 16, 17, 20, 24, 32, 41]),
        tail=st.lists(st.integers(0, 1), max_size=7),
        output=st.integers(0, 9),
        chunk=st.sampled_from([1, 4, 7, 8, 12, 16, 24, 40]),
        # Contents repeat, within a request too.
        contents=st.lists(st.sampled_from([b"cat", b"cat", b"dog", b"bird", None]), max_size=4),
        image_start=st.sampled_from([0, 3, 8, 8, 20]),
        gap=st.sampled_from([0, 0, 3]),
        gate=st.booleans(),
        waits=st.booleans(),
        first=st.booleans(),
    )
    def arrive(
        self,
        document,
        shared,
        tail,
        output,
        chunk,
        contents,
        image_start,
        gap,
        gate,
        waits,
        first,
    ):
        prompt = (*((document, i) for i in range(shared)), *tail)
        if not prompt:
            return
        self.num_runs += 1
        images = []
        for content in contents:
            image = Image(
                start_token=image_start, num_tokens=IMAGE_TOKENS[content], content=content
            )
            if image.end_token > len(prompt):
                break
            images.append(image)
            image_start = image.end_token + gap
        images = tuple(images)
        tokens = (*prompt, *(("out", i % 2) for i in range(output)))
        run = Run(f"r{self.num_runs}", tokens, len(prompt), images)
        if waits:
            self._wait(run, first=first)
        else:
            self._admit(run, chunk, gate=gate)

    def _wait(self, run, *, first):
        self.manager.announce(
            run.request_id,
            run.hashes(HASH_TOKENS),
            num_tokens=run.prompt,
            facts=run.facts,
            first=first,
        )
        self.waiting[run.request_id] = run

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.sampled_from([1, 4, 8, 12, 24, 40]), gate=st.booleans())
    def admit(self, data, chunk, gate):
        run = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        if self._admit(run, chunk, gate=gate):
            del self.waiting[run.request_id]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.manager.withdraw(request_id)
        del self.waiting[request_id]

    def _admit(self, run, chunk, *, gate):
        prompt, images = run.tokens[: run.prompt], run.images
        before = dump(self.manager)
        hit = self.manager.lookup(
            run.hashes(HASH_TOKENS), max_tokens=len(prompt) - 1, facts=run.facts
        )
        rest_tokens = self.manager.rest_tokens(
            run.request_id, run.hashes(HASH_TOKENS), num_tokens=len(prompt), facts=run.facts
        )
        assert dump(self.manager) == before
        assert hit.num_tokens < len(prompt)
        if self.manager.was_refused(run.request_id):
            assert rest_tokens is None
        elif self.manager.starts_over(run.request_id):
            assert rest_tokens == len(prompt)
        else:
            assert rest_tokens == len(prompt) - hit.num_tokens
        num_tokens = min(len(prompt), hit.num_tokens + chunk)
        try:
            self.manager.allocate(
                run.request_id,
                num_tokens=num_tokens,
                hit=hit,
                full_tokens=len(prompt) if gate else 0,
            )
        except OutOfPagesError:
            assert dump(self.manager) == before
            assert self.manager.take_misses() == []
            return False
        self._check_miss(run, hit)
        run.processed = hit.num_tokens
        run.scheduled = num_tokens - hit.num_tokens
        for index, pages in enumerate(hit.pages):
            start = 0
            for each in images:
                page_tokens = self.geometry.page_tables[index].tokens_per_page
                end = start + -(-each.num_tokens // page_tokens)
                held = self.manager.page_table(run.request_id, index)
                found = [
                    page > 0 or number in hit.host_pages[index]
                    for number, page in enumerate(pages[start:end], start)
                ]
                kept = [page > 0 for page in held[start:end]]
                # Embeddings are not wanted once read; cross attention wants them to the end.
                is_embedding = isinstance(
                    self.geometry.page_tables[index].layer_type, ImageEmbedding
                )
                consumed = is_embedding and each.end_token <= hit.num_tokens
                if consumed or (any(found) and found == kept and len(found) == end - start):
                    run.images_written.add((index, each.start_token))
                start = end
        self.runs[run.request_id] = run
        self._commit(run)
        return True

    def _check_miss(self, run, hit):
        """Compare the record of an admission with what was cached and lost before it."""
        (miss,) = self.manager.take_misses()
        hashes = run.hashes(HASH_TOKENS)
        assert miss.request == run.request_id
        assert (miss.asked_tokens, miss.found_tokens) == (hit.asked_tokens, hit.num_tokens)
        missing = range(hit.num_tokens, hit.asked_tokens)
        ends = [end for end in missing if hashes[end // HASH_TOKENS] in self.lost_checkpoints]
        end = (ends[-1] // HASH_TOKENS + 1) * HASH_TOKENS if ends else 0
        lost = self.lost_checkpoints.get(hashes[ends[-1] // HASH_TOKENS]) if ends else None
        index = self._guide()
        kinds = {"never": 0, "evicted": 0, "bare": 0, "bare after a loss": 0}
        for token in missing:
            key = self._key_of(index, hashes, token)
            if index is None:
                kind = "evicted" if token < end else "never"
            elif key in self.found[index] or key in self.hosted[index]:
                kind = "bare"
                slots = self.geometry.page_tables[index].tokens_per_page
                page_end = min(hit.asked_tokens, (token // slots + 1) * slots)
                kinds["bare after a loss"] += page_end <= end
            else:
                kind = "evicted" if key in self.ever[index] else "never"
            kinds[kind] += 1
        assert kinds["never"] == miss.never_tokens
        assert kinds["evicted"] == miss.evicted_tokens
        assert kinds["bare"] == miss.bare_tokens
        of_bare = {each.loss: each.bare_tokens for each in miss.losses if each.bare_tokens}
        assert len(of_bare) <= 1
        if len(miss.losses) < MOST_LOSSES:
            assert sum(of_bare.values()) == kinds["bare after a loss"]
            assert sum(each.evicted_tokens for each in miss.losses) == miss.evicted_tokens
        for loss in of_bare:
            assert lost == (loss.cause, loss.left_by, loss.for_request)
        for loss in (each.loss for each in miss.losses if each.loss.cause != LOOSE):
            there = self.losses[loss.taken]
            assert (loss.cause, loss.left_by, loss.for_request) in there

    def _guide(self):
        """The page table whose content is looked at, if any: one that keeps whole prefixes."""
        kinds = [type(table.layer_type) for table in self.geometry.page_tables]
        for wanted in ({FullAttention}, {SlidingWindow, ChunkedLocal}):
            for index, kind in enumerate(kinds):
                if kind in wanted:
                    return index
        return None

    def _key_of(self, index, hashes, token):
        if index is None:
            return None
        slots = self.geometry.page_tables[index].tokens_per_page
        page = token // slots
        if slots < HASH_TOKENS:
            return hashes[token // HASH_TOKENS], page % (HASH_TOKENS // slots)
        last = (page + 1) * slots // HASH_TOKENS - 1
        return hashes[last] if last < len(hashes) else None

    def _commit(self, run):
        num_tokens = run.processed + run.scheduled - run.rejected
        self.manager.commit(run.request_id, run.hashes(HASH_TOKENS), num_tokens)

    def _choose(self, data, runs):
        return self.runs[data.draw(st.sampled_from(sorted(runs)))]

    @precondition(lambda self: any(not run.scheduled for run in self.runs.values()))
    @rule(data=st.data(), chunk=st.sampled_from([1, 2, 4, 4, 8, 13, 24]))
    def schedule(self, data, chunk):
        run = self._choose(data, [r.request_id for r in self.runs.values() if not r.scheduled])
        end = last_end(self.geometry.page_tables, run)
        num_tokens = min(end, run.processed + chunk)
        if num_tokens == run.processed:
            self.manager.free(run.request_id)
            del self.runs[run.request_id]
            return
        self.manager.release_passed(run.request_id, run.processed)
        cached = self._cached_images(run, num_tokens)
        before = dump(self.manager)
        try:
            self.manager.allocate(
                run.request_id, num_tokens=num_tokens, num_processed_tokens=run.processed
            )
        except OutOfPagesError:
            assert dump(self.manager) == before
            return
        run.images_written.update(cached)
        run.scheduled = num_tokens - run.processed
        # The first token of a step is never a draft.
        if run.processed >= run.prompt and run.scheduled <= 1 + self.draft_tokens:
            run.rejected = data.draw(st.integers(0, run.scheduled - 1))
        self._commit(run)

    def _cached_images(self, run, num_tokens):
        """Images that a step begins and for which the encoder need not run."""
        return [
            (index, image.start_token)
            for index, table in enumerate(self.geometry.page_tables)
            if isinstance(table.layer_type, CrossAttention | ImageEmbedding)
            for number, image in enumerate(run.images)
            if image.start_token < num_tokens
            and not self.manager.image_pages(run.request_id, index, number)
            and self.manager.is_image_cached(image)
        ]

    @rule(keep=st.sampled_from([True, True, False]))
    def execute(self, keep):
        self._execute()
        for run in self.runs.values():
            num_tokens = run.processed // HASH_TOKENS * HASH_TOKENS
            # The states after a few tokens are still there, each in its slot.
            was_few = run.processed - run.last_start <= 1 + self.draft_tokens
            is_there = num_tokens == run.processed or (was_few and num_tokens > run.last_start)
            if keep and self.has_states and num_tokens and is_there:
                prefix_hash = run.hashes(HASH_TOKENS)[num_tokens // HASH_TOKENS - 1]
                self.manager.keep_state(run.request_id, prefix_hash, num_tokens)
                self.manager.check()

    def _execute(self):
        self.engine.execute(self.runs.values())
        self.manager.new_step()

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), again=st.booleans())
    def finish_or_preempt(self, data, again):
        self._execute()
        run = self._choose(data, self.runs)
        self.manager.free(run.request_id)
        del self.runs[run.request_id]
        if again:
            self._wait(Run(run.request_id, run.tokens, run.prompt, run.images), first=True)

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.runs)
        if not self.runs:
            self.lost_checkpoints.clear()
            for keys in self.ever:
                keys.clear()

    @invariant()
    def books_balance(self):
        if hasattr(self, "manager"):
            self.manager.check()
            assert_checkpoints_are_whole(self.manager, HASH_TOKENS)

    @invariant()
    def changes_say_what_is_cached(self):
        if not hasattr(self, "manager"):
            return
        for change in self.manager.take_changes():
            found = (self.hosted if change.is_on_host else self.found)[change.table_index]
            assert len(set(change.keys)) == len(change.keys)
            if change.is_found:
                assert found.isdisjoint(change.keys)
                found.update(change.keys)
                self.ever[change.table_index].update(change.keys)
            else:
                assert found.issuperset(change.keys)
                found.difference_update(change.keys)
        caches = [table.cache.keys for table in self.manager._tables]
        assert self.found == [{key for key in keys if key is not None} for keys in caches]
        if self.manager.prefix_cache.host is not None:
            caches = [cache.keys for cache in self.manager.prefix_cache.host._caches]
            assert self.hosted == [{key for key in keys if key is not None} for keys in caches]

    @invariant()
    def every_lost_checkpoint_is_recorded(self):
        if not hasattr(self, "manager"):
            return
        evictions = self.manager.take_evictions()
        self.losses.append({(each.cause, each.left_by, each.for_request) for each in evictions})
        for each in evictions:
            self.lost_checkpoints[each.key] = (each.cause, each.left_by, each.for_request)
        for each in evictions:
            is_cut = each.cause == EvictionCause.END
            assert 0 <= each.kept_tokens <= each.num_tokens - is_cut
            assert (each.worth is not None) == (each.cause in FOR_MEMORY)
            assert each.cause in FOR_MEMORY or not each.for_request
            assert each.kind == Kind.IMAGE or each.left_by
        whole = sum(each.cause == EvictionCause.CHECKPOINT for each in evictions)
        num_evicted = self.manager.prefix_cache.tree.num_evicted
        assert num_evicted - self.num_evicted == whole
        self.num_evicted = num_evicted

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        self._execute()
        for run in self.runs.values():
            self.manager.free(run.request_id)
        for request_id in self.waiting:
            self.manager.withdraw(request_id)
        self.manager.check()
        assert not self.manager.prefix_cache.tree.pool.awaited
        memory = self.manager.memory()
        assert memory.used_bytes == sum(table.useless_bytes for table in memory.tables) == 0
        assert self.manager.reset_prefix_cache()
        self.manager.check()
        memory = self.manager.memory()
        assert memory.empty_large_bytes + memory.null_bytes == memory.arena_bytes


@pytest.mark.parametrize("geometry", CACHED, ids=lambda geometry: geometry.name)
def test_a_hit_holds_exactly_what_was_cached_whatever_requests_do(geometry):
    machine = type("Machine", (CacheMachine,), {"geometry": geometry})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("geometry", CACHED, ids=lambda geometry: geometry.name)
def test_a_hit_holds_exactly_what_was_cached_over_long_runs(geometry):
    machine = type("Machine", (CacheMachine,), {"geometry": geometry})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=400,
            stateful_step_count=150,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

"""Requests in, page tables out: the one place that knows allocator, prefix cache and policies."""

from collections.abc import Sequence

from jenga.admission.allocation import Taking
from jenga.admission.gate import Entry
from jenga.admission.reserve import STEP_TOKENS, Admission, default_left_share
from jenga.admission.wait_queue import Waiting
from jenga.arena.allocator import Allocator
from jenga.checks import check_count, check_multiple
from jenga.errors import OutOfPagesError, PutOffError
from jenga.eviction.known import DEFAULT_POLICY, EVICTION_POLICIES
from jenga.eviction.policy import EvictionPolicy
from jenga.geometry import Geometry, check_geometry
from jenga.policies import RequestFacts
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.checkpoints import ANSWER_TOKENS, Checkpoints
from jenga.prefix.eviction_notices import Evictions
from jenga.prefix.host_cache import HostCache
from jenga.prefix.keeping import Keeping
from jenga.prefix.lookup import longest_prefix
from jenga.prefix.prefetch import STEP_BYTES
from jenga.tables.content_index import CacheChange
from jenga.tables.growth import Growth
from jenga.tables.page_table import build_tables
from jenga.tables.request import PageCopy, PrefixHit, Request, new_facts


class Manager(Keeping):
    """Gives requests their page tables out of one arena."""

    def __init__(  # noqa: PLR0913  one arena, all that may differ between two
        self,
        geometry: Geometry,
        *,
        num_large_pages: int,
        prefix_caching: bool = False,
        hash_tokens: int = 16,
        eviction_policy: EvictionPolicy | None = None,
        answer_interval_tokens: int | None = None,
        left_share: float | None = None,
        step_tokens: float = STEP_TOKENS,
        in_flight_tokens: int = 0,
        ahead_tokens: int = 0,
        records_changes: bool = False,
        num_host_large_pages: int = 0,
        load_at_once_bytes: int = STEP_BYTES,
    ) -> None:
        """An empty arena.

        Args:
            geometry: How the arena is cut.
            num_large_pages: Large pages of the arena, the null page included.
            prefix_caching: Whether pages of finished requests are kept for others.
            hash_tokens: Tokens that each further prefix hash covers.
            eviction_policy: Tells which cached prefix is worth least; by default one that learns
                it (`jenga.eviction.learned`).
            answer_interval_tokens: Distance between states kept within what a request generates,
                each in place of the one before, a multiple of `hash_tokens`; 0 for none, by default
                64 or a little more.
            left_share: Of the arena, how much an admission leaves at most, while others run, to
                cached content if prompts are read again; 0 for nothing, as by default where
                there is host memory, else `LEFT_SHARE`.
            step_tokens: Tokens of a prompt that are computed in the time a step takes to read the
                weights, by which an admission knows what a running request is worth.
            in_flight_tokens: Most tokens of a request that steps in flight compute, by which an
                admission knows what windows will hold: those of a step, for each step that is
                scheduled at a time. 0: as many as the step in which it comes in.
            ahead_tokens: Tokens after a prefix that its cached pages depend on, as where a draft's
                slots are made of the token after theirs: they must be found too, and states are
                kept as much before where they are wanted.
            records_changes: Whether `take_changes` is asked what can be found; it must be asked
                often, since changes are kept until then.
            num_host_large_pages: Large pages of host memory, one that is never used included, where
                what is evicted stays to be found; 0 for none.
            load_at_once_bytes: What an admission may load from there while others run, and wait;
                more is loaded beside their steps before it.

        Raises:
            ValueError: A number is out of its range, page tables do not tile their large page, the
                arena, or host memory, is too small for the null page and one large page per page
                table, pages and prefix hashes do not divide each other, or nothing is cached that
                host memory could be for.
        """
        check_geometry(geometry)
        specs = geometry.page_tables
        check_count("num_large_pages", num_large_pages)
        check_count("hash_tokens", hash_tokens, least=1)
        check_count("ahead_tokens", ahead_tokens)
        check_count("num_host_large_pages", num_host_large_pages)
        check_count("load_at_once_bytes", load_at_once_bytes)
        if num_large_pages < 1 + len(specs):
            msg = (
                f"num_large_pages must be at least {1 + len(specs)}, the null page and one for "
                f"each of {len(specs)} page tables, got {num_large_pages}"
            )
            raise ValueError(msg)
        if answer_interval_tokens is None:
            answer_interval_tokens = -(-ANSWER_TOKENS // hash_tokens) * hash_tokens
        check_multiple(
            "answer_interval_tokens",
            answer_interval_tokens,
            unit_name="hash_tokens",
            unit=hash_tokens,
        )
        allocator = Allocator([spec.small_pages_per_large_page for spec in specs], num_large_pages)
        changes: list[CacheChange] = []
        copies: list[PageCopy] = []
        tables = build_tables(
            geometry,
            allocator,
            hash_tokens=hash_tokens,
            prefix_caching=prefix_caching,
            changes=changes if records_changes else None,
        )
        host: HostCache | None = None
        if num_host_large_pages:
            if not prefix_caching:
                msg = "num_host_large_pages must be 0 where prefix_caching is off"
                raise ValueError(msg)
            host = HostCache(
                tables,
                copies,
                num_large_pages=num_host_large_pages,
                changes=changes if records_changes else None,
            )
        arena_bytes = num_large_pages * geometry.large_page_bytes
        tree = CheckpointTree(
            tables,
            eviction_policy or EVICTION_POLICIES[DEFAULT_POLICY](),
            hash_tokens=hash_tokens,
            ahead_tokens=ahead_tokens,
            arena_bytes=arena_bytes,
            host=host,
        )
        allocator.large_pages.evictor = tree.evict_one
        evictions = Evictions(allocator, tables, host)
        checkpoints = Checkpoints(
            tables,
            allocator,
            tree,
            evictions,
            copies,
            hash_tokens=hash_tokens,
            answer_tokens=answer_interval_tokens,
            ahead_tokens=ahead_tokens,
            host=host,
        )
        super().__init__(
            geometry,
            allocator,
            tables,
            tree=tree,
            checkpoints=checkpoints,
            evictions=evictions,
            host=host,
            load_at_once_bytes=load_at_once_bytes,
            copies=copies,
            changes=changes,
            hash_tokens=hash_tokens,
            prefix_caching=prefix_caching,
        )
        self._ahead_tokens = ahead_tokens
        # Tokens after which some page table may have one more page to commit.
        self._commit_tokens = min(
            table.grain.page_slots if not table.policy.is_overwritten else hash_tokens
            for table in tables
        )
        self._waiting = Waiting(
            tables,
            tree,
            hash_tokens=hash_tokens,
            arena_bytes=arena_bytes,
            is_on=prefix_caching,
        )
        if left_share is None:
            left_share = default_left_share(has_host=host is not None)
        admission = Admission(allocator, left_share, step_tokens)
        self._entry = Entry(self._requests, checkpoints, self._waiting, admission)
        self._growth = Growth(tables, self.capacity)
        self._taking = Taking(
            allocator,
            self._growth,
            self._hits,
            checkpoints,
            self._evictions,
            in_flight_tokens=in_flight_tokens,
            host=host,
            loading=self._loading,
        )
        self._nothing = self._taking.nothing
        self._num_owners = 0

    def new_step(self) -> None:
        """Note that a step of the engine begins: what it touches is younger than all before."""
        self._step += 1
        self._checkpoints.begin_step()
        self._waiting.begin_step(self._step)
        self._entry.begin_step()
        if self._loading is not None:
            self._loading.begin_step()

    # The life of a request

    def announce(
        self,
        request_id: str,
        prefix_hashes: Sequence[bytes],
        *,
        num_tokens: int,
        facts: RequestFacts | None = None,
        first: bool = False,
    ) -> None:
        """Note that a request waits, so that what it will read is kept if anything is.

        Nothing depends on it but which pages are evicted, and where states are kept. A request is
        announced once, in the order of the queue; it leaves it by being admitted, or `withdraw`.

        Args:
            request_id: Who waits.
            prefix_hashes: Hash i is of the request's first `(i + 1) * hash_tokens` tokens.
            num_tokens: Its tokens.
            facts: Of the request; by default that they are its prompt.
            first: Whether it waits at the head of the queue, as after a preemption.

        Raises:
            ValueError: It was announced before, or runs, `num_tokens` is not a positive integer, or
                a layer type cannot serve its images.
        """
        if request_id in self._requests:
            msg = f"request_id must not name a running request, got {request_id!r}"
            raise ValueError(msg)
        check_count("num_tokens", num_tokens, least=1)
        facts = self._served(facts, num_tokens)
        self._waiting.announce(request_id, prefix_hashes, num_tokens, facts, first=first)

    def _served(self, facts: RequestFacts | None, prompt_tokens: int) -> RequestFacts:
        """The facts given, or those of a prompt of text alone.

        Raises:
            ValueError: A layer type cannot serve the images.
        """
        if facts is None:
            return RequestFacts(prompt_tokens=prompt_tokens)
        if facts.images:
            for table in self._tables:
                table.policy.check_facts(facts)
        return facts

    def starts_over(self, request_id: str) -> bool:
        """Whether a request is to come in without a hit, since it would not fit with one.

        It was refused while it had the arena to itself, where nothing changes by waiting. Admitted
        without a hit it opens no large page that it can do without, so that what `can_ever_fit`
        says of it holds.
        """
        return not self._requests and self._entry.was_refused_alone(request_id)

    def withdraw(self, request_id: str) -> None:
        """Note that a request waits no longer and was not admitted, if it was announced."""
        if request_id not in self._requests:
            self._waiting.forget(request_id)

    def lookup(
        self,
        prefix_hashes: Sequence[bytes],
        *,
        max_tokens: int,
        facts: RequestFacts | None = None,
    ) -> PrefixHit:
        """The longest cached prefix that every page table can go on from; changes nothing.

        Args:
            prefix_hashes: Hash i is of the request's first `(i + 1) * hash_tokens` tokens.
            max_tokens: The answer is no longer.
            facts: Of the request; by default that its prompt has one token more.

        Raises:
            ValueError: `max_tokens` is no integer of at least 0, or a layer type cannot serve the
                images.
        """
        check_count("max_tokens", max_tokens)
        return longest_prefix(
            self._tables,
            prefix_hashes if self._prefix_caching else (),
            self._served(facts, max_tokens + 1),
            max_tokens=max_tokens,
            ahead_tokens=self._ahead_tokens,
            host=self._host,
            version=self._version,
        )

    def allocate(  # noqa: PLR0913  one question of the engine, all facts of one step
        self,
        request_id: str,
        *,
        num_tokens: int,
        num_processed_tokens: int = 0,
        hit: PrefixHit | None = None,
        facts: RequestFacts | None = None,
        full_tokens: int = 0,
        reserve_large_pages: int = 0,
    ) -> tuple[list[int], ...]:
        """Give a request slots for its first `num_tokens` tokens; the first call admits it.

        Pages that no token from `num_processed_tokens` on reads are given up first, even if the
        request is then refused. Tokens may be rejected: a request that asks for slots of fewer
        tokens than it has keeps those it has.

        Args:
            request_id: Who asks.
            num_tokens: Tokens to have slots for, those already there included.
            num_processed_tokens: Tokens whose step is over; they never become fewer.
            hit: At admission, the prefix to start from; its tokens count as processed.
            facts: At admission, of the request; by default those of the hit, or that its prompt
                has `full_tokens` or `num_tokens` tokens, whichever are more.
            full_tokens: If positive, refuse unless so many tokens could be held now, in steps of
                `in_flight_tokens` or as large as this one, beside all that other requests will take
                for their prompts. Where further steps are needed, others must be able to grow too.
            reserve_large_pages: Large pages that must stay empty or reclaimable.

        Returns:
            Page ids appended to each page table; at admission with a hit, those not of the hit.
            Not to be written.

        Raises:
            OutOfPagesError: They cannot be had, or an admission should leave them to others;
                nothing else was changed. `TooEarlyError` if a step later there is more to hit,
                `NotLoadedError` if what is hit should be loaded before.
            ValueError: An argument contradicts the others or what is known of the request.
        """
        try:
            request = self._requests[request_id]
        except KeyError:
            request = None
        if (
            request is not None
            # Most steps do little else, so this is `_check_step` in the cheapest words.
            and type(num_tokens) is int
            and type(num_processed_tokens) is int
            and num_processed_tokens >= request.num_processed_tokens
            and num_processed_tokens <= num_tokens
            and num_processed_tokens <= request.num_tokens
            and hit is None
            and not full_tokens
            and not reserve_large_pages
        ):
            if num_tokens < request.grows_at and num_processed_tokens < request.shrinks_at:
                if num_tokens > request.num_tokens:  # noqa: PLR1730  a call takes longer
                    request.num_tokens = num_tokens
                request.num_processed_tokens = num_processed_tokens
                request.step = self._step
                return self._nothing
        else:
            self._check_step(
                request_id,
                request,
                num_tokens=num_tokens,
                num_processed_tokens=num_processed_tokens,
                hit=hit,
                full_tokens=full_tokens,
                reserve_large_pages=reserve_large_pages,
            )
        if request is None:
            return self._admit(request_id, num_tokens, hit, facts, full_tokens, reserve_large_pages)
        if num_tokens < request.num_tokens:  # noqa: PLR1730  as above
            num_tokens = request.num_tokens
        if num_processed_tokens >= request.shrinks_at:
            self._growth.give_up(request, num_processed_tokens)
        request.num_processed_tokens = num_processed_tokens
        taken: Sequence[list[int]] = self._nothing
        if full_tokens or num_tokens >= request.grows_at:
            try:
                taken = self._taking.take(
                    request_id,
                    request,
                    num_tokens,
                    full_tokens=full_tokens,
                    reserve_large_pages=reserve_large_pages,
                )
            except OutOfPagesError:
                self._entry.note_refusal(request_id)
                raise
        request.num_tokens = num_tokens
        request.step = self._step
        return tuple(taken)

    def _admit(
        self,
        request_id: str,
        num_tokens: int,
        hit: PrefixHit | None,
        facts: RequestFacts | None,
        full_tokens: int,
        reserve_large_pages: int,
    ) -> tuple[list[int], ...]:
        """As `allocate` for a request that does not run; its arguments are checked."""
        facts = new_facts(hit, facts, prompt_tokens=max(full_tokens, num_tokens))
        request = Request(self._served(facts, 0), len(self._tables))
        request.owner = self._num_owners + 1
        found = None
        if hit is not None:
            self._entry.check_time(request_id, hit, self._step)
            found = self._hits.start_from(request, hit, num_tokens)
        if full_tokens > num_tokens and self._requests:
            # While its prompt is read, others go on.
            reserve_large_pages = max(reserve_large_pages, self.growth_large_pages)
        reserve_large_pages += self._entry.reserve(found, self._step)
        request.is_packed = self._entry.was_refused_alone(request_id)
        self._growth.give_up(request, request.hit_tokens)
        try:
            taken = self._taking.take(
                request_id,
                request,
                num_tokens,
                full_tokens=full_tokens,
                reserve_large_pages=reserve_large_pages,
                hit=hit,
                found=found,
            )
        except PutOffError:
            raise
        except OutOfPagesError:
            self._entry.note_refusal(request_id)
            raise
        request.num_tokens = num_tokens
        request.step = self._step
        self._num_owners = request.owner
        self._requests[request_id] = request
        if self._prefix_caching and hit is not None:
            self._checkpoints.admit(request, hit)
        self._entry.complete(request_id, hit)
        return tuple(taken)

    def _check_step(  # noqa: PLR0913  as `allocate`
        self,
        request_id: str,
        request: Request | None,
        *,
        num_tokens: int,
        num_processed_tokens: int,
        hit: PrefixHit | None,
        full_tokens: int,
        reserve_large_pages: int,
    ) -> None:
        """Refuse what `allocate` says that it refuses, before anything is changed."""
        check_count("num_tokens", num_tokens, least=int(request is None))
        check_count("num_processed_tokens", num_processed_tokens)
        check_count("full_tokens", full_tokens)
        check_count("reserve_large_pages", reserve_large_pages)
        if num_processed_tokens > num_tokens:
            msg = (
                f"num_tokens must be no less than num_processed_tokens, got {num_tokens} and "
                f"{num_processed_tokens}"
            )
            raise ValueError(msg)
        if request is not None:
            if hit is not None:
                msg = f"hit must be None for request {request_id!r}, which is running"
                raise ValueError(msg)
            self._check_processed(request_id, request, num_processed_tokens)
            return
        start_tokens = 0
        if hit is not None:
            self._check_hit(hit)
            start_tokens = hit.num_tokens
        if num_processed_tokens not in (0, start_tokens) or num_tokens <= start_tokens:
            msg = (
                f"num_processed_tokens must be 0 or the {start_tokens} tokens of the hit, and "
                f"num_tokens more than those, got {num_processed_tokens} and {num_tokens}"
            )
            raise ValueError(msg)

    def _check_hit(self, hit: PrefixHit) -> None:
        if hit.version[0] is not self._cache_owner:
            msg = "hit must have been looked up in this manager, got one of another"
            raise ValueError(msg)
        if hit.version != self._version:
            again = self.lookup(hit.prefix_hashes, max_tokens=hit.asked_tokens, facts=hit.facts)
            if again.num_tokens != hit.num_tokens or again.pages != hit.pages:
                msg = (
                    f"hit must be looked up again: of its {hit.num_tokens} tokens "
                    f"{again.num_tokens} are still cached, or in other pages"
                )
                raise ValueError(msg)

    @staticmethod
    def _check_processed(request_id: str, request: Request, num_processed_tokens: int) -> None:
        """Refuse processed tokens that a running request cannot have."""
        least_tokens, most_tokens = request.num_processed_tokens, request.num_tokens
        if not least_tokens <= num_processed_tokens <= most_tokens:
            msg = (
                f"num_processed_tokens must be within the {most_tokens} tokens that request "
                f"{request_id!r} has slots for, and not fall below the {least_tokens} given "
                f"before, got {num_processed_tokens}"
            )
            raise ValueError(msg)

    def release_passed(self, request_id: str, num_processed_tokens: int) -> None:
        """Give up the pages that no token from `num_processed_tokens` on reads.

        Raises:
            ValueError: The request is not running, has slots for fewer tokens, or more of its
                tokens were said to be processed before.
        """
        request = self._running(request_id)
        check_count("num_processed_tokens", num_processed_tokens)
        self._check_processed(request_id, request, num_processed_tokens)
        if num_processed_tokens >= request.shrinks_at:
            self._growth.give_up(request, num_processed_tokens)
        request.num_processed_tokens = num_processed_tokens

    def commit(self, request_id: str, prefix_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let others find the full pages of a request's first tokens.

        The first call for a request that came in without a hit also plans its checkpoints: before
        its first step, with no tokens, it leaves those of that step too.

        Args:
            request_id: Whose pages.
            prefix_hashes: Hash i is of the request's first `(i + 1) * hash_tokens` tokens.
            num_tokens: Tokens whose content is final, at the latest when the next step reads it.

        Raises:
            ValueError: The request is not running, or has slots for fewer tokens.
        """
        try:
            request = self._requests[request_id]
        except KeyError:
            request = self._running(request_id)
        if type(num_tokens) is int and 0 <= num_tokens < request.commits_at:
            return
        if type(num_tokens) is not int or not 0 <= num_tokens <= request.num_tokens:
            check_count("num_tokens", num_tokens)
            msg = (
                f"num_tokens must be at most the {request.num_tokens} that request {request_id!r} "
                f"has slots for, got {num_tokens}"
            )
            raise ValueError(msg)
        if not self._prefix_caching:
            return
        hashed_tokens = len(prefix_hashes) * self._hash_tokens
        if request.stand is None:
            # It came in without a look at the cache.
            asked_tokens = min(hashed_tokens, request.facts.prompt_tokens - 1)
            self._checkpoints.begin(request, prefix_hashes, asked_tokens=asked_tokens)
        if not num_tokens:
            return
        if hashed_tokens > num_tokens:  # noqa: PLR1730  a call takes longer
            hashed_tokens = num_tokens
        request.commits_at = (hashed_tokens // self._commit_tokens + 1) * self._commit_tokens
        request.committed_tokens = max(request.committed_tokens, hashed_tokens)
        request.prefix_hashes = prefix_hashes
        # Images have names of their own: they are found however few tokens are hashed.
        facts, committed = request.facts, request.committed
        for index, table in enumerate(self._tables):
            end = table.policy.final_pages(facts, num_tokens, table.grain)
            start = committed[index]
            if end > start:
                if table.enter(request, prefix_hashes, end):
                    self._num_losses += 1
                if table.policy.names_images:
                    self._checkpoints.enter_images(request, table, start)
        if request.pending or self._checkpoints.has_to_pass(request):
            branches = self._waiting.branch_tokens(request_id)
            self._checkpoints.pass_by(request, request.committed_tokens, branches)

    def free(self, request_id: str) -> None:
        """End a request: it finished, was aborted or is preempted."""
        request = self._running(request_id)
        if self._prefix_caching:
            self._checkpoints.end(request, self._waiting.branch_tokens(request_id))
        for table in self._tables:
            table.end(request)
        self._taking.forget(request_id)
        self._allocator.disown(request.owner)
        del self._requests[request_id]
        self._waiting.forget(request_id)

    def checkpoint_tokens(self, request_id: str) -> tuple[int, ...]:
        """Where states of a prompt are worth keeping: steps end there, or write them on their way.

        A prompt has one at its end, so that it can be asked again or continued. It has one some
        hundred tokens before that, since the next prompt may end with another question. It has
        one wherever it leaves what others have computed, or will: a third request may leave it
        there too. States of what is generated then are kept every `answer_interval_tokens`.
        """
        request = self._running(request_id)
        if not self._prefix_caching:
            return ()
        return tuple(self._entry.checkpoint_tokens(request_id, request))

    def check(self) -> None:
        """Raise `InvariantError` unless the books of requests, allocator, cache and queue agree."""
        super().check()
        self._taking.check(self._requests)
        if self._prefix_caching:
            self._tree.check()
        self._waiting.check()

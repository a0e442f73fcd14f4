"""The manager: requests come in, page tables go out.

It is the only module that knows the allocator, the prefix cache and the policies at once.
"""

from collections.abc import Sequence

from jenga.admission.allocation import PageAllocation
from jenga.admission.gate import AdmissionGate
from jenga.admission.reserve import STEP_TOKENS, CacheReserve, default_left_share
from jenga.admission.wait_queue import WaitQueue
from jenga.arena.allocator import Allocator
from jenga.arena.borrowed_pages import BorrowedPages, Lender
from jenga.checks import check_count, check_multiple
from jenga.errors import OutOfPagesError, PutOffError
from jenga.eviction.known import DEFAULT_POLICY, EVICTION_POLICIES
from jenga.eviction.policy import EvictionPolicy
from jenga.geometry import Geometry, check_geometry
from jenga.page_ids import LargePageId, OwnerId, SmallPageId
from jenga.policies import NEVER, Image, RequestFacts
from jenga.policies.image_slots import ImageSlots
from jenga.prefix.checkpoints import ANSWER_TOKENS
from jenga.prefix.eviction_log import Eviction
from jenga.prefix.host_cache import HostReport
from jenga.prefix.miss_log import Miss
from jenga.prefix.prefetch import STEP_BYTES
from jenga.prefix.prefix_cache import PrefixCache
from jenga.prefix.running_images import RunningImages
from jenga.tables.capacity import Capacity
from jenga.tables.content_index import CacheChange, ChangeLog
from jenga.tables.growth import Growth
from jenga.tables.occupancy import Occupancy
from jenga.tables.page_table import Table, build_tables
from jenga.tables.point_parts import checkpoint_unit
from jenga.tables.request import PageCopy, PrefixHit, Request, new_facts
from jenga.tables.stats import CacheReport, LargePageCounts, MemoryReport


class Manager:
    """Gives running requests their page tables out of one arena.

    Attributes:
        geometry: Sizes of large and small pages, and the page tables.
        capacity: Computes the largest requests that the arena can hold.
        occupancy: Answers questions about the memory that running requests hold.
        prefix_cache: Content that is cached for other requests.
        borrowed: The large pages of an arena that several engines share. None if all large pages
            are this engine's own.
    """

    def __init__(  # noqa: PLR0913  all options of an arena
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
        lender: Lender | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        """Create the manager of an empty arena.

        Args:
            geometry: Sizes of large and small pages, and the page tables.
            num_large_pages: Number of large pages of the arena, including the null page.
            prefix_caching: Whether pages of finished requests stay cached for other requests.
            hash_tokens: Number of tokens that each further prefix hash covers.
            eviction_policy: Rule that says which cached prefix is worth least. By default, a policy
                that learns this (`jenga.eviction.learned`).
            answer_interval_tokens: Distance in tokens between states that are kept within the
                output of a request, a multiple of `hash_tokens` and of every page table's tokens
                per page. Each state replaces the one before it. 0 keeps none. By default, 64
                rounded up to such a multiple.
            left_share: Largest share of the arena, from 0 to below 1, that an admission leaves to
                cached content while other requests run. Less is left if prompts are seldom read
                again. By default, 0 with host memory, else `LEFT_SHARE`.
            step_tokens: Number of prompt tokens whose computation takes as long as a step takes to
                read the weights. An admission uses it to weigh what a running request is worth.
            in_flight_tokens: Most tokens of one request that all steps in flight compute together:
                the tokens of a step, times the steps that are scheduled at a time. An admission
                uses it to know what windows will hold. 0 means the tokens of the step that admits
                the request.
            ahead_tokens: Number of tokens after a prefix that its cached pages depend on. For
                example, the slots of a draft layer are computed from the following token. A hit
                must find these tokens as well, and states are kept as many tokens before the point
                where they are wanted.
            records_changes: Whether cache changes are recorded for `take_changes`. Call it often
                then, since changes are kept until that call.
            num_host_large_pages: Number of large pages of host memory, including one that is never
                used. Evicted content can still be found there. 0 means no host memory.
            load_at_once_bytes: Most bytes that an admission may load from host memory while other
                requests run and wait for it. Larger loads are copied during earlier steps, before
                the admission.
            lender: Lends large pages of an arena that several engines share. None means that all
                large pages are this engine's own.
            steps_in_flight: With a lender, the most steps that are scheduled and not processed
                while the next one is scheduled, including that one.

        Raises:
            ValueError: One of these holds:
                - A number is out of its range.
                - Page tables do not tile their large page.
                - The arena, or host memory, is smaller than the null page and one large page for
                  each page table.
                - Neither of page size and `hash_tokens` divides the other.
                - Host memory is given, but prefix caching is off or there is a lender.
                - The lender's arena has another number of large pages, or guarantees too few.
        """
        check_geometry(geometry)
        specs = geometry.page_tables
        check_count("num_large_pages", num_large_pages)
        check_count("hash_tokens", hash_tokens, least=1)
        check_count("ahead_tokens", ahead_tokens)
        check_count("num_host_large_pages", num_host_large_pages)
        check_count("load_at_once_bytes", load_at_once_bytes)
        check_count("steps_in_flight", steps_in_flight, least=1)
        owned = None if lender is None else _first_pages(lender, num_large_pages, len(specs))
        if num_large_pages < 1 + len(specs):
            msg = (
                f"num_large_pages must be at least {1 + len(specs)}, the null page and one for "
                f"each of {len(specs)} page tables, got {num_large_pages}"
            )
            raise ValueError(msg)
        if lender is not None and num_host_large_pages:
            msg = "num_host_large_pages must be 0 in an arena that engines share"
            raise ValueError(msg)
        counts = [spec.small_pages_per_large_page for spec in specs]
        allocator = Allocator(counts, num_large_pages, owned)
        self._changes = ChangeLog() if records_changes else None
        tables = build_tables(
            geometry,
            allocator,
            hash_tokens=hash_tokens,
            prefix_caching=prefix_caching,
            changes=self._changes,
        )
        unit = checkpoint_unit(tables, hash_tokens)
        if answer_interval_tokens is None:
            answer_interval_tokens = -(-ANSWER_TOKENS // unit) * unit
        check_multiple(
            "answer_interval_tokens",
            answer_interval_tokens,
            unit_name="hash_tokens and of whole pages",
            unit=unit,
        )
        self.geometry = geometry
        num_certain = allocator.large_pages.num_certain
        self.capacity = Capacity(geometry, [table.policy for table in tables], num_certain + 1)
        self._allocator = allocator
        self._tables = tables
        self._requests: dict[str, Request] = {}
        self._step = 0
        self.occupancy = Occupancy(geometry, allocator, tables, self._requests)
        self.prefix_cache = PrefixCache(
            geometry,
            allocator,
            tables,
            self._requests,
            is_on=prefix_caching,
            eviction_policy=eviction_policy or EVICTION_POLICIES[DEFAULT_POLICY](),
            hash_tokens=hash_tokens,
            ahead_tokens=ahead_tokens,
            answer_tokens=answer_interval_tokens,
            num_host_large_pages=num_host_large_pages,
            load_at_once_bytes=load_at_once_bytes,
            changes=self._changes,
        )
        self._prefix_caching = prefix_caching
        self._hash_tokens = hash_tokens
        self._checkpoints = self.prefix_cache.checkpoints
        # Tokens after which some page table may have one more page to commit.
        self._commit_tokens = min(
            table.grain.page_slots if not table.policy.is_overwritten else hash_tokens
            for table in tables
        )
        self._wait_queue = WaitQueue(
            tables,
            self.prefix_cache.tree,
            hash_tokens=hash_tokens,
            arena_bytes=num_large_pages * geometry.large_page_bytes,
            is_on=prefix_caching,
        )
        if left_share is None:
            left_share = default_left_share(has_host=num_host_large_pages > 0)
        reserve = CacheReserve(allocator, left_share, step_tokens)
        self._gate = AdmissionGate(self._requests, self._checkpoints, self._wait_queue, reserve)
        self._growth = Growth(tables, self.capacity)
        self._images = RunningImages(
            tables, self.prefix_cache.tree, self._growth, self.prefix_cache.host
        )
        self._allocation = PageAllocation(
            allocator, self._growth, self.prefix_cache, in_flight_tokens=in_flight_tokens
        )
        self._no_pages = self._allocation.no_pages
        self._num_owners = 0
        self.borrowed: BorrowedPages | None = None
        if lender is not None:
            self.borrowed = self._allocation.borrowed = BorrowedPages(
                allocator.large_pages,
                lender,
                tables[0].clock,
                steps_in_flight=steps_in_flight,
                next_checkpoint_rank=self.prefix_cache.tree.pool.next_rank,
                on_evicted=self.prefix_cache.eviction_notices.deliver,
                is_quiet=lambda: self.prefix_cache.copies.is_empty,
            )

    def new_step(self) -> None:
        """Record that the engine begins a step.

        Pages that this step touches are younger than all pages touched before.
        """
        self._step += 1
        self.prefix_cache.begin_step()
        self._wait_queue.begin_step(self._step)
        self._gate.begin_step()
        if self.borrowed is not None:
            self.borrowed.begin_step()

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
        """Record that a request waits, so that the cached pages it will read are evicted last.

        Announcing affects only which pages are evicted, and where states are kept. Announce each
        request once, in the order of the wait queue. It leaves the queue when it is admitted or
        withdrawn (`withdraw`).

        Args:
            request_id: The waiting request.
            prefix_hashes: Hash i covers the request's first `(i + 1) * hash_tokens` tokens.
            num_tokens: Number of tokens of the request.
            facts: Facts of the request. By default, its prompt has `num_tokens` tokens and no
                images.
            first: Whether the request waits at the head of the queue, as after a preemption.

        Raises:
            ValueError: The request was announced before or is running, `num_tokens` is not a
                positive integer, or a layer type cannot serve its images.
        """
        if request_id in self._requests:
            msg = f"request_id must not name a running request, got {request_id!r}"
            raise ValueError(msg)
        check_count("num_tokens", num_tokens, least=1)
        facts = self._served(facts, num_tokens)
        self._wait_queue.announce(request_id, prefix_hashes, num_tokens, facts, first=first)

    def _served(self, facts: RequestFacts | None, prompt_tokens: int) -> RequestFacts:
        """Return the given facts, or by default those of a prompt of text alone.

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
        """Whether to admit a request without a hit, because it would not fit with one.

        This is so if it was refused while it had the arena to itself, where waiting changes
        nothing. If admitted without a hit, it opens no large page that it can do without. The
        answer of `can_ever_fit` then holds for it.
        """
        return not self._requests and self._gate.was_refused_alone(request_id)

    def was_refused(self, request_id: str) -> bool:
        """Whether there were not enough pages for a request, and no request has ended since.

        Only the last request that was refused is remembered.
        """
        return self._gate.was_refused(request_id)

    def rest_tokens(
        self,
        request_id: str,
        prefix_hashes: Sequence[bytes],
        *,
        num_tokens: int,
        facts: RequestFacts | None = None,
    ) -> int | None:
        """Return how many tokens a waiting request would compute if it were admitted now.

        Nothing is changed. See `jenga.admission.short_requests`.

        Args:
            request_id: The waiting request.
            prefix_hashes: Hash i covers the request's first `(i + 1) * hash_tokens` tokens.
            num_tokens: Number of tokens of the request.
            facts: Facts of the request. By default, its prompt has `num_tokens` tokens.

        Returns:
            The number of tokens. None if there were not enough pages for it (`was_refused`).

        Raises:
            ValueError: `num_tokens` is not a positive integer, or a layer type cannot serve the
                images.
        """
        check_count("num_tokens", num_tokens, least=1)
        if self._gate.was_refused(request_id):
            return None
        if self.starts_over(request_id):
            return num_tokens
        return (
            num_tokens
            - self.lookup(prefix_hashes, max_tokens=num_tokens - 1, facts=facts).num_tokens
        )

    def withdraw(self, request_id: str) -> None:
        """Remove a request from the wait queue, if it is there. A running request is left alone."""
        if request_id not in self._requests:
            self._wait_queue.drop_request(request_id)

    def lookup(
        self,
        prefix_hashes: Sequence[bytes],
        *,
        max_tokens: int,
        facts: RequestFacts | None = None,
    ) -> PrefixHit:
        """Find the longest cached prefix from which every page table can go on. Nothing is changed.

        Args:
            prefix_hashes: Hash i covers the request's first `(i + 1) * hash_tokens` tokens.
            max_tokens: Upper limit of the prefix, in tokens.
            facts: Facts of the request. By default, its prompt has `max_tokens + 1` tokens.

        Raises:
            ValueError: `max_tokens` is not an integer of at least 0, or a layer type cannot serve
                the images.
        """
        check_count("max_tokens", max_tokens)
        return self.prefix_cache.find_prefix(
            prefix_hashes, self._served(facts, max_tokens + 1), max_tokens=max_tokens
        )

    def allocate(  # noqa: PLR0913  one call of the engine with all facts of a step
        self,
        request_id: str,
        *,
        num_tokens: int,
        num_processed_tokens: int = 0,
        hit: PrefixHit | None = None,
        facts: RequestFacts | None = None,
        full_tokens: int = 0,
        reserve_large_pages: int = 0,
    ) -> tuple[list[SmallPageId], ...]:
        """Give a request slots for its first `num_tokens` tokens. The first call admits it.

        Pages that no token from `num_processed_tokens` on reads are given up first, even if the
        request is then refused. Drafted tokens may be rejected. A request that asks for slots of
        fewer tokens than it has therefore keeps its slots.

        Args:
            request_id: The request.
            num_tokens: Number of tokens to have slots for, including those that have slots already.
            num_processed_tokens: Number of tokens whose step is over. It never decreases.
            hit: At admission, the prefix to start from. Its tokens count as processed.
            facts: At admission, the facts of the request. By default, those of the hit. Without a
                hit, the prompt has the larger of `full_tokens` and `num_tokens` tokens.
            full_tokens: If positive, refuse unless this many tokens could be held now, together
                with the pages that all other requests will take for their prompts. Tokens come in
                steps of `in_flight_tokens`, or of this step's size if that is larger. If the
                request needs further steps, the others must be able to grow too.
            reserve_large_pages: Number of large pages that must stay empty or reclaimable.

        Returns:
            Page ids appended to each page table, without those of the hit. The lists must not be
            changed.

        Raises:
            OutOfPagesError: There are not enough pages, or the admission should leave them to
                others. Nothing else was changed. It is `TooEarlyError` if a longer prefix can be
                hit a step later, and `NotLoadedError` if pages of the hit should be loaded first.
            ValueError: An argument contradicts the others or what is known of the request.
        """
        try:
            request = self._requests[request_id]
        except KeyError:
            request = None
        if (
            request is not None
            # Most steps end here, so these are the checks of `_check_step` in their fastest form.
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
                request.last_step = self._step
                return self._no_pages
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
        request.num_processed_tokens = num_processed_tokens
        if num_processed_tokens >= request.shrinks_at:
            self._growth.give_up(request)
        taken: Sequence[list[SmallPageId]] = self._no_pages
        if full_tokens or num_tokens >= request.grows_at:
            images = self._images.find(request, num_tokens) if request.facts.images else ()
            try:
                if images:
                    sharings = self._images.sharings(images, len(self._tables))
                    self._allocation.require_beside(request_id, request, num_tokens, sharings)
                    self._images.share(images)
                taken = self._allocation.allocate_pages(
                    request_id,
                    request,
                    num_tokens,
                    full_tokens=full_tokens,
                    reserve_large_pages=reserve_large_pages,
                )
            except OutOfPagesError:
                self._images.undo(request, images)
                self._gate.record_refusal(request_id)
                raise
            if images:
                self._images.read(request, images)
                self._images.load(request, images)
            taken = self._images.appended(request, images, taken)
        request.num_tokens = num_tokens
        request.last_step = self._step
        return tuple(taken)

    def _admit(
        self,
        request_id: str,
        num_tokens: int,
        hit: PrefixHit | None,
        facts: RequestFacts | None,
        full_tokens: int,
        reserve_large_pages: int,
    ) -> tuple[list[SmallPageId], ...]:
        """Do the work of `allocate` for a request that is not running, with checked arguments."""
        facts = new_facts(hit, facts, prompt_tokens=max(full_tokens, num_tokens))
        facts = self._served(facts, 0)
        start = None
        if hit is not None:
            self._gate.refuse_if_early(request_id, hit, self._step)
            start = self.prefix_cache.hits.prepare_start(hit, facts, num_tokens)
        request = Request(
            request_id,
            OwnerId(self._num_owners + 1),
            facts,
            len(self._tables),
            start=start,
            is_packed=self._gate.was_refused_alone(request_id),
        )
        if full_tokens > num_tokens and self._requests:
            # Other requests grow while this prompt is computed.
            reserve_large_pages = max(reserve_large_pages, self.occupancy.growth_large_pages)
        reserve_large_pages += self._gate.reserved_large_pages(request_id, start, self._step)
        self._growth.give_up(request)
        try:
            taken = self._allocation.allocate_pages(
                request_id,
                request,
                num_tokens,
                full_tokens=full_tokens,
                reserve_large_pages=reserve_large_pages,
                start=start,
            )
        except PutOffError:
            raise
        except OutOfPagesError:
            self._gate.record_refusal(request_id)
            raise
        request.num_tokens = num_tokens
        request.last_step = self._step
        self._num_owners = request.owner
        self._requests[request_id] = request
        if self._prefix_caching and hit is not None:
            request.prefix_hashes = hit.prefix_hashes
            if facts.images:
                self._images.record_hit(request, hit)
            self._checkpoints.admit_request(request, hit)
        self._gate.record_admission(request_id, hit, start)
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
        """Raise the `ValueError` of `allocate` for bad arguments, before anything is changed."""
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
            self.prefix_cache.check_hit(hit)
            start_tokens = hit.num_tokens
        if num_processed_tokens not in (0, start_tokens) or num_tokens <= start_tokens:
            msg = (
                f"num_processed_tokens must be 0 or the {start_tokens} tokens of the hit, and "
                f"num_tokens more than those, got {num_processed_tokens} and {num_tokens}"
            )
            raise ValueError(msg)

    @staticmethod
    def _check_processed(request_id: str, request: Request, num_processed_tokens: int) -> None:
        """Refuse a number of processed tokens that a running request cannot have."""
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
            ValueError: The request is not running, has slots for fewer tokens, or was given a
                larger number of processed tokens before.
        """
        request = self._running(request_id)
        check_count("num_processed_tokens", num_processed_tokens)
        self._check_processed(request_id, request, num_processed_tokens)
        request.num_processed_tokens = num_processed_tokens
        if num_processed_tokens >= request.shrinks_at:
            self._growth.give_up(request)

    def commit(self, request_id: str, prefix_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the full pages of a request's first tokens available to other requests.

        The first call for a request that was admitted without a hit also plans its checkpoints.
        Make that call with 0 tokens before the first step, so that checkpoints within that step are
        planned too.

        Args:
            request_id: The request that has the pages.
            prefix_hashes: Hash i covers the request's first `(i + 1) * hash_tokens` tokens.
            num_tokens: Number of tokens whose content is final, at the latest when the next step
                reads it.

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
        if request.checkpoints.last_checkpoint is None:
            # The request was admitted without a lookup.
            asked_tokens = min(hashed_tokens, request.facts.prompt_tokens - 1)
            request.prefix_hashes = prefix_hashes
            self._checkpoints.plan_checkpoints(request, asked_tokens=asked_tokens)
        if not num_tokens:
            return
        if hashed_tokens > num_tokens:  # noqa: PLR1730  a call takes longer
            hashed_tokens = num_tokens
        request.commits_at = min(
            (hashed_tokens // self._commit_tokens + 1) * self._commit_tokens,
            _next_image(request.facts, num_tokens) + 1,
        )
        request.committed_tokens = max(request.committed_tokens, hashed_tokens)
        request.prefix_hashes = prefix_hashes
        self.prefix_cache.index_pages(request, prefix_hashes, num_tokens)
        if request.checkpoints.pending or self._checkpoints.may_pass_more(request):
            branches = self._wait_queue.branch_tokens(request_id)
            self._checkpoints.make_passed(request, request.committed_tokens, branches)

    def free(self, request_id: str) -> None:
        """End a request that finished, was aborted or is preempted."""
        request = self._running(request_id)
        if self._prefix_caching:
            self._checkpoints.end_request(request, self._wait_queue.branch_tokens(request_id))
        for table in self._tables:
            table.release_request(request)
        self._allocation.forget_promise(request_id)
        self._allocator.release_claim(request.owner)
        del self._requests[request_id]
        self._wait_queue.drop_request(request_id)
        self._gate.record_end()

    def checkpoint_tokens(self, request_id: str) -> tuple[int, ...]:
        """Return token counts at which this prompt's states are worth keeping.

        Steps end there, or write the states on their way. A prompt has such points in three places:

        - At its end, because it may be sent again or continued.
        - Some hundred tokens before its end, because the next prompt may end with another question.
        - At the points where its text parts from texts that others have computed or will compute. A
          third request may part there too.

        States of the generated output are then kept every `answer_interval_tokens`.
        """
        request = self._running(request_id)
        if not self._prefix_caching:
            return ()
        return tuple(self._gate.checkpoint_tokens(request_id, request))

    def _running(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            msg = f"request_id must name a running request, got {request_id!r}"
            raise ValueError(msg)
        return request

    # States that are kept for other requests

    @property
    def answer_interval_tokens(self) -> int:
        """Tokens of an answer after which its states are worth keeping again. 0 means never."""
        return self.prefix_cache.answer_interval_tokens

    def keep_state(
        self, request_id: str, prefix_hash: bytes, num_tokens: int, *, in_passing: bool = False
    ) -> bool:
        """Keep a copy of a request's running states for other requests to start from.

        A state of the request's output replaces the state of its output before.

        Args:
            request_id: The request that has the states. One of these must hold:
                - Its last step ended at exactly `num_tokens` tokens.
                - Its last step passed `num_tokens`, and computed no more tokens than a state has
                  slots.
                - The step about to run passes `num_tokens` and writes the states on its way. The
                  copies within the arena are then not made.
            prefix_hash: Hash of those tokens.
            num_tokens: Number of tokens, a multiple of `hash_tokens` and of every page table's
                tokens per page, for which the request has slots.
            in_passing: Whether the step about to run writes the states on its way.

        Returns:
            Whether there is a page for every copy. `take_copies` then returns the copies.

        Raises:
            ValueError: One of these holds:
                - `num_tokens` is not such a positive multiple.
                - The request has slots for fewer tokens.
                - The hash is not bytes, or is not that of its tokens.
                - Prefix caching is off.
        """
        request = self._running(request_id)
        check_count("num_tokens", num_tokens)
        return self.prefix_cache.keep_state(
            request_id, request, prefix_hash, num_tokens, in_passing=in_passing
        )

    def keep_written(self, request_id: str) -> None:
        """Let other requests find a request's states that the step before has written on its way.

        `Manager.new_step` does so for all requests. An engine may call this before it, for one
        request at a time. It then knows to which request the content in `take_changes` belongs.

        Raises:
            ValueError: The request is not running.
        """
        self._checkpoints.keep_written(self._running(request_id))

    def keeps_state(self, table_index: int, prefix_hash: bytes, page: SmallPageId) -> bool:
        """Whether a page still holds the state kept in it. Another state may have taken it since.

        Raises:
            ValueError: There is no such page table.
        """
        table = self._table(table_index)
        is_pending = any(
            (table_index, page) in kept
            for request in self._requests.values()
            for kept in request.checkpoints.pending.values()
        )
        return is_pending or table.page_of(prefix_hash) == page

    # Orders and changes

    def take_copies(self) -> list[PageCopy]:
        """Return copies to make before any kernel of the next step runs, in this order."""
        return self.prefix_cache.copies.take_copies()

    def prefetch_pages(self, num_tokens: int) -> list[PageCopy]:
        """Return copies from host memory that may run during the kernels of the step about to run.

        They bring pages for an admission that was put off (`NotLoadedError`), as many as can
        probably be copied while so many tokens are computed. Call this at most once per step, when
        the whole step is known. Call it before `take_copies`, which returns the copies that make
        room for these. Make these copies in the same way as those of `write_back_pages`, and before
        those.

        Args:
            num_tokens: Number of tokens that the step computes.

        Raises:
            ValueError: `num_tokens` is not an integer of at least 0.
        """
        check_count("num_tokens", num_tokens)
        prefetch = self.prefix_cache.prefetch
        return prefetch.prefetch_pages(num_tokens) if prefetch is not None else []

    def write_back_pages(self) -> list[PageCopy]:
        """Return copies to host memory that may run during the kernels of the step about to run.

        They copy content that the step after it will probably evict. Call this at most once per
        step, when the whole step is known. Content that is not copied now is copied when it is
        evicted. Begin these copies when the copies of `take_copies` are made, and finish them
        before those of the next step begin.
        """
        write_back = self.prefix_cache.write_back
        return write_back.write_back_pages() if write_back is not None else []

    def take_changes(self) -> list[CacheChange]:
        """Return which content can be found, or no longer found, since the last call, in order.

        Content counts as found as soon as a new request could hit it. The list is empty if changes
        are not recorded.
        """
        return self._changes.take_changes() if self._changes is not None else []

    def record_evictions(self) -> None:
        """Record lost checkpoints from now on, and what admitted requests found.

        Call `take_evictions` and `take_misses` often then.
        """
        self.prefix_cache.record_evictions()

    def take_evictions(self) -> list[Eviction]:
        """Return the checkpoints that were lost since the last call, in order.

        The list is empty before `record_evictions`. Loose pages, which no checkpoint needs, are not
        in it.
        """
        log = self.prefix_cache.tree.log
        return log.take_evictions() if log is not None else []

    def take_misses(self) -> list[Miss]:
        """Return what each request found that was admitted with a hit since the last call.

        A hit of 0 tokens counts. The list is empty before `record_evictions`.
        """
        log = self.prefix_cache.tree.log
        return log.misses.take_misses() if log is not None else []

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. While requests run, return False and forget nothing."""
        if self._requests:
            return False
        self.prefix_cache.clear()
        return True

    # Questions about running requests

    def _table(self, table_index: int) -> Table:
        check_count("table_index", table_index)
        if table_index >= len(self._tables):
            msg = f"table_index must be less than {len(self._tables)}, got {table_index}"
            raise ValueError(msg)
        return self._tables[table_index]

    def page_table(self, request_id: str, table_index: int) -> list[SmallPageId]:
        """Return a request's small pages in order, with the null page where a page was given up.

        Raises:
            ValueError: There is no such request or page table.
        """
        return list(self._running(request_id).pages.small_pages[self._table(table_index).index])

    def page_tables(self, request_id: str) -> tuple[list[SmallPageId], ...]:
        """Return all page tables of a request."""
        return tuple(list(pages) for pages in self._running(request_id).pages.small_pages)

    def is_running(self, request_id: str) -> bool:
        """Whether a request was admitted and has not ended."""
        return request_id in self._requests

    @property
    def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._requests

    def request_tokens(self) -> dict[str, int]:
        """Return the number of tokens that each running request has slots for."""
        return {request_id: request.num_tokens for request_id, request in self._requests.items()}

    def committed_tokens(self, request_id: str) -> int:
        """Return the number of tokens of a request whose full pages other requests can find."""
        return self._running(request_id).committed_tokens

    # Reports

    def can_ever_fit(self, num_tokens: int, *, chunk_tokens: int) -> bool:
        """Whether a request could reach `num_tokens` tokens with the arena to itself.

        Raises:
            ValueError: A number is not an integer of at least 0.
        """
        return self.capacity.can_ever_fit(num_tokens, chunk_tokens=chunk_tokens)

    @property
    def num_large_pages(self) -> int:
        """Number of large pages that can be held now, and the null page."""
        return self.occupancy.num_large_pages

    @property
    def usage(self) -> float:
        """Share of the arena's large pages in which a running request uses a small page."""
        return self.occupancy.usage

    @property
    def growth_large_pages(self) -> int:
        """Number of large pages that let every running request take one more page of each table.

        Leave this many free when a preempted request is admitted again.
        """
        return self.occupancy.growth_large_pages

    def memory(self) -> MemoryReport:
        """Return where every byte of the arena is."""
        return self.occupancy.memory()

    def large_page_counts(self) -> LargePageCounts:
        """Return the number of large pages in each state, without the null page."""
        return self.occupancy.large_page_counts()

    def cache_report(self) -> CacheReport:
        """Return the use of the prefix cache since start-up."""
        return self.prefix_cache.hits.report()

    def host_report(self) -> HostReport | None:
        """Return the content and traffic of host memory. None if there is none."""
        host = self.prefix_cache.host
        return host.report() if host is not None else None

    def host_memory(self) -> MemoryReport | None:
        """Return where every byte of host memory is. None if there is none."""
        host = self.prefix_cache.host
        return host.memory() if host is not None else None

    # Images

    def is_image_cached(self, image: Image) -> bool:
        """Whether a step that begins an image would find it in the cache, whole.

        Then the encoder need not run. Content in host memory counts: the step loads it. The answer
        holds until pages are taken.
        """
        return self._images.is_cached(image)

    def is_image_filled(self, request_id: str, table_index: int, number: int) -> bool:
        """Whether a request's pages of an image hold it before any layer of the step runs.

        This is so for pages that are cached or given up, and for those that the last allocation
        loads from host memory.

        Args:
            request_id: The request to which pages were given last.
            table_index: Page table of images.
            number: Number of the image among the images of the request.

        Raises:
            ValueError: The request is not running, there is no such page table of images, or no
                such image.
        """
        request, policy = self._running(request_id), self._image_policy(table_index)
        self._check_image(request_id, request, number)
        numbers = policy.pages_of(request.facts, number)
        return self._images.is_filled(request, self._table(table_index), numbers)

    def num_images(self, request_id: str) -> int:
        """Return the number of images with which a running request was admitted.

        Raises:
            ValueError: The request is not running.
        """
        return len(self._running(request_id).facts.images)

    def image_numbers(self, hit: PrefixHit, table_index: int, number: int) -> range:
        """Return the numbers of the pages of an image that a request still reads after its hit.

        Args:
            hit: The prefix that the request would start from.
            table_index: Page table of images.
            number: Number of the image among the images of the request.

        Raises:
            ValueError: There is no such page table of images.
        """
        table = self._table(table_index)
        numbers = self._image_policy(table_index).pages_of(hit.facts, number)
        read = table.policy.update_last_access(hit.facts, hit.num_tokens, NEVER)
        first = table.pages_for(read).start
        return range(min(max(numbers.start, first), numbers.stop), numbers.stop)

    def _image_policy(self, table_index: int) -> ImageSlots:
        policy = self._table(table_index).policy
        if not isinstance(policy, ImageSlots):
            msg = f"table_index must be that of a page table of images, got {table_index}"
            raise ValueError(msg)  # noqa: TRY004  the argument is a number
        return policy

    def image_pages(self, request_id: str, table_index: int, number: int) -> list[SmallPageId]:
        """Return a request's small pages of one image, with the null page where given up.

        The list is empty if the request has not begun the image.

        Args:
            request_id: The request.
            table_index: Page table of images.
            number: Number of the image among the images of the request.

        Raises:
            ValueError: The request is not running, there is no such page table of images, or no
                such image.
        """
        request, policy = self._running(request_id), self._image_policy(table_index)
        self._check_image(request_id, request, number)
        numbers = policy.pages_of(request.facts, number)
        return request.pages.small_pages[table_index][numbers.start : numbers.stop]

    @staticmethod
    def _check_image(request_id: str, request: Request, number: int) -> None:
        """Refuse the number of an image that a request does not have."""
        check_count("number", number)
        if number >= len(request.facts.images):
            msg = (
                f"number must be less than the {len(request.facts.images)} images of request "
                f"{request_id!r}, got {number}"
            )
            raise ValueError(msg)

    def forget_images(self) -> None:
        """Forget all cached images, also in host memory, because the encoder has changed.

        Running requests keep the pages that they use.
        """
        self._images.forget(self._requests.values())
        self.prefix_cache.record_loss()

    def check(self) -> None:
        """Raise `InvariantError` unless requests, allocator, cache and queue agree."""
        self.occupancy.check()
        self.prefix_cache.check()
        self._allocation.check(self._requests)
        self._wait_queue.check()
        if self.borrowed is not None:
            self.borrowed.check()


def _first_pages(lender: Lender, num_large_pages: int, num_tables: int) -> list[LargePageId]:
    """Return the large pages that a lender has lent from the start.

    Raises:
        ValueError: They are of another arena, or too few.
    """
    if lender.num_pages != num_large_pages:
        msg = (
            f"num_large_pages must be {lender.num_pages}, those of the lender's arena, got "
            f"{num_large_pages}"
        )
        raise ValueError(msg)
    if lender.guarantee_pages < num_tables:
        msg = (
            f"the lender must guarantee at least {num_tables} large pages, one for each page "
            f"table, got {lender.guarantee_pages}"
        )
        raise ValueError(msg)
    return lender.first_pages()


def _next_image(facts: RequestFacts, num_tokens: int) -> int:
    """Return the first token of the first image that begins after `num_tokens` tokens."""
    for image in facts.images:
        if image.start_token >= num_tokens:
            return image.start_token
    return NEVER

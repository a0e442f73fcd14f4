"""Allocation of the pages that a request needs for its next step: all of them, or a refusal."""

from collections.abc import Mapping, Sequence
from operator import sub

from jenga.arena.allocator import Allocator
from jenga.arena.borrowed_pages import BorrowedPages
from jenga.arena.small_pages import Budget, Sharing
from jenga.errors import InvariantError, OutOfPagesError
from jenga.page_ids import NULL_PAGE, SmallPageId
from jenga.prefix.prefix_cache import PrefixCache
from jenga.tables.growth import Growth
from jenga.tables.request import HitStart, Request


class PageAllocation:
    """Takes small pages for requests: all that a step needs, or none.

    Attributes:
        borrowed: Asked for further large pages before a request is refused. None if all large pages
            of the arena are there from the start.
        no_pages: No pages, for each page table.
    """

    __slots__ = (
        "_allocator",
        "_checkpoints",
        "_eviction_notices",
        "_growth",
        "_hits",
        "_host",
        "_in_flight_tokens",
        "_no_needs",
        "_prefetch",
        "_promises",
        "_tree",
        "borrowed",
        "no_pages",
    )

    def __init__(
        self,
        allocator: Allocator,
        growth: Growth,
        prefix_cache: PrefixCache,
        *,
        in_flight_tokens: int = 0,
    ) -> None:
        """Create the allocation of one arena.

        Args:
            allocator: Source of the pages.
            growth: Computes how many pages a request needs, and appends them to its page tables.
            prefix_cache: Shares the pages of prefix hits, and learns which pages were evicted.
            in_flight_tokens: Most tokens of one request that all steps in flight compute together.
        """
        self._allocator = allocator
        self._growth = growth
        self._hits = prefix_cache.hits
        self._checkpoints = prefix_cache.checkpoints
        self._eviction_notices = prefix_cache.eviction_notices
        self._in_flight_tokens = in_flight_tokens
        self._host = prefix_cache.host
        self._prefetch = prefix_cache.prefetch
        self._tree = prefix_cache.tree
        self.borrowed: BorrowedPages | None = None
        # Request id -> the request, and the small pages of each page table that it will still take
        # for its expected tokens. They count until it has slots for those tokens.
        self._promises: dict[str, tuple[Request, list[int]]] = {}
        self._no_needs = [0] * len(allocator.tables)
        self.no_pages: tuple[list[SmallPageId], ...] = tuple([] for _ in allocator.tables)

    def allocate_pages(
        self,
        request_id: str,
        request: Request,
        num_tokens: int,
        *,
        full_tokens: int,
        reserve_large_pages: int,
        start: HitStart | None = None,
    ) -> Sequence[list[SmallPageId]]:
        """Give a request the pages for `num_tokens` tokens.

        Args:
            request_id: Name of the request.
            request: The request. Its number of processed tokens is that of this step.
            num_tokens: Number of tokens to have slots for.
            full_tokens: If positive, refuse unless this many tokens could be held now, together
                with the pages that other requests will take for their prompts.
            reserve_large_pages: Number of large pages that must stay empty or reclaimable.
            start: At admission, the hit that the request starts from.

        Returns:
            The pages taken, for each page table.

        Raises:
            OutOfPagesError: There are not enough pages, or pages of the hit are to be loaded first.
                Nothing was changed.
        """
        growth = self._growth
        if not full_tokens and start is None and not request.is_packed:
            taken = self._allocate_next(request, num_tokens, reserve_large_pages)
            if taken is not None:
                return taken
        needs = growth.needs(request, num_tokens)
        expected_tokens = max(full_tokens, request.expected_tokens)
        expected = growth.needs(request, expected_tokens) if expected_tokens > num_tokens else needs
        later = self._later_pages(
            request, needs, num_tokens, expected_tokens, is_shared=start is None
        )
        found = start.sharing if start is not None else None
        if full_tokens:
            others = self.promised_beside(request_id)
            all_needs = [sum(pages) for pages in zip(needs, later, *others, strict=True)]
            self._require_room(request_id, all_needs, found, reserve_large_pages)
        if start is not None:
            self._require_room(request_id, needs, found, reserve_large_pages)
            if self._prefetch is not None:
                self._prefetch.refuse_unloaded(request_id, start.hit, reserve_large_pages)
            # Sharing makes pages used. From here on nothing may be refused.
            if self._tree.log is not None:
                self._tree.log.misses.record_lookup(request_id, start.hit)
            self._hits.share_pages(start)
            if self._host is not None:
                self._host.pin_hit(start.hit)
        taken: Sequence[list[SmallPageId]] | None = self.no_pages
        if any(needs):
            expected = (
                needs
                if request.is_packed
                else growth.expect_own_large_pages(request, needs, expected)
            )
            taken = self._take_new(request_id, request, needs, expected, reserve_large_pages)
            growth.append(request, taken)
        if start is not None:
            # This comes first, because a loaded page may overwrite a state that was kept.
            self._checkpoints.copy_states(request, start.hit)
            if self._host is not None:
                self._host.order_loads(start.hit, request)
        request.expected_tokens = expected_tokens
        if any(later):
            self._promises[request_id] = request, later
        else:
            self._promises.pop(request_id, None)
        return taken

    def require_beside(
        self, request_id: str, request: Request, num_tokens: int, found: Sequence[Sharing | None]
    ) -> None:
        """Refuse a step of a running request that would not fit beside pages it is to share.

        Args:
            request_id: Name of the request.
            request: The request. Its page tables contain the pages found already.
            num_tokens: Number of tokens to have slots for.
            found: For each page table, small pages that were found and are not shared yet.

        Raises:
            OutOfPagesError: There are not enough pages. Nothing was changed.
        """
        self._require_room(request_id, self._growth.needs(request, num_tokens), found, 0)

    def _take_new(
        self,
        request_id: str,
        request: Request,
        needs: list[int],
        expected: Sequence[int],
        reserve_large_pages: int,
    ) -> list[list[SmallPageId]]:
        """Take new pages, with large pages that can be borrowed at once.

        Raises:
            OutOfPagesError: There are not enough pages. Nothing was changed.
        """
        log = self._tree.log
        for _ in range(2):
            if log is not None:
                log.for_request = request.name
            taken = self._allocator.take(
                needs,
                expected,
                owner=request.owner,
                reserve_large_pages=reserve_large_pages,
                held=request.pages.small_pages,
                is_packed=request.is_packed,
            )
            if taken is not None:
                self._eviction_notices.deliver()
            if log is not None:
                log.for_request = ""
            if taken is not None:
                return taken
            self._require_room(request_id, needs, None, reserve_large_pages)
        msg = f"{needs} small pages can be had and cannot"
        raise InvariantError(msg)

    def _later_pages(
        self,
        request: Request,
        needs: Sequence[int],
        num_tokens: int,
        expected_tokens: int,
        *,
        is_shared: bool,
    ) -> list[int]:
        """Return the small pages of each page table that a request will take after this step.

        Args:
            request: The request.
            needs: Small pages that it takes in this step.
            num_tokens: Number of tokens that it has slots for after this step.
            expected_tokens: Number of tokens that it is certain to reach.
            is_shared: Whether it is counted as a user of all its pages. False while it is admitted
                with a hit.
        """
        if expected_tokens <= num_tokens:
            return self._no_needs
        start_tokens = request.num_processed_tokens
        chunk_tokens = max(
            num_tokens - start_tokens, min(self._in_flight_tokens, expected_tokens - start_tokens)
        )
        further = self._growth.further_pages(
            request, needs, chunk_tokens, expected_tokens, is_shared=is_shared
        )
        return list(map(sub, further, needs))

    def forget_promise(self, request_id: str) -> None:
        """Record that a request has ended: no pages are promised to it any more."""
        self._promises.pop(request_id, None)

    def promised_beside(self, request_id: str | None) -> list[list[int]]:
        """Return the small pages, per page table, that other requests will take for their prompts.

        Args:
            request_id: The request that is left out. None leaves out none.
        """
        return [
            pages
            for name, (request, pages) in self._promises.items()
            if name != request_id and request.num_tokens < request.expected_tokens
        ]

    def check(self, requests: Mapping[str, Request]) -> None:
        """Raise `InvariantError` unless pages are promised to running requests only.

        Args:
            requests: Running requests, by name.
        """
        for name, (request, pages) in self._promises.items():
            if requests.get(name) is not request:
                msg = f"{pages} small pages are promised to request {name!r}, which does not run"
                raise InvariantError(msg)
            if min(pages) < 0 or not any(pages):
                msg = f"{pages} small pages are promised to request {name!r}"
                raise InvariantError(msg)

    def _allocate_next(
        self, request: Request, num_tokens: int, reserve_large_pages: int
    ) -> Sequence[list[SmallPageId]] | None:
        """Do the work of `allocate_pages` in the common case: few new pages, and room for them.

        That is, each page table needs at most one page, and each could open a large page for it.

        Returns:
            The pages taken. None, with nothing changed, in any other case.
        """
        tables = self._allocator.tables
        slack = self._allocator.large_pages.num_available - reserve_large_pages
        if slack < len(tables) or num_tokens < request.expected_tokens:
            return None
        needs = self._growth.next_needs(request, num_tokens)
        if needs is None:
            return None
        if self._tree.log is not None:
            self._tree.log.for_request = request.name
        taken = [*self.no_pages]
        # Even if the first page tables open large pages, enough are left for the others.
        budget = Budget(slack)
        small_pages = request.pages.small_pages
        for index, expected_pages, _ in needs:
            pages = small_pages[index]
            beside = pages[-1] if pages else NULL_PAGE
            taken[index] = tables[index].take(1, expected_pages, request.owner, budget, beside)
        self._growth.append_next(request, needs, taken)
        self._eviction_notices.deliver()
        if self._tree.log is not None:
            self._tree.log.for_request = ""
        return taken

    def _require_room(
        self,
        request_id: str,
        needs: list[int],
        found: Sequence[Sharing | None] | None,
        reserve_large_pages: int,
    ) -> None:
        """Raise `OutOfPagesError` unless the needs can be met once the pages found are shared."""
        room = self._allocator.room(needs, hits=found, reserve_large_pages=reserve_large_pages)
        if not room.suffices and self.borrowed is not None:
            missing = room.needed_large_pages - room.available_large_pages
            if self.borrowed.borrow_missing(missing):
                room = self._allocator.room(
                    needs, hits=found, reserve_large_pages=reserve_large_pages
                )
        if not room.suffices:
            raise OutOfPagesError(
                request_id,
                needed_pages=needs,
                available_pages=room.spare_pages,
                needed_large_pages=room.needed_large_pages,
                available_large_pages=max(0, room.available_large_pages),
                reserved_large_pages=reserve_large_pages,
            )

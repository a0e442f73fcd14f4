"""Allocation of the pages that a request needs for its next step: all of them, or a refusal."""

from collections.abc import Mapping, Sequence
from operator import sub

from jenga.arena.allocator import Allocator
from jenga.arena.borrowed_pages import BorrowedPages
from jenga.arena.large_pages import NULL_PAGE
from jenga.arena.small_pages import Budget, Sharing
from jenga.errors import InvariantError, OutOfPagesError
from jenga.prefix.checkpoints import Checkpoints
from jenga.prefix.eviction_notices import Evictions
from jenga.prefix.host_cache import HostCache
from jenga.prefix.prefetch import LoadingAhead
from jenga.prefix.start_from_hit import Hits
from jenga.tables.growth import Growth
from jenga.tables.request import PrefixHit, Request


class Taking:
    """Takes small pages for requests: all that a step needs, or none.

    Attributes:
        borrowed: Asked for further large pages before a request is refused. None if all large pages
            of the arena are there from the start.
        nothing: No pages, for each page table.
    """

    __slots__ = (
        "_allocator",
        "_checkpoints",
        "_evictions",
        "_growth",
        "_hits",
        "_host",
        "_in_flight_tokens",
        "_loading",
        "_no_pages",
        "_promises",
        "borrowed",
        "nothing",
    )

    def __init__(  # noqa: PLR0913  all parts of one arena
        self,
        allocator: Allocator,
        growth: Growth,
        hits: Hits,
        checkpoints: Checkpoints,
        evictions: Evictions,
        *,
        in_flight_tokens: int = 0,
        host: HostCache | None = None,
        loading: LoadingAhead | None = None,
    ) -> None:
        """Create the allocation of one arena.

        Args:
            allocator: Source of the pages.
            growth: Computes how many pages a request needs, and appends them to its page tables.
            hits: Shares the pages of prefix hits.
            checkpoints: Checkpoints that requests start from.
            evictions: Told when an allocation has evicted pages.
            in_flight_tokens: Most tokens of one request that all steps in flight compute together.
            host: Host memory, which holds pages of hits that are not in the arena. None if there is
                none.
            loading: Loads such pages into the arena before the admission. None if nothing does.
        """
        self._allocator = allocator
        self._growth = growth
        self._hits = hits
        self._checkpoints = checkpoints
        self._evictions = evictions
        self._in_flight_tokens = in_flight_tokens
        self._host = host
        self._loading = loading
        self.borrowed: BorrowedPages | None = None
        # Request id -> the request, and the small pages of each page table that it will still take
        # for its expected tokens. They count until it has slots for those tokens.
        self._promises: dict[str, tuple[Request, list[int]]] = {}
        self._no_pages = [0] * len(allocator.tables)
        self.nothing: tuple[list[int], ...] = tuple([] for _ in allocator.tables)

    def take(  # noqa: PLR0913  all facts of a step
        self,
        request_id: str,
        request: Request,
        num_tokens: int,
        *,
        full_tokens: int,
        reserve_large_pages: int,
        hit: PrefixHit | None = None,
        found: Sequence[Sharing | None] | None = None,
    ) -> Sequence[list[int]]:
        """Give a request the pages for `num_tokens` tokens.

        Args:
            request_id: Name of the request.
            request: The request. Its number of processed tokens is that of this step.
            num_tokens: Number of tokens to have slots for.
            full_tokens: If positive, refuse unless this many tokens could be held now, together
                with the pages that other requests will take for their prompts.
            reserve_large_pages: Number of large pages that must stay empty or reclaimable.
            hit: At admission, the prefix that the request starts from.
            found: For each page table, the small pages of the hit, which are not shared yet.

        Returns:
            The pages taken, for each page table.

        Raises:
            OutOfPagesError: There are not enough pages, or pages of the hit are to be loaded first.
                Nothing was changed.
        """
        growth = self._growth
        if not full_tokens and found is None and not request.is_packed:
            taken = self._take_next(request, num_tokens, reserve_large_pages)
            if taken is not None:
                return taken
        needs = growth.needs(request, num_tokens)
        expected_tokens = max(full_tokens, request.expected_tokens)
        expected = growth.needs(request, expected_tokens) if expected_tokens > num_tokens else needs
        later = self._later_pages(request, found, needs, num_tokens, expected_tokens)
        if full_tokens:
            others = self.promised_beside(request_id)
            all_needs = [sum(pages) for pages in zip(needs, later, *others, strict=True)]
            self._require(request_id, all_needs, found, reserve_large_pages)
        if hit is not None and found is not None:
            self._require(request_id, needs, found, reserve_large_pages)
            if self._loading is not None:
                self._loading.check(request_id, hit, reserve_large_pages)
            # Sharing makes pages used. From here on nothing may be refused.
            self._hits.share(found, hit)
            if self._host is not None:
                self._host.pin(hit)
        taken: Sequence[list[int]] | None = self.nothing
        if any(needs):
            apart = needs if request.is_packed else growth.apart(request, needs, expected)
            taken = self._take_new(request_id, request, needs, apart, reserve_large_pages)
            self._evictions.note()
            growth.append(request, taken)
        if hit is not None:
            # This comes first, because a loaded page may overwrite a state that was kept.
            self._checkpoints.start_from(request, hit)
            if self._host is not None:
                self._host.load(hit, request)
        request.expected_tokens = expected_tokens
        if any(later):
            self._promises[request_id] = request, later
        else:
            self._promises.pop(request_id, None)
        return taken

    def _take_new(
        self,
        request_id: str,
        request: Request,
        needs: list[int],
        apart: Sequence[int],
        reserve_large_pages: int,
    ) -> list[list[int]]:
        """Take new pages, with large pages that can be borrowed at once.

        Raises:
            OutOfPagesError: There are not enough pages. Nothing was changed.
        """
        for _ in range(2):
            taken = self._allocator.take(
                needs,
                apart,
                owner=request.owner,
                reserve_large_pages=reserve_large_pages,
                held=request.pages,
                is_packed=request.is_packed,
            )
            if taken is not None:
                return taken
            self._require(request_id, needs, None, reserve_large_pages)
        msg = f"{needs} small pages can be had and cannot"
        raise InvariantError(msg)

    def _later_pages(
        self,
        request: Request,
        found: Sequence[Sharing | None] | None,
        needs: Sequence[int],
        num_tokens: int,
        expected_tokens: int,
    ) -> list[int]:
        """Return the small pages of each page table that a request will take after this step.

        Args:
            request: The request.
            found: The argument of `take`.
            needs: Small pages that it takes in this step.
            num_tokens: Number of tokens that it has slots for after this step.
            expected_tokens: Number of tokens that it is certain to reach.
        """
        if expected_tokens <= num_tokens:
            return self._no_pages
        start_tokens = request.num_processed_tokens
        chunk_tokens = max(
            num_tokens - start_tokens, min(self._in_flight_tokens, expected_tokens - start_tokens)
        )
        further = self._growth.further_pages(request, found, needs, chunk_tokens, expected_tokens)
        return list(map(sub, further, needs))

    def forget(self, request_id: str) -> None:
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

    def _take_next(
        self, request: Request, num_tokens: int, reserve_large_pages: int
    ) -> Sequence[list[int]] | None:
        """Do the work of `take` in the common case: few new pages, and room for all of them.

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
        taken = [*self.nothing]
        # Even if the first page tables open large pages, enough are left for the others.
        budget = Budget(slack)
        for index, expected_pages, max_tokens in needs:
            pages = request.pages[index]
            beside = pages[-1] if pages else NULL_PAGE
            new_pages = tables[index].take(1, expected_pages, request.owner, budget, beside)
            taken[index] = new_pages
            pages += new_pages
            request.max_tokens[index] = max_tokens
        request.grows_at = min(request.max_tokens) + 1
        self._evictions.note()
        return taken

    def _require(
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
            if self.borrowed.lack(missing):
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

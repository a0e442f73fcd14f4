"""Requests in, page tables out: the one place that knows allocator, prefix cache and policies."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.allocator import Allocator
from jenga.errors import InvariantError, OutOfPagesError
from jenga.geometry import Geometry
from jenga.large_pages import NULL_PAGE
from jenga.policies import RequestFacts, policy_of
from jenga.stats import MemoryReport, TableMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The longest cached prefix of a request.

    Attributes:
        num_tokens: Its tokens.
        pages: Its small pages per page table; the null page where no later token reads.
    """

    num_tokens: int
    pages: tuple[tuple[int, ...], ...]


class _Request:
    """A running request.

    Attributes:
        owner: Its number as an owner of pages.
        num_tokens: Tokens it has slots for.
        num_processed_tokens: Tokens whose step is over.
        expected_tokens: Tokens it is certain to reach.
        step: The last step it took part in.
        pages: Per page table, its small pages in order; the null page where given up.
        first: Per page table, its first page not given up.
        max_tokens: Per page table, tokens its pages suffice for.
        releases: Per page table, processed tokens at which a page is given up.
        grows_at: One more token than all page tables suffice for.
        shrinks_at: Processed tokens at which any page table gives up a page.
    """

    __slots__ = (
        "expected_tokens",
        "facts",
        "first",
        "grows_at",
        "max_tokens",
        "num_processed_tokens",
        "num_tokens",
        "owner",
        "pages",
        "releases",
        "shrinks_at",
        "step",
    )

    def __init__(self, facts: RequestFacts, num_tables: int) -> None:
        self.owner = 0
        self.facts = facts
        self.num_tokens = self.num_processed_tokens = self.expected_tokens = self.step = 0
        self.pages: list[list[int]] = [[] for _ in range(num_tables)]
        self.first = [0] * num_tables
        self.max_tokens = [0] * num_tables
        self.releases = [0] * num_tables
        self.grows_at = self.shrinks_at = 0


class Manager:
    """Gives requests their page tables out of one arena.

    Attributes:
        geometry: How the arena is cut.
        num_large_pages: Large pages of the arena, the null page included.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_large_pages: int,
        prefix_caching: bool = False,
        hash_tokens: int = 16,
    ) -> None:
        """An empty arena.

        Args:
            geometry: How the arena is cut.
            num_large_pages: Large pages of the arena, the null page included.
            prefix_caching: Whether pages of finished requests are kept for others.
            hash_tokens: Tokens that each further prefix hash covers.

        Raises:
            ValueError: The arena is too small for one large page per page table and the null page.
        """
        tables = geometry.page_tables
        if num_large_pages < 1 + len(tables):
            msg = (
                f"num_large_pages must be at least {1 + len(tables)}, the null page and one for "
                f"each of {len(tables)} page tables, got {num_large_pages}"
            )
            raise ValueError(msg)
        if hash_tokens <= 0:
            msg = f"hash_tokens must be a positive integer, got {hash_tokens}"
            raise ValueError(msg)
        if prefix_caching:
            msg = "prefix_caching must be False: the prefix cache is not there yet"
            raise ValueError(msg)
        self.geometry = geometry
        self.num_large_pages = num_large_pages
        self._policies = tuple(policy_of(table) for table in tables)
        self._allocator = Allocator(
            [table.small_pages_per_large_page for table in tables], num_large_pages
        )
        self._page_slots = tuple(table.tokens_per_page for table in tables)
        self._requests: dict[str, _Request] = {}
        self._step = 0
        self._num_owners = 0
        self._no_pages: tuple[list[int], ...] = tuple([] for _ in tables)

    # The life of a request

    def new_step(self) -> None:
        """Note that a step of the engine begins: what it touches is younger than all before."""
        self._step += 1

    def lookup(self, prefix_hashes: Sequence[bytes], *, max_tokens: int) -> PrefixHit:
        """The longest cached prefix."""
        del prefix_hashes, max_tokens
        return PrefixHit(num_tokens=0, pages=tuple(() for _ in self._policies))

    def allocate(
        self,
        request_id: str,
        *,
        num_tokens: int,
        num_processed_tokens: int = 0,
        hit: PrefixHit | None = None,
        full_tokens: int = 0,
        reserve_large_pages: int = 0,
    ) -> tuple[list[int], ...]:
        """Give a request slots for its first `num_tokens` tokens; the first call admits it.

        Pages that no token from `num_processed_tokens` on reads are given up first, even if the
        request is then refused.

        Args:
            request_id: Who asks.
            num_tokens: Tokens to have slots for, those already there included.
            num_processed_tokens: Tokens whose step is over.
            hit: At admission, the prefix to start from.
            full_tokens: If positive, refuse unless so many tokens could be held now, in steps as
                large as this one.
            reserve_large_pages: Large pages that must stay empty or reclaimable.

        Returns:
            Page ids appended to each page table. Not to be written.

        Raises:
            OutOfPagesError: They cannot be had; nothing else was changed.
            ValueError: An argument contradicts the others or what is known of the request.
        """
        request = self._requests.get(request_id)
        if (
            request is not None
            and num_tokens < request.grows_at
            and num_processed_tokens < request.shrinks_at
            and not full_tokens
        ):
            request.num_tokens = num_tokens
            request.num_processed_tokens = num_processed_tokens
            request.step = self._step
            return self._no_pages
        if hit is not None and hit.num_tokens:
            msg = "hit must be empty: the prefix cache is not there yet"
            raise ValueError(msg)
        if num_tokens <= 0 or not 0 <= num_processed_tokens <= num_tokens:
            msg = (
                f"num_tokens must be positive and no less than num_processed_tokens, "
                f"got {num_tokens} and {num_processed_tokens}"
            )
            raise ValueError(msg)
        is_new = request is None
        if request is None:
            facts = RequestFacts(prompt_tokens=max(full_tokens, num_tokens))
            request = _Request(facts, len(self._policies))
        self._give_up(request, num_processed_tokens)
        needs = self._needs(request, num_tokens)
        self._require(request_id, needs, reserve_large_pages)
        if full_tokens:
            chunk_tokens = num_tokens - num_processed_tokens
            further = self._further_pages(request, max(full_tokens, num_tokens), chunk_tokens)
            self._require(request_id, further, reserve_large_pages)
        if is_new:
            self._num_owners += 1
            request.owner = self._num_owners
            self._requests[request_id] = request
        request.num_tokens = num_tokens
        request.expected_tokens = max(request.expected_tokens, full_tokens, num_tokens)
        request.step = self._step
        return self._grow(request, needs, reserve_large_pages)

    def release_passed(self, request_id: str, num_processed_tokens: int) -> None:
        """Give up the pages that no token from `num_processed_tokens` on reads."""
        request = self._running(request_id)
        self._give_up(request, num_processed_tokens)

    def free(self, request_id: str) -> None:
        """End a request: it finished, was aborted or is preempted."""
        request = self._running(request_id)
        for table, pages, first in zip(
            self._allocator.tables, request.pages, request.first, strict=True
        ):
            live = pages[first:]
            if live:
                live.reverse()
                table.release(live)
        self._allocator.disown(request.owner)
        del self._requests[request_id]

    def _running(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            msg = f"request_id must name a running request, got {request_id!r}"
            raise ValueError(msg)
        return request

    def _give_up(self, request: _Request, num_processed_tokens: int) -> None:
        """Give up pages out of every future window, at the time of the step before."""
        request.num_processed_tokens = num_processed_tokens
        num_tokens = max(request.num_tokens, num_processed_tokens)
        for index, policy in enumerate(self._policies):
            if num_processed_tokens < request.releases[index]:
                continue
            page_slots = self._page_slots[index]
            touched = policy.update_last_access(request.facts, num_processed_tokens, num_tokens)
            pages = request.pages[index]
            start, end = touched.start // page_slots, -(-touched.stop // page_slots)
            first = request.first[index]
            # A request may come in with its first tokens out of the window already.
            pages.extend([NULL_PAGE] * (start - len(pages)))
            passed = [page for page in pages[first:start] if page != NULL_PAGE]
            pages[first:start] = [NULL_PAGE] * (start - first)
            passed += pages[end:]
            del pages[end:]
            request.first[index] = start
            if passed:
                self._allocator.tables[index].release(passed)
            request.releases[index] = policy.next_release(
                request.facts, num_processed_tokens, page_slots
            )
            request.max_tokens[index] = policy.max_tokens(
                request.facts, num_processed_tokens, len(pages) * page_slots
            )
        request.shrinks_at = min(request.releases)
        request.grows_at = min(request.max_tokens) + 1

    def _needs(self, request: _Request, num_tokens: int) -> list[int]:
        """Small pages to append to each page table for so many tokens."""
        needs: list[int] = []
        for policy, page_slots, pages, max_tokens in zip(
            self._policies, self._page_slots, request.pages, request.max_tokens, strict=True
        ):
            need = 0
            if num_tokens > max_tokens:
                touched = policy.update_last_access(
                    request.facts, request.num_processed_tokens, num_tokens
                )
                need = -(-touched.stop // page_slots) - len(pages)
            needs.append(need)
        return needs

    def _further_pages(self, request: _Request, num_tokens: int, chunk_tokens: int) -> list[int]:
        """Small pages to take beyond those held, at the peak until `num_tokens` tokens."""
        return [
            max(0, peak - len(pages) + first)
            for peak, pages, first in zip(
                self.peak_pages(num_tokens, chunk_tokens=chunk_tokens, facts=request.facts),
                request.pages,
                request.first,
                strict=True,
            )
        ]

    def _require(self, request_id: str, needs: list[int], reserve_large_pages: int) -> None:
        """Refuse unless the needs can be met."""
        room = self._allocator.room(needs, reserve_large_pages=reserve_large_pages)
        if not room.suffices:
            raise OutOfPagesError(
                request_id,
                needed_pages=needs,
                available_pages=room.spare_pages,
                needed_large_pages=room.needed_large_pages,
                available_large_pages=room.available_large_pages,
            )

    def _grow(
        self, request: _Request, needs: list[int], reserve_large_pages: int
    ) -> tuple[list[int], ...]:
        """Append the pages needed, which can be had."""
        facts, num_processed_tokens = request.facts, request.num_processed_tokens
        expected: list[int] = []
        for policy, page_slots, pages in zip(
            self._policies, self._page_slots, request.pages, strict=True
        ):
            touched = policy.update_last_access(
                facts, num_processed_tokens, request.expected_tokens
            )
            expected.append(-(-touched.stop // page_slots) - len(pages))
        taken = self._allocator.take(
            needs, expected, owner=request.owner, reserve_large_pages=reserve_large_pages
        )
        for index, new_pages in enumerate(taken):
            if new_pages:
                pages = request.pages[index]
                pages += new_pages
                request.max_tokens[index] = self._policies[index].max_tokens(
                    facts, num_processed_tokens, len(pages) * self._page_slots[index]
                )
        request.grows_at = min(request.max_tokens) + 1
        return tuple(taken)

    # Questions

    def page_table(self, request_id: str, table_index: int) -> list[int]:
        """A request's small pages in order; the null page where given up."""
        return list(self._running(request_id).pages[table_index])

    def page_tables(self, request_id: str) -> tuple[list[int], ...]:
        """All page tables of a request."""
        return tuple(list(pages) for pages in self._running(request_id).pages)

    def request_tokens(self) -> dict[str, int]:
        """Running request -> tokens it has slots for."""
        return {request_id: request.num_tokens for request_id, request in self._requests.items()}

    @property
    def usage(self) -> float:
        """Share of the arena's large pages that hold something a running request uses."""
        usable = self.num_large_pages - 1
        return (usable - self._allocator.large_pages.num_available) / usable

    def peak_pages(
        self, num_tokens: int, *, chunk_tokens: int, facts: RequestFacts | None = None
    ) -> tuple[int, ...]:
        """Most small pages of each page table that a request holds on its way to so many tokens.

        Args:
            num_tokens: Tokens it ends with.
            chunk_tokens: Tokens a step computes at most.
            facts: Of the request; by default that all its tokens are prompt.
        """
        facts = facts or RequestFacts(prompt_tokens=num_tokens)
        peaks: list[int] = []
        for policy, page_slots in zip(self._policies, self._page_slots, strict=True):
            total_slots = policy.update_last_access(facts, 0, num_tokens).stop
            peak_slots = policy.peak_slots(facts, num_tokens, chunk_tokens)
            # The touched slots may begin with the last slot of a page.
            anywhere = (peak_slots - 2) // page_slots + 2 if peak_slots > 1 else peak_slots
            peaks.append(min(-(-total_slots // page_slots), anywhere))
        return tuple(peaks)

    def can_ever_fit(self, num_tokens: int, *, chunk_tokens: int) -> bool:
        """Whether a request could reach so many tokens with the arena to itself."""
        peaks = self.peak_pages(num_tokens, chunk_tokens=chunk_tokens)
        return self._large_pages(peaks) < self.num_large_pages

    def require_fit(self, num_tokens: int, *, chunk_tokens: int) -> None:
        """Refuse a request that could never be held.

        Raises:
            ValueError: It could not, even with the arena to itself; the message says by how much.
        """
        peaks = self.peak_pages(num_tokens, chunk_tokens=chunk_tokens)
        needed = self._large_pages(peaks)
        if needed >= self.num_large_pages:
            per_table = ", ".join(
                f"{table.name} {peak}"
                for table, peak in zip(self.geometry.page_tables, peaks, strict=True)
            )
            msg = (
                f"num_tokens must be such that the request fits in {self.num_large_pages - 1} "
                f"large pages of {self.geometry.large_page_bytes} bytes, got {num_tokens}, which "
                f"takes {needed} in steps of {chunk_tokens} tokens (small pages: {per_table})"
            )
            raise ValueError(msg)

    def _large_pages(self, peaks: Sequence[int]) -> int:
        return sum(
            -(-peak // table.small_pages_per_large_page)
            for table, peak in zip(self.geometry.page_tables, peaks, strict=True)
        )

    def memory(self) -> MemoryReport:
        """Where every byte of the arena is."""
        large_page_bytes = self.geometry.large_page_bytes
        return MemoryReport(
            tables=tuple(self._table_memory(i) for i in range(len(self._policies))),
            empty_large_bytes=self._allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
        )

    def _table_memory(self, index: int) -> TableMemory:
        table, pages = self.geometry.page_tables[index], self._allocator.tables[index]
        page_slots, policy = self._page_slots[index], self._policies[index]
        # Slots not touched, of pages at the ends of page tables; all other used pages are full.
        dead_slots: dict[int, list[int]] = {}
        for request in self._requests.values():
            touched = policy.update_last_access(
                request.facts, request.num_processed_tokens, request.num_tokens
            )
            page_ids, first = request.pages[index], request.first[index]
            if first == len(page_ids):
                continue
            ends = {first: touched.start - first * page_slots}
            last = len(page_ids) - 1
            ends[last] = ends.get(last, 0) + len(page_ids) * page_slots - touched.stop
            for page, dead in ends.items():
                dead_slots.setdefault(page_ids[page], []).append(dead)
        # A shared page is touched wherever one of its users touches it.
        num_dead = sum(
            min(dead) if len(dead) > pages.shares.get(page, 0) else 0
            for page, dead in dead_slots.items()
        )
        slot_bytes = table.payload_bytes // page_slots
        used_bytes = (pages.num_used * page_slots - num_dead) * slot_bytes
        return TableMemory(
            name=table.name,
            used_bytes=used_bytes,
            useless_bytes=pages.num_used * table.small_page_bytes - used_bytes,
            evictable_bytes=pages.num_evictable * table.small_page_bytes,
            empty_bytes=pages.num_large * self.geometry.large_page_bytes
            - (pages.num_used + pages.num_evictable) * table.small_page_bytes,
        )

    def check(self) -> None:
        """Raise `InvariantError` unless the books of requests and allocator agree."""
        self._allocator.check()
        for index, table in enumerate(self._allocator.tables):
            users: dict[int, int] = {}
            for request in self._requests.values():
                live = request.pages[index][request.first[index] :]
                if NULL_PAGE in live or any(request.pages[index][: request.first[index]]):
                    msg = f"page table {index} of owner {request.owner} is null where it is live"
                    raise InvariantError(msg)
                for page in live:
                    users[page] = users.get(page, 0) + 1
            shares = {page: count - 1 for page, count in users.items() if count > 1}
            if shares != table.shares or len(users) != table.num_used:
                msg = (
                    f"page table {index}: requests use {len(users)} pages and share {shares}; "
                    f"the allocator counts {table.num_used} and {table.shares}"
                )
                raise InvariantError(msg)
        if self.memory().arena_bytes != self.num_large_pages * self.geometry.large_page_bytes:
            msg = f"the memory report does not add up to the arena: {self.memory()}"
            raise InvariantError(msg)

"""Growth of a request's page tables with its tokens, and their shrinking as windows pass.

A request stores how many tokens its pages suffice for, and when its next page is given up. Most
decode steps therefore query no page table at all.
"""

from collections.abc import Sequence

from jenga.page_ids import NULL_PAGE, SmallPageId
from jenga.policies import NEVER
from jenga.tables.capacity import Capacity
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, Request

LONG_LARGE_PAGES = 32
"""Size in large pages from which a request may open large pages of its own.

For such a request, one large page that is half empty hardly matters.
"""


class Growth:
    """Computes how many pages requests need, appends new pages, and gives up old ones."""

    __slots__ = ("_capacity", "_long_pages", "_pages_per_own_large", "_tables")

    def __init__(self, tables: Sequence[Table], capacity: Capacity) -> None:
        """Create it for the requests of one arena.

        Args:
            tables: All page tables.
            capacity: Computes the peak of a request.
        """
        self._tables = tables
        self._capacity = capacity
        # For each page table, its small pages in a large page, where long requests open their own.
        self._pages_per_own_large = [
            table.pages.pages_per_large
            if table.pages.pages_per_large > 1 and table.cache is not None
            else 0
            for table in tables
        ]
        # Number of small pages from which a request counts as long.
        self._long_pages = [
            LONG_LARGE_PAGES * pages or NEVER for pages in self._pages_per_own_large
        ]

    def give_up(self, request: Request) -> None:
        """Give up pages that are outside every future window. They count as last used a step ago.

        No page is given up before `request.shrinks_at` processed tokens.
        """
        num_processed_tokens, facts = request.num_processed_tokens, request.facts
        own = request.pages
        # Only a request that is admitted with a hit has more processed tokens than slots.
        num_tokens = request.num_tokens or num_processed_tokens
        for index, release in enumerate(own.release_at):
            if num_processed_tokens < release:
                continue
            table = self._tables[index]
            policy, page_slots = table.policy, table.grain.page_slots
            touched = policy.update_last_access(facts, num_processed_tokens, num_tokens)
            start, end = touched.start // page_slots, -(-touched.stop // page_slots)
            pages, first = own.small_pages[index], own.num_given_up[index]
            num_pages = len(pages)
            if first < start:
                # A request may start with its first tokens already outside the window.
                if num_pages < start:
                    pages.extend([NULL_PAGE] * (start - num_pages))
                if pages[start - 1] != NULL_PAGE:
                    table.release_pages(pages[first:start])
                pages[first:start] = [NULL_PAGE] * (start - first)
                own.num_given_up[index] = start
            if end < num_pages and request.num_tokens:
                table.release_pages(pages[max(start, end) :])
                del pages[end:]
                own.num_found[index] = min(own.num_found[index], end)
            own.release_at[index] = policy.next_release(facts, num_processed_tokens, page_slots)
            if own.release_at[index] == NEVER or len(pages) != num_pages or not first:
                self._measure(request, table)
        request.shrinks_at = min(own.release_at)

    def _measure(self, request: Request, table: Table) -> None:
        """Store for how many tokens the pages of a page table suffice."""
        own, index = request.pages, table.index
        num_slots = len(own.small_pages[index]) * table.grain.page_slots
        own.max_tokens[index] = table.policy.max_tokens(
            request.facts, request.num_processed_tokens, num_slots
        )
        if own.has_missing[index]:
            own.max_tokens[index] = 0
        request.grows_at = min(own.max_tokens) + 1

    def needs(self, request: Request, num_tokens: int) -> list[int]:
        """Return the small pages to take in each page table for `num_tokens` tokens."""
        own = request.pages
        needs = [0] * len(self._tables)
        for index, max_tokens in enumerate(own.max_tokens):
            if num_tokens > max_tokens:
                table, pages = self._tables[index], own.small_pages[index]
                touched = table.policy.update_last_access(
                    request.facts, request.num_processed_tokens, num_tokens
                )
                needs[index] = -(-touched.stop // table.grain.page_slots) - len(pages)
                if own.has_missing[index]:
                    needs[index] += pages.count(MISSING)
        return needs

    def expect_own_large_pages(
        self, request: Request, needs: Sequence[int], expected: Sequence[int]
    ) -> Sequence[int]:
        """Raise the expected small pages, so that a long request opens large pages of its own.

        Pages of several requests in one large page are evicted together, and then most of them too
        early or too late. Parallel samples of one prompt still share large pages, until each sample
        has filled one with its own pages.
        """
        for index, need in enumerate(needs):
            if need and self._opens_own_large(request, index, need):
                expected = list(expected)
                expected[index] = max(expected[index], need + self._pages_per_own_large[index])
        return expected

    def _opens_own_large(self, request: Request, index: int, need: int) -> bool:
        """Whether a request is long, and has or takes enough own pages to fill a large page."""
        num_pages = len(request.pages.small_pages[index])
        num_own = num_pages - request.pages.num_found[index] + need
        return num_pages >= self._long_pages[index] and num_own >= self._pages_per_own_large[index]

    def next_needs(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]] | None:
        """Return what each page table needs, if none needs more than one page.

        Returns:
            For each page table that needs a page, its index, the expected small pages, and the
            tokens for which its pages then suffice. None if more pages are needed, or if one is
            missing.
        """
        own = request.pages
        found: list[tuple[int, int, int]] = []
        for index, max_tokens in enumerate(own.max_tokens):
            if num_tokens > max_tokens:
                table, num_pages = self._tables[index], len(own.small_pages[index])
                num_slots = (num_pages + 1) * table.grain.page_slots
                most_tokens = table.policy.max_tokens(
                    request.facts, request.num_processed_tokens, num_slots
                )
                if num_tokens > most_tokens or own.has_missing[index]:
                    return None
                is_long = self._opens_own_large(request, index, 1)
                expected = 1 + self._pages_per_own_large[index] if is_long else 1
                found.append((index, expected, most_tokens))
        return found

    def further_pages(
        self,
        request: Request,
        needs: Sequence[int],
        chunk_tokens: int,
        full_tokens: int,
        *,
        is_shared: bool,
    ) -> list[int]:
        """Return the small pages still to take before `full_tokens` tokens, at the peak.

        A held page counts against the peak if the request touches it until the end, or if giving it
        up makes room for another page. It makes no room if another request goes on using it.

        Args:
            request: The request.
            needs: Small pages that it takes in this step.
            chunk_tokens: Most tokens that a step computes.
            full_tokens: Number of tokens to reach.
            is_shared: Whether the request is counted as a user of all its pages. False while it is
                admitted with a hit.
        """
        facts = request.facts
        peaks = self._capacity.peak_pages(full_tokens, chunk_tokens=chunk_tokens, facts=facts)
        further: list[int] = []
        for table, peak, need in zip(self._tables, peaks, needs, strict=True):
            small_pages, pages = table.pages, request.pages.small_pages[table.index]
            at_end = table.policy.update_last_access(facts, full_tokens - 1, full_tokens)
            first = request.pages.num_given_up[table.index]
            lasting = min(max(first, table.pages_for(at_end).start), len(pages))
            num_kept = len(pages) - lasting
            if request.pages.has_missing[table.index]:
                num_kept -= pages[lasting:].count(MISSING)
            passing = {page for page in pages[first:lasting] if page > 0}
            if is_shared:
                num_kept += sum(page not in small_pages.extra_users for page in passing)
            else:
                num_kept += sum(small_pages.stamps[page] >= 0 for page in passing)
            further.append(max(need, peak - num_kept))
        return further

    def append_next(
        self,
        request: Request,
        needs: Sequence[tuple[int, int, int]],
        taken: Sequence[Sequence[SmallPageId]],
    ) -> None:
        """Append the pages that `next_needs` asked for.

        Args:
            request: The request.
            needs: The answer of `next_needs`.
            taken: For each page table, its new page, if it needs one.
        """
        own = request.pages
        for index, _, max_tokens in needs:
            own.small_pages[index] += taken[index]
            own.max_tokens[index] = max_tokens
        request.grows_at = min(own.max_tokens) + 1

    def append_found(self, request: Request, table: Table, pages: Sequence[SmallPageId]) -> None:
        """Append pages that were found in the cache, and gaps (`MISSING`) among them."""
        request.pages.small_pages[table.index] += pages
        request.pages.has_missing[table.index] = MISSING in pages
        self._measure(request, table)

    def truncate(self, request: Request, table: Table, num_pages: int) -> None:
        """Undo `append_found`: keep only the first `num_pages` pages of a page table."""
        del request.pages.small_pages[table.index][num_pages:]
        request.pages.has_missing[table.index] = False
        self._measure(request, table)

    def append(self, request: Request, taken: Sequence[list[SmallPageId]]) -> None:
        """Put new pages into the gaps of the page tables first, and append the others."""
        own = request.pages
        for index, new_pages in enumerate(taken):
            if not new_pages:
                continue
            table, pages = self._tables[index], own.small_pages[index]
            num_missing = 0
            if own.has_missing[index]:
                own.has_missing[index] = False
                holes = [number for number, page in enumerate(pages) if page == MISSING]
                num_missing = len(holes)
                for number, page in zip(holes, new_pages, strict=False):
                    pages[number] = page
            pages += new_pages[num_missing:] if num_missing else new_pages
            self._measure(request, table)

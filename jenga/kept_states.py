"""States kept for others: where, in which pages, and the copies they take.

A request writes over its running state in every step, so what is kept is a copy, and a request
that starts from a kept state starts with a copy of it.
"""

from collections.abc import Collection, Hashable, Sequence
from math import ceil

from jenga.allocator import Allocator
from jenga.eviction_order import EvictionOrder, Leaving, Prospect
from jenga.request import KeptState, PageCopy, PrefixHit, Request
from jenga.table import Table


class KeptStates:
    """Keeps states of the page tables that requests write over.

    Attributes:
        tables: Those page tables.
    """

    __slots__ = (
        "_ahead_tokens",
        "_all_tables",
        "_allocator",
        "_copies",
        "_hash_tokens",
        "_interval_tokens",
        "_order",
        "tables",
    )

    def __init__(
        self,
        tables: Sequence[Table],
        allocator: Allocator,
        order: EvictionOrder,
        *,
        hash_tokens: int,
        interval_tokens: int | None,
        ahead_tokens: int = 0,
    ) -> None:
        """Nothing kept.

        Args:
            tables: All page tables.
            allocator: Where pages for copies come from.
            order: How cached pages are ranked.
            hash_tokens: Tokens that each further prefix hash covers.
            interval_tokens: Distance between states kept within a prompt; 0 for none, None for
                what the bytes of a state allow.
            ahead_tokens: Tokens after a prefix that must be cached with it: the states to go on
                from are as much before the last that is.
        """
        self._all_tables = tables
        self.tables = tuple(table for table in tables if table.policy.is_overwritten)
        self._allocator = allocator
        self._order = order
        self._hash_tokens = hash_tokens
        if interval_tokens is None:
            interval_tokens = _interval_by_bytes(tables, hash_tokens)
        self._interval_tokens = interval_tokens
        self._ahead_tokens = ceil(ahead_tokens / hash_tokens) * hash_tokens
        self._copies: list[PageCopy] = []

    def checkpoint_tokens(self, request: Request, branches: Collection[int]) -> tuple[int, ...]:
        """Where a request's states are worth keeping.

        Args:
            request: Whose states.
            branches: Tokens after which a request that waits goes another way.

        Source: Marconi (arXiv 2411.19379), section 4 (branch points).
        """
        if not self.tables:
            return ()
        end = self._end_of_prompt(request)
        start = max((kept.num_tokens for kept in request.kept), default=0)
        shared = {request.branch_tokens, *branches}
        # Who waits to share more than this step reaches may come in next.
        reached = request.num_tokens // self._hash_tokens * self._hash_tokens
        if reached < max(branches, default=0):
            shared.add(reached)
        wanted = {end, *(num_tokens - self._ahead_tokens for num_tokens in shared)}
        if self._interval_tokens:
            interval = self._interval_tokens
            wanted.update(range((start // interval + 1) * interval, end, interval))
        return tuple(sorted(tokens for tokens in wanted if start < tokens <= end))

    def keep(self, request: Request, key: bytes, num_tokens: int, step: int) -> bool:
        """Copy a request's running states to pages of their own, if there are such pages.

        Args:
            request: Its last step ended at exactly `num_tokens` tokens, or its slots still hold
                the states after so many.
            key: Hash of those tokens.
            num_tokens: What went into the states.
            step: The time.
        """
        needs = [0] * len(self._allocator.tables)
        for table in self.tables:
            if table.cache is not None and table.cache.get(key) is None:
                needs[table.index] = 1
        taken = self._allocator.take(needs, needs, owner=request.owner)
        if taken is None:
            return False
        self.forget_evicted()
        end = self._end_of_prompt(request)
        if num_tokens in (end, request.branch_tokens - self._ahead_tokens):
            prospect = Prospect.HELD
        else:
            # The last one on the way may lie right before a question.
            is_last = num_tokens + max(self._interval_tokens, self._hash_tokens) >= end
            prospect = Prospect.NEAR if is_last else Prospect.PASSED
        for table in self.tables:
            if table.cache is None:
                continue
            for page in taken[table.index]:
                table.cache.enter([page], [key])
                leaving = Leaving(step, prospect, [num_tokens])
                table.pages.retire([page], table.ranks([page], leaving, self._order))
                self._copy(table, _running_page(request, table, num_tokens), page)
            request.kept.append(KeptState(table_index=table.index, key=key, num_tokens=num_tokens))
        return True

    def forget_evicted(self) -> None:
        """Let evicted pages no longer be found, nor what is left of a state that lost a part."""
        lost: list[Hashable] = []
        if len(self.tables) > 1:
            for table in self.tables:
                if table.cache is not None:
                    lost += [table.cache.keys[page] for page in table.pages.evicted]
        for table in self._all_tables:
            table.forget_evicted()
        for key in lost:
            for table in self.tables:
                table.drop(key)

    def start_from(self, request: Request, hit: PrefixHit) -> None:
        """Order the copies with which an admitted request starts from the states of its hit."""
        for table in self.tables:
            for source in hit.pages[table.index]:
                target = _running_page(request, table, hit.num_tokens)
                if source != target:
                    self._copy(table, source, target)
                key = hit.prefix_hashes[hit.num_tokens // self._hash_tokens - 1]
                request.kept.append(
                    KeptState(table_index=table.index, key=key, num_tokens=hit.num_tokens)
                )

    def renew_hit(self, hit: PrefixHit, step: int) -> None:
        """Let the states of a hit be the last to be evicted until they are copied."""
        for table in self.tables:
            leaving = Leaving(step, Prospect.HELD, [hit.num_tokens])
            self._renew(table, hit.pages[table.index], leaving)

    def renew_kept(self, request: Request) -> None:
        """Rank the states that a request kept or started from as the pages it leaves.

        Those that it kept at intervals stay what they are: from there nobody has gone on yet.
        """
        branches = (request.hit_tokens, request.branch_tokens - self._ahead_tokens)
        known = (*branches, self._end_of_prompt(request))
        for kept in request.kept:
            table = self._all_tables[kept.table_index]
            page = table.cache.get(kept.key) if table.cache is not None else None
            if page is not None and kept.num_tokens in known:
                prospect = Prospect.BRANCHED if kept.num_tokens in branches else Prospect.ENDED
                leaving = Leaving(request.step, prospect, [kept.num_tokens])
                self._renew(table, [page], leaving)

    def take_copies(self) -> list[PageCopy]:
        """Copies ordered since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def _end_of_prompt(self, request: Request) -> int:
        """Tokens of the last state worth keeping: the last of a prompt is always computed again."""
        asked_tokens = (request.facts.prompt_tokens - 1) // self._hash_tokens * self._hash_tokens
        return asked_tokens - self._ahead_tokens

    def _copy(self, table: Table, source: int, target: int) -> None:
        self._copies.append(PageCopy(table_index=table.index, source=source, target=target))

    def _renew(self, table: Table, pages: Sequence[int], leaving: Leaving) -> None:
        """Give a kept state another rank, as if it had been used and left."""
        if pages:
            ranks = table.ranks(pages, leaving, self._order)
            for page, rank in zip(pages, ranks, strict=True):
                table.pages.rerank(page, rank)


def _running_page(request: Request, table: Table, num_tokens: int) -> int:
    """The page of a request's state after so many tokens."""
    pages = request.pages[table.index]
    return pages[num_tokens % len(pages)]


def _interval_by_bytes(tables: Sequence[Table], hash_tokens: int) -> int:
    """Tokens whose keys and values take as many bytes as the states, in whole hashes; 0 for none.

    Kept more often, states would take more than half of the cache.
    """
    state_bytes = sum(t.spec.small_page_bytes for t in tables if t.policy.is_overwritten)
    kv_bytes_per_token = sum(
        table.spec.small_page_bytes / table.spec.tokens_per_page
        for table in tables
        if not table.policy.is_overwritten
    )
    if not kv_bytes_per_token:
        return 0
    return ceil(state_bytes / kv_bytes_per_token / hash_tokens) * hash_tokens

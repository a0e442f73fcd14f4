"""States kept for others: where, in which pages, and the copies they take.

A request writes over its running state in every step, so what is kept is a copy, and a request
that starts from a kept state starts with a copy of it.

States are worth their bytes at the ends of what was computed, since a conversation goes on from
there, and where requests went different ways. A state from which one request alone has gone on,
and kept a later one, is on the way between two such places.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from math import ceil

from jenga.allocator import Allocator
from jenga.eviction_order import EvictionOrder, Leaving, Prospect
from jenga.host_cache import HostCache
from jenga.large_pages import NULL_PAGE
from jenga.request import (
    CopyPath,
    KeptState,
    PageCopy,
    PrefixHit,
    Request,
    host_page,
    is_on_host,
)
from jenga.table import Table

ANSWER_TOKENS = 64
"""Tokens of an answer between two states kept: copies then take a 64th of what updates do."""

REMEMBERED_STATES = 1 << 16
"""Kept states of which it is known at most whether a request has gone on; first forgotten first."""


class KeptStates:
    """Keeps states of the page tables that requests write over.

    Attributes:
        tables: Those page tables.
        answer_tokens: Tokens of an answer between two states kept; 0 for none.
        num_replaced: States that made room for a later one of their request so far.
    """

    __slots__ = (
        "_ahead_tokens",
        "_all_tables",
        "_allocator",
        "_copies",
        "_gone_on",
        "_hash_tokens",
        "_host",
        "_interval_tokens",
        "_order",
        "answer_tokens",
        "num_replaced",
        "tables",
    )

    def __init__(  # noqa: PLR0913  all that says what is kept
        self,
        tables: Sequence[Table],
        allocator: Allocator,
        order: EvictionOrder,
        copies: list[PageCopy],
        *,
        hash_tokens: int,
        interval_tokens: int | None,
        answer_tokens: int = ANSWER_TOKENS,
        ahead_tokens: int = 0,
        host: HostCache | None = None,
    ) -> None:
        """Nothing kept.

        Args:
            tables: All page tables.
            allocator: Where pages for copies come from.
            order: How cached pages are ranked.
            copies: To which those are added that are to be made.
            hash_tokens: Tokens that each further prefix hash covers.
            interval_tokens: Distance between states kept within a prompt; 0 for none, None for
                what the bytes of a state allow.
            answer_tokens: Distance between states kept within an answer; 0 for none.
            ahead_tokens: Tokens after a prefix that must be cached with it: the states to go on
                from are as much before the last that is.
            host: Where evicted pages go, if they do not go for good.
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
        self._copies = copies
        self._host = host
        # Keys of states from which a request has gone on, in the order in which that was noted.
        self._gone_on: OrderedDict[Hashable, None] = OrderedDict()
        self.answer_tokens = answer_tokens
        self.num_replaced = 0

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
        shared = set(branches)
        if not request.hit_tokens or self._is_far(request.branch_tokens - request.hit_tokens):
            shared.add(request.branch_tokens)
        # Who waits to share more than this step reaches may come in next.
        reached = request.num_tokens // self._hash_tokens * self._hash_tokens
        if reached < max(branches, default=0):
            shared.add(reached)
        wanted = {end, *(num_tokens - self._ahead_tokens for num_tokens in shared)}
        if self._interval_tokens:
            interval = self._interval_tokens
            wanted.update(range((start // interval + 1) * interval, end, interval))
        return tuple(sorted(tokens for tokens in wanted if start < tokens <= end))

    def keep(
        self, request: Request, key: bytes, num_tokens: int, step: int, *, in_passing: bool = False
    ) -> bool:
        """Copy a request's running states to pages of their own, if there are such pages.

        Args:
            request: Its last step ended at exactly `num_tokens` tokens, or its slots still hold
                the states after so many.
            key: Hash of those tokens.
            num_tokens: What went into the states.
            step: The time.
            in_passing: Whether a step writes the pages on its way, so that no copies are made.
        """
        is_known = self._is_cached(key)
        answer = request.answer
        if is_known and key == answer:
            return True
        if answer is not None and not is_known and self._is_cached(answer):
            leaving = Leaving(step, Prospect.HELD, [num_tokens])
            self._replace(request, key, leaving, in_passing=in_passing)
            self._note(request, key, num_tokens)
            return True
        end = self._end_of_prompt(request)
        if num_tokens in (end, request.branch_tokens - self._ahead_tokens) or num_tokens > end:
            prospect = Prospect.HELD
        else:
            # The last one on the way may lie right before a question.
            is_last = num_tokens + max(self._interval_tokens, self._hash_tokens) >= end
            prospect = Prospect.NEAR if is_last else Prospect.PASSED
        leaving = Leaving(step, prospect, [num_tokens])
        if not is_known and not self._take(request, key, leaving, in_passing=in_passing):
            return False
        if num_tokens < end:
            self._note_gone_on(key)
        elif num_tokens == end or not any(kept.num_tokens > end for kept in request.kept):
            self._pass_on(request, num_tokens, step)
        if num_tokens > end:
            self._settle_answer(request, None if is_known else key, step)
        self._note(request, key, num_tokens)
        return True

    def forget_evicted(self) -> None:
        """Let evicted pages no longer be found, nor what is left of a state that lost a part."""
        lost: list[Hashable] = []
        for table in self.tables:
            if table.cache is not None:
                lost += [table.cache.keys[page] for page in table.pages.evicted]
        for table in self._all_tables:
            if self._host is not None and table.pages.evicted:
                self._host.store(table, table.pages.evicted, table.pages.evicted_ranks)
            table.forget_evicted()
        for key in lost:
            self._gone_on.pop(key, None)
        if len(self.tables) > 1:
            for key in lost:
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        """Let nothing of a state be found in the arena."""
        for table in self.tables:
            page = table.unused_page(key)
            if page is not None:
                if self._host is not None:
                    self._host.store(table, [page], [table.pages.rank(page)])
                table.drop(page)

    def start_from(self, request: Request, hit: PrefixHit) -> None:
        """Order the copies with which an admitted request starts from the states of its hit."""
        if not hit.num_tokens or not self.tables:
            return
        key = hit.prefix_hashes[hit.num_tokens // self._hash_tokens - 1]
        moves: list[tuple[Table, int, int]] = []
        for table in self.tables:
            for source in hit.pages[table.index]:
                moves.append((table, source, _running_page(request, table, hit.num_tokens)))
                request.kept.append(
                    KeptState(table_index=table.index, key=key, num_tokens=hit.num_tokens)
                )
        self._move([move for move in moves if not is_on_host(move[1]) and move[1] != move[2]])
        for table, source, target in moves:
            if is_on_host(source):
                self._copy(table, host_page(source), target, CopyPath.FROM_HOST)
        request.starts_at_branch = key in self._gone_on
        self._note_gone_on(key)

    def _move(self, moves: list[tuple[Table, int, int]]) -> None:
        """Order copies of one state's parts, each read before another one is written over it.

        In a full arena a request may have been given the very pages of the state: each is evicted
        at the last and holds its content until it is written.
        """
        while moves:
            for move in moves:
                table, source, target = move
                large = target // table.pages.pages_per_large
                if all(
                    other_source // other.pages.pages_per_large != large or other is table
                    for other, other_source, _ in moves
                ):
                    break
            else:
                # They stand in each other's place: one waits where nothing is kept.
                table, source, target = moves[0]
                self._copy(table, source, NULL_PAGE)
                moves[0] = table, NULL_PAGE, target
                continue
            moves.remove(move)
            self._copy(table, source, target)

    def renew_hit(self, hit: PrefixHit, step: int) -> None:
        """Let the states of a hit be the last to be evicted until they are copied."""
        for table in self.tables:
            leaving = Leaving(step, Prospect.HELD, [hit.num_tokens])
            for page in hit.pages[table.index]:
                if not is_on_host(page):
                    self._renew(table, page, leaving)

    def renew_kept(self, request: Request) -> None:
        """Rank the states that a request kept or started from as the pages it leaves.

        Those that it kept at intervals stay what they are: from there nobody has gone on yet.
        """
        branches, end = self._branches(request), self._end_of_prompt(request)
        known = {*branches, request.hit_tokens, end}
        kept_at = [kept.num_tokens for kept in request.kept]
        last = max([tokens for tokens in kept_at if tokens in known or tokens > end], default=0)
        for kept in request.kept:
            num_tokens = kept.num_tokens
            if num_tokens in branches:
                self._rank(kept, Prospect.BRANCHED, request.step)
            elif num_tokens == last:
                self._rank(kept, Prospect.ENDED, request.step)

    def reset(self) -> None:
        """Forget all that is known of cached states."""
        self._gone_on.clear()

    def _is_cached(self, key: Hashable) -> bool:
        """Whether a state is kept under a key; its parts are, or none of them."""
        for table in self.tables:
            if table.cache is not None and table.cache.get(key) is None:
                return False
        return True

    def _take(self, request: Request, key: bytes, leaving: Leaving, *, in_passing: bool) -> bool:
        """Order copies of a request's running states to new pages, if there are such pages."""
        needs = [0] * len(self._allocator.tables)
        for table in self.tables:
            if table.cache is not None and table.cache.get(key) is None:
                needs[table.index] = 1
        taken = self._allocator.take(needs, needs, owner=request.owner)
        if taken is None:
            return False
        self.forget_evicted()
        for table in self.tables:
            if table.cache is None:
                continue
            for page in taken[table.index]:
                table.cache.enter_page(page, key)
                table.pages.retire([page], table.ranks([page], leaving, self._order))
                if in_passing and self._host is not None:
                    self._host.note_unwritten(table, page)
                self._copy(table, _running_page(request, table, leaving.prefix_lengths[0]), page)
        return True

    def _replace(self, request: Request, key: bytes, leaving: Leaving, *, in_passing: bool) -> None:
        """Order copies of a request's running states to the pages of its answer's last one.

        Whoever starts from that in this step has its copies ordered before.
        """
        old, request.answer = request.answer, key
        self._drop_there(old)
        step, num_tokens = leaving.step, leaving.prefix_lengths[0]
        rank = self._order.rank(step, leaving.prospect, num_tokens)
        for table in self.tables:
            if table.cache is None or (page := table.cache.get(old)) is None:
                continue
            table.cache.forget((page,))
            table.cache.enter_page(page, key)
            if table.awaited:
                self._renew(table, page, leaving)
            else:
                table.pages.rerank(page, rank)
            if in_passing and self._host is not None:
                self._host.note_unwritten(table, page)
            self._copy(table, _running_page(request, table, num_tokens), page)
        request.kept = [kept for kept in request.kept if kept.key != old]
        self._gone_on.pop(old, None)
        self.num_replaced += 1

    def _settle_answer(self, request: Request, key: bytes | None, step: int) -> None:
        """Note the state of an answer that is a request's own, if any; hold another no longer."""
        for kept in request.kept:
            if kept.key == request.answer:
                self._rank(kept, Prospect.NEAR, step)
        self._drop_there(request.answer)
        request.answer = key

    def _drop_there(self, answer: bytes | None) -> None:
        """Let a state of an answer that there is a later one of be nowhere but in the arena."""
        if self._host is not None and answer is not None:
            for table in self.tables:
                self._host.drop(table, answer)

    def _note(self, request: Request, key: bytes, num_tokens: int) -> None:
        for table in self.tables:
            request.kept.append(KeptState(table_index=table.index, key=key, num_tokens=num_tokens))

    def _pass_on(self, request: Request, num_tokens: int, step: int) -> None:
        """Hold states no longer that a request has gone on from, alone, to a later end."""
        branches, end = self._branches(request), self._end_of_prompt(request)
        for kept in request.kept:
            if kept.num_tokens in (request.hit_tokens, end) and kept.num_tokens < num_tokens:
                self._note_gone_on(kept.key)
                if kept.num_tokens not in branches:
                    self._rank(kept, Prospect.NEAR, step)

    def _note_gone_on(self, key: Hashable) -> None:
        """Note that a request has gone on from a state, which may be in host memory alone."""
        self._gone_on[key] = None
        if len(self._gone_on) > REMEMBERED_STATES:
            self._gone_on.popitem(last=False)

    def _branches(self, request: Request) -> tuple[int, ...]:
        """Where requests have gone different ways, of the places where its states are kept."""
        branch_tokens, hit_tokens = request.branch_tokens - self._ahead_tokens, request.hit_tokens
        if request.starts_at_branch:
            return (branch_tokens, hit_tokens)
        # Where all that is known of the path ends at the hit, it may be what one request left.
        return (branch_tokens,) if branch_tokens > hit_tokens else ()

    def _is_far(self, num_tokens: int) -> bool:
        """Whether so many tokens after a kept state are worth keeping another one."""
        return not self.answer_tokens or num_tokens >= self.answer_tokens + self._hash_tokens

    def _rank(self, kept: KeptState, prospect: Prospect, step: int) -> None:
        table = self._all_tables[kept.table_index]
        page = table.cache.get(kept.key) if table.cache is not None else None
        if page is not None:
            self._renew(table, page, Leaving(step, prospect, [kept.num_tokens]))

    def _end_of_prompt(self, request: Request) -> int:
        """Tokens of the last state worth keeping: the last of a prompt is always computed again."""
        asked_tokens = (request.facts.prompt_tokens - 1) // self._hash_tokens * self._hash_tokens
        return asked_tokens - self._ahead_tokens

    def _copy(
        self, table: Table, source: int, target: int, path: CopyPath = CopyPath.IN_ARENA
    ) -> None:
        copy = PageCopy(table_index=table.index, source=source, target=target, path=path)
        self._copies.append(copy)

    def _renew(self, table: Table, page: int, leaving: Leaving) -> None:
        """Give a kept state another rank, as if it had been used and left."""
        if table.awaited:
            rank = table.ranks([page], leaving, self._order)[0]
        else:
            rank = self._order.rank(leaving.step, leaving.prospect, leaving.prefix_lengths[0])
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

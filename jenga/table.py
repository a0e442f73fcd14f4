"""One page table with everything the manager keeps for it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from jenga.allocator import Allocator
from jenga.eviction_order import (
    NOT_AWAITED,
    EvictionOrder,
    Leaving,
    Prospect,
    awaited_ranks,
    is_held,
    prefix_length,
)
from jenga.geometry import Geometry, PageTable
from jenga.landmarks import Landmark, landmarks, parts, prospect_of
from jenga.policies import Grain, LayerPolicy, policy_of
from jenga.prefix_cache import CacheChange, PrefixCache, RecordingCache
from jenga.request import Held, Request
from jenga.split_pages import SplitPages
from jenga.whole_pages import WholePages

# Python 3.11 takes as long to find a member of an enumeration as to call a function.
_ENDED, _HELD = Prospect.ENDED, Prospect.HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A page table: its geometry, its layer type's policy, its small pages and their content.

    Attributes:
        index: Its place in the geometry.
        spec: Its geometry.
        policy: What its layer type answers.
        grain: The units it is filled and cached in.
        pages: Which of its small pages are used, evictable and empty.
        cache: What lies in them; None where nothing is kept for others.
        awaited: Content that waiting requests will read -> their places in the queue, rising.
    """

    index: int
    spec: PageTable
    policy: LayerPolicy
    grain: Grain
    pages: WholePages | SplitPages
    cache: PrefixCache | None
    awaited: dict[Hashable, list[int]] = field(default_factory=dict[Hashable, list[int]])

    def pages_for(self, slots: range) -> range:
        """Numbers of the pages in which slots lie."""
        page_slots = self.grain.page_slots
        return range(slots.start // page_slots, -(-slots.stop // page_slots))

    def enter(self, request: Request, prefix_hashes: Sequence[bytes], end: int) -> bool:
        """Let others find the pages of a request that are not committed yet, up to one of them.

        What was computed again while an older page of the same content could not be hit takes that
        page's place, if nobody uses it: the new one is in use, and is wanted with what is before
        it. The older one becomes empty. Pages that no hash names yet wait for theirs.

        Returns:
            Whether older pages went.
        """
        start = request.committed[self.index]
        if self.cache is None or start >= end:
            return False
        keys = self.policy.content_keys(request.facts, prefix_hashes, self.grain, range(start, end))
        request.committed[self.index] = start + len(keys)
        pages = request.pages[self.index][start : start + len(keys)]
        if len(keys) == 1 and self.cache.enter_page(pages[0], keys[0]):
            return False
        others = self.cache.enter(pages, keys)
        if not others:
            return False
        replaced: list[int] = []
        for page, key, old in others:
            if self.pages.stamps[old] >= 0:
                self.cache.move(key, old, page)
                replaced.append(old)
        if replaced:
            self.pages.share(replaced)
            self.pages.release(replaced)
        return bool(replaced)

    def pass_by(self, request: Request, numbers: range, order: EvictionOrder) -> None:
        """Take a running request from pages that no later token of it reads."""
        if self.cache is None:
            self.pages.release(request.pages[self.index][numbers.start : numbers.stop])
            return
        marks = request.landmarks[self.index]
        if marks is None:
            # Where it started from may be where one text goes on: no branch until one leaves there.
            found, known = request.hit_tokens, request.branch_tokens
            branches = (known,) if known > found else ()
            marks = landmarks(
                self.policy,
                request.facts,
                self.grain,
                branches,
                expects_turn=request.expects_turn,
            )
            request.landmarks[self.index] = marks
        if len(numbers) == 1:
            self._pass_page(request, numbers, order, marks)
            return
        for part, prospect in parts(marks, numbers):
            if prospect >= Prospect.ENDED:
                self._hold(request, part, order, prospect)
            elif not self.awaited:
                self._leave(request, part, order, prospect)
            else:
                for some, is_awaited in self._by_waiting(request, part):
                    if is_awaited:
                        self._hold(request, some, order, Prospect.ENDED)
                    else:
                        self._leave(request, some, order, prospect)

    def _pass_page(
        self, request: Request, numbers: range, order: EvictionOrder, marks: Sequence[Landmark]
    ) -> None:
        """As `pass_by` for one page."""
        page = request.pages[self.index][numbers.start]
        key = self.cache.keys[page] if self.cache is not None else None
        if key is None:
            self.pages.release([page])
            return
        prospect = prospect_of(marks, numbers.start)
        is_awaited = key in self.awaited
        if is_awaited and prospect < _ENDED:
            prospect = _ENDED
        if prospect >= _ENDED:
            request.held.append((self.index, numbers, [(page, key)], prospect))
            prospect = _HELD
        length = self.policy.set_prefix_length(request.facts, numbers, self.grain)[0]
        if is_awaited:
            rank = self.ranks([page], Leaving(request.step, prospect, [length]), order)[0]
        else:
            rank = order.rank(request.step, prospect, length)
        self.pages.retire_page(page, rank)

    def _hold(
        self, request: Request, numbers: range, order: EvictionOrder, prospect: Prospect
    ) -> None:
        """Take a running request from pages that others may want."""
        request.held.append((self.index, numbers, self._named(request, numbers), prospect))
        self._leave(request, numbers, order, Prospect.HELD)

    def _by_waiting(self, request: Request, numbers: range) -> list[tuple[range, bool]]:
        """Divide pages by whether a waiting request will read them, in order."""
        keys, awaited = self.cache.keys if self.cache is not None else (), self.awaited
        pages = request.pages[self.index]
        found: list[tuple[range, bool]] = []
        start = numbers.start
        for is_awaited, some in groupby(numbers, lambda number: keys[pages[number]] in awaited):
            end = start + len(list(some))
            found.append((range(start, end), is_awaited))
            start = end
        return found

    def _named(self, request: Request, numbers: range) -> list[tuple[int, Hashable]]:
        """Pages of a request with the keys of their content, from the last on."""
        keys = self.cache.keys if self.cache is not None else ()
        pages = request.pages[self.index][numbers.start : numbers.stop]
        return [(page, keys[page]) for page in reversed(pages)]

    def end(self, request: Request, order: EvictionOrder) -> None:
        """Take a request that ends from the pages it has left."""
        first, end = request.first[self.index], len(request.pages[self.index])
        if self.cache is None:
            self.pages.release(request.pages[self.index][first:])
            return
        known = max(request.hit_tokens, request.branch_tokens) // self.grain.page_slots
        cut = first if self.policy.is_overwritten else min(max(first, known), end)
        if cut < end:
            self._leave(request, range(cut, end), order, Prospect.ENDED)
        if first < cut:
            self._leave(request, range(first, cut), order, Prospect.BRANCHED)

    def renew(self, request: Request, held: Held, order: EvictionOrder) -> None:
        """Rank pages that a request passed and that are still cached as those it leaves at its end.

        Who goes on from there needs both.
        """
        _, numbers, named, prospect = held
        if self.cache is None:
            return
        keys, stamps = self.cache.keys, self.pages.stamps
        lengths = self.policy.set_prefix_length(request.facts, numbers, self.grain)
        left = [
            (page, length)
            for (page, key), length in zip(named, reversed(lengths), strict=True)
            if key is not None and keys[page] == key and stamps[page] >= 0
        ]
        if left:
            pages = [page for page, _ in left]
            leaving = Leaving(request.step, prospect, [length for _, length in left])
            self.pages.share(pages)
            self.pages.retire(pages, self.ranks(pages, leaving, order))

    def rank_again(self, pages: list[int], step: int, order: EvictionOrder) -> None:
        """Rank cached pages without a user as if their last one had left in a step."""
        old_ranks = [self.pages.rank(page) for page in pages]
        for prospect in (Prospect.BRANCHED, Prospect.HELD):
            held = prospect == Prospect.HELD
            chosen = [
                (page, prefix_length(rank))
                for page, rank in zip(pages, old_ranks, strict=True)
                if is_held(rank) == held
            ]
            if chosen:
                some = [page for page, _ in chosen]
                leaving = Leaving(step, prospect, [length for _, length in chosen])
                ranks = self.ranks(some, leaving, order)
                self.pages.share(some)
                self.pages.retire(some, ranks)

    def ranks(self, pages: Sequence[int], leaving: Leaving, order: EvictionOrder) -> Sequence[int]:
        """Ranks of cached pages: by who reads them next where that is known, else by the order."""
        ranks, awaited = order.ranks(leaving), self.awaited
        if not awaited or self.cache is None:
            return ranks
        keys = self.cache.keys
        positions = [
            awaited[key][0] if (key := keys[page]) in awaited else NOT_AWAITED for page in pages
        ]
        return awaited_ranks(ranks, positions, leaving.prospect)

    def _leave(
        self, request: Request, numbers: range, order: EvictionOrder, prospect: Prospect
    ) -> None:
        """Take a request from some of its pages: cached ones become evictable, others empty."""
        pages = request.pages[self.index][numbers.start : numbers.stop]
        if self.cache is None:
            self.pages.release(pages)
            return
        keys = self.cache.keys
        # What was found in the cache stays there as long as it is used.
        computed = pages[max(0, request.found[self.index] - numbers.start) :]
        uncached = [page for page in computed if keys[page] is None]
        if len(uncached) == len(pages):
            self.pages.release(pages)
            return
        lengths = self.policy.set_prefix_length(request.facts, numbers, self.grain)
        cached = pages
        if uncached:
            self.pages.release(uncached)
            cached = [page for page in pages if keys[page] is not None]
            lengths = [
                length
                for page, length in zip(pages, lengths, strict=True)
                if keys[page] is not None
            ]
        if cached:
            ranks = self.ranks(cached, Leaving(request.step, prospect, lengths), order)
            self.pages.retire(cached, ranks)

    def unused_page(self, key: Hashable) -> int | None:
        """The page that is cached under a key and that nobody uses, if there is one."""
        page = self.cache.get(key) if self.cache is not None else None
        return page if page is not None and self.pages.stamps[page] >= 0 else None

    def drop(self, page: int) -> None:
        """Let a cached page that nobody uses be empty."""
        if self.cache is not None:
            self.cache.forget([page])
            self.pages.share([page])
            self.pages.release([page])

    def forget_evicted(self) -> None:
        """Let evicted pages no longer be found."""
        if self.pages.evicted and self.cache is not None:
            self.cache.forget(self.pages.evicted)
            self.pages.evicted.clear()
            self.pages.evicted_ranks.clear()


def build_tables(
    geometry: Geometry,
    allocator: Allocator,
    *,
    hash_tokens: int,
    prefix_caching: bool,
    changes: list[CacheChange] | None = None,
) -> tuple[Table, ...]:
    """The page tables of a geometry.

    Args:
        geometry: How the arena is cut.
        allocator: Where their pages come from.
        hash_tokens: Tokens that each further prefix hash covers.
        prefix_caching: Whether content is kept for others.
        changes: Where to note what can be found and what no longer; None not to.

    Raises:
        ValueError: Pages and prefix hashes do not divide each other, with prefix caching on.
    """
    tables: list[Table] = []
    for index, (spec, pages) in enumerate(zip(geometry.page_tables, allocator.tables, strict=True)):
        policy = policy_of(spec)
        grain = Grain(page_slots=spec.tokens_per_page, hash_tokens=hash_tokens)
        cache = None
        if prefix_caching:
            larger, smaller = sorted((grain.page_slots, hash_tokens), reverse=True)
            if larger % smaller:
                msg = (
                    f"hash_tokens must divide, or be a multiple of, the {grain.page_slots} tokens "
                    f"per page of {spec.name!r}, got {hash_tokens}"
                )
                raise ValueError(msg)
            num_pages = allocator.large_pages.num_pages * spec.small_pages_per_large_page
            if changes is None:
                cache = PrefixCache(num_pages, pages.row)
            else:
                cache = RecordingCache(num_pages, pages.row, index, changes)
        tables.append(
            Table(index=index, spec=spec, policy=policy, grain=grain, pages=pages, cache=cache)
        )
    return tuple(tables)

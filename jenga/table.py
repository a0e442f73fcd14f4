"""One page table with everything the manager keeps for it."""

from collections.abc import Hashable
from dataclasses import dataclass

from jenga.allocator import Allocator
from jenga.eviction_order import EvictionOrder, Leaving, Prospect
from jenga.geometry import Geometry, PageTable
from jenga.landmarks import landmarks, parts
from jenga.policies import Grain, LayerPolicy, policy_of
from jenga.prefix_cache import PrefixCache
from jenga.request import Held, Request
from jenga.split_pages import SplitPages
from jenga.whole_pages import WholePages


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
    """

    index: int
    spec: PageTable
    policy: LayerPolicy
    grain: Grain
    pages: WholePages | SplitPages
    cache: PrefixCache | None

    def pages_for(self, slots: range) -> range:
        """Numbers of the pages in which slots lie."""
        page_slots = self.grain.page_slots
        return range(slots.start // page_slots, -(-slots.stop // page_slots))

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
            marks = landmarks(self.policy, request.facts, self.grain, branches)
            request.landmarks[self.index] = marks
        for part, prospect in parts(marks, numbers):
            if prospect < Prospect.ENDED:
                self._leave(request, part, order, prospect)
            else:
                request.held.append((self.index, part, self._named(request, part), prospect))
                self._leave(request, part, order, Prospect.HELD)

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
            self.pages.retire(pages, order.ranks(leaving))

    def _leave(
        self, request: Request, numbers: range, order: EvictionOrder, prospect: Prospect
    ) -> None:
        """Take a request from some of its pages: cached ones become evictable, others empty."""
        pages = request.pages[self.index][numbers.start : numbers.stop]
        if self.cache is None:
            self.pages.release(pages)
            return
        keys = self.cache.keys
        if len(pages) == 1 and keys[pages[0]] is None:
            self.pages.release(pages)
            return
        lengths = self.policy.set_prefix_length(request.facts, numbers, self.grain)
        cached = [page for page in pages if keys[page] is not None]
        if len(cached) < len(pages):
            self.pages.release([page for page in pages if keys[page] is None])
            lengths = [
                length
                for page, length in zip(pages, lengths, strict=True)
                if keys[page] is not None
            ]
        if cached:
            ranks = order.ranks(Leaving(request.step, prospect, lengths))
            # The last page, of the longest prefix, goes first.
            cached.reverse()
            self.pages.retire(cached, ranks[::-1])

    def forget_evicted(self) -> None:
        """Let evicted pages no longer be found."""
        if self.pages.evicted and self.cache is not None:
            self.cache.forget(self.pages.evicted)
            self.pages.evicted.clear()


def build_tables(
    geometry: Geometry, allocator: Allocator, *, hash_tokens: int, prefix_caching: bool
) -> tuple[Table, ...]:
    """The page tables of a geometry.

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
            cache = PrefixCache(num_pages)
        tables.append(
            Table(index=index, spec=spec, policy=policy, grain=grain, pages=pages, cache=cache)
        )
    return tuple(tables)

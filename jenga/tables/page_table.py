"""A page table with the manager's data about it: policy, small pages, content and pins."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from jenga.arena.allocator import Allocator
from jenga.arena.ranks import LOADED_RANK, PINNED_RANK, RankClock
from jenga.arena.split_pages import SplitPages
from jenga.arena.whole_pages import WholePages
from jenga.errors import InvariantError
from jenga.eviction.checkpoint import Checkpoint
from jenga.geometry import Geometry, PageTable
from jenga.page_ids import SmallPageId
from jenga.policies import Grain, LayerPolicy, RequestFacts
from jenga.tables.content_index import ChangeLog, ContentIndex, RecordingIndex
from jenga.tables.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A page table: its geometry, its layer type's policy, its small pages and their content.

    Attributes:
        index: Place of the page table in the geometry.
        spec: Geometry of the page table.
        policy: Rules of its layer type.
        grain: Units in which it is filled and cached: slots of a page, tokens of a hash.
        pages: Records which of its small pages are used, evictable or empty.
        cache: Index of the content of its small pages. None without prefix caching.
        clock: Gives ranks in the eviction queue to pages that lose their last user.
        pins: Small page -> number of checkpoints that need it.
        checkpoint_of: Small page -> the checkpoint whose segment contains it, or None. Filled only
            in page tables that keep whole prefixes.
        orphans: Small pages that requests still used when their checkpoint was evicted to host
            memory. They are copied there when they are evicted themselves.
    """

    index: int
    spec: PageTable
    policy: LayerPolicy
    grain: Grain
    pages: WholePages | SplitPages
    cache: ContentIndex | None
    clock: RankClock
    pins: list[int] = field(default_factory=list[int])
    checkpoint_of: list[Checkpoint | None] = field(default_factory=list[Checkpoint | None])
    orphans: set[SmallPageId] = field(default_factory=set[SmallPageId])
    _segment_index: list[int] = field(default_factory=list[int])

    def pages_for(self, slots: range) -> range:
        """Return the numbers of the pages that contain the given slots."""
        page_slots = self.grain.page_slots
        return range(slots.start // page_slots, -(-slots.stop // page_slots))

    # Content

    def page_of(self, key: Hashable) -> SmallPageId | None:
        """Return the page that is cached under a key, or None."""
        return self.cache.get(key) if self.cache is not None else None

    def keys_of(self, pages: Sequence[SmallPageId]) -> list[Hashable]:
        """Return the key of each page's content, None where no request may find it."""
        keys = self.cache.keys if self.cache is not None else ()
        return [keys[page] for page in pages]

    def images_of(self, facts: RequestFacts, numbers: Collection[int]) -> set[Hashable]:
        """Return the contents of the images to which pages of a request belong.

        Args:
            facts: Facts of the request.
            numbers: Numbers of pages in its page table. Each belongs to an image with a name.
        """
        end = max(numbers, default=-1) + 1
        keys = self.policy.content_keys(facts, (), self.grain, range(end))
        return {cast("tuple[Hashable, int]", keys[number])[0] for number in numbers}

    def commit_pages(self, request: Request, prefix_hashes: Sequence[bytes], end: int) -> bool:
        """Let other requests find a request's pages from its first uncommitted one up to `end`.

        If another, unused page already holds the same content, the index points to the new page
        from now on, and the old one becomes empty. Pages without a hash yet are committed later.

        Returns:
            Whether older pages were replaced.
        """
        start = request.pages.num_committed[self.index]
        if self.cache is None or start >= end:
            return False
        keys = self.policy.content_keys(request.facts, prefix_hashes, self.grain, range(start, end))
        request.pages.num_committed[self.index] = start + len(keys)
        pages = request.pages.small_pages[self.index][start : start + len(keys)]
        if len(keys) == 1 and self.cache.insert_page(pages[0], keys[0]):
            return False
        others = self.cache.insert(pages, keys)
        if not others:
            return False
        number_of = dict(zip(pages, range(start, start + len(pages)), strict=True))
        replaced: list[SmallPageId] = []
        # The same content may occur twice in a request. Its older page is replaced once.
        for old, (page, key) in others.items():
            if self.pages.stamps[old] >= 0:
                if self.pins[old] and not self._replace_in_segment(old, page, number_of[page]):
                    continue
                self.cache.move(key, old, page)
                replaced.append(old)
                if old in self.orphans:
                    self.orphans.remove(old)
                    self.orphans.add(page)
        if replaced:
            self.pages.discard(replaced)
        return bool(replaced)

    def commit_missing(self, request: Request, end: int) -> bool:
        """Let other requests find committed pages before `end` that they cannot find so far.

        Returns:
            Whether there were any.
        """
        first = request.pages.num_given_up[self.index]
        end = min(end, request.pages.num_committed[self.index])
        if self.cache is None or first >= end:
            return False
        keys = self.policy.content_keys(
            request.facts, request.prefix_hashes, self.grain, range(first, end)
        )
        key_of = self.cache.keys
        pages = request.pages.small_pages[self.index]
        missing = [
            (pages[number], key)
            for number, key in enumerate(keys, first)
            if pages[number] > 0 and key_of[pages[number]] is None and self.cache.get(key) is None
        ]
        for page, key in missing:
            self.cache.insert_page(page, key)
        return bool(missing)

    def _replace_in_segment(self, old: SmallPageId, page: SmallPageId, number: int) -> bool:
        """Replace a checkpoint's page by another page of the same content.

        Return False if other checkpoints need the old page, or if it belongs to no segment.
        """
        node = self.checkpoint_of[old] if self.checkpoint_of else None
        if node is None or self.pins[old] > 1:
            return False
        index = self._segment_index[0]
        node.segment[index][number - node.first_pages[index]] = page
        self.checkpoint_of[old], self.checkpoint_of[page] = None, node
        self.pins[old], self.pins[page] = 0, 1
        return True

    def commit_state(self, page: SmallPageId, key: Hashable) -> None:
        """Let other requests find a state that was kept in a page of its own."""
        if self.cache is not None:
            self.cache.insert_page(page, key)

    def forget(self, page: SmallPageId) -> None:
        """Make a cached page impossible to find."""
        if self.cache is not None:
            self.cache.forget([page])
            self.orphans.discard(page)

    def discard(self, pages: Sequence[SmallPageId]) -> None:
        """Empty cached pages that no request uses and no checkpoint needs any more."""
        if self.cache is not None:
            self.cache.forget(pages)
            self.orphans.difference_update(pages)
            self.pages.discard(pages)
            self.pages.num_evicted_with_checkpoint += len(pages)

    def evicted_orphans(self) -> list[SmallPageId]:
        """Return evicted orphans that can still be found, in text order, to copy to host memory."""
        # Pages that lost their user together are evicted from the end of the text.
        return [page for page in reversed(self.pages.evicted) if page in self.orphans]

    def doubt_found(self, request: Request) -> None:
        """Record that pages which a request found in the cache may have left it since."""
        request.pages.num_found[self.index] = 0

    def forget_evicted(self) -> None:
        """Make evicted pages impossible to find."""
        if self.pages.evicted and self.cache is not None:
            self.cache.forget(self.pages.evicted)
            self.orphans.difference_update(self.pages.evicted)
            self.pages.evicted.clear()

    # Users

    def release_request(self, request: Request) -> None:
        """Release the pages that an ending request still has."""
        index = self.index
        first = request.pages.num_given_up[index]
        num_found = max(0, request.pages.num_found[index] - first)
        self.release_pages(request.pages.small_pages[index][first:], num_cached=num_found)

    def release_pages(self, pages: Sequence[SmallPageId], *, num_cached: int = 0) -> None:
        """Remove one user from each page. Unused pages become evictable if cached, else empty.

        Args:
            pages: The pages.
            num_cached: So many of the first ones are known to be cached.
        """
        if self.cache is None:
            self.pages.release(pages)
            return
        keys, pins = self.cache.keys, self.pins
        if len(pages) == 1:
            page = pages[0]
            if keys[page] is None:
                self.pages.release(pages)
            else:
                rank = (self.clock.pinned_ranks(1) if pins[page] else self.clock.loose_ranks(1))[0]
                self.pages.release_cached_page(page, rank)
            return
        uncached = [page for page in pages[num_cached:] if keys[page] is None]
        if uncached:
            self.pages.release(uncached)
            pages = [page for page in pages if keys[page] is not None]
        loose = [page for page in pages if not pins[page]]
        if loose:
            self.pages.release_cached(loose, self.clock.loose_ranks(len(loose)))
            if len(loose) == len(pages):
                return
            pages = [page for page in pages if pins[page]]
        if pages:
            self.pages.release_cached(pages, self.clock.pinned_ranks(len(pages)))

    # Checkpoints

    def begin_segments(self, index: int) -> None:
        """Let checkpoints have segments of this page table, at an index of their lists."""
        self._segment_index.append(index)
        self.checkpoint_of.extend([None] * len(self.pins))

    def assign_segment(
        self, pages: Sequence[SmallPageId], before: Checkpoint | None, after: Checkpoint | None
    ) -> None:
        """Change the checkpoint whose segment contains pages, for pages that belong to `before`.

        Args:
            pages: The pages.
            before: The checkpoint that they belong to so far. None for pages of no segment.
            after: The checkpoint that they belong to from now on, or None.
        """
        checkpoint_of = self.checkpoint_of
        for page in pages:
            if checkpoint_of[page] is before:
                checkpoint_of[page] = after

    def pin(self, pages: Sequence[SmallPageId]) -> int:
        """Record that a checkpoint needs pages. Return how many no other checkpoint needs."""
        pins, stamps = self.pins, self.pages.stamps
        new: list[SmallPageId] = []
        for page in pages:
            if not pins[page]:
                new.append(page)
            pins[page] += 1
        unused = [page for page in new if stamps[page] >= 0]
        if unused:
            self.pages.rerank(unused, self.clock.pinned_ranks(len(unused)))
        return len(new)

    def unpin(self, pages: Sequence[SmallPageId]) -> list[SmallPageId]:
        """Record that a checkpoint no longer needs pages.

        Returns:
            The pages that no checkpoint needs and no request uses now.
        """
        pins, stamps = self.pins, self.pages.stamps
        unused: list[SmallPageId] = []
        for page in pages:
            pins[page] -= 1
            if not pins[page] and stamps[page] >= 0:
                unused.append(page)
        return unused

    def unpin_all(self) -> None:
        """Forget which checkpoints need pages. Ranks in the eviction queue stay as they are."""
        self.pins[:] = [0] * len(self.pins)
        self.checkpoint_of[:] = [None] * len(self.checkpoint_of)
        self.orphans.clear()

    def check_pins(self, expected: Mapping[SmallPageId, int]) -> None:
        """Raise `InvariantError` unless pins are as expected, and ranks agree with them.

        Args:
            expected: Page -> number of checkpoints that need it, for all needed pages.
        """
        pinned = {page: count for page, count in enumerate(self.pins) if count}
        if pinned != expected:
            msg = (
                f"{self.spec.name!r}: checkpoints need {len(expected)} pages, "
                f"{len(pinned)} are pinned"
            )
            raise InvariantError(msg)
        keys, stamps = self.cache.keys if self.cache is not None else (), self.pages.stamps
        for page, key in enumerate(keys):
            if key is None or stamps[page] < 0:
                continue
            rank = self.pages.rank(SmallPageId(page))
            if (page in pinned) != (PINNED_RANK <= rank < LOADED_RANK) and rank < LOADED_RANK:
                msg = f"{self.spec.name!r}: page {page} has rank {rank}, pins {self.pins[page]}"
                raise InvariantError(msg)


def build_tables(
    geometry: Geometry,
    allocator: Allocator,
    *,
    hash_tokens: int,
    prefix_caching: bool,
    changes: ChangeLog | None = None,
) -> tuple[Table, ...]:
    """Build the page tables of a geometry.

    Args:
        geometry: Sizes of large and small pages, and the page tables.
        allocator: Allocator of their pages.
        hash_tokens: Number of tokens that each further prefix hash covers.
        prefix_caching: Whether content stays cached for other requests.
        changes: Records changes of cached content. None records no changes.

    Raises:
        ValueError: With prefix caching, neither of page size and `hash_tokens` divides the other.
    """
    tables: list[Table] = []
    clock = RankClock()
    for index, (spec, pages) in enumerate(zip(geometry.page_tables, allocator.tables, strict=True)):
        policy = spec.policy()
        grain = Grain(page_slots=spec.tokens_per_page, hash_tokens=hash_tokens)
        cache = None
        num_pages = allocator.large_pages.num_pages * spec.small_pages_per_large_page
        if prefix_caching:
            larger, smaller = sorted((grain.page_slots, hash_tokens), reverse=True)
            if larger % smaller:
                msg = (
                    f"hash_tokens must divide, or be a multiple of, the {grain.page_slots} tokens "
                    f"per page of {spec.name!r}, got {hash_tokens}"
                )
                raise ValueError(msg)
            if changes is None:
                cache = ContentIndex(num_pages, pages.ids_of_run)
            else:
                cache = RecordingIndex(num_pages, pages.ids_of_run, index, changes)
        tables.append(
            Table(
                index=index,
                spec=spec,
                policy=policy,
                grain=grain,
                pages=pages,
                cache=cache,
                clock=clock,
                pins=[0] * num_pages if prefix_caching else [],
            )
        )
    return tuple(tables)

"""The checkpoints that may be evicted, and the choice of the next one.

Checkpoints of the pool are compared by their worth (`jenga.eviction.policy`). Comparing all of them
would take longer the more there are, so some are drawn at random. Callers may ask ahead of
time what goes next. The answer then holds, unless the checkpoint is read before.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from random import Random

from jenga.arena.eviction_queue import NOT_QUEUED
from jenga.errors import InvariantError
from jenga.eviction.checkpoint import NOT_IN_POOL, Checkpoint
from jenga.eviction.points import RememberedPoints
from jenga.eviction.policy import EvictionPolicy
from jenga.page_ids import SmallPageId
from jenga.tables.page_table import Table
from jenga.tables.point_parts import PointParts

NUM_DRAWN = 64
"""Number of checkpoints that are drawn at random, of which the one worth least is evicted.

Comparing all checkpoints would choose slightly better, and takes longer the more there are.
"""

UPCOMING_SLACK = 1.25
"""Factor by which a checkpoint may exceed the bytes expected to be evicted, and still be next."""

PRICE_SHARE = 1 / 16
"""Share of the arena that sets how long the worth of the last evicted checkpoint is used.

It is used until so many more bytes are computed.
"""


class EvictionPool:
    """All kept checkpoints except those that waiting requests will read, and what goes next.

    The tree enters checkpoints and removes them. The pool only chooses among them: it evicts
    nothing, and pins and unpins no page.

    Attributes:
        awaited: Points that waiting requests will read -> positions of these requests in the wait
            queue, rising.
    """

    __slots__ = (
        "_named",
        "_nodes",
        "_parts",
        "_points",
        "_policy",
        "_prefixes",
        "_price",
        "_price_bytes",
        "_price_ends",
        "_protected",
        "_random",
        "_tables",
        "_upcoming",
        "awaited",
    )

    def __init__(
        self,
        parts: PointParts,
        policy: EvictionPolicy,
        points: RememberedPoints,
        named: Callable[[Hashable], Iterable[Checkpoint]],
        *,
        arena_bytes: int,
    ) -> None:
        """Create an empty pool.

        Args:
            parts: The page tables, by the part of a checkpoint that they have.
            policy: Says what checkpoints are worth.
            points: Tells the time.
            named: Returns the kept checkpoints that were made under a name.
            arena_bytes: Size of the arena.
        """
        self._parts = parts
        self._tables, self._prefixes = parts.tables, parts.prefixes
        self._policy = policy
        self._points = points
        self._named = named
        self._nodes: list[Checkpoint] = []
        self.awaited: dict[Hashable, list[int]] = {}
        self._protected: Checkpoint | None = None
        # Checkpoints chosen so far, the next one last.
        self._upcoming: list[Checkpoint] = []
        # Worth of the checkpoint that was evicted last, and the time until which it is used.
        self._price = self._price_ends = 0.0
        self._price_bytes = PRICE_SHARE * arena_bytes
        self._random = Random(0)

    # Checkpoints of the pool

    def enter(self, node: Checkpoint) -> None:
        """Add a kept checkpoint, unless a waiting request will read it."""
        if node.name not in self.awaited:
            node.place = len(self._nodes)
            self._nodes.append(node)

    def leave(self, node: Checkpoint) -> None:
        """Remove a checkpoint, if it is in the pool."""
        if node.place != NOT_IN_POOL:
            last = self._nodes.pop()
            if last is not node:
                self._nodes[node.place] = last
                last.place = node.place
            node.place = NOT_IN_POOL

    def await_point(self, key: Hashable, position: int) -> bool:
        """Record that a waiting request will read a point. Return whether it is the first one."""
        positions = self.awaited.setdefault(key, [])
        insort(positions, position)
        if len(positions) > 1:
            return False
        for node in self._named(key):
            self.leave(node)
        return True

    def await_no_more(self, key: Hashable, position: int) -> bool:
        """Record that a request no longer waits for a point. Return whether it was the last one."""
        positions = self.awaited[key]
        del positions[bisect_left(positions, position)]
        if positions:
            return False
        del self.awaited[key]
        for node in self._named(key):
            self.enter(node)
        return True

    def protect(self, node: Checkpoint | None) -> None:
        """Make a checkpoint the last to be evicted, until the next call: a hit will read it."""
        self._protected = node

    def clear(self) -> None:
        """Remove all checkpoints. Awaited points stay."""
        self._nodes.clear()
        self._upcoming.clear()
        self._protected = None

    def check(self, nodes: Iterable[Checkpoint]) -> None:
        """Raise `InvariantError` unless the pool has the checkpoints that it should have.

        Args:
            nodes: All nodes of the tree.
        """
        kept: set[int] = set()
        for node in nodes:
            if node.is_kept and node.name not in self.awaited:
                kept.add(id(node))
            if node.place != NOT_IN_POOL and self._nodes[node.place : node.place + 1] != [node]:
                msg = f"checkpoint after {node.num_tokens} tokens: in another place of the pool"
                raise InvariantError(msg)
        if kept != set(map(id, self._nodes)) or len(kept) != len(self._nodes):
            msg = f"{len(kept)} checkpoints may be evicted, {len(self._nodes)} are in the pool"
            raise InvariantError(msg)

    # The choice

    @property
    def weighs_guesses(self) -> bool:
        """Whether `worth` can be asked before a checkpoint is made."""
        return self._policy.weighs_guesses

    def worth(self, candidate: Checkpoint) -> float:
        """Return the worth of a checkpoint now."""
        return self._policy.worth(candidate, self._points.time)

    @property
    def price(self) -> float | None:
        """Worth of the checkpoint that was chosen last for eviction. None if that is long ago."""
        return self._price if self._points.time <= self._price_ends else None

    def choose(self) -> Checkpoint | None:
        """Return the checkpoint to be evicted now, or None. Its worth becomes the price."""
        node = self._victim()
        if node is not None:
            self.measure(node)
            self._price = self.worth(node)
            self._price_ends = self._points.time + self._price_bytes
        return node

    def _victim(self) -> Checkpoint | None:
        while self._upcoming:
            node = self._upcoming.pop()
            if node.place != NOT_IN_POOL and node is not self._protected:
                return node
        node = self.draw()
        if node is not None:
            return node
        # Waiting requests will read all checkpoints that would free memory. The one read last is
        # evicted.
        awaited = [
            (positions[0], node)
            for name, positions in self.awaited.items()
            for node in self._named(name)
            if node is not self._protected
        ]
        for _, node in sorted(awaited, key=lambda each: each[0], reverse=True):
            self.measure(node)
            if node.own_bytes:
                return node
        # All other checkpoints are in use, or about to be read.
        others = [*self._nodes, *(node for _, node in awaited)]
        protected = self._protected
        last = protected if protected is not None and protected.is_kept else None
        return next((each for each in others if each is not protected), last)

    def cancel(self, node: Checkpoint) -> None:
        """Choose another one instead of a checkpoint, now that its reader has come."""
        if node in self._upcoming:
            self._upcoming.remove(node)

    def next_rank(self) -> int:
        """Return the rank of the last use of the checkpoint that is evicted next.

        `choose` will return this one, unless it is read before. `NOT_QUEUED` if all checkpoints
        that would free memory are in use, or waiting requests will read them.
        """
        upcoming = self._upcoming
        while upcoming:
            rank = self._last_use(upcoming[-1])
            if rank != NOT_QUEUED:
                return rank
            upcoming.pop()
        node = self.draw()
        if node is None:
            return NOT_QUEUED
        upcoming.append(node)
        return self._last_use(node)

    def upcoming(self, num_bytes: int) -> list[tuple[Checkpoint, int]]:
        """Return the checkpoints to be evicted next, and the bytes that each will free.

        They are evicted in this order. A checkpoint without windows and states may go in part.

        Args:
            num_bytes: Bytes that the checkpoints have together, about.
        """
        self._upcoming = [node for node in self._upcoming if node.place != NOT_IN_POOL]
        found = set(map(id, self._upcoming))
        left = num_bytes - sum(node.own_bytes for node in self._upcoming)
        least, goes_whole = max(1, self._parts.unit_bytes), self._parts.has_point_pages
        while left >= least:
            node = self.draw(found)
            # A checkpoint that is evicted whole is not next if far fewer bytes will probably go.
            if node is None or (goes_whole and node.own_bytes > UPCOMING_SLACK * left):
                break
            found.add(id(node))
            self._upcoming.insert(0, node)
            left -= node.own_bytes
        chosen: list[tuple[Checkpoint, int]] = []
        left = num_bytes
        for node in reversed(self._upcoming):
            chosen.append((node, node.own_bytes if goes_whole else min(left, node.own_bytes)))
            left -= chosen[-1][1]
        return chosen

    def draw(self, chosen: Collection[int] = ()) -> Checkpoint | None:
        """Return the checkpoint worth least among some drawn ones. None if none frees memory.

        Args:
            chosen: Values of `id` of the checkpoints that were chosen already.
        """
        pool = self._nodes
        if len(pool) > NUM_DRAWN:
            node = self._least_of(self._random.choices(pool, k=NUM_DRAWN), chosen)
            if node is not None:
                return node
        return self._least_of(pool, chosen)

    def _least_of(self, nodes: Sequence[Checkpoint], chosen: Collection[int]) -> Checkpoint | None:
        time, worth = self._points.time, self._policy.worth
        least, victim = 0.0, None
        for node in nodes:
            if node is self._protected or id(node) in chosen:
                continue
            self.measure(node)
            if node.own_bytes:
                value = worth(node, time)
                if victim is None or value < least:
                    least, victim = value, node
        return victim

    # Bytes and pages that go with a checkpoint

    def measure(self, node: Checkpoint) -> None:
        """Count the tokens that a checkpoint saves, and the bytes that its eviction frees."""
        before = node.kept_before
        node.saved_tokens = node.num_tokens - (before.num_tokens if before is not None else 0)
        num_bytes = 0
        if node.point_pages:
            index, pages = node.point_pages[-1]
            # A request that goes on from here uses the end of a window for longest.
            if self._tables[index].pages.stamps[pages[-1]] >= 0:
                num_bytes = node.point_bytes
        node.own_bytes = num_bytes + sum(
            each.segment_bytes
            for each in self._leaving(node)
            if each.segment_bytes and not self._is_used(each)
        )

    def _last_use(self, node: Checkpoint) -> int:
        """Return the rank of the last use of what goes with a checkpoint in the pool.

        `NOT_QUEUED` if it cannot be evicted now, or would free no memory.
        """
        if node.place == NOT_IN_POOL or node is self._protected:
            return NOT_QUEUED
        # As in `measure`, the last page of each part tells whether it is used, and when it was.
        lasts = [(self._tables[index].pages, pages[-1]) for index, pages in node.point_pages[-1:]]
        lasts += [
            (self._prefixes[0].pages, each.segment[0][-1])
            for each in self._leaving(node)
            if each.segment_bytes
        ]
        ranks = [table.rank(page) for table, page in lasts if table.stamps[page] >= 0]
        return max(ranks, default=NOT_QUEUED)

    def pages_of(
        self, node: Checkpoint, num_bytes: int
    ) -> Iterator[tuple[Table, list[SmallPageId]]]:
        """Yield the pages that go with a checkpoint, by page table.

        Args:
            node: The checkpoint.
            num_bytes: Without windows and states, bytes at the end of its segment to which the
                pages are limited.
        """
        goes_whole = self._parts.has_point_pages
        for index, pages in node.point_pages:
            yield self._tables[index], pages
        for each in self._leaving(node):
            if not each.segment_bytes:  # An image has no segment.
                break
            share = 1.0 if goes_whole else min(1.0, num_bytes / each.segment_bytes)
            for table, pages in zip(self._prefixes, each.segment, strict=True):
                yield table, pages[len(pages) - int(share * len(pages)) :]
            if not goes_whole:
                break

    @staticmethod
    def _leaving(node: Checkpoint) -> Iterator[Checkpoint]:
        """Yield the nodes whose segments go with a checkpoint.

        These are the node itself, if it has no children, and the parents that nothing else needs.
        """
        num_others = 0
        while node.parent is not None and node.num_children == num_others:
            yield node
            node, num_others = node.parent, 1
            if node.is_kept:
                break

    def _is_used(self, node: Checkpoint) -> bool:
        """Whether a request uses the end of a segment, and therefore all of it."""
        return self._prefixes[0].pages.stamps[node.segment[0][-1]] < 0

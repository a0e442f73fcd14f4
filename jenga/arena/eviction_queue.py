"""The eviction queue: cached pages in the order in which they are evicted.

A *rank* is a non-negative integer. The lowest rank is evicted first.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import accumulate, chain, pairwise, repeat
from typing import Generic, TypeVar, cast

from jenga.errors import InvariantError

NOT_QUEUED = -1
"""Stamp of an item that is in no queue. `EvictionQueue.peek` returns it if the queue is empty."""

Item = TypeVar("Item", bound=int)
"""Kind of ids that a queue holds."""

SLACK_ENTRIES = 64
"""Number of stale entries that a queue may always hold.

Below this, a rebuild costs more than it frees.
"""


NUM_LANES = 4
"""Number of lanes. Ranks come in a few levels, each of which rises with time."""


class EvictionQueue(Generic[Item]):
    """Items `0..num_items - 1` by rank, lowest first, with lazy removal.

    An entry is `rank * num_items + item`. `stamps[item]` is the item's valid entry. Any other entry
    of the item is stale and skipped. Entries that arrive in rising order, as under LRU, cost O(1).
    Other entries go through a heap. Stale entries never outnumber the valid ones by more than a
    constant, because the queue is rebuilt before that.

    Attributes:
        num_queued: Number of items in the queue.
        stamps: Item -> its valid entry, or `NOT_QUEUED`.
    """

    __slots__ = (
        "_heap",
        "_lanes",
        "_num_entries",
        "_num_items",
        "num_queued",
        "stamps",
    )

    def __init__(self, num_items: int) -> None:
        """Create an empty queue for items `0..num_items - 1`."""
        self._num_items = num_items
        self._lanes: tuple[deque[int], ...] = tuple(deque() for _ in range(NUM_LANES))
        self._heap: list[int] = []
        self._num_entries = 0  # in lanes and heap, including stale ones
        self.stamps = [NOT_QUEUED] * num_items
        self.num_queued = 0

    def push(self, item: Item, rank: int) -> None:
        """Queue an item, or change the rank of a queued one."""
        entry = rank * self._num_items + item
        stamps = self.stamps
        old = stamps[item]
        if old == entry:
            return
        if old < 0:
            self.num_queued += 1
        stamps[item] = entry
        for lane in self._lanes:
            if not lane or entry > lane[-1]:
                lane.append(entry)
                break
        else:
            heappush(self._heap, entry)
        self._num_entries += 1
        if self._num_entries > 2 * self.num_queued + SLACK_ENTRIES:
            self._shrink()

    def _lane(self, entry: int) -> deque[int] | None:
        """Return a lane whose entries are all below an entry, or None."""
        for lane in self._lanes:
            if not lane or entry > lane[-1]:
                return lane
        return None

    def extend(self, items: Sequence[Item], ranks: Sequence[int]) -> None:
        """Queue items, none of which is queued yet. A range of them must rise by one."""
        if not items:
            return
        num_items, stamps = self._num_items, self.stamps
        if isinstance(items, range) and isinstance(ranks, range):
            first = ranks[0] * num_items + items[0]
            rises = repeat(ranks.step * num_items + 1, len(items) - 1)
            entries = list(accumulate(rises, initial=first))
        else:
            entries = [rank * num_items + item for item, rank in zip(items, ranks, strict=True)]
        if isinstance(items, range):
            stamps[items.start : items.stop] = entries
        else:
            for item, entry in zip(items, entries, strict=True):
                stamps[item] = entry
        entries.sort()
        lane = self._lane(entries[0])
        if lane is not None:
            lane.extend(entries)
        else:
            for entry in entries:
                heappush(self._heap, entry)
        self.num_queued += len(items)
        self._num_entries += len(items)
        if self._num_entries > 2 * self.num_queued + SLACK_ENTRIES:
            self._shrink()

    def drop(self, item: Item) -> None:
        """Remove an item. Do nothing if it is not queued."""
        if self.stamps[item] >= 0:
            self.stamps[item] = NOT_QUEUED
            self.num_queued -= 1

    def drop_many(self, items: Sequence[Item]) -> None:
        """Remove items, all of which are queued. A range of them must rise by one."""
        stamps = self.stamps
        if isinstance(items, range):
            stamps[items.start : items.stop] = [NOT_QUEUED] * len(items)
        else:
            for item in items:
                stamps[item] = NOT_QUEUED
        self.num_queued -= len(items)

    def peek(self) -> Item:
        """Return the item that is evicted next, or `NOT_QUEUED`."""
        entry = self._first()
        return cast("Item", entry % self._num_items if entry >= 0 else NOT_QUEUED)

    def peek_rank(self) -> int:
        """Return the rank of the item that is evicted next, or `NOT_QUEUED`."""
        entry = self._first()
        return entry // self._num_items if entry >= 0 else NOT_QUEUED

    def rank(self, item: Item) -> int:
        """Return the rank of a queued item."""
        return self.stamps[item] // self._num_items

    def in_order(self) -> Iterator[Item]:
        """Yield the items in eviction order. The queue must not change meanwhile."""
        self._first()
        num_items, stamps, last = self._num_items, self.stamps, NOT_QUEUED
        for entry in merge(*self._lanes, _rising(self._heap)):
            item = entry % num_items
            # An item that came in again with the rank it had has an entry twice.
            if stamps[item] == entry != last:
                last = entry
                yield cast("Item", item)

    def clear(self) -> None:
        """Remove every item."""
        for lane in self._lanes:
            lane.clear()
        self._heap.clear()
        self._num_entries = 0
        self.stamps[:] = [NOT_QUEUED] * self._num_items
        self.num_queued = 0

    def _first(self) -> int:
        num_items, stamps, heap = self._num_items, self.stamps, self._heap
        first = NOT_QUEUED
        for lane in self._lanes:
            while lane and stamps[lane[0] % num_items] != lane[0]:
                lane.popleft()
                self._num_entries -= 1
            if lane and (first < 0 or lane[0] < first):
                first = lane[0]
        while heap and stamps[heap[0] % num_items] != heap[0]:
            heappop(heap)
            self._num_entries -= 1
        return heap[0] if heap and (first < 0 or heap[0] < first) else first

    def _shrink(self) -> None:
        """Drop the stale entries at the front, or all of them if too many are left after that.

        Most stale entries are at the front.
        """
        self._first()
        if self._num_entries <= 2 * self.num_queued + SLACK_ENTRIES:
            return
        num_items, stamps = self._num_items, self.stamps
        # An item that came in again with the rank it had has an entry twice.
        entries = chain.from_iterable((*self._lanes, self._heap))
        valid = sorted({e for e in entries if stamps[e % num_items] == e})
        for lane in self._lanes:
            lane.clear()
        self._heap.clear()
        self._lanes[0].extend(valid)
        self._num_entries = len(valid)

    def check(self) -> None:
        """Raise `InvariantError` unless valid entries are exactly those of the stamped items."""
        entries = [*chain.from_iterable(self._lanes), *self._heap]
        if len(entries) != self._num_entries:
            msg = f"the queue has {len(entries)} entries, {self._num_entries} are counted"
            raise InvariantError(msg)
        valid = {e for e in entries if self.stamps[e % self._num_items] == e}
        stamped = {stamp for stamp in self.stamps if stamp >= 0}
        if valid != stamped or len(stamped) != self.num_queued:
            msg = (
                f"{len(stamped)} items are stamped, {len(valid)} entries are valid, "
                f"{self.num_queued} are counted"
            )
            raise InvariantError(msg)
        if any(a >= b for lane in self._lanes for a, b in pairwise(lane)):
            msg = "a lane of the queue does not rise"
            raise InvariantError(msg)


def _rising(heap: Sequence[int]) -> Iterator[int]:
    """Yield the entries of a heap in rising order. Only entries that are read take time."""
    reachable = [(heap[0], 0)] if heap else []
    while reachable:
        entry, place = heappop(reachable)
        yield entry
        for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heappush(reachable, (heap[below], below))

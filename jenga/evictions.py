"""Telling of evictions whoever knows pages by their content."""

from jenga.allocator import Allocator
from jenga.eviction_order import EvictionOrder
from jenga.kept_states import KeptStates


class Evictions:
    """Notes what was evicted since it was asked last."""

    __slots__ = ("_large_pages", "_num_noted", "_order", "_states")

    def __init__(self, allocator: Allocator, order: EvictionOrder, states: KeptStates) -> None:
        """Nothing was evicted.

        Args:
            allocator: Books of the arena.
            order: Told when and at which rank.
            states: Told of states that lost a part, as the cache is of what cannot be found.
        """
        self._large_pages = allocator.large_pages
        self._order = order
        self._states = states
        self._num_noted = 0

    def note(self, step: int) -> None:
        """Let evicted pages no longer be found."""
        num_evicted = self._large_pages.num_evicted
        if num_evicted != self._num_noted:
            self._num_noted = num_evicted
            self._order.evicted(self._large_pages.last_evicted_rank, step)
            self._states.forget_evicted()

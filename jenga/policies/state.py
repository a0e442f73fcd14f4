"""State: a recurrent layer's memory of fixed size."""

from dataclasses import dataclass

from jenga.policies.base import NEVER, RequestFacts


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Keeps one slot, the running state; a prefix is hit where a state was kept."""

    def update_last_access(
        self, _facts: RequestFacts, _num_processed_tokens: int, _num_tokens: int, /
    ) -> range:
        """The one slot."""
        return range(1)

    def next_release(
        self, _facts: RequestFacts, _num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Never."""
        return NEVER

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """One state serves any number of tokens."""
        return NEVER if num_slots else 0

    def peak_slots(self, _facts: RequestFacts, _num_tokens: int, _chunk_tokens: int, /) -> int:
        """The one slot."""
        return 1

    def set_prefix_length(self, _facts: RequestFacts, _slot_end: int, /) -> int:
        """The running state is never cached."""
        return 0

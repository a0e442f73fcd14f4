"""State: a recurrent layer's memory of fixed size."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from jenga.checks import check_count
from jenga.policies.base import NEVER, Grain, RequestFacts


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Keeps the running state; a prefix is hit where a state was kept.

    What is cached is not the running state but copies of it, one for each prefix hash at which
    one was kept.

    Attributes:
        num_slots: Slots of a request, a page each. The state after so many tokens is in that of
            their number modulo the slots: where tokens of a step may be rejected, the next one
            finds the state after the last token accepted, whichever that is.
    """

    num_slots: int = 1

    is_overwritten = True
    names_images = False

    def __post_init__(self) -> None:
        check_count("num_slots", self.num_slots, least=1)

    def check_facts(self, _facts: RequestFacts, /) -> None:
        """Any request is served."""

    def update_last_access(
        self, _facts: RequestFacts, _num_processed_tokens: int, _num_tokens: int, /
    ) -> range:
        """All slots: the step reads one of them, and may write each."""
        return range(self.num_slots)

    def next_release(
        self, _facts: RequestFacts, _num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Never."""
        return NEVER

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """The slots serve any number of tokens."""
        return NEVER if num_slots >= self.num_slots else 0

    def peak_slots(self, _facts: RequestFacts, _num_tokens: int, _chunk_tokens: int, /) -> int:
        """All slots."""
        return self.num_slots

    def unfilled_slots(self, _facts: RequestFacts, _pages: range, /) -> Mapping[int, int]:
        """All may be filled."""
        return {}

    def set_prefix_length(
        self, _facts: RequestFacts, pages: range, grain: Grain, /
    ) -> Sequence[int]:
        """Tokens that went into the state kept at that prefix hash."""
        step = grain.hash_tokens
        return range((pages.start + 1) * step, (pages.stop + 1) * step, step)

    def final_pages(self, _facts: RequestFacts, _num_tokens: int, _grain: Grain, /) -> int:
        """The running state is never final."""
        return 0

    def content_keys(
        self, _facts: RequestFacts, prefix_hashes: Sequence[bytes], _grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """One for each prefix hash."""
        return prefix_hashes[pages.start : pages.stop]

    def get_possible_prefix(
        self, _facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """The last prefix hash at which a state was kept."""
        end = min(len(is_hit), at_most_tokens // grain.hash_tokens)
        while end and is_hit[end - 1] is None:
            end -= 1
        return end * grain.hash_tokens

    def reused_pages(
        self, _facts: RequestFacts, _is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """The state kept there."""
        end = num_tokens // grain.hash_tokens
        return range(max(0, end - 1), end)

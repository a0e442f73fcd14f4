"""State: a recurrent layer's memory of fixed size."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from jenga.checks import check_count
from jenga.policies.base import NEVER, Grain, RequestFacts


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Keeps the running state. A prefix is hit where a state was kept.

    Cached pages do not hold the running state but copies of it, one for each prefix hash at which a
    copy was kept.

    Attributes:
        num_slots: Number of slots of a request, each on a page of its own. The state after n tokens
            is in slot `n % num_slots`. If tokens of a step are rejected, the next step finds the
            state after the last accepted token.
    """

    num_slots: int = 1

    is_overwritten = True
    names_images = False

    def __post_init__(self) -> None:
        check_count("num_slots", self.num_slots, least=1)

    def check_facts(self, _facts: RequestFacts, /) -> None:
        """Do nothing. Any request is served."""

    def update_last_access(
        self, _facts: RequestFacts, _num_processed_tokens: int, _num_tokens: int, /
    ) -> range:
        """Return all slots. The step reads one of them, and may write each."""
        return range(self.num_slots)

    def next_release(
        self, _facts: RequestFacts, _num_processed_tokens: int, _page_slots: int, /
    ) -> int:
        """Return `NEVER`."""
        return NEVER

    def max_tokens(
        self, _facts: RequestFacts, _num_processed_tokens: int, num_slots: int, /
    ) -> int:
        """Return `NEVER` if there are all slots, else 0: they serve any number of tokens."""
        return NEVER if num_slots >= self.num_slots else 0

    def peak_slots(self, _facts: RequestFacts, _num_tokens: int, _chunk_tokens: int, /) -> int:
        """Return the number of all slots."""
        return self.num_slots

    def unfilled_slots(self, _facts: RequestFacts, _pages: range, /) -> Mapping[int, int]:
        """Return nothing, since all slots may be filled."""
        return {}

    def set_prefix_length(
        self, _facts: RequestFacts, pages: range, grain: Grain, /
    ) -> Sequence[int]:
        """Return the number of tokens in the state kept at each prefix hash."""
        step = grain.hash_tokens
        return range((pages.start + 1) * step, (pages.stop + 1) * step, step)

    def final_pages(self, _facts: RequestFacts, _num_tokens: int, _grain: Grain, /) -> int:
        """Return 0. The running state is never final."""
        return 0

    def content_keys(
        self, _facts: RequestFacts, prefix_hashes: Sequence[bytes], _grain: Grain, pages: range, /
    ) -> Sequence[Hashable]:
        """Return one key for each prefix hash."""
        return prefix_hashes[pages.start : pages.stop]

    def get_possible_prefix(
        self, _facts: RequestFacts, is_hit: Sequence[object], grain: Grain, at_most_tokens: int, /
    ) -> int:
        """Return the longest prefix after which a state was kept."""
        end = min(len(is_hit), at_most_tokens // grain.hash_tokens)
        while end and is_hit[end - 1] is None:
            end -= 1
        return end * grain.hash_tokens

    def reused_pages(
        self, _facts: RequestFacts, _is_hit: Sequence[object], grain: Grain, num_tokens: int, /
    ) -> Sequence[int]:
        """Return the page of the state kept at the prefix's end."""
        end = num_tokens // grain.hash_tokens
        return range(max(0, end - 1), end)

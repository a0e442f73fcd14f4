"""The questions a layer type answers about its slots.

A policy is pure: same question, same answer. It knows tokens and the slots of one page table
(slot 0 is the first of page 0), neither pages nor their ids. "Processed" tokens are those whose
step is over; the next query is token number `num_processed_tokens`. Ranges are half-open.
"""

from dataclasses import dataclass
from typing import Protocol

NEVER = 1 << 62
"""A number of tokens that no request reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is known of a request from its arrival on.

    Attributes:
        prompt_tokens: Tokens of its prompt.
    """

    prompt_tokens: int = 0


class LayerPolicy(Protocol):
    """How requests use the slots of one layer type.

    Source: Jenga paper, section 5 (`update_last_access`, `set_prefix_length`,
    `get_possible_prefix`). There they change the evictor's books; here they say what to change.
    """

    def update_last_access(
        self, facts: RequestFacts, num_processed_tokens: int, num_tokens: int, /
    ) -> range:
        """Slots that the step computing tokens `num_processed_tokens..num_tokens` touches.

        Their pages carry that step's time. No later step touches a slot outside the range that
        was there before: such pages keep the time of the step before and are given up.
        """
        ...

    def next_release(
        self, facts: RequestFacts, num_processed_tokens: int, page_slots: int, /
    ) -> int:
        """Processed tokens at which the touched slots next leave a page, or `NEVER`.

        Args:
            facts: Of the request.
            num_processed_tokens: Processed tokens now.
            page_slots: Slots of a page.
        """
        ...

    def max_tokens(self, facts: RequestFacts, num_processed_tokens: int, num_slots: int, /) -> int:
        """Most tokens for which so many slots suffice, or `NEVER`."""
        ...

    def peak_slots(self, facts: RequestFacts, num_tokens: int, chunk_tokens: int, /) -> int:
        """Most slots touched by one step until `num_tokens` tokens are computed, in such chunks."""
        ...

    def set_prefix_length(self, facts: RequestFacts, slot_end: int, /) -> int:
        """Place of a page that ends there among those of equal time, in tokens.

        The greatest goes first; pages of the same tokens agree in every layer type.
        """
        ...

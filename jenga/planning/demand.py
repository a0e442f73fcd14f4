"""Expected memory of a request of a given length, per layer type, and the waste in it.

These are expectations for planning and for tables. The manager counts the real pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.checks import check_positive
from jenga.geometry import Geometry
from jenga.layer_type import LayerType

TYPICAL_TOKENS = (512, 1024, 2048, 4096, 8192, 32768)
"""Request lengths over which a plan is averaged.

Short requests give weight to the states, long ones to the padding.
"""

UNSHARED_TAIL = 0.02
"""Share of a request's last, partly filled large page that no other request fills.

It was measured in full arenas (perf/sweeps/table_waste.py): 0.01 in full attention, 0.05 in sliding
windows. Plans made for 0.05 waste as much and have more page tables.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Shares, 0 to 1, of the bytes held by requests of one length that hold no data.

    Attributes:
        padding: Bytes of small pages that no slot covers.
        last_page: Held slots that the next token does not need.
        tail: Empty small pages in large pages that a request shares with no other request.
    """

    padding: float
    last_page: float
    tail: float

    @property
    def total(self) -> float:
        """Sum of all shares."""
        return self.padding + self.last_page + self.tail


def check_lengths(typical_tokens: Sequence[int]) -> None:
    """Refuse request lengths that cannot be averaged over.

    Raises:
        ValueError: There is no length, or one is not a positive integer.
    """
    if not typical_tokens:
        msg = "typical_tokens must name at least one length"
        raise ValueError(msg)
    for num_tokens in typical_tokens:
        check_positive("planner", "every length of typical_tokens", num_tokens)


def needed_tokens(layer_type: LayerType, num_tokens: int) -> int:
    """Return the number of tokens that the next token of a request reads, or a state's slots."""
    return len(layer_type.needed_slots(num_tokens))


def held_pages(layer_type: LayerType, tokens_per_page: int, num_tokens: int) -> int:
    """Return the number of small pages that hold the tokens of `needed_tokens`."""
    needed = layer_type.needed_slots(num_tokens)
    return -(-needed.stop // tokens_per_page) - needed.start // tokens_per_page


def expected_waste(geometry: Geometry, typical_tokens: Sequence[int] = TYPICAL_TOKENS) -> Waste:
    """Return the waste of requests in the middle of decoding, averaged over their lengths.

    Args:
        geometry: Any geometry.
        typical_tokens: Lengths to average over. Image embeddings count at their peak.

    Raises:
        ValueError: There is no length, or one is not a positive integer.
    """
    check_lengths(typical_tokens)
    padding = last_page = tail = 0.0
    for num_tokens in typical_tokens:
        held_bytes = padding_bytes = unneeded_bytes = tail_bytes = 0.0
        for table in geometry.page_tables:
            num_pages = held_pages(table.layer_type, table.tokens_per_page, num_tokens)
            num_slots = num_pages * table.slots_per_page
            held_bytes += num_pages * table.small_page_bytes
            padding_bytes += num_pages * table.padding_bytes
            needed_slots = needed_tokens(table.layer_type, num_tokens) / (
                table.tokens_per_page / table.slots_per_page
            )
            unneeded_bytes += (num_slots - needed_slots) * table.slot_bytes
            if num_pages and not table.layer_type.is_packed:
                tail_bytes += (
                    UNSHARED_TAIL * (geometry.large_page_bytes - table.small_page_bytes) / 2
                )
        held_bytes += tail_bytes
        padding += padding_bytes / held_bytes / len(typical_tokens)
        last_page += unneeded_bytes / held_bytes / len(typical_tokens)
        tail += tail_bytes / held_bytes / len(typical_tokens)
    return Waste(padding=padding, last_page=last_page, tail=tail)

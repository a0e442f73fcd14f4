"""The parts of a point of a text: the page tables that have them, and their bytes.

A request goes on from a point with the keys and values of the whole prefix, the windows before the
point, and the states after it. Each page table of texts has one of these parts. Images belong to no
text.
"""

from collections.abc import Sequence
from math import lcm

from jenga.policies import NEVER, RequestFacts
from jenga.tables.page_table import Table

LITTLE_SHARE = 1 / 8
"""Largest share of the bytes that a prompt finds which it may take itself and still takes little.

A state is often a quarter of the keys and values that go with it. Many requests with states of
their own would take the memory of what they read.
"""

WINDOW_AFTER_TOKENS = (1 << 20) - 16
"""Place in a text at which the bytes of windows are counted."""


def checkpoint_unit(tables: Sequence[Table], hash_tokens: int) -> int:
    """Get the number of tokens of which places of checkpoints are multiples.

    There, a hash ends and all pages of texts are full.

    Args:
        tables: All page tables.
        hash_tokens: Number of tokens that each further prefix hash covers.
    """
    return lcm(hash_tokens, *(table.grain.page_slots for table in _tables_of_text(tables)))


def _tables_of_text(tables: Sequence[Table]) -> list[Table]:
    """Get the page tables that have pages for each part of a text."""
    return [
        table
        for table in tables
        if not table.policy.is_overwritten and not table.policy.names_images
    ]


class PointParts:
    """The page tables of one arena, by the part of a point that they have.

    Attributes:
        tables: All page tables, also those of images.
        prefixes: Page tables of keys and values of whole prefixes.
        windows: Page tables of windows.
        states: Page tables of states.
        hash_tokens: Number of tokens that each further prefix hash covers.
        align_tokens: Points are at multiples of this number of tokens.
        ahead_tokens: Number of tokens after a point that are cached with it.
        has_point_pages: Whether a point needs more than the keys and values of its prefix.
        token_bytes: Bytes of a point per token before it.
        fixed_bytes: Bytes of its windows and states, in addition.
    """

    __slots__ = (
        "ahead_tokens",
        "align_tokens",
        "fixed_bytes",
        "has_point_pages",
        "hash_tokens",
        "prefixes",
        "states",
        "tables",
        "token_bytes",
        "windows",
    )

    def __init__(self, tables: Sequence[Table], *, hash_tokens: int, ahead_tokens: int) -> None:
        """Sort the page tables.

        Args:
            tables: All page tables.
            hash_tokens: Number of tokens that each further prefix hash covers.
            ahead_tokens: Number of tokens after a point that must be cached with it.
        """
        self.tables = tables
        self.hash_tokens = hash_tokens
        self.align_tokens = checkpoint_unit(tables, hash_tokens)
        self.ahead_tokens = -(-ahead_tokens // self.align_tokens) * self.align_tokens
        facts = RequestFacts(prompt_tokens=1)
        of_text = _tables_of_text(tables)
        self.prefixes = [
            table
            for table in of_text
            if table.policy.next_release(facts, 0, table.grain.page_slots) == NEVER
        ]
        self.windows = [table for table in of_text if table not in self.prefixes]
        self.states = [table for table in tables if table.policy.is_overwritten]
        self.has_point_pages = bool(self.windows or self.states)
        self.token_bytes = _bytes_per_token(self.prefixes)
        self.fixed_bytes = self._window_bytes() + self.state_bytes

    def _window_bytes(self) -> int:
        facts = RequestFacts(prompt_tokens=NEVER)
        num_bytes = 0
        for table in self.windows:
            pages = table.policy.reused_pages(facts, (), table.grain, WINDOW_AFTER_TOKENS)
            num_bytes += len(pages) * table.spec.small_page_bytes
        return num_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states after a point."""
        return sum(table.spec.small_page_bytes for table in self.states)

    @property
    def unit_bytes(self) -> int:
        """Bytes of the keys and values between two neighbouring places of points."""
        return sum(
            self.align_tokens // table.grain.page_slots * table.spec.small_page_bytes
            for table in self.prefixes
        )

    def takes_little(self, *, hit_tokens: int, asked_tokens: int) -> bool:
        """Whether a prompt takes little memory beside the keys and values that it finds.

        Args:
            hit_tokens: Number of tokens that it starts from.
            asked_tokens: Number of tokens that it could have started from.
        """
        found_bytes = self.token_bytes * hit_tokens
        new_bytes = _bytes_per_token([*self.prefixes, *self.windows])
        taken_bytes = new_bytes * (asked_tokens - hit_tokens) + self.state_bytes
        return taken_bytes <= LITTLE_SHARE * found_bytes


def _bytes_per_token(tables: Sequence[Table]) -> float:
    return sum(table.spec.small_page_bytes / table.grain.page_slots for table in tables)

"""A record of every checkpoint that was lost: the request that left it, and the reason.

Loose pages are not recorded. No checkpoint needs them, so their eviction shortens no prefix that a
checkpoint promises. `jenga.tables.stats.CacheReport` counts them by cause.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Kind, Past, Point
from jenga.prefix.miss_log import LOOSE, Loss, MissLog
from jenga.tables.page_table import Table


class EvictionCause(StrEnum):
    """Reason why a checkpoint was lost, or its end.

    Attributes:
        CHECKPOINT: An allocation needed memory. The checkpoint was evicted whole.
        END: An allocation needed memory. Tokens were cut from the checkpoint's end, because its
            model has neither windows nor states.
        GUESS: The place where texts part has become known. The place guessed before it went.
        MOVED: A later checkpoint on the same text took its states. No request had read it.
    """

    CHECKPOINT = "checkpoint"
    END = "end"
    GUESS = "guess"
    MOVED = "moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """The loss of one checkpoint, or of its end.

    Attributes:
        cause: Reason of the loss.
        left_by: Name of the request that left the checkpoint. Empty for images.
        for_request: Name of the request whose allocation needed the memory. Empty for `GUESS` and
            `MOVED`, and for memory needed by copies from host memory.
        key: Hash of the prefix up to the checkpoint, or the name of an image.
        kind: Place of the checkpoint in its text.
        past: Knowledge about its readers.
        num_tokens: Number of tokens of the checkpoint's prefix.
        kept_tokens: Number of these tokens that a request can still start from, by the cut
            checkpoint or the one before it on the same text.
        freed_bytes: Bytes of the pages that became empty. Pages that running requests use become
            empty later, and are not counted.
        worth: Worth of the checkpoint by the eviction policy, in the policy's own unit. None for
            `GUESS` and `MOVED`, which compare nothing, and for a worth that is not finite.
        was_awaited: Whether a request in the wait queue would have read it.
    """

    cause: EvictionCause
    left_by: str
    for_request: str
    key: Hashable
    kind: Kind
    past: Past
    num_tokens: int
    kept_tokens: int
    freed_bytes: int
    worth: float | None
    was_awaited: bool


class EvictionLog:
    """Losses of checkpoints since the last call of `take_evictions`, in order.

    Attributes:
        for_request: Name of the request whose pages are being allocated. Empty if there is none.
        misses: Record of look-ups, which remembers losses.
    """

    __slots__ = ("_evictions", "_num_taken", "for_request", "misses")

    def __init__(self, misses: MissLog) -> None:
        """Start without losses.

        Args:
            misses: Record of look-ups.
        """
        self.misses = misses
        self._num_taken = 0
        self.for_request = ""
        self._evictions: list[Eviction] = []

    def record_loss(  # noqa: PLR0913  all facts about a loss
        self,
        cause: EvictionCause,
        node: Checkpoint,
        point: Point,
        num_tokens: int,
        *,
        freed_bytes: int,
        worth: float | None = None,
        was_awaited: bool = False,
    ) -> None:
        """Add the loss of a checkpoint that is not kept any more, or was cut.

        Args:
            cause: Reason of the loss.
            node: The checkpoint, after its loss.
            point: Its point before the loss.
            num_tokens: Number of tokens of its prefix before the loss.
            freed_bytes: Bytes of the pages that became empty.
            worth: Its worth, if it was compared with others.
            was_awaited: Whether a request in the wait queue would have read it.
        """
        has_end = cause == EvictionCause.END
        last = node if has_end else node.kept_before
        for_memory = cause in {EvictionCause.CHECKPOINT, EvictionCause.END}
        for_request = self.for_request if for_memory else ""
        self.misses.record_loss(Loss(cause, self._num_taken, node.left_by, for_request), point.key)
        self._evictions.append(
            Eviction(
                cause=cause,
                left_by=node.left_by,
                for_request=for_request,
                key=point.key,
                kind=point.kind,
                past=point.past,
                num_tokens=num_tokens,
                kept_tokens=last.num_tokens if last is not None else 0,
                freed_bytes=freed_bytes,
                worth=worth if worth is not None and isfinite(worth) else None,
                was_awaited=was_awaited,
            )
        )

    def record_moved_pages(self, left_by: str) -> None:
        """Give the reason for pages lost with a checkpoint whose states were moved before."""
        self.misses.record_loss(Loss(EvictionCause.MOVED, self._num_taken, left_by, ""))

    def record_loose(self, tables: Sequence[Table]) -> None:
        """Record the evicted pages that page tables are about to forget. No checkpoint needs them.

        Args:
            tables: All page tables.
        """
        for table in tables:
            self.misses.lose_pages(table, table.pages.evicted)
        self.misses.record_loss(Loss(LOOSE, self._num_taken, "", self.for_request))

    def take_evictions(self) -> list[Eviction]:
        """Return all losses since the last call, in order."""
        evictions = self._evictions
        self._evictions = []
        self._num_taken += 1
        return evictions

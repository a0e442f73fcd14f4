"""The one list of copies that an engine must make before the kernels of its next step run."""

from collections.abc import Iterable

from jenga.tables.request import PageCopy


class CopyOrders:
    """Copies between pages, in the order in which they must be made.

    The order matters, because a page may be copied from and then written in the same step.
    """

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        """Start without copies."""
        self._copies: list[PageCopy] = []

    @property
    def is_empty(self) -> bool:
        """Whether no copy is waiting to be made."""
        return not self._copies

    def order_copy(self, copy: PageCopy) -> None:
        """Add one copy, to be made after all that were ordered before."""
        self._copies.append(copy)

    def order_copies(self, copies: Iterable[PageCopy]) -> None:
        """Add copies in their order, to be made after all that were ordered before."""
        self._copies.extend(copies)

    def take_copies(self) -> list[PageCopy]:
        """Return all copies ordered since the last call, in order."""
        copies = self._copies
        self._copies = []
        return copies

    def cancel_copies(self) -> None:
        """Drop all copies, because their content is not needed any more."""
        self._copies = []

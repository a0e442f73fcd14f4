"""What both kinds of small pages share.

A small page is *used* by one request or more, *evictable* (cached content, no user) or *empty*.
`WholePages` serves page tables whose small pages are large pages, `SplitPages` all others; the
allocator asks both the same questions.
"""

from collections.abc import Sequence

from jenga.errors import InvariantError


class Budget:
    """How many large pages a page table may open while others still have needs.

    Attributes:
        required: Large pages this page table must open to meet its need.
        slack: Large pages that nobody's need requires.
    """

    __slots__ = ("required", "slack")

    def __init__(self, slack: int) -> None:
        self.required = 0
        self.slack = slack

    @property
    def allows(self) -> bool:
        """Whether one more large page may be opened."""
        return self.required > 0 or self.slack > 0

    def spend(self) -> None:
        """Count one large page opened."""
        if self.required:
            self.required -= 1
        else:
            self.slack -= 1


def unshare(shares: dict[int, int], pages: Sequence[int]) -> list[int]:
    """Take one user from each page; the pages that have none left, in order."""
    unused: list[int] = []
    for page in pages:
        others = shares.get(page, 0)
        if others > 1:
            shares[page] = others - 1
        elif others:
            del shares[page]
        else:
            unused.append(page)
    return unused


def check_shares(shares: dict[int, int], used: set[int]) -> None:
    """Raise `InvariantError` unless only used pages have more than one user."""
    if not used.issuperset(shares) or any(count < 1 for count in shares.values()):
        msg = f"shares {shares} are not of the used pages {sorted(used)}"
        raise InvariantError(msg)

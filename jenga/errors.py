"""Errors that this package raises on purpose, except `ValueError` for a caller's mistake."""

from collections.abc import Sequence


class InvariantError(Exception):
    """A bug of this package: the counts or references of a stateful object do not agree."""


class OutOfPagesError(Exception):
    """Empty and evictable pages do not meet a request's need. Nothing was changed.

    Attributes:
        request_id: The request.
        needed_pages: Number of small pages that it needs, for each page table.
        available_pages: Number of small pages that it could still get in large pages held already,
            for each page table.
        needed_large_pages: Number of large pages required in addition to those.
        available_large_pages: Number of large pages that are empty or could be emptied by eviction,
            less the reserve.
        reserved_large_pages: Number of large pages that had to be left to others.
    """

    def __init__(
        self,
        request_id: str,
        *,
        needed_pages: Sequence[int],
        available_pages: Sequence[int],
        needed_large_pages: int,
        available_large_pages: int,
        reserved_large_pages: int = 0,
    ) -> None:
        self.request_id = request_id
        self.needed_pages = tuple(needed_pages)
        self.available_pages = tuple(available_pages)
        self.needed_large_pages = needed_large_pages
        self.available_large_pages = available_large_pages
        self.reserved_large_pages = reserved_large_pages
        left = f", {reserved_large_pages} more left to others" if reserved_large_pages else ""
        super().__init__(
            f"request {request_id!r} needs {list(needed_pages)} small pages per page table; "
            f"{list(available_pages)} are available in large pages already held, and of the "
            f"{needed_large_pages} further large pages required {available_large_pages} are "
            f"empty or evictable{left}"
        )


class PutOffError(OutOfPagesError):
    """There is room for an admission, but it is better made in a later step."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            request_id,
            needed_pages=(),
            available_pages=(),
            needed_large_pages=0,
            available_large_pages=0,
        )


class TooEarlyError(PutOffError):
    """In the next step, a request could start from more tokens than now.

    If it started now, it would compute the same tokens as another request in the same step, because
    states cannot be read in the step that writes them.

    Attributes:
        hit_tokens: Number of tokens that it would start from now.
        other_id: Running request that will leave a state of more tokens.
    """

    def __init__(self, request_id: str, *, hit_tokens: int, other_id: str) -> None:
        super().__init__(request_id)
        self.hit_tokens = hit_tokens
        self.other_id = other_id

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r} starts from {self.hit_tokens} tokens now, and from more "
            f"as soon as the step of {self.other_id!r} is over"
        )


class NotLoadedError(PutOffError):
    """A request reads many bytes from host memory, which are first loaded during earlier steps.

    Attributes:
        host_bytes: Number of bytes to load.
    """

    def __init__(self, request_id: str, *, host_bytes: int) -> None:
        super().__init__(request_id)
        self.host_bytes = host_bytes

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r} reads {self.host_bytes} bytes from host memory, which "
            f"are loaded beside the step of others"
        )

"""The folder of a shared arena: its books, its bytes, and the socket of its broker."""

import os
from dataclasses import dataclass
from pathlib import Path

from jenga.broker.books import Books


@dataclass(frozen=True, slots=True)
class ArenaFolder:
    """Where the files of a shared arena are, in memory (`/dev/shm`).

    Attributes:
        path: The folder. Only its owner may enter it.
    """

    path: Path

    @property
    def books(self) -> Path:
        """File of the books."""
        return self.path / "books"

    @property
    def arena(self) -> Path:
        """File with the bytes of all large pages."""
        return self.path / "arena"

    @property
    def socket(self) -> Path:
        """Socket on which the broker listens."""
        return self.path / "socket"

    def create(self, *, large_page_bytes: int, num_pages: int) -> None:
        """Reserve the memory of an arena, and write its books last.

        Args:
            large_page_bytes: Size of a large page in bytes.
            num_pages: Number of large pages, including the null page.

        Raises:
            FileExistsError: There are books in the folder already.
            OSError: The memory is not there. No file is left then.
            ValueError: A number is out of its range.
        """
        if self.books.exists():
            msg = f"{self.path} has a shared arena already"
            raise FileExistsError(msg)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.arena, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Without memory behind each byte, an engine would be killed when it writes there.
            os.posix_fallocate(descriptor, 0, large_page_bytes * num_pages)
            books = Books.create(self.books, large_page_bytes=large_page_bytes, num_pages=num_pages)
        except (OSError, ValueError):
            self.arena.unlink()
            raise
        finally:
            os.close(descriptor)
        books.close()

    def open_books(self) -> Books:
        """Map the books.

        Raises:
            ValueError: There is no shared arena in the folder.
        """
        try:
            return Books(self.books)
        except FileNotFoundError as error:
            msg = f"{self.path} has no shared arena; `jenga broker start` makes one"
            raise ValueError(msg) from error

    def remove(self) -> None:
        """Delete the files. Processes that map them keep them until they end."""
        for path in (self.socket, self.books, self.arena):
            path.unlink(missing_ok=True)
        self.path.rmdir()

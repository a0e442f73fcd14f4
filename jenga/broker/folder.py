"""The folder of a shared arena: its books, its bytes, and the socket of its broker."""

from dataclasses import dataclass
from pathlib import Path

from jenga.broker.books import Books
from jenga.broker.memory import CPU, ArenaMemory, DeviceMemory, FileMemory


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
        """File with the bytes of all large pages, if they are in memory of the CPU."""
        return self.path / "arena"

    @property
    def handle(self) -> Path:
        """File that says where they are on a GPU, if they are there."""
        return self.path / "handle"

    @property
    def memory(self) -> ArenaMemory:
        """The bytes of all large pages.

        Raises:
            ValueError: The file that says where they are on a GPU is damaged.
        """
        is_on_gpu = self.handle.exists()
        return DeviceMemory.read(self.handle) if is_on_gpu else FileMemory(self.arena)

    @property
    def socket(self) -> Path:
        """Socket on which the broker listens."""
        return self.path / "socket"

    def create(self, *, large_page_bytes: int, num_pages: int, device: str = CPU) -> None:
        """Reserve the memory of an arena, and write its books last.

        Args:
            large_page_bytes: Size of a large page in bytes.
            num_pages: Number of large pages, including the null page.
            device: Where the memory is, `cpu` or `cuda:N`.

        Raises:
            FileExistsError: There are books in the folder already.
            OSError: The memory is not there. No file is left then.
            RuntimeError: The memory of the GPU cannot be had or shared. No file is left then.
            TimeoutError: A process that an interrupted start has left does not end.
            ValueError: A number is out of its range.
        """
        if self.books.exists():
            msg = f"{self.path} has a shared arena already"
            raise FileExistsError(msg)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.memory.remove()  # what a start that was interrupted has left
        num_bytes = large_page_bytes * num_pages
        memory: ArenaMemory = (
            FileMemory.create(self.arena, num_bytes)
            if device == CPU
            else DeviceMemory.create(self.handle, device, num_bytes)
        )
        try:
            books = Books.create(self.books, large_page_bytes=large_page_bytes, num_pages=num_pages)
        except (OSError, ValueError):
            memory.remove()
            raise
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
        """Delete the files, and end the process that holds memory of a GPU.

        Processes that map the files keep them until they end. Memory of a GPU they must not use any
        more.

        Raises:
            TimeoutError: The process does not end. Nothing was deleted.
        """
        self.memory.remove()
        for path in (self.socket, self.books):
            path.unlink(missing_ok=True)
        self.path.rmdir()

"""An engine's connection to the broker. The engine goes on with what it has while there is none."""

import math
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from jenga.arena.borrowed_pages import News
from jenga.broker.books import Books, Supply
from jenga.broker.folder import ArenaFolder
from jenga.broker.messages import Message, Peer
from jenga.errors import InvariantError
from jenga.page_ids import LargePageId

JOIN_SECONDS = 60.0
"""Most seconds that a joining engine waits until others have returned what it is guaranteed."""

_ANSWER_SECONDS = 10.0
"""Most seconds until the broker answers an engine that starts."""

_ASK_SECONDS = 0.02
"""Most seconds that a step waits for an answer. Free large pages then come with a later step."""

_RECONNECT_SECONDS = 0.5
"""Seconds between two attempts to reach a broker that is gone."""


class BrokerError(RuntimeError):
    """The broker is not there, does not answer, or refuses."""


def attach(folder: ArenaFolder, name: str) -> Peer:
    """Tell the broker that this process maps the arena for an engine. Keep the connection.

    Raises:
        BrokerError: The broker is not there, or knows no such engine.
    """
    peer = _connect(folder)
    try:
        _request(peer, {"do": "attach", "name": name})
    except BrokerError:
        peer.close()
        raise
    return peer


class SocketLender:
    """Lends large pages of the arena in a folder, through the socket of its broker.

    It implements `jenga.arena.borrowed_pages.Lender`.

    Attributes:
        name: Name of this engine.
        folder: Folder of the arena.
        guarantee_pages: Number of large pages that this engine always has.
        limit_pages: Most large pages that it may have.
    """

    def __init__(
        self,
        folder: ArenaFolder,
        name: str,
        *,
        guarantee_pages: int,
        limit_pages: int,
        large_page_bytes: int,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        """Join, and wait until this engine has the large pages of its guarantee.

        Args:
            folder: Folder of the arena.
            name: Name of this engine. No other engine of the arena may have it.
            guarantee_pages: Number of large pages that it always has.
            limit_pages: Most large pages that it may have.
            large_page_bytes: Size in bytes of the large pages that it was planned for.
            join_seconds: Most seconds to wait.

        Raises:
            BrokerError: The broker is not there, or refuses, or others do not return enough in
                time. This engine then has no large page.
            ValueError: There is no shared arena in the folder.
        """
        self.folder, self.name = folder, name
        self.guarantee_pages, self.limit_pages = guarantee_pages, limit_pages
        self._books: Books = folder.open_books()
        # Large pages that the broker has lent and not taken back.
        self._mine: set[LargePageId] = set()
        self._granted: list[LargePageId] = []
        self._called: int | None = None
        self._older_than_s = -math.inf
        self._next_attempt_s = 0.0
        self._num_unanswered = 0
        self._peer: Peer | None = _connect(folder)
        joining = {
            "do": "join",
            "name": name,
            "guarantee_pages": guarantee_pages,
            "limit_pages": limit_pages,
            "large_page_bytes": large_page_bytes,
        }
        try:
            self.row: int = _request(self._peer, joining, self._note)["row"]
        except BrokerError:
            self._peer.close()
            self._books.close()
            raise
        end_s = time.monotonic() + join_seconds
        while len(self._granted) < guarantee_pages and self._peer is not None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                self.leave()
                msg = (
                    f"engine {name!r} is guaranteed {guarantee_pages} large pages, and got "
                    f"{len(self._granted)} in {join_seconds:g} seconds: requests of other engines "
                    f"use the rest"
                )
                raise BrokerError(msg)
            self._wait(left_s)
            self._read()
        if self._peer is None:
            msg = f"the broker of {folder.path} ended while engine {name!r} was joining"
            raise BrokerError(msg)

    # The interface of `Lender`

    @property
    def num_pages(self) -> int:
        """See `Lender`."""
        return self._books.num_pages

    @property
    def large_page_bytes(self) -> int:
        """Bytes of a large page."""
        return self._books.large_page_bytes

    @property
    def is_connected(self) -> bool:
        """Whether the broker could be reached the last time."""
        return self._peer is not None

    @property
    def has_free(self) -> bool:
        """See `Lender`."""
        return self._peer is not None and self._books.num_free > 0

    def now_s(self) -> float:
        """See `Lender`."""
        return time.monotonic()

    def first_pages(self) -> list[LargePageId]:
        """See `Lender`."""
        first, self._granted = self._granted, []
        return first

    def take_free(self, num_pages: int) -> list[LargePageId]:
        """See `Lender`."""
        end_s = time.monotonic() + _ASK_SECONDS
        self.ask(num_pages, None)
        while self._peer is not None and self._num_unanswered:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            self._wait(left_s)
            self._read()
        return self.first_pages()

    def ask(self, num_pages: int, older_than_s: float | None, *, is_needed: bool = False) -> None:
        """See `Lender`."""
        if older_than_s is not None:
            older_than_s = max(0.0, older_than_s)
        self._num_unanswered += 1
        self._send(
            {
                "do": "ask",
                "num_pages": num_pages,
                "older_than_s": older_than_s,
                "is_needed": is_needed,
            }
        )

    def give_back(self, pages: list[LargePageId]) -> None:
        """See `Lender`."""
        if self._peer is None:
            # The broker cannot take them now, so this engine keeps them.
            self._granted += pages
            return
        self._mine.difference_update(pages)
        self._send({"do": "return", "pages": pages})

    def news(self) -> News:
        """See `Lender`."""
        if self._peer is None:
            self._reconnect()
        self._read()
        news = News(granted=self._granted, called=self._called, older_than_s=self._older_than_s)
        self._granted, self._called = [], None
        return news

    def tell(self, num_empty: int, num_evictable: int, oldest_s: float) -> None:
        """See `Lender`."""
        supply = Supply(num_empty=num_empty, num_evictable=num_evictable, oldest_s=oldest_s)
        self._books.write_supply(self.row, supply)

    # The connection

    def wait(self, most_seconds: float) -> None:
        """Wait until something has arrived from the broker, or up to `most_seconds`.

        Another thread may call this. It reads nothing.
        """
        peer = self._peer
        try:
            if peer is not None:
                select.select([peer.socket], [], [], most_seconds)
                return
        except (OSError, ValueError):
            pass  # the other thread has closed it
        time.sleep(min(most_seconds, _RECONNECT_SECONDS))

    def leave(self) -> None:
        """Return everything, and end the agreement. Nothing may touch the arena any more."""
        if self._peer is not None:
            with suppress(ConnectionError, BrokerError):
                _request(self._peer, {"do": "leave"}, self._note)
            self._lose()

    def _wait(self, most_seconds: float) -> None:
        if self._peer is not None:
            select.select([self._peer.socket], [], [], most_seconds)

    def _send(self, message: Message) -> None:
        if self._peer is not None:
            try:
                self._peer.send(message)
            except ConnectionError:
                self._lose()

    def _read(self) -> None:
        if self._peer is None:
            return
        try:
            self._peer.flush()
            messages = self._peer.receive()
        except ConnectionError:
            self._lose()
            return
        for message in messages:
            self._note(message)

    def _note(self, message: Message) -> None:
        """Take note of a message that arrived.

        Raises:
            InvariantError: The broker refuses what this engine did.
        """
        if "error" in message:
            msg = f"the broker refuses {message.get('answer')!r}: {message['error']}"
            raise InvariantError(msg)
        if "granted" in message:
            self._adopt(message["granted"])
        elif "call" in message:
            self._called, self._older_than_s = message["call"], message["older_than_s"]
        elif message.get("answer") == "ask":
            self._num_unanswered -= 1

    def _adopt(self, pages: list[LargePageId]) -> None:
        fresh = [page for page in pages if page not in self._mine]
        self._mine.update(fresh)
        self._granted += fresh

    def _lose(self) -> None:
        """Go on without a broker."""
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._called = self._num_unanswered = 0
        self._next_attempt_s = time.monotonic() + _RECONNECT_SECONDS

    def _reconnect(self) -> None:
        """Reach a broker that was started again, unless the last attempt was a moment ago.

        The books say what this engine has. It may have large pages that the earlier broker lent or
        did not take back, without a word.
        """
        if time.monotonic() < self._next_attempt_s:
            return
        self._next_attempt_s = time.monotonic() + _RECONNECT_SECONDS
        try:
            peer = _connect(self.folder)
        except BrokerError:
            return
        try:
            _request(peer, {"do": "rejoin", "row": self.row}, self._note)
        except BrokerError:
            peer.close()
            return
        self._peer = peer
        self._adopt(self._books.pages_of(self.row + 1))


def check_join(
    folder: ArenaFolder,
    name: str,
    *,
    guarantee_pages: int,
    limit_pages: int,
    large_page_bytes: int,
) -> None:
    """Ask the broker whether an engine could join. Nothing is changed.

    Raises:
        BrokerError: The broker is not there, or says why not.
    """
    peer = _connect(folder)
    try:
        _request(
            peer,
            {
                "do": "check",
                "name": name,
                "guarantee_pages": guarantee_pages,
                "limit_pages": limit_pages,
                "large_page_bytes": large_page_bytes,
            },
        )
    finally:
        peer.close()


def _connect(folder: ArenaFolder) -> Peer:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(str(folder.socket))
    except OSError as error:
        connected.close()
        msg = (
            f"no broker listens on {folder.socket} ({error.strerror or error}); start one with "
            f"`jenga broker start {folder.path}`"
        )
        raise BrokerError(msg) from error
    return Peer(connected)


def _request(
    peer: Peer, message: Message, note: Callable[[Message], None] | None = None
) -> Message:
    """Send a message, and wait for its answer.

    Args:
        peer: Connection to the broker.
        message: The message.
        note: Function that is called with other messages that come first. None drops them.

    Raises:
        BrokerError: The broker refuses, or does not answer.
    """
    end_s = time.monotonic() + _ANSWER_SECONDS
    try:
        peer.send(message)
        while (left_s := end_s - time.monotonic()) > 0:
            select.select([peer.socket], [], [], left_s)
            for index, received in enumerate(messages := peer.receive()):
                if received.get("answer") != message["do"]:
                    if note is not None:
                        note(received)
                    continue
                if "error" in received:
                    raise BrokerError(received["error"])
                for later in messages[index + 1 :]:
                    if note is not None:
                        note(later)
                return received
    except ConnectionError as error:
        msg = f"the broker closed the connection: {error}"
        raise BrokerError(msg) from error
    msg = f"the broker did not answer within {_ANSWER_SECONDS:g} seconds"
    raise BrokerError(msg)

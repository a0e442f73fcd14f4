"""The broker's process: it listens on a socket, and watches the processes of engines."""

import fcntl
import os
import selectors
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from jenga.broker.books import Agreement, Books
from jenga.broker.broker import Broker, News
from jenga.broker.folder import ArenaFolder
from jenga.broker.messages import Message, Peer
from jenga.broker.processes import Process, process_of

SECONDS_PER_ROUND = 0.05
"""Most seconds until asks that are not met are spread again over what engines can return."""

_CREDENTIALS = struct.Struct("iII")


@dataclass(slots=True)
class _Client:
    """A process that is connected."""

    peer: Peer
    process: Process
    row: int | None = None


class Server:
    """Serves one broker on the socket of its folder."""

    def __init__(self, folder: ArenaFolder) -> None:
        """Begin to listen. Engines of an earlier broker keep what they have.

        Args:
            folder: Folder with the books.

        Raises:
            ValueError: There is no shared arena, or another broker serves it.
        """
        self._books: Books = folder.open_books()
        # The lock is one of the open file, so that closing another descriptor does not end it.
        self._lock = os.open(folder.books, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            msg = f"another broker serves {folder.path} already"
            raise ValueError(msg) from error
        self.broker = Broker(self._books)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}  # descriptor -> client
        self._watched: dict[Process, int] = {}  # process -> descriptor of it
        folder.socket.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder.socket))
        folder.socket.chmod(0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)  # noqa: FBT003  its only parameter
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for _, agreement in self._books.agreements():
            for process in agreement.processes:
                self._watch(process)

    def serve(self) -> None:
        """Serve until the process is interrupted."""
        while True:
            self.turn(SECONDS_PER_ROUND)

    def turn(self, most_seconds: float) -> None:
        """Handle what has arrived, or wait for it up to `most_seconds`."""
        for key, _ in self._selector.select(most_seconds):
            key.data(key.fd)
        self._tell(self.broker.settle())

    def close(self) -> None:
        """Stop listening. Engines keep what they have."""
        for descriptor in list(self._clients):
            self._drop(descriptor)
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._selector.close()
        self._listener.close()
        self._books.close()
        os.close(self._lock)

    # Connections and processes

    def _accept(self, _descriptor: int) -> None:
        with suppress(BlockingIOError):
            connected, _ = self._listener.accept()
            raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(raw)
            try:
                process = process_of(pid)
            except ProcessLookupError:
                connected.close()
                return
            if user != os.getuid():
                connected.close()
                return
            client = _Client(Peer(connected), process)
            self._clients[connected.fileno()] = client
            self._selector.register(connected, selectors.EVENT_READ, self._read)

    def _watch(self, process: Process) -> None:
        """Notice when a process ends."""
        if process in self._watched:
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        self._watched[process] = descriptor

        def ended(_descriptor: int) -> None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del self._watched[process]
            self.broker.end_dead()

        self._selector.register(descriptor, selectors.EVENT_READ, ended)

    def _drop(self, descriptor: int) -> None:
        """Close a connection. The engine keeps what it has until its processes end."""
        client = self._clients.pop(descriptor)
        self._selector.unregister(client.peer.socket)
        client.peer.close()

    def _read(self, descriptor: int) -> None:
        client = self._clients[descriptor]
        try:
            for message in client.peer.receive():
                self._handle(client, message)
            client.peer.flush()
        except (ConnectionError, ValueError):
            self._drop(descriptor)

    def _send(self, client: _Client, message: Message) -> None:
        with suppress(ConnectionError):  # the next read drops the client
            client.peer.send(message)

    # Messages

    def _handle(self, client: _Client, message: Message) -> None:
        """Do what a message says, and answer it if it wants an answer."""
        action = message.get("do")
        try:
            if action == "ask":
                self._ask(client, message)
                return
            answer = self._act(client, message)
        except (KeyError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, ValueError) else f"bad message: {error!r}"
            self._send(client, {"answer": action, "error": text})
            return
        if answer is not None:
            self._send(client, {"answer": action, **answer})

    def _act(self, client: _Client, message: Message) -> Message | None:
        broker, action = self.broker, message.get("do")
        if action in {"check", "join"}:
            agreement = Agreement(
                name=str(message["name"]),
                guarantee_pages=message["guarantee_pages"],
                limit_pages=message["limit_pages"],
                processes=(client.process,),
            )
            large_page_bytes = message["large_page_bytes"]
            if action == "check":
                broker.end_dead()
                broker.check_join(agreement, large_page_bytes=large_page_bytes)
                return {}
            client.row = broker.join(agreement, large_page_bytes=large_page_bytes)
            self._watch(client.process)
            return {"row": client.row}
        if action == "rejoin":
            broker.rejoin(message["row"], client.process)
            client.row = message["row"]
            self._watch(client.process)
            return {"row": client.row}
        if action == "attach":
            broker.attach(str(message["name"]), client.process)
            self._watch(client.process)
            return {}
        row = self._row_of(client)
        if action == "return":
            broker.take_back(row, message["pages"])
            return None
        if action == "leave":
            broker.leave(row)
            client.row = None
            return {}
        msg = f"a message must say what to do, got {action!r}"
        raise ValueError(msg)

    def _ask(self, client: _Client, message: Message) -> None:
        """Lend what is free at once. The answer comes after it."""
        self.broker.ask(
            self._row_of(client),
            message["num_pages"],
            message["older_than_s"],
            is_needed=message["is_needed"] is True,
        )
        self._tell(self.broker.settle())
        self._send(client, {"answer": "ask"})

    @staticmethod
    def _row_of(client: _Client) -> int:
        if client.row is None:
            msg = "an engine must join before it asks for large pages"
            raise ValueError(msg)
        return client.row

    def _tell(self, news: News) -> None:
        """Send engines what was granted to them, and what they are called to return."""
        for client in list(self._clients.values()):
            if client.row is None:
                continue
            pages = news.granted.get(client.row)
            if pages:
                self._send(client, {"granted": pages})
            call = news.calls.get(client.row)
            if call is not None:
                message = {"call": call.num_pages, "older_than_s": call.older_than_s}
                self._send(client, message)

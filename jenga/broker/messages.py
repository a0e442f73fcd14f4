"""Messages between the broker and engines: JSON objects, one a line, on a socket that never waits.

An engine sends `{"do": ...}` with join, rejoin, attach, check, ask, return or leave. The broker
answers each of them, except a return, with one message that has `"answer"`. It also sends
`{"granted": [...]}` and `{"call": number, "older_than_s": time}` at any time.
"""

import json
import socket
from typing import Any

MOST_BYTES = 64 << 20
"""Most bytes that wait to be read or sent. A peer with more is not one of ours, or hangs."""

_CHUNK_BYTES = 1 << 16

Message = dict[str, Any]


class Peer:
    """A connected socket that carries messages.

    Attributes:
        socket: The socket, which never blocks.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected socket."""
        connected.setblocking(False)  # noqa: FBT003  its only parameter
        self.socket = connected
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait until the other side reads."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Send a message, now or once the other side reads.

        Raises:
            ConnectionError: The other side is gone, or does not read.
        """
        self._outgoing += json.dumps(message).encode() + b"\n"
        if len(self._outgoing) > MOST_BYTES:
            msg = "the other side does not read its messages"
            raise ConnectionAbortedError(msg)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the other side reads.

        Raises:
            ConnectionError: The other side is gone.
        """
        while self._outgoing:
            try:
                num_sent = self.socket.send(self._outgoing)
            except BlockingIOError:
                return
            del self._outgoing[:num_sent]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. It does not wait.

        Raises:
            ConnectionError: The other side is gone, and no message is left.
            ValueError: A message is not a JSON object, or too long.
        """
        is_open = True
        while is_open:
            try:
                chunk = self.socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            self._incoming += chunk
            is_open = bool(chunk)
            if len(self._incoming) > MOST_BYTES:
                msg = f"a message has more than {MOST_BYTES} bytes"
                raise ValueError(msg)
        *lines, rest = self._incoming.split(b"\n") if self._incoming else [b""]
        if not lines and not is_open:
            msg = "the other side has closed the connection"
            raise ConnectionResetError(msg)
        self._incoming = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if not isinstance(message, dict):
                msg = f"a message must be a JSON object, got {message!r:.100}"
                raise ValueError(msg)  # noqa: TRY004  a mistake of the other side
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

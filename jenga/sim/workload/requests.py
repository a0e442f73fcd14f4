"""Requests to replay: when they come, what they read and write, and by what they are recognised.

Nobody needs the tokens themselves. A prompt is a row of pieces, each the beginning of some content:
a document, a question, an answer. Prompts share a prefix as far as their pieces are the same, and
the hash of a prefix is made of the names of its pieces and a count, so that a million tokens cost
a few thousand short strings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

from jenga.policies import Image, RequestFacts

Content = int | str
"""Names content: equal names, equal tokens."""

MOST_TOKENS = 1 << 24
"""Tokens of the longest prompt and of the longest output: more than any model reads."""

_DIGEST_BYTES = 8
_COUNT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """The first tokens of some content.

    Attributes:
        content: Its name.
        num_tokens: How many of its tokens.
    """

    content: Content
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens <= 0:
            msg = f"num_tokens of a piece must be positive, got {self.num_tokens}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        name: Unique in its trace.
        arrival_s: When it arrives, in seconds from the beginning of the trace. For a request that
            follows others this is an estimate: the recorded time, or the time if answers took none.
        after: Names of the requests that it follows. It arrives when all of them have ended and
            `think_s` have passed. By default it follows none.
        think_s: Seconds from the end of the last request that it follows to its arrival.
        prompt: What it reads, in order.
        output_tokens: Tokens that it generates.
        output: Names what it generates, for requests that go on from it; by default nobody does.
        images: Its images, among the tokens of the prompt.
    """

    name: str
    arrival_s: float = 0.0
    after: tuple[str, ...] = ()
    think_s: float = 0.0
    prompt: tuple[Piece, ...]
    output_tokens: int
    output: Content | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        for name in ("arrival_s", "think_s"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                msg = (
                    f"{name} of request {self.name!r} must be finite and not negative, "
                    f"got {seconds}"
                )
                raise ValueError(msg)
        if not self.prompt:
            msg = f"prompt of request {self.name!r} must have a piece"
            raise ValueError(msg)
        if self.output_tokens <= 0:
            msg = (
                f"output_tokens of request {self.name!r} must be positive, got {self.output_tokens}"
            )
            raise ValueError(msg)
        for name in ("prompt_tokens", "output_tokens"):
            if (num_tokens := getattr(self, name)) > MOST_TOKENS:
                msg = (
                    f"{name} of request {self.name!r} must be at most {MOST_TOKENS}, "
                    f"got {num_tokens}"
                )
                raise ValueError(msg)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.num_tokens for piece in self.prompt)

    @property
    def facts(self) -> RequestFacts:
        """What a memory manager is told of it."""
        return RequestFacts(prompt_tokens=self.prompt_tokens, images=self.images)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The prompt and what is generated after it."""
        output: Content = f"\0output of {self.name}" if self.output is None else self.output
        return (*self.prompt, Piece(output, self.output_tokens))


def prefix_hashes(pieces: Sequence[Piece], hash_tokens: int) -> list[bytes]:
    """Hash i is of the first `(i + 1) * hash_tokens` tokens; equal hashes, equal prefixes.

    A hash is a digest of all pieces that begin before its end, the last one without its length, and
    the number of tokens of that one.
    """
    hashes: list[bytes] = []
    digest = b""
    start = next_end = 0
    for piece in pieces:
        named = blake2b(digest, digest_size=_DIGEST_BYTES)
        named.update(repr(piece.content).encode())
        base = named.digest()
        end = start + piece.num_tokens
        next_end = (start // hash_tokens + 1) * hash_tokens
        first, last = next_end - start, piece.num_tokens
        if first <= last:
            hashes += [base + count for count in _counts(first, last, hash_tokens)]
        named.update(piece.num_tokens.to_bytes(_COUNT_BYTES, "big"))
        digest = named.digest()
        start = end
    return hashes


@cache
def _table(offset: int, hash_tokens: int, num_counts: int) -> list[bytes]:
    """`offset`, `offset + hash_tokens`, ... as bytes."""
    end = offset + num_counts * hash_tokens
    return [count.to_bytes(_COUNT_BYTES, "big") for count in range(offset, end, hash_tokens)]


_TABLE_TOKENS = 32
_TABLE_COUNTS = 1 << 10
"""Counts kept as bytes for each offset: pieces that are longer make their own."""


def _counts(first: int, last: int, hash_tokens: int) -> list[bytes]:
    num_counts = (last - first) // hash_tokens + 1
    if num_counts <= _TABLE_COUNTS and hash_tokens <= _TABLE_TOKENS:
        return _table(first, hash_tokens, _TABLE_COUNTS)[:num_counts]
    return [count.to_bytes(_COUNT_BYTES, "big") for count in range(first, last + 1, hash_tokens)]

"""Requests to replay: when they arrive, what they read and write, and the hashes of their prefixes.

A replay does not need the tokens themselves. A prompt is a sequence of pieces, and each piece is
the beginning of some content: a document, a question, an answer. Two prompts share a prefix as far
as their pieces are equal. The hash of a prefix is made of the names of its pieces and a count of
tokens. A million tokens therefore cost only a few thousand short strings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

from jenga.policies import Image, RequestFacts

Content = int | str
"""Name of some content. Equal names mean equal tokens."""

MOST_TOKENS = 1 << 24
"""Most tokens of a prompt, and most tokens of an output: more than any model reads."""

_DIGEST_BYTES = 8
_COUNT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """The first tokens of some content.

    Attributes:
        content: Name of the content.
        num_tokens: Number of tokens, counted from the beginning of the content.
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
        arrival_s: Arrival time in seconds from the beginning of the trace. For a request that
            follows others it is an estimate: the recorded time, or the time if answers took none.
        after: Names of the requests that it follows. It arrives `think_s` after the last of them
            has ended. By default it follows none.
        think_s: Seconds from the end of the last request that it follows to its arrival.
        prompt: Pieces that it reads, in order.
        output_tokens: Number of tokens that it generates.
        output: Name of the generated content, for later prompts that contain it. None means that
            no prompt does.
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
        """Number of tokens of the prompt."""
        return sum(piece.num_tokens for piece in self.prompt)

    @property
    def facts(self) -> RequestFacts:
        """The facts about this request that a memory manager is given."""
        return RequestFacts(prompt_tokens=self.prompt_tokens, images=self.images)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The prompt and the generated content after it."""
        output: Content = f"\0output of {self.name}" if self.output is None else self.output
        return (*self.prompt, Piece(output, self.output_tokens))


def prefix_hashes(pieces: Sequence[Piece], hash_tokens: int) -> list[bytes]:
    """Return the hashes of a text's prefixes. Equal hashes mean equal prefixes.

    Hash `i` is that of the first `(i + 1) * hash_tokens` tokens. It consists of two parts:

    - a digest of the names of all pieces that begin before the prefix ends, and of the lengths of
      all of them except the last,
    - the number of tokens that the prefix has of that last piece.
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
    """Return `offset`, `offset + hash_tokens`, ... as bytes."""
    end = offset + num_counts * hash_tokens
    return [count.to_bytes(_COUNT_BYTES, "big") for count in range(offset, end, hash_tokens)]


_TABLE_TOKENS = 32
_TABLE_COUNTS = 1 << 10
"""Number of counts that are cached as bytes for each offset. Longer pieces, and hashes of more than
`_TABLE_TOKENS` tokens, make their own.
"""


def _counts(first: int, last: int, hash_tokens: int) -> list[bytes]:
    num_counts = (last - first) // hash_tokens + 1
    if num_counts <= _TABLE_COUNTS and hash_tokens <= _TABLE_TOKENS:
        return _table(first, hash_tokens, _TABLE_COUNTS)[:num_counts]
    return [count.to_bytes(_COUNT_BYTES, "big") for count in range(first, last + 1, hash_tokens)]

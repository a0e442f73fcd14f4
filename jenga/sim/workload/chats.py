"""Requests from the texts of conversations: ShareGPT, WildChat and files of the same form.

Texts become tokens without a tokenizer: a fixed number of bytes of UTF-8 counts as one token. Two
prompts share a prefix as far as their texts agree, in whole pieces of 16 tokens.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from jenga.sim.workload.fields import Place
from jenga.sim.workload.records import Record, records_of
from jenga.sim.workload.requests import Piece, Request

BYTES_PER_TOKEN = 4.0
"""Bytes of UTF-8 that count as one token: about the mean of vocabularies of 100,000 for English."""

PIECE_TOKENS = 16
"""Tokens of a piece of text: as many as a hash covers in most engines."""

_ANSWERING = frozenset({"assistant", "bard", "bing", "chatgpt", "gpt", "model"})
"""Roles that stand for the model in a conversation, in lower case."""

_DIGEST_BYTES = 8


def read_sharegpt(
    path: Path,
    *,
    arrivals_per_s: float = 0.0,
    think_s: float = 0.0,
    bytes_per_token: float = BYTES_PER_TOKEN,
    seed: int = 0,
) -> Iterator[Request]:
    """Read the requests of ShareGPT conversations, to be replayed in closed loop.

    Each message of the model is the output of one request, whose prompt is all messages before it.
    If the model begins a conversation, its message is part of the first prompt.

    Args:
        path: JSON, JSON lines or Parquet of objects with `conversations`: a list of `from` and
            `value`.
        arrivals_per_s: Conversations that begin in a second, at random; 0 for all at once.
        think_s: Seconds from an answer to the next message, on average, at random.
        bytes_per_token: Bytes of UTF-8 that count as one token.
        seed: Seed of the times.

    Raises:
        ValueError: An argument is out of range, or a conversation is not in this format. The
            message names file, line and field.

    Source: the files of anon8231489123/ShareGPT_Vicuna_unfiltered of Hugging Face.
    """
    form = _Form("conversations", "from", "value", bytes_per_token)
    return _requests(path, form, arrivals_per_s, think_s, random.Random(seed))


def read_wildchat(
    path: Path,
    *,
    arrivals_per_s: float = 0.0,
    think_s: float = 0.0,
    bytes_per_token: float = BYTES_PER_TOKEN,
    seed: int = 0,
) -> Iterator[Request]:
    """Read the requests of WildChat conversations, to be replayed in closed loop.

    Turns become requests as in `read_sharegpt`. Recorded times are those of answers, so they give
    neither arrivals nor think times.

    Args:
        path: JSON, JSON lines or Parquet of objects with `conversation`: a list of `role` and
            `content`.
        arrivals_per_s: Conversations that begin in a second, at random; 0 for all at once.
        think_s: Seconds from an answer to the next message, on average, at random.
        bytes_per_token: Bytes of UTF-8 that count as one token.
        seed: Seed of the times.

    Raises:
        ValueError: An argument is out of range, or a conversation is not in this format. The
            message names file, line and field.

    Source: allenai/WildChat-1M of Hugging Face (arXiv 2405.01470); lmsys/lmsys-chat-1m has the same
        form.
    """
    form = _Form("conversation", "role", "content", bytes_per_token)
    return _requests(path, form, arrivals_per_s, think_s, random.Random(seed))


@dataclass(frozen=True, slots=True)
class _Form:
    """Names of the fields of a conversation, and the size of a token.

    Attributes:
        messages: Name of the field with the list of messages.
        role: Name of the field with the author of a message.
        text: Name of the field with the text of a message.
        bytes_per_token: Bytes of UTF-8 that count as one token.
    """

    messages: str
    role: str
    text: str
    bytes_per_token: float

    def __post_init__(self) -> None:
        # With less than one byte per token, a text would have more tokens than bytes.
        if not 1 <= self.bytes_per_token < math.inf:
            msg = f"bytes_per_token must be finite and at least 1, got {self.bytes_per_token}"
            raise ValueError(msg)


def _requests(
    path: Path, form: _Form, arrivals_per_s: float, think_s: float, draw: random.Random
) -> Iterator[Request]:
    for name, value in (("arrivals_per_s", arrivals_per_s), ("think_s", think_s)):
        if not 0 <= value < math.inf:
            msg = f"{name} must be finite and at least 0, got {value}"
            raise ValueError(msg)
    arrival_s = 0.0
    for number, (where, record) in enumerate(records_of(path)):
        turns = list(_turns(Place(where), record, form))
        time_s = arrival_s
        for turn, (prompt, answer) in enumerate(turns):
            waited_s = draw.expovariate(1 / think_s) if think_s and turn else 0.0
            time_s += waited_s
            try:
                yield Request(
                    name=f"{number}.{turn}",
                    arrival_s=time_s,
                    after=(f"{number}.{turn - 1}",) if turn else (),
                    think_s=waited_s,
                    prompt=prompt,
                    output_tokens=answer.num_tokens,
                    output=answer.content,
                )
            except ValueError as error:
                msg = f"{where}: {error}"
                raise ValueError(msg) from error
        if turns and arrivals_per_s:
            arrival_s += draw.expovariate(arrivals_per_s)


def _turns(place: Place, record: Record, form: _Form) -> Iterator[tuple[tuple[Piece, ...], Piece]]:
    """Yield the prompts of a conversation, each with the answer to it."""
    prompt: tuple[Piece, ...] = ()
    for index, value in enumerate(place.items(form.messages, record.get(form.messages))):
        message = place.members(f"{form.messages}[{index}]", value)
        here = place.inside(f"{form.messages}[{index}]")
        role, text = message.get(form.role), message.get(form.text)
        if not isinstance(role, str):
            here.refuse(form.role, "text", role)
        # A filter may have emptied a message. It then has no text.
        if text is not None and not isinstance(text, str):
            here.refuse(form.text, "text", text)
        data = (text or "").encode("utf-8", "surrogatepass")
        if role.lower() in _ANSWERING and prompt:
            answer = Piece(
                f"answer {_digest(data)}", max(1, math.ceil(len(data) / form.bytes_per_token))
            )
            yield prompt, answer
            prompt = (*prompt, answer)
        else:
            prompt = (*prompt, *_pieces(data, form.bytes_per_token))


def _pieces(data: bytes, bytes_per_token: float) -> Iterator[Piece]:
    """Cut a text into pieces that are named by their content."""
    piece_bytes = max(1, round(PIECE_TOKENS * bytes_per_token))
    for start in range(0, len(data), piece_bytes):
        part = data[start : start + piece_bytes]
        yield Piece(_digest(part), math.ceil(len(part) / bytes_per_token))


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()

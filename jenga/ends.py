"""Where requests ended, and whether those that come in go on from there."""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum, auto

from jenga.landmarks import QUESTION_TOKENS
from jenga.request import Request

REMEMBERED_KEYS = 1 << 16
"""Places in texts that are known at most; the oldest are forgotten."""

REMEMBERED_REQUESTS = 64
"""Admissions by which the weight of one falls to a third."""

LEAST_TURNS = 4
"""Turns seen lately without which nothing is concluded."""

TURNS_PER_QUESTION = 8
"""Turns for each prompt asked again, from which on prompts are not expected to be."""


class _Place(Enum):
    """Where none has gone on yet."""

    END = auto()  # of all that a request was asked and answered
    QUESTION = auto()  # right before the end of a prompt


class Ends:
    """Tells turns of conversations from prompts that are asked again.

    A turn goes on from where another request ended. Who asks a prompt again, or puts another
    question to the same text, leaves it right before the end of the prompt.
    """

    __slots__ = ("_hash_tokens", "_num_questions", "_num_turns", "_places")

    def __init__(self, hash_tokens: int) -> None:
        """Nothing is known.

        Args:
            hash_tokens: Tokens that each further prefix hash covers.
        """
        self._hash_tokens = hash_tokens
        self._places: OrderedDict[bytes, _Place] = OrderedDict()
        self._num_turns = self._num_questions = 0.0

    def note_prompt(self, request: Request, prefix_hashes: Sequence[bytes]) -> None:
        """Note the hashes right before the end of a request's prompt."""
        end = (request.facts.prompt_tokens - 1) // self._hash_tokens
        start = (request.facts.prompt_tokens - QUESTION_TOKENS) // self._hash_tokens - 1
        # Who leaves it where it left others asks no prompt again.
        known = request.branch_tokens // self._hash_tokens
        request.question_keys = tuple(prefix_hashes[max(start, known, 0) : end])

    def note_end(self, request: Request) -> None:
        """Note where a request ends."""
        places = self._places
        for key in request.question_keys or ():
            places.setdefault(key, _Place.QUESTION)
        if request.end_key is not None and request.committed_tokens > request.facts.prompt_tokens:
            places[request.end_key] = _Place.END
        while len(places) > REMEMBERED_KEYS:
            places.popitem(last=False)

    def expects_turn(self, key: bytes | None) -> bool:
        """Whether a request is a turn of a conversation, or is likely to begin one.

        Args:
            key: Hash of all that it shares with those before it, None for nothing.
        """
        if key is not None and self._places.get(key) == _Place.END:
            return True
        needed = max(LEAST_TURNS, TURNS_PER_QUESTION * self._num_questions)
        return self._num_turns >= needed

    def admit(self, key: bytes | None) -> None:
        """Count a request that came in; see `expects_turn`."""
        place = self._places.get(key) if key is not None else None
        if place is None or key is None:
            return
        left = 1 - 1 / REMEMBERED_REQUESTS
        self._num_turns = left * self._num_turns + (place == _Place.END)
        self._num_questions = left * self._num_questions + (place == _Place.QUESTION)
        del self._places[key]

    def clear(self) -> None:
        """Know no places any more."""
        self._places.clear()

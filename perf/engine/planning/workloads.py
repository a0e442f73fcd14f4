"""Workloads of engines: traces, as turns that wait for a time or for an earlier answer."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jenga.sim.workload.requests import Content, Piece, Request
from jenga.sim.workload.sources import open_source
from perf.engine.planning.models import Scale

FIRST_TOKEN = 16
"""Lowest token that prompts use. Lower ones have a meaning in some models: end of text, image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One trace, and how its requests are sent.

    Attributes:
        name: Name in rows.
        trace: Trace in the notation of `jenga replay`.
        tiny: Trace for tiny models. Its requests stay below 128 tokens, because recurrent layers in
            vLLM's CPU build fail on prompts that fill one of its blocks.
        is_serial: Whether each request is sent when the one before it has ended.
        expected_s: Expected seconds of a run, used until one was measured.
        cap_s: Seconds after which a run counts as hung.
        limit: Largest number of requests. None means all.
        speed: Factor by which arrivals are faster than in the trace.
    """

    name: str
    trace: str
    tiny: str
    is_serial: bool = False
    expected_s: float = 25.0
    cap_s: float = 60.0
    limit: int | None = None
    speed: float = 1.0

    def turns(self, scale: Scale) -> list["Turn"]:
        """Return the requests, with the turn or time that each of them waits for.

        Raises:
            ValueError: The trace is invalid, or has images.
        """
        trace = self.tiny if scale is Scale.TINY else self.trace
        requests = list(open_source(trace, limit=self.limit, speed=self.speed))
        return turns_of(requests, is_serial=self.is_serial)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request, and when it is sent.

    Attributes:
        request: The request.
        after: Index of the turn that must have ended before. None if it waits for a time only.
        delay_s: Seconds from the end of that turn, or from the start of the run.
    """

    request: Request
    after: int | None
    delay_s: float


def turns_of(requests: Sequence[Request], *, is_serial: bool = False) -> list[Turn]:
    """Find the turn or time that each request waits for.

    If a prompt contains the answer to another request, it is sent after that one has ended. The
    time between their arrivals is then the user's thinking time. All other requests are sent when
    they arrive.

    Args:
        requests: Requests in the order of their arrivals.
        is_serial: Whether each request waits for the one before it, without a pause.

    Raises:
        ValueError: A request has images.
    """
    speakers: dict[Content, int] = {}
    turns: list[Turn] = []
    for index, request in enumerate(requests):
        if request.images:
            msg = f"trace must be of text alone, request {request.name!r} shows images"
            raise ValueError(msg)
        before = [speakers[each.content] for each in request.prompt if each.content in speakers]
        after = max(before, default=None)
        delay_s = request.arrival_s
        if is_serial:
            after, delay_s = (index - 1 if index else None), 0.0
        elif after is not None:
            delay_s = max(0.0, request.arrival_s - requests[after].arrival_s)
        turns.append(Turn(request=request, after=after, delay_s=delay_s))
        if request.output is not None:
            speakers[request.output] = index
    return turns


class Prompts:
    """Tokens of prompts, which share prefixes as in the trace.

    Args:
        vocab_size: Number of tokens in the model's vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._contents: dict[Content, list[int]] = {}

    def tokens(self, request: Request, said: Mapping[Content, Sequence[int]]) -> list[int]:
        """Return the tokens of a request's prompt.

        Args:
            request: The request.
            said: Name of an answer -> its tokens, for the answers that earlier requests generated.
        """
        prompt: list[int] = []
        for piece in request.prompt:
            prompt += said.get(piece.content, ())[: piece.num_tokens] or self._drawn(piece)
        return prompt

    def _drawn(self, piece: Piece) -> list[int]:
        """Draw the first tokens of a content. The same content always gives the same tokens."""
        drawn = self._contents.get(piece.content, [])
        if len(drawn) < piece.num_tokens:
            draw = random.Random(hashlib.sha256(repr(piece.content).encode()).digest())
            drawn = [draw.randrange(FIRST_TOKEN, self._vocab_size) for _ in range(piece.num_tokens)]
            self._contents[piece.content] = drawn
        return drawn[: piece.num_tokens]


AGENTS = Workload(
    name="agents",
    trace="agentic:sessions=24,turns=6,system_tokens=3000,turn_tokens=200-1500,output=50-250,"
    "rate=3,think_s=3",
    tiny="agentic:sessions=3,turns=3,system_tokens=40,turn_tokens=5-20,output=3-6,"
    "rate=20,think_s=0.05",
    expected_s=45.0,
    cap_s=100.0,
)
"""Sessions that begin at random times, with random thinking times between turns."""

CHAT = Workload(
    name="chat-1024-256",
    trace="static-lengths:n=400,tokens=1024-1024,output=256-256",
    tiny="static-lengths:n=6,tokens=40-40,output=10-10",
    expected_s=50.0,
    cap_s=120.0,
)
"""Requests without shared prefixes. The cache does not have room for all of them at once."""

SHARED_PREFIXES = Workload(
    name="prefixes-1500-700",
    trace="articles:n=8,questions=8,tokens=1500,question=700,output=16",
    tiny="articles:n=2,questions=3,tokens=80,question=30,output=3",
    expected_s=10.0,
    cap_s=40.0,
)
"""64 prompts in eight groups whose shared prefixes end inside a block of states (vllm#45238)."""

LONG_PROMPT_AGAIN = Workload(
    name="80k-thrice",
    trace="articles:n=1,questions=3,tokens=80000,question=32,output=16,order=cyclic",
    tiny="articles:n=1,questions=3,tokens=100,question=8,output=3,order=cyclic",
    is_serial=True,
    expected_s=15.0,
    cap_s=60.0,
)
"""A long prompt that is sent three times, each time after the last answer is complete (vllm#45238).
"""

SEATS = Workload(
    name="seats-36k",
    trace="articles:n=3,questions=3,tokens=12000,question=64,output=16,order=cyclic",
    tiny="articles:n=3,questions=3,tokens=70,question=8,output=3,order=cyclic",
    is_serial=True,
    expected_s=15.0,
    cap_s=60.0,
)
"""Three sessions of 12k tokens that take turns: 36k tokens in a pool of 153k (vllm#48435)."""


def articles(num_articles: int, tokens: int, output: int, **changes: float) -> Workload:
    """Make a workload of four questions on each article, in random order, all sent at the start."""
    return Workload(
        name="articles",
        trace=f"articles:n={num_articles},questions=4,tokens={tokens},output={output}",
        tiny="articles:n=2,questions=2,tokens=90,question=5,output=3",
        **changes,  # pyright: ignore[reportArgumentType] (times alone)
    )


def articles_over_time(num_articles: int, tokens: int, output: int, rate: float) -> Workload:
    """Make the same workload, with arrivals at a rate per second."""
    return Workload(
        name=f"articles-at-{rate:g}",
        trace=f"articles:n={num_articles},questions=4,tokens={tokens},output={output},rate={rate}",
        tiny="articles:n=2,questions=2,tokens=90,question=5,output=3,rate=50",
        expected_s=4 * num_articles / rate + 8,
        cap_s=4 * num_articles / rate + 60,
    )

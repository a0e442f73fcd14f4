"""What no cache could exceed: prefix hits with memory without end, and with the best eviction.

Both take the requests one after another, each finished before the next is looked up. An engine that
runs several at once finds what is still being computed later, and has less memory to cache in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jenga.geometry import tokens_per_slot
from jenga.planning.demand import needed_tokens
from jenga.sim.workload.requests import Request, prefix_hashes
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    LayerType,
    ModelSpec,
    SlidingWindow,
    State,
    TokenBudget,
)

HASH_TOKENS = 16
"""Tokens of the steps in which prefixes are hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most tokens of prompts that could be found cached.

    Attributes:
        prompt_tokens: Of all requests.
        hit_tokens: The most of them that could be hit.
    """

    prompt_tokens: int
    hit_tokens: float

    @property
    def hit_rate(self) -> float:
        """The share that could be hit."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def unlimited(requests: Iterable[Request], *, hash_tokens: int = HASH_TOKENS) -> Bound:
    """Hits if nothing were ever evicted.

    Args:
        requests: In the order of their arrival.
        hash_tokens: Tokens of the steps in which prefixes are hit.
    """
    seen: set[bytes] = set()
    prompt_tokens = hit_tokens = 0
    for request in requests:
        hashes = prefix_hashes(request.pieces, hash_tokens)
        num_tokens = request.prompt_tokens
        prompt_tokens += num_tokens
        num_hit = _shared(hashes, seen, (num_tokens - 1) // hash_tokens)
        hit_tokens += num_hit * hash_tokens
        seen.update(hashes[num_hit:])
    return Bound(prompt_tokens=prompt_tokens, hit_tokens=hit_tokens)


def _shared(hashes: Sequence[bytes], seen: "set[bytes] | dict[bytes, int]", most: int) -> int:
    """How many of the first hashes were seen; those before one that was, were seen too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in seen:
            low = middle
        else:
            high = middle - 1
    return low


def best_eviction(requests: Iterable[Request], model: ModelSpec, arena_bytes: int) -> Bound:
    """Hits of the best that any eviction could do, knowing all requests.

    To hit some tokens again, a request needs them kept since they were last used: keys and values
    of all of them in full attention, of a window's or a chunk's in local attention, and states at
    their end. While other requests run in between, those bytes and what the running one needs at
    its end share the arena. The bound lets bytes be kept during any part of the requests between,
    as long as all that is kept, added up over all requests, is no more than the arena has beside
    what runs; it spends that where it brings most tokens. Nothing is lost to pages.

    No cache that serves one request after another in this order hits more.

    Args:
        requests: In the order of their arrival.
        model: Its layers, of one rank. Cross attention and image embeddings cost nothing here.
        arena_bytes: Of one rank.

    Source: PFOO-L of Berger, Beckmann and Harchol-Balter, "Practical bounds on optimal caching with
        variable object sizes" (SIGMETRICS 2018), over the concave hulls of what requests may hit.
    """
    costs = _Costs(model)
    last_use: dict[bytes, int] = {}
    segments: list[tuple[float, int]] = []  # (bytes times requests, tokens)
    prompt_tokens = free_tokens = 0
    spare_bytes = 0.0
    for number, request in enumerate(requests):
        hashes = prefix_hashes(request.pieces, HASH_TOKENS)
        num_tokens = request.prompt_tokens
        prompt_tokens += num_tokens
        num_shared = _shared(hashes, last_use, (num_tokens - 1) // HASH_TOKENS)
        for cost, tokens in _hull(costs.of_hits(_waits(hashes[:num_shared], last_use, number))):
            if cost:
                segments.append((cost, tokens))
            else:
                free_tokens += tokens
        last_use.update(dict.fromkeys(hashes, number))
        own_bytes = costs.of_request(num_tokens + request.output_tokens - 1)
        spare_bytes += max(0.0, arena_bytes - own_bytes)
    segments.sort(key=lambda segment: segment[0] / segment[1])
    hit_tokens = float(free_tokens)
    for cost, tokens in segments:
        share = min(1.0, spare_bytes / cost)
        hit_tokens += share * tokens
        spare_bytes -= share * cost
    return Bound(prompt_tokens=prompt_tokens, hit_tokens=hit_tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks last used by the same request.

    Attributes:
        start: The first of them.
        end: One past the last.
        wait: Requests since.
        waited: Waits of all blocks before, added up.
    """

    start: int
    end: int
    wait: int
    waited: int


def _waits(hashes: Sequence[bytes], last_use: dict[bytes, int], number: int) -> list[_Run]:
    """Requests since each block was used: the deeper, the longer ago."""
    runs: list[_Run] = []
    start = waited = 0
    while start < len(hashes):
        user = last_use[hashes[start]]
        low, high = start + 1, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if last_use[hashes[middle]] == user:
                low = middle + 1
            else:
                high = middle
        wait = number - user - 1
        runs.append(_Run(start, low, wait, waited))
        waited += wait * (low - start)
        start = low
    return runs


def _waited(runs: Sequence[_Run], num_blocks: float) -> float:
    """Waits of the first blocks, added up."""
    for run in reversed(runs):
        if num_blocks > run.start:
            return run.waited + (num_blocks - run.start) * run.wait
    return 0.0


class _Costs:
    """Bytes that tokens take, times the requests for which they are kept."""

    def __init__(self, model: ModelSpec) -> None:
        self._types: list[tuple[LayerType, float]] = []
        self._full_bytes = self._state_bytes = 0.0  # of a token; of all states
        self._windows: list[tuple[int, float]] = []  # (tokens before the next, bytes of one)
        self._chunks: list[tuple[int, float]] = []
        for layer_type in model.layer_types:
            if isinstance(layer_type, CrossAttention | ImageEmbedding):
                continue
            slot_bytes = sum(layer.slot_bytes for layer in layer_type.layers)
            token_bytes = slot_bytes / tokens_per_slot(layer_type)
            self._types.append((layer_type, token_bytes))
            match layer_type:
                case SlidingWindow(window_tokens=window_tokens):
                    self._windows.append((window_tokens - 1, token_bytes))
                case ChunkedLocal(chunk_tokens=chunk_tokens):
                    self._chunks.append((chunk_tokens, token_bytes))
                case State():
                    self._state_bytes += token_bytes
                case FullAttention() | TokenBudget():
                    self._full_bytes += token_bytes

    def of_request(self, num_tokens: int) -> float:
        """Bytes that the next token of a request needs."""
        return sum(
            needed_tokens(layer_type, num_tokens) * token_bytes
            for layer_type, token_bytes in self._types
        )

    def of_hits(self, runs: Sequence[_Run]) -> list[tuple[float, int]]:
        """What it costs to hit so many tokens, longer hits last: (bytes times requests, tokens).

        Within a run the cost grows ever slower, but for chunks, of which a new one costs nothing:
        only the ends of runs and of chunks can be worth it.
        """
        ends = {run.end * HASH_TOKENS for run in runs}
        last = runs[-1].end * HASH_TOKENS if runs else 0
        for chunk_tokens, _ in self._chunks:
            ends.update(range(chunk_tokens, last + 1, chunk_tokens))
        return [(self._of_hit(runs, tokens), tokens) for tokens in sorted(ends)]

    def _of_hit(self, runs: Sequence[_Run], num_tokens: int) -> float:
        num_blocks = num_tokens / HASH_TOKENS
        waited = _waited(runs, num_blocks) * HASH_TOKENS
        cost = self._full_bytes * waited
        for window_tokens, token_bytes in self._windows:
            first = max(0.0, num_blocks - window_tokens / HASH_TOKENS)
            cost += token_bytes * (waited - _waited(runs, first) * HASH_TOKENS)
        for chunk_tokens, token_bytes in self._chunks:
            first = num_tokens // chunk_tokens * chunk_tokens / HASH_TOKENS
            cost += token_bytes * (waited - _waited(runs, first) * HASH_TOKENS)
        if self._state_bytes:
            wait = next(run.wait for run in runs if num_blocks <= run.end)
            cost += self._state_bytes * wait
        return cost


def _hull(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Segments of the concave hull over points of growing tokens: (cost, tokens) of each."""
    hull = [(0.0, 0)]
    for cost, tokens in points:
        # A longer hit that costs no more makes the shorter one pointless.
        while hull[-1][0] >= cost and len(hull) > 1:
            hull.pop()
        while len(hull) > 1 and _is_under(hull[-2], hull[-1], (cost, tokens)):
            hull.pop()
        hull.append((cost, tokens))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull)]


def _is_under(
    before: tuple[float, int], middle: tuple[float, int], after: tuple[float, int]
) -> bool:
    """Whether the line between two points lies over a third."""
    return (middle[1] - before[1]) * (after[0] - before[0]) <= (after[1] - before[1]) * (
        middle[0] - before[0]
    )

"""Upper bounds on prefix hits: with unlimited memory, and with any eviction.

Both take the requests one after another, so that each ends before the next is looked up. An engine
that runs several requests at once cannot hit tokens that are still being computed, and it has less
memory for its cache.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jenga.planning.demand import needed_tokens
from jenga.policies import NEVER, LayerPolicy, RequestFacts
from jenga.sim.workload.requests import Request, prefix_hashes
from jenga.spec import LayerType, ModelSpec

HASH_TOKENS = 16
"""Tokens of a block: prefixes are hit in multiples of it."""

_FACTS = RequestFacts()
"""A request without images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Upper bound on the prompt tokens that are found cached.

    Attributes:
        prompt_tokens: Prompt tokens of all requests.
        hit_tokens: Largest possible number of them that are hit.
    """

    prompt_tokens: int
    hit_tokens: float

    @property
    def hit_rate(self) -> float:
        """Largest possible share of prompt tokens that are hit."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def unlimited(requests: Iterable[Request], *, hash_tokens: int = HASH_TOKENS) -> Bound:
    """Return the hits of a cache that never evicts.

    Args:
        requests: Requests in the order of their arrival.
        hash_tokens: Tokens of a block: prefixes are hit in multiples of it.
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
    """Return how many of the first hashes were seen. All hashes before a seen one were seen too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in seen:
            low = middle
        else:
            high = middle - 1
    return low


def best_eviction(requests: Iterable[Request], model: ModelSpec, arena_bytes: int) -> Bound:
    """Return an upper bound on the hits of any eviction that knows all requests.

    A hit needs content that was kept since its last use:

    - in full attention, keys and values of all tokens that are hit,
    - in local attention, those of the last window or chunk,
    - in recurrent layers, the states at the end of the hit.

    While other requests run in between, these bytes share the arena with the bytes that the running
    request needs at its end. The bound relaxes this in two ways:

    - Bytes may be kept during only a part of the requests in between.
    - Only the sum over all requests is limited. Kept bytes, times the requests for which they are
      kept, are at most the bytes that the running requests leave free, added up.

    The bound spends this budget where it brings the most tokens. No bytes are lost to pages.

    No cache that serves the requests one after another in this order has more hits.

    Args:
        requests: Requests in the order of their arrival.
        model: Layers of one rank. Cross attention and image embeddings cost nothing here.
        arena_bytes: Bytes of the arena of one rank.

    Source: PFOO-L of Berger, Beckmann and Harchol-Balter, "Practical bounds on optimal caching with
        variable object sizes" (SIGMETRICS 2018), over the concave hulls of what requests may hit.
    """
    costs = _Costs(model)
    last_use: dict[bytes, int] = {}
    segments: list[tuple[float, int]] = []  # (bytes times requests that they wait for, tokens)
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
    """Consecutive blocks that the same request used last.

    Attributes:
        start: Index of the first block.
        end: Index after the last block.
        wait: Number of requests since that last use.
        waited: Sum of the waits of all blocks before `start`.
    """

    start: int
    end: int
    wait: int
    waited: int


def _waits(hashes: Sequence[bytes], last_use: dict[bytes, int], number: int) -> list[_Run]:
    """Group blocks by their last use. The deeper a block is, the longer ago it was used."""
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
    """Return the sum of the waits of the first `num_blocks` blocks."""
    for run in reversed(runs):
        if num_blocks > run.start:
            return run.waited + (num_blocks - run.start) * run.wait
    return 0.0


class _Costs:
    """Costs of hits: bytes of the tokens, times the number of requests for which they are kept."""

    def __init__(self, model: ModelSpec) -> None:
        self._types: list[tuple[LayerType, float]] = []
        self._full_bytes = self._state_bytes = 0.0  # bytes of a token; bytes of all states
        self._partial: list[tuple[LayerPolicy, float]] = []  # each with the bytes of one token
        for layer_type in model.layer_types:
            if layer_type.typical_tokens:
                continue
            token_bytes = layer_type.token_bytes
            self._types.append((layer_type, token_bytes))
            policy = layer_type.policy(1)
            if layer_type.is_state:
                self._state_bytes += token_bytes
            elif policy.next_release(_FACTS, 0, 1) == NEVER:
                self._full_bytes += token_bytes
            else:
                self._partial.append((policy, token_bytes))

    def of_request(self, num_tokens: int) -> float:
        """Return the bytes that the next token of a request needs."""
        return sum(
            needed_tokens(layer_type, num_tokens) * token_bytes
            for layer_type, token_bytes in self._types
        )

    def of_hits(self, runs: Sequence[_Run]) -> list[tuple[float, int]]:
        """Return the costs of hits, shorter hits first: (bytes times requests, tokens) of each.

        Within a run, each further token costs no more than the one before it. In chunked attention
        the cost also drops at the end of a chunk, because a new chunk needs no kept bytes. So only
        hits that end with a run or with a chunk can be the best.
        """
        ends = {run.end * HASH_TOKENS for run in runs}
        last = runs[-1].end * HASH_TOKENS if runs else 0
        for policy, _ in self._partial:
            ends.update(_fresh_starts(policy, last))
        return [(self._of_hit(runs, tokens), tokens) for tokens in sorted(ends)]

    def _of_hit(self, runs: Sequence[_Run], num_tokens: int) -> float:
        num_blocks = num_tokens / HASH_TOKENS
        waited = _waited(runs, num_blocks) * HASH_TOKENS
        cost = self._full_bytes * waited
        for policy, token_bytes in self._partial:
            first = policy.update_last_access(_FACTS, num_tokens, num_tokens).start / HASH_TOKENS
            cost += token_bytes * (waited - _waited(runs, first) * HASH_TOKENS)
        if self._state_bytes:
            wait = next(run.wait for run in runs if num_blocks <= run.end)
            cost += self._state_bytes * wait
        return cost


def _fresh_starts(policy: LayerPolicy, at_most_tokens: int) -> Iterator[int]:
    """Yield the numbers of tokens after which a request needs no slot of before: ends of chunks."""
    at = policy.next_release(_FACTS, 0, 1)
    while at <= at_most_tokens and policy.update_last_access(_FACTS, at, at).start == at:
        yield at
        at = policy.next_release(_FACTS, at, 1)


def _hull(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the segments of the concave hull over points of growing tokens: (cost, tokens)."""
    hull = [(0.0, 0)]
    for cost, tokens in points:
        # A longer hit that costs no more makes the shorter one useless.
        while hull[-1][0] >= cost and len(hull) > 1:
            hull.pop()
        while len(hull) > 1 and _is_under(hull[-2], hull[-1], (cost, tokens)):
            hull.pop()
        hull.append((cost, tokens))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull)]


def _is_under(
    before: tuple[float, int], middle: tuple[float, int], after: tuple[float, int]
) -> bool:
    """Whether the line from the first point to the last lies on or above the middle point."""
    return (middle[1] - before[1]) * (after[0] - before[0]) <= (after[1] - before[1]) * (
        middle[0] - before[0]
    )

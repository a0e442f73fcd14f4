"""The wait queue: which cached content the waiting requests will read, and in which order.

An engine serves its queue in order, so the next reader of a cached page is known as far as the
queue goes. Requests that arrive later are served later. Pages that the queue reads are therefore
worth more than all others, and those of its first requests are worth most.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from jenga.errors import InvariantError
from jenga.policies import RequestFacts
from jenga.prefix.checkpoint_tree import IMAGE, CheckpointTree
from jenga.prefix.lookup import longest_prefix
from jenga.tables.page_table import Table
from jenga.tables.request import Version

FIRST_POSITION = 1 << 35
"""Position of the first waiting request. As many requests can be put before it as after it."""

MOST_LOOKED_UP = 4
"""Most requests looked up in one step. Each takes a few milliseconds for a prompt of 30k tokens."""

MOST_FOLLOWED = 512
"""Most requests whose pages are known at a time.

Requests further behind read their pages too late for these to be kept.
"""

WAITED_STEPS = 2
"""Steps that begin before a request counts as waiting. The first of them may admit it."""

NO_VERSION = Version(None, 0, 0)
"""Version of hits that no request will start from."""


SHORT_QUEUE = 3
"""Number of waiting requests below which no admission is held back for the cache.

The request that is held back waits longer, and those behind it gain.
"""

LONG_QUEUE = 32
"""Number of waiting requests from which on admissions are held back, until the queue is short.

In models with states a queue is long as soon as it is not short. What they evict is lost whole, and
many requests pay for it.
"""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that was announced and has not ended.

    Attributes:
        position: Place in the queue. The lowest is served first.
        step: Step in which it was announced.
        prefix_hashes: Hash i covers its first `(i + 1) * hash_tokens` tokens.
        num_tokens: Number of its tokens.
        facts: Facts of the request.
        branch_tokens: Number of first tokens shared with cached content or with a request before
            it.
        reread_tokens: Number of first tokens shared with a running request or a request before it.
        continues_other: Whether it begins with the whole prompt of one of them.
        keys: Names of the points that it will read. Empty until the request was looked up.
    """

    position: int
    step: int
    prefix_hashes: Sequence[bytes]
    num_tokens: int
    facts: RequestFacts
    branch_tokens: int = 0
    reread_tokens: int = 0
    continues_other: bool = False
    keys: list[Hashable] = field(default_factory=list[Hashable])


class WaitQueue:
    """The engine's wait queue, followed as far ahead as the arena could keep what it reads.

    Attributes:
        reread_tokens: Sum of `WaitingRequest.reread_tokens` over all requests that were looked up
            and wait, without those that begin with the whole prompt of another request.
        asked_tokens: Number of tokens of these requests, without the last token of each.
    """

    __slots__ = (
        "_bytes",
        "_first",
        "_fixed_bytes",
        "_followed",
        "_hash_tokens",
        "_horizon_bytes",
        "_is_long",
        "_is_on",
        "_last",
        "_long_queue",
        "_running",
        "_step",
        "_tables",
        "_token_bytes",
        "_tree",
        "_unknown",
        "_waiters",
        "asked_tokens",
        "reread_tokens",
    )

    def __init__(
        self,
        tables: Sequence[Table],
        tree: CheckpointTree,
        *,
        hash_tokens: int,
        arena_bytes: int,
        is_on: bool,
    ) -> None:
        """Create an empty queue.

        Args:
            tables: All page tables.
            tree: Told which checkpoints waiting requests will read.
            hash_tokens: Number of tokens that each further prefix hash covers.
            arena_bytes: Size of the arena. Requests are looked up until they read this many bytes.
            is_on: Whether to look up what requests will read. If not, only their names are kept.
        """
        self._tables = tables
        self._tree = tree
        self._token_bytes, self._fixed_bytes = tree.parts.token_bytes, tree.parts.fixed_bytes
        self._hash_tokens = hash_tokens
        self._horizon_bytes = arena_bytes
        self._is_on = is_on
        has_states = any(table.policy.is_overwritten for table in tables)
        self._long_queue = SHORT_QUEUE if has_states else LONG_QUEUE
        self._is_long = False
        self._waiters: dict[str, WaitingRequest] = {}
        self._unknown: dict[str, WaitingRequest] = {}  # announced and not looked up yet, in order
        self._followed: dict[str, WaitingRequest] = {}  # looked up and not admitted
        self._running: dict[str, WaitingRequest] = {}
        self._bytes: dict[Hashable, float] = {}  # estimate for each awaited point
        self.reread_tokens = self.asked_tokens = 0
        self._first = self._last = FIRST_POSITION
        self._step = 0

    def announce(
        self,
        request_id: str,
        prefix_hashes: Sequence[bytes],
        num_tokens: int,
        facts: RequestFacts,
        *,
        first: bool = False,
    ) -> None:
        """Put a request at the end of the queue, or at its head. See `Manager.announce`.

        Raises:
            ValueError: The request waits already, or is running.
        """
        if request_id in self._waiters:
            msg = f"request_id must name a request that was not announced, got {request_id!r}"
            raise ValueError(msg)
        if first:
            self._first -= 1
            position = self._first
        else:
            self._last += 1
            position = self._last
        waiter = WaitingRequest(position, self._step, prefix_hashes, num_tokens, facts)
        self._waiters[request_id] = waiter
        if not self._is_on:
            return
        if first:
            self._follow(request_id, waiter)
        else:
            self._unknown[request_id] = waiter
        self._watch_length()

    @property
    def num_waiting(self) -> int:
        """Number of announced requests that were not admitted. It is 0 if none is followed."""
        return len(self._unknown) + len(self._followed)

    @property
    def is_short(self) -> bool:
        """Whether requests wait, and so few that no admission is held back for the cache."""
        return self.num_waiting > 0 and not self._is_long

    def _watch_length(self) -> None:
        """Find out whether the queue is long, now that its length has changed."""
        num_waiting = self.num_waiting
        if num_waiting >= self._long_queue:
            self._is_long = True
        elif num_waiting < SHORT_QUEUE:
            self._is_long = False

    def begin_step(self, step: int) -> None:
        """Look up requests that have waited for more than a step.

        Requests behind them are not looked up once the known ones read as many bytes as the arena
        has.
        """
        self._step = step
        for _ in range(MOST_LOOKED_UP):
            if not self._unknown or len(self._followed) >= MOST_FOLLOWED:
                return
            request_id, waiter = next(iter(self._unknown.items()))
            if (
                step - waiter.step < WAITED_STEPS
                or sum(self._bytes.values()) >= self._horizon_bytes
            ):
                return
            del self._unknown[request_id]
            self._follow(request_id, waiter)

    def start_running(self, request_id: str) -> None:
        """Record that a request is running. Its own use protects the pages that it reads."""
        waiter = self._waiters.get(request_id)
        if waiter is not None and self._is_on:
            self._leave_queue(request_id, waiter)
            self._running[request_id] = waiter

    def drop_request(self, request_id: str) -> None:
        """Record that a request has ended, or does not wait any more."""
        waiter = self._waiters.pop(request_id, None)
        self._running.pop(request_id, None)
        if waiter is not None:
            self._leave_queue(request_id, waiter)

    def shared_tokens(self, request_id: str) -> int:
        """First tokens that a request shares with cached content or earlier requests, if known."""
        waiter = self._waiters.get(request_id)
        return waiter.branch_tokens if waiter is not None else 0

    def reread_by(self, request_id: str) -> int:
        """First tokens that a request shared with running or waiting requests at its lookup."""
        waiter = self._waiters.get(request_id)
        return waiter.reread_tokens if waiter is not None else 0

    def sharers(self, request_id: str, num_tokens: int) -> Iterator[tuple[str, int]]:
        """Yield running requests that share more than `num_tokens` tokens with a waiting request.

        Args:
            request_id: The waiting request. If it was not announced, nothing is yielded.
            num_tokens: Number of tokens, a multiple of `hash_tokens`.

        Yields:
            Name of the running request, and the number of tokens that both begin with.
        """
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            for other_id, other in self._running.items():
                shared = self._shared_hashes(waiter, other, num_tokens // self._hash_tokens)
                if shared:
                    yield other_id, shared * self._hash_tokens

    def branch_tokens(self, request_id: str) -> set[int]:
        """Return token counts at which other waiting requests part from the text of a request."""
        waiter = self._waiters.get(request_id)
        if waiter is None:
            return set()
        hashes = waiter.prefix_hashes
        found: set[int] = set()
        for other in self._followed.values():
            tokens = other.branch_tokens
            last = tokens // self._hash_tokens - 1
            if (
                tokens
                and other is not waiter
                and tokens not in found
                and last < len(hashes)
                and hashes[last] == other.prefix_hashes[last]
            ):
                found.add(tokens)
        return found

    def _follow(self, request_id: str, waiter: WaitingRequest) -> None:
        """Look up what a request will read, and let the tree keep it until then."""
        self._followed[request_id] = waiter
        asked_tokens = waiter.num_tokens - 1
        hit = longest_prefix(
            self._tables,
            waiter.prefix_hashes,
            waiter.facts,
            max_tokens=asked_tokens,
            version=NO_VERSION,
        )
        waiter.reread_tokens = self._shared_tokens(waiter)
        waiter.branch_tokens = max(hit.num_tokens, waiter.reread_tokens)
        waiter.continues_other = any(
            self._continues(waiter, other) for other in self._others_before(waiter)
        )
        if not waiter.continues_other:
            self.reread_tokens += waiter.reread_tokens
            self.asked_tokens += asked_tokens
        waiter.keys = self._keys(waiter, hit.num_tokens)
        for key in waiter.keys:
            if self._tree.pool.await_point(key, waiter.position):
                self._bytes[key] = self._fixed_bytes + self._token_bytes * waiter.branch_tokens

    def _keys(self, waiter: WaitingRequest, hit_tokens: int) -> list[Hashable]:
        """Return names of the points that a request may go on from when it is admitted.

        One is where its text parts from other texts by then. The other is the checkpoint that it
        could go on from now. Its images come in addition.
        """
        tree, hashes = self._tree, waiter.prefix_hashes
        names: dict[Hashable, None] = {}
        end_tokens = waiter.branch_tokens // tree.align_tokens * tree.align_tokens
        if end_tokens > tree.ahead_tokens:
            names[hashes[end_tokens // self._hash_tokens - 1]] = None
        name = tree.covering(hashes, waiter.facts, hit_tokens)
        if name is not None:
            names[name] = None
        for table in self._tables:
            if table.policy.names_images:
                for image in waiter.facts.images:
                    if image.content is not None:
                        names[IMAGE, table.index, image.content] = None
        return list(names)

    def _shared_tokens(self, waiter: WaitingRequest) -> int:
        """Return the most first tokens shared with a running request or a request before it."""
        num_shared = 0
        has_states = any(table.policy.is_overwritten for table in self._tables)
        for other in self._others_before(waiter):
            more = self._shared_hashes(waiter, other, num_shared)
            # No state is kept after the end of a prompt.
            end = (other.num_tokens - 1) // self._hash_tokens
            num_shared = max(num_shared, min(more, end) if has_states else more)
        return num_shared * self._hash_tokens

    def _others_before(self, waiter: WaitingRequest) -> Iterator[WaitingRequest]:
        """Yield the running requests, and those before a request in the queue."""
        ahead = (each for each in self._followed.values() if each.position < waiter.position)
        return chain(self._running.values(), ahead)

    def _shared_hashes(self, waiter: WaitingRequest, other: WaitingRequest, at_least: int) -> int:
        """Number of hashes that two requests begin with, without those of the last token.

        It is 0 if there are no more than `at_least`.
        """
        hashes, theirs = waiter.prefix_hashes, other.prefix_hashes
        most = min((waiter.num_tokens - 1) // self._hash_tokens, len(hashes), len(theirs))
        if at_least >= most or theirs[at_least] != hashes[at_least]:
            return 0
        # Equal hashes mean that all hashes before them are equal, so bisection finds the last.
        low, high = at_least + 1, most
        while low < high:
            middle = (low + high + 1) // 2
            if theirs[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def continues_running(self, request_id: str) -> bool:
        """Whether a request begins with the whole prompt of a running one.

        It is a further sample of the prompt, or a later turn of the conversation.
        """
        waiter = self._waiters.get(request_id)
        return waiter is not None and any(
            self._continues(waiter, other) for other in self._running.values()
        )

    def _continues(self, waiter: WaitingRequest, other: WaitingRequest) -> bool:
        """Whether a request begins with all prefix hashes of another one's prompt."""
        num_hashes = (other.num_tokens - 1) // self._hash_tokens
        return (
            waiter is not other
            and 0 < num_hashes <= len(waiter.prefix_hashes)
            and waiter.prefix_hashes[num_hashes - 1] == other.prefix_hashes[num_hashes - 1]
        )

    def _leave_queue(self, request_id: str, waiter: WaitingRequest) -> None:
        self._unknown.pop(request_id, None)
        is_unfollowed = self._followed.pop(request_id, None) is None
        self._watch_length()
        if is_unfollowed:
            return
        if not waiter.continues_other:
            self.reread_tokens -= waiter.reread_tokens
            self.asked_tokens -= waiter.num_tokens - 1
        for key in waiter.keys:
            if self._tree.pool.await_no_more(key, waiter.position):
                del self._bytes[key]
        waiter.keys = []

    def check(self) -> None:
        """Raise `InvariantError` unless the tree knows which requests wait for which points."""
        expected: dict[Hashable, list[int]] = {}
        for waiter in self._followed.values():
            for key in waiter.keys:
                insort(expected.setdefault(key, []), waiter.position)
        awaited = self._tree.pool.awaited
        if expected != awaited:
            msg = f"{len(expected)} points are waited for, {len(awaited)} are noted"
            raise InvariantError(msg)
        followed = [each for each in self._followed.values() if not each.continues_other]
        reread_tokens = sum(waiter.reread_tokens for waiter in followed)
        asked_tokens = sum(waiter.num_tokens - 1 for waiter in followed)
        if (reread_tokens, asked_tokens) != (self.reread_tokens, self.asked_tokens):
            msg = (
                f"requests that wait share {reread_tokens} of {asked_tokens} tokens, "
                f"{self.reread_tokens} of {self.asked_tokens} counted"
            )
            raise InvariantError(msg)

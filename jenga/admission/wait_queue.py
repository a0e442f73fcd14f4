"""Requests that wait for admission: what they will read of what is cached, and who reads it first.

An engine serves its queue in order, so as far as the queue goes the next reader of a cached page is
known. What comes in later is served later: pages that the queue reads are worth more than any
others, and those of its first requests most.

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

FIRST_POSITION = 1 << 35
"""Position of the first request that waits: as many can be put before it as after it."""

MOST_LOOKED_UP = 4
"""Requests looked up in one step: with prompts of 30k tokens each takes a few milliseconds."""

MOST_FOLLOWED = 512
"""Requests whose pages are known at a time: what is further behind is read too late to keep."""

WAITED_STEPS = 2
"""Steps that begin before a request counts as waiting: the first may admit it."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that was announced and has not ended.

    Attributes:
        position: Its place in the queue, the lowest first.
        step: When it was announced.
        prefix_hashes: Hash i is of its first `(i + 1) * hash_tokens` tokens.
        num_tokens: Its tokens.
        facts: What is known of it.
        branch_tokens: Tokens it shares with what is cached or comes before it.
        reread_tokens: Tokens it shares with requests that run or come in before it.
        keys: Names of the points that it will read; empty until it was looked up.
    """

    position: int
    step: int
    prefix_hashes: Sequence[bytes]
    num_tokens: int
    facts: RequestFacts
    branch_tokens: int = 0
    reread_tokens: int = 0
    keys: list[Hashable] = field(default_factory=list[Hashable])


class Waiting:
    """The queue of an engine, as far ahead as the arena could keep what is read.

    Attributes:
        reread_tokens: Of all requests of the queue together, those of `Waiter`.
        asked_tokens: All their tokens but for the last ones.
    """

    __slots__ = (
        "_bytes",
        "_first",
        "_fixed_bytes",
        "_followed",
        "_hash_tokens",
        "_horizon_bytes",
        "_is_on",
        "_last",
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
        """Nobody waits.

        Args:
            tables: All page tables.
            tree: Told which checkpoints are waited for.
            hash_tokens: Tokens that each further prefix hash covers.
            arena_bytes: Of which more need not be known.
            is_on: Whether what requests will read matters: else only their names are known.
        """
        self._tables = tables
        self._tree = tree
        self._token_bytes, self._fixed_bytes = tree.bytes_of_points()
        self._hash_tokens = hash_tokens
        self._horizon_bytes = arena_bytes
        self._is_on = is_on
        self._waiters: dict[str, Waiter] = {}
        self._unknown: dict[str, Waiter] = {}  # not looked up yet, in order
        self._followed: dict[str, Waiter] = {}  # looked up and not admitted
        self._running: dict[str, Waiter] = {}
        self._bytes: dict[Hashable, float] = {}  # about those of each point that is waited for
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
        """Put a request at the end of the queue, or at its head; see `Manager.announce`.

        Raises:
            ValueError: It waits already, or runs.
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
        waiter = Waiter(position, self._step, prefix_hashes, num_tokens, facts)
        self._waiters[request_id] = waiter
        if not self._is_on:
            return
        if first:
            self._follow(request_id, waiter)
        else:
            self._unknown[request_id] = waiter

    def begin_step(self, step: int) -> None:
        """Look up what has waited for more than a step, as far as it matters."""
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

    def admit(self, request_id: str) -> None:
        """Note that a request runs: what it reads, it uses."""
        waiter = self._waiters.get(request_id)
        if waiter is not None and self._is_on:
            self._leave_queue(request_id, waiter)
            self._running[request_id] = waiter

    def forget(self, request_id: str) -> None:
        """Note that a request has ended, or waits no longer."""
        waiter = self._waiters.pop(request_id, None)
        self._running.pop(request_id, None)
        if waiter is not None:
            self._leave_queue(request_id, waiter)

    def shared_tokens(self, request_id: str) -> int:
        """Tokens that a request shares with what was cached or came before it, as far as known."""
        waiter = self._waiters.get(request_id)
        return waiter.branch_tokens if waiter is not None else 0

    def reread_by(self, request_id: str) -> int:
        """Tokens that a request shares with others that ran or waited when it was looked up."""
        waiter = self._waiters.get(request_id)
        return waiter.reread_tokens if waiter is not None else 0

    def sharers(self, request_id: str, num_tokens: int) -> Iterator[tuple[str, int]]:
        """Running requests with which one begins for more than some tokens, and for how many.

        Args:
            request_id: Who waits; of others nothing is known.
            num_tokens: A multiple of `hash_tokens`.
        """
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            for other_id, other in self._running.items():
                shared = self._shared_hashes(waiter, other, num_tokens // self._hash_tokens)
                if shared:
                    yield other_id, shared * self._hash_tokens

    def branch_tokens(self, request_id: str) -> set[int]:
        """Tokens of a request after which one that waits goes another way."""
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
                and tokens not in found
                and last < len(hashes)
                and hashes[last] == other.prefix_hashes[last]
            ):
                found.add(tokens)
        return found

    def _follow(self, request_id: str, waiter: Waiter) -> None:
        """Find what a request will read, and keep it until then."""
        self._followed[request_id] = waiter
        asked_tokens = waiter.num_tokens - 1
        hit = longest_prefix(
            self._tables,
            waiter.prefix_hashes,
            waiter.facts,
            max_tokens=asked_tokens,
            version=(None, 0, 0),
        )
        waiter.reread_tokens = self._shared_tokens(waiter)
        waiter.branch_tokens = max(hit.num_tokens, waiter.reread_tokens)
        self.reread_tokens += waiter.reread_tokens
        self.asked_tokens += asked_tokens
        waiter.keys = self._keys(waiter, hit.num_tokens)
        for key in waiter.keys:
            if self._tree.await_point(key, waiter.position):
                self._bytes[key] = self._fixed_bytes + self._token_bytes * waiter.branch_tokens

    def _keys(self, waiter: Waiter, hit_tokens: int) -> list[Hashable]:
        """Names of the points that a request may go on from when it comes in.

        It is where its text parts from others by then, or only where it could go on from now.
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

    def _shared_tokens(self, waiter: Waiter) -> int:
        """Tokens shared with a request that runs, or comes in before."""
        num_shared = 0
        has_states = any(table.policy.is_overwritten for table in self._tables)
        ahead = (each for each in self._followed.values() if each.position < waiter.position)
        for other in chain(self._running.values(), ahead):
            more = self._shared_hashes(waiter, other, num_shared)
            # Of states none is kept behind the end of a prompt.
            end = (other.num_tokens - 1) // self._hash_tokens
            num_shared = max(num_shared, min(more, end) if has_states else more)
        return num_shared * self._hash_tokens

    def _shared_hashes(self, waiter: Waiter, other: Waiter, at_least: int) -> int:
        """Hashes that two requests begin with, but for the last token; 0 if not more than these."""
        hashes, theirs = waiter.prefix_hashes, other.prefix_hashes
        most = min((waiter.num_tokens - 1) // self._hash_tokens, len(hashes), len(theirs))
        if at_least >= most or theirs[at_least] != hashes[at_least]:
            return 0
        # Equal hashes mean equal hashes before.
        low, high = at_least + 1, most
        while low < high:
            middle = (low + high + 1) // 2
            if theirs[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def _leave_queue(self, request_id: str, waiter: Waiter) -> None:
        self._unknown.pop(request_id, None)
        if self._followed.pop(request_id, None) is None:
            return
        self.reread_tokens -= waiter.reread_tokens
        self.asked_tokens -= waiter.num_tokens - 1
        for key in waiter.keys:
            if self._tree.await_no_more(key, waiter.position):
                del self._bytes[key]
        waiter.keys = []

    def check(self) -> None:
        """Raise `InvariantError` unless page tables know exactly who waits for what."""
        expected: dict[Hashable, list[int]] = {}
        for waiter in self._followed.values():
            for key in waiter.keys:
                insort(expected.setdefault(key, []), waiter.position)
        if expected != self._tree.awaited:
            msg = f"{len(expected)} points are waited for, {len(self._tree.awaited)} are noted"
            raise InvariantError(msg)
        followed = self._followed.values()
        reread_tokens = sum(waiter.reread_tokens for waiter in followed)
        asked_tokens = sum(waiter.num_tokens - 1 for waiter in followed)
        if (reread_tokens, asked_tokens) != (self.reread_tokens, self.asked_tokens):
            msg = (
                f"requests that wait share {reread_tokens} of {asked_tokens} tokens, "
                f"{self.reread_tokens} of {self.asked_tokens} counted"
            )
            raise InvariantError(msg)

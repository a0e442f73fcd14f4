"""An eviction policy that knows the trace: a goal for all policies with the same checkpoints.

It evicts the checkpoint with the least worth: the tokens that it saves, divided by its bytes and by
the time until it is next read. A request reads only the last checkpoint on its text. A checkpoint
is therefore useful only to later requests that find no checkpoint beyond it.

The policy is a greedy rule that can run. It is not an upper bound; `jenga.sim.replays.bounds` has
one.

Source: Belady's rule of the farthest next use, over tokens for bytes as in the oracle of
"GreedyDual-Size" comparisons (Cao and Irani, USITS 1997).
"""

from collections.abc import Hashable, Iterable, Sequence

from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Point
from jenga.eviction.policy import Candidate
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.workload.requests import Request, prefix_hashes

HASH_TOKENS = 16
"""Tokens between two prefix hashes, as in `jenga.sim.arenas.jenga_arena`."""

MOST_LOOKED_AT = 64
"""Most later requests that are checked as readers of a checkpoint. Further ones arrive late."""

LEAST_WAIT_S = 0.01
"""Shortest time in seconds until a checkpoint is read: that of a request about to be admitted."""


class _Reader:
    """A request of the trace that may read checkpoints.

    Attributes:
        request: The request.
        session: Name of the first request that it follows, directly or indirectly.
        arrival_s: Its arrival time in seconds, as estimated by the trace.
        has_begun: Whether it was admitted.
        num_shared: Number of its prompt tokens that earlier requests read or generated.
        hashes: Prefix hashes. Hash `i` is that of its first `(i + 1) * HASH_TOKENS` tokens.
        node: Last node on its text that existed at `looked_at`.
        looked_at: Time of the tree when `node` was looked up.
    """

    __slots__ = (
        "arrival_s",
        "has_begun",
        "hashes",
        "looked_at",
        "node",
        "num_shared",
        "request",
        "session",
    )

    def __init__(self, request: Request, session: str, hashes: Sequence[bytes]) -> None:
        self.request = request
        self.session = session
        self.arrival_s = request.arrival_s
        self.has_begun = False
        self.num_shared = 0
        self.hashes = hashes
        self.node: Checkpoint | None = None
        self.looked_at = -1.0


class Oracle:
    """Rank checkpoints by the time of their next read, for one replay of one trace."""

    __slots__ = ("_delay_s", "_now_s", "_readers", "_readers_of", "_tree")

    weighs_guesses = False

    def __init__(self, requests: Iterable[Request]) -> None:
        """Read the trace.

        Args:
            requests: All requests, in any order. A request that follows others is assumed to be as
                late as the last admitted turn of its session was.
        """
        self._tree: CheckpointTree | None = None
        self._now_s = 0.0
        self._delay_s: dict[str, float] = {}  # session -> seconds that its last turn was late
        self._readers: dict[str, _Reader] = {}
        self._readers_of: dict[Hashable, list[_Reader]] = {}
        sessions: dict[str, str] = {}
        seen: set[bytes] = set()
        in_order = sorted(requests, key=lambda each: each.arrival_s)
        for request in in_order:
            followed = request.after[0] if request.after else request.name
            session = sessions[request.name] = sessions.get(followed, followed)
            hashes = prefix_hashes(request.pieces, HASH_TOKENS)
            reader = _Reader(request, session, hashes)
            self._readers[request.name] = reader
            for key in hashes[: (request.prompt_tokens - 1) // HASH_TOKENS]:
                if key not in seen:
                    break
                reader.num_shared += HASH_TOKENS
                self._readers_of.setdefault(key, []).append(reader)
            seen.update(hashes)

    def attach(self, tree: CheckpointTree) -> None:
        """Set the tree whose checkpoints are ranked. It must be set before any is ranked."""
        self._tree = tree

    def look(self, time_s: float, running: Sequence[ActiveRequest]) -> None:
        """Record which requests were admitted.

        Args:
            time_s: Current time in seconds.
            running: Requests that have pages, the youngest last.
        """
        self._now_s = time_s
        for active in reversed(running):
            reader = self._readers[active.name]
            if reader.has_begun:
                if not active.num_preemptions:
                    return
                continue
            reader.has_begun = True
            self._delay_s[reader.session] = active.arrival_s - reader.arrival_s

    def begin(self, *, arena_bytes: int) -> None:
        """Do nothing: ranks do not depend on it."""

    def observe(self, point: Point, waited_bytes: float, *, was_read: bool) -> None:
        """Do nothing: ranks do not depend on it."""

    def learn(self, waiting: Iterable[Point], time: float) -> None:
        """Do nothing: ranks do not depend on it."""

    def heir_of(self, candidate: Candidate, heir: Candidate, time: float) -> Point | None:
        """Return None, because later readers are known and need no guess."""

    def worth(self, candidate: Candidate, time: float) -> float:
        """Return the saved tokens per byte and per second until the next read.

        A checkpoint that is never read again gets a negative value: minus its bytes.

        Raises:
            ValueError: The tree was not set.
        """
        if self._tree is None:
            msg = "attach must be given the tree before its checkpoints are ranked"
            raise ValueError(msg)
        wait_s = self._wait_s(candidate, time)
        if wait_s is None:
            return -float(candidate.own_bytes)
        return candidate.saved_tokens / max(1, candidate.own_bytes) / max(LEAST_WAIT_S, wait_s)

    def _wait_s(self, candidate: Candidate, time: float) -> float | None:
        """Return the seconds until a checkpoint is next read, or None if it never is."""
        readers = self._readers_of.get(candidate.point.key)
        if readers is None:
            return None
        while readers and readers[0].has_begun:
            del readers[0]
        best_s: float | None = None
        for reader in readers[:MOST_LOOKED_AT]:
            if reader.has_begun or self._node_of(reader, time) is not candidate:
                continue
            arrival_s = reader.arrival_s + self._delay_s.get(reader.session, 0.0)
            if best_s is None or arrival_s < best_s:
                best_s = arrival_s
            if not reader.request.after:
                break
        return best_s - self._now_s if best_s is not None else None

    def _node_of(self, reader: _Reader, time: float) -> Checkpoint | None:
        """Return the checkpoint that a request would read now."""
        tree = self._tree
        if tree is not None and (reader.looked_at != time or reader.node is None):
            reader.looked_at = time
            reader.node = tree.last_node(reader.hashes, reader.request.facts, reader.num_shared)
        node: Checkpoint | None = reader.node
        while node is not None and not node.is_kept:
            node = node.parent
        if node is not None:
            reader.node = node
        return node

"""New points, compared with the checkpoints that they would evict.

Many points that requests leave are never read. A point that is worth less than what it would evict
is only remembered, without a checkpoint. If a request asks for it later, the eviction policy learns
from that as from any read.
"""

from collections.abc import Sequence

from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import GUESSES, Kind, Past, Point
from jenga.prefix.checkpoint_tree import CheckpointTree


class NewPoints:
    """Decides which new points are remembered without a checkpoint."""

    __slots__ = ("_parts", "_points", "_pool", "_tree")

    def __init__(self, tree: CheckpointTree) -> None:
        """Compare new points for a tree.

        Args:
            tree: Tree that would keep the points.
        """
        self._tree = tree
        self._parts, self._points, self._pool = tree.parts, tree.points, tree.pool

    def turns_down(
        self,
        node_before: Checkpoint,
        prefix_hashes: Sequence[bytes],
        num_tokens: int,
        kind: Kind,
        past: Past,
    ) -> bool:
        """Remember a point without a checkpoint, if it is a guess and not worth its memory.

        Only windows can wait like this. While their pages are cached, a hit makes a checkpoint of
        them. States that are not kept are lost.

        Args:
            node_before: A node before the point on the same text.
            prefix_hashes: Prefix hashes of the text.
            num_tokens: Place of the point.
            kind: Kind of the point.
            past: Past of the points that the request leaves.

        Returns:
            Whether the point is remembered without a checkpoint.
        """
        parts, price = self._parts, self._pool.price
        if (
            kind not in GUESSES
            or parts.states
            or not parts.windows
            or price is None
            or not self._pool.weighs_guesses
        ):
            return False
        node = self._tree.node_at(prefix_hashes, num_tokens)
        if node is not None and node.is_kept:
            return False
        key = prefix_hashes[num_tokens // parts.hash_tokens - 1]
        guess = self._guess(node_before, key, num_tokens, kind, past)
        new_tokens = max(0, num_tokens - node_before.still_there.num_tokens)
        guess.own_bytes = parts.fixed_bytes + int(parts.token_bytes * new_tokens)
        if self._pool.worth(guess) >= price:
            return False
        self._points.record_point(key, num_tokens, kind, past)
        return True

    def skips_states(
        self, node_before: Checkpoint, key: bytes, num_tokens: int, kind: Kind, past: Past
    ) -> Point | None:
        """Remember a point without its states, if they are worth less than what they would evict.

        Call this if a copy of the states would evict a checkpoint.

        Args:
            node_before: A node before the point on the same text.
            key: Hash of the tokens up to the point.
            num_tokens: Place of the point.
            kind: Kind of the point.
            past: Past of the points that the request leaves.

        Returns:
            The point. None if its states should be kept: a waiting request will read them, or they
            are worth more than what is evicted next.
        """
        pool = self._pool
        if key in pool.awaited or not pool.weighs_guesses:
            return None
        guess = self._guess(node_before, key, num_tokens, kind, past)
        # Its keys and values are cached in any case, as long as the request runs.
        guess.own_bytes = self._parts.state_bytes
        victim = pool.draw()
        if victim is not None and pool.worth(guess) >= pool.worth(victim):
            return None
        return self._points.record_point(key, num_tokens, kind, past)

    def _guess(
        self, node_before: Checkpoint, key: bytes, num_tokens: int, kind: Kind, past: Past
    ) -> Checkpoint:
        """Return what would be kept at a point, for the policy to compare. It has no bytes yet."""
        before = node_before.still_there
        if not before.is_kept:
            before = before.kept_before
        guess = Checkpoint(key, num_tokens, num_tokens, None)
        guess.point = Point(key, num_tokens, kind, past, self._points.time)
        guess.saved_tokens = num_tokens - (before.num_tokens if before is not None else 0)
        return guess

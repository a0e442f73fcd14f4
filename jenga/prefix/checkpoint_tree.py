"""The tree of cached texts: the checkpoints kept for other requests, and the pages of each.

A request can go on from a point of a text only if it finds all that it needs. These are the keys
and values of the whole prefix, the windows before the point, and the states after it. A part of
them is worth nothing. Points are therefore kept whole and evicted whole, as checkpoints
(`jenga.eviction.checkpoint`). Where a point needs only the keys and values of its prefix, its end
can be cut off instead. What is left is a checkpoint of a shorter prefix.

Cached pages are of two kinds:

- Pages that a checkpoint needs are *pinned* by it. They stay until all checkpoints that need them
  are evicted.
- All other pages are *loose*, such as windows that a prompt has passed. They stay as long as the
  memory is not needed elsewhere. They are evicted before any checkpoint, the oldest first. A hit on
  loose pages makes a checkpoint of them.

The tree keeps checkpoints, and evicts or cuts them. Which one goes next is chosen elsewhere
(`jenga.prefix.eviction_pool`).
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

from jenga.errors import InvariantError
from jenga.eviction.checkpoint import NOT_IN_POOL, Checkpoint
from jenga.eviction.points import NO_POINT, Kind, Past, Point, RememberedPoints, past_of
from jenga.eviction.policy import EvictionPolicy
from jenga.page_ids import SmallPageId
from jenga.policies import RequestFacts
from jenga.prefix.eviction_log import EvictionCause, EvictionLog
from jenga.prefix.eviction_pool import EvictionPool
from jenga.prefix.host_cache import HostCache
from jenga.prefix.question_length import QuestionLength
from jenga.tables.page_table import Table
from jenga.tables.point_parts import PointParts
from jenga.tables.request import StatePage

IMAGE = "image"
"""First element of the names of images among names of points."""

CUT_TOKENS = 1024
"""Number of tokens taken at a time from the end of a checkpoint without windows and states."""

CUT_SHARE = 1 / 32
"""Largest share of the arena that is cut from a checkpoint at a time.

In a small arena, more than needed would be lost otherwise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The tree's findings about an admitted request.

    Attributes:
        past: Past of the points that it will leave.
        last_point: The last remembered point on its text, if any.
        branches: Numbers of tokens after which requests parted on its text, beyond its hit.
    """

    past: Past
    last_point: Point | None
    branches: Sequence[int]


class CheckpointTree:
    """Checkpoints of one arena.

    Attributes:
        parts: Page tables, by the part of a checkpoint that they have, and the bytes of each part.
        points: Points that are remembered, and the time.
        pool: Checkpoints that may be evicted, and the choice of the next one.
        questions: How long the questions at the ends of prompts are.
        log: Record of the checkpoints that are lost. None, the default, records none.
        num_evicted: Number of checkpoints evicted whole so far. Cut ends are not counted.
        num_lost_bytes: Bytes of pages emptied so far because no checkpoint needs them any more.
        align_tokens: Checkpoints are at multiples of this number of tokens.
        ahead_tokens: Number of tokens after a checkpoint that are cached with it.
    """

    __slots__ = (
        "_by_key",
        "_cut_nodes",
        "_cut_tokens",
        "_hash_tokens",
        "_host",
        "_policy",
        "_prefix_tables",
        "_root",
        "_state_tables",
        "_tables",
        "_window_tables",
        "ahead_tokens",
        "align_tokens",
        "log",
        "num_evicted",
        "num_lost_bytes",
        "parts",
        "points",
        "pool",
        "questions",
    )

    def __init__(
        self,
        tables: Sequence[Table],
        policy: EvictionPolicy,
        *,
        hash_tokens: int,
        ahead_tokens: int,
        arena_bytes: int,
        host: HostCache | None,
    ) -> None:
        """Create an empty tree.

        Args:
            tables: All page tables.
            policy: Says what checkpoints are worth.
            hash_tokens: Number of tokens that each further prefix hash covers.
            ahead_tokens: Number of tokens after a checkpoint that must be cached with it.
            arena_bytes: Size of the arena.
            host: Host memory, where evicted pages can still be found. None if there is none.
        """
        self._tables = tables
        self._host = host
        self.parts = PointParts(tables, hash_tokens=hash_tokens, ahead_tokens=ahead_tokens)
        self.align_tokens, self.ahead_tokens = self.parts.align_tokens, self.parts.ahead_tokens
        self._hash_tokens = hash_tokens
        self._prefix_tables = self.parts.prefixes
        self._window_tables, self._state_tables = self.parts.windows, self.parts.states
        for index, table in enumerate(self._prefix_tables):
            table.begin_segments(index)
        self._cut_tokens = self._cut_size(arena_bytes)
        self._policy = policy
        policy.begin(arena_bytes=arena_bytes)
        self.points = RememberedPoints(policy, arena_bytes=arena_bytes)
        self._root = Checkpoint(None, 0, 0, None)
        self._root.segment = [[] for _ in self._prefix_tables]
        self._root.first_pages = [0] * len(self._prefix_tables)
        self._by_key: dict[Hashable, Checkpoint] = {}
        # Nodes whose end was cut off, by the names under which they were made.
        self._cut_nodes: dict[Hashable, Checkpoint] = {}
        self.pool = EvictionPool(
            self.parts, policy, self.points, self._named, arena_bytes=arena_bytes
        )
        self.questions = QuestionLength()
        self.log: EvictionLog | None = None
        self.num_evicted = self.num_lost_bytes = 0

    def _cut_size(self, arena_bytes: int) -> int:
        """Return the tokens cut at a time from a checkpoint, at least those of a large page."""
        large_pages_tokens = [
            table.pages.pages_per_large * table.grain.page_slots for table in self._prefix_tables
        ]
        token_bytes = self.parts.token_bytes
        arena_tokens = int(arena_bytes / token_bytes) if token_bytes else 0
        return max([min(CUT_TOKENS, int(arena_tokens * CUT_SHARE)), *large_pages_tokens])

    def node_at(self, prefix_hashes: Sequence[bytes], num_tokens: int) -> Checkpoint | None:
        """Return the node at a point of a text, if there is one."""
        last = (num_tokens + self.ahead_tokens) // self._hash_tokens - 1
        return self._by_key.get(prefix_hashes[last]) if last < len(prefix_hashes) else None

    def image(self, table: Table, content: Hashable) -> Checkpoint | None:
        """Return the node of an image, if there is one."""
        return self._by_key.get((IMAGE, table.index, content))

    def has_states(self, point_key: Hashable) -> bool:
        """Whether the states of a point are cached.

        Args:
            point_key: Hash of the tokens that the states contain.
        """
        return all(table.page_of(point_key) is not None for table in self._state_tables)

    # Texts

    def last_node(
        self, prefix_hashes: Sequence[bytes], facts: RequestFacts, num_tokens: int
    ) -> Checkpoint:
        """Return the last node on a text within its first `num_tokens` tokens.

        Args:
            prefix_hashes: Hash i covers the text's first `(i + 1) * hash_tokens` tokens.
            facts: Facts of the request.
            num_tokens: Largest number of tokens of the node.
        """
        here = self.node_at(prefix_hashes, num_tokens) if num_tokens else None
        if here is not None:
            return here
        node, shared_tokens = self._owner(prefix_hashes, facts, num_tokens + self.ahead_tokens)
        # The node may continue with another text from there.
        while node.end_tokens > shared_tokens and node.parent is not None:
            node = node.parent
        return node

    def _owner(
        self, prefix_hashes: Sequence[bytes], facts: RequestFacts, end_tokens: int
    ) -> tuple[Checkpoint, int]:
        """Return the node that has the last cached keys and values of a text.

        Args:
            prefix_hashes: Hash i covers the text's first `(i + 1) * hash_tokens` tokens.
            facts: Facts of the request.
            end_tokens: Number of tokens of the text that are looked up.

        Returns:
            The node, and the number of tokens of the text that it and the nodes before it have.
        """
        if not self._prefix_tables:
            for index in range(
                min(end_tokens // self._hash_tokens, len(prefix_hashes)) - 1, -1, -1
            ):
                node = self._by_key.get(prefix_hashes[index])
                if node is not None:
                    return node, node.end_tokens
            return self._root, 0
        guide = self._prefix_tables[0]
        unit = self.align_tokens // guide.grain.page_slots
        num_pages = end_tokens // self.align_tokens * unit
        keys = guide.policy.content_keys(facts, prefix_hashes, guide.grain, range(num_pages))
        get = guide.page_of
        # If a node has a page, nodes have all pages before it.
        low, high = 0, len(keys) // unit
        found = self._root
        middle = high
        while low < high:
            page = get(keys[middle * unit - 1])
            owner = guide.checkpoint_of[page] if page is not None else None
            if owner is None:
                high = middle - 1
            else:
                low, found = middle, owner
            middle = (low + high + 1) // 2
        return found, low * self.align_tokens

    def keep(  # noqa: PLR0913  a place, and all facts about it
        self,
        node_before: Checkpoint,
        prefix_hashes: Sequence[bytes],
        facts: RequestFacts,
        num_tokens: int,
        kind: Kind,
        past: Past,
        *,
        state_pages: Sequence[StatePage] = (),
    ) -> Checkpoint | None:
        """Keep all pages that a request needs to go on from a point of a text.

        Args:
            node_before: A node before the point on the same text.
            prefix_hashes: Hash i covers the text's first `(i + 1) * hash_tokens` tokens.
            facts: Facts of the request.
            num_tokens: Place of the point, a multiple of `align_tokens`.
            kind: Kind of the point.
            past: Past of the points that the request leaves.
            state_pages: States after `num_tokens` tokens. Each is the index of a page table and a
                page with one user. There is one for every page table of states, or none at all if
                these states are cached. The pages are given to the checkpoint, or become empty.

        Returns:
            The checkpoint. None, with nothing changed, if a part of it is not cached.
        """
        if num_tokens + self.ahead_tokens > len(prefix_hashes) * self._hash_tokens:
            return None
        point_key = prefix_hashes[num_tokens // self._hash_tokens - 1]
        node = self.node_at(prefix_hashes, num_tokens)
        if node is not None and node.is_kept:
            self._release(state_pages)
        else:
            # This comes first: a node that is made and not kept would take loose pages with it.
            windows = self._windows(prefix_hashes, facts, num_tokens)
            has_states = len(state_pages) == len(self._state_tables) or self.has_states(point_key)
            if windows is None or not has_states:
                return None
            node = self._reach(node_before.still_there, prefix_hashes, facts, num_tokens)
            if node is None:
                return None
            for table, pages in windows:
                self._pin(node, table, pages)
            self._pin_states(node, point_key, state_pages)
            node.is_kept = True
            node.heir_of = None
            self.pool.enter(node)
        node.point = self.points.record_point(point_key, num_tokens, kind, past)
        if kind == Kind.BRANCH:
            self._drop_guess(node)
        return node

    def _drop_guess(self, node: Checkpoint) -> None:
        """Drop a guessed point before the end of a prompt, now that the real branch is known.

        Readers of the guess count as readers of the branch. A guess in use stays.
        """
        guess = node.kept_before
        if (
            guess is None
            or guess.point.kind != Kind.BEFORE_END
            or node.num_tokens - guess.num_tokens > self.questions.distance(node.num_tokens)
        ):
            return
        self.points.pass_on_reads(guess.point, node.point)
        if guess.place != NOT_IN_POOL:
            point, num_tokens = guess.point, guess.num_tokens
            self.points.forget(point)
            lost_bytes = self.num_lost_bytes
            self._let_go(guess, None)
            if self.log is not None:
                freed_bytes = self.num_lost_bytes - lost_bytes
                self.log.record_loss(
                    EvictionCause.GUESS, guess, point, num_tokens, freed_bytes=freed_bytes
                )

    def keep_images(self, table: Table, pages: Sequence[SmallPageId], past: Past) -> None:
        """Keep an encoder's output for images.

        Args:
            table: Page table in which the output is cached.
            pages: All pages of some images, in order.
            past: Past of the points that the request leaves.
        """
        for key, some in self._images_in(table, pages):
            if key not in self._by_key:
                self._keep_image(key, table, some, past)

    def _keep_image(
        self, key: Hashable, table: Table, pages: list[SmallPageId], past: Past
    ) -> None:
        num_tokens = len(pages) * table.grain.page_slots
        node = Checkpoint(key, num_tokens, 0, self._root)
        node.segment, node.first_pages = self._root.segment, self._root.first_pages
        self._root.num_children += 1
        self._by_key[key] = node
        self._pin(node, table, pages)
        node.is_kept = True
        self.pool.enter(node)
        node.point = self.points.record_point(key, num_tokens, Kind.IMAGE, past)

    def read_images(
        self, table: Table, pages: Sequence[SmallPageId], loaded: Collection[Hashable] = ()
    ) -> None:
        """Record that a request reads images, of which it found the given pages.

        An image that is found whole and has lost its checkpoint is kept again.

        Args:
            table: Page table of the images.
            pages: Pages of the arena, in order.
            loaded: Contents of images with pages that are loaded from host memory. They are kept
                again when all their pages are committed.
        """
        for content in loaded:
            self._record_image_read((IMAGE, table.index, content))
        for key, some in self._images_in(table, pages):
            if key[2] in loaded or self._record_image_read(key):
                continue
            # An image that is shown twice is found twice. Only the end of an image is found if the
            # hit ends within it.
            numbers = {
                page: cast("tuple[bytes, int]", table.keys_of([page])[0])[1] for page in some
            }
            whole = sorted(numbers, key=numbers.__getitem__)
            if numbers[whole[0]] == 0:
                self._keep_image(key, table, whole, Past.READ)

    def _record_image_read(self, key: Hashable) -> bool:
        """Record that a request reads an image. Return whether the image has a checkpoint."""
        node = self._by_key.get(key)
        if node is not None:
            self._read(node)
            return True
        point = self.points.get(key)
        if point is not None:
            self.points.record_read(point)
        return False

    def _images_in(
        self, table: Table, pages: Sequence[SmallPageId]
    ) -> Iterator[tuple[tuple[str, int, Hashable], list[SmallPageId]]]:
        """Yield names of images and their pages. Pages without a cached name are left out."""
        names = ((key[0] if isinstance(key, tuple) else None) for key in table.keys_of(pages))
        named = zip(names, pages, strict=True)
        for content, some in groupby(named, lambda each: each[0]):
            if content is not None:
                yield (IMAGE, table.index, content), [page for _, page in some]

    def admit(
        self,
        prefix_hashes: Sequence[bytes],
        facts: RequestFacts,
        *,
        hit_tokens: int,
        asked_tokens: int,
        computed_bytes: float,
    ) -> Admitted:
        """Record which points an admitted request reads, or would have read.

        Args:
            prefix_hashes: Prefix hashes of its text.
            facts: Facts of the request.
            hit_tokens: Number of tokens that it starts from.
            asked_tokens: Number of tokens that it could have started from.
            computed_bytes: Bytes of cache that it computes.
        """
        points = self.points
        end = asked_tokens // self._hash_tokens
        start = min(end, max(0, hit_tokens // self._hash_tokens - 1))
        path = points.path(prefix_hashes[start:end])
        deepest = path[-1] if path else points.deepest(prefix_hashes[:start])
        past = past_of(deepest)
        node = self._read_at(prefix_hashes, facts, hit_tokens)
        if (
            deepest is not None
            and deepest.num_tokens >= hit_tokens
            and (node is None or deepest is not node.point)
        ):
            # The request asked for an evicted point. A checkpoint before it only stood in for it.
            points.record_read(deepest)
            if node is not None:
                self._cancel_eviction(node)
        elif node is not None:
            self._read(node)
        points.record_admission(computed_bytes)
        branches = [
            point.num_tokens
            for point in path
            if point.kind == Kind.BRANCH and point.num_tokens > hit_tokens
        ]
        return Admitted(past=past, last_point=deepest, branches=branches)

    def _read(self, node: Checkpoint) -> None:
        self.points.record_read(node.point)
        self.points.reset_age(node.point)
        self._cancel_eviction(node)

    def _cancel_eviction(self, node: Checkpoint) -> None:
        """Rank a checkpoint anew, now that its reader has come."""
        node.heir_of = None
        self.pool.cancel(node)

    def _read_at(
        self, prefix_hashes: Sequence[bytes], facts: RequestFacts, hit_tokens: int
    ) -> Checkpoint | None:
        """Return the checkpoint that a hit reads, if it reads one."""
        if not hit_tokens:
            return None
        node = self.node_at(prefix_hashes, hit_tokens)
        if (node is None or not node.is_kept) and not self.parts.has_point_pages:
            # Without windows and states, any node that covers the hit serves as its checkpoint.
            node, _ = self._owner(prefix_hashes, facts, hit_tokens + self.ahead_tokens)
        return node if node is not None and node.is_kept else None

    def covering(
        self, prefix_hashes: Sequence[bytes], facts: RequestFacts, num_tokens: int
    ) -> Hashable | None:
        """Return the name of the checkpoint that a hit of `num_tokens` would read, if any."""
        node = self._read_at(prefix_hashes, facts, num_tokens)
        return node.name if node is not None else None

    def _reach(
        self,
        node: Checkpoint,
        prefix_hashes: Sequence[bytes],
        facts: RequestFacts,
        num_tokens: int,
    ) -> Checkpoint | None:
        """Return the node at a point of a text, made if necessary. None if a page is missing.

        Args:
            node: A node before the point on the same text.
            prefix_hashes: Prefix hashes of the text.
            facts: Facts of the request.
            num_tokens: Place of the point.
        """
        while node.num_tokens < num_tokens:
            end_tokens = num_tokens + self.ahead_tokens
            key = prefix_hashes[end_tokens // self._hash_tokens - 1]
            there = self._by_key.get(key)
            if there is not None:
                return there
            if not self._prefix_tables:
                return self._extend(node, key, num_tokens, [])
            guide = self._prefix_tables[0]
            first = node.end_tokens // guide.grain.page_slots
            end = end_tokens // guide.grain.page_slots
            keys = guide.policy.content_keys(facts, prefix_hashes, guide.grain, range(first, end))
            if len(keys) < end - first:
                return None
            unit = (
                self.align_tokens // guide.grain.page_slots
                if node.parent is not None
                else (self.align_tokens + self.ahead_tokens) // guide.grain.page_slots
            )
            page = guide.page_of(keys[unit - 1])
            owner = guide.checkpoint_of[page] if page is not None else None
            if owner is None:
                segment: list[list[SmallPageId]] = []
                for table in self._prefix_tables:
                    pages = self._cached_pages(
                        table, prefix_hashes, facts, node.end_tokens, num_tokens
                    )
                    if pages is None:
                        return None
                    segment.append(pages)
                return self._extend(node, key, num_tokens, segment)
            if owner is node:
                msg = f"the page after {node.num_tokens} tokens is of the node that ends there"
                raise InvariantError(msg)
            node = self._follow(owner, guide, keys, prefix_hashes)
        return node

    def _follow(
        self,
        owner: Checkpoint,
        guide: Table,
        keys: Sequence[Hashable],
        prefix_hashes: Sequence[bytes],
    ) -> Checkpoint:
        """Return a node that ends where a text leaves `owner`: `owner` itself, or its split.

        Args:
            owner: The node. The text has at least the beginning of its segment.
            guide: Page table whose keys are compared.
            keys: Keys of the text's pages, from the beginning of the node's segment.
            prefix_hashes: Prefix hashes of the text.
        """
        pages = owner.segment[0]
        align, slots = self.align_tokens, guide.grain.page_slots
        content = guide.keys_of(pages)
        first_tokens = owner.first_pages[0] * slots
        low, high = 1, min(len(pages), len(keys)) * slots // align
        if not first_tokens:
            low = 1 + self.ahead_tokens // align
        while low < high:  # in whole steps of `align_tokens`
            middle = (low + high + 1) // 2
            last = middle * align // slots - 1
            if content[last] == keys[last]:
                low = middle
            else:
                high = middle - 1
        end_tokens = first_tokens + low * align
        if end_tokens >= owner.end_tokens:
            return owner
        return self._split(owner, end_tokens, prefix_hashes)

    def _split(
        self, node: Checkpoint, end_tokens: int, prefix_hashes: Sequence[bytes]
    ) -> Checkpoint:
        """Split a node's segment in two, and return the new node, which is the first part."""
        num_tokens = end_tokens - self.ahead_tokens
        key = prefix_hashes[end_tokens // self._hash_tokens - 1]
        before = Checkpoint(key, num_tokens, end_tokens, node.parent)
        before.num_children = 1
        before.first_pages = node.first_pages
        first_pages: list[int] = []
        for index, table in enumerate(self._prefix_tables):
            end = end_tokens // table.grain.page_slots
            cut = end - node.first_pages[index]
            pages = node.segment[index]
            before.segment.append(pages[:cut])
            node.segment[index] = pages[cut:]
            first_pages.append(end)
            table.assign_segment(pages[:cut], node, before)
            before.segment_bytes += cut * table.spec.small_page_bytes
        node.first_pages = first_pages
        node.segment_bytes -= before.segment_bytes
        node.parent = before
        self._by_key[key] = before
        return before

    def _extend(
        self, node: Checkpoint, key: Hashable, num_tokens: int, segment: list[list[SmallPageId]]
    ) -> Checkpoint:
        """Make a node that is not kept yet, with the pages after another node's.

        If nothing needs the other node, the new one replaces it and has the pages of both.

        Args:
            node: Last node before the new one's point.
            key: Key of the new node.
            num_tokens: Place of the new node.
            segment: For each page table of whole prefixes, the pages after those of `node`.
        """
        if self._is_needed(node):
            return self._grow(node, key, num_tokens, segment)
        longer = Checkpoint(key, num_tokens, num_tokens + self.ahead_tokens, node.parent)
        longer.first_pages, longer.segment = node.first_pages, node.segment
        longer.segment_bytes = node.segment_bytes
        for table, pages, more in zip(self._prefix_tables, longer.segment, segment, strict=True):
            table.assign_segment(pages, node, longer)
            table.pin(more)
            table.assign_segment(more, None, longer)
            pages.extend(more)
            longer.segment_bytes += len(more) * table.spec.small_page_bytes
        del self._by_key[node.key]
        node.is_removed = True
        self._by_key[key] = longer
        return longer

    @staticmethod
    def _is_needed(node: Checkpoint) -> bool:
        """Whether a node is kept, has children, or is the root."""
        return node.is_kept or node.num_children > 0 or node.parent is None

    def _grow(
        self, parent: Checkpoint, key: Hashable, num_tokens: int, segment: list[list[SmallPageId]]
    ) -> Checkpoint:
        """Make a child node that is not kept yet, with the pages after its parent's."""
        node = Checkpoint(key, num_tokens, num_tokens + self.ahead_tokens, parent)
        node.segment = segment
        node.first_pages = [
            parent.end_tokens // table.grain.page_slots for table in self._prefix_tables
        ]
        for table, pages in zip(self._prefix_tables, segment, strict=True):
            table.pin(pages)
            table.assign_segment(pages, None, node)
            node.segment_bytes += len(pages) * table.spec.small_page_bytes
        parent.num_children += 1
        self._by_key[key] = node
        return node

    def _cached_pages(
        self,
        table: Table,
        prefix_hashes: Sequence[bytes],
        facts: RequestFacts,
        start_tokens: int,
        num_tokens: int,
    ) -> list[SmallPageId] | None:
        """Return the pages of a text between two points. None if one is not cached."""
        slots = table.grain.page_slots
        numbers = range(start_tokens // slots, (num_tokens + self.ahead_tokens) // slots)
        keys = table.policy.content_keys(facts, prefix_hashes, table.grain, numbers)
        pages = [page for page in map(table.page_of, keys) if page is not None]
        return pages if len(pages) == len(numbers) else None

    def _windows(
        self, prefix_hashes: Sequence[bytes], facts: RequestFacts, num_tokens: int
    ) -> list[tuple[Table, list[SmallPageId]]] | None:
        """Return the pages of the windows before a point. None if one has a gap."""
        found: list[tuple[Table, list[SmallPageId]]] = []
        for table in self._window_tables:
            numbers = table.policy.reused_pages(facts, (), table.grain, num_tokens)
            if not numbers:
                continue
            span = range(numbers[0], numbers[-1] + 1)
            keys = table.policy.content_keys(facts, prefix_hashes, table.grain, span)
            pages = [page for page in map(table.page_of, keys) if page is not None]
            if len(pages) < len(span):
                return None
            found.append((table, pages))
        return found

    def _pin(self, node: Checkpoint, table: Table, pages: list[SmallPageId]) -> None:
        """Give a node pages that belong to its point alone."""
        num_new = table.pin(pages)
        node.point_pages.append((table.index, pages))
        node.point_bytes += num_new * table.spec.small_page_bytes

    def _pin_states(
        self, node: Checkpoint, point_key: Hashable, given: Sequence[StatePage]
    ) -> None:
        """Give a node the states of its point: the cached ones, or else the given ones.

        Cached states may belong to other nodes as well. Texts that part right after a point share
        its states, but not the tokens that layers read ahead.
        """
        page_of = dict(given)
        for table in self._state_tables:
            page = table.page_of(point_key)
            if page is None:
                page = page_of.pop(table.index)
                table.commit_state(page, point_key)
                self._pin(node, table, [page])
                table.release_pages([page])
            else:
                self._pin(node, table, [page])
        self._release(list(map(StatePage._make, page_of.items())))

    def _release(self, pages: Sequence[StatePage]) -> None:
        for index, page in pages:
            self._tables[index].pages.release([page])

    def take_states(self, node: Checkpoint, *, next_tokens: int = 0) -> list[StatePage]:
        """Take away the states of a checkpoint that no request has read. It is not kept any more.

        Args:
            node: The checkpoint.
            next_tokens: If positive, the place on its text where a checkpoint is about to be kept.
                The node may stay until then, to be extended. `prune` must be called afterwards.

        Returns:
            A page for each state, which has one user then. Empty if the checkpoint is gone or was
            read, or if its states are in use or shared.
        """
        if not node.is_kept or node.point.past == Past.READ:
            return []
        states = [
            StatePage(index, pages[0])
            for index, pages in node.point_pages
            if self._tables[index].policy.is_overwritten
        ]
        for index, page in states:
            table = self._tables[index]
            if table.pages.stamps[page] < 0 or table.pins[page] > 1:
                return []
        for index, page in states:
            table = self._tables[index]
            table.pages.share_pages([page])
            table.forget(page)
        point, lost_bytes = node.point, self.num_lost_bytes
        self.points.forget(point)
        self._stop_keeping(node, None)
        if node.num_tokens >= next_tokens or not self._lasts(node):
            self._prune(node)
        if self.log is not None:
            freed_bytes = self.num_lost_bytes - lost_bytes
            self.log.record_loss(
                EvictionCause.MOVED, node, point, node.num_tokens, freed_bytes=freed_bytes
            )
        return states

    def _lasts(self, node: Checkpoint) -> bool:
        """Whether removing a node and making it again at once would change nothing."""
        parent = node.parent
        if parent is None or node.num_children:
            return False
        if parent.num_children == 1 and not parent.is_kept and parent is not self._root:
            # Its parent would be removed as well. The pages of both would then form one node.
            return False
        # Unused pages would become empty, and pages of a request would replace them.
        return all(
            max(map(table.pages.stamps.__getitem__, pages)) < 0
            for table, pages in zip(self._prefix_tables, node.segment, strict=True)
        )

    def prune(self, node: Checkpoint) -> None:
        """Remove a node that nothing needs, unless it was removed before."""
        if not node.is_removed:
            self._prune(node)
            if self.log is not None:
                self.log.record_moved_pages(node.left_by)

    def _named(self, name: Hashable) -> Iterator[Checkpoint]:
        """Yield checkpoints made under a name. There are two if one has lost its end since."""
        for node in (self._by_key.get(name), self._cut_nodes.get(name)):
            if node is not None and node.is_kept and node.name == name:
                yield node

    # Eviction

    def evict_one(self) -> bool:
        """Evict the checkpoint that is worth least, or its end. Return whether there was any."""
        node = self.pool.choose()
        if node is None:
            return False
        point, num_tokens, lost_bytes = node.point, node.num_tokens, self.num_lost_bytes
        cause = EvictionCause.END
        if self.parts.has_point_pages or not self._cut(node):
            cause = EvictionCause.CHECKPOINT
            self.evict(node)
        if self.log is not None:
            self.log.record_loss(
                cause,
                node,
                point,
                num_tokens,
                freed_bytes=self.num_lost_bytes - lost_bytes,
                worth=self.pool.price,
                was_awaited=node.name in self.pool.awaited,
            )
        return True

    def evict(self, node: Checkpoint) -> None:
        """Evict a checkpoint. Unused pages that no other checkpoint needs become empty."""
        self.num_evicted += 1
        heir = node.kept_before
        if heir is not None:
            heir.heir_of = self._policy.heir_of(node, heir, self.points.time)
        self._let_go(node, self._host)

    def _let_go(self, node: Checkpoint, host: HostCache | None) -> None:
        """Stop keeping a point, and remove its node if nothing needs it."""
        self._stop_keeping(node, host)
        self._prune(node, host)

    def _stop_keeping(self, node: Checkpoint, host: HostCache | None) -> None:
        """Stop keeping a point."""
        self.pool.leave(node)
        node.is_kept = False
        node.heir_of = None
        node.point = NO_POINT
        for index, pages in node.point_pages:
            self._unpin(self._tables[index], pages, host)
        node.point_pages = []
        node.point_bytes = 0

    def _prune(self, node: Checkpoint, host: HostCache | None = None) -> None:
        """Remove a node that nothing needs, and then its parents if nothing needs them either."""
        while node.parent is not None and not self._is_needed(node):
            for table, pages in zip(self._prefix_tables, node.segment, strict=True):
                table.assign_segment(pages, node, None)
                self._unpin(table, pages, host)
            del self._by_key[node.key]
            if node.name != node.key:
                del self._cut_nodes[node.name]
            node.is_removed = True
            node.parent.num_children -= 1
            node = node.parent

    def _cut(self, node: Checkpoint) -> bool:
        """Cut tokens from the end of a checkpoint. Return False if none can be cut.

        That is so if the checkpoint is too short, has children, or is an image.
        """
        num_tokens = node.num_tokens - self._cut_tokens
        num_tokens -= num_tokens % self.align_tokens
        parent = node.parent
        if node.num_children or parent is None or num_tokens <= parent.num_tokens:
            return False
        if not node.segment_bytes:  # An image is evicted whole.
            return False
        guide = self._prefix_tables[0]
        end_tokens = num_tokens + self.ahead_tokens
        last = end_tokens // guide.grain.page_slots - node.first_pages[0] - 1
        if last < 0:
            return False
        key = guide.keys_of([node.segment[0][last]])[0]
        if isinstance(key, tuple):  # Pages that share one prefix hash are numbered.
            key = key[0]
        if key in self._by_key or self._cut_nodes.get(node.name, node) is not node:
            return False
        for index, table in enumerate(self._prefix_tables):
            num_pages = end_tokens // table.grain.page_slots - node.first_pages[index]
            pages = node.segment[index][num_pages:]
            del node.segment[index][num_pages:]
            table.assign_segment(pages, node, None)
            self._unpin(table, pages, self._host)
            node.segment_bytes -= len(pages) * table.spec.small_page_bytes
        self.pool.leave(node)
        del self._by_key[node.key]
        self._cut_nodes[node.name] = node
        node.key, node.num_tokens, node.end_tokens = key, num_tokens, end_tokens
        self._by_key[key] = node
        self.pool.enter(node)
        return True

    def _unpin(self, table: Table, pages: list[SmallPageId], host: HostCache | None) -> None:
        """Record that a node no longer needs pages. Pages without need and users become empty.

        Args:
            table: Page table of the pages.
            pages: The pages.
            host: Host memory to copy the pages to, now or when the requests that use them have
                released them. None copies nothing.
        """
        unused = table.unpin(pages)
        if unused:
            if host is not None:
                host.store(table, unused)
            if self.log is not None:
                self.log.misses.lose_pages(table, unused)
            table.discard(unused)
            self.num_lost_bytes += len(unused) * table.spec.small_page_bytes
        if host is not None and len(unused) < len(pages):
            pins, stamps = table.pins, table.pages.stamps
            table.orphans.update(page for page in pages if not pins[page] and stamps[page] < 0)

    def clear(self) -> None:
        """Forget everything. Pages are not touched."""
        self.pool.clear()
        for node in self._by_key.values():
            node.is_removed, node.parent = True, self._root
        self._by_key.clear()
        self._cut_nodes.clear()
        self._root.num_children = 0
        for table in self._tables:
            table.unpin_all()

    def check(self) -> None:
        """Raise `InvariantError` unless pages are pinned exactly by the nodes that need them."""
        pins: list[dict[SmallPageId, int]] = [{} for _ in self._tables]
        children: dict[int, int] = {}
        nodes = list(self._by_key.values())
        for node in nodes:
            self._check_node(node)
            children[id(node.parent)] = children.get(id(node.parent), 0) + 1
            for table, pages in zip(self._prefix_tables, node.segment, strict=True):
                for page in pages:
                    pins[table.index][page] = pins[table.index].get(page, 0) + 1
            for index, pages in node.point_pages:
                for page in pages:
                    pins[index][page] = pins[index].get(page, 0) + 1
        for table, expected in zip(self._tables, pins, strict=True):
            table.check_pins(expected)
        for node in [*nodes, self._root]:
            if node.num_children != children.get(id(node), 0):
                msg = (
                    f"{node.num_tokens} tokens: {node.num_children} children counted, "
                    f"{children.get(id(node), 0)} found"
                )
                raise InvariantError(msg)
        self.pool.check(nodes)

    def _check_node(self, node: Checkpoint) -> None:
        is_image = isinstance(node.key, tuple)
        parent = node.parent
        problems = {
            "a node without a parent": parent is None,
            "under another name": self._by_key.get(node.key) is not node,
            "removed": node.is_removed,
            "neither kept nor needed": not node.is_kept and not node.num_children,
            "at a place where none is": not is_image and node.num_tokens % self.align_tokens,
            "not beyond its parent": parent is not None and node.num_tokens <= parent.num_tokens,
        }
        for index, table in enumerate(self._prefix_tables):
            if parent is None or is_image:
                continue
            slots = table.grain.page_slots
            first, end = parent.end_tokens // slots, node.end_tokens // slots
            pages = node.segment[index]
            problems[f"pages of {table.spec.name!r} missing"] = len(pages) != end - first
            problems[f"pages of {table.spec.name!r} begin elsewhere"] = (
                node.first_pages[index] != first
            )
        for problem, found in problems.items():
            if found:
                msg = f"checkpoint after {node.num_tokens} tokens: {problem}"
                raise InvariantError(msg)

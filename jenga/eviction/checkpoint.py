"""A checkpoint: a point of a text with all that a request needs to go on from there."""

from collections.abc import Hashable

from jenga.eviction.points import NO_POINT, Point

NOT_IN_POOL = -1
"""Place of a checkpoint that is not among those that may be evicted."""


class Checkpoint:
    """A node of the tree of cached texts.

    A node is at a point of a text. It has the keys and values from its parent's point to its own,
    which everything beyond needs as well. If it is *kept*, it also has what only a request needs
    that goes on exactly from there: windows and states. A node that is not kept is one where texts
    part.

    Attributes:
        key: Hash of the tokens up to `end_tokens`, or the name of an image.
        name: The key under which it was made; it has another one since if its end was cut off.
        num_tokens: Tokens of the prefix.
        end_tokens: Tokens whose keys and values it has, with those of its parents: some more than
            the prefix where layers read ahead.
        parent: The node before it on the same text; None of the root.
        first_pages: Per page table of whole prefixes, the number of its first page in `segment`.
        segment: Per such page table, the pages from the parent's point to this one's.
        alone: Windows and states of this point: index of a page table, and pages of it.
        num_children: Nodes whose parent this is.
        is_kept: Whether a request can go on from here.
        is_removed: Whether it was removed from the tree; requests may still name it.
        point: What is remembered of this point; of a node that is kept.
        heir_of: An evicted point whose readers will come here instead, if any.
        segment_bytes: Bytes of the segment.
        alone_bytes: Bytes of the pages that are this point's alone.
        own_bytes: Bytes that come free when it goes, as counted when it was drawn last.
        saved_tokens: Tokens that its next reader would have to compute again without it, likewise.
        place: Its place among those that may be evicted, or `NOT_IN_POOL`.
    """

    __slots__ = (
        "alone",
        "alone_bytes",
        "end_tokens",
        "first_pages",
        "heir_of",
        "is_kept",
        "is_removed",
        "key",
        "name",
        "num_children",
        "num_tokens",
        "own_bytes",
        "parent",
        "place",
        "point",
        "saved_tokens",
        "segment",
        "segment_bytes",
    )

    def __init__(
        self, key: Hashable, num_tokens: int, end_tokens: int, parent: "Checkpoint | None"
    ) -> None:
        self.key = self.name = key
        self.num_tokens = num_tokens
        self.end_tokens = end_tokens
        self.parent = parent
        self.first_pages: list[int] = []
        self.segment: list[list[int]] = []
        self.alone: list[tuple[int, list[int]]] = []
        self.num_children = 0
        self.is_kept = self.is_removed = False
        self.point = NO_POINT
        self.heir_of: Point | None = None
        self.segment_bytes = self.alone_bytes = self.own_bytes = self.saved_tokens = 0
        self.place = NOT_IN_POOL

    @property
    def kept_before(self) -> "Checkpoint | None":
        """The kept node before it on the same text, if there is one."""
        node = self.parent
        while node is not None and not node.is_kept:
            node = node.parent
        return node

    @property
    def still_there(self) -> "Checkpoint":
        """This node, or the first one before it on the same text that was not removed."""
        node = self
        while node.is_removed and node.parent is not None:
            node = node.parent
        return node

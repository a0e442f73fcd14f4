"""A checkpoint: a point of a text with everything that a request needs to go on from there."""

from collections.abc import Hashable

from jenga.eviction.points import NO_POINT, Point
from jenga.page_ids import SmallPageId

NOT_IN_POOL = -1
"""Place of a checkpoint that is not in the pool of those that may be evicted."""


class Checkpoint:
    """A node of the tree of cached texts.

    A node is at a point of a text. It has the keys and values between its parent's point and its
    own. All nodes below it need them too. A node is *kept* if a request can go on from exactly its
    point. It then also has the windows and states that only such a request needs. A node that is
    not kept is one where texts part.

    Attributes:
        key: Hash of the tokens up to `end_tokens`, or the name of an image.
        name: Key under which the node was made. It differs from `key` if the node's end was cut
            off.
        num_tokens: Number of tokens of the prefix.
        end_tokens: Number of tokens whose keys and values the node and its parents have. It is
            larger than `num_tokens` where layers read ahead.
        parent: Node before it on the same text. None for the root.
        first_pages: For each page table of whole prefixes, the number of the first page in
            `segment`.
        segment: For each such page table, the pages between the parent's point and this one.
        point_pages: Windows and states of this point. Each entry is the index of a page table, and
            its pages.
        num_children: Number of nodes whose parent this is.
        is_kept: Whether a request can go on from here.
        is_removed: Whether the node was removed from the tree. Requests may still refer to it.
        left_by: Name of the request that left the checkpoint. Empty if it is not known.
        point: Knowledge about this point, if the node is kept, else `NO_POINT`.
        heir_of: Evicted point whose readers will start from here instead, if any.
        segment_bytes: Bytes of the segment.
        point_bytes: Bytes of the pages in `point_pages` that no other checkpoint needed when this
            one took them.
        own_bytes: Bytes that eviction of the checkpoint frees, as of its last measurement.
        saved_tokens: Number of tokens that its next reader would have to compute again without it,
            as of its last measurement.
        place: Index in the pool of checkpoints that may be evicted, or `NOT_IN_POOL`.
    """

    __slots__ = (
        "end_tokens",
        "first_pages",
        "heir_of",
        "is_kept",
        "is_removed",
        "key",
        "left_by",
        "name",
        "num_children",
        "num_tokens",
        "own_bytes",
        "parent",
        "place",
        "point",
        "point_bytes",
        "point_pages",
        "saved_tokens",
        "segment",
        "segment_bytes",
    )

    def __init__(
        self, key: Hashable, num_tokens: int, end_tokens: int, parent: "Checkpoint | None"
    ) -> None:
        self.key = self.name = key
        self.left_by = ""
        self.num_tokens = num_tokens
        self.end_tokens = end_tokens
        self.parent = parent
        self.first_pages: list[int] = []
        self.segment: list[list[SmallPageId]] = []
        self.point_pages: list[tuple[int, list[SmallPageId]]] = []
        self.num_children = 0
        self.is_kept = self.is_removed = False
        self.point = NO_POINT
        self.heir_of: Point | None = None
        self.segment_bytes = self.point_bytes = self.own_bytes = self.saved_tokens = 0
        self.place = NOT_IN_POOL

    @property
    def kept_before(self) -> "Checkpoint | None":
        """The last kept node before it on the same text, if there is one."""
        node = self.parent
        while node is not None and not node.is_kept:
            node = node.parent
        return node

    @property
    def still_there(self) -> "Checkpoint":
        """This node, or the last node before it on the same text that is still in the tree."""
        node = self
        while node.is_removed and node.parent is not None:
            node = node.parent
        return node

"""A running request as the manager stores it, and the values that the manager hands out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from jenga.arena.small_pages import Sharing
from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Kind, Past, Point
from jenga.page_ids import HostPageId, OwnerId, SmallPageId
from jenga.policies import RequestFacts

MISSING = SmallPageId(-1)
"""Entry of a page table whose page must still be allocated, among pages found in the cache."""


class Version(NamedTuple):
    """State of a cache, which changes whenever cached pages are lost.

    Attributes:
        cache: An object that identifies the cache.
        num_evicted_pages: Number of evicted pages so far.
        num_other_losses: Count that grows whenever pages are lost in another way.
    """

    cache: object
    num_evicted_pages: int
    num_other_losses: int


NO_LIMIT = -1
"""Value of `PrefixHit.limit` if no page table limits the hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The longest cached prefix of a request, valid until pages are evicted.

    Attributes:
        num_tokens: Number of tokens of the prefix.
        asked_tokens: Number of tokens that it could have had.
        branch_tokens: Number of tokens that it would have if windows and states were kept
            everywhere. Evicted keys and values lower it like a text that parts there.
        limit: Index of the page table that allows no longer prefix, or `NO_LIMIT`.
        pages: Small pages of the prefix, for each page table. In page tables that requests write
            over, these are the pages to copy from. Other entries are:
            - the null page, where no later token reads;
            - `MISSING`, where a page must be allocated.
        host_pages: For each page table, index in `pages` -> page of host memory to load there,
            rising. The entry of `pages` is `MISSING`.
        has_missing: For each page table, whether a page must be allocated.
        facts: Facts of the request.
        prefix_hashes: Prefix hashes of the request.
        version: State of the cache in which this was found.
    """

    num_tokens: int
    asked_tokens: int
    branch_tokens: int
    limit: int
    pages: tuple[Sequence[SmallPageId], ...]
    host_pages: tuple[Mapping[int, HostPageId], ...]
    has_missing: tuple[bool, ...]
    facts: RequestFacts = field(repr=False)
    prefix_hashes: Sequence[bytes] = field(repr=False)
    version: Version = field(repr=False)

    def without_tables(self, table_indices: Collection[int]) -> "PrefixHit":
        """Return this hit without the pages of some page tables."""
        return replace(
            self,
            pages=tuple(
                () if index in table_indices else pages for index, pages in enumerate(self.pages)
            ),
            host_pages=tuple(
                {} if index in table_indices else pages
                for index, pages in enumerate(self.host_pages)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HitStart:
    """A hit, and what its request starts with in its first step. Nothing is shared yet.

    Attributes:
        hit: The hit.
        pages: For each page table, the pages that the step touches, with `MISSING` where one must
            be allocated. Empty in page tables that requests write over.
        has_missing: For each page table, whether some of these pages are `MISSING`.
        num_found: For each page table, the number of these pages. 0 if some are `MISSING`.
        sharing: For each page table, the cached pages among them, which get the request as a user.
            None if there are none.
    """

    hit: PrefixHit
    pages: tuple[Sequence[SmallPageId], ...]
    has_missing: tuple[bool, ...]
    num_found: tuple[int, ...]
    sharing: tuple[Sharing | None, ...]


class CopyPath(Enum):
    """Source and target memory of a copy."""

    IN_ARENA = auto()
    TO_HOST = auto()
    FROM_HOST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy to make before any kernel of the next step runs, in the order of issue.

    Attributes:
        table_index: Page table of both pages.
        source: Page to copy from.
        target: Page to copy to.
        path: Whether one of the pages is in host memory, and which one.
    """

    table_index: int
    source: SmallPageId | HostPageId
    target: SmallPageId | HostPageId
    path: CopyPath = CopyPath.IN_ARENA


class RequestPages:
    """The pages of a running request. Only `jenga.tables` changes them.

    Each attribute is a list with one entry for each page table.

    Attributes:
        small_pages: Its small pages in order, with the null page where given up.
        has_missing: Whether some pages are still `MISSING`.
        num_given_up: Number of its first pages that are given up.
        num_found: Number of first pages that were found in the cache. 0 if some were missing.
        num_committed: Number of first pages that were entered into the cache, or are too late for
            it.
        max_tokens: Number of tokens that its pages suffice for.
        release_at: Number of processed tokens at which a page is given up.
    """

    __slots__ = (
        "has_missing",
        "max_tokens",
        "num_committed",
        "num_found",
        "num_given_up",
        "release_at",
        "small_pages",
    )

    def __init__(self, num_tables: int, start: HitStart | None) -> None:
        self.small_pages: list[list[SmallPageId]]
        if start is None:
            self.small_pages = [[] for _ in range(num_tables)]
            self.has_missing = [False] * num_tables
            self.num_found = [0] * num_tables
        else:
            self.small_pages = [list(pages) for pages in start.pages]
            self.has_missing = list(start.has_missing)
            self.num_found = list(start.num_found)
        self.num_committed = list(self.num_found)
        self.num_given_up = [0] * num_tables
        self.max_tokens = [0] * num_tables
        self.release_at = [0] * num_tables


class StatePage(NamedTuple):
    """A page with a state that is kept for others, and the index of its page table."""

    table_index: int
    page: SmallPageId


class RequestCheckpoints:
    """The checkpoints of a running request. Only `jenga.prefix.checkpoints` changes them.

    Attributes:
        last_checkpoint: Last checkpoint on its text, which it keeps in the tree. None before its
            text is known.
        points_past: Past of the points that it leaves, which says what is known about their
            readers.
        plan: Number of tokens after which it leaves a checkpoint -> kind of the checkpoint.
        num_passed: Number of tokens up to which its checkpoints were made, or can no longer be
            made.
        pending: Number of tokens -> states kept there for a checkpoint that is not made yet.
        answer: Checkpoint that it left last in its generated tokens.
        skipped_answer: Point that it passed last in its generated tokens, if the states there were
            not worth their memory.
    """

    __slots__ = (
        "answer",
        "last_checkpoint",
        "num_passed",
        "pending",
        "plan",
        "points_past",
        "skipped_answer",
    )

    def __init__(self) -> None:
        self.last_checkpoint: Checkpoint | None = None
        self.points_past = Past.NEW_TEXT
        self.plan: dict[int, Kind] = {}
        self.num_passed = 0
        self.pending: dict[int, list[StatePage]] = {}
        self.answer: Checkpoint | None = None
        self.skipped_answer: Point | None = None


class Request:
    """A running request.

    The numbers that every step reads are here, so that a step needs no other object. Each attribute
    is changed by one package, which `tests/docs/test_architecture.py` checks.

    Attributes:
        name: Name under which the engine knows it.
        owner: Number under which the allocator knows it as an owner of pages.
        facts: Facts that are known from its arrival on.
        hit_tokens: Number of tokens of the hit it started from.
        branch_tokens: Number of tokens after which it parts from what others have computed.
        is_packed: Whether it opens no large page that it can do without.
        pages: Its pages. Changed by `jenga.tables`.
        grows_at: Number of tokens from which some page table needs another page. Changed by
            `jenga.tables`.
        shrinks_at: Number of processed tokens at which some page table gives up a page. Changed by
            `jenga.tables`.
        checkpoints: Its checkpoints. Changed by `jenga.prefix`.
        expected_tokens: Number of tokens it is certain to reach. Changed by `jenga.admission`.
        num_tokens: Number of tokens it has slots for. This and all that follow are changed by the
            manager.
        num_processed_tokens: Number of tokens whose step is over.
        last_step: Last step it took part in.
        committed_tokens: Number of tokens whose content is final.
        prefix_hashes: Hash i covers its first `(i + 1) * hash_tokens` tokens, as far as known.
        commits_at: Number of final tokens at which some page table may have another page to commit.
    """

    __slots__ = (
        "branch_tokens",
        "checkpoints",
        "commits_at",
        "committed_tokens",
        "expected_tokens",
        "facts",
        "grows_at",
        "hit_tokens",
        "is_packed",
        "last_step",
        "name",
        "num_processed_tokens",
        "num_tokens",
        "owner",
        "pages",
        "prefix_hashes",
        "shrinks_at",
    )

    def __init__(
        self,
        name: str,
        owner: OwnerId,
        facts: RequestFacts,
        num_tables: int,
        *,
        start: HitStart | None = None,
        is_packed: bool = False,
    ) -> None:
        """Create a request with the pages of its hit.

        Args:
            name: Name under which the engine knows it.
            owner: Number under which the allocator knows it as an owner of pages.
            facts: Facts that are known from its arrival on.
            num_tables: Number of page tables.
            start: The hit that it starts from, if any.
            is_packed: Whether it opens no large page that it can do without.
        """
        self.name = name
        self.owner = owner
        self.facts = facts
        self.hit_tokens = self.branch_tokens = 0
        if start is not None:
            self.hit_tokens = start.hit.num_tokens
            self.branch_tokens = start.hit.branch_tokens
        self.is_packed = is_packed
        self.pages = RequestPages(num_tables, start)
        self.grows_at = self.shrinks_at = 0
        self.checkpoints = RequestCheckpoints()
        self.expected_tokens = 0
        self.num_tokens = self.last_step = 0
        self.num_processed_tokens = self.hit_tokens
        self.committed_tokens = self.commits_at = 0
        self.prefix_hashes: Sequence[bytes] = ()


def new_facts(
    hit: PrefixHit | None, facts: RequestFacts | None, *, prompt_tokens: int
) -> RequestFacts:
    """Return the facts of a new request: those given, those of its hit, or those of text alone.

    Raises:
        ValueError: The given facts differ from those of the hit.
    """
    if facts is None:
        return RequestFacts(prompt_tokens=prompt_tokens) if hit is None else hit.facts
    if hit is not None and facts != hit.facts:
        msg = f"facts must be those of the hit, {hit.facts}, got {facts}"
        raise ValueError(msg)
    return facts

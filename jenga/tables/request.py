"""A running request as the manager stores it, and the values that the manager hands out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from jenga.arena.small_pages import Sharing
from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Kind, Past
from jenga.policies import RequestFacts

MISSING = -1
"""Entry of a page table whose page must still be allocated, among pages found in the cache."""


Version = tuple[object, int, int]
"""State of a cache: an object that identifies its manager, and two counts of lost pages."""

NO_LIMIT = -1
"""Value of `PrefixHit.limit` if no page table limits the hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The longest cached prefix of a request, valid until pages are evicted.

    Attributes:
        num_tokens: Number of tokens of the prefix.
        asked_tokens: Number of tokens that it could have had.
        branch_tokens: Number of tokens that it would have if windows and states were kept
            everywhere.
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
    pages: tuple[Sequence[int], ...]
    host_pages: tuple[Mapping[int, int], ...]
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
    pages: tuple[Sequence[int], ...]
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
    source: int
    target: int
    path: CopyPath = CopyPath.IN_ARENA


class Request:
    """A running request.

    Attributes:
        owner: Number under which the allocator knows it as an owner of pages.
        facts: Facts that are known from its arrival on.
        num_tokens: Number of tokens it has slots for.
        num_processed_tokens: Number of tokens whose step is over.
        expected_tokens: Number of tokens it is certain to reach.
        step: Last step it took part in.
        pages: For each page table, its small pages in order, with the null page where given up.
        has_missing: For each page table, whether some pages are still `MISSING`.
        first: For each page table, the number of its first page that is not given up.
        found: For each page table, the number of first pages that were found in the cache. 0 if
            some were missing.
        committed: For each page table, the number of pages that were entered into the cache, or are
            too late for it.
        committed_tokens: Number of tokens whose content is final.
        prefix_hashes: Hash i covers its first `(i + 1) * hash_tokens` tokens, as far as known.
        hit_tokens: Number of tokens of the hit it started from.
        branch_tokens: Number of tokens after which it parts from what others have computed.
        is_packed: Whether it opens no large page that it can do without.
        stand: Last checkpoint on its text, which it keeps in the tree. None before admission.
        past: Past of the points that it leaves, which says what is known about their readers.
        plan: Number of tokens after which it leaves a checkpoint -> kind of the checkpoint.
        num_passed: Number of tokens up to which its checkpoints were made, or can no longer be
            made.
        pending: Number of tokens -> states kept there for a checkpoint that is not made yet. Each
            is the index of a page table, and a page.
        answer: Checkpoint that it left last in its generated tokens.
        max_tokens: For each page table, the number of tokens that its pages suffice for.
        releases: For each page table, the number of processed tokens at which a page is given up.
        grows_at: Number of tokens from which some page table needs another page.
        shrinks_at: Number of processed tokens at which some page table gives up a page.
        commits_at: Number of final tokens at which some page table may have another page to commit.
    """

    __slots__ = (
        "answer",
        "branch_tokens",
        "commits_at",
        "committed",
        "committed_tokens",
        "expected_tokens",
        "facts",
        "first",
        "found",
        "grows_at",
        "has_missing",
        "hit_tokens",
        "is_packed",
        "max_tokens",
        "num_passed",
        "num_processed_tokens",
        "num_tokens",
        "owner",
        "pages",
        "past",
        "pending",
        "plan",
        "prefix_hashes",
        "releases",
        "shrinks_at",
        "stand",
        "step",
    )

    def __init__(self, facts: RequestFacts, num_tables: int, start: HitStart | None = None) -> None:
        self.owner = 0
        self.facts = facts
        self.num_tokens = self.num_processed_tokens = self.expected_tokens = self.step = 0
        self.pages: list[list[int]] = [[] for _ in range(num_tables)]
        self.has_missing = [False] * num_tables
        self.first = [0] * num_tables
        self.found = [0] * num_tables
        self.committed = [0] * num_tables
        self.committed_tokens = self.hit_tokens = self.branch_tokens = 0
        self.prefix_hashes: Sequence[bytes] = ()
        self.is_packed = False
        self.stand: Checkpoint | None = None
        self.past = Past.NEW_TEXT
        self.plan: dict[int, Kind] = {}
        self.num_passed = 0
        self.pending: dict[int, list[tuple[int, int]]] = {}
        self.answer: Checkpoint | None = None
        if start is not None:
            self.hit_tokens = start.hit.num_tokens
            self.branch_tokens = start.hit.branch_tokens
            self.pages = [list(pages) for pages in start.pages]
            self.has_missing = list(start.has_missing)
            self.found = list(start.num_found)
            self.committed = list(start.num_found)
        self.max_tokens = [0] * num_tables
        self.releases = [0] * num_tables
        self.grows_at = self.shrinks_at = self.commits_at = 0


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

"""What the manager keeps of a running request, and what it hands out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Kind, Past
from jenga.policies import RequestFacts

MISSING = -1
"""In a page table: a page still to be allocated, among pages that were found in the cache."""


def host_page(page: int) -> int:
    """What a page of host memory is known by where other pages are the arena's, and the reverse."""
    return MISSING - page


def is_on_host(page: int) -> bool:
    """Whether what is in a hit's page table stands for a page of host memory."""
    return page < MISSING


Version = tuple[object, int, int]
"""A state of a cache: whose it is, and how often that has lost pages in two ways."""

NO_LIMIT = -1
"""Index of the page table that limits a prefix hit, where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The longest cached prefix of a request, valid until pages are evicted.

    Attributes:
        num_tokens: Its tokens.
        asked_tokens: Tokens it could have had.
        branch_tokens: Tokens it would have if windows and states were kept everywhere.
        limit: Index of the page table that allows no more, or `NO_LIMIT`.
        pages: Its small pages per page table: the null page where no later token reads, `MISSING`
            where one must be allocated; `is_on_host` tells of those that must be allocated and
            loaded. Of page tables whose pages are written over, the pages to copy from.
        has_missing: Per page table, whether one must be allocated.
        facts: Of the request.
        prefix_hashes: Of the request.
        version: The state of the cache in which this was found.
    """

    num_tokens: int
    asked_tokens: int
    branch_tokens: int
    limit: int
    pages: tuple[Sequence[int], ...]
    has_missing: tuple[bool, ...]
    facts: RequestFacts = field(repr=False)
    prefix_hashes: Sequence[bytes] = field(repr=False)
    version: Version = field(repr=False)


class CopyPath(Enum):
    """From where to where a copy goes."""

    IN_ARENA = auto()
    TO_HOST = auto()
    FROM_HOST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy to make, before any kernel of the next step runs and in the order of their issue.

    Attributes:
        table_index: Page table of both pages.
        source: Page to copy from.
        target: Page to copy to.
        path: Which of them is in host memory, if one is.
    """

    table_index: int
    source: int
    target: int
    path: CopyPath = CopyPath.IN_ARENA


class Request:
    """A running request.

    Attributes:
        owner: Its number as an owner of pages.
        facts: What is known of it from its arrival on.
        num_tokens: Tokens it has slots for.
        num_processed_tokens: Tokens whose step is over.
        expected_tokens: Tokens it is certain to reach.
        step: The last step it took part in.
        pages: Per page table, its small pages in order; the null page where given up.
        has_missing: Per page table, whether pages are still `MISSING`.
        first: Per page table, its first page not given up.
        found: Per page table, its first pages that were found in the cache; 0 if not all were.
        committed: Per page table, pages entered into the cache, or too late for it.
        committed_tokens: Tokens whose content is final.
        prefix_hashes: Hash i is of its first `(i + 1) * hash_tokens` tokens, as far as known.
        hit_tokens: Where it started from.
        branch_tokens: Where it left what others have computed.
        is_packed: Whether it opens no large page that it can do without.
        stand: The last checkpoint on its text, which it keeps in the tree; None before admission.
        past: Of the points that it leaves.
        plan: Tokens after which it leaves checkpoints -> of which kind.
        num_passed: Tokens up to which it has left its checkpoints, or can leave none any more.
        pending: Tokens -> states kept there for a checkpoint that is not made yet: index of a page
            table, and the page.
        answer: The checkpoint that it left last in what it generated.
        max_tokens: Per page table, tokens its pages suffice for.
        releases: Per page table, processed tokens at which a page is given up.
        grows_at: Tokens for which a page table needs a page more.
        shrinks_at: Processed tokens at which a page table gives up a page.
        commits_at: Final tokens at which a page table may have a page more to commit.
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

    def __init__(self, facts: RequestFacts, num_tables: int) -> None:
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
        self.max_tokens = [0] * num_tables
        self.releases = [0] * num_tables
        self.grows_at = self.shrinks_at = self.commits_at = 0


def new_facts(
    hit: PrefixHit | None, facts: RequestFacts | None, *, prompt_tokens: int
) -> RequestFacts:
    """Facts of a request that comes in: those given, those of its hit, or of text alone.

    Raises:
        ValueError: Those given are not those of the hit.
    """
    if facts is None:
        return RequestFacts(prompt_tokens=prompt_tokens) if hit is None else hit.facts
    if hit is not None and facts != hit.facts:
        msg = f"facts must be those of the hit, {hit.facts}, got {facts}"
        raise ValueError(msg)
    return facts

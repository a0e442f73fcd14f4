"""Prefix hits: requests start from them, and their tokens are counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jenga.arena.small_pages import Sharing
from jenga.page_ids import NULL_PAGE, SmallPageId
from jenga.policies import RequestFacts
from jenga.prefix.checkpoints import Checkpoints
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, NO_LIMIT, HitStart, PrefixHit
from jenga.tables.stats import CacheReport, table_evictions


class _TableStart(NamedTuple):
    """The fields of `HitStart` for one page table."""

    pages: Sequence[SmallPageId]
    has_missing: bool
    num_found: int
    sharing: Sharing | None


_NO_START = _TableStart((), has_missing=False, num_found=0, sharing=None)


class HitStarts:
    """Gives requests the pages of their hits, and counts tokens hit and missed."""

    __slots__ = (
        "_asked_tokens",
        "_checkpoints",
        "_hit_tokens",
        "_limited_tokens",
        "_tables",
    )

    def __init__(self, tables: Sequence[Table], checkpoints: Checkpoints) -> None:
        """Start without hits.

        Args:
            tables: All page tables.
            checkpoints: Checkpoints that requests start from.
        """
        self._tables = tables
        self._checkpoints = checkpoints
        self._asked_tokens = self._hit_tokens = 0
        self._limited_tokens = [0] * len(tables)

    def prepare_start(self, hit: PrefixHit, facts: RequestFacts, num_tokens: int) -> HitStart:
        """Return what a new request starts with. Nothing is changed.

        Args:
            hit: The prefix that it starts from.
            facts: Facts of the request.
            num_tokens: Number of tokens after its first step.
        """
        starts = [
            _start_of_table(table, hit, facts, num_tokens)
            if hit.pages[table.index] and not table.policy.is_overwritten
            else _NO_START
            for table in self._tables
        ]
        return HitStart(
            hit=hit,
            pages=tuple(start.pages for start in starts),
            has_missing=tuple(start.has_missing for start in starts),
            num_found=tuple(start.num_found for start in starts),
            sharing=tuple(start.sharing for start in starts),
        )

    def share_pages(self, start: HitStart) -> None:
        """Add a user to the pages found, and make states to copy from the last to be evicted."""
        for table, sharing in zip(self._tables, start.sharing, strict=True):
            if sharing is not None:
                table.pages.share_prepared(sharing)
                if sharing.repeated:
                    table.pages.share_pages(sharing.repeated)
        hit = start.hit
        self._checkpoints.protect_hit(hit)
        self._asked_tokens += hit.asked_tokens
        self._hit_tokens += hit.num_tokens
        if hit.limit != NO_LIMIT:
            self._limited_tokens[hit.limit] += hit.asked_tokens - hit.num_tokens

    def report(self) -> CacheReport:
        """Return the use of the prefix cache since start-up."""
        names = [table.spec.name for table in self._tables]
        return CacheReport(
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            limited_tokens=dict(zip(names, self._limited_tokens, strict=True)),
            kept_states=self._checkpoints.num_states_kept,
            read_states=self._checkpoints.num_states_read,
            evictions=tuple(table_evictions(table) for table in self._tables),
        )


def _start_of_table(
    table: Table, hit: PrefixHit, facts: RequestFacts, num_tokens: int
) -> _TableStart:
    """Return what a new request starts with in one page table."""
    touched = table.policy.update_last_access(facts, hit.num_tokens, num_tokens)
    pages = hit.pages[table.index][: table.pages_for(touched).stop]
    if hit.has_missing[table.index] and MISSING in pages:
        has_missing, num_found = True, 0
        cached: Sequence[SmallPageId] = [page for page in pages if page > 0]
    else:
        has_missing, num_found = False, len(pages)
        num_given_up = pages.count(NULL_PAGE) if pages and pages[0] == NULL_PAGE else 0
        cached = pages[num_given_up:] if num_given_up else pages
    sharing = sharing_of(table, cached, may_repeat=bool(facts.images)) if cached else None
    return _TableStart(pages, has_missing, num_found, sharing)


def sharing_of(table: Table, pages: Sequence[SmallPageId], *, may_repeat: bool) -> Sharing:
    """Prepare the sharing of pages. If an image is shown twice, its pages occur twice."""
    if not may_repeat:
        return table.pages.prepare_sharing(pages)
    seen: set[SmallPageId] = set()
    repeated = [page for page in pages if page in seen or seen.add(page)]
    if not repeated:
        return table.pages.prepare_sharing(pages)
    return replace(table.pages.prepare_sharing(list(dict.fromkeys(pages))), repeated=repeated)

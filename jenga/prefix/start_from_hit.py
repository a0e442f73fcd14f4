"""Prefix hits: requests start from them, and their tokens are counted."""

from collections.abc import Sequence
from dataclasses import replace

from jenga.arena.large_pages import NULL_PAGE
from jenga.arena.small_pages import Sharing
from jenga.prefix.checkpoints import Checkpoints
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, NO_LIMIT, PrefixHit, Request
from jenga.tables.stats import CacheReport, table_evictions


class Hits:
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

    def start_from(self, request: Request, hit: PrefixHit, num_tokens: int) -> list[Sharing | None]:
        """Give a new request the page tables of its hit, as far as this step touches them.

        Returns:
            For each page table, the small pages found, which are not shared yet.
        """
        request.hit_tokens = hit.num_tokens
        request.branch_tokens = hit.branch_tokens
        found: list[Sharing | None] = [None] * len(self._tables)
        for table in self._tables:
            if hit.pages[table.index] and not table.policy.is_overwritten:
                touched = table.policy.update_last_access(request.facts, hit.num_tokens, num_tokens)
                pages = list(hit.pages[table.index][: table.pages_for(touched).stop])
                if hit.has_missing[table.index] and min(pages, default=0) < 0:
                    # Pages to be loaded are missing as well.
                    pages = [max(page, MISSING) for page in pages]
                    request.has_missing[table.index] = True
                    cached = [page for page in pages if page > 0]
                else:
                    num_given_up = pages.count(NULL_PAGE) if pages and pages[0] == NULL_PAGE else 0
                    cached = pages[num_given_up:]
                    request.committed[table.index] = request.found[table.index] = len(pages)
                request.pages[table.index] = pages
                if cached:
                    has_images = bool(request.facts.images)
                    found[table.index] = sharing_of(table, cached, may_repeat=has_images)
        return found

    def share(self, found: Sequence[Sharing | None], hit: PrefixHit) -> None:
        """Add a user to the pages found, and make states to copy from the last to be evicted."""
        for table, sharing in zip(self._tables, found, strict=True):
            if sharing is not None:
                table.pages.use(sharing)
                if sharing.repeated:
                    table.pages.share(sharing.repeated)
        self._checkpoints.protect(hit)
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


def sharing_of(table: Table, pages: Sequence[int], *, may_repeat: bool) -> Sharing:
    """Prepare the sharing of pages. If an image is shown twice, its pages occur twice."""
    if not may_repeat:
        return table.pages.sharing(pages)
    seen: set[int] = set()
    repeated = [page for page in pages if page in seen or seen.add(page)]
    if not repeated:
        return table.pages.sharing(pages)
    return replace(table.pages.sharing(list(dict.fromkeys(pages))), repeated=repeated)

"""Lookup of the longest cached prefix from which every page table can go on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from jenga.page_ids import NULL_PAGE, HostPageId, SmallPageId
from jenga.policies import ALL_PAGES, NEVER, RequestFacts
from jenga.prefix.host_cache import EitherPages, HostCache
from jenga.tables.found_pages import FoundPages
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, NO_LIMIT, PrefixHit, Version

_Found = FoundPages | EitherPages | list[SmallPageId | None]


def longest_prefix(  # noqa: PLR0913  one question, all it depends on
    tables: Sequence[Table],
    prefix_hashes: Sequence[bytes],
    facts: RequestFacts,
    *,
    max_tokens: int,
    ahead_tokens: int = 0,
    host: HostCache | None = None,
    version: Version,
) -> PrefixHit:
    """Find the longest cached prefix from which all page tables can go on.

    Args:
        tables: All page tables.
        prefix_hashes: Hash i covers the request's first `(i + 1) * hash_tokens` tokens.
        facts: Facts of the request.
        max_tokens: Upper limit of the prefix, in tokens.
        ahead_tokens: Number of tokens after the prefix that must be cached too, because its pages
            depend on them.
        host: Host memory, where pages are looked up that are not in the arena. None if there is
            none.
        version: State of the cache for which the answer holds.
    """
    hash_tokens = tables[0].grain.hash_tokens
    num_hashes = max(0, min(max_tokens // hash_tokens, len(prefix_hashes)))
    hashes = prefix_hashes[:num_hashes]
    found: list[_Found] = []
    for table in tables:
        keys = table.policy.content_keys(facts, hashes, table.grain, ALL_PAGES)
        if table.cache is None:
            found.append([None for _ in keys])
        elif host is None:
            found.append(table.cache.find(keys))
        else:
            found.append(host.either(table, table.cache.find(keys), keys))
    # The hit that would be possible if states and windows were kept everywhere. There the request
    # leaves a known path.
    kept = [table for table in tables if not table.policy.is_overwritten]
    lasting = [table for table in kept if _keeps_all(table, facts)]
    asked_tokens = num_hashes * hash_tokens
    branch_tokens, limit = _agree(lasting or kept, facts, found, asked_tokens, NO_LIMIT)
    most_tokens = max(0, branch_tokens - ahead_tokens)
    num_tokens, limit = _agree(tables, facts, found, most_tokens, limit)
    reused = [_reused(table, facts, found[table.index], num_tokens) for table in tables]
    return PrefixHit(
        num_tokens=num_tokens,
        asked_tokens=asked_tokens,
        branch_tokens=branch_tokens,
        limit=limit,
        pages=tuple(each.pages for each in reused),
        host_pages=tuple(each.host_pages for each in reused),
        has_missing=tuple(each.has_missing for each in reused),
        facts=facts,
        prefix_hashes=prefix_hashes,
        version=version,
    )


def _keeps_all(table: Table, facts: RequestFacts) -> bool:
    """Whether a page table gives up no page before the request ends."""
    return table.policy.next_release(facts, 0, table.grain.page_slots) == NEVER


def _agree(
    tables: Sequence[Table],
    facts: RequestFacts,
    found: Sequence[Sequence[int | None]],
    num_tokens: int,
    limit: int,
) -> tuple[int, int]:
    """Return the longest prefix that these page tables agree on, and the last one to shorten it."""
    num_agreed = 0
    while num_agreed < len(tables):
        for table in tables:
            possible = table.policy.get_possible_prefix(
                facts, found[table.index], table.grain, num_tokens
            )
            if possible < num_tokens:
                num_tokens, limit, num_agreed = possible, table.index, 1
            else:
                num_agreed += 1
            if num_agreed == len(tables):
                break
    return num_tokens, limit


class _Reused(NamedTuple):
    """The fields of `PrefixHit` for one page table."""

    pages: Sequence[SmallPageId]
    host_pages: Mapping[int, HostPageId]
    has_missing: bool


def _reused(table: Table, facts: RequestFacts, found: _Found, num_tokens: int) -> _Reused:
    """Return the page table with which a request goes on from a prefix, or the pages to copy."""
    numbers = table.policy.reused_pages(facts, found, table.grain, num_tokens)
    if not numbers:
        return _Reused((), {}, has_missing=False)
    first = numbers[0]
    is_either = isinstance(found, EitherPages)
    reused = _pages_of(found.in_arena if is_either else found, numbers)
    has_missing = not all(reused)
    host_pages: Mapping[int, HostPageId] = {}
    if has_missing:
        pages = [MISSING if page is None else page for page in reused]
        if is_either:
            before = 0 if table.policy.is_overwritten else first
            of_places = {
                index: there
                for index, (page, there) in enumerate(
                    zip(reused, _pages_of(found.on_host, numbers), strict=True), before
                )
                if page is None and there is not None
            }
            host_pages = cast("dict[int, HostPageId]", of_places)
    else:
        pages = cast("list[SmallPageId]", reused)
    if table.policy.is_overwritten or not first:
        return _Reused(pages, host_pages, has_missing)
    touched = table.policy.update_last_access(facts, num_tokens, num_tokens)
    num_given_up = min(first, table.pages_for(touched).start)
    before_pages = [NULL_PAGE] * num_given_up + [MISSING] * (first - num_given_up)
    return _Reused(before_pages + pages, host_pages, has_missing or num_given_up < first)


def _pages_of(
    found: FoundPages | list[SmallPageId | None], numbers: Sequence[int]
) -> list[SmallPageId | None]:
    """Return the pages from the first to the last number, with None for numbers left out."""
    first, end = numbers[0], numbers[-1] + 1
    if len(numbers) == end - first:
        return found[first:end]
    pages: list[SmallPageId | None] = [None] * (end - first)
    for number in numbers:
        pages[number - first] = found[number]
    return pages

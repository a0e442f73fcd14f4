"""Whether the books of requests, allocator and prefix cache agree."""

from collections.abc import Iterable

from jenga.errors import InvariantError
from jenga.prefix_cache import PrefixCache
from jenga.request import Request
from jenga.table import Table


def check_table(table: Table, requests: Iterable[Request]) -> None:
    """Raise `InvariantError` unless used pages are those of the requests, and cached ones live.

    Args:
        table: The page table.
        requests: All running requests.
    """
    users: dict[int, int] = {}
    for request in requests:
        pages, first = request.pages[table.index], request.first[table.index]
        if any(page <= 0 for page in pages[first:]) or any(pages[:first]):
            msg = f"{table.spec.name!r} of owner {request.owner}: {pages} with {first} given up"
            raise InvariantError(msg)
        pending = [
            page
            for kept in request.pending.values()
            for index, page in kept
            if index == table.index
        ]
        for page in (*pages[first:], *pending):
            users[page] = users.get(page, 0) + 1
    shares = {page: count - 1 for page, count in users.items() if count > 1}
    if shares != table.pages.shares or len(users) != table.pages.num_used:
        msg = (
            f"{table.spec.name!r}: requests use {len(users)} pages and share {shares}; the "
            f"allocator counts {table.pages.num_used} and {table.pages.shares}"
        )
        raise InvariantError(msg)
    if table.cache is not None:
        _check_cache(table, table.cache, set(users))


def _check_cache(table: Table, cache: PrefixCache, used: set[int]) -> None:
    cache.check()
    stamps = table.pages.stamps
    cached = {page for page, key in enumerate(cache.keys) if key is not None}
    evictable = {page for page in cached - used if stamps[page] >= 0}
    if evictable != cached - used or len(evictable) != table.pages.num_evictable:
        msg = (
            f"{table.spec.name!r}: {len(cached - used)} cached pages have no user, "
            f"{len(evictable)} of them are evictable, {table.pages.num_evictable} counted"
        )
        raise InvariantError(msg)

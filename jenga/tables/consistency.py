"""Checks that the records of requests, allocator and prefix cache agree."""

from collections.abc import Iterable, Sequence

from jenga.errors import InvariantError
from jenga.page_ids import SmallPageId
from jenga.tables.content_index import ContentIndex
from jenga.tables.page_table import Table
from jenga.tables.request import Request


def check_request(request: Request, tables: Sequence[Table]) -> None:
    """Raise `InvariantError` unless a request's counts agree with each other and its page tables.

    Args:
        request: A running request.
        tables: All page tables.
    """
    owner, processed, num_tokens = request.owner, request.num_processed_tokens, request.num_tokens
    if not 0 <= request.hit_tokens <= processed <= num_tokens:
        msg = (
            f"owner {owner} has slots for {num_tokens} tokens and started from "
            f"{request.hit_tokens}, {processed} are counted as processed"
        )
        raise InvariantError(msg)
    most_kept = max([request.committed_tokens, *request.checkpoints.pending])
    if most_kept > num_tokens:
        msg = f"owner {owner} has slots for {num_tokens} tokens, and cached content of {most_kept}"
        raise InvariantError(msg)
    for table in tables:
        pages, page_slots = request.pages.small_pages[table.index], table.grain.page_slots
        touched = table.policy.update_last_access(request.facts, processed, num_tokens)
        first, num_slots = request.pages.num_given_up[table.index], len(pages) * page_slots
        if first != touched.start // page_slots or touched.stop > num_slots:
            msg = (
                f"{table.spec.name!r} of owner {owner}: slots {touched} are read after {processed} "
                f"of {num_tokens} tokens, of {len(pages)} pages {first} are given up"
            )
            raise InvariantError(msg)


def check_table(table: Table, requests: Iterable[Request]) -> None:
    """Raise `InvariantError` unless requests use exactly the used pages, and cached ones are live.

    Args:
        table: The page table.
        requests: All running requests.
    """
    users: dict[SmallPageId, int] = {}
    for request in requests:
        pages, first = (
            request.pages.small_pages[table.index],
            request.pages.num_given_up[table.index],
        )
        if any(page <= 0 for page in pages[first:]) or any(pages[:first]):
            msg = f"{table.spec.name!r} of owner {request.owner}: {pages} with {first} given up"
            raise InvariantError(msg)
        pending = [
            page
            for kept in request.checkpoints.pending.values()
            for index, page in kept
            if index == table.index
        ]
        for page in (*pages[first:], *pending):
            users[page] = users.get(page, 0) + 1
    extra_users = {page: count - 1 for page, count in users.items() if count > 1}
    if extra_users != table.pages.extra_users or len(users) != table.pages.num_used:
        msg = (
            f"{table.spec.name!r}: requests use {len(users)} pages and share {extra_users}; the "
            f"allocator counts {table.pages.num_used} and {table.pages.extra_users}"
        )
        raise InvariantError(msg)
    if table.cache is not None:
        _check_cache(table, table.cache, set(users))


def _check_cache(table: Table, cache: ContentIndex, used: set[SmallPageId]) -> None:
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

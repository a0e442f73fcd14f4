"""Numbers of pages and of their owners, as types that a type checker keeps apart.

Page 12 of one page table is not page 12 of another one, and neither is large page 12. At run time
all are plain integers. They get their types where pages are opened. An id that is computed from
another one is cast, and in loops a whole list of ids at once, because a call for each costs time.

A small page is identified by its page table and its id. Small page `k * large + i` is part `i` of
large page `large`, if a large page has `k` small pages of that page table.
"""

from typing import NewType

LargePageId = NewType("LargePageId", int)
"""Number of a large page of an arena, or of host memory."""

SmallPageId = NewType("SmallPageId", int)
"""Number of a small page of one page table. vLLM calls it a block id."""

HostPageId = NewType("HostPageId", int)
"""Number of a small page of host memory, which is no number of a page of the arena."""

OwnerId = NewType("OwnerId", int)
"""Number under which the allocator knows a request or another owner of pages. It is positive."""

NULL_LARGE_PAGE = LargePageId(0)
"""The large page that is never handed out."""

NULL_PAGE = SmallPageId(0)
"""The small page, in every page table, that is never handed out."""

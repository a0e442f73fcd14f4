"""Images that are found in the cache when a running request reaches them.

The lookup of an admission shares only the images that its first step reads. A later image may have
been computed by another request meanwhile, or may have been evicted. So each image is looked up
again in the step that begins it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from jenga.arena.small_pages import Sharing
from jenga.page_ids import SmallPageId
from jenga.policies import Image, RequestFacts
from jenga.policies.image_slots import ImageSlots
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.start_from_hit import sharing_of
from jenga.tables.growth import Growth
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, Request


@dataclass(slots=True)
class FoundImages:
    """Images of a running request that were found in one page table.

    Attributes:
        table: The page table.
        num_pages_before: Number of pages that the request had there.
        pages: Pages of the images found, in order.
        sharing: The same, prepared for sharing.
        is_shared: Whether the request uses them already.
    """

    table: Table
    num_pages_before: int
    pages: list[SmallPageId]
    sharing: Sharing
    is_shared: bool = False


class RunningImages:
    """Finds images in the cache, and shares them with running requests."""

    __slots__ = ("_growth", "_tables", "_tree")

    def __init__(self, tables: Sequence[Table], tree: CheckpointTree, growth: Growth) -> None:
        """Create it for the requests of one arena.

        Args:
            tables: All page tables.
            tree: Tree of the checkpoints, which include images.
            growth: Appends pages to the page tables of requests.
        """
        self._tables = [
            (table, table.policy)
            for table in tables
            if isinstance(table.policy, ImageSlots) and table.cache is not None
        ]
        self._tree = tree
        self._growth = growth

    def is_cached(self, image: Image) -> bool:
        """Whether all pages of an image are cached, in every page table of images."""
        cached = self.cached(image)
        return bool(cached) and all(None not in pages for pages in cached.values())

    def cached(self, image: Image) -> dict[int, list[SmallPageId | None]]:
        """Return page tables of images -> the pages in which an image is cached, or None."""
        facts = RequestFacts(images=(image,))
        return {
            table.index: _cached_pages(table, policy, facts, policy.pages_of(facts, 0))
            for table, policy in self._tables
        }

    def find(self, request: Request, num_tokens: int) -> list[FoundImages]:
        """Find the cached images that a running request begins within its first tokens.

        Their pages are appended to the request's page tables, but not shared yet. Pages of other
        images that it begins there are left as gaps, to be allocated.

        Args:
            request: The request. Its number of processed tokens is that of this step.
            num_tokens: Number of tokens to have slots for.
        """
        all_found: list[FoundImages] = []
        for table, policy in self._tables:
            if num_tokens <= request.pages.max_tokens[table.index]:
                continue
            facts, num_pages = request.facts, len(request.pages.small_pages[table.index])
            touched = policy.update_last_access(facts, request.num_processed_tokens, num_tokens)
            end = table.pages_for(touched).stop
            cached = _cached_pages(table, policy, facts, range(num_pages, end))
            is_hit = [*[None] * num_pages, *cached]
            if len(self._tables) > 1:
                # An encoder writes the pages of all layers, so all of them must be found.
                for number, image in enumerate(facts.images):
                    if not self.is_cached(image):
                        places = policy.pages_of(facts, number)
                        for place in range(max(places.start, num_pages), min(places.stop, end)):
                            is_hit[place] = None
            found = {
                number: page
                for number in policy.complete_images(facts, is_hit, num_pages)
                if (page := is_hit[number]) is not None
            }
            if found:
                pages = list(found.values())
                sharing = sharing_of(table, pages, may_repeat=True)
                all_found.append(FoundImages(table, num_pages, pages, sharing))
                self._growth.append_found(
                    request,
                    table,
                    [found.get(number, MISSING) for number in range(num_pages, end)],
                )
        return all_found

    def sharings(self, all_found: Sequence[FoundImages], num_tables: int) -> list[Sharing | None]:
        """Return the small pages found, for each page table of the arena."""
        sharings: list[Sharing | None] = [None] * num_tables
        for found in all_found:
            sharings[found.table.index] = found.sharing
        return sharings

    def share(self, all_found: Sequence[FoundImages]) -> None:
        """Add a user to the pages found."""
        for found in all_found:
            found.table.pages.share_prepared(found.sharing)
            if found.sharing.repeated:
                found.table.pages.share_pages(found.sharing.repeated)
            found.is_shared = True

    def undo(self, request: Request, all_found: Sequence[FoundImages]) -> None:
        """Remove the pages found from a request, because its step was refused."""
        for found in all_found:
            if found.is_shared:
                found.table.release_pages(found.pages)
            self._growth.truncate(request, found.table, found.num_pages_before)

    def read(self, all_found: Sequence[FoundImages]) -> None:
        """Record that a request reads the images found."""
        for found in all_found:
            self._tree.read_images(found.table, found.pages)

    def appended(
        self, request: Request, all_found: Sequence[FoundImages], taken: Sequence[list[SmallPageId]]
    ) -> Sequence[list[SmallPageId]]:
        """Return the pages that a step appended: those taken, and the images found among them."""
        if not all_found:
            return taken
        appended = list(taken)
        for found in all_found:
            pages = request.pages.small_pages[found.table.index]
            appended[found.table.index] = pages[found.num_pages_before :]
        return appended

    def forget(self, requests: Iterable[Request]) -> None:
        """Make all cached images impossible to find.

        Args:
            requests: All running requests. They keep the pages that they use.
        """
        requests = list(requests)
        for table, _ in self._tables:
            for request in requests:
                table.doubt_found(request)
            cache = table.cache
            if cache is None:
                continue
            keys = cast("list[tuple[bytes, int] | bytes | None]", cache.keys)
            for content in {key[0] for key in keys if isinstance(key, tuple)}:
                node = self._tree.image(table, content)
                if node is not None:
                    self._tree.evict(node)
            named = cast(
                "list[SmallPageId]",
                [page for page, key in enumerate(cache.keys) if key is not None],
            )
            unused = [page for page in named if table.pages.stamps[page] >= 0]
            cache.forget(set(named).difference(unused))
            table.discard(unused)


def _cached_pages(
    table: Table, policy: ImageSlots, facts: RequestFacts, pages: range
) -> list[SmallPageId | None]:
    """Return the cached page of each page number of images, or None."""
    keys = policy.content_keys(facts, (), table.grain, pages)
    return [table.page_of(key) if key is not None else None for key in keys]

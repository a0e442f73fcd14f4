"""Images that are found in the cache when a running request reaches them.

The lookup of an admission shares only the images that its first step reads. A later image may have
been computed by another request meanwhile, or may have been evicted. So each image is looked up
again in the step that begins it, in the arena and in host memory. Pages that are only in host
memory are loaded before the kernels of that step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from jenga.arena.small_pages import Sharing
from jenga.page_ids import NULL_PAGE, HostPageId, SmallPageId
from jenga.policies import Image, RequestFacts
from jenga.policies.image_slots import ImageSlots
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.host_cache import HostCache
from jenga.prefix.start_from_hit import sharing_of
from jenga.tables.growth import Growth
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, PrefixHit, Request


@dataclass(slots=True)
class FoundImages:
    """Images of a running request that were found in one page table.

    Attributes:
        table: The page table.
        num_pages_before: Number of pages that the request had there.
        pages: Pages of the images found in the arena, in order.
        sharing: The same, prepared for sharing. None if there are none.
        host_pages: Number of a page in the request's page table -> page of host memory to load.
        is_shared: Whether the request uses the pages already, and those of host memory are pinned.
    """

    table: Table
    num_pages_before: int
    pages: list[SmallPageId]
    sharing: Sharing | None
    host_pages: Mapping[int, HostPageId]
    is_shared: bool = False

    @property
    def sources(self) -> list[HostPageId]:
        """Pages of host memory to load, each once."""
        return list(dict.fromkeys(self.host_pages.values()))


class RunningImages:
    """Finds images in the cache, and shares them with running requests."""

    __slots__ = ("_growth", "_host", "_loaded", "_tables", "_tree")

    def __init__(
        self,
        tables: Sequence[Table],
        tree: CheckpointTree,
        growth: Growth,
        host: HostCache | None = None,
    ) -> None:
        """Create it for the requests of one arena.

        Args:
            tables: All page tables.
            tree: Tree of the checkpoints, which include images.
            growth: Appends pages to the page tables of requests.
            host: Host memory. None if there is none.
        """
        self._tables = [
            (table, table.policy)
            for table in tables
            if isinstance(table.policy, ImageSlots) and table.cache is not None
        ]
        self._tree = tree
        self._growth = growth
        self._host = host
        # The request that was given pages last, and the numbers of those of its pages that are
        # loaded from host memory, by page table.
        self._loaded: tuple[Request | None, Mapping[int, Collection[int]]] = None, {}

    def is_cached(self, image: Image) -> bool:
        """Whether all pages of an image are cached, in every page table of images.

        Pages in host memory count, because a step that begins the image loads them.
        """
        facts = RequestFacts(images=(image,))
        return bool(self._tables) and all(
            None not in self._look_up(table, policy, facts, policy.pages_of(facts, 0)).pages
            for table, policy in self._tables
        )

    def is_filled(self, request: Request, table: Table, numbers: range) -> bool:
        """Whether a request's pages hold an image before any layer of the step runs.

        This is so for pages that are cached, given up, or loaded from host memory. An image that
        the request has not begun is not held.

        Args:
            request: The request, after it was given the pages.
            table: Page table of images.
            numbers: Numbers of the image's pages in the page table of the request.
        """
        request_of_loads, loads = self._loaded
        loaded = loads.get(table.index, ()) if request_of_loads is request else ()
        keys = table.policy.content_keys(request.facts, (), table.grain, numbers)
        pages = request.pages.small_pages[table.index][numbers.start : numbers.stop]
        return len(pages) == len(numbers) and all(
            page == NULL_PAGE or number in loaded or page == table.page_of(key)
            for number, page, key in zip(numbers, pages, keys, strict=True)
        )

    def _look_up(
        self, table: Table, policy: ImageSlots, facts: RequestFacts, numbers: range
    ) -> "_Cached":
        """Look up pages of images, given their numbers in the page table of a request."""
        keys = policy.content_keys(facts, (), table.grain, numbers)
        in_arena = [table.page_of(key) if key is not None else None for key in keys]
        on_host: list[HostPageId | None] = [
            self._host.page_of(table, key)
            if self._host is not None and page is None and key is not None
            else None
            for page, key in zip(in_arena, keys, strict=True)
        ]
        return _Cached(in_arena, on_host)

    def find(self, request: Request, num_tokens: int) -> list[FoundImages]:
        """Find the cached images that a running request begins within its first tokens.

        Their pages are appended to the request's page tables, but not shared yet. Pages that are
        only in host memory, and those of other images that it begins there, are left as gaps, to be
        allocated.

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
            cached = self._look_up(table, policy, facts, range(num_pages, end))
            is_hit = [*[None] * num_pages, *cached.pages]
            if len(self._tables) > 1:
                # An encoder writes the pages of all layers, so all of them must be found.
                for number, image in enumerate(facts.images):
                    if not self.is_cached(image):
                        places = policy.pages_of(facts, number)
                        for place in range(max(places.start, num_pages), min(places.stop, end)):
                            is_hit[place] = None
            found: dict[int, SmallPageId] = {}
            host_pages: dict[int, HostPageId] = {}
            for number in policy.complete_images(facts, is_hit, num_pages):
                page = cached.in_arena[number - num_pages]
                there = cached.on_host[number - num_pages]
                if page is not None:
                    found[number] = page
                elif there is not None:
                    host_pages[number] = there
            if found or host_pages:
                pages = list(found.values())
                sharing = sharing_of(table, pages, may_repeat=True) if pages else None
                all_found.append(FoundImages(table, num_pages, pages, sharing, host_pages))
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
        """Add a user to the pages found, and keep those in host memory until they are loaded."""
        for found in all_found:
            if found.sharing is not None:
                found.table.pages.share_prepared(found.sharing)
                if found.sharing.repeated:
                    found.table.pages.share_pages(found.sharing.repeated)
            if self._host is not None and found.host_pages:
                self._host.pin_pages(found.table, found.sources)
            found.is_shared = True

    def undo(self, request: Request, all_found: Sequence[FoundImages]) -> None:
        """Remove the pages found from a request, because its step was refused."""
        for found in all_found:
            if found.is_shared:
                found.table.release_pages(found.pages)
                if self._host is not None and found.host_pages:
                    self._host.unpin_pages(found.table, found.sources)
            self._growth.truncate(request, found.table, found.num_pages_before)

    def read(self, request: Request, all_found: Sequence[FoundImages]) -> None:
        """Record that a request reads the images found."""
        for found in all_found:
            loaded = found.table.images_of(request.facts, found.host_pages)
            self._tree.read_images(found.table, found.pages, loaded)

    def load(self, request: Request, all_found: Sequence[FoundImages]) -> None:
        """Order copies from host memory to the pages that a running request has taken."""
        for found in all_found:
            if self._host is not None and found.host_pages:
                self._host.order_image_loads(found.table, request, found.host_pages)
        self._loaded = request, {found.table.index: found.host_pages for found in all_found}

    def record_hit(self, request: Request, hit: PrefixHit) -> None:
        """Record which images an admitted request loads from host memory, with its hit."""
        self._loaded = (
            request,
            {
                table.index: [
                    number
                    for number in hit.host_pages[table.index]
                    if number < len(request.pages.small_pages[table.index])
                ]
                for table, _ in self._tables
            },
        )

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
            for page in set(named).difference(unused):
                table.forget(page)
            table.discard(unused)
            if self._host is not None:
                self._host.forget_table(table)


class _Cached(NamedTuple):
    """Cached pages of images, with None where there is none.

    Attributes:
        in_arena: Pages of the arena.
        on_host: Pages of host memory, for those that are not in the arena.
    """

    in_arena: Sequence[SmallPageId | None]
    on_host: Sequence[HostPageId | None]

    @property
    def pages(self) -> list[SmallPageId | HostPageId | None]:
        """Pages of either memory. Their numbers do not say which."""
        return [
            there if page is None else page
            for page, there in zip(self.in_arena, self.on_host, strict=True)
        ]

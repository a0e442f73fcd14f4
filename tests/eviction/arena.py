"""One arena with its tree of checkpoints and no requests: texts are written and left at once."""

from jenga.arena.allocator import Allocator
from jenga.eviction.known import EVICTION_POLICIES
from jenga.eviction.points import Kind, Past
from jenga.policies import RequestFacts
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.copy_orders import CopyOrders
from jenga.prefix.eviction_notices import EvictionNotices
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import build_tables

HASH_TOKENS = 4
FACTS = RequestFacts(prompt_tokens=1)


def hashes(text):
    """Hashes of a text of one letter per token: the text itself up to each hash's end."""
    return [text[:end].encode() for end in range(HASH_TOKENS, len(text) + 1, HASH_TOKENS)]


class Arena:
    """What is cached of texts, and the tree that says what of it stays."""

    def __init__(
        self, cut, num_large_pages=60, *, ahead_tokens=0, policy="learned", num_host_large_pages=0
    ):
        sizes = [spec.small_pages_per_large_page for spec in cut.page_tables]
        self.allocator = Allocator(sizes, num_large_pages)
        self.tables = build_tables(
            cut, self.allocator, hash_tokens=HASH_TOKENS, prefix_caching=True
        )
        self.copies = CopyOrders()
        self.host = None
        if num_host_large_pages:
            self.host = HostCache(self.tables, self.copies, num_large_pages=num_host_large_pages)
        self.tree = CheckpointTree(
            self.tables,
            EVICTION_POLICIES[policy](),
            hash_tokens=HASH_TOKENS,
            ahead_tokens=ahead_tokens,
            arena_bytes=cut.large_page_bytes * num_large_pages,
            host=self.host,
        )
        self.allocator.large_pages.evictor = self.tree.evict_one
        self.eviction_notices = EvictionNotices(self.allocator, self.tables)
        self.of_text = [
            table
            for table in self.tables
            if not table.policy.is_overwritten and not table.policy.names_images
        ]
        self.states = [table for table in self.tables if table.policy.is_overwritten]

    def take(self, index, num_pages):
        """Pages of one page table, each with one user; None if there are not so many."""
        needs = [0] * len(self.tables)
        needs[index] = num_pages
        taken = self.allocator.take(needs, needs, owner=1)
        self.eviction_notices.deliver()
        return None if taken is None else taken[index]

    def write(self, text):
        """Cache a text as far as it is not: its pages are loose. Whether there was room."""
        for table in self.of_text:
            keys = self.keys(table, text)
            missing = [key for key in keys if table.page_of(key) is None]
            pages = self.take(table.index, len(missing)) if missing else []
            if pages is None:
                return False
            for page, key in zip(pages, missing, strict=True):
                # What made room may have been of this text.
                assert table.cache.insert_page(page, key)
            table.release_pages(pages)
        return True

    def keys(self, table, text):
        num_pages = len(text) // table.grain.page_slots
        return table.policy.content_keys(FACTS, hashes(text), table.grain, range(num_pages))

    def keep(self, text, num_tokens, kind=Kind.PROMPT_END, past=Past.NEW_TEXT, *, stand=None):
        """Keep a point of a text, with states; None if there is no room or a part is missing."""
        state_pages = []
        for table in self.states:
            pages = self.take(table.index, 1)
            if pages is None:
                self.release(state_pages)
                return None
            state_pages.append((table.index, pages[0]))
        stand = stand or self.tree.last_node(hashes(text), FACTS, 0)
        node = self.tree.keep(
            stand, hashes(text), FACTS, num_tokens, kind, past, state_pages=state_pages
        )
        if node is None:
            self.release(state_pages)
        return node

    def release(self, state_pages):
        for index, page in state_pages:
            self.tables[index].pages.release([page])

    def written(self, text, num_tokens, kind=Kind.PROMPT_END, past=Past.NEW_TEXT):
        """Write a text and keep a point of it."""
        assert self.write(text)
        node = self.keep(text, num_tokens, kind, past)
        assert node is not None
        self.check()
        return node

    def is_kept(self, text, num_tokens):
        """Whether a request could go on from a point of a text, by the tree and by the caches."""
        node = self.tree.node_at(hashes(text), num_tokens)
        if node is None or not node.is_kept:
            return False
        self.assert_whole(text[: num_tokens + self.tree.ahead_tokens], num_tokens)
        return True

    def kept_points(self):
        """All texts kept -> their tokens; those of images are left out."""
        return {
            node.key.decode(): node.num_tokens
            for node in self.tree._by_key.values()
            if node.is_kept and isinstance(node.key, bytes)
        }

    def assert_whole(self, text, num_tokens):
        """All that a request needs to go on from a point is cached, and pinned."""
        for table in self.of_text:
            keys, grain = self.keys(table, text), table.grain
            needed = range(len(text) // grain.page_slots)
            if table not in self.tree._prefix_tables:
                needed = table.policy.reused_pages(FACTS, (), grain, num_tokens)
            for number in needed:
                page = table.page_of(keys[number])
                assert page is not None, (table.spec.name, text, number)
                assert table.pins[page], (table.spec.name, text, number)
        for table in self.states:
            page = table.page_of(text[:num_tokens].encode())
            assert page is not None
            assert table.pins[page]

    def check(self):
        self.allocator.check()
        self.tree.check()
        if self.host is not None:
            self.host.check()
        for table in self.tables:
            table.cache.check()
        for text, num_tokens in self.kept_points().items():
            assert len(text) == num_tokens + self.tree.ahead_tokens
            self.assert_whole(text, num_tokens)

    # Images

    def write_image(self, content, num_pages):
        """Cache an image's pages, loose; whether there was room."""
        for table in self.tables:
            if not table.policy.names_images:
                continue
            keys = [(content, page) for page in range(num_pages)]
            missing = [key for key in keys if table.page_of(key) is None]
            pages = self.take(table.index, len(missing)) if missing else []
            if pages is None:
                return False
            for page, key in zip(pages, missing, strict=True):
                assert table.cache.insert_page(page, key)
            table.release_pages(pages)
        return True

    def image_pages(self, table, content, num_pages):
        return [table.page_of((content, page)) for page in range(num_pages)]

    def keep_image(self, content, num_pages, past=Past.NEW_TEXT):
        for table in self.tables:
            if table.policy.names_images:
                pages = self.image_pages(table, content, num_pages)
                assert None not in pages
                self.tree.keep_images(table, pages, past)

    def image_nodes(self, content):
        return [
            self.tree.image(table, content) for table in self.tables if table.policy.names_images
        ]

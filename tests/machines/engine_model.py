"""An engine that computes nothing but knows what every byte of the arena should be.

Content of a slot is a value that names the tokens it was computed from. Writing a small page
destroys what other page tables had in the same large page.
"""

from dataclasses import dataclass, field

from docs.examples.paper_window import PaperWindow
from jenga.policies import Image, RequestFacts
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    ImageEmbedding,
    SlidingWindow,
    State,
    TokenBudget,
)
from jenga.tables.request import CopyPath


@dataclass
class Run:
    """One request as the engine sees it."""

    request_id: str
    tokens: tuple
    prompt: int
    images: tuple[Image, ...]
    processed: int = 0
    scheduled: int = 0
    rejected: int = 0  # of those scheduled
    last_start: int = 0  # tokens processed before the last step
    images_written: set = field(default_factory=set)
    images_embedded: set = field(default_factory=set)  # in slots of their tokens

    @property
    def facts(self):
        return RequestFacts(prompt_tokens=self.prompt, images=self.images)

    def hashes(self, hash_tokens):
        """Chained hashes, as an engine makes them: images count as part of the tokens."""
        named = tuple((image.start_token, image.content) for image in self.images)
        return [
            repr((self.tokens[:end], [n for n in named if n[0] < end])).encode()
            for end in range(hash_tokens, len(self.tokens) + 1, hash_tokens)
        ]

    def written(self, token):
        """What a step writes at a token: something else than its content where it is rejected."""
        if token >= self.processed + self.scheduled - self.rejected:
            return ("rejected", token)
        return self.content(token)

    def content(self, token):
        """What the KV of a token depends on: all tokens and images up to it."""
        images = tuple(i.content for i in self.images if i.start_token <= token)
        return ("kv", self.tokens[: token + 1], images)


class EngineModel:
    """The content of the arena and of host memory, and the steps that write and read it."""

    def __init__(self, manager, hash_tokens):
        self.manager = manager
        self.tables = manager.geometry.page_tables
        self.hash_tokens = hash_tokens
        # (large page, table) -> {(page, slot): content}
        self.arena = {}
        self.host = {}
        self.num_loaded = 0

    def write(self, index, page, slot, content, memory=None):
        memory = self.arena if memory is None else memory
        large = page // self.tables[index].small_pages_per_large_page
        for other in range(len(self.tables)):
            if other != index:
                memory.pop((large, other), None)
        memory.setdefault((large, index), {})[page, slot] = content

    def read(self, index, page, slot, memory=None):
        memory = self.arena if memory is None else memory
        large = page // self.tables[index].small_pages_per_large_page
        return memory.get((large, index), {}).get((page, slot))

    def copy(self, copy):
        table = self.tables[copy.table_index]
        source = self.host if copy.path == CopyPath.FROM_HOST else self.arena
        target = self.host if copy.path == CopyPath.TO_HOST else self.arena
        self.num_loaded += copy.path == CopyPath.FROM_HOST
        for slot in range(table.tokens_per_page):
            content = self.read(copy.table_index, copy.source, slot, source)
            self.write(copy.table_index, copy.target, slot, content, target)

    def execute(self, runs, copies=None, passed=(), ahead=(), num_early=0):
        """One step of all scheduled requests: copies, then writes, then reads.

        Args:
            runs: All requests.
            copies: If others than those that the manager has now.
            passed: States that are written on the way: request, page table, page, tokens.
            ahead: Copies that are made beside writes and reads.
            num_early: Those of them that are made before them all; the others come after.
        """
        scheduled = [run for run in runs if run.scheduled]
        for copy in self.manager.take_copies() if copies is None else copies:
            self.copy(copy)
        for copy in ahead[:num_early]:
            self.copy(copy)
        for run, index, page, num_tokens in passed:
            assert run.processed < num_tokens <= run.processed + run.scheduled
            assert page > 0
            self.write(index, page, 0, ("state", run.written(num_tokens - 1)))
        pages = {run.request_id: self.manager.page_tables(run.request_id) for run in scheduled}
        for each in (self._write_embeddings, self._read_embeddings):
            for index, table in enumerate(self.tables):
                for run in scheduled:
                    each(index, table, run, pages[run.request_id][index])
        for index, table in enumerate(self.tables):
            for run in scheduled:
                self._write_step(index, table, run, pages[run.request_id][index])
        for index, table in enumerate(self.tables):
            for run in scheduled:
                self._read_step(index, table, run, pages[run.request_id][index])
        for run in scheduled:
            self._end_step(run, pages[run.request_id])
        for copy in ahead[num_early:]:
            self.copy(copy)

    def _write_embeddings(self, index, table, run, pages):
        """Encode the images that the step begins: every embedding goes to its token's slot."""
        for image in run.images if table.layer_type.holds_images else ():
            begins = image.start_token < run.processed + run.scheduled
            if begins and (index, image.start_token) not in run.images_embedded:
                run.images_embedded.add((index, image.start_token))
                for token in range(max(image.start_token, run.processed), image.end_token):
                    page, slot = token // table.tokens_per_page, token % table.tokens_per_page
                    assert pages[page] > 0
                    self.write(index, pages[page], slot, embedding_of(run, image, token))

    def _read_embeddings(self, index, table, run, pages):
        """Read the embeddings of the step's tokens before keys and values replace them."""
        for image in run.images if table.layer_type.holds_images else ():
            end = min(image.end_token, run.processed + run.scheduled)
            for token in range(max(image.start_token, run.processed), end):
                page, slot = token // table.tokens_per_page, token % table.tokens_per_page
                content = self.read(index, pages[page], slot)
                assert content == embedding_of(run, image, token)

    def _write_step(self, index, table, run, pages):
        layer_type, page_tokens = table.layer_type, table.tokens_per_page
        end = run.processed + run.scheduled
        if isinstance(layer_type, State):
            slots = 1 + layer_type.draft_tokens
            assert len(pages) == slots
            assert all(pages)
            if run.processed:
                state = self.read(index, pages[run.processed % slots], 0)
                assert state == ("state", run.content(run.processed - 1))
            # Steps of no more tokens than slots leave the state after each of them.
            first = run.processed + 1 if run.scheduled <= slots else end
            for num_tokens in range(first, end + 1):
                content = ("state", run.written(num_tokens - 1))
                self.write(index, pages[num_tokens % slots], 0, content)
        elif isinstance(layer_type, CrossAttention | ImageEmbedding):
            for number, start, image in image_pages(run, page_tokens):
                begins = image.start_token < end
                if begins and (index, image.start_token) not in run.images_written:
                    for page in range(-(-image.num_tokens // page_tokens)):
                        if start + page < len(pages) and pages[start + page]:
                            for slot in range(page_tokens):
                                content = ("image", image.content or number, page, slot)
                                self.write(index, pages[start + page], slot, content)
                    run.images_written.add((index, image.start_token))
        else:
            for token in range(run.processed, end):
                page = pages[token // page_tokens]
                assert page > 0
                self.write(index, page, token % page_tokens, run.written(token))

    def _read_step(self, index, table, run, pages):
        layer_type, page_tokens = table.layer_type, table.tokens_per_page
        end = run.processed + run.scheduled - run.rejected
        if isinstance(layer_type, State):
            return
        if isinstance(layer_type, CrossAttention | ImageEmbedding):
            for number, start, image in image_pages(run, page_tokens):
                if image.start_token >= end:
                    continue
                wanted = range(image.num_tokens)
                if isinstance(layer_type, ImageEmbedding):
                    # Tokens of the image computed in this step.
                    first = max(run.processed, image.start_token) - image.start_token
                    wanted = range(first, min(image.num_tokens, end - image.start_token))
                for token in wanted:
                    page = token // page_tokens
                    content = ("image", image.content or number, page, token % page_tokens)
                    assert self.read(index, pages[start + page], token % page_tokens) == content
            return
        if isinstance(layer_type, TokenBudget) and run.processed >= run.prompt:
            dropped, moved_at = moves(table, run, run.processed)[-1]
            for slot in range(dropped, end):
                kept = ("kept", run.tokens[:moved_at], slot)
                expected = kept if slot < moved_at else run.content(slot)
                page = pages[slot // page_tokens]
                assert page > 0
                assert self.read(index, page, slot % page_tokens) == expected
            return
        for token in needed_tokens(layer_type, run.processed, end):
            page = pages[token // page_tokens]
            assert page > 0, (layer_type.name, token, pages)
            assert self.read(index, page, token % page_tokens) == run.content(token)

    def _end_step(self, run, pages):
        run.last_start = run.processed
        run.processed += run.scheduled - run.rejected
        run.scheduled = run.rejected = 0
        for index, table in enumerate(self.tables):
            if not isinstance(table.layer_type, TokenBudget):
                continue
            dropped, moved_at = moves(table, run, run.processed)[-1]
            if moved_at and moved_at == run.processed:
                for slot in range(dropped, moved_at):
                    page = pages[index][slot // table.tokens_per_page]
                    kept = ("kept", run.tokens[:moved_at], slot)
                    self.write(index, page, slot % table.tokens_per_page, kept)


def choices(layer_type, run, end):
    """Numbers of tokens, up to `end`, at which a layer with a budget chooses what it keeps."""
    interval = layer_type.output_tokens or len(run.tokens) + 1
    return range(run.prompt, end + 1, interval)


def moves(table, run, end):
    """(tokens dropped, tokens at the choice) of each choice that dropped more; (0, 0) first."""
    found = [(0, 0)]
    for at in choices(table.layer_type, run, end):
        dropped = 0
        while at - dropped > table.layer_type.budget_tokens(at):
            dropped += table.tokens_per_page
        if dropped > found[-1][0]:
            found.append((dropped, at))
    return found


def last_end(tables, run):
    """The most tokens that the next step may end with: of the prompt, and up to a choice."""
    ends = [run.prompt if run.processed < run.prompt else len(run.tokens)]
    for table in tables:
        if isinstance(table.layer_type, TokenBudget):
            later = choices(table.layer_type, run, len(run.tokens))
            ends += [at for at in later if at > run.processed][:1]
    return min(ends)


def embedding_of(run, image, token):
    """The embedding of an image's token, which no other request can have."""
    return ("embedding", run.request_id, image.start_token, token)


def image_pages(run, page_tokens):
    """(number, first page, image) of each image of a request."""
    start = 0
    for number, image in enumerate(run.images):
        yield number, start, image
        start += -(-image.num_tokens // page_tokens)


def needed_tokens(layer_type, processed, end):
    """Tokens read by the queries `processed..end`, from the words of the specification."""
    needed = set()
    for query in range(processed, end):
        for token in range(query + 1):
            if isinstance(layer_type, SlidingWindow | PaperWindow):
                reads = query - token < layer_type.window_tokens
            elif isinstance(layer_type, ChunkedLocal):
                reads = query // layer_type.chunk_tokens == token // layer_type.chunk_tokens
            else:
                reads = True
            if reads:
                needed.add(token)
    return needed

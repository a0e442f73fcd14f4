"""A scheduler that keeps an arena full, and the arena of our manager under it.

Nothing is computed and no time is measured: requests come, grow and go as an engine would have
them, and the bytes are counted. The same requests come to every arena of a comparison.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Protocol

from jenga.errors import InvariantError, OutOfPagesError
from jenga.geometry import Geometry, PageTable, exact_lcm
from jenga.manager import Manager
from jenga.policies import Image, RequestFacts, policy_of
from jenga.spec import CrossAttention, ImageEmbedding, ModelSpec

CHUNK_TOKENS = 8192
"""Prompt tokens computed in a step, of all requests together: vLLM's default on an H100."""

ENCODER_TYPES = (CrossAttention, ImageEmbedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes that running requests hold, by what is in them.

    Attributes:
        used: Slots that the next token of a request reads or writes.
        window: Slots that every window has left, in pages that one has not.
        last_page: Slots not written yet, in a request's last page or an image's.
        padding: Bytes of small pages that no slot covers.
        empty: Small pages that hold nothing, in large pages held.
    """

    used: float = 0
    window: float = 0
    last_page: float = 0
    padding: float = 0
    empty: float = 0

    @property
    def held(self) -> float:
        """All of them."""
        return self.used + self.window + self.last_page + self.padding + self.empty

    @property
    def waste(self) -> float:
        """The share that is not used."""
        return 1 - self.used / self.held

    def over(self, count: float) -> "Bytes":
        """The part of one of so many."""
        return Bytes(**{field.name: getattr(self, field.name) / count for field in fields(self)})

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )


class Request:
    """A request and how far it is.

    Attributes:
        name: Unique among the requests of a run.
        facts: Its prompt and its images.
        total_tokens: Tokens at which it ends.
        num_processed_tokens: Tokens whose step is over.
        num_tokens: Tokens it has slots for.
    """

    __slots__ = ("facts", "name", "num_processed_tokens", "num_tokens", "total_tokens")

    def __init__(self, name: str, facts: RequestFacts, total_tokens: int) -> None:
        self.name = name
        self.facts = facts
        self.total_tokens = total_tokens
        self.num_processed_tokens = self.num_tokens = 0

    def restarted(self) -> "Request":
        """The request as it comes again after preemption, its own tokens part of the prompt."""
        prompt_tokens = max(self.facts.prompt_tokens, self.num_processed_tokens)
        facts = RequestFacts(prompt_tokens=prompt_tokens, images=self.facts.images)
        return Request(f"{self.name}'", facts, self.total_tokens)


class Arena(Protocol):
    """A memory manager and its memory, as the scheduler sees them."""

    def new_step(self) -> None:
        """Note that a step begins."""
        ...

    def grow(self, request: Request, num_tokens: int, *, is_new: bool) -> bool:
        """Give a request slots; a new one only if its whole prompt could be held."""
        ...

    def free(self, request: Request) -> None:
        """End a request."""
        ...

    def held_bytes(self, requests: list[Request]) -> Bytes:
        """What the running requests hold."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of requests.

    Attributes:
        name: What the table calls them.
        prompt_tokens: Draws a prompt's length.
        output_tokens: Fewest and most tokens after the prompt.
        most_tokens: No request is longer.
    """

    name: str
    prompt_tokens: Callable[[random.Random], int]
    output_tokens: tuple[int, int]
    most_tokens: int


def _mmlu_prompt(draw: random.Random) -> int:
    return min(3076, max(775, round(draw.lognormvariate(7.10, 0.28))))


LENGTHS = {
    each.name: each
    for each in (
        Lengths(
            name="short",
            prompt_tokens=lambda draw: draw.randint(512, 896),
            output_tokens=(64, 128),
            most_tokens=1024,
        ),
        # MMLU-Pro with five examples and an answer in steps, about 1.3k tokens.
        Lengths(
            name="mmlu",
            prompt_tokens=_mmlu_prompt,
            output_tokens=(100, 500),
            most_tokens=3576,
        ),
        Lengths(
            name="mid",
            prompt_tokens=lambda draw: draw.randint(6000, 7680),
            output_tokens=(256, 512),
            most_tokens=8192,
        ),
        # Prompts of the paper's long documents; outputs long enough that decoding fills the arena.
        Lengths(
            name="long",
            prompt_tokens=lambda draw: draw.randint(55_000, 110_000),
            output_tokens=(400, 1000),
            most_tokens=111_000,
        ),
        # Whisper transcribes; its decoder knows no longer text.
        Lengths(
            name="speech",
            prompt_tokens=lambda _draw: 4,
            output_tokens=(100, 444),
            most_tokens=448,
        ),
    )
}


def encoder_tokens(model: ModelSpec) -> int:
    """Tokens of the one image, or stretch of audio, of each request; 0 without an encoder."""
    return max(
        (each.typical_tokens for each in model.layer_types if isinstance(each, ENCODER_TYPES)),
        default=0,
    )


def facts_of(model: ModelSpec, prompt_tokens: int) -> RequestFacts:
    """A prompt that begins with one image where the model takes images."""
    num_tokens = encoder_tokens(model)
    if not num_tokens:
        return RequestFacts(prompt_tokens=prompt_tokens)
    if any(isinstance(each, ImageEmbedding) for each in model.layer_types):
        # The image's tokens are tokens of the prompt.
        num_tokens = min(num_tokens, prompt_tokens - 1)
    image = Image(start_token=0, num_tokens=num_tokens)
    return RequestFacts(prompt_tokens=prompt_tokens, images=(image,))


def draw_requests(model: ModelSpec, lengths: Lengths) -> Iterator[Request]:
    """Requests without end, always the same."""
    draw = random.Random(lengths.name)
    number = 0
    while True:
        prompt_tokens = lengths.prompt_tokens(draw)
        total_tokens = prompt_tokens + draw.randint(*lengths.output_tokens)
        yield Request(str(number), facts_of(model, prompt_tokens), total_tokens)
        number += 1


def long_documents(model: ModelSpec, *, seed: int) -> Iterator[Request]:
    """The paper's trace for Ministral: twenty requests, all there from the start.

    Source: Jenga paper, section 7.3 (inputs of 55k to 110k tokens, outputs of 50 to 100).
    """
    draw = random.Random(seed)
    for number in range(20):
        prompt_tokens = draw.randint(55_000, 110_000)
        facts = facts_of(model, prompt_tokens)
        yield Request(str(number), facts, prompt_tokens + draw.randint(50, 100))


class Scheduler:
    """Admits what fits, advances what runs, preempts the youngest where an arena is too full.

    Attributes:
        running: Oldest first.
        num_preemptions: So far.
        is_full: Whether the step's last request to come in was refused.
    """

    def __init__(self, arena: Arena, requests: Iterator[Request]) -> None:
        self._arena = arena
        self._requests = requests
        self._waiting: list[Request] = []  # the next one last
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.is_full = False

    def _next(self) -> Request | None:
        if not self._waiting:
            request = next(self._requests, None)
            if request is None:
                return None
            self._waiting.append(request)
        return self._waiting[-1]

    def fill(self, *, seed: int) -> None:
        """Admit requests, each anywhere in its output, until one does not fit."""
        draw = random.Random(seed)
        while True:
            request = self._next()
            if request is None:
                return
            goal = draw.randrange(request.facts.prompt_tokens, request.total_tokens - 1) + 1
            if not self._run_to(request, goal):
                return
            self._waiting.pop()
            self.running.append(request)

    def _run_to(self, request: Request, goal_tokens: int) -> bool:
        """Bring a waiting request to a length, or leave it waiting."""
        prompt_tokens = request.facts.prompt_tokens
        # The last step is one of decoding: what windows have left is given up.
        ends = [*range(CHUNK_TOKENS, prompt_tokens, CHUNK_TOKENS), prompt_tokens]
        for num_tokens in sorted({*ends, max(prompt_tokens, goal_tokens - 1), goal_tokens}):
            self._arena.new_step()
            if not self._arena.grow(request, num_tokens, is_new=not request.num_tokens):
                if request.num_tokens:
                    self._arena.free(request)
                    self._waiting[-1] = request.restarted()
                return False
            request.num_processed_tokens = request.num_tokens = num_tokens
        return True

    def step(self) -> None:
        """One step: what runs advances, then as many are admitted as there is room for."""
        self._arena.new_step()
        self.is_full = False
        budget_tokens = CHUNK_TOKENS
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):
            request = self.running[index]
            rest = max(1, request.facts.prompt_tokens - request.num_processed_tokens)
            chunk_tokens = min(rest, budget_tokens)
            if chunk_tokens:
                if not self._grow(request, request.num_processed_tokens + chunk_tokens):
                    break
                budget_tokens -= chunk_tokens
            index += 1
        if self.num_preemptions == num_preemptions:
            self._admit(budget_tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Whether the request has its slots and still runs."""
        while not self._arena.grow(request, num_tokens, is_new=False):
            youngest = self.running.pop()
            self._arena.free(youngest)
            self._waiting.append(youngest.restarted())
            self.num_preemptions += 1
            self.is_full = True
            if youngest is request:
                return False
        request.num_tokens = num_tokens
        return True

    def _admit(self, budget_tokens: int) -> None:
        while budget_tokens:
            request = self._next()
            if request is None:
                return
            num_tokens = min(request.facts.prompt_tokens, budget_tokens)
            if not self._arena.grow(request, num_tokens, is_new=True):
                self.is_full = True
                return
            request.num_tokens = num_tokens
            budget_tokens -= num_tokens
            self.running.append(self._waiting.pop())

    def finish_step(self) -> None:
        """End what has all its tokens."""
        for request in self.running:
            request.num_processed_tokens = request.num_tokens
            if request.num_processed_tokens >= request.total_tokens:
                self._arena.free(request)
        self.running = [
            each for each in self.running if each.num_processed_tokens < each.total_tokens
        ]


class ManagedArena:
    """An arena under `jenga.manager.Manager`, on any geometry."""

    def __init__(self, geometry: Geometry, arena_bytes: int) -> None:
        self._manager = Manager(geometry, num_large_pages=geometry.num_large_pages(arena_bytes))
        self._tables = [(table, policy_of(table)) for table in geometry.page_tables]

    def new_step(self) -> None:
        """See `Arena`."""
        self._manager.new_step()

    def grow(self, request: Request, num_tokens: int, *, is_new: bool) -> bool:
        """See `Arena`."""
        try:
            self._manager.allocate(
                request.name,
                num_tokens=num_tokens,
                num_processed_tokens=request.num_processed_tokens,
                facts=request.facts if is_new else None,
                full_tokens=request.facts.prompt_tokens if is_new else 0,
            )
        except OutOfPagesError:
            return False
        return True

    def free(self, request: Request) -> None:
        """See `Arena`."""
        self._manager.free(request.name)

    def held_bytes(self, requests: list[Request]) -> Bytes:
        """What the running requests hold, counted from them and checked against the manager."""
        held = Bytes()
        memory = self._manager.memory()
        for (table, policy), reported in zip(self._tables, memory.tables, strict=True):
            page_slots = table.tokens_per_page
            pages = window = last_page = 0
            for request in requests:
                slots = policy.update_last_access(
                    request.facts, request.num_processed_tokens, request.num_tokens
                )
                if slots:
                    first, end = slots.start // page_slots, -(-slots.stop // page_slots)
                    pages += end - first
                    window += slots.start - first * page_slots
                    last_page += end * page_slots - slots.stop
                    last_page += _unwritten_image_slots(table, request, first)
            occupied_bytes = reported.used_bytes + reported.useless_bytes
            if occupied_bytes != pages * table.small_page_bytes or reported.evictable_bytes:
                msg = f"{reported} must be of {pages} pages of {table.small_page_bytes} bytes"
                raise InvariantError(msg)
            token_bytes = table.payload_bytes / page_slots
            held += Bytes(
                used=(pages * page_slots - window - last_page) * token_bytes,
                window=window * token_bytes,
                last_page=last_page * token_bytes,
                padding=pages * table.padding_bytes,
                empty=reported.empty_bytes,
            )
        return held


def _unwritten_image_slots(table: PageTable, request: Request, first_page: int) -> int:
    """Slots behind the ends of images, each of which begins on a page of its own."""
    if not isinstance(table.layer_type, ENCODER_TYPES):
        return 0
    page_slots = table.tokens_per_page
    unwritten = page = 0
    for image in request.facts.images:
        num_pages = -(-image.num_tokens // page_slots)
        page += num_pages
        if page > first_page and image.start_token < request.num_tokens:
            unwritten += num_pages * page_slots - image.num_tokens
    return unwritten


class Need:
    """Bytes that the next tokens of requests read or write, whatever holds them."""

    def __init__(self, model: ModelSpec) -> None:
        """Image embeddings are left out."""
        kept = tuple(each for each in model.layer_types if not isinstance(each, ImageEmbedding))
        tokens = exact_lcm(
            ModelSpec(name=model.name, layer_types=kept), tokens_per_page=1, alignment_bytes=1
        )
        self._tables = [
            (policy_of(table), table.payload_bytes / table.tokens_per_page)
            for table in tokens.page_tables
        ]

    def of(self, request: Request) -> float:
        """Of one request in the step that gave it its last slots."""
        facts, start, end = request.facts, request.num_processed_tokens, request.num_tokens
        return sum(
            len(policy.update_last_access(facts, start, end)) * token_bytes
            for policy, token_bytes in self._tables
        )

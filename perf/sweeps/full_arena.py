"""Requests that keep an arena full, and the bytes that they hold by cause.

Nothing is computed, and no time is measured. Requests come, grow and go as in an engine, and the
bytes are counted. All arenas of a comparison get the same requests.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from jenga.errors import InvariantError
from jenga.geometry import PageTable
from jenga.policies import Image
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.arenas.vllm_arena import StockArena
from jenga.sim.batching.arena import ActiveRequest, Arena
from jenga.sim.batching.need import encoder_tokens
from jenga.sim.batching.scheduler import CHUNK_TOKENS, MAX_REQUESTS, Scheduler
from jenga.sim.workload.generators import MMLU_PRO_LOG_DEVIATION, MMLU_PRO_LOG_MEAN, MMLU_PRO_TOKENS
from jenga.sim.workload.generators import long_documents as documents_of
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import ImageEmbedding, ModelSpec

MOST_ARRIVALS = 64
"""Number of waiting requests before a step: more than one step can admit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes that running requests hold, by cause.

    Attributes:
        used: Slots that a request's next token reads or writes.
        window: Slots outside of every window, in pages that a window still needs.
        last_page: Slots that are not written yet, in the last page of a request or of an image.
        padding: Bytes of small pages that no slot covers.
        empty: Empty small pages in large pages that are held.
    """

    used: float = 0
    window: float = 0
    last_page: float = 0
    padding: float = 0
    empty: float = 0

    @property
    def held(self) -> float:
        """Sum of all bytes."""
        return self.used + self.window + self.last_page + self.padding + self.empty

    @property
    def waste(self) -> float:
        """Share of the held bytes that is not used, 0 to 1."""
        return 1 - self.used / self.held

    def over(self, count: float) -> "Bytes":
        """Return all numbers divided by `count`."""
        return Bytes(**{field.name: getattr(self, field.name) / count for field in fields(self)})

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distribution of the lengths of requests.

    Attributes:
        name: Name in the table.
        prompt_tokens: Function that draws a prompt's length.
        output_tokens: Smallest and largest number of tokens after the prompt.
        most_tokens: Largest length of a request in tokens, with its output.
    """

    name: str
    prompt_tokens: Callable[[random.Random], int]
    output_tokens: tuple[int, int]
    most_tokens: int


def _mmlu_prompt(draw: random.Random) -> int:
    least, most = MMLU_PRO_TOKENS
    drawn = draw.lognormvariate(MMLU_PRO_LOG_MEAN, MMLU_PRO_LOG_DEVIATION)
    return min(most, max(least, round(drawn)))


LENGTHS = {
    each.name: each
    for each in (
        Lengths(
            name="short",
            prompt_tokens=lambda draw: draw.randint(512, 896),
            output_tokens=(64, 128),
            most_tokens=1024,
        ),
        # MMLU-Pro with five examples and a step-by-step answer, about 1.3k tokens.
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
        # Prompts of the paper's long documents. Outputs are long enough that decoding fills the
        # arena.
        Lengths(
            name="long",
            prompt_tokens=lambda draw: draw.randint(55_000, 110_000),
            output_tokens=(400, 1000),
            most_tokens=111_000,
        ),
        # Whisper's transcriptions: its decoder supports no longer text.
        Lengths(
            name="speech",
            prompt_tokens=lambda _draw: 4,
            output_tokens=(100, 444),
            most_tokens=448,
        ),
    )
}


def images_of(model: ModelSpec, prompt_tokens: int) -> tuple[Image, ...]:
    """Return one image at the beginning of the prompt, if the model takes images."""
    num_tokens = encoder_tokens(model)
    if not num_tokens:
        return ()
    if any(isinstance(each, ImageEmbedding) for each in model.layer_types):
        # The image's tokens are part of the prompt.
        num_tokens = min(num_tokens, prompt_tokens - 1)
    return (Image(start_token=0, num_tokens=num_tokens),)


def request_of(model: ModelSpec, name: str, prompt_tokens: int, output_tokens: int) -> Request:
    """Make a request that shares no token with any other."""
    return Request(
        name=name,
        prompt=(Piece(name, prompt_tokens),),
        output_tokens=output_tokens,
        images=images_of(model, prompt_tokens),
    )


def draw_requests(model: ModelSpec, lengths: Lengths) -> Iterator[Request]:
    """Yield an endless sequence of requests, always the same one."""
    draw = random.Random(lengths.name)
    number = 0
    while True:
        prompt_tokens = lengths.prompt_tokens(draw)
        yield request_of(model, str(number), prompt_tokens, draw.randint(*lengths.output_tokens))
        number += 1


def long_documents(model: ModelSpec, *, seed: int) -> Iterator[Request]:
    """Yield the paper's trace for Ministral: twenty requests, all there from the start."""
    for each in documents_of(seed=seed):
        yield request_of(model, each.name, each.prompt_tokens, each.output_tokens)


class FullArena:
    """An arena and the requests that keep it full.

    Attributes:
        arena: The arena.
        is_full: Whether the last step left a request waiting for memory, or preempted one.
    """

    def __init__(self, arena: Arena, requests: Iterator[Request]) -> None:
        self.arena = arena
        self._requests = requests
        self._scheduler = Scheduler(arena, chunk_tokens=CHUNK_TOKENS, max_requests=MAX_REQUESTS)
        self.is_full = False

    @property
    def running(self) -> list[ActiveRequest]:
        """Requests that have pages, oldest first."""
        return self._scheduler.running

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._scheduler.num_preemptions

    def _arrive(self) -> None:
        waiting = self._scheduler.waiting
        while len(waiting) < MOST_ARRIVALS and (request := next(self._requests, None)) is not None:
            waiting.append(ActiveRequest(request))

    def fill(self, *, seed: int) -> None:
        """Admit requests, each at a random point of its output, until one does not fit."""
        draw = random.Random(seed)
        waiting = self._scheduler.waiting
        while True:
            self._arrive()
            if not waiting:
                return
            active = waiting[0]
            goal = draw.randrange(active.prompt_tokens, active.total_tokens - 1) + 1
            if not self._run_to(active, goal):
                return
            self.running.append(waiting.popleft())

    def _run_to(self, active: ActiveRequest, goal_tokens: int) -> bool:
        """Advance a waiting request to a length.

        If that fails, leave it waiting and return False.
        """
        prompt_tokens = active.prompt_tokens
        # The last step is a decode step, in which pages that left a window are freed.
        ends = [*range(CHUNK_TOKENS, prompt_tokens, CHUNK_TOKENS), prompt_tokens]
        for num_tokens in sorted({*ends, max(prompt_tokens, goal_tokens - 1), goal_tokens}):
            self.arena.new_step()
            if not active.num_computed:
                self.arena.find(active)
                if not self.arena.admit(active, 0, num_tokens):
                    return False
            elif not self.arena.grow(active, num_tokens):
                self.arena.free(active)
                active.restart()
                return False
            active.num_computed = num_tokens
            active.num_tokens = max(prompt_tokens, num_tokens + 1)
        return True

    def step(self) -> None:
        """Run one step: running requests advance, then as many are admitted as fit."""
        self._arrive()
        scheduler = self._scheduler
        num_preemptions = scheduler.num_preemptions
        self._batch = scheduler.schedule()
        num_tokens = sum(chunk.num_tokens for chunk in self._batch.chunks)
        is_refused = bool(scheduler.waiting) and num_tokens < CHUNK_TOKENS
        self.is_full = is_refused or scheduler.num_preemptions > num_preemptions

    def finish_step(self) -> None:
        """End the requests that have all their tokens."""
        self._scheduler.finish(self._batch, 0.0)


def managed_bytes(arena: ManagedArena, running: Sequence[ActiveRequest]) -> Bytes:
    """Count the bytes of running requests by cause, and check them against the manager."""
    held = Bytes()
    memory = arena.manager.memory()
    for table, reported in zip(arena.manager.geometry.page_tables, memory.tables, strict=True):
        policy, page_slots = table.policy(), table.tokens_per_page
        pages = window = last_page = 0
        for active in running:
            slots = policy.update_last_access(
                active.facts, active.num_processed, active.num_computed
            )
            if slots:
                first, end = slots.start // page_slots, -(-slots.stop // page_slots)
                pages += end - first
                window += slots.start - first * page_slots
                last_page += end * page_slots - slots.stop
                last_page += _unwritten_image_slots(table, active, first)
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


def _unwritten_image_slots(table: PageTable, active: ActiveRequest, first_page: int) -> int:
    """Count the unwritten slots behind the ends of images.

    Each image begins on a page of its own.
    """
    if not table.layer_type.typical_tokens:
        return 0
    page_slots = table.tokens_per_page
    unwritten = page = 0
    for image in active.facts.images:
        num_pages = -(-image.num_tokens // page_slots)
        page += num_pages
        if page > first_page and image.start_token < active.num_computed:
            unwritten += num_pages * page_slots - image.num_tokens
    return unwritten


def stock_bytes(arena: StockArena, running: Sequence[ActiveRequest]) -> Bytes:
    """Count the bytes of running requests in vLLM's blocks. Unused bytes count as padding."""
    memory = arena.memory(list(running))
    return Bytes(used=memory.used_bytes, padding=memory.useless_bytes)


def held_bytes(arena: Arena, running: Sequence[ActiveRequest]) -> Bytes:
    """Count the bytes of running requests by cause.

    Raises:
        ValueError: The arena is neither ours nor vLLM's.
    """
    if isinstance(arena, ManagedArena):
        return managed_bytes(arena, running)
    if isinstance(arena, StockArena):
        return stock_bytes(arena, running)
    msg = f"arena must be ours or vLLM's, got {type(arena).__name__}"
    raise ValueError(msg)

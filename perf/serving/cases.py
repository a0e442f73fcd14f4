"""The cells of the suite: models on their GPUs, budgets, workloads, and the systems compared.

A workload's sizes are drawn from its seed, in relation to how many such texts fit the arena. So a
model with room for a hundred articles is asked about a hundred and fifty, and one with room for ten
about fifteen. Every cell is written as a trace of `jenga replay --trace`, and can be run alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

from jenga.geometry import tokens_per_slot
from jenga.sim.arenas.vllm_plan import attention_block_tokens, read_stock_options
from jenga.sim.batching.step_time import Achieved, StepTime, weights_of
from jenga.sim.workload.requests import Request
from jenga.sim.workload.sources import open_source
from jenga.spec import ChunkedLocal, FullAttention, ImageEmbedding, ModelSpec, SlidingWindow, State
from perf.sweeps.sweep_eviction import Setting, setting

MODELS = {
    "gemma-3-27b": "H200",
    "gpt-oss-120b": "H200",
    "falcon-h1-7b": "H100",
    "granite-4.0-h-small": "H100",
    "nemotron-h-8b": "H100",
    "llama-3.1-8b": "H100",
    "jamba-1.5-mini": "H200",
    "qwen3-next-80b-a3b": "H200",
    "gemma-3-12b": "H100",
    "gpt-oss-20b": "H100",
    "llama-4-scout": "H200",
}
"""Models, and the GPU that each runs on: on one, or as many as leave room for an arena."""

BUDGETS = (1.0, 0.25)
"""Shares of the arena that a GPU has beside a model's weights."""

LOADS = (50, 75, 90, 120)
"""Arrivals, in percent of stock's capacity."""

LIMITS = (4,)
"""TTFT p99 that a capacity allows, in times the TTFT of the longest prompt alone; largest first.

Ten times would leave some workloads without a capacity: a trace of some hundreds of requests ends
before its queue is as long."""

ACHIEVED = {
    "H100-80G": Achieved(
        arithmetic_share=0.8,
        bandwidth_share=0.9,
        attention_arithmetic_share=0.55,
        attention_bandwidth_share=0.85,
    ),
    "H200": Achieved(
        arithmetic_share=0.8,
        bandwidth_share=0.9,
        attention_arithmetic_share=0.4,
        attention_bandwidth_share=0.75,
    ),
}
"""Shares of the peaks, rounded from `jenga.sim.batching.measured`, so that rows stay comparable
when a GPU is measured again."""

MOST_REQUESTS = 400
"""Of a cell: enough for a p99, and few enough for the whole suite to take hours."""

LEAST_REQUESTS = 200
"""Of a cell on a small arena: texts are shorter there, and asked about more often."""

TEXT_TOKENS = 4000, 60_000
"""Fewest and most of an article, however little or much the arena holds."""

STOCK = "vllm"
UNLIMITED = "unlimited"
ORACLE = "oracle"
OURS = "jenga"
"""Systems; `jenga POLICY` is ours with another eviction policy, `vllm OPTIONS` stock's settings."""

STOCK_SETTINGS = (
    "default",
    "retention=dense",
    "retention=2048",
    "retention=4096",
    "retention=8192",
    "retention=16384",
    "match=16",
    "hybrid=off",
)
"""Settings of stock, as `jenga.sim.arenas.vllm_plan.read_stock_options` reads them."""


def stock_systems(model: ModelSpec, settings: Sequence[str] = STOCK_SETTINGS) -> list[str]:
    """Stock in the settings that make a difference for a model.

    Models of full attention alone have the default. Others keep windows and states within a prompt
    by their retention, a multiple of a block. Only states make a block longer than 16 tokens, and
    only windows can be kept as full attention is.

    Args:
        model: The model.
        settings: Of `STOCK_SETTINGS`, or others of that form.
    """
    has_states = any(isinstance(each, State) for each in model.layer_types)
    has_windows = any(isinstance(each, SlidingWindow | ChunkedLocal) for each in model.layer_types)
    block_tokens = attention_block_tokens(model)
    found: list[str] = []
    for setting_text in settings:
        name, _, value = setting_text.partition("=")
        text = setting_text
        match name:
            case "default":
                text = ""
            case "retention":
                if not (has_states or has_windows):
                    continue
                if value.isdecimal():
                    num_blocks = max(1, round(int(value) / block_tokens))
                    text = f"retention={num_blocks * block_tokens}"
            case "match":
                if not has_states:
                    continue
            case _:
                if has_states or not has_windows:
                    continue
        found.append(f"{STOCK} {text}".rstrip())
    return found


def is_stock(system: str) -> bool:
    """Whether a system is stock in some setting."""
    return system.partition(" ")[0] == STOCK


def check_system(system: str) -> None:
    """Refuse a name that is no system's.

    Raises:
        ValueError: It is not.
    """
    from jenga.eviction.known import EVICTION_POLICIES

    name, _, option = system.partition(" ")
    if name == STOCK:
        read_stock_options(option or "default")
    elif name not in (OURS, UNLIMITED, ORACLE) or (option and name != OURS):
        msg = (
            f"system must be {OURS!r}, '{OURS} POLICY', {UNLIMITED!r}, {ORACLE!r}, {STOCK!r} or "
            f"'{STOCK} OPTIONS', got {system!r}"
        )
        raise ValueError(msg)
    elif option and option not in EVICTION_POLICIES:
        msg = f"policy must be one of {', '.join(EVICTION_POLICIES)}, got {option!r}"
        raise ValueError(msg)


@cache
def machine(model: str) -> Setting:
    """A model on its GPUs."""
    return setting(model, MODELS[model])


def clock_of(one: Setting) -> StepTime:
    """Seconds of a step of a model on its GPUs."""
    weights = weights_of(one.facts, ranks=one.ranks)
    return StepTime(one.model, weights, one.gpu, achieved=ACHIEVED[one.gpu.name])


@dataclass(frozen=True, slots=True)
class Room:
    """How much an arena holds.

    Attributes:
        arena_bytes: Of one rank.
        token_bytes: Of a token in full attention.
        text_bytes: Of a text besides: windows and states after it.
    """

    arena_bytes: int
    token_bytes: float
    text_bytes: float

    def texts(self, num_tokens: float) -> float:
        """How many texts of so many tokens it holds."""
        return self.arena_bytes / (num_tokens * self.token_bytes + self.text_bytes)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt that a workload may have: it takes a third of the arena."""
        return int((self.arena_bytes / 3 - self.text_bytes) / self.token_bytes)


def room_of(one: Setting, budget: float) -> Room:
    """The room of a model's arena."""
    token_bytes = text_bytes = 0.0
    for layer_type in one.model.layer_types:
        slot_bytes = sum(layer.slot_bytes for layer in layer_type.layers)
        match layer_type:
            case FullAttention():
                token_bytes += slot_bytes / tokens_per_slot(layer_type)
            case SlidingWindow(window_tokens=limit) | ChunkedLocal(chunk_tokens=limit):
                text_bytes += slot_bytes * limit
            case State():
                text_bytes += slot_bytes
            case ImageEmbedding():
                pass  # no workload has images
            case _:
                msg = f"no layer of {one.model.name!r} may be a {type(layer_type).__name__}"
                raise ValueError(msg)
    return Room(int(one.arena_bytes * budget), token_bytes, text_bytes)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests whose arrivals can be made denser.

    Attributes:
        text: As of `jenga replay --trace`, without its rate.
        num_arrivals: Arrivals that the rate counts; some have several requests, or later turns.
        base_per_s: Arrivals a second of a file as it is; 0 where the text takes a rate.
        limit: Requests that are read; None for all.
    """

    text: str
    num_arrivals: int
    base_per_s: float = 0.0
    limit: int | None = None

    def at(self, rate: float) -> str:
        """The text of this trace with so many arrivals a second."""
        return self.text if self.base_per_s else f"{self.text},rate={rate:g}"

    def requests(self, rate: float) -> Iterator[Request]:
        """Requests with so many arrivals a second."""
        speed = rate / self.base_per_s if self.base_per_s else 1.0
        return open_source(self.at(rate), limit=self.limit, speed=speed)


def _articles_of(
    draw: Random, room: Room, sizes: Sequence[int], *, share: float, asked: float
) -> tuple[int, int]:
    """How many articles of how many tokens fill an arena.

    Args:
        draw: Of their size.
        room: The arena.
        sizes: Tokens of an article where the requests allow it.
        share: Arenas that all articles fill.
        asked: Requests about each of them.
    """
    least, most = TEXT_TOKENS
    tokens = draw.choice(sizes)
    while tokens < most and share * room.texts(tokens) * asked > MOST_REQUESTS:
        tokens = tokens * 3 // 2
    while tokens > least and share * room.texts(tokens) * asked < LEAST_REQUESTS:
        tokens = tokens * 2 // 3
    tokens = min(max(tokens, least), most, room.longest_tokens)
    return _count(share * room.texts(tokens), 4, MOST_REQUESTS / asked), tokens


def _count(wanted: float, least: int, most: float) -> int:
    return max(least, min(round(wanted), int(most)))


def _articles(draw: Random, room: Room) -> Trace:
    """Long articles, each asked about several times in any order; they do not all fit."""
    questions, share = draw.choice((6, 8, 12)), draw.uniform(0.8, 2.0)
    sizes = (8000, 16_000, 30_000)
    num, tokens = _articles_of(draw, room, sizes, share=share, asked=questions)
    questions = max(questions, -(-LEAST_REQUESTS // num))
    question = draw.choice((32, 200))
    text = f"articles:n={num},questions={questions},tokens={tokens},question={question}"
    return Trace(text, num * questions)


def _articles24(_draw: Random, room: Room) -> Trace:
    """24 articles of 30,000 tokens with 8 questions each, whatever the arena holds."""
    return Trace(f"articles:n=24,questions=8,tokens={min(30_000, room.longest_tokens)}", 24 * 8)


def _rag(draw: Random, _room: Room) -> Trace:
    """A head that all share, then chunks in any order."""
    head, chunk = draw.choice((512, 1024, 4096)), draw.choice((512, 2048))
    pool, read, exponent = draw.choice((60, 200)), draw.choice((4, 8)), draw.choice((0, 0.8, 1.1))
    text = (
        f"rag:n={MOST_REQUESTS},head={head},tokens={chunk},num_chunks={pool},k={read},"
        f"exponent={exponent:g}"
    )
    return Trace(text, MOST_REQUESTS)


def _samples(draw: Random, room: Room) -> Trace:
    """Eight samples of each prompt at once."""
    most = min(draw.choice((6000, 20_000, 30_000)), room.longest_tokens)
    num, output = MOST_REQUESTS // 8, draw.choice((300, 800))
    text = f"samples:n={num},num_samples=8,tokens={most // 3}-{most},output=100-{output}"
    return Trace(text, num)


def _mixed(draw: Random, room: Room) -> Trace:
    """Chats beside bursts of documents."""
    chats, head = draw.choice((24, 48)), draw.choice((300, 1500))
    chat_tokens = min(32_000, room.longest_tokens)
    document = min(30_000, room.longest_tokens // 2)
    text = (
        f"mixed:n={MOST_REQUESTS},num_chats={chats},head={head},chat_tokens={chat_tokens},"
        f"document_tokens={document // 3}-{document},burst_share={draw.choice((0.02, 0.05))},"
        f"message_tokens=20-{draw.choice((400, 2000))},output=50-{draw.choice((200, 500))}"
    )
    return Trace(text, MOST_REQUESTS)


AGENT_TOKENS = 60_000
"""Tokens of prompts of the workload `agents`, on average."""

AGENT_SESSIONS = 36, 56
"""Fewest and most of its sessions: fewer, even all at once, may stay within the limit."""


def _agents(draw: Random, room: Room) -> Trace:
    """Sessions of agents, whose next turn follows the answer before it."""
    share = draw.uniform(1.5, 3.0)
    context = min(150_000, room.longest_tokens)
    task = min(80_000, context // 2)
    num = _count(share * room.texts(min(AGENT_TOKENS, task)), *AGENT_SESSIONS)
    text = (
        f"agents:n={num},turns=4-12,head={draw.choice((4000, 12_000))},"
        f"task_tokens={task // 4}-{task},result_tokens=200-6000,output=50-500,"
        f"think={draw.choice((2, 5))},pause_share=0.06,pause_s=20-90,"
        f"fork_share={draw.choice((0, 0.5))},context_tokens={context}"
    )
    return Trace(text, num)


def _shift(draw: Random, room: Room) -> Trace:
    """Articles, all of which are replaced by others half way."""
    share = draw.uniform(0.5, 1.0)
    num, tokens = _articles_of(draw, room, (8000, 20_000), share=share, asked=8)
    return Trace(f"shift:n={MOST_REQUESTS},num_articles={num},tokens={tokens}", MOST_REQUESTS)


def _alternate(draw: Random, room: Room) -> Trace:
    """Two sets of articles in turns, each of which nearly fits."""
    share = draw.uniform(0.5, 0.9)
    num, tokens = _articles_of(draw, room, (8000, 20_000), share=share, asked=8)
    turn = _count(draw.choice((1, 2)) * num, 8, MOST_REQUESTS / 6)
    text = f"alternate:n={MOST_REQUESTS},num_articles={num},num_in_turn={turn},tokens={tokens}"
    return Trace(text, MOST_REQUESTS)


def _loop(draw: Random, room: Room) -> Trace:
    """Articles round and round, a little more than fit."""
    share = draw.uniform(1.05, 1.3)
    num, tokens = _articles_of(draw, room, (10_000, 20_000), share=share, asked=6)
    rounds = -(-LEAST_REQUESTS // num)
    return Trace(f"loop:n={num},rounds={max(6, rounds)},tokens={tokens}", num * max(6, rounds))


def _zipf(draw: Random, room: Room) -> Trace:
    """Whole prompts by popularity, most of them once."""
    mean = min(max(2000, room.texts(1) / 100), 24_000, room.longest_tokens // 2)
    text = (
        f"zipf:n={MOST_REQUESTS},exponent={draw.choice((0.7, 0.9, 1.1))},"
        f"tokens={int(mean / 3)}-{int(2 * mean)},output=30-150"
    )
    return Trace(text, MOST_REQUESTS)


def _tools(draw: Random, room: Room) -> Trace:
    """Heads of instructions and examples, with inputs of their own; and documents."""
    heads, head = draw.choice((20, 60)), draw.choice((6000, 15_000))
    document = min(40_000, room.longest_tokens // 2)
    text = (
        f"tools:n={MOST_REQUESTS},num_heads={heads},exponent={draw.choice((0.6, 0.8, 1.1))},"
        f"head={head // 6}-{head},document_tokens={document // 4}-{document},output=30-200"
    )
    return Trace(text, MOST_REQUESTS)


WORKLOADS: dict[str, Callable[[Random, Room], Trace]] = {
    "articles": _articles,
    "agents": _agents,
    "rag": _rag,
    "mixed": _mixed,
    "samples": _samples,
    "shift": _shift,
    "tools": _tools,
    "zipf": _zipf,
    "alternate": _alternate,
    "loop": _loop,
    "articles24": _articles24,
}
"""Made-up workloads by name."""

MOONCAKE = "mooncake"
MOONCAKE_BEGIN = 1000
"""Name of the workload of Mooncake's trace; rows of it between the beginnings of two seeds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace on one arena.

    Attributes:
        model: The model.
        budget: Share of the arena of its GPUs.
        workload: A name of `WORKLOADS`, or `MOONCAKE`.
        seed: Of all that is drawn.
    """

    model: str
    budget: float
    workload: str
    seed: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena of one rank."""
        return int(machine(self.model).arena_bytes * self.budget)

    @property
    def text(self) -> str:
        """The cell in words."""
        return f"{self.model} x{self.budget:g} {self.workload} seed {self.seed}"

    def trace(self, mooncake: Path | None = None) -> Trace:
        """Its requests.

        Args:
            mooncake: Mooncake's trace.

        Raises:
            ValueError: The cell is of that trace, and it is not given.
        """
        if self.workload == MOONCAKE:
            if mooncake is None:
                msg = f"workload {MOONCAKE!r} must have its file, given by --mooncake"
                raise ValueError(msg)
            return _file_trace(mooncake)
        draw = Random(f"{self.model} {self.workload} {self.seed}")
        trace = WORKLOADS[self.workload](draw, room_of(machine(self.model), self.budget))
        return Trace(f"{trace.text},seed={self.seed}", trace.num_arrivals)


def _file_trace(path: Path) -> Trace:
    times_s = [each.arrival_s for each in open_source(str(path), limit=MOST_REQUESTS)]
    return Trace(str(path), len(times_s), (len(times_s) - 1) / times_s[-1], MOST_REQUESTS)


def cells(
    models: Sequence[str], budgets: Sequence[float], workloads: Sequence[str], seeds: Sequence[int]
) -> list[Cell]:
    """All cells; those that come first are of all models and workloads."""
    return [
        Cell(model, budget, workload, seed)
        for seed, budget, workload, model in product(seeds, budgets, workloads, models)
    ]

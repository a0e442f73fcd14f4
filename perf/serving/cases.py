"""Cells of the suite: models on their GPUs, budgets, workloads, and the systems compared.

Sizes of a workload are drawn with its seed, relative to the number of such texts that fit the
arena. For example, a model with room for a hundred articles gets questions on about a hundred and
fifty. One with room for ten gets questions on about fifteen. Each cell is a trace in the notation
of `jenga replay --trace`, and can be replayed alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

from jenga.sim.arenas.vllm_plan import attention_block_tokens, read_stock_options
from jenga.sim.batching.arena import ActiveRequest, Chunk
from jenga.sim.batching.scheduler import CHUNK_TOKENS
from jenga.sim.batching.step_time import Achieved, StepTime, weights_of
from jenga.sim.workload.requests import Piece, Request
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
"""Model -> the kind of GPU that it runs on: one, or as many as leave room for an arena."""

BUDGETS = (1.0, 0.25)
"""Shares, 0 to 1, of the memory that a GPU has left after a model's weights."""

LOADS = (50, 75, 90, 120)
"""Rates of arrivals, in percent of stock's capacity."""

LIMITS = (4,)
"""TTFT p99 that a capacity allows, as multiples of the longest prompt's TTFT alone; largest first.

With a limit of 10, some workloads would have no capacity: a trace of some hundreds of requests ends
before its queue gets that long.
"""

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
"""Achieved shares of the GPUs' peaks, rounded from `jenga.sim.batching.measured`.

Rounding keeps rows comparable when a GPU is measured again.
"""

MOST_REQUESTS = 400
"""Largest number of requests in a cell.

It is enough for a p99, and few enough for the whole suite to take hours.
"""

LEAST_REQUESTS = 200
"""Least number of requests in a cell with a small arena.

Articles are shorter there, and get more questions.
"""

DOCUMENT_REQUESTS = 300
"""Number of requests about documents that come and go."""

TEXT_TOKENS = 4000, 60_000
"""Least and largest size of an article in tokens, for any size of the arena."""

AGENT_TOKENS = 60_000
"""Mean number of prompt tokens in the workload `agents`."""

AGENT_TURNS = 4, 12
"""Least and largest number of turns in a session of `agents`."""

AGENT_SESSIONS = 36, 160
"""Least and largest number of sessions in a cell."""

AGENT_ARRIVALS_S = 600.0
"""Seconds during which sessions arrive, at three times the rate that is served without hits.

A session lasts minutes, because its next turn follows the answer. If all sessions arrived within
that time, none would have to wait long, even far above the capacity.
"""

STOCK = "vllm"
UNLIMITED = "unlimited"
ORACLE = "oracle"
OURS = "jenga"
"""Names of systems.

`jenga POLICY` is Jenga with another eviction policy, and `vllm OPTIONS` is stock with settings.
"""

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
"""Settings of stock, in the notation of `jenga.sim.arenas.vllm_plan.read_stock_options`."""


def stock_systems(model: ModelSpec, settings: Sequence[str] = STOCK_SETTINGS) -> list[str]:
    """Return stock's system names, with the settings that make a difference for a model.

    - A model with only full attention has only the default.
    - Windows and states are cached within a prompt at intervals of the retention, which is rounded
      to blocks.
    - `match` matters only with states, because only they make a block longer than 16 tokens.
    - `hybrid=off` is for windows without states, because windows can be kept like full attention.

    Args:
        model: The model.
        settings: Some of `STOCK_SETTINGS`, or others of that form.
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
    """Check that a name is a system's.

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
    """Return a model on its GPUs."""
    return setting(model, MODELS[model])


def clock_of(one: Setting) -> StepTime:
    """Return the model of step times for a model on its GPUs."""
    weights = weights_of(one.facts, ranks=one.ranks)
    return StepTime(one.model, weights, one.gpu, achieved=ACHIEVED[one.gpu.name])


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of an arena.

    Attributes:
        arena_bytes: Bytes of the arena on one rank.
        token_bytes: Bytes of one token in all full-attention layers.
        text_bytes: Further bytes of a text: the windows and states at its end.
        prefill_s: Modelled seconds to read a prompt of `AGENT_TOKENS` tokens without hits.
    """

    arena_bytes: int
    token_bytes: float
    text_bytes: float
    prefill_s: float

    def texts(self, num_tokens: float) -> float:
        """Return the number of texts of a length that fit."""
        return self.arena_bytes / (num_tokens * self.token_bytes + self.text_bytes)

    @property
    def longest_tokens(self) -> int:
        """Length of the longest prompt of any workload, in tokens.

        It takes a third of the arena.
        """
        return int((self.arena_bytes / 3 - self.text_bytes) / self.token_bytes)


def room_of(one: Setting, budget: float) -> Room:
    """Return the room in a share of a model's arena."""
    token_bytes = text_bytes = 0.0
    for layer_type in one.model.layer_types:
        slot_bytes = layer_type.slot_bytes
        match layer_type:
            case FullAttention():
                token_bytes += layer_type.token_bytes
            case SlidingWindow(window_tokens=limit) | ChunkedLocal(chunk_tokens=limit):
                text_bytes += slot_bytes * limit
            case State():
                text_bytes += slot_bytes
            case ImageEmbedding():
                pass  # no workload has images
            case _:
                msg = f"no layer of {one.model.name!r} may be a {type(layer_type).__name__}"
                raise ValueError(msg)
    return Room(int(one.arena_bytes * budget), token_bytes, text_bytes, _prefill_s(one))


def _prefill_s(one: Setting) -> float:
    """Return the modelled seconds of the steps that read a prompt of `AGENT_TOKENS` tokens."""
    prompt = (Piece("prompt", AGENT_TOKENS),)
    active = ActiveRequest(Request(name="alone", prompt=prompt, output_tokens=1))
    clock = clock_of(one)
    starts = range(0, AGENT_TOKENS, CHUNK_TOKENS)
    return sum(
        clock([Chunk(active, start, min(CHUNK_TOKENS, AGENT_TOKENS - start))]) for start in starts
    )


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests whose rate of arrivals can be chosen.

    Attributes:
        text: Trace in the notation of `jenga replay --trace`, without its rate.
        num_arrivals: Number of arrivals that the rate counts. An arrival may bring several
            requests, or later turns.
        base_per_s: Arrivals per second in a trace that is a file. 0 means that `text` accepts a
            rate.
        limit: Number of requests that are read. None means all.
    """

    text: str
    num_arrivals: int
    base_per_s: float = 0.0
    limit: int | None = None

    def at(self, rate: float) -> str:
        """Return the trace with a rate of arrivals per second."""
        return self.text if self.base_per_s else f"{self.text},rate={rate:g}"

    def requests(self, rate: float) -> Iterator[Request]:
        """Yield the requests with a rate of arrivals per second."""
        speed = rate / self.base_per_s if self.base_per_s else 1.0
        return open_source(self.at(rate), limit=self.limit, speed=speed)


def _articles_of(
    draw: Random, room: Room, sizes: Sequence[int], *, share: float, asked: float
) -> tuple[int, int]:
    """Return the number of articles that fill a share of an arena, and their length in tokens.

    Args:
        draw: Random numbers for the length.
        room: The arena.
        sizes: Lengths to choose from, in tokens. The length is changed if the number of requests
            would be too large or too small.
        share: Number of arenas that all articles together would fill.
        asked: Number of requests about each article.
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
    """Long articles with several questions each, in any order. Usually not all articles fit."""
    questions, share = draw.choice((6, 8, 12)), draw.uniform(0.8, 2.0)
    sizes = (8000, 16_000, 30_000)
    num, tokens = _articles_of(draw, room, sizes, share=share, asked=questions)
    questions = max(questions, -(-LEAST_REQUESTS // num))
    question = draw.choice((32, 200))
    text = f"articles:n={num},questions={questions},tokens={tokens},question={question}"
    return Trace(text, num * questions)


def _documents(draw: Random, room: Room) -> Trace:
    """Documents that come and go, with a few long questions each. All are read within a while."""
    most = min(24_000, room.longest_tokens // 2)
    between = draw.choice((6, 12, 24))
    text = f"documents:n={DOCUMENT_REQUESTS},tokens={most // 12}-{most},num_between={between}"
    return Trace(text, DOCUMENT_REQUESTS)


def _articles24(_draw: Random, room: Room) -> Trace:
    """24 articles of 30,000 tokens with 8 questions each, independent of the arena's size."""
    return Trace(f"articles:n=24,questions=8,tokens={min(30_000, room.longest_tokens)}", 24 * 8)


def _rag(draw: Random, _room: Room) -> Trace:
    """A head that all requests share, then some chunks of a pool in any order."""
    head, chunk = draw.choice((512, 1024, 4096)), draw.choice((512, 2048))
    pool, read, exponent = draw.choice((60, 200)), draw.choice((4, 8)), draw.choice((0, 0.8, 1.1))
    text = (
        f"rag:n={MOST_REQUESTS},head={head},tokens={chunk},num_chunks={pool},k={read},"
        f"exponent={exponent:g}"
    )
    return Trace(text, MOST_REQUESTS)


def _samples(draw: Random, room: Room) -> Trace:
    """Eight samples of each prompt, at the same time."""
    most = min(draw.choice((6000, 20_000, 30_000)), room.longest_tokens)
    num, output = MOST_REQUESTS // 8, draw.choice((300, 800))
    text = f"samples:n={num},num_samples=8,tokens={most // 3}-{most},output=100-{output}"
    return Trace(text, num)


def _mixed(draw: Random, room: Room) -> Trace:
    """Chats together with bursts of documents."""
    chats, head = draw.choice((24, 48)), draw.choice((300, 1500))
    chat_tokens = min(32_000, room.longest_tokens)
    document = min(30_000, room.longest_tokens // 2)
    text = (
        f"mixed:n={MOST_REQUESTS},num_chats={chats},head={head},chat_tokens={chat_tokens},"
        f"document_tokens={document // 3}-{document},burst_share={draw.choice((0.02, 0.05))},"
        f"message_tokens=20-{draw.choice((400, 2000))},output=50-{draw.choice((200, 500))}"
    )
    return Trace(text, MOST_REQUESTS)


def _agents(draw: Random, room: Room) -> Trace:
    """Sessions of agents. The next turn follows the answer to the turn before."""
    context = min(150_000, room.longest_tokens)
    task = min(80_000, context // 2)
    least, most = AGENT_SESSIONS
    prompts_s = sum(AGENT_TURNS) / 2 * room.prefill_s
    num = _count(3 * AGENT_ARRIVALS_S / prompts_s, least, most)
    turns = "-".join(map(str, AGENT_TURNS))
    text = (
        f"agents:n={num},turns={turns},head={draw.choice((4000, 12_000))},"
        f"task_tokens={task // 4}-{task},result_tokens=200-6000,output=50-500,"
        f"think={draw.choice((2, 5))},pause_share=0.06,pause_s=20-90,"
        f"fork_share={draw.choice((0, 0.5))},context_tokens={context}"
    )
    return Trace(text, num)


def _shift(draw: Random, room: Room) -> Trace:
    """Articles that are all replaced by other articles in the middle of the trace."""
    share = draw.uniform(0.5, 1.0)
    num, tokens = _articles_of(draw, room, (8000, 20_000), share=share, asked=8)
    return Trace(f"shift:n={MOST_REQUESTS},num_articles={num},tokens={tokens}", MOST_REQUESTS)


def _alternate(draw: Random, room: Room) -> Trace:
    """Two sets of articles that take turns. Each set alone nearly fits."""
    share = draw.uniform(0.5, 0.9)
    num, tokens = _articles_of(draw, room, (8000, 20_000), share=share, asked=8)
    turn = _count(draw.choice((1, 2)) * num, 8, MOST_REQUESTS / 6)
    text = f"alternate:n={MOST_REQUESTS},num_articles={num},num_in_turn={turn},tokens={tokens}"
    return Trace(text, MOST_REQUESTS)


def _loop(draw: Random, room: Room) -> Trace:
    """Articles in a cycle, slightly more than fit."""
    share = draw.uniform(1.05, 1.3)
    num, tokens = _articles_of(draw, room, (10_000, 20_000), share=share, asked=6)
    rounds = -(-LEAST_REQUESTS // num)
    return Trace(f"loop:n={num},rounds={max(6, rounds)},tokens={tokens}", num * max(6, rounds))


def _zipf(draw: Random, room: Room) -> Trace:
    """Whole prompts that repeat by popularity. Most of them come once."""
    mean = min(max(2000, room.texts(1) / 100), 24_000, room.longest_tokens // 2)
    text = (
        f"zipf:n={MOST_REQUESTS},exponent={draw.choice((0.7, 0.9, 1.1))},"
        f"tokens={int(mean / 3)}-{int(2 * mean)},output=30-150"
    )
    return Trace(text, MOST_REQUESTS)


def _tools(draw: Random, room: Room) -> Trace:
    """Heads of instructions and examples, with different inputs; and documents."""
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
    "documents": _documents,
    "articles24": _articles24,
}
"""Name -> made-up workload."""

MOONCAKE = "mooncake"
"""Name of the workload with Mooncake's trace."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace on one arena.

    Attributes:
        model: The model.
        budget: Share of the arena of its GPUs, 0 to 1.
        workload: Name in `WORKLOADS`, or `MOONCAKE`.
        seed: Seed of all random draws.
    """

    model: str
    budget: float
    workload: str
    seed: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena on one rank."""
        return int(machine(self.model).arena_bytes * self.budget)

    @property
    def text(self) -> str:
        """Text that names the cell."""
        return f"{self.model} x{self.budget:g} {self.workload} seed {self.seed}"

    def trace(self, mooncake: Path | None = None) -> Trace:
        """Make the cell's trace.

        Args:
            mooncake: File of Mooncake's trace.

        Raises:
            ValueError: The cell needs that trace, and it is not given.
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
    """List all cells. Seeds vary slowest, so the first cells cover all models and workloads."""
    return [
        Cell(model, budget, workload, seed)
        for seed, budget, workload, model in product(seeds, budgets, workloads, models)
    ]

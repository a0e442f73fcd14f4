"""The plan of measurements: cases and entries, the most informative ones first.

An entry of the plan is one start of one engine. The two sides of a case run in the order A B B A,
so that a drift of the machine's speed favours neither side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perf.engine.planning import models, sides, workloads
from perf.engine.planning.models import Draft, Model, Scale
from perf.engine.planning.sides import Side
from perf.engine.planning.workloads import Workload

GIB, MIB = 1 << 30, 1 << 20

GPU_MEMORY_SHARE = 0.5
"""`gpu_memory_utilization` of every engine: the share of GPU memory that must be free at its start.

The size of its cache is set by its case, in bytes.
"""

START_CAP_S = 120.0
"""Longest time, in seconds, for an engine to start when its kernels are compiled already.

Without compiled kernels, starts on an H100 took 80 to 122 s.
"""

COLD_START_S, WARM_START_S = 100.0, 25.0
"""Expected seconds of a start without and with caches, used until a start was measured."""

TINY_CACHE_BYTES = 16 * MIB
TINY_OPTIONS = {"max_model_len": 128, "max_num_batched_tokens": 256, "max_num_seqs": 8}
TINY_CAP_S = 240.0
"""Longest time, in seconds, for a start or a run of a tiny model. A CPU interprets its kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, the size of its cache, and the workloads that it serves.

    Attributes:
        name: Name in rows.
        model: The model. None if `folder` holds the model.
        workloads: Workloads that an engine serves, one after the other.
        cache_bytes: Size of the cache for keys, values and states, in bytes.
        max_model_tokens: Longest request, in tokens (`max_model_len`).
        max_requests: Number of requests that may run at once (`max_num_seqs`).
        options: Further engine arguments, the same for every side.
        draft: Draft model for speculative decoding. None means that no tokens are drafted.
        folder: Folder of a user's own model. None if `model` is given.
        load_format: vLLM's `load_format`. `dummy` means random weights.
        start_cap_s: Seconds after which a start counts as hung.
    """

    name: str
    model: Model | None
    workloads: tuple[Workload, ...]
    cache_bytes: int = 4 * GIB
    max_model_tokens: int = 16_384
    max_requests: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    draft: Draft | None = None
    folder: Path | None = None
    load_format: str = "dummy"
    start_cap_s: float = START_CAP_S

    @property
    def model_name(self) -> str:
        """Name of the model, or the path of its folder."""
        return self.model.name if self.model else str(self.folder)

    def dtype(self, scale: Scale) -> str:
        """Return the element type of the model at a scale."""
        if scale is not Scale.TINY:
            return "bfloat16"
        return self.model.cpu_dtype if self.model else "float32"

    def engine_options(self, side: Side, scale: Scale) -> dict[str, Any]:
        """Return the arguments of an engine, except the folder of its model."""
        options: dict[str, Any] = {
            "load_format": self.load_format,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "seed": 0,
            "gpu_memory_utilization": GPU_MEMORY_SHARE,
            "kv_cache_memory_bytes": self.cache_bytes,
            "max_model_len": self.max_model_tokens,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": self.max_requests,
        }
        options |= self.options | side.engine_options(self.max_requests)
        if scale is Scale.SHORT:
            # Several of these engines run at a time, and only their compiled kernels are used.
            options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": GIB}
            options |= {"enforce_eager": True}
            options.pop("compilation_config", None)
        if scale is Scale.TINY:
            options |= TINY_OPTIONS | {"kv_cache_memory_bytes": TINY_CACHE_BYTES}
            options["dtype"] = self.dtype(scale)
            options.pop("gpu_memory_utilization")
            if not side.is_compiled:
                options |= {"enforce_eager": True}
                options.pop("compilation_config")
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One start of one engine.

    Attributes:
        case: Model and workloads.
        side: Engine settings.
        turn: Number of this start among those of this side in this case: 1, 2, ...
            0 marks an engine that only compiles kernels.
        num_runs: Number of times that each workload is served. The cache is empty each time.
    """

    case: Case
    side: Side
    turn: int = 1
    num_runs: int = 1

    @property
    def key(self) -> tuple[str, str, int]:
        """Case, side and turn: the name of this entry in rows."""
        return self.case.name, self.side.name, self.turn

    @property
    def label(self) -> str:
        """Name of this entry in printed lines."""
        return f"{self.case.name}, {self.side.name} {self.turn}"

    def warmer(self) -> "Entry":
        """Return the entry, turn 0, of an engine that compiles kernels before this one is timed."""
        return replace(self, turn=0)


def in_turns(case: Case, *order: Side, num_runs: int = 1) -> list[Entry]:
    """List one entry for each side of an order. A side that comes again gets the next turn."""
    turns: dict[str, int] = {}
    entries: list[Entry] = []
    for side in order:
        turns[side.name] = turns.get(side.name, 0) + 1
        entries.append(Entry(case=case, side=side, turn=turns[side.name], num_runs=num_runs))
    return entries


GEMMA = Case(
    name="gemma-3-4b",
    model=models.GEMMA_3_4B,
    workloads=(workloads.articles(32, 6000, 128, expected_s=23.0),),
    max_requests=256,
)
NEMOTRON = Case(
    name="nemotron-h-8b",
    model=models.NEMOTRON_H_8B,
    # Stock vLLM captures CUDA graphs of no more requests than it has blocks of states.
    workloads=(workloads.articles(40, 4000, 64, expected_s=23.0),),
)
FALCON = Case(
    name="falcon-h1-7b",
    model=models.FALCON_H1_7B,
    workloads=(workloads.articles(40, 4000, 64),),
)
BAMBA = Case(name="bamba-9b", model=models.BAMBA_9B, workloads=(workloads.articles(40, 4000, 64),))
LLAMA = Case(
    name="llama-3.1-8b",
    model=models.LLAMA_3_1_8B,
    workloads=(workloads.articles(24, 4000, 128), workloads.CHAT),
    cache_bytes=8 * GIB,
    max_requests=256,
)
GPT_OSS = Case(
    name="gpt-oss-20b",
    model=models.GPT_OSS_20B,
    workloads=(workloads.articles(32, 6000, 128), workloads.AGENTS),
    max_requests=256,
)
GRANITE = Case(
    name="granite-4.0-h-small",
    model=models.GRANITE_4_H_SMALL,
    workloads=(workloads.articles(40, 4000, 64), workloads.AGENTS),
    start_cap_s=180.0,
)
QWEN = Case(
    name="qwen3-next-64-experts",
    model=models.QWEN3_NEXT_64_EXPERTS,
    workloads=(workloads.articles(40, 4000, 64), workloads.AGENTS),
    start_cap_s=180.0,
)
SEATS = Case(
    name="gemma-4-31b-seats",
    model=models.GEMMA_4_31B_FIFTH,
    workloads=(workloads.SEATS,),
    # Room for 153k tokens of two full-attention layers at 8 KiB per token and layer, and for the
    # windows of ten layers in each of three sessions.
    cache_bytes=3 * GIB,
)
REPEATS = Case(
    name="nemotron-h-8b-repeats",
    model=models.NEMOTRON_H_8B,
    workloads=(workloads.SHARED_PREFIXES, workloads.LONG_PROMPT_AGAIN),
    max_model_tokens=131_072,
)
DRAFTED = Case(
    name="llama-3.1-8b-drafted",
    model=models.LLAMA_3_1_8B,
    draft=Draft(model=models.LLAMA_3_2_1B),
    workloads=(workloads.articles(24, 4000, 128), workloads.CHAT),
    start_cap_s=150.0,
)


def _with(case: Case, suffix: str, *served: Workload, **changes: object) -> Case:
    """Return a copy of a case that serves other workloads, with a suffix to its name."""
    name = f"{case.name}-{suffix}"
    return replace(case, name=name, workloads=served, **changes)  # pyright: ignore[reportArgumentType]


GEMMA_AGENTS = _with(GEMMA, "agents", workloads.AGENTS)
NEMOTRON_AGENTS = _with(NEMOTRON, "agents", workloads.AGENTS)
GEMMA_CHAT = _with(GEMMA, "chat", workloads.CHAT)
NEMOTRON_CHAT = _with(NEMOTRON, "chat", workloads.CHAT)
GEMMA_OVER_TIME = _with(
    GEMMA, "rates", *(workloads.articles_over_time(32, 6000, 128, rate) for rate in (3, 5, 8))
)
NEMOTRON_OVER_TIME = _with(
    NEMOTRON, "rates", *(workloads.articles_over_time(40, 4000, 64, rate) for rate in (5, 8, 12))
)

_A, _B = sides.STOCK, sides.OURS_PLAIN

PLAN: tuple[Entry, ...] = (
    *in_turns(GEMMA, _A, _B, num_runs=2),
    *in_turns(NEMOTRON, _A, _B),
    *in_turns(NEMOTRON, _A, _B, _B, _A)[2:],
    *in_turns(GEMMA, _A, _B, _B, _A)[2:],
    *in_turns(NEMOTRON_AGENTS, _A, _B, _B, _A),
    *in_turns(GEMMA_AGENTS, _A, _B, _B, _A),
    *in_turns(FALCON, _A, _B, _B, _A),
    *in_turns(BAMBA, _A, _B, _B, _A),
    *in_turns(LLAMA, _A, _B, _B, _A),
    *in_turns(REPEATS, _A, _B, sides.STOCK_FINE),
    *in_turns(SEATS, _A, _B, sides.STOCK_DENSE),
    *in_turns(GEMMA, sides.STOCK_ONE_TYPE, sides.OURS_FLASH, sides.STOCK_DENSE),
    *in_turns(NEMOTRON, sides.STOCK_FINE, sides.STOCK_DENSE),
    *in_turns(NEMOTRON_CHAT, _A, _B, sides.STOCK_REPLAY, sides.OURS_REPLAY),
    *in_turns(GEMMA_CHAT, _A, _B, sides.STOCK_ONE_TYPE),
    *in_turns(NEMOTRON, sides.STOCK_COMPILED, sides.OURS_COMPILED),
    *in_turns(GEMMA, sides.STOCK_COMPILED, sides.OURS_COMPILED),
    *in_turns(LLAMA, sides.OURS_FLASH),
    *in_turns(DRAFTED, _A, _B, _B, _A),
    *in_turns(GPT_OSS, _A, _B, _B, _A),
    *in_turns(GPT_OSS, sides.STOCK_ONE_TYPE),
    *in_turns(QWEN, _A, _B, _B, _A),
    *in_turns(GRANITE, _A, _B, _B, _A),
    *in_turns(NEMOTRON_OVER_TIME, _A, _B),
    *in_turns(GEMMA_OVER_TIME, _A, _B),
)
"""All entries, in order. The first two lines fit one lease; later calls continue from there."""


def chosen(
    entries: Iterable[Entry],
    *,
    only: Sequence[str] = (),
    side_names: Sequence[str] = (),
    has_experts: bool = True,
) -> list[Entry]:
    """Return the entries of some cases and sides.

    Args:
        entries: Entries of a plan.
        only: Parts of case names. Empty selects all cases.
        side_names: Names of sides. Empty selects all sides.
        has_experts: Whether vLLM's compiled operations for experts are installed. If not, models
            with experts are left out.

    Raises:
        ValueError: A side name is unknown.
    """
    if unknown := sorted(set(side_names) - set(sides.SIDES)):
        msg = f"sides are {', '.join(sides.SIDES)}, got {', '.join(unknown)}"
        raise ValueError(msg)
    return [
        entry
        for entry in entries
        if (not only or any(part in entry.case.name for part in only))
        and (not side_names or entry.side.name in side_names)
        and (has_experts or entry.case.model is None or not entry.case.model.has_experts)
    ]

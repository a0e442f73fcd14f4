"""What is measured, in the order of what it tells.

An entry of the plan is one start of one engine. Sides of a case come in the order A B B A, so that
what drifts on a machine does not favour one of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perf.engine import models, sides, workloads
from perf.engine.models import Draft, Model, Scale
from perf.engine.sides import Side
from perf.engine.workloads import Workload

GIB, MIB = 1 << 30, 1 << 20

GPU_MEMORY_SHARE = 0.5
"""What an engine wants to be free as it starts; its cache has the bytes of its case."""

START_CAP_S = 120.0
"""For an engine to start, its kernels compiled; cold, an H100 has taken 80 to 122 s."""

COLD_START_S, WARM_START_S = 100.0, 25.0
"""What a start is expected to take before one was measured, without caches and with them."""

TINY_CACHE_BYTES = 16 * MIB
TINY_OPTIONS = {"max_model_len": 128, "max_num_batched_tokens": 256, "max_num_seqs": 8}
TINY_CAP_S = 240.0
"""For a start or a run of a tiny model: a CPU interprets its kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, the bytes its cache has, and what it serves.

    Attributes:
        name: Name in rows.
        model: The model; None where `folder` holds one.
        workloads: What an engine serves, one after the other.
        cache_bytes: Bytes of keys, values and states.
        max_model_tokens: Longest request.
        max_requests: Requests that may run at once.
        options: Further arguments of every side's engine.
        draft: What drafts tokens, if anything does.
        folder: A model of a user's own.
        load_format: How vLLM reads its weights.
        start_cap_s: Seconds after which a start is taken to hang.
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
        """Name of the model."""
        return self.model.name if self.model else str(self.folder)

    def dtype(self, scale: Scale) -> str:
        """Get the element type that a model has."""
        if scale is not Scale.TINY:
            return "bfloat16"
        return self.model.cpu_dtype if self.model else "float32"

    def engine_options(self, side: Side, scale: Scale) -> dict[str, Any]:
        """Get the arguments of an engine, but for the folder of its model."""
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
            # Several of these run at a time, and what they compile is all that is wanted.
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
        case: What is served.
        side: How.
        turn: 1 for the first start of this side in this case, and so on.
        num_runs: How often each workload is served, each time with an empty cache.
    """

    case: Case
    side: Side
    turn: int = 1
    num_runs: int = 1

    @property
    def key(self) -> tuple[str, str, int]:
        """What rows name it by."""
        return self.case.name, self.side.name, self.turn

    @property
    def label(self) -> str:
        """What lines name it by."""
        return f"{self.case.name}, {self.side.name} {self.turn}"

    def warmer(self) -> "Entry":
        """Get an entry for the files of an engine that compiles before this one is timed."""
        return replace(self, turn=0)


def in_turns(case: Case, *order: Side, num_runs: int = 1) -> list[Entry]:
    """List starts of sides in an order in which sides may come again."""
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
    # Stock vLLM captures graphs only of as many requests as it has blocks of states.
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
    # 153k tokens of two full layers, 8 KiB each, and ten windows for each of three sessions.
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
    """Get a case that serves other things."""
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
"""The first two lines fit one lease; later calls go on from there."""


def chosen(
    entries: Iterable[Entry],
    *,
    only: Sequence[str] = (),
    side_names: Sequence[str] = (),
    has_experts: bool = True,
) -> list[Entry]:
    """Get the entries of some cases and sides.

    Args:
        entries: Of a plan.
        only: Parts of cases' names; all where there are none.
        side_names: Names of sides; all where there are none.
        has_experts: Whether vLLM has its operations for experts here.

    Raises:
        ValueError: There is no such side.
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

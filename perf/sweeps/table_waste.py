"""Waste of every known model in a full arena: ours, exact LCM, MAX, and vLLM's own planner.

    python -m perf.sweeps.table_waste [--models ...] [--lengths ...] [--json] [--save FOLDER]

Waste is `1 - used / held`, both averaged over the steps of a run once the arena is full. Held bytes
are those that running requests keep from others: whole large pages, or vLLM's blocks. Used bytes
are the slots that their next tokens read or write. Nothing is computed or timed, so all machines
give the same table.

A model runs in bfloat16 on the smallest GPU of 80 GB or more that its weights fit, on as few ranks
as possible. To save time, an arena is cut down to the largest of three sizes: the need of 128
requests at their ends, that of 64 requests in their first chunk, and 256 large pages. Large pages
are then a larger part of the arena, so the waste may be overstated. vLLM's arena is cut down to a
quarter of that, since its blocks are all alike.

The columns are, with shares in percent of held bytes:

- the lengths;
- the arena of the run and the whole arena (GB);
- our waste by cause: slots that left a window in pages that a window still needs, slots not written
  yet in the last page, padding, and empty small pages in held large pages;
- our total waste;
- the floor, which is the waste of pages of 16 tokens from the first two causes alone;
- the total waste of exact LCM and of MAX (both under our manager), and of vLLM;
- running requests relative to those that an arena without waste would hold: ours, vLLM's.

A dash means that the system does not start, or holds no request.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jenga.geometry import check_arena, exact_lcm
from jenga.models import KvFormat, known_model, known_names
from jenga.planning.planner import plan
from jenga.sim.arenas.baseline_geometries import max_page
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.arenas.vllm_arena import StockArena
from jenga.sim.batching.arena import ActiveRequest, Arena
from jenga.sim.batching.need import Need
from jenga.sim.batching.scheduler import CHUNK_TOKENS
from jenga.spec import ModelSpec
from perf.sweeps.full_arena import (
    LENGTHS,
    Bytes,
    FullArena,
    Lengths,
    draw_requests,
    held_bytes,
    long_documents,
)
from perf.sweeps.table_geometry import arenas, read

LEAST_GPU_GB = 80
RANKS = (1, 2, 4, 8)

DOCUMENTS = "documents"
DOCUMENTS_MODEL = "ministral-8b-2410"
"""Name of the paper's trace, and its model, on an H100 of 80 GB.

The model reads longer texts here than its configuration file says.
"""

SPEECH = "speech"
ALL_LENGTHS = (*LENGTHS, DOCUMENTS)

SYSTEMS = ("planned", "lcm", "max", "vllm")

MAX_REQUESTS = 128
"""Number of requests, at their ends, for which a cut-down arena has room."""

MIN_PREFILLS = 64
"""Number of requests in their first chunk for which a cut-down arena has room.

It matters for models whose windows keep little at the end of a request.
"""

MIN_UNITS = 256
"""Number of large pages, or of vLLM's blocks, that a cut-down arena keeps."""

STOCK_SHARE = 0.25
"""vLLM's arena as a share of `MAX_REQUESTS`' need.

It is smaller because vLLM is slower, and because blocks of one size are not subject to chance.
"""

NUM_STEPS = 320
WARM_UP_STEPS = 64
SAMPLED_EVERY = 8
NUM_TRACES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a machine, and the lengths of its requests.

    Attributes:
        name: Name of the model.
        model: Layers of one rank.
        ranks: Number of ranks.
        gpu_gb: Memory of each GPU, in GB.
        arena_bytes: Bytes that the weights leave free.
        wanted_bytes: Bytes that the arena is cut down to.
        lengths: Name of the lengths.
    """

    name: str
    model: ModelSpec
    ranks: int
    gpu_gb: int
    arena_bytes: int
    wanted_bytes: float
    lengths: str

    def run_bytes(self, unit_bytes: int, *, share: float = 1) -> int:
        """Return the arena's size in a run, for large pages or blocks of `unit_bytes`."""
        if self.lengths == DOCUMENTS:
            return self.arena_bytes
        return min(self.arena_bytes, max(int(share * self.wanted_bytes), MIN_UNITS * unit_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one system on a case.

    Attributes:
        system: Name of the system, one of `SYSTEMS`.
        refusal: Reason why there are no numbers. Empty if there are.
        unit_bytes: Size of its large page, or of vLLM's block, in bytes.
        run_bytes: Size of the arena in the run, in bytes.
        held: Held bytes, averaged over the sampled steps.
        num_requests: Mean number of running requests.
        num_preemptions: Number of preemptions in the whole run.
    """

    system: str
    refusal: str = ""
    unit_bytes: int = 0
    run_bytes: int = 0
    held: Bytes = field(default_factory=Bytes)
    num_requests: float = 0
    num_preemptions: int = 0

    @property
    def capacity(self) -> float:
        """Running requests as a share of those that an arena without waste would hold, 0 to 1."""
        return self.held.used / self.run_bytes

    @property
    def floor(self) -> float:
        """Waste without padding and without empty small pages, 0 to 1."""
        unneeded = self.held.window + self.held.last_page
        return unneeded / (self.held.used + unneeded)


def cases(names: Sequence[str], lengths: Sequence[str]) -> Iterator[Case]:
    """Yield every model with all lengths that it supports."""
    for name in names:
        context = known_model(name).context_tokens or sys.maxsize
        for each in lengths:
            if each == DOCUMENTS:
                if name == DOCUMENTS_MODEL:
                    yield case(name, each)
            elif LENGTHS[each].most_tokens <= context and (each == SPEECH) == (context < 512):
                yield case(name, each)


def case(name: str, lengths: str) -> Case:
    """Return a model on the smallest machine that it fits.

    Raises:
        ValueError: There is none.
    """
    for ranks in RANKS:
        model, parameters_billion = read(name, ranks, KvFormat.MODEL)
        for gpu_gb, arena_bytes in arenas(parameters_billion, ranks):
            if gpu_gb >= LEAST_GPU_GB:
                is_whole = lengths == DOCUMENTS
                return Case(
                    name=name,
                    model=model,
                    ranks=ranks,
                    gpu_gb=gpu_gb,
                    arena_bytes=arena_bytes,
                    wanted_bytes=arena_bytes if is_whole else wanted_bytes(model, LENGTHS[lengths]),
                    lengths=lengths,
                )
    msg = f"no GPU holds the weights of {name!r}"
    raise ValueError(msg)


def wanted_bytes(model: ModelSpec, lengths: Lengths) -> float:
    """Return the bytes that a cut-down arena needs.

    It has room for `MAX_REQUESTS` requests at their ends, and for `MIN_PREFILLS` in their first
    chunk.
    """
    need = Need(model)
    num_requests = 64
    ending = prefilled = 0.0
    for active in map(ActiveRequest, islice(draw_requests(model, lengths), num_requests)):
        active.begin(min(active.prompt_tokens, CHUNK_TOKENS))
        prefilled += need.of_step(active)
        active.num_computed, active.num_in_flight = active.total_tokens - 1, 0
        active.begin(1)
        ending += need.of_step(active)
    return max(MAX_REQUESTS * ending, MIN_PREFILLS * prefilled) / num_requests


def make_arena(system: str, one: Case) -> tuple[Arena, int, int]:
    """Make a system's arena, and return it with the bytes of its units and of the arena.

    Raises:
        ValueError: The system does not start in the whole arena.
    """
    if system == "vllm":
        stock = StockArena(one.model, one.arena_bytes, prefix_caching=False)
        unit_bytes = stock.plan.block_bytes
        run_bytes = one.run_bytes(unit_bytes, share=STOCK_SHARE)
        return StockArena(one.model, run_bytes, prefix_caching=False), unit_bytes, run_bytes
    match system:
        case "planned":
            geometry = plan(one.model, arena_bytes=one.arena_bytes)
        case "lcm":
            geometry = exact_lcm(one.model)
        case _:
            geometry = max_page(one.model)
    check_arena(geometry, one.arena_bytes)
    run_bytes = one.run_bytes(geometry.large_page_bytes)
    arena = ManagedArena(geometry, run_bytes, prefix_caching=False)
    return arena, geometry.large_page_bytes, run_bytes


def measure(system: str, one: Case) -> Outcome:
    """Run a case on one system."""
    held, num_samples, num_requests, num_preemptions = Bytes(), 0, 0, 0
    num_runs = NUM_TRACES if one.lengths == DOCUMENTS else 1
    unit_bytes = run_bytes = 0
    for seed in range(num_runs):
        try:
            arena, unit_bytes, run_bytes = make_arena(system, one)
        except ValueError as error:
            return Outcome(system=system, refusal=f"does not start: {error}")
        if one.lengths == DOCUMENTS:
            full = FullArena(arena, long_documents(one.model, seed=seed))
            steps = sampled_while_waiting(full)
        else:
            full = FullArena(arena, draw_requests(one.model, LENGTHS[one.lengths]))
            steps = sampled_after_filling(full)
        for _ in steps:
            held += held_bytes(arena, full.running)
            num_requests += len(full.running)
            num_samples += 1
        num_preemptions += full.num_preemptions
    if not num_requests:
        return Outcome(system=system, refusal="no request fits")
    return Outcome(
        system=system,
        unit_bytes=unit_bytes,
        run_bytes=run_bytes,
        held=held.over(num_samples),
        num_requests=num_requests / num_samples,
        num_preemptions=num_preemptions,
    )


def sampled_after_filling(full: FullArena) -> Iterator[None]:
    """Yield at sampled steps of an endless sequence of requests, once the arena is full."""
    full.fill(seed=0)
    for step in range(NUM_STEPS):
        full.step()
        if step >= WARM_UP_STEPS and step % SAMPLED_EVERY == 0:
            yield
        full.finish_step()


def sampled_while_waiting(full: FullArena) -> Iterator[None]:
    """Yield at steps of a trace in which the next request does not fit, until the trace ends."""
    full.step()
    while full.running:
        if full.is_full:
            yield
        full.finish_step()
        full.step()


def record(one: Case, found: Outcome) -> dict[str, Any]:
    """Return a result as a row of the file."""
    row: dict[str, Any] = {
        "model": one.name,
        "lengths": one.lengths,
        "system": found.system,
        "gpu_gb": one.gpu_gb,
        "ranks": one.ranks,
        "arena_bytes": one.arena_bytes,
    }
    if found.refusal:
        return row | {"refusal": found.refusal}
    return row | {
        "run_bytes": found.run_bytes,
        "unit_bytes": found.unit_bytes,
        "waste": round(found.held.waste, 6),
        "floor": round(found.floor, 6),
        **{
            cause: round(getattr(found.held, cause) / found.held.held, 6)
            for cause in ("window", "last_page", "padding", "empty")
        },
        "full": round(found.held.held / found.run_bytes, 4),
        "requests": round(found.num_requests, 2),
        "capacity": round(found.capacity, 4),
        "preemptions": found.num_preemptions,
    }


HEADER = (
    f"{'model':22} {'lengths':9} {'run/arena':>11} {'window':>6} {'last':>6} {'pad':>6} "
    f"{'empty':>6} {'ours':>6} {'floor':>6} {'LCM':>6} {'MAX':>6} {'vLLM':>6} "
    f"{'ours/ideal':>10} {'vLLM/ideal':>10}"
)


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format rows, with the systems of a case in one line."""
    sides: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        sides.setdefault((row["model"], row["lengths"]), {})[row["system"]] = row
    return [_line(systems) for systems in sides.values()]


def _line(systems: dict[str, dict[str, Any]]) -> str:
    ours = systems["planned"]
    run_bytes = ours.get("run_bytes", 0)
    sizes = f"{run_bytes / 1e9:.1f}/{ours['arena_bytes'] / 1e9:.0f}"
    start = f"{ours['model']:22} {ours['lengths']:9} {sizes:>11} "
    if "refusal" in ours:
        return start + ours["refusal"]
    cells = [_percent(ours, key) for key in ("window", "last_page", "padding", "empty")]
    cells += [_percent(ours, key) for key in ("waste", "floor")]
    cells += [_percent(systems[name], "waste") for name in ("lcm", "max", "vllm")]
    cells += [f"{_percent(systems[name], 'capacity'):>10}" for name in ("planned", "vllm")]
    return start + " ".join(cells)


def _percent(row: dict[str, Any], key: str) -> str:
    return f"{'-' if 'refusal' in row else f'{100 * row[key]:.2f}':>6}"


def machine_line() -> str:
    """Return a line with the versions that the rows depend on."""
    import vllm

    from perf.harness.timing import machine_line as harness_line

    return f"{harness_line()}, vllm {vllm.__version__}; bytes are counted, no time is measured"


def save(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows, which replace older rows of the same cases, and the table of all rows."""
    path = folder / "table_waste.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for row in [*map(json.loads, old), *rows]:
        kept[row["model"], row["lengths"], row["system"]] = row
    ordered = sorted(
        kept.values(), key=lambda row: (row["model"], ALL_LENGTHS.index(row["lengths"]))
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in ordered), encoding="utf-8")
    machines = sorted({row["machine"] for row in ordered})
    table = ["# Waste with the arena full", "", *machines, "", "```", HEADER, *lines(ordered)]
    text = "\n".join([*table, "```", ""])
    (folder / "table_waste.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.sweeps.table_waste",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=known_names(),
        default=known_names(),
        help="names of known models (default: all)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        choices=ALL_LENGTHS,
        default=ALL_LENGTHS,
        help="request lengths (default: all)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print rows as JSON lines instead of a table"
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="write rows and the table to this folder; cases measured again replace their rows",
    )
    arguments = parser.parse_args()
    machine = {"machine": machine_line()} if arguments.save else {}
    if not arguments.json:
        print(HEADER)
    for one in cases(arguments.models, arguments.lengths):
        rows = [record(one, measure(system, one)) | machine for system in SYSTEMS]
        print("\n".join(map(json.dumps, rows) if arguments.json else lines(rows)), flush=True)
        if arguments.save:
            save(rows, arguments.save)


if __name__ == "__main__":
    main()

"""Compare serving over time with Jenga and with vLLM in its best setting.

    python -m perf.serving --quick
    python -m perf.serving --jobs 8 --out rows.jsonl [--known perf/results/cpu/serving_stock.jsonl]
    python -m perf.serving --table --out rows.jsonl [--known ...] [--causes causes.json]

A cell is a model on its GPUs, a share of their arena, a workload and a seed. The capacity of a
system is the highest rate of arrivals at which TTFT p99 stays within four times that of the longest
prompt alone. For each cell the suite does this:

1. It searches the capacity of stock: vLLM's own manager in the best of its settings for the trace.
2. It searches the capacity of each of our systems.
3. It replays all systems at 50, 75, 90 and 120 % of stock's capacity.

The first quarter of the arrivals only warms the cache up and does not count. These requests arrive
no faster than a GPU can serve without hits. `--cold` leaves the warm-up out. With `--scheduler
vllm`, vLLM's own scheduler runs instead of the simulator's. The systems are:

    jenga           ours with its default policy; `jenga POLICY` with another one by its name
    oracle          ours with a policy that knows the trace (`jenga.sim.replays.oracle`)
    unlimited       ours with unlimited memory
    vllm            stock, always measured; `--stock` selects its settings

The settings of stock are its default, dense retention, and retention of 2,048 to 16,384 tokens.
Models with states also get hashes of 16 tokens. Models with windows but without states also get
the hybrid manager off.

Rows are appended to `--out` as they are measured, one JSON object each. Rows that are already
there, or in `--known`, are not measured again, so an interrupted run can continue. Stock's rows
depend only on the simulator, but our rows depend on the package. Use another file for another
commit of the package. Cells are ordered by seed, then arena, workload and model, so that the first
cells cover all models.

At the load nearest below its capacity, stock runs in all settings. At the other loads it runs in
its default, and in the settings that were best there in hits, requests per second or TTFT p99.

The whole suite has 792 cells of about two minutes each on one core. `--quick` has 9.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from jenga.sim.arenas.vllm_plan import read_stock_options
from perf.serving.cases import (
    BUDGETS,
    LOADS,
    MODELS,
    MOONCAKE,
    ORACLE,
    OURS,
    STOCK_SETTINGS,
    UNLIMITED,
    WORKLOADS,
    Cell,
    cells,
    check_system,
)
from perf.serving.rows import Row, by_cell, read
from perf.serving.run import WARM_UP_SHARE
from perf.serving.suite import Plan, measure_timed
from perf.serving.table import as_markdown, read_causes

QUICK = {
    "models": ["gemma-3-27b", "gpt-oss-120b", "granite-4.0-h-small"],
    "workloads": ["articles", "rag", "mixed"],
    "budgets": [1.0],
    "seeds": [0],
    "loads": [75],
    "stock": ["default", "retention=dense", "retention=8192"],
    "systems": [OURS, ORACLE],
}
"""Options of `--quick`, unless they are given."""

FULL = {
    "models": list(MODELS),
    "workloads": list(WORKLOADS),
    "budgets": list(BUDGETS),
    "seeds": [0, 1, 2],
    "loads": list(LOADS),
    "stock": list(STOCK_SETTINGS),
    "systems": [OURS, ORACLE, UNLIMITED],
}
"""Options without `--quick`, unless they are given."""

OUT = Path(__file__).parents[1] / "results" / "cpu" / "serving.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = QUICK if options.quick else FULL
    for name, default in chosen.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if options.mooncake is None and MOONCAKE in options.workloads:
        parser.error(f"--workloads {MOONCAKE} needs the file, by --mooncake")
    try:
        for system in options.systems:
            check_system(system)
        for setting in options.stock:
            read_stock_options(setting)
    except ValueError as error:
        parser.error(str(error))
    paths = [path for path in (*options.known, options.out) if path.exists()]
    num_failed = 0 if options.table else _measure(options, paths)
    paths = [path for path in (*options.known, options.out) if path.exists()]
    plan = _plan(options)
    setup = plan.scheduling, plan.warm_up_share
    rows = [row for row in read(paths) if (row["scheduling"], row["warm_up_share"]) == setup]
    text = as_markdown(
        rows,
        system=options.systems[0] if options.systems else OURS,
        causes=read_causes(options.causes),
    )
    if options.markdown is None:
        print(text, end="")
    else:
        options.markdown.write_text(text, encoding="utf-8")
    return 1 if num_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure only a few cells, which takes minutes"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, metavar="MODEL", help="models of the cells"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=(*WORKLOADS, MOONCAKE),
        metavar="NAME",
        help="workloads of the cells",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=float,
        metavar="SHARE",
        help="arena sizes of the cells, as shares of the arena that the GPUs have",
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of the cells")
    parser.add_argument(
        "--loads",
        nargs="*",
        type=int,
        choices=LOADS,
        metavar="PERCENT",
        help="arrival rates, in percent of the capacity of stock vLLM",
    )
    parser.add_argument(
        "--systems", nargs="*", help="systems of Jenga; the first one is compared with stock vLLM"
    )
    parser.add_argument(
        "--stock",
        nargs="+",
        metavar="SETTING",
        help="settings of stock vLLM, such as default, retention=8192",
    )
    parser.add_argument(
        "--mooncake", type=Path, metavar="FILE", help="Mooncake's trace, conversation_trace.jsonl"
    )
    parser.add_argument(
        "--asynchronous", action="store_true", help="schedule a step while the one before it runs"
    )
    parser.add_argument(
        "--scheduler",
        choices=("own", "vllm"),
        default="own",
        help="the simulator's scheduler, or vLLM's own with the plugin's manager or vLLM's",
    )
    parser.add_argument(
        "--cold", action="store_true", help="no warm-up: all requests arrive at one rate and count"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="file to which rows are added"
    )
    parser.add_argument(
        "--known",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="files of rows that are not measured again",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of processes; each measures one cell at a time"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no cell after this number of minutes"
    )
    parser.add_argument(
        "--table", action="store_true", help="measure nothing, and only print the table"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table to this file"
    )
    parser.add_argument(
        "--causes",
        type=Path,
        metavar="FILE",
        help="JSON object with the causes of losses, for the table",
    )
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        systems=options.systems,
        settings=options.stock,
        loads=options.loads,
        out=options.out,
        mooncake=options.mooncake,
        is_asynchronous=options.asynchronous,
        uses_engine=options.scheduler == "vllm",
        warm_up_share=0.0 if options.cold else WARM_UP_SHARE,
    )


def _measure(options: argparse.Namespace, paths: Sequence[Path]) -> int:
    """Measure all cells, and return the number of failed replays."""
    plan = _plan(options)
    known = by_cell(read(paths))
    chosen = cells(options.models, options.budgets, options.workloads, options.seeds)
    end_s = time.monotonic() + 60 * options.minutes if options.minutes else None
    num_failed = 0
    measured = _measured(chosen, plan, known, options.jobs, end_s)
    for num_done, (cell, failed, seconds) in enumerate(measured, start=1):
        num_failed += failed
        note = f", {failed} failed" if failed else ""
        print(
            f"{num_done}/{len(chosen)} {cell.text}: {seconds:.0f} s{note}",
            file=sys.stderr,
            flush=True,
        )
    return num_failed


def _measured(
    chosen: Sequence[Cell],
    plan: Plan,
    known: dict[Cell, list[Row]],
    jobs: int,
    end_s: float | None,
) -> Iterator[tuple[Cell, int, float]]:
    """Yield cells as they are done, each with its number of failed replays and its seconds."""

    def next_cells() -> Iterator[Cell]:
        for cell in chosen:
            if end_s is not None and time.monotonic() > end_s:
                return
            yield cell

    if jobs == 1:
        for cell in next_cells():
            yield measure_timed(cell, plan, known.get(cell, []))
        return
    waiting = next_cells()
    # A forked process would share state that vLLM has initialized.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: set[Future[tuple[Cell, int, float]]] = set()
        while True:
            for cell in islice(waiting, jobs - len(running)):
                running.add(pool.submit(measure_timed, cell, plan, known.get(cell, [])))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()


if __name__ == "__main__":
    sys.exit(main())

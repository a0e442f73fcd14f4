"""Serve the same requests with stock vLLM and with Jenga, one engine after another.

Each call runs the next entries of the plan, so the same command continues where it stopped.

    python -m perf.engine --seconds 540       # the next entries of the plan
    python -m perf.engine --list              # the plan

    python -m perf.engine --only gemma-3-4b --sides stock ours

    python -m perf.engine --model FOLDER --trace mooncake.jsonl --cache 20GiB
    python -m perf.engine --tiny              # all of it on a CPU, with tiny models

Rows, outputs, logs and caches are stored in --folder. Runs that already have rows for this commit
are not repeated. If the files are not a git checkout, PERF_COMMIT must name the commit.
`python -m perf.engine.results.table` makes a page from the rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jenga.sim.hardware.gpus import parse_bytes
from jenga.sim.workload.sources import open_source
from perf.engine.planning import plan, sides
from perf.engine.planning.models import Scale
from perf.engine.planning.plan import Case, Entry
from perf.engine.planning.workloads import Workload
from perf.engine.runs import export
from perf.engine.runs.jobs import Paths
from perf.engine.runs.lease import Lease
from perf.gpu import gpu_bundle
from perf.harness.machine import ROOT

PACK_S = 25.0
"""Seconds reserved at the end of a call for packing the files that `--out` asks for."""

EXPERTS = "vllm/_moe_C*.so"
"""Pattern of vLLM's compiled operations for experts (MoE) in a site folder."""

MODEL_CAP_S = 3600.0
"""Longest time, in seconds, for a start or a run of a model given with `--model`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the next entries of a plan from the command line.

    Returns:
        0 if everything has been measured, 1 if an engine failed, 2 if entries are left to run.
    """
    began_s = time.monotonic()
    parser = _parser()
    options = parser.parse_args(arguments)
    scale = Scale.TINY if options.tiny else Scale.FULL
    if (options.bundle is None) != (options.site is None):
        parser.error("--bundle and --site must be given together")
    folder = options.folder.resolve()
    site = None if options.site is None else options.site.resolve()
    entries = _entries(options, parser)
    if options.list:
        print("\n".join(f"{each.label} x{each.num_runs}" for each in entries))
        return 0
    if options.bundle is not None and site is not None:
        gpu_bundle.unpack(options.bundle, site)
        if scale is Scale.FULL and not any(site.glob(EXPERTS)):
            entries = plan.chosen(entries, has_experts=False)
    paths = Paths(folder=folder, site=site)
    if options.restore is not None:
        print(f"restored: {export.arrive(paths, options.restore)}", flush=True)
    kept_s = 0.0 if options.out is None else PACK_S
    lease = Lease(
        paths,
        scale=scale,
        seconds=options.seconds - kept_s - (time.monotonic() - began_s),
        out=options.out,
        say=lambda line: print(line, flush=True),
    )
    if not options.without_warmers:
        lease.warm(entries)
    is_complete = lease.run(entries)
    if not options.without_trials:
        lease.hold_trials()
    if options.out is not None:
        for path in export.leave(paths, options.out):
            print(f"{path}: {path.stat().st_size / 2**20:.2f} MiB")
    print(
        f"rows: {paths.rows}; {lease.num_failed} failed, {'all' if is_complete else 'not all'} run"
    )
    if lease.num_failed:
        return 1
    return 0 if is_complete else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=3600.0, help="time limit of this call, in seconds")
    add(
        "--folder",
        type=Path,
        default=ROOT / ".cache" / "engine",
        help="folder of rows, outputs, logs and caches (default: %(default)s)",
    )
    add(
        "--only",
        nargs="*",
        default=[],
        help="run only cases whose name contains one of these texts",
    )
    add("--sides", nargs="*", default=[], help=f"run only these sides, of {', '.join(sides.SIDES)}")
    add("--tiny", action="store_true", help="run tiny models on a CPU; their times mean nothing")
    add("--list", action="store_true", help="print the entries and exit")
    add("--bundle", help="folders of an offline bundle of vLLM, separated by ':'")
    add("--site", type=Path, help="folder to which the bundle is unpacked")
    add("--restore", type=Path, help="folder that an earlier call wrote with --out")
    add("--out", type=Path, help="also write rows, logs and caches to this folder, to take along")
    add("--without-warmers", action="store_true", help="compile nothing in advance")
    add("--without-trials", action="store_true", help="run no trials of kernels at the end")
    own = parser.add_argument_group("a model of your own")
    own.add_argument("--model", type=Path, help="folder of the model")
    own.add_argument("--trace", help="trace to serve, as for `jenga replay --trace`")
    own.add_argument("--cache", help="size of its cache, such as 20GiB")
    own.add_argument("--limit", type=int, help="most requests of the trace")
    own.add_argument(
        "--speed",
        type=float,
        default=1.0,
        help="factor by which arrivals are faster than in the trace",
    )
    own.add_argument("--runs", type=int, default=2, help="runs of the trace by each engine")
    own.add_argument(
        "--random-weights", action="store_true", help="use random weights instead of the model's"
    )
    own.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help="further arguments of the engine, as a JSON object",
    )
    return parser


def _entries(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Entry]:
    """Return the plan's entries that the command line selects."""
    entries: Sequence[Entry] = plan.PLAN
    if options.model is not None:
        case = _own_case(options, parser)
        order = [sides.SIDES[name] for name in options.sides or ("stock", "ours")]
        entries = plan.in_turns(case, *order, num_runs=options.runs)
    if options.tiny:
        entries = [entry for entry in entries if not entry.side.needs_gpu]
    try:
        return plan.chosen(entries, only=options.only, side_names=options.sides)
    except ValueError as error:
        parser.error(str(error))


def _own_case(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Case:
    """Return the case that `--model` and its options describe."""
    missing = [name for name in ("trace", "cache") if getattr(options, name) is None]
    if missing:
        parser.error(f"--model needs --{' and --'.join(missing)} too")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model must be a folder with a config.json, got {options.model}")
    if unknown := sorted(set(options.sides) - set(sides.SIDES)):
        parser.error(f"--sides are some of {', '.join(sides.SIDES)}, got {', '.join(unknown)}")
    try:
        cache_bytes = parse_bytes(options.cache)
    except ValueError as error:
        parser.error(f"--cache: {error}")
    try:
        open_source(options.trace, limit=options.limit, speed=options.speed)
    except ValueError as error:
        parser.error(f"--trace: {error}")
    workload = Workload(
        name=options.trace,
        trace=options.trace,
        tiny=options.trace,
        expected_s=0.0,
        cap_s=MODEL_CAP_S,
        limit=options.limit,
        speed=options.speed,
    )
    return Case(
        name=options.model.resolve().name,
        model=None,
        folder=options.model.resolve(),
        workloads=(workload,),
        cache_bytes=cache_bytes,
        options=options.engine,
        load_format="dummy" if options.random_weights else "auto",
        start_cap_s=MODEL_CAP_S,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Command-line arguments of `jenga replay`."""

import argparse
from pathlib import Path

from jenga.admission.reserve import LEFT_SHARE
from jenga.eviction.known import EVICTION_POLICIES
from jenga.sim.arenas.by_name import MANAGER_NAMES
from jenga.sim.arenas.vllm_plan import DEFAULT_STOCK, StockOptions, read_stock_options
from jenga.sim.batching.measured import RESULTS
from jenga.sim.batching.scheduler import CHUNK_TOKENS, MAX_REQUESTS
from jenga.sim.batching.step_time import HOST_BYTES_PER_S, SHARES
from jenga.sim.hardware.budget import RESERVED_BYTES, UTILIZATION
from jenga.sim.hardware.gpus import GPUS, parse_bytes
from jenga.sim.planning.plan import KV_DTYPES
from jenga.sim.replays.record import SAMPLED_EVERY
from jenga.sim.replays.session import Settings
from jenga.sim.workload.sources import FORMATS

_SHARE_WORDS = {
    "arithmetic_share": "share of the peak of operations that products with weights reach "
    "(default: as measured, else 1; likewise the others)",
    "bandwidth_share": "share of the peak of bandwidth that reading weights reaches",
    "attention_arithmetic_share": "the first, of attention",
    "attention_bandwidth_share": "the second, of attention",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga replay`."""
    what = parser.add_argument_group("what")
    what.add_argument(
        "--model", nargs="+", required=True, metavar="MODEL", help="as of `jenga plan`; several"
    )
    what.add_argument("--draft", metavar="MODEL", help="a model that drafts, in the same arena")
    what.add_argument(
        "--draft-tokens", type=int, default=0, metavar="N", help="drafted for a step, by whatever"
    )
    what.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="probability that a drafted token is right if those before it are; without it tokens "
        "come one by one, and of drafts only the memory is replayed",
    )
    what.add_argument("--trace", required=True, metavar="TRACE", help="see below")
    what.add_argument(
        "--format", choices=tuple(FORMATS), help="of the file (default: by its first line)"
    )
    what.add_argument("--requests", type=int, metavar="N", help="only the first of the trace")
    what.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="arrivals come so many times as fast"
    )
    _configure_memory(parser.add_argument_group("memory"))
    _configure_engine(parser.add_argument_group("engine"))
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="add rows to a file of JSON lines, or of Parquet (.parquet); replays that it has "
        "whole are not run again, and one that was cut goes on from a snapshot taken every minute",
    )
    rows.add_argument(
        "--every",
        type=int,
        default=SAMPLED_EVERY,
        metavar="N",
        help="look at the arena's bytes every N steps (default: %(default)s)",
    )
    rows.add_argument("--request-rows", action="store_true", help="a row for every request, too")
    rows.add_argument(
        "--check", type=int, default=0, metavar="N", help="check the manager's books every N steps"
    )
    rows.add_argument(
        "--bounds",
        action="store_true",
        help="also the hits of a cache without end and of the best eviction",
    )
    rows.add_argument("--quiet", action="store_true", help="no progress")


def _configure_memory(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--manager",
        nargs="+",
        choices=MANAGER_NAMES,
        default=["jenga"],
        metavar="MANAGER",
        help=f"{', '.join(MANAGER_NAMES)}; several are compared (default: jenga)",
    )
    group.add_argument(
        "--eviction",
        nargs="+",
        choices=tuple(EVICTION_POLICIES),
        default=[Settings().eviction],
        help="what our manager evicts first; several are compared "
        f"(default: {Settings().eviction})",
    )
    group.add_argument(
        "--left-share",
        type=_left_share,
        default=Settings().left_share,
        metavar="SHARE",
        help="of the arena, what admissions of our manager leave at most, while others run, to "
        f"those who will read it (default: {LEFT_SHARE}; 0 with host memory)",
    )
    group.add_argument(
        "--vllm",
        nargs="+",
        type=_stock_options,
        default=[DEFAULT_STOCK],
        metavar="OPTIONS",
        help="options of vLLM's manager, several of which are compared: default, or of "
        "retention=TOKENS, retention=dense, match=TOKENS and hybrid=off, with commas between them "
        "(vLLM's --prefix-cache-retention-interval, --prefix-match-unit and "
        "--disable-hybrid-kv-cache-manager)",
    )
    group.add_argument(
        "--host",
        type=_reserve,
        default=0,
        metavar="BYTES",
        help="of host memory of each GPU, where what our manager evicts can still be found "
        "(default: none)",
    )
    group.add_argument(
        "--host-bandwidth",
        type=_rate,
        default=HOST_BYTES_PER_S,
        metavar="BYTES",
        help="that go there or come back in a second (default: 25GB, as sixteen lanes of PCIe 4.0)",
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="keep nothing for others")
    group.add_argument(
        "--gpu",
        default="H100-80G",
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or its memory such as 24GiB (default: %(default)s)",
    )
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    group.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), default="auto")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="of the longest request, with its answer; longer ones are refused (default: as the "
        "model's configuration says)",
    )
    group.add_argument(
        "--weights", type=_reserve, metavar="BYTES", help="of all weights, all ranks together"
    )
    group.add_argument(
        "--arena", type=_arena, metavar="BYTES", help="in place of what --gpu leaves"
    )
    group.add_argument("--utilization", type=float, default=UTILIZATION, metavar="SHARE")
    group.add_argument("--reserve", type=_reserve, default=RESERVED_BYTES, metavar="BYTES")


def _configure_engine(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--chunk-tokens",
        type=int,
        default=CHUNK_TOKENS,
        metavar="N",
        help="tokens computed in a step, of all requests together (default: %(default)s)",
    )
    group.add_argument(
        "--max-requests",
        type=int,
        default=MAX_REQUESTS,
        metavar="N",
        help="requests running at once (default: %(default)s)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="schedule a step while the one before it runs (default: as vLLM on a GPU, which does "
        "unless n-grams draft)",
    )
    group.add_argument(
        "--scheduler",
        choices=("jenga", "vllm"),
        default="jenga",
        help="the simulator's, or vLLM's own with the plugin's manager or vLLM's (default: jenga)",
    )
    group.add_argument(
        "--step-seconds",
        type=float,
        metavar="S",
        help="every step takes as long, in place of the roofline",
    )
    for name in SHARES:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_share,
            metavar="SHARE",
            help=_SHARE_WORDS[name],
        )
    group.add_argument(
        "--overhead-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="of each step, of the host (default: %(default)s, as nothing measured it)",
    )
    group.add_argument(
        "--measured",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="rows of benchmarks, a folder for each GPU (default: perf/results of a checkout)",
    )


def _stock_options(text: str) -> StockOptions:
    try:
        return read_stock_options(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _arena(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _reserve(text: str) -> int:
    try:
        return parse_bytes(text, least=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rate(text: str) -> float:
    try:
        return float(parse_bytes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _left_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 1.0
    if not 0 <= share < 1:
        msg = f"must be in [0, 1), got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return share


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        msg = f"must be in (0, 1], got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return share

"""Command-line arguments of `jenga replay`."""

import argparse
from pathlib import Path

from jenga.admission.reserve import LEFT_SHARE
from jenga.eviction.known import EVICTION_POLICIES, policy_by_name
from jenga.sim.arenas.by_name import MANAGER_NAMES
from jenga.sim.arenas.vllm_plan import StockOptions, read_stock_options
from jenga.sim.batching.scheduler import CHUNK_TOKENS, MAX_REQUESTS
from jenga.sim.batching.step_time import SHARES
from jenga.sim.commands.trace_list import ListTraces
from jenga.sim.hardware.budget import RESERVED_BYTES, UTILIZATION
from jenga.sim.hardware.gpus import GPUS, parse_memory
from jenga.sim.planning.plan import KV_DTYPES
from jenga.sim.replays.record import SAMPLED_EVERY
from jenga.sim.replays.session import Settings
from jenga.sim.workload.sources import FORMATS

_SHARE_WORDS = {
    "arithmetic_share": "share of the GPU's peak arithmetic rate that products with weights reach "
    "(default of all four shares: as measured on this GPU, or 1)",
    "bandwidth_share": "share of the GPU's peak memory bandwidth that reads of weights reach",
    "attention_arithmetic_share": "share of the peak arithmetic rate that attention reaches",
    "attention_bandwidth_share": "share of the peak memory bandwidth that attention reaches",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga replay`."""
    # Generated, it would take a screen before each error.
    parser.usage = "%(prog)s --model MODEL [MODEL ...] --trace TRACE [option ...]"
    what = parser.add_argument_group("model and trace")
    what.add_argument(
        "--model",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="model, as in `jenga plan`; several models are replayed one after another",
    )
    what.add_argument(
        "--draft", metavar="MODEL", help="draft model, which shares the arena with the model"
    )
    what.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="N",
        help="number of tokens drafted for a step, with any method (default: %(default)s)",
    )
    what.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="probability that a drafted token is accepted if those before it are; without it, "
        "every step gives one token, and only the memory of drafts is replayed",
    )
    what.add_argument(
        "--trace",
        required=True,
        metavar="TRACE",
        help="file of requests, or name of a made-up workload; see below",
    )
    what.add_argument(
        "--list-traces",
        action=ListTraces,
        nargs=0,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help="list all workloads and formats of files with their arguments, and exit",
    )
    what.add_argument(
        "--format",
        choices=tuple(FORMATS),
        help="format of the file (default: detected from its beginning)",
    )
    what.add_argument(
        "--requests", type=int, metavar="N", help="replay only the first N requests of the trace"
    )
    what.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="factor by which arrivals are faster than in the trace (default: %(default)s)",
    )
    _configure_memory(parser.add_argument_group("memory"))
    _configure_engine(parser.add_argument_group("engine"))
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="add rows to this file of JSON lines or, with the ending .parquet, Parquet; complete "
        "replays in it are not run again, and an interrupted one continues from its last snapshot "
        "(one is taken every minute)",
    )
    rows.add_argument(
        "--every",
        type=int,
        default=SAMPLED_EVERY,
        metavar="N",
        help="sample the bytes of the arena every N steps (default: %(default)s)",
    )
    rows.add_argument(
        "--request-rows", action="store_true", help="also write a row for every request"
    )
    rows.add_argument(
        "--eviction-rows",
        action="store_true",
        help="also write a row for every checkpoint that is lost: whose, for whom and why; and one "
        "for every admission: what was found, and why not more; a table sums these up",
    )
    rows.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="check the manager's internal state every N steps (default: never)",
    )
    rows.add_argument(
        "--bounds",
        action="store_true",
        help="also show the hits of an unlimited cache, and an upper bound on those of any "
        "eviction, which may be out of reach",
    )
    rows.add_argument("--quiet", action="store_true", help="show no progress")


def _configure_memory(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--manager",
        nargs="+",
        choices=MANAGER_NAMES,
        default=["jenga"],
        metavar="MANAGER",
        help=f"memory manager: {', '.join(MANAGER_NAMES)}; see below; several are compared "
        "(default: jenga)",
    )
    group.add_argument(
        "--eviction",
        nargs="+",
        type=_eviction_policy,
        metavar="POLICY",
        help=f"eviction policy of Jenga's manager: {', '.join(EVICTION_POLICIES)}, or module:Class "
        f"for one of your own; several are compared (default: {Settings().eviction})",
    )
    group.add_argument(
        "--left-share",
        type=_left_share,
        default=Settings().left_share,
        metavar="SHARE",
        help="largest share of the arena that admissions leave, while other requests run, to "
        "cached pages that waiting requests will read; only with Jenga's manager "
        f"(default: {LEFT_SHARE}; 0 with host memory)",
    )
    group.add_argument(
        "--vllm",
        nargs="+",
        type=_stock_options,
        metavar="OPTIONS",
        help="options of vLLM's manager: `default`, or one or more of retention=TOKENS, "
        "retention=dense, match=TOKENS and hybrid=off, separated by commas; several sets of "
        "options are compared (they are vLLM's --prefix-cache-retention-interval, "
        "--prefix-match-unit and --disable-hybrid-kv-cache-manager)",
    )
    group.add_argument(
        "--host",
        type=_reserve,
        default=0,
        metavar="BYTES",
        help="host memory of each GPU, to which Jenga's manager offloads evicted pages "
        "(default: none)",
    )
    group.add_argument(
        "--host-bandwidth",
        type=_rate,
        metavar="BYTES",
        help="bandwidth of copies to and from host memory, in bytes per second (default: 25GB, as "
        "of sixteen lanes of PCIe 4.0)",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="cache nothing for later requests"
    )
    group.add_argument(
        "--gpu",
        default="H100-80G",
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or an amount of memory such as 24GiB (default: %(default)s)",
    )
    group.add_argument(
        "--tp", type=int, default=1, metavar="N", help="number of tensor-parallel ranks"
    )
    group.add_argument(
        "--kv-dtype",
        choices=tuple(KV_DTYPES),
        default="auto",
        help="data type of cached keys and values, as in `jenga plan` (default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="most tokens of a request, with its answer; longer requests are refused (default: as "
        "the model's configuration says)",
    )
    group.add_argument(
        "--weights",
        type=_reserve,
        metavar="BYTES",
        help="size of the weights of all ranks together",
    )
    group.add_argument(
        "--arena",
        type=_arena,
        metavar="BYTES",
        help="size of the arena of one rank (default: the memory that --gpu leaves)",
    )
    group.add_argument(
        "--utilization",
        type=float,
        default=UTILIZATION,
        metavar="SHARE",
        help="share of the GPU's memory that the engine takes (default: %(default)s, as in vLLM)",
    )
    group.add_argument(
        "--reserve",
        type=_reserve,
        default=RESERVED_BYTES,
        metavar="BYTES",
        help="memory set aside for activations and CUDA graphs (default: 1.5GiB)",
    )


def _configure_engine(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--chunk-tokens",
        type=int,
        default=CHUNK_TOKENS,
        metavar="N",
        help="most tokens that a step computes for all requests together (default: %(default)s)",
    )
    group.add_argument(
        "--max-requests",
        type=int,
        default=MAX_REQUESTS,
        metavar="N",
        help="most requests that run at once (default: %(default)s)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="schedule a step while the one before it runs (default: yes, except for drafts of "
        "n-grams, as in vLLM on a GPU)",
    )
    group.add_argument(
        "--scheduler",
        choices=("jenga", "vllm"),
        default="jenga",
        help="the simulator's scheduler or vLLM's own; see below (default: %(default)s)",
    )
    group.add_argument(
        "--step-seconds",
        type=float,
        metavar="S",
        help="give every step this number of seconds, instead of the roofline's",
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
        help="host time added to each step (default: %(default)s, because it was not measured)",
    )
    group.add_argument(
        "--measured",
        type=Path,
        metavar="FOLDER",
        help="folder of your own benchmark rows, with a folder for each GPU, from which the shares "
        "are taken (default: the shares that were measured for this package)",
    )


def _stock_options(text: str) -> StockOptions:
    try:
        return read_stock_options(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _arena(text: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _reserve(text: str) -> int:
    try:
        return parse_memory(text, least=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rate(text: str) -> float:
    try:
        return float(parse_memory(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _eviction_policy(text: str) -> str:
    try:
        policy_by_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


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

"""The planned geometry of every known model, per number of ranks and KV format.

    python perf/sweeps/table_geometry.py [model ...] [--ranks 1 2 4 8] [--formats model fp8]

A row plans for the arena that the model leaves free on the smallest GPU that its weights fit, in
bfloat16. No time is measured, so all machines give the same table. The columns are:

- ranks and KV format;
- memory of that GPU, and its arena (both in GB);
- the planned large page (MB), and its share of the arena;
- small pages per large page, of token types and of state types;
- number of page tables;
- padding, and the expected waste of requests of 1,000 to 2,000 tokens and of 8,000 tokens (percent
  of held bytes);
- the large page of the paper's exact LCM (MB).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jenga.geometry import Geometry, exact_lcm
from jenga.models import KvFormat, ReadOptions, known_model, known_names
from jenga.planning.demand import expected_waste
from jenga.planning.planner import plan
from jenga.spec import ModelSpec

RANKS = (1, 2, 4, 8)
FORMATS = (KvFormat.MODEL, KvFormat.FP8)

GPU_GB = (8, 16, 24, 40, 48, 80, 141, 192, 288)
"""Memory of GPUs on sale, from small cards to B300, in GB."""

USABLE_SHARE = 0.9
"""Share of a GPU's memory that is used: vLLM's default."""

ACTIVATION_BYTES = 500_000_000
"""Bytes reserved for activations and CUDA graphs."""

WEIGHT_SHARE = 0.8
"""Largest share of a GPU's memory that weights may take.

If they need more, they count as too large.
"""

SHORT_TOKENS = range(1000, 2001, 10)
LONG_TOKENS = range(7992, 8008)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model with one number of ranks and one KV format."""

    name: str
    ranks: int
    kv_format: KvFormat
    gpu_gb: int
    arena_bytes: int
    model: ModelSpec
    geometry: Geometry


def arenas(parameters_billion: float, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the GB of every GPU that the weights fit, smallest first, and the bytes left there."""
    weight_bytes = 2e9 * parameters_billion / ranks
    for gpu_gb in GPU_GB:
        if weight_bytes <= WEIGHT_SHARE * gpu_gb * 1e9:
            yield gpu_gb, int(USABLE_SHARE * gpu_gb * 1e9 - weight_bytes - ACTIVATION_BYTES)


def read(name: str, ranks: int, kv_format: KvFormat) -> tuple[ModelSpec, float]:
    """Return a model's layers on one of some ranks, and its parameters in billions."""
    facts = known_model(name)
    options = ReadOptions(tensor_parallel=ranks, kv_format=kv_format)
    return facts.spec(options), (facts.total_parameters or 0) / 1e9


def rows(
    names: Sequence[str], *, ranks: Sequence[int] = RANKS, formats: Sequence[KvFormat] = FORMATS
) -> Iterator[Row | str]:
    """Yield a row per model, number of ranks and format, or the reason why there is none."""
    for name in names:
        for num_ranks in ranks:
            for kv_format in formats:
                try:
                    model, parameters_billion = read(name, num_ranks, kv_format)
                except ValueError as error:
                    yield f"{name} ranks {num_ranks} {kv_format.value}: {error}"
                    continue
                gpu_gb, arena_bytes = next(arenas(parameters_billion, num_ranks), (0, 0))
                if not gpu_gb:
                    yield f"{name} ranks {num_ranks} {kv_format.value}: weights fit no GPU"
                    continue
                yield Row(
                    name=name,
                    ranks=num_ranks,
                    kv_format=kv_format,
                    gpu_gb=gpu_gb,
                    arena_bytes=arena_bytes,
                    model=model,
                    geometry=plan(model, arena_bytes=arena_bytes),
                )


def line(row: Row) -> str:
    """Format a row."""
    tables = row.geometry.page_tables
    token_pages = [table.small_pages_per_large_page for table in tables if not table.is_state]
    state_pages = [table.small_pages_per_large_page for table in tables if table.is_state]
    short = expected_waste(row.geometry, SHORT_TOKENS)
    long = expected_waste(row.geometry, LONG_TOKENS)
    large_page_bytes = row.geometry.large_page_bytes
    return (
        f"{row.name:22} {row.ranks:2} {row.kv_format.value:6} {row.gpu_gb:4} "
        f"{row.arena_bytes / 1e9:7.1f} {large_page_bytes / 1e6:8.3f} "
        f"{large_page_bytes / row.arena_bytes:7.3%} {_joined(token_pages):>16} "
        f"{_joined(state_pages):>18} {len(tables):3} {short.padding:7.2%} "
        f"{short.total:7.2%} {long.total:7.2%} "
        f"{exact_lcm(row.model).large_page_bytes / 1e6:12.1f}"
    )


def _joined(counts: Sequence[int]) -> str:
    """Format counts, with repetitions folded: 76 or 6x1,7."""
    parts: list[str] = []
    for count in dict.fromkeys(counts):
        times = counts.count(count)
        parts.append(f"{times}x{count}" if times > 1 else str(count))
    return ",".join(parts) or "-"


HEADER = (
    f"{'model':22} {'tp':>2} {'kv':6} {'gpu':>4} {'arena':>7} {'large':>8} {'share':>7} "
    f"{'token pages':>16} {'state pages':>18} {'tab':>3} {'pad':>7} {'1-2k':>7} {'8k':>7} "
    f"{'exact LCM':>12}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of known models (default: all)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, help="numbers of tensor-parallel ranks"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        type=KvFormat,
        default=FORMATS,
        help="formats of keys and values: " + ", ".join(kv_format.value for kv_format in KvFormat),
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.models) - set(known_names()))
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}; known: {', '.join(known_names())}")
    print(HEADER)
    for row in rows(
        arguments.models or known_names(), ranks=arguments.ranks, formats=arguments.formats
    ):
        print(line(row) if isinstance(row, Row) else row)


if __name__ == "__main__":
    main()

"""Two served models on one GPU whose loads peak at different times: four ways to share memory.

python -m perf.experiments.shared_arena [--seed 1] [--save]

Both models run on one H100 with 80 GB. Each has its own requests, whose rate rises and falls, and
one is at its peak while the other is at its lowest. The memory that both models' weights leave is

- divided once, half and half, each half cut as is best for its model ("static"),
- divided once, with the large pages that a shared arena has ("same pages"),
- lent to either model in whole gigabytes ("gigabytes"),
- or lent large page by large page ("pages"), as `jenga broker` does.

The bytes and the requests are the same. Tokens and pages are counted by the manager. Seconds are
those of a roofline at the GPU's peaks, steps of both models one after another: a model, not a
measurement. "gigabytes" may choose which large pages make a gigabyte, so it does better here than a
system that must empty addresses in a row.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jenga.arena.borrowed_pages import Lender
from jenga.broker.books import Books
from jenga.broker.broker import Broker
from jenga.broker.direct import DirectBroker
from jenga.models import ReadOptions, known_model
from jenga.planning.planner import plan
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.arenas.lent_in_units import LentInUnits
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.batching.step_time import StepTime, weights_of
from jenga.sim.drawing.text import aligned
from jenga.sim.hardware.budget import memory_budget
from jenga.sim.hardware.gpus import find_gpu
from jenga.sim.planning.plan import served_model
from jenga.sim.replays.replay import Replay
from jenga.sim.replays.shared import SharedGpu, run_together
from jenga.sim.workload.requests import Piece, Request
from perf.experiments.frame import FOLDER

MODELS = ("llama-3.1-8b", "gemma-3-12b")
GPU = "H100-80G"
LARGE_PAGE_BYTES = 10 << 20
"""5 small pages of Llama's layers, or 10 or 2 of Gemma's, with no padding in either."""

GIGABYTE = 1 << 30
WAYS = ("static", "same pages", "gigabytes", "pages")
ROWS = FOLDER / "shared_arena.jsonl"
"""Rows of the last full runs."""

PERIOD_S = 300.0
"""Seconds from one peak of a model to its next."""

PEAK_SHARE = 0.95
"""How much of its mean rate the load rises and falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one model in one way to share memory.

    Attributes:
        way: One of `WAYS`.
        model: Its name.
        seed: Seed of the requests.
        rate: Requests of the model per second, on average.
        num_requests: Requests that ended.
        output_tokens_per_s: Output tokens per modelled second.
        hit_rate: Share of prompt tokens that were cached.
        num_preemptions: Requests that lost their pages and came again.
        ttft_p50_s: Median of the modelled seconds to the first token.
        ttft_p99_s: Its 99th percentile.
        ttft_mean_s: Its mean.
    """

    way: str
    model: str
    seed: int
    rate: float
    num_requests: int
    output_tokens_per_s: float
    hit_rate: float
    num_preemptions: int
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float


def requests(
    name: str, num_requests: int, rate: float, phase: float, seed: int
) -> Iterator[Request]:
    """Yield questions on documents that others ask about too, at a rate that rises and falls."""
    draw = random.Random(f"{name} {seed}")
    lengths = [draw.randrange(4000, 12_000) for _ in range(60)]
    time_s = 0.0
    for number in range(num_requests):
        while True:
            time_s += draw.expovariate(rate * (1 + PEAK_SHARE))
            wave = 1 + PEAK_SHARE * math.sin(2 * math.pi * (time_s / PERIOD_S + phase))
            if draw.random() * (1 + PEAK_SHARE) < wave:
                break
        document = min(int(draw.expovariate(1 / 12)), len(lengths) - 1)
        yield Request(
            name=f"{name} {number}",
            arrival_s=time_s,
            prompt=(
                Piece(f"document {document}", lengths[document]),
                Piece(f"question {number}", draw.randrange(50, 200)),
            ),
            output_tokens=draw.randrange(100, 500),
        )


def arena_bytes() -> int:
    """Return the bytes that both models' weights leave."""
    facts = [known_model(name) for name in MODELS]
    return memory_budget(facts, find_gpu(GPU)).require_arena()


def compare(way: str, num_requests: int, rate: float, seed: int) -> list[Outcome]:
    """Replay both models' requests in one way to share memory."""
    gpu = SharedGpu()
    total_bytes = arena_bytes()
    ended: dict[str, list[ActiveRequest]] = {name: [] for name in MODELS}
    arenas: list[ManagedArena] = []
    replays: list[Replay] = []
    with tempfile.TemporaryDirectory() as folder:
        num_pages = total_bytes // LARGE_PAGE_BYTES
        books = Books.create(
            Path(folder) / "books", large_page_bytes=LARGE_PAGE_BYTES, num_pages=num_pages
        )
        direct = DirectBroker(Broker(books), lambda: gpu.now_s)
        unit_pages = GIGABYTE // LARGE_PAGE_BYTES
        for index, name in enumerate(MODELS):
            model = served_model([known_model(name)], ReadOptions())
            lender: Lender | None = None
            is_divided = way in {"static", "same pages"}
            given_bytes = total_bytes // 2 if is_divided else total_bytes
            geometry = plan(
                model,
                arena_bytes=given_bytes,
                large_page_bytes=None if way == "static" else LARGE_PAGE_BYTES,
            )
            if not is_divided:
                lender = direct.join(
                    name, guarantee_pages=4 * unit_pages, limit_pages=num_pages - 1
                )
                if way == "gigabytes":
                    lender = LentInUnits(lender, unit_pages)
            arena = ManagedArena(geometry, given_bytes, lender=lender)
            alone = StepTime(model, weights_of(known_model(name)), find_gpu(GPU))
            arenas.append(arena)
            replays.append(
                Replay(
                    requests(name, num_requests, rate, index / 2, seed),
                    arena,
                    clock=gpu.clock(alone),
                    on_end=ended[name].append,
                )
            )

        def rest() -> None:
            for arena, replay in zip(arenas, replays, strict=True):
                if replay.is_idle and arena.manager.borrowed is not None:
                    arena.manager.borrowed.rest()

        run_together(replays, gpu, rest)
        for arena in arenas:
            arena.check()
        direct.broker.check()
        books.close()
    return [
        _outcome(replay, ended[name], way=way, name=name, seed=seed, rate=rate)
        for name, replay in zip(MODELS, replays, strict=True)
    ]


def _outcome(
    replay: Replay, ended: Sequence[ActiveRequest], *, way: str, name: str, seed: int, rate: float
) -> Outcome:
    waits = sorted(
        active.first_token_s - active.arrival_s
        for active in ended
        if active.first_token_s is not None
    )
    return Outcome(
        way=way,
        model=name,
        seed=seed,
        rate=rate,
        num_requests=replay.num_finished,
        output_tokens_per_s=replay.output_tokens / replay.time_s,
        hit_rate=replay.hit_tokens / replay.prompt_tokens,
        num_preemptions=replay.scheduler.num_preemptions,
        ttft_p50_s=waits[len(waits) // 2],
        ttft_p99_s=waits[len(waits) * 99 // 100],
        ttft_mean_s=statistics.fmean(waits),
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as text."""
    header = ["model", "memory", "requests", "tok/s", "hit", "preempted"]
    rows = [[*header, "TTFT mean", "p50", "p99"]]
    rows += [
        [
            each.model,
            each.way,
            f"{each.num_requests}",
            f"{each.output_tokens_per_s:.0f}",
            f"{each.hit_rate:.1%}",
            f"{each.num_preemptions}",
            f"{each.ttft_mean_s:.2f}",
            f"{each.ttft_p50_s:.2f}",
            f"{each.ttft_p99_s:.2f}",
        ]
        for each in sorted(outcomes, key=lambda each: each.model)
    ]
    return "\n".join(aligned(rows, alignment="<<" + ">" * (len(rows[0]) - 2)))


def read_outcomes(path: Path = ROWS) -> list[Outcome]:
    """Read the rows of a file; there are none if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def save(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write rows, which replace older rows of the same seed."""
    seeds = {each.seed for each in outcomes}
    rows = [each for each in read_outcomes(path) if each.seed not in seeds] + list(outcomes)
    rows.sort(key=lambda each: each.seed)
    path.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the ways, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400, help="requests of each model")
    parser.add_argument("--rate", type=float, default=1.6, help="mean requests a second of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=ROWS,
        metavar="FILE",
        help="write the rows as JSON lines (default: into perf/results/cpu/experiments)",
    )
    options = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    for way in WAYS:
        begin_s = time.monotonic()
        outcomes += compare(way, options.requests, options.rate, options.seed)
        print(f"{way}: replayed in {time.monotonic() - begin_s:.0f} s", flush=True)
    print(table(outcomes))
    if options.save is not None:
        save(outcomes, options.save)


if __name__ == "__main__":
    main()

"""How fast the simulator is: decode steps a minute on one core, and how that scales.

    python -m perf.bench_replay [--requests 16 64 256] [--models ...] [--json]

A row replays requests that are all there from the start and decode together; only steps in which
every one of them decodes are counted, in CPU time of the process. The roofline's clock runs, and
the arena's bytes are looked at as often as `jenga replay` does by default.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from jenga.models import known_model
from jenga.sim.gpus import GPUS
from jenga.sim.managers import make_arena
from jenga.sim.record import SAMPLED_EVERY
from jenga.sim.replay import Replay
from jenga.sim.step_time import StepTime, Weights
from jenga.sim.workload import Piece, Request
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State

GOAL_STEPS_PER_MINUTE = 50_000
"""Of 64 requests, on the three-type model."""

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 2000
ARENA_BYTES = 400_000_000_000

THREE_TYPES = "three-types"
MODELS = ("llama-3.1-8b", "gemma-3-27b", "jamba-1.5-mini", THREE_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case.

    Attributes:
        model: The model.
        num_types: Its layer types.
        num_requests: Requests that decode together.
        num_steps: Steps counted.
        step_us: CPU time of a step.
        steps_per_minute: In CPU time.
    """

    model: str
    num_types: int
    num_requests: int
    num_steps: int
    step_us: float
    steps_per_minute: float


def three_types() -> ModelSpec:
    """Full attention, windows and states, as many layers as Hymba's with the states of Jamba's."""
    return ModelSpec(
        name=THREE_TYPES,
        layer_types=(
            FullAttention(
                name="full", layers=tuple(Layer(name=f"f{i}", slot_bytes=4096) for i in range(4))
            ),
            SlidingWindow(
                name="sliding",
                layers=tuple(Layer(name=f"w{i}", slot_bytes=4096) for i in range(12)),
                window_tokens=1024,
            ),
            State(
                name="state",
                layers=tuple(Layer(name=f"s{i}", slot_bytes=311_296) for i in range(16)),
            ),
        ),
    )


def requests(count: int) -> Iterator[Request]:
    for number in range(count):
        # Pages fill up in different steps.
        yield Request(
            name=str(number),
            prompt=(Piece(number, PROMPT_TOKENS + number),),
            output_tokens=OUTPUT_TOKENS,
        )


def measure(name: str, num_requests: int) -> Row:
    model = three_types() if name == THREE_TYPES else known_model(name).spec()
    arena = make_arena("jenga", model, ARENA_BYTES)
    clock = StepTime(model, Weights(num_bytes=16e9, total=8e9, active=8e9), GPUS["H200"])
    run = Replay(requests(num_requests), arena, clock=clock, chunk_tokens=1 << 20)
    num_steps = 0
    start_s = end_s = 0.0
    for step in run:
        if step.num_decoding == num_requests:
            end_s = time.process_time()
            if num_steps:
                num_steps += 1
            else:
                start_s, num_steps = end_s, 1
        if step.number % SAMPLED_EVERY == 0:
            run.memory()
    num_steps -= 1
    seconds = end_s - start_s
    return Row(
        model=name,
        num_types=len(model.layer_types),
        num_requests=num_requests,
        num_steps=num_steps,
        step_us=1e6 * seconds / num_steps,
        steps_per_minute=60 * num_steps / seconds,
    )


def line(row: Row) -> str:
    return (
        f"{row.model:16} {row.num_types:5} {row.num_requests:8} {row.step_us:9.1f} "
        f"{row.steps_per_minute:12,.0f} {1000 * row.step_us / row.num_requests:14.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.bench_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--requests", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--json", action="store_true", help="rows as JSON lines, not a table")
    options = parser.parse_args(arguments)
    if not options.json:
        print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
        print(
            f"{'model':16} {'types':>5} {'requests':>8} {'step us':>9} {'steps/minute':>12} "
            f"{'ns per request':>14}"
        )
    for name in options.models:
        for count in options.requests:
            row = measure(name, count)
            print(json.dumps(asdict(row)) if options.json else line(row), flush=True)


if __name__ == "__main__":
    main()

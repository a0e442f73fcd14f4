"""Time the host side of calls of our operations and vLLM's, without launching kernels.

python -m perf.manager.bench_calls [--only paged_attention] [--save perf/results/cpu]

No GPU is needed. Kernels are compiled as for an H200, and launches are dropped instead of handed to
the driver. Both sides get the same tensors, in turn. In a step without a CUDA graph, each layer
waits for such a call. If its kernels take less time than the call, the call determines the time of
the step. The column "first" is a call with a signature that no earlier call had, like the first
layer's call in most steps with prompts.
"""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from jenga_kernels.checks import tensors
from jenga_kernels.launches import Call
from perf.harness.compiled_launches import CAPABILITY, show_vllm_a_gpu
from perf.harness.machine_code import PretendedGpu
from perf.kernels import (
    bench_conv_update,
    bench_delta,
    bench_delta_replay,
    bench_kv_store,
    bench_latent_attention,
    bench_paged_attention,
    bench_state_replay,
    bench_state_scan,
    bench_state_update,
)
from perf.shapes.attention_shapes import SHAPES, AttentionShape, make_batch
from perf.shapes.delta_replay_shapes import make_delta_replay_batch
from perf.shapes.delta_shapes import KIMI_LINEAR, QWEN3_NEXT, make_delta_batch
from perf.shapes.latent_shapes import LATENT_DIM, LatentShape
from perf.shapes.latent_shapes import make_batch as make_latent_batch
from perf.shapes.state_replay_shapes import make_replay_batch
from perf.shapes.state_shapes import MODELS, NEMOTRON, make_conv_batch, make_state_batch

ATTENTION = ("D1", "D5", "D11", "P1", "P3", "P4", "X1")
LATENTS = ("D17", "L12")
STATES = ("nemotron-h-8b", "jamba-1.5-mini")
PROMPT_TOKENS, DECODED, REPLAYED = 2048, 8, 16
CPU = torch.device("cpu")

NUM_ROUNDS, NUM_CALLS = 40, 25
"""Numbers of rounds of each implementation, and of calls per round.

Implementations take turns, one round each. The result is the median of the rounds' means.
"""

MAX_THREADS = 1024
"""Largest number of threads of a program."""

Launch = Callable[[], object]


class Case(NamedTuple):
    """One case to time.

    Attributes:
        name: Name of the row.
        sides: Implementation -> function that prepares its launch from the tensors of `make`.
        make: Function that makes the tensors. They exist only while the case is timed.
    """

    name: str
    sides: Mapping[str, Callable[..., Launch]]
    make: Callable[[], Sequence[Any]]


class Nowhere(PretendedGpu):
    """A Triton driver that compiles kernels and drops their launches."""

    def launcher_cls(self, _source: object, _metadata: object) -> Callable[..., None]:
        """Return the function that launches a kernel; Triton asks for it under this name."""
        return lambda *_: None

    def load_binary(self, *_: object) -> tuple[object, object, int, int, int]:
        """Return a loaded kernel's handles, registers, spills and largest number of threads."""
        return self, self, 0, 0, MAX_THREADS


def cases() -> Iterator[Case]:
    """Yield the cases to time.

    Prompts of recurrent layers have only our side, because vLLM's calls fill tensors on the way.
    """
    peers = bench_paged_attention.IMPLEMENTATIONS
    for shape in SHAPES:
        if shape.name.split()[0] in ATTENTION:
            sides = {"jenga": peers["jenga"], "vllm": peers["vllm-triton"]}
            small = dataclasses.replace(shape, num_layers=1, arena_bytes=0)
            yield Case(f"paged_attention {shape.name}", sides, partial(_attention_batch, small))
    peers = bench_latent_attention.IMPLEMENTATIONS
    for latents in bench_latent_attention.SHAPES:
        if latents.name.split()[0] in LATENTS:
            sides = {"jenga": peers["jenga"]}
            if latents.max_query_tokens == 1:
                sides["vllm"] = peers["vllm-triton"]
            small = dataclasses.replace(latents, num_layers=1, requests=latents.requests[:DECODED])
            yield Case(f"latent_attention {latents.name}", sides, partial(_latent_batch, small))
    sides = {"jenga": bench_kv_store.jenga, "vllm": bench_kv_store.vllm_triton}
    shape = bench_kv_store.SHAPES[0]
    yield Case(f"kv_store {shape.name}", sides, lambda: [bench_kv_store.make_batch(shape, CPU)])
    prompt, decoded = [PROMPT_TOKENS], [1] * DECODED
    sides = {"jenga": bench_conv_update.jenga, "vllm": bench_conv_update.vllm}
    for name, lengths in (("causal_conv", prompt), ("conv_update", decoded)):
        make = partial(make_conv_batch, 8192, lengths, CPU)
        yield Case(f"{name} 8192 channels", sides, lambda make=make: [make()])
    f32 = torch.float32
    for model in (model for model in MODELS if model.name in STATES):
        sides = {name: bench_state_update.PEERS[name] for name in ("jenga", "vllm")}
        make = partial(make_state_batch, model)
        yield Case(f"state_update {model.name}", sides, lambda make=make: [make(decoded, f32, CPU)])
        sides = {"jenga": bench_state_scan.jenga}
        yield Case(f"state_scan {model.name}", sides, lambda make=make: [make(prompt, f32, CPU)])
    for model in (QWEN3_NEXT, KIMI_LINEAR):
        sides = {name: bench_delta.UPDATE_PEERS[name] for name in ("jenga", "vllm")}
        make = partial(make_delta_batch, model)
        yield Case(f"delta_update {model.name}", sides, lambda make=make: [make(decoded, f32, CPU)])
        sides = {"jenga": bench_delta.jenga_scan}
        yield Case(f"delta_scan {model.name}", sides, lambda make=make: [make(prompt, f32, CPU)])
    make = partial(make_replay_batch, NEMOTRON, REPLAYED, f32, CPU)
    sides = {"jenga": bench_state_replay.jenga}
    yield Case(f"state_replay {NEMOTRON.name}", sides, lambda make=make: [make()])
    make = partial(make_delta_replay_batch, QWEN3_NEXT, REPLAYED, f32, CPU)
    sides = {"jenga": bench_delta_replay.jenga}
    yield Case(f"delta_replay {QWEN3_NEXT.name}", sides, lambda make=make: [make()])


def _attention_batch(shape: AttentionShape) -> list[Any]:
    batch = make_batch(shape, CPU)
    return [batch, torch.empty_like(batch.q)]


def _latent_batch(shape: LatentShape) -> list[Any]:
    batch = make_latent_batch(shape, CPU)
    return [batch, batch.q.new_empty(shape.num_tokens, shape.num_heads, LATENT_DIM)]


def times_of(launches: dict[str, Launch]) -> dict[str, list[float]]:
    """Return the microseconds of a call in each round. The implementations take turns."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    for launch in launches.values():
        for _ in range(NUM_CALLS):
            launch()
    for _ in range(NUM_ROUNDS):
        for name, launch in launches.items():
            begin = time.perf_counter()
            for _ in range(NUM_CALLS):
                launch()
            times[name].append((time.perf_counter() - begin) * 1e6 / NUM_CALLS)
    return times


def first_times_of(launch: Launch) -> list[float]:
    """Return the microseconds of calls whose signature is new. Nothing is compiled in them."""
    calls = [thing for thing in gc.get_objects() if type(thing) is Call]
    times = []
    for _ in range(NUM_ROUNDS):
        for call in calls:
            call.__init__()
        begin = time.perf_counter()
        launch()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def measure(case: Case) -> dict[str, Any]:
    """Time a case, and return its row."""
    batch = case.make()
    launches = {side: prepare(*batch) for side, prepare in case.sides.items()}
    row: dict[str, Any] = {"case": case.name}
    times = times_of(launches)
    if "vllm" in times:
        # Ratios are taken of adjacent rounds, so that other load on the machine affects both sides.
        ratios = [vllm / ours for vllm, ours in zip(times["vllm"], times["jenga"], strict=True)]
        row["ratio"] = statistics.median(ratios)
    times["jenga, first"] = first_times_of(launches["jenga"])
    for side, found in times.items():
        quantiles = statistics.quantiles(found, n=5)
        row[side] = [statistics.median(found), quantiles[0], quantiles[3]]
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as text."""
    lines = [f"{'us, and p20 to p80':48} {'jenga':>22} {'vllm':>22} {'ratio':>6} {'first':>7}"]
    for row in rows:
        sides = [f"{'':22}"] * 2
        for index, side in enumerate(("jenga", "vllm")):
            if side in row:
                middle, low, high = row[side]
                sides[index] = f"{middle:7.1f} ({low:.1f} to {high:.1f})".rjust(22)
        ratio = f"{row['ratio']:6.2f}" if "ratio" in row else " " * 6
        first = f"{row['jenga, first'][0]:7.1f}"
        lines.append(f"{row['case'][:48]:48} {sides[0]} {sides[1]} {ratio} {first}")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines.append(f"ratio, geometric mean of {len(ratios)}: {mean:.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.manager.bench_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="write rows and text to this folder"
    )
    options = parser.parse_args(arguments)
    # With an empty value, vLLM finds Triton on a machine without a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    driver.set_active(Nowhere(CAPABILITY))  # pyright: ignore[reportArgumentType]
    show_vllm_a_gpu()
    # This module imports vLLM. If it were imported earlier, vLLM would find no GPU.
    from perf.manager.bench_manager import machine_line

    # On a GPU, values of tensors cannot be checked without waiting.
    tensors.LOOKS_AT_VALUES = False
    machine = machine_line()
    with torch.inference_mode():
        rows = [measure(case) for case in cases() if options.only in case.name]
    text = table(rows)
    print(f"{machine}\n{text}")
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row | {"machine": machine}) + "\n" for row in rows)
        (options.save / "bench_calls.jsonl").write_text(lines, encoding="utf-8")
        page = f"# Host time of calls\n\n{machine}\n\n```\n{text}\n```\n"
        (options.save / "bench_calls.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

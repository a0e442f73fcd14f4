"""Conversations of Mooncake's trace: hits, waste, batches and preemptions of real traffic.

python -m perf.experiments.mooncake conversation_trace.jsonl [--models gemma-3-27b] [--save]

The first thousand requests arrive four times as fast as in the trace, on twelve models. The trace
comes from the repository kvcache-ai/Mooncake, FAST25-release/traces.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

from perf.experiments.frame import Case, Experiment, Found

NUM_REQUESTS, SPEED = 1000, 4.0

MODELS = (
    ("llama-3.1-8b", "H100-80G", 1),
    ("ministral-8b-2410", "H100-80G", 1),
    ("gpt-oss-20b", "H100-80G", 1),
    ("gpt-oss-120b", "H200", 1),
    ("gemma-3-12b", "H100-80G", 1),
    ("gemma-3-27b", "H200", 1),
    ("llama-4-scout", "H200", 2),
    ("jamba-1.5-mini", "H100-80G", 2),
    ("nemotron-h-8b", "H100-80G", 1),
    ("falcon-h1-7b", "H100-80G", 1),
    ("granite-4.0-h-small", "H200", 1),
    ("qwen3-next-80b-a3b", "H200", 2),
)
"""Models, each with a GPU and the number of ranks that hold it."""

COMPARED = ("jenga", "vllm", "max", "static")

NOTES = """\
Percent of prompt tokens hit. "bound": the most that any eviction could hit in that arena, one
request after another; "all": a cache without end. Seconds, and so what runs beside what, are those
of a roofline at the GPU's peaks.
The conversations overload all but Qwen3-Next: requests wait for minutes, running ones take nearly
the whole arena, and what is read again was read too long ago for most managers; four tokens in a
hundred are the head that all prompts share. One prompt in five is read again, 35 to 640 requests
later. Ours leaves to the queue what is read again, as far as prompts are: a part of the arena that
is small here, since four fifths of the tokens never come again.
On Falcon-H1 "static" hits more, whose part for states has room to spare.
Waste is the mean over steps, the last ones with few requests included: then empty small pages of
large pages that hold cached content weigh more than what is used. "busy": over the steps with half
the largest batch or more."""


def cases(trace: str) -> Iterator[Case]:
    for model, gpu, ranks in MODELS:
        yield Case(
            models=(model,),
            trace=trace,
            num_requests=NUM_REQUESTS,
            speed=SPEED,
            gpu=gpu,
            ranks=ranks,
            with_bounds=True,
            every=16,
            managers=COMPARED,
        )


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    yield [
        "model",
        "GPUs",
        "manager",
        "hit",
        "bound",
        "all",
        "waste",
        "busy",
        "decode batch",
        "preempted",
        "tok/s",
        "TTFT p50",
        "p99",
    ]
    for case, by_manager in found:
        gpus = case.gpu if case.ranks == 1 else f"{case.ranks} {case.gpu}"
        for manager, outcome in by_manager.items():
            options = {} if outcome.refusal else outcome.row.options
            yield (
                case.title,
                gpus,
                manager,
                outcome.text(lambda row: 100 * row.hit_rate, ".1f"),
                *(
                    f"{100 * options[name]:.1f}" if name in options else "-"
                    for name in ("best_eviction_hit_rate", "unlimited_hit_rate")
                ),
                outcome.text(lambda row: row.waste, ".2%"),
                outcome.text(lambda row: row.busy_waste, ".2%"),
                outcome.text(lambda row: row.mean_decode_batch, ".1f"),
                outcome.text(lambda row: row.num_preemptions, ".0f"),
                outcome.text(lambda row: row.tokens_per_s, ",.0f"),
                outcome.text(lambda row: row.ttft_s.p50, ".2f"),
                outcome.text(lambda row: row.ttft_s.p99, ".2f"),
            )


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m perf.experiments.mooncake TRACE [options]; see --help after it")
    trace, *options = arguments
    Experiment(
        name="mooncake",
        description=__doc__ or "",
        cases=lambda: cases(trace),
        lines=lines,
        notes=NOTES,
        steps_kept=12,
        managers=COMPARED,
    ).main(options)


if __name__ == "__main__":
    main(sys.argv[1:])

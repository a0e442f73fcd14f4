"""Figure 15 of the paper: latency against the request rate, Llama 3.2 11B Vision, one H100.

The trace is MMMU-Pro, with images of 6,193 tokens and texts of 43. The paper reports this: below
1.2 requests per second the latencies of vLLM 0.6.3 ("paged") and Jenga differ by 2.6 %. Above that
rate Jenga's end-to-end latency is up to 2.24 times shorter, and its TTFT up to 29.43 times. Its
TPOT is longer there.
"""

from collections.abc import Iterable, Iterator, Sequence

from perf.experiments.frame import Case, Experiment, Found, Outcome

RATES = (8, 16, 24, 28, 32, 40, 56)

NOTES = """\
Seconds are modelled by the roofline of the GPU's peaks, the least that it allows: knees lie at
higher rates than the paper's 1.2 requests a second, for its engine reached no peak. Ratios are
those of "paged" over each at the same rate. From a rate on "paged" waits for memory while ours has
room: its first tokens come late, and a further token comes sooner, of a smaller batch. The longer
such a rate lasts the larger is the ratio of first tokens: a queue grows; here 400 requests. The
encoder's own time is in none."""


def cases() -> Iterator[Case]:
    for rate in RATES:
        yield Case(
            models=("llama-3.2-11b-vision",),
            trace=(
                f"mmmu-pro:n=400,image_tokens=6193,text_tokens=43,output=200,"
                f"image_in_prompt=false,rate={rate}"
            ),
            prefix_caching=False,
            managers=("jenga", "paged", "vllm"),
            every=32,
        )


SHOWN = ("ttft_s", "e2e_s", "tpot_s")


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    header = "rate|manager|TTFT s|E2E s|TPOT ms|batch|paged over it: TTFT|E2E|TPOT"
    yield header.split("|")
    yield ("paper", "jenga", *("" for _ in range(4)), "up to 29.43", "up to 2.24", "below 1")
    for case, by_manager in found:
        rate = case.trace.partition("rate=")[2]
        paged = by_manager.get("paged")
        for manager, outcome in by_manager.items():
            yield (
                rate,
                manager,
                outcome.text(lambda row: row.ttft_s.mean, ".3f"),
                outcome.text(lambda row: row.e2e_s.mean, ".2f"),
                outcome.text(lambda row: 1000 * row.tpot_s.mean, ".2f"),
                outcome.text(lambda row: row.mean_decode_batch, ".1f"),
                *(_over(paged, outcome, name) for name in SHOWN),
            )


def _over(paged: Outcome | None, other: Outcome, field: str) -> str:
    """Return the baseline's mean seconds over another manager's."""
    if paged is None or paged.refusal or other.refusal:
        return "-"
    means = [getattr(each.summary, field).mean for each in (paged, other)]
    return f"{means[0] / means[1]:.2f}"


EXPERIMENT = Experiment(
    name="figure_15",
    description=__doc__ or "",
    cases=cases,
    lines=lines,
    notes=NOTES,
    steps_kept=20,
)

if __name__ == "__main__":
    EXPERIMENT.main()

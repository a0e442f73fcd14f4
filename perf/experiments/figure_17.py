"""Figure 17 of the paper: use of memory, Ministral 8B, static and dynamic lengths.

Lengths in the static trace do not change over time. In the dynamic trace their mean goes from short
to long. In the paper, vLLM 0.6.3 ("paged") wastes 38.2 % on average, and Jenga at most 0.04 %.
Under Jenga, full attention's share of the used memory is between 27.8 and 54.5 % on the dynamic
trace.
"""

from collections.abc import Iterable, Iterator, Sequence

from perf.experiments.frame import Case, Experiment, Found, Outcome

NOTES = """\
The paper does not give its lengths. For requests of one length L beyond the window of 32,768 tokens
"paged" wastes 3/4 x (1 - 32768 / L): 38.2 % is L = 66,783. Full attention's share of what is needed
is L / (L + 3 x 32768) there: 27.8 % is L = 37,860, 54.5 % is L = 117,745, so the dynamic trace
goes from 38 to 118 thousand tokens; documents of the lengths of figure 16 waste more than 38.2 %,
and traces that begin at 1,000 tokens come within two points of it. Tokens that a step computes
count as used. Waste is the mean over steps in which a request decodes; the share is least and most
of steps with three quarters of the arena held."""


def cases() -> Iterator[Case]:
    for name, trace in (
        ("static", "static-lengths:n=60,tokens=55000-110000"),
        ("static, from short", "static-lengths:n=120,tokens=1000-110000"),
        ("dynamic", "dynamic-lengths:n=60,tokens=38000-118000,spread=0.0"),
        ("dynamic, from short", "dynamic-lengths:n=120,tokens=1000-118000"),
    ):
        yield Case(
            name=name, models=("ministral-8b-2410",), trace=trace, prefix_caching=False, every=2
        )


def full_share(outcome: Outcome) -> str:
    """Return the range of full attention's share of used memory, while the arena is well filled."""
    shares: list[float] = []
    for step in outcome.steps:
        held = step.used_bytes + step.useless_bytes + step.empty_bytes
        if "full" in step.tables and held > 0.75 * outcome.row.arena_bytes:
            shares.append(step.tables["full"].used_bytes / step.used_bytes)
    return f"{min(shares):.1%} to {max(shares):.1%}" if shares else "-"


PAPER_WASTE = {"jenga": "0.04%", "paged": "38.2%"}


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    header = "trace|manager|paper: waste|waste|paper: full attention|full attention|batch|steps"
    yield header.split("|")
    for case, by_manager in found:
        for manager, outcome in by_manager.items():
            is_shown = manager == "jenga" and case.name == "dynamic"
            yield (
                case.title,
                manager,
                PAPER_WASTE.get(manager, "-"),
                outcome.text(lambda row: row.waste, ".2%"),
                "27.8% to 54.5%" if is_shown else "-",
                "-" if outcome.refusal else full_share(outcome),
                outcome.text(lambda row: row.mean_decode_batch, ".2f"),
                outcome.text(lambda row: row.num_steps, ",.0f"),
            )


EXPERIMENT = Experiment(
    name="figure_17",
    description=__doc__ or "",
    cases=cases,
    lines=lines,
    notes=NOTES,
    steps_kept=150,
)

if __name__ == "__main__":
    EXPERIMENT.main()

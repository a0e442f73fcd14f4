"""Figure 16 of the paper: decode batch over steps, Ministral 8B, 20 long documents at once.

Inputs have 55 to 110 thousand tokens and outputs 50 to 100. All are there from the start, on one
H100. The paper reports a mean batch of 5.39 for Jenga, in about 300 steps. For vLLM 0.6.3, SGLang
and TGI it reports 2.63, 2.74 and 2.50, in about 600 steps. "paged" stands for these: one page table
of all layers, in which each layer keeps every token.
"""

from collections.abc import Iterable, Iterator, Sequence

from perf.experiments.frame import Case, Experiment, Found

WHOLE_PROMPTS = 1 << 17
"""Tokens of a step that computes any prompt in one piece, like vLLM 0.6.3."""

NOTES = """\
Steps of whole prompts are vLLM 0.6.3's; chunks of 8,192 tokens are today's. The paper does not give
its arena; weights and a share of 0.92 leave 61 GB, where both batches are larger than its figures.
At 40 GB the baseline is the paper's (2.5, 580 steps), at 52 GB ours is (5.2, 280 steps). No arena
has both: of such lengths "paged" holds 1.83 times our bytes; the paper's batches are 2.05 apart.
Today's vLLM batches as we do: it too frees what windows have left, and differs in waste alone.
"static" wastes nothing of what it holds, and leaves idle what it set aside for the other type: it
divides for requests of 512 to 32,768 tokens, and these are longer."""


def cases() -> Iterator[Case]:
    for chunk_tokens, arena_bytes in (
        (WHOLE_PROMPTS, None),
        (WHOLE_PROMPTS, 40 * 10**9),
        (WHOLE_PROMPTS, 52 * 10**9),
        (8192, None),
    ):
        yield Case(
            models=("ministral-8b-2410",),
            trace="long-documents",
            chunk_tokens=chunk_tokens,
            arena_bytes=arena_bytes,
            prefix_caching=False,
        )


PAPER = {"jenga": ("5.39", "~300"), "paged": ("2.63", "~600")}


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    header = "steps of|arena|manager|paper: batch|steps|batch|steps|waste|preempted"
    yield header.split("|")
    for case, by_manager in found:
        steps = "whole prompts" if case.chunk_tokens == WHOLE_PROMPTS else "8,192 tokens"
        arena = f"{case.machine().arena_bytes / 1e9:.0f} GB"
        for manager, outcome in by_manager.items():
            yield (
                steps,
                arena,
                manager,
                *PAPER.get(manager, ("-", "-")),
                outcome.text(lambda row: row.mean_decode_batch, ".2f"),
                outcome.text(lambda row: row.num_steps, ",.0f"),
                outcome.text(lambda row: row.waste, ".2%"),
                outcome.text(lambda row: row.num_preemptions, ".0f"),
            )


EXPERIMENT = Experiment(
    name="figure_16",
    description=__doc__ or "",
    cases=cases,
    lines=lines,
    notes=NOTES,
    steps_kept=150,
)

if __name__ == "__main__":
    EXPERIMENT.main()

"""Tables of docs from the rows of `perf/experiments`: figures 19 and 20, and the shared arena."""

from collections.abc import Mapping
from statistics import fmean

from jenga.sim.results.rows import RunRow, SummaryRow, read_rows
from perf.experiments import figure_19, figure_20, shared_arena
from perf.experiments.frame import FOLDER

Rates = Mapping[tuple[str, str, str], float]
"""Models, manager and case of a replay -> its requests per modelled second."""

MANAGERS_OF_SYSTEMS = (("paged", ""), ("jenga", "manual"), ("jenga", ""), ("vllm", ""))
"""Manager and case of each of `figure_20.SYSTEMS`."""

WAYS = {
    "static": "half each",
    "same pages": "half each, 10 MiB",
    "gigabytes": "whole gigabytes",
    "pages": "large pages",
}
MODELS = {"gemma-3-12b": "Gemma 3 12B", "llama-3.1-8b": "Llama 3.1 8B"}


def rates(name: str) -> Rates:
    """Read the requests per second of all replays of an experiment."""
    runs: dict[str, tuple[str, str, str]] = {}
    found: dict[tuple[str, str, str], float] = {}
    for row in read_rows(FOLDER / f"{name}.jsonl"):
        if isinstance(row, RunRow):
            runs[row.run] = (row.model, row.manager, str(row.options.get("case", "")))
        elif isinstance(row, SummaryRow):
            found[runs[row.run]] = row.requests_per_s
    return found


def encoders() -> list[str]:
    """Make the table of figure 19: throughput with the encoder's outputs kept."""
    found = rates("figure_19")
    lines = ["| model | embeddings | requests/s | times as many | in the paper |"]
    lines.append("|---|---|--:|--:|--:|")
    for name, encoder in figure_19.ENCODERS.items():
        again = found[name, "jenga", f"{name}, {figure_19.AGAIN}"]
        for way in figure_19.WAYS:
            rate = found[name, "jenga", f"{name}, {way}"]
            is_again = way == figure_19.AGAIN
            paper = encoder.paper[1] / encoder.paper[0]
            cells = (
                name,
                "made again in every chunk" if is_again else f"in {way}",
                f"{rate:.2f}",
                "" if is_again else f"{rate / again:.2f}",
                f"{paper:.2f}" if way == figure_19.OWN_PAGES else "",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def drafts() -> list[str]:
    """Make the table of figure 20: throughput with a draft model, as multiples of vLLM-max."""
    found = rates("figure_20")
    lines = [
        "| target and draft | vLLM-manual | Jenga | vLLM 0.32 | paper: manual | paper: Jenga |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for models, *_, paper in figure_20.PAIRS:
        name = "+".join(models)
        most, *others = (found[name, manager, case] for manager, case in MANAGERS_OF_SYSTEMS)
        cells = [" and ".join(models), *(f"{rate / most:.2f}" for rate in others)]
        cells += [f"{rate / paper[0]:.2f}" for rate in paper[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sharing(seed: int) -> list[str]:
    """Make the table of two models that share an arena, for the requests of a seed."""
    lines = ["| model | memory | hits | tokens/s | preempted | TTFT mean | p50 | p99 |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    found = [each for each in shared_arena.read_outcomes() if each.seed == seed]
    for each in sorted(found, key=lambda each: each.model):
        cells = (
            MODELS[each.model],
            WAYS[each.way],
            f"{each.hit_rate:.1%}".replace("%", " %"),
            f"{each.output_tokens_per_s:.0f}",
            f"{each.num_preemptions}",
            f"{each.ttft_mean_s:.2f} s",
            f"{each.ttft_p50_s:.2f} s",
            f"{each.ttft_p99_s:.2f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sharing_by_seed() -> list[str]:
    """Make the table of two models that share an arena, for the requests of each seed."""
    found = shared_arena.read_outcomes()
    seeds = sorted({each.seed for each in found})
    hits = [*(f"hits, seed {seed}" for seed in seeds), "mean"]
    lines = [f"| model | memory | {' | '.join(hits)} | TTFT mean, most | preempted |"]
    lines.append(f"|---|---|{'--:|' * (len(hits) + 2)}")
    for model in sorted(MODELS):
        for way, name in WAYS.items():
            some = [each for each in found if each.model == model and each.way == way]
            rates = [each.hit_rate for each in some]
            times = [each.ttft_mean_s for each in some]
            cells = [MODELS[model], name]
            cells += [f"{rate:.1%}".replace("%", " %") for rate in (*rates, fmean(rates))]
            cells += [f"{fmean(times):.2f} s, {max(times):.2f} s"]
            cells += [f"{sum(each.num_preemptions for each in some)}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines

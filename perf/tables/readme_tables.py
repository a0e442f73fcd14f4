"""Write the tables of README, docs and notes from committed rows, so that texts agree with rows.

    python -m perf.tables.readme_tables [--check]

A table stands between two comments of its text. It is written anew, or with `--check` only
compared. Sentences with numbers are made too. Those that are missing from a text are printed, and
must be corrected by hand. The exit status is 1 if a text disagreed with the rows.
"""

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jenga.doctor.machine import TESTED_CAPABILITIES
from jenga.eviction.known import DEFAULT_POLICY
from perf.counts.architectures import GPUS, newest
from perf.serving.cases import LIMITS, ORACLE
from perf.serving.cases import STOCK as STOCK_NAME
from perf.serving.results import Group, Results
from perf.serving.table import HITS_LOAD
from perf.sweeps.sweep_eviction import CASES, STOCK
from perf.tables import experiment_tables
from perf.tables.gpu_rows import GROUPS, OURS, compare, read_groups, unsteady
from perf.tables.recipe_plans import LENGTH_TOKENS
from perf.tables.recipe_plans import OURS as PLANNED
from perf.tables.recipe_plans import RECIPES as RECIPE_MODELS
from perf.tables.recipe_plans import STOCK as PLANNED_BY_VLLM
from perf.tables.table_gpu import FEW

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results"
README = ROOT / "README.md"
DOCS = ROOT / "docs"
BENCHMARKS = DOCS / "benchmarks.md"
HOST_MEMORY = DOCS / "host-memory.md"
PAPER_MODELS = DOCS / "paper-models.md"
RECIPES = DOCS / "recipes.md"
RECURRENT_STATES = DOCS / "recurrent-states.md"
SHARED_ARENA = DOCS / "shared-arena.md"
SUPPORTED_MODELS = DOCS / "supported-models.md"
NOTES = RESULTS / "cpu" / "NOTES.md"

H100 = "h100-80gb-hbm3"
H200 = "h200"
GPU_NAMES = {H100: "H100", H200: "H200"}

PEER_NAMES = {
    "flash-attention-3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "flash-mla": "FlashMLA",
    "vllm": "vLLM's kernels",
    "vllm-triton": "vLLM's Triton kernels",
    "vllm-cuda": "vLLM's CUDA kernel",
    "mamba-ssm": "mamba-ssm",
    "torch": "PyTorch",
}

COMPARED = (
    (H100, "decode", "flash-attention-3"),
    (H100, "decode", "flashinfer"),
    (H200, "decode", "vllm-triton"),
    (H200, "wide decode", "vllm-triton"),
    (H200, "small decode", "vllm-triton"),
    (H100, "prompts", "flash-attention-3"),
    (H100, "mixed", "flash-attention-3"),
    (H200, "other prompts", "vllm-triton"),
    (H100, "latents", "flash-mla"),
    (H200, "tuned steps bf16", "vllm"),
    (H200, "tuned steps f32", "vllm"),
    (H200, "untuned steps bf16", "vllm"),
    (H200, "untuned steps f32", "vllm"),
    (H100, "untuned steps bf16", "vllm"),
    (H100, "untuned steps f32", "vllm"),
    (H100, "replay bf16", "vllm"),
    (H100, "replay f32", "vllm"),
    (H100, "scans of heads", "vllm"),
    (H100, "scans of channels", "vllm"),
    (H100, "delta prompts of heads", "vllm"),
    (H100, "delta prompts of channels", "vllm"),
    (H200, "delta steps", "vllm"),
    (H200, "linear attention", "vllm"),
    (H200, "convolution steps", "vllm"),
    (H200, "convolutions", "vllm"),
    (H200, "stores", "vllm-triton"),
    (H200, "latent stores", "vllm-cuda"),
)
"""Folder, group and peer of each row of the table of kernels in docs/benchmarks.md."""

WORKLOADS = {
    "3 articles": "8 questions on each of 3 articles",
    "8 articles": "8 questions on each of 8 articles",
    "24 articles": "24 articles, random order",
    "24 in rounds": "24 articles, a new order each round",
    "24 in cycles": "24 articles, the same order each round",
    "agentic, busy": "128 agent sessions, fast arrivals",
    "agentic": "agent sessions, slow arrivals",
    "chat": "96 conversations of ten turns",
    "mooncake": "Mooncake conversations at 4x speed",
}
"""Workload -> its description in README and docs."""

ARRIVING = {
    "agents": "sessions of agents",
    "articles": "questions on articles",
    "rag": "chunks in any order",
    "mixed": "chats beside documents",
    "shift": "new texts half way",
    "samples": "eight samples of a prompt",
    "tools": "heads of instructions",
    "zipf": "whole prompts, by popularity",
    "alternate": "two sets of articles in turn",
    "loop": "articles in a cycle",
    "documents": "documents that come and go",
}
"""Workload of arrivals over time -> its description in README."""

NO_SLOWER = 0.995
"""Least factor that is printed as 1.00 or more."""

MANY_MORE = 1.1
"""Least ratio of our requests to vLLM's at which a pair is counted as having more."""

MANY_TOKENS = 528
"""Tokens per page above which windows take longer if pages are far apart."""

Rows = list[dict[str, Any]]
Replays = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Workload -> model -> system -> its row."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a text.

    Attributes:
        path: File of the text.
        name: Name in the table's comments.
        make: Function that makes its lines.
    """

    path: Path
    name: str
    make: Callable[[], list[str]]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of its comments, with their indentation, and of the lines between them."""
        begin = re.escape(f"<!-- {self.name}: made by python -m perf.tables.readme_tables -->")
        end = re.escape(f"<!-- end of {self.name} -->")
        return re.compile(rf"^( *)({begin}\n)(?:.*?\n)??\1({end})$", re.DOTALL | re.MULTILINE)

    def put_into(self, text: str) -> tuple[str, int]:
        """Put the table into a text. Return the new text, and the number of places found for it."""

        def filled(found: re.Match[str]) -> str:
            indent, begin, end = found.groups()
            lines = "".join(f"{indent}{line}\n" for line in self.make())
            return f"{indent}{begin}{lines}{indent}{end}"

        return self.pattern.subn(filled, text)


def read(name: str) -> Rows:
    """Read the rows of a file of results."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


# Kernels


def kernels() -> list[str]:
    """Make the table that compares every operation with a peer."""
    found = {folder: read_groups(RESULTS / folder) for folder in GPU_NAMES}
    groups = {group.name: group for group in GROUPS}
    titles = ("operation", "peer", "peer's time over ours", "mean, median", "shapes, behind")
    lines = [
        f"| {' | '.join((*titles, 'GPU', 'changed since'))} |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    for folder, name, peer in COMPARED:
        compared = compare(found[folder][name], peer)
        if compared is None:
            msg = f"no row of {peer} in group {name!r} of {folder}"
            raise ValueError(msg)
        ratios, title = compared.ratios, groups[name].title
        if compared.page_tokens:
            title += f", pages of {' or '.join(map(str, compared.page_tokens))} tokens"
        is_few = len(ratios) <= FEW
        spread = " and " if is_few else " to "
        shown = sorted(ratios) if is_few else (min(ratios), max(ratios))
        cells = (
            title,
            PEER_NAMES[peer],
            spread.join(f"{ratio:.2f}" for ratio in shown),
            "" if is_few else f"{compared.mean:.2f}, {compared.median:.2f}",
            f"{len(ratios)}, {compared.num_behind}",
            GPU_NAMES[folder],
            str(compared.num_changed or ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def seldom_written() -> list[str]:
    """Make the table of steps that seldom write states, relative to updates that always do."""
    variants = read(f"{H100}/variants.jsonl")
    updates = {
        row["shape"].removeprefix("replay nemotron "): row["p50_us"]
        for row in variants
        if row["implementation"] == "update" and row["shape"].startswith("replay nemotron ")
    }
    groups = {folder: read_groups(RESULTS / folder) for folder in GPU_NAMES}
    steps = {
        shape.name: shape.rows[OURS]["p50_us"]
        for name in ("replay bf16", "replay f32")
        for shape in groups[H100][name]
    }
    writes, replays = (
        {shape.name: shape.rows[OURS]["p50_us"] for shape in groups[H200][name]}
        for name in ("delta steps", "delta replay")
    )
    lines = ["| layers, states, GPU | 8 requests | 64 | 256 |", "|---|--:|--:|--:|"]
    for label, dtype in (("f32", "float32"), ("bf16", "bfloat16")):
        shares = [
            steps[f"nemotron-h-8b {label} b{batch}"] / updates[f"{label} b{batch}"]
            for batch in (8, 64, 256)
        ]
        cells = " | ".join(f"{share:.2f}" for share in shares)
        lines.append(f"| Nemotron-H 8B's Mamba-2, {dtype}, H100 | {cells} |")
    shares = [
        replays[name] / writes[name] if name in replays else None
        for name in (f"qwen3-next-80b-a3b f32 b{batch}" for batch in (8, 64, 256))
    ]
    cells = " | ".join("" if share is None else f"{share:.2f}" for share in shares)
    return [*lines, f"| Qwen3-Next 80B's gated delta nets, float32, H200 | {cells} |"]


# Replays


def replays() -> Replays:
    """Read the rows of `perf.sweeps.sweep_eviction`, the last one of each case."""
    found: Replays = {}
    for row in read("cpu/sweep_eviction.jsonl"):
        found.setdefault(row["workload"], {}).setdefault(row["model"], {})[row["system"]] = row
    return found


def factors(of_models: Mapping[str, Mapping[str, dict[str, Any]]]) -> dict[str, float]:
    """Return model -> modelled seconds with vLLM's manager over those with ours."""
    return {
        model: systems[STOCK]["modelled_s"] / systems[DEFAULT_POLICY]["modelled_s"]
        for model, systems in of_models.items()
        if all("modelled_s" in systems.get(name, {}) for name in (DEFAULT_POLICY, STOCK))
    }


def workloads() -> list[str]:
    """Make the table of each workload's gain over all models, with the least gain first."""
    titles = (
        "requests",
        "models",
        "times as fast, mean",
        "least",
        "most",
        "prompt tokens found: vLLM's, ours",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|--:|--:|---|---|--:|"]
    found = [(name, factors(of_models), of_models) for name, of_models in replays().items()]
    for name, gained, of_models in sorted(found, key=lambda item: mean(item[1])):
        least, most = min(gained, key=gained.__getitem__), max(gained, key=gained.__getitem__)
        hits = [
            statistics.mean(of_models[model][system]["hit_percent"] for model in gained)
            for system in (STOCK, DEFAULT_POLICY)
        ]
        ends = (
            factor(gained[model]) + ("" if factor(gained[model]) == "1.00" else f" ({model})")
            for model in (least, most)
        )
        cells = (
            WORKLOADS[name],
            str(len(gained)),
            factor(mean(gained)),
            *ends,
            f"{hits[0]:.0f} %, {hits[1]:.0f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _arrivals(budget: float) -> tuple[Results, dict[Group, float]]:
    """Return the results of requests that arrive over time, and the gain of each group of cells.

    `budget` is the share of the GPU's arena that the cells have.
    """
    results = Results(read("cpu/serving.jsonl"))
    gains = {
        group: statistics.geometric_mean(results.gains(group, max(LIMITS)))
        for group in results.capacities
        if (group, HITS_LOAD) in results.pairs and group.budget == budget
    }
    return results, gains


def serving() -> list[str]:
    """Make the table of requests that arrive over time, with a row for each workload."""
    titles = (
        "requests",
        "models",
        "arrival rate: least, mean, most",
        "tokens found: vLLM's, ours",
        "TTFT p50",
        "TTFT p99",
        "models behind",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|--:|--:|--:|--:|--:|--:|"]
    results, gains = _arrivals(1.0)
    behind = {loss.group for loss in results.losses}
    for workload in dict.fromkeys(group.workload for group in sorted(gains, key=gains.__getitem__)):
        groups = [group for group in gains if group.workload == workload]
        pairs = [pair for group in groups for pair in results.pairs[group, HITS_LOAD]]
        of_workload = [gains[group] for group in groups]
        mean = statistics.geometric_mean(of_workload)
        found = (
            statistics.fmean(pair.best("hit_percent")["hit_percent"] for pair in pairs),
            statistics.fmean(pair.ours["hit_percent"] for pair in pairs),
        )
        cells = (
            ARRIVING[workload],
            str(len(groups)),
            f"{min(of_workload):.2f}, {mean:.2f}, {max(of_workload):.2f}",
            f"{found[0]:.0f} %, {found[1]:.0f} %",
            *(
                f"{statistics.geometric_mean(pair.ratio(number) for pair in pairs):.2f}"
                for number in ("ttft_p50_s", "ttft_p99_s")
            ),
            str(sum(group in behind for group in groups)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def arrivals(budget: float = 1.0) -> list[str]:
    """Make the table of each model and workload, with the least capacity first."""
    titles = (
        "model, requests",
        "arrival rate",
        "bound",
        "vLLM's setting",
        "tokens found: vLLM's, ours",
        "requests/s",
        "TTFT p50",
        "TTFT p99",
        "longest wait",
    )
    lines = [f"| {' | '.join(titles)} |", "|---|--:|--:|---|--:|--:|--:|--:|--:|"]
    results, gains = _arrivals(budget)
    for group in sorted(gains, key=gains.__getitem__):
        bounds = results.gains(group, max(LIMITS), ORACLE)
        pairs = results.pairs[group, HITS_LOAD]
        best = Counter(
            capacities[STOCK_NAME, max(LIMITS)]["best"].removeprefix(STOCK_NAME).strip()
            for capacities in results.capacities[group]
        )
        found = (
            statistics.fmean(pair.best("hit_percent")["hit_percent"] for pair in pairs),
            statistics.fmean(pair.ours["hit_percent"] for pair in pairs),
        )
        cells = (
            f"{group.model}, {group.workload}",
            f"{gains[group]:.2f}",
            f"{statistics.geometric_mean(bounds):.2f}" if bounds else "-",
            best.most_common(1)[0][0] or "default",
            f"{found[0]:.0f} %, {found[1]:.0f} %",
            *(
                f"{statistics.geometric_mean(pair.ratio(number) for pair in pairs):.2f}"
                for number in ("requests_per_s", "ttft_p50_s", "ttft_p99_s", "longest_wait_s")
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plans() -> list[str]:
    """Make the table of requests that fit for each recipe's model, ours and vLLM's."""
    titles = ("model", "GPUs", "arena of each", "1,024", "8,192", "32,768", "longest request")
    lines = [f"| {' | '.join(titles)} |", "|---|---|--:|--:|--:|--:|--:|"]
    titles_of = {recipe.model: recipe.title for recipe in RECIPE_MODELS}
    for row in read("cpu/recipe_plans.jsonl"):
        ours, stock = (row["systems"][name] for name in (PLANNED, PLANNED_BY_VLLM))
        counts = (
            f"{ours['num_requests'][length]:,} / {stock['num_requests'][length]:,}"
            if length in ours["num_requests"]
            else "too long"
            for length in map(str, LENGTH_TOKENS)
        )
        cells = (
            titles_of[row["model"]],
            f"{row['num_gpus']} x {row['gpu']}",
            f"{row['arena_bytes'] / 1e9:.1f} GB",
            *counts,
            f"{ours['longest_tokens']:,} / {stock['longest_tokens']:,}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def models() -> list[str]:
    """Make the table of hits and factors of every model on every workload."""
    found = replays()
    names = [name for name in WORKLOADS if name in found]
    lines = [f"| hits, ours / vLLM (bound); times as fast | {' | '.join(names)} |"]
    lines.append(f"|---|{'---|' * len(names)}")
    for model, _ in CASES:
        cells: list[str] = []
        for name in names:
            systems = found[name].get(model, {})
            ours, stock, best = (
                f"{systems[system]['hit_percent']:.1f}"
                if "hit_percent" in systems.get(system, {})
                else "-"
                for system in (DEFAULT_POLICY, STOCK, "best")
            )
            gained = factors({model: systems}).get(model)
            cells.append(f"{ours} / {stock} ({best})" + (f"; {factor(gained)}" if gained else ""))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    means = " | ".join(factor(mean(factors(found[name]))) for name in names)
    return [*lines, f"| geometric mean | {means} |"]


def mean(gained: Mapping[str, float]) -> float:
    """Return the geometric mean of factors."""
    return statistics.geometric_mean(gained.values())


def factor(value: float) -> str:
    """Format a factor with its significant digits."""
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def architectures() -> list[str]:
    """Make the table of the GPUs that kernels are compiled for."""
    titles = ("compute capability", "GPUs, for example", "shapes", "refused", "do not fit", "spill")
    lines = [f"| {' | '.join((*titles, 'tests ran'))} |", "|---|---|--:|--:|--:|--:|---|"]
    rows = newest(read("cpu/architectures.jsonl"))
    for capability, gpus in GPUS.items():
        of_gpu = [row for row in rows if row["capability"] == capability]
        compiled = [row for row in of_gpu if "refused" not in row]
        cells = (
            f"{capability / 10:.1f}",
            gpus,
            str(len(of_gpu)),
            str(len(of_gpu) - len(compiled) or ""),
            str(sum(bool(row["too_large"]) for row in compiled) or ""),
            str(sum(bool(row["spilled_bytes"]) for row in compiled) or ""),
            "on H100 and H200" if capability in TESTED_CAPABILITIES else "never",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = (
    Table(README, "serving", serving),
    Table(BENCHMARKS, "arrivals", arrivals),
    Table(BENCHMARKS, "arrivals, a quarter", lambda: arrivals(0.25)),
    Table(BENCHMARKS, "workloads", workloads),
    Table(BENCHMARKS, "kernels", kernels),
    Table(RECURRENT_STATES, "steps that seldom write", seldom_written),
    Table(RECIPES, "plans", plans),
    Table(SUPPORTED_MODELS, "architectures", architectures),
    Table(PAPER_MODELS, "figure 19", experiment_tables.encoders),
    Table(PAPER_MODELS, "figure 20", experiment_tables.drafts),
    Table(SHARED_ARENA, "sharing", lambda: experiment_tables.sharing(seed=0)),
    Table(SHARED_ARENA, "sharing by seed", experiment_tables.sharing_by_seed),
    Table(NOTES, "models", models),
)


# Sentences


def sentences() -> Iterator[tuple[Path, str]]:
    """Yield files and sentences, or parts of sentences, with numbers from the rows."""
    makers = {
        README: (_slower, _requests_that_fit, _behind, _all_shapes),
        HOST_MEMORY: (_host_memory,),
        BENCHMARKS: (
            *(_unsteady, _shortest_launch, _read_rates, _decoded_pages, _tokens_per_page),
            *(_behind, _flashinfer, _calls, _manager),
        ),
    }
    for path, of_path in makers.items():
        for maker in of_path:
            yield path, maker()


def _slower() -> str:
    cases = [gained for of_models in replays().values() for gained in factors(of_models).values()]
    slower = [gained for gained in cases if gained < NO_SLOWER]
    return (
        f"Of {len(cases)} pairs of a model and a workload, {len(slower)} are slower than with "
        f"vLLM's manager, by at most {100 * (1 / min(cases) - 1):.1f} %."
    )


def _requests_that_fit() -> str:
    systems: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in read("cpu/table_waste.jsonl"):
        systems.setdefault((row["model"], row["lengths"]), {})[row["system"]] = row
    ratios = {
        case: (1 - found["planned"]["waste"]) / (1 - found[STOCK]["waste"])
        for case, found in systems.items()
        if all("waste" in found[name] for name in ("planned", STOCK))
    }
    num_more = sum(ratio >= MANY_MORE for ratio in ratios.values())
    most, least = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
    return (
        f"On most models as many requests fit as with vLLM: the median of {len(ratios)} pairs of a "
        f"model and request lengths is {statistics.median(ratios.values()):.2f} times as many. At "
        f"least a tenth more fit in {num_more} pairs. The least is {ratios[least]:.3f} "
        f"({least[0]}, {least[1]} requests), and the most {factor(ratios[most])} ({most[0]}, "
        f"{most[1]} requests)."
    )


def _host_memory() -> str:
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    for row in read("cpu/sweep_host_memory.jsonl"):
        seconds.setdefault((row["model"], row["workload"]), {})[row["times"]] = row["modelled_s"]
    texts: list[str] = []
    for times in (4, 1):
        gained = [found[0] / found[times] for found in seconds.values()]
        middle = statistics.geometric_mean(gained)
        texts.append(f"{middle:.2f} times as fast ({min(gained):.2f} to {max(gained):.2f})")
    return (
        f"Over {len(seconds)} pairs of a model and a workload, host memory of four times the arena "
        f"makes a modelled run {texts[0]}. Host memory as large as the arena makes it {texts[1]}."
    )


def _unsteady() -> str:
    moved = {name: unsteady(RESULTS / folder) for folder, name in GPU_NAMES.items()}
    texts = [
        f"{100 * (found[2] - 1):.0f} % on the {name}" for name, found in moved.items() if found
    ]
    return (
        f"Between two commits, a peer's time for a shape of at least 50 us moved by up to "
        f"{' and '.join(texts)}."
    )


def _shortest_launch() -> str:
    rows = [
        row
        for folder in GPU_NAMES
        for shapes in read_groups(RESULTS / folder).values()
        for shape in shapes
        for row in shape.rows.values()
    ]
    least_us = min(row["p50_us"] for row in rows)
    return f"No launch took less than {least_us:.1f} us, on either side."


def _read_rates() -> str:
    texts: list[str] = []
    for folder, name in GPU_NAMES.items():
        ours, plain = (
            max(
                row["gigabytes_per_second"] / 1000
                for row in read(f"{folder}/{file}.jsonl")
                if row[field] == value
            )
            for file, field, value in (
                ("bench_paged_attention", "implementation", OURS),
                ("roofline", "shape", "read"),
            )
        )
        texts.append(f"{ours:.2f} TB/s on an {name}, where plain reads reach {plain:.2f}")
    return f"Decoding reads up to {', and '.join(texts)}."


def _decoded_pages() -> str:
    spreads: list[float] = []
    longer: list[float] = []
    for name in ("sweep_page_size", "sweep_tokens_per_page"):
        times: dict[str, list[float]] = {}
        for row in read(f"{H100}/{name}.jsonl"):
            model, way, *_ = row["shape"].split(", ")
            if "decode" not in model:
                continue
            far = "window" in model and way == "one distance" and row["page_tokens"] > MANY_TOKENS
            times.setdefault(f"{model}, far" if far else model, []).append(row["p50_us"])
        spreads.append(
            max(max(each) / min(each) for key, each in times.items() if "far" not in key)
        )
        for key, each in times.items():
            if key.endswith("far"):
                longer += [
                    time / statistics.median(times[key.removesuffix(", far")]) for time in each
                ]
    return (
        f"The distance between pages changes the time of decoding by up to "
        f"{100 * (spreads[0] - 1):.0f} %, and the tokens of a page by up to "
        f"{100 * (spreads[1] - 1):.0f} %. The exception is Gemma 3's windows over pages of 784 "
        f"and 1,344 tokens at one distance, which take {100 * (max(longer) - 1):.0f} % longer."
    )


def _tokens_per_page() -> str:
    times = {
        row["page_tokens"]: row["p50_us"]
        for row in read(f"{H100}/sweep_tokens_per_page.jsonl")
        if row["shape"].startswith("llama-8b prefill 8k, 32 layers")
    }
    saved = {tokens: 100 * (1 - time / times[16]) for tokens, time in times.items()}
    whole = {f"{saved[tokens]:.0f}" for tokens in (64, 128, 256, 1344)}
    return (
        f"Compared with pages of 16 tokens, prompts take {' to '.join(sorted(whole))} % less time "
        f"from pages of 64, 128, 256 and 1,344 tokens. They take {saved[32]:.0f} % less from pages "
        f"of 32, and {-saved[784]:.0f} to {-saved[528]:.0f} % more from pages of 528 and 784."
    )


def _behind() -> str:
    groups = read_groups(RESULTS / H100)
    shapes = {
        shape.name.split(" ")[0]: shape for name in ("prompts", "mixed") for shape in groups[name]
    }
    peer = "flash-attention-3"
    full = [shapes[name].ratio(peer) or 0 for name in ("P1", "P2", "P3", "P6")]
    float8 = next(each for each in groups["other prompts"] if each.name.startswith("P12"))
    share = float8.rows[OURS]["teraflops"] / shapes["P1"].rows[OURS]["teraflops"]
    few = [
        shape.ratio("vllm") or 0
        for name in ("replay bf16", "replay f32")
        for shape in groups[name]
        if shape.name.endswith("b8") and not shape.name.startswith("falcon")
    ]
    return (
        f"Known losses on an H100: prompts with full attention run at {min(full):.2f} to "
        f"{max(full):.2f} of FlashAttention-3's speed. Cross attention to an image runs at "
        f"{shapes['P7'].ratio(peer):.2f} of it, and a prompt beside decoding requests at "
        f"{shapes['X1'].ratio(peer):.2f}. Prompts over float8 pages run at {share:.2f} of the "
        f"speed of 16-bit pages. With 8 requests of Nemotron-H or Granite, steps that seldom write "
        f"states run at {min(few):.2f} to {max(few):.2f} of vLLM's speed. Engines write all states "
        f"there, which was not timed."
    )


def _all_shapes() -> str:
    found = {folder: read_groups(RESULTS / folder) for folder in GPU_NAMES}
    every = [compare(found[folder][name], peer) for folder, name, peer in COMPARED]
    compared = [each for each in every if each is not None]
    num_pairs = sum(len(each.ratios) for each in compared)
    num_changed = sum(each.num_changed for each in compared)
    changed = (
        "All these kernels have changed since they were timed"
        if num_changed == num_pairs
        else f"The kernels of {num_changed} pairs have changed since they were timed"
    )
    return (
        f"Over {num_pairs} pairs of a shape and a peer, ours is slower in "
        f"{sum(each.num_behind for each in compared)}. {changed}, and were not timed again."
    )


def _flashinfer() -> str:
    words = {
        "4x2048": "four prompts of 2,048 tokens through Qwen3-Next",
        "1x8192": "one of 8,192",
        "1x2048": "one of 2,048",
    }
    peers = {
        row["shape"].split(" ")[1]: row["p50_us"]
        for row in read(f"{H100}/variants.jsonl")
        if row["implementation"] == "flashinfer cp auto"
    }
    ours = {
        shape.name.split(" ")[2]: shape.rows[OURS]["p50_us"]
        for shape in read_groups(RESULTS / H100)["delta prompts of heads"]
    }
    first, second, third = (f"{peers[key] / ours[key]:.2f} for {words[key]}" for key in words)
    return f"That kernel alone takes this share of our time: {first}, {second} and {third}."


def _calls() -> str:
    found = [row for row in read("cpu/bench_calls.jsonl") if row.get("ratio")]
    shares = [1 / row["ratio"] for row in found]
    every = read("cpu/bench_calls.jsonl")
    calls, first = ([row[name][0] for row in every] for name in (OURS, f"{OURS}, first"))
    return (
        f"Over {len(found)} operations, our calls take {min(shares):.2f} to {max(shares):.2f} of "
        f"the host time of vLLM's: {min(calls):.0f} to {max(calls):.0f} us, and {min(first):.0f} "
        f"to {max(first):.0f} us in the first call of a signature."
    )


def _manager() -> str:
    found = [row for row in read("cpu/bench_manager.jsonl") if row["table"] == "memory"]
    empty, full = ([row[f"{name}_bytes_per_page"] for row in found] for name in ("empty", "full"))
    return (
        f"The manager takes {min(empty):.0f} to {max(empty):.0f} bytes of host memory for each "
        f"small page, and {min(full):.0f} to {max(full):.0f} when all of them are cached."
    )


# Command


def write(*, checks_only: bool) -> list[str]:
    """Write all tables, or only compare them.

    Returns:
        One line for each disagreement of a text with the rows.
    """
    wrong: list[str] = []
    for path in dict.fromkeys(table.path for table in TABLES):
        text = path.read_text(encoding="utf-8")
        for table in TABLES:
            if table.path != path:
                continue
            new, count = table.put_into(text)
            if count != 1:
                wrong.append(f"{path.name}: has {count} tables called {table.name!r}, not one")
            elif new != text:
                wrong.append(f"{path.name}: the table {table.name!r} was not what the rows say")
                text = new
        if not checks_only:
            path.write_text(text, encoding="utf-8")
    for path, sentence in sentences():
        text = " ".join(path.read_text(encoding="utf-8").split())
        if sentence not in text:
            wrong.append(f"{path.name}: does not say {sentence!r}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 if a text disagreed with the rows, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.tables.readme_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and only compare")
    wrong = write(checks_only=parser.parse_args(arguments).check)
    print("\n".join(wrong) or "all texts say what the rows do")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

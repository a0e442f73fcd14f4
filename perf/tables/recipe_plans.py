"""Plans of the models in docs/recipes.md: requests that fit with our planner and with vLLM's.

    python -m perf.tables.recipe_plans

Each row holds the numbers that `jenga plan MODEL --gpu GPU --tp N --json` prints. No GPU is needed.
The rows go to `perf/results/cpu/recipe_plans.jsonl`. `python -m perf.tables.readme_tables` then
writes the table of the page.
"""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jenga.cli import main as run_jenga
from perf.sweeps.table_waste import machine_line

ROWS = Path(__file__).parents[1] / "results" / "cpu" / "recipe_plans.jsonl"

LENGTH_TOKENS = (1024, 8192, 32768)
"""Lengths of the requests that the table counts, in tokens."""

OURS, STOCK = "planned", "vllm"
"""Names of the systems in a plan's JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model on the GPUs on which the page serves it.

    Attributes:
        title: Name of the model as its publisher writes it.
        model: Name of the model in `jenga plan`.
        gpu: Kind of GPU in the notation of `jenga plan`.
        num_gpus: Number of tensor-parallel ranks.
    """

    title: str
    model: str
    gpu: str
    num_gpus: int = 1

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `jenga` that print the plan."""
        ranks = ("--tp", str(self.num_gpus)) if self.num_gpus > 1 else ()
        return ("plan", self.model, "--gpu", self.gpu, *ranks)


H100, H200 = "H100-80G", "H200"

RECIPES = (
    Recipe(title="Gemma 3 27B", model="gemma-3-27b", gpu=H100),
    Recipe(title="Gemma 4 26B-A4B", model="gemma-4-26b-a4b", gpu=H100),
    Recipe(title="Gemma 4 31B", model="gemma-4-31b", gpu=H200),
    Recipe(title="gpt-oss-20b", model="gpt-oss-20b", gpu=H100),
    Recipe(title="gpt-oss-120b", model="gpt-oss-120b", gpu=H100),
    Recipe(title="Qwen3-Next 80B-A3B", model="qwen3-next-80b-a3b", gpu=H200, num_gpus=2),
    Recipe(title="Qwen3.5 27B", model="qwen3.5-27b", gpu=H100),
    Recipe(title="Nemotron-H 8B", model="nemotron-h-8b", gpu=H100),
    Recipe(title="Granite 4.0 H Small", model="granite-4.0-h-small", gpu=H200),
    Recipe(title="Falcon-H1 7B", model="falcon-h1-7b", gpu=H100),
    Recipe(title="Llama 4 Scout", model="llama-4-scout", gpu=H100, num_gpus=4),
)
"""Models of the page, in its order."""


def plan_row(recipe: Recipe, *, with_vllm: bool) -> dict[str, Any]:
    """Run `jenga plan`, and return the numbers of the table.

    Args:
        recipe: The model and its GPUs.
        with_vllm: Whether vLLM's planner runs too, which requires vLLM.

    Raises:
        RuntimeError: The command failed. It printed the reason.
    """
    options = () if with_vllm else ("--without-vllm",)
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run_jenga([*recipe.arguments, "--json", *options])
    if code:
        msg = f"jenga {' '.join(recipe.arguments)} ended with exit status {code}"
        raise RuntimeError(msg)
    plan = json.loads(printed.getvalue())
    systems = {
        system["name"]: {
            "num_requests": {
                str(fit["num_tokens"]): fit["num_requests"]
                for fit in system["fits"]
                if fit["num_tokens"] in LENGTH_TOKENS
            },
            "longest_tokens": system["longest_tokens"],
        }
        for system in plan["systems"]
        if system["name"] in {OURS, STOCK}
    }
    tables = plan["geometry"]["page_tables"]
    return {
        "model": recipe.model,
        "gpu": recipe.gpu,
        "num_gpus": recipe.num_gpus,
        "arena_bytes": plan["arena_bytes"],
        "num_page_tables": len(tables),
        "large_page_bytes": plan["geometry"]["large_page_bytes"],
        "small_pages_per_large_page": {
            table["name"]: table["small_pages_per_large_page"] for table in tables
        },
        "systems": systems,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows that the command wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    argparse.ArgumentParser(
        prog="python -m perf.tables.recipe_plans",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    machine = {"machine": machine_line()}
    rows = [plan_row(recipe, with_vllm=True) | machine for recipe in RECIPES]
    ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

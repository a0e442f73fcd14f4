"""The tables of docs/paper-models.md: every model of the paper, classes and tests that exist."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jenga.vllm_plugin.models.registered_models import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper-models.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/\S+::\S+)`")

PAPER = {
    "Gemma-2",
    "Hymba",
    "InternVL",
    "InternVL2",
    "Jamba",
    "Jamba-1.5",
    "LLaVA",
    "LLaVA-OneVision",
    "Llama 3.1",
    "Llama 3.2 11B Vision",
    "Mamba",
    "Ministral",
    "NVLM",
    "PaliGemma 2",
    "Phi-3 Vision",
    "PyramidInfer",
    "PyramidKV",
    "RWKV",
    "character.ai",
}
"""Models that the paper names in its text and tables, or cites as examples of a layer."""


def rows_of(heading):
    """Get the cells of a section's table, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_model_of_the_paper_has_one_row():
    names = [name for row in rows_of("Models") for name in re.split(r", (?!\d)", row[0])]

    found = [
        next((model for model in sorted(PAPER, key=len, reverse=True) if model in name), name)
        for name in names
    ]

    assert sorted(found) == sorted(PAPER)


def test_every_row_names_a_test_or_is_of_what_is_not_served():
    for row in rows_of("Models") + rows_of("Uses"):
        assert TEST.search(row[-1]) or row[1].startswith("not served"), row[0]


def test_every_class_is_in_vllm_or_ours():
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    registry = Path(vllm.origin).parent / "model_executor" / "models" / "registry.py"
    text = registry.read_text(encoding="utf-8")

    classes = [name for row in rows_of("Models") for name in re.findall(r"`([A-Z]\w+)`", row[1])]

    run = [row for row in rows_of("Models") if not row[1].startswith(("not served", "[refused]"))]
    assert len(classes) == len(run) > 0
    assert all(f'"{name}"' in text or name in MODELS for name in classes)


def test_every_test_of_the_tables_exists():
    pytest.importorskip("vllm", reason="the engine's tests need it to be collected")
    tests = sorted(set(TEST.findall(PAGE)))

    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert collected.returncode == 0, collected.stdout[-4000:] + collected.stderr[-4000:]
    names = [re.sub(r"\[.*", "", line) for line in collected.stdout.splitlines() if "::" in line]
    assert set(names) == {re.sub(r"\[.*", "", name) for name in tests}

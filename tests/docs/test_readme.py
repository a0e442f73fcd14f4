"""Examples in README, CONTRIBUTING and docs run, and the files and modules that they name exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jenga
from jenga.eviction.known import EVICTION_POLICIES

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
TEXTS = ("README.md", "CONTRIBUTING.md", "perf/results/cpu/NOTES.md", *DOCS)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def examples_of(name):
    """Heading of a section -> its examples."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text_of(name), re.MULTILINE | re.DOTALL)
    return {
        heading: re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        for heading, section in sections
    }


def run(name, heading):
    """Run the one example of a section; return the names it leaves."""
    (example,) = examples_of(name)[heading]
    names = {}
    exec(compile(example, f"{name}, {heading}", "exec"), names)
    return names


def exists(module):
    """Whether a dotted name leads to a module, to what it has, or to an exported name."""
    path = ROOT
    if module.removeprefix("jenga.") in jenga.__all__:
        return True
    for part in module.split("."):
        path /= part
        if path.with_suffix(".py").exists():
            return True
        if not path.is_dir():
            return False
    return True


@pytest.mark.parametrize("name", TEXTS)
def test_modules_that_are_named_exist(name):
    # Attributes of traces, in the section on them, are written like modules.
    text = re.sub(r"^## Traces$.*?(?=^## |\Z)", "", text_of(name), flags=re.DOTALL | re.MULTILINE)
    modules = set(re.findall(r"(?<!/)\b(?:perf|jenga|jenga_kernels)(?:\.[a-z]\w*)+", text))

    # Patterns such as `perf.kernels.bench_<operation>` name none.
    assert not {module for module in modules if not module.endswith("_") and not exists(module)}


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    paths = set(
        re.findall(
            r"\b(?:perf|jenga|jenga_kernels|tests)/[\w/.-]*\w\.(?:py|md|jsonl)\b", text_of(name)
        )
    )

    assert not {path for path in paths if not (ROOT / path).exists()}


def test_examples_are_run_here_or_are_an_engine():
    found = {
        (name, heading)
        for name in TEXTS
        for heading, examples in examples_of(name).items()
        if examples
    }

    assert found == {
        ("docs/configuration.md", "Select the backend"),
        ("docs/extending.md", "Add an eviction policy"),
        ("docs/kernels.md", "Example"),
        ("docs/layer-types.md", "A type of your own"),
        ("docs/manager.md", "Example"),
    }


def test_example_of_the_kernels_runs():
    pytest.importorskip("torch")
    names = run("docs/kernels.md", "Example")
    k_pages, arena = names["k_pages"], names["arena"]

    assert names["out"].shape == (21, 8, 64)
    assert names["out"].isfinite().all()
    # The window of a prompt's first token is itself.
    assert (names["out"][0].view(2, 4, 64) - names["v"][0][:, None]).abs().max() < 1e-5
    assert (k_pages[5, 11] == names["k"][20]).all()
    assert (arena[:, 7, 0] == k_pages).all()
    assert arena[:, :7].abs().max() == arena[:, 8:].abs().max() == 0


def test_example_of_a_layer_type_runs():
    """It runs in a process of its own, because a type is registered once in each process."""
    (example,) = examples_of("docs/layer-types.md")["A type of your own"]
    check = "\nmanager.check(); print(type(geometry.page_tables[0].layer_type).__name__)"

    done = subprocess.run(
        [sys.executable, "-c", example + check],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "PaperWindow\n"


def test_example_of_the_manager_runs(capsys):
    manager = run("docs/manager.md", "Example")["manager"]

    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(manager.geometry.page_tables) == 2
    assert {hit_tokens for _, hit_tokens, _ in printed} == {"4992"}
    held = {name: int(num_pages) for name, _, num_pages in printed}
    assert held == {"full": 312, "sliding": 256}
    manager.check()


def test_example_of_an_eviction_policy_runs(capsys):
    names = run("docs/extending.md", "Add an eviction policy")

    assert 0 < names["replay"].hit_tokens < names["replay"].prompt_tokens
    assert names["arena"].num_evicted > 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "MostForItsBytes",
        *(policy.__name__ for policy in EVICTION_POLICIES.values()),
    ]
    assert all(line.endswith("of prompt tokens found") for line in lines)

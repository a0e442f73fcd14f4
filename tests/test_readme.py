"""What README shows runs."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = {
    heading: re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    for heading, section in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL
    )
}


def run(heading):
    """Run the one example of a section; return the names it leaves."""
    (example,) = EXAMPLES[heading]
    names = {}
    exec(compile(example, f"README.md, {heading}", "exec"), names)
    return names


def test_examples_are_run_here_or_are_an_engine():
    assert {heading for heading, found in EXAMPLES.items() if found} == {
        "Switching it on",
        "The kernels alone",
        "The manager alone",
    }


def test_example_of_the_kernels_runs():
    pytest.importorskip("torch")
    names = run("The kernels alone")
    k_pages, arena = names["k_pages"], names["arena"]

    assert names["out"].shape == (21, 8, 64)
    assert names["out"].isfinite().all()
    # The window of a prompt's first token is itself.
    assert (names["out"][0].view(2, 4, 64) - names["v"][0][:, None]).abs().max() < 1e-5
    assert (k_pages[5, 11] == names["k"][20]).all()
    assert (arena[:, 7, 0] == k_pages).all()
    assert arena[:, :7].abs().max() == arena[:, 8:].abs().max() == 0


def test_example_of_the_manager_runs(capsys):
    manager = run("The manager alone")["manager"]

    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(manager.geometry.page_tables) == 2
    assert {hit_tokens for _, hit_tokens, _ in printed} == {"4992"}
    held = {name: int(num_pages) for name, _, num_pages in printed}
    assert held == {"full": 312, "sliding": 256}
    manager.check()

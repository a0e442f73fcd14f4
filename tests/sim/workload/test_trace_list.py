"""What `jenga replay --list-traces` and the docs say of traces is what is read."""

import re
from pathlib import Path

import pytest

from jenga.cli import main
from jenga.sim.workload.sources import FORMATS, GENERATORS, arguments_of, format_of, open_source
from jenga.sim.workload.traces import LENGTH_COLUMNS

DOCS = Path(__file__).parents[3] / "docs" / "planning-and-replaying.md"
SAMPLES = {
    name: [cell.strip("`") for cell in sample.split("<br>")]
    for name, sample in re.findall(
        r"^\| `(\w+)` \| (`.*?`) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE
    )
    if name in FORMATS
}

FIRST = {
    "mooncake": (1.5, 1100, 5),
    "weka": (0.5, 150, 20),
    # Five and thirteen bytes of text.
    "sharegpt": (0.0, 2, 4),
    "wildchat": (0.0, 2, 4),
    "azure": (0.0, 374, 44),
    "burstgpt": (0.0, 472, 18),
    "lengths": (0.0, 374, 44),
}
"""Arrival in seconds, tokens of the prompt, and tokens of the output of each sample."""


def test_the_docs_have_a_sample_of_every_format():
    assert set(SAMPLES) == set(FORMATS) == set(FIRST)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_the_docs_is_read_as_its_format(name, tmp_path):
    path = tmp_path / "trace"
    path.write_text("\n".join(SAMPLES[name]) + "\n", encoding="utf-8")

    (request,) = open_source(str(path))

    assert format_of(path) == name
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == FIRST[name]


def test_the_docs_name_all_columns_of_lengths():
    text = DOCS.read_text(encoding="utf-8")

    assert all(f"`{name}`" in text or f"`{name}," in text for name, _ in LENGTH_COLUMNS)


def test_every_trace_is_listed_with_its_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--list-traces"])

    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert ended.value.code == 0
    assert max(map(len, printed.splitlines())) <= 100
    for name in GENERATORS | FORMATS:
        assert f" {name}: " in words
        assert ", ".join(arguments_of(name)) in words


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "servegen"])
def test_the_listed_values_are_the_defaults(name):
    listed = open_source(f"{name}:{','.join(arguments_of(name))}", limit=20)

    assert list(listed) == list(open_source(name, limit=20))


def test_arguments_that_must_be_given_are_listed_as_such():
    assert list(arguments_of("servegen"))[:2] == ["path=...", "workload=..."]
    assert "most_think_s=..." in arguments_of("weka")

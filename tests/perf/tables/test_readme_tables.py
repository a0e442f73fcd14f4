"""Numbers of README, of notes and of summaries are those of the committed rows."""

import shutil

import pytest

from perf.tables import readme_tables, table_gpu
from perf.tables.readme_tables import GPU_NAMES, RESULTS, factor, write


def test_texts_say_what_the_rows_do():
    wrong = write(checks_only=True)

    assert not wrong, "\n".join([*wrong, "python -m perf.tables.readme_tables mends the tables"])


@pytest.mark.parametrize("gpu", GPU_NAMES)
def test_summary_of_a_gpu_says_what_its_rows_do(gpu):
    said = (RESULTS / gpu / "summary.md").read_text(encoding="utf-8")

    assert said == table_gpu.summary(RESULTS / gpu), (
        f"run python -m perf.tables.table_gpu {RESULTS / gpu}"
    )


def test_a_table_is_written_anew_between_its_comments(tmp_path, monkeypatch):
    text = tmp_path / "text.md"
    table = readme_tables.Table(text, "one", lambda: ["| a |", "| \\1 |"])
    begin, end = "<!-- one: made by python -m perf.tables.readme_tables -->", "<!-- end of one -->"
    text.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    monkeypatch.setattr(readme_tables, "TABLES", (table,))
    monkeypatch.setattr(readme_tables, "sentences", lambda: iter([(text, "before and after")]))

    found = write(checks_only=True)
    assert "old" in text.read_text()
    assert write(checks_only=False) == found
    assert found == [
        "text.md: the table 'one' was not what the rows say",
        "text.md: does not say 'before and after'",
    ]
    assert text.read_text() == f"before\n{begin}\n| a |\n| \\1 |\n{end}\nafter\n"
    assert write(checks_only=True) == found[1:]


def test_a_text_without_its_table_is_named(tmp_path, monkeypatch):
    text = tmp_path / "text.md"
    text.write_text("nothing\n")
    monkeypatch.setattr(
        readme_tables, "TABLES", (readme_tables.Table(text, "one", lambda: ["| a |"]),)
    )
    monkeypatch.setattr(readme_tables, "sentences", lambda: iter(()))

    assert write(checks_only=True) == ["text.md: has 0 tables called 'one', not one"]


def test_a_table_may_be_empty_at_first(tmp_path, monkeypatch):
    text = tmp_path / "text.md"
    begin, end = "<!-- one: made by python -m perf.tables.readme_tables -->", "<!-- end of one -->"
    text.write_text(f"{begin}\n{end}\n")
    monkeypatch.setattr(
        readme_tables, "TABLES", (readme_tables.Table(text, "one", lambda: ["| a |"]),)
    )
    monkeypatch.setattr(readme_tables, "sentences", lambda: iter(()))

    write(checks_only=False)

    assert text.read_text() == f"{begin}\n| a |\n{end}\n"


def test_factors_keep_the_digits_that_tell_something():
    assert [factor(value) for value in (0.987, 1.004, 1.996, 5.83, 20.94)] == [
        "0.99",
        "1.00",
        "2.00",
        "5.8",
        "20.9",
    ]


@pytest.mark.parametrize("folder", ["h200"])
def test_a_row_less_is_noticed(tmp_path, monkeypatch, folder):
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("experiments", "*.svg"))
    path = results / folder / "bench_kv_store.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))
    monkeypatch.setattr(readme_tables, "RESULTS", results)

    assert any("kernels" in line for line in write(checks_only=True))

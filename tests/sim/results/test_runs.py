"""Runs as they are read back from rows."""

from itertools import pairwise

import pytest

from jenga.sim.results.rows import write_rows
from jenga.sim.results.runs import MAX_STEPS, read_runs
from tests.sim.made_rows import made_run, made_steps, made_summary, write_runs


def test_runs_of_several_files_come_in_order_with_their_rows(tmp_path):
    files = [write_runs(tmp_path / "first.jsonl"), write_runs(tmp_path / "second.jsonl")]

    runs = read_runs(files)

    assert [run.row.manager for run in runs] == ["jenga", "vllm"] * 2
    assert [len(run.steps) for run in runs] == [100, 200] * 2
    assert runs[1].summary.num_steps == 200


def test_labels_are_what_tells_runs_apart(tmp_path):
    file = tmp_path / "rows.jsonl"
    for run, fields in {
        "a": {"options": {"seed": 1, "rate": 2}},
        "b": {"options": {"seed": 1, "rate": 3}},
        "c": {"manager": "vllm", "options": {"seed": 1, "rate": 3}},
        "d": {"manager": "vllm", "options": {"seed": 1, "rate": 3}},
    }.items():
        write_rows(file, [made_run(run, **fields)])

    labels = [run.label for run in read_runs([file])]

    assert labels == ["jenga rate=2", "jenga rate=3", "vllm rate=3 (3)", "vllm rate=3 (4)"]


def test_many_steps_are_thinned_evenly_and_the_first_is_kept(tmp_path):
    file = tmp_path / "rows.jsonl"
    num_steps = 5 * MAX_STEPS
    write_rows(file, [made_run(), *made_steps(num_steps=num_steps)])

    (run,) = read_runs([file])

    numbers = [step.step for step in run.steps]
    assert MAX_STEPS // 2 < len(numbers) <= MAX_STEPS
    assert numbers[0] == 1
    assert {after - before for before, after in pairwise(numbers)} == {8}


def test_parameter_is_an_option_or_stands_in_the_trace(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, [made_run(trace="articles:n=24,tokens=30000", options={"rate": 2.5})])

    (run,) = read_runs([file])

    assert (run.parameter("n"), run.parameter("tokens")) == (24, 30_000)
    assert run.parameter("rate") == 2.5
    with pytest.raises(ValueError, match=r"rows.jsonl: run 'a' must have a number 'okens'"):
        run.parameter("okens")


def test_rows_without_a_run_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, [made_summary("lost")])
    with pytest.raises(ValueError, match="row of run 'lost' comes before"):
        read_runs([file])

    file.write_text("")
    with pytest.raises(ValueError, match=r"at least one run, got none in .*rows.jsonl"):
        read_runs([file])


def test_run_that_was_cut_short_has_no_summary(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, [made_run(), *made_steps()])

    (run,) = read_runs([file])

    with pytest.raises(ValueError, match="run 'a' has no summary"):
        run.required_summary()

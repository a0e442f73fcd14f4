"""A file of rows is read before it grows, and what is none is left as it was."""

import json

import pytest

from jenga.sim.replays.replay import constant_clock
from jenga.sim.replays.row_file import RowFile
from jenga.sim.replays.session import Machine, Running, Settings, Trace, run_row
from jenga.sim.results.rows import RunRow, row_line
from jenga.sim.workload.sources import open_source
from jenga.spec import FullAttention, Layer, ModelSpec

MODEL = ModelSpec(
    name="full", layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),)
)
MACHINE = Machine(model=MODEL, arena_bytes=1 << 20, clock=constant_clock(0.5))
TRACE = Trace("articles", lambda: open_source("articles:n=2,questions=2,tokens=160,output=4"))
ROW = row_line(
    RunRow(run="old", model="m", arena_bytes=1, manager="jenga", trace="t", num_requests=1)
)


@pytest.mark.parametrize(
    "text", ["notes", "notes\nmore notes", '{"kind": "nothing"}\n', f"{ROW}notes", f"notes\n{ROW}"]
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match=r"notes.txt:\d: "):
        RowFile(path)

    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("num_chars", [1, 10, 40])
def test_half_a_row_at_the_end_is_cut_off_when_a_replay_adds_rows(tmp_path, num_chars):
    path = tmp_path / "rows.jsonl"
    path.write_text(ROW + ROW[:num_chars], encoding="utf-8")
    row = run_row(MACHINE, "jenga", TRACE, Settings())

    out = RowFile(path)
    assert path.read_text(encoding="utf-8") == ROW + ROW[:num_chars]
    list(out.written(Running(row, MACHINE, TRACE, Settings())))

    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[0] == ROW
    assert json.loads(lines[1])["run"] == row.run


def test_half_a_row_that_another_replay_is_writing_is_not_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = run_row(MACHINE, "jenga", TRACE, Settings())
    running = RowFile(path).written(Running(row, MACHINE, TRACE, Settings()))
    next(running)
    with path.open("a", encoding="utf-8") as file:
        file.write(ROW[:40])

    out = RowFile(path)
    with pytest.raises(ValueError, match="another replay is writing to it"):
        next(out.written(Running(row, MACHINE, TRACE, Settings())))

    assert path.read_text(encoding="utf-8").endswith(ROW[:40])
    running.close()


def test_the_lines_beside_a_file_of_parquet_are_no_link(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    victim = tmp_path / "victim"
    victim.write_text("", encoding="utf-8")
    (tmp_path / "rows.parquet.jsonl").symlink_to(victim)

    with pytest.raises(ValueError, match=r"rows.parquet.jsonl must be a file of rows or not exist"):
        RowFile(tmp_path / "rows.parquet")

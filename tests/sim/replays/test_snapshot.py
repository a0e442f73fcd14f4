"""A snapshot is unpickled only if this user and this code wrote it; any other one starts over."""

import os
import pickle
import stat
from pathlib import Path

import pytest

from jenga.cli import main
from jenga.sim.files.user_key import KEY_BYTES, key_path, user_key
from jenga.sim.files.whole_files import written_whole
from jenga.sim.replays.replay import constant_clock
from jenga.sim.replays.row_file import RowFile
from jenga.sim.replays.session import Machine, Running, Settings, Trace, replay_rows, run_row
from jenga.sim.results.rows import read_rows
from jenga.sim.workload.sources import open_source
from jenga.spec import FullAttention, Layer, ModelSpec

MODEL = ModelSpec(
    name="full", layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),)
)
MACHINE = Machine(model=MODEL, arena_bytes=1 << 20, clock=constant_clock(0.5))
SETTINGS = Settings(every=3)
CUT_STEP = 9


class CutError(Exception):
    """The power failed."""


def trace_of(text="articles:n=3,questions=4,tokens=320,output=20"):
    return Trace(text, lambda: open_source(text))


def cut(path, **options):
    """Run a replay until it is cut; its row."""

    def on_step(_replay, step):
        if step.number == CUT_STEP:
            raise CutError

    row = run_row(MACHINE, "jenga", trace_of(), SETTINGS)
    running = Running(row, MACHINE, trace_of(), SETTINGS)
    with pytest.raises(CutError):
        list(RowFile(path, snapshot_every_s=0, **options).written(running, on_step))
    return row


def started_over(path, row):
    """Give a replay that was cut again; the warnings, having seen that its rows are right."""
    warnings = []
    out = RowFile(path, warn=warnings.append)
    snapshot = out.snapshot_of(row.run)
    assert snapshot is None
    list(out.written(Running(row, MACHINE, trace_of(), SETTINGS)))
    assert list(read_rows(path)) == list(replay_rows(row, MACHINE, trace_of(), SETTINGS))
    return warnings


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "code was run")


@pytest.mark.parametrize("header", [b"", b'["code", "run"]\n', pickle.dumps("code")])
def test_a_pickle_that_this_user_did_not_sign_is_not_run(tmp_path, header):
    path, proof = tmp_path / "rows.jsonl", tmp_path / "proof"
    row = cut(path)
    evil = header + pickle.dumps(Evil(proof)) + bytes(32)
    path.with_name("rows.jsonl.snapshot").write_bytes(evil)

    (warning,) = started_over(path, row)

    assert not proof.exists()
    assert "rows.jsonl.snapshot is damaged, or this user did not write it" in warning


@pytest.mark.parametrize("place", [0, 40, -40, -1], ids=["header", "begin", "end", "signature"])
def test_a_snapshot_with_one_bit_changed_starts_over_with_a_warning(tmp_path, place):
    path = tmp_path / "rows.jsonl"
    row = cut(path)
    snapshot = path.with_name("rows.jsonl.snapshot")
    data = bytearray(snapshot.read_bytes())
    data[place] ^= 1
    snapshot.write_bytes(data)

    (warning,) = started_over(path, row)

    assert "is damaged" in warning
    assert "the replay starts over" in warning


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 32, 33, 1000])
def test_a_snapshot_that_was_cut_short_starts_over_with_a_warning(tmp_path, num_bytes):
    path = tmp_path / "rows.jsonl"
    row = cut(path)
    snapshot = path.with_name("rows.jsonl.snapshot")
    snapshot.write_bytes(snapshot.read_bytes()[:num_bytes])

    assert len(started_over(path, row)) == 1


def test_a_snapshot_of_another_user_starts_over_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    row = cut(path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))

    (warning,) = started_over(path, row)

    assert "this user did not write it" in warning


def test_a_snapshot_of_other_code_starts_over_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    row = cut(path)
    monkeypatch.setattr("jenga.sim.replays.snapshot._code", lambda: "changed")

    (warning,) = started_over(path, row)

    assert "is of another version of the code" in warning


def test_a_pipe_in_the_place_of_a_snapshot_starts_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = cut(path)
    snapshot = path.with_name("rows.jsonl.snapshot")
    snapshot.unlink()
    os.mkfifo(snapshot)  # to open it is to wait for ever

    assert started_over(path, row) == []


def test_a_replay_without_a_key_runs_to_its_end_without_snapshots(tmp_path, state_folder):
    state_folder.joinpath("jenga").write_text("in the way", encoding="utf-8")
    path, warnings = tmp_path / "rows.jsonl", []

    cut(path, warn=warnings.append)

    assert [path] == list(tmp_path.iterdir())
    (warning,) = warnings
    assert warning.startswith("the replay goes on without snapshots: ")


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_key_that_others_may_read_or_write_is_not_used(tmp_path, mode):
    user_key()
    key_path().chmod(mode)
    path, warnings = tmp_path / "rows.jsonl", []

    cut(path, warn=warnings.append)

    assert "snapshot.key must be a file of 32 bytes that only this user may read" in warnings[0]
    assert len(warnings) == 1


@pytest.mark.parametrize("num_bytes", [0, KEY_BYTES - 1, KEY_BYTES + 1])
def test_a_key_of_another_length_is_refused(num_bytes):
    user_key()
    key_path().write_bytes(bytes(num_bytes))

    with pytest.raises(ValueError, match="must be a file of 32 bytes"):
        user_key()


def test_a_key_is_made_once_and_is_for_this_user_alone(state_folder):
    key = user_key()

    assert key == user_key()
    assert len(key) == KEY_BYTES
    assert key_path() == state_folder / "jenga" / "snapshot.key"
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(key_path().parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("folder", [None, "", "state"])
def test_a_state_folder_that_is_not_absolute_is_passed_over(monkeypatch, tmp_path, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    if folder is None:
        monkeypatch.delenv("XDG_STATE_HOME")
    else:
        monkeypatch.setenv("XDG_STATE_HOME", folder)

    assert key_path() == tmp_path / ".local" / "state" / "jenga" / "snapshot.key"


def test_a_replay_of_a_user_without_a_home_runs_without_snapshots(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    warnings = []

    cut(tmp_path / "rows.jsonl", warn=warnings.append)

    assert len(warnings) == 1
    assert "this user has no home folder, and XDG_STATE_HOME names none" in warnings[0]


def test_a_snapshot_is_for_this_user_alone_and_no_link_is_followed(tmp_path):
    path, victim = tmp_path / "rows.jsonl", tmp_path / "victim"
    victim.write_text("kept", encoding="utf-8")
    path.with_name("rows.jsonl.snapshot.part").symlink_to(victim)

    cut(path)

    assert victim.read_text(encoding="utf-8") == "kept"
    snapshot = path.with_name("rows.jsonl.snapshot")
    assert stat.S_IMODE(snapshot.stat().st_mode) == 0o600
    assert not snapshot.is_symlink()


def test_a_file_that_is_not_written_whole_leaves_the_one_before(tmp_path):
    path = tmp_path / "file"
    path.write_text("before", encoding="utf-8")

    def write_half():
        with written_whole(path) as file:
            file.write(b"half")
            raise CutError

    with pytest.raises(CutError):
        write_half()

    assert path.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_line_warns_of_a_foreign_snapshot_and_starts_over(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = ["replay", "--model", "llama-3.2-1b", "--arena", "40MB", "--quiet"]
    arguments += ["--trace", "articles:n=3,questions=2,tokens=160,output=4", "--out", str(path)]
    main(arguments)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.splitlines(keepends=True)[0], encoding="utf-8")
    path.with_name("rows.jsonl.snapshot").write_bytes(pickle.dumps("evil"))
    capsys.readouterr()

    assert main(arguments) == 0

    assert path.read_text(encoding="utf-8") == whole
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("jenga: warning: ")
    assert "the replay starts over" in printed.err

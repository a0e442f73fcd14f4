"""What takes long to make is made once in a run, by the worker that asks first."""

import threading
import time

import pytest

from tests.once import folder_of_run, made_once


def test_what_is_there_is_not_made_again(tmp_path, tmp_path_factory):
    asked = []

    def make(folder):
        asked.append(folder)
        (folder / "numbers.txt").write_text(str(len(asked)))

    places = [made_once(tmp_path.name, make, tmp_path_factory) for _ in range(2)]

    assert len(asked) == 1
    assert places[0] == places[1]
    assert (places[0] / "numbers.txt").read_text() == "1"


def test_what_could_not_be_made_is_tried_again_in_a_new_folder(tmp_path, tmp_path_factory):
    def fail(folder):
        (folder / "half.txt").write_text("")
        msg = "not today"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="not today"):
        made_once(tmp_path.name, fail, tmp_path_factory)
    made = made_once(tmp_path.name, lambda folder: (folder / "whole.txt").touch(), tmp_path_factory)

    assert [each.name for each in made.iterdir()] == ["whole.txt"]


def test_others_wait_until_all_is_made(tmp_path, tmp_path_factory):
    begun, may_end, found = threading.Event(), threading.Event(), []

    def make(folder):
        begun.set()
        may_end.wait()
        (folder / "whole.txt").touch()

    def ask():
        found.append(made_once(tmp_path.name, make, tmp_path_factory))

    first = threading.Thread(target=ask)
    first.start()
    begun.wait()
    second = threading.Thread(target=ask)
    second.start()
    time.sleep(0.2)
    assert not found
    may_end.set()
    first.join()
    second.join()

    assert found[0] == found[1]
    assert (found[0] / "whole.txt").exists()


def test_workers_have_one_folder(tmp_path_factory, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    alone = folder_of_run(tmp_path_factory)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")

    assert folder_of_run(tmp_path_factory) == alone.parent

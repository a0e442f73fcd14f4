"""The memory log: what is wrong with its file is said before an engine starts, and stops none."""

import json
import os
from pathlib import Path

import pytest

from jenga.geometry import exact_lcm
from jenga.manager import Manager
from jenga.spec import FullAttention, Layer, ModelSpec
from jenga.vllm_plugin.metrics import memory_log
from jenga.vllm_plugin.metrics.memory_log import MemoryLog, check_memory_log, open_memory_log
from jenga.vllm_plugin.settings.environment import read_settings

pytestmark = pytest.mark.vllm


@pytest.fixture
def manager():
    layers = (FullAttention(name="full", layers=(Layer(name="layer", slot_bytes=64),)),)
    geometry = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    return Manager(geometry, num_large_pages=8)


@pytest.fixture
def warnings(monkeypatch):
    """Get what the log's module warns of."""
    warned = []
    monkeypatch.setattr(
        memory_log.logger, "warning", lambda text, *args: warned.append(text % args)
    )
    return warned


def make_folder(path):
    path.mkdir()


def make_read_only(path):
    # A folder on the way that is a file cannot be written by anybody, root included.
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (make_folder, "it is a folder"),
        (os.mkfifo, "it is a pipe or a device, not a file"),
        (make_read_only, "Not a directory"),
        (lambda path: path.parent.rmdir(), "No such file or directory"),
    ],
    ids=["a_folder", "a_pipe", "an_unwritable_file", "a_missing_folder"],
)
def test_a_log_that_cannot_be_written_is_refused_by_variable_and_path(spoil, reason, tmp_path):
    path = tmp_path / "logs" / "log.jsonl"
    path.parent.mkdir()
    spoil(path)

    with pytest.raises(ValueError, match=f"^JENGA_MEMORY_LOG='{path}' cannot be written: {reason}"):
        check_memory_log(read_settings({"JENGA_MEMORY_LOG": str(path)}))


def test_a_log_that_can_be_written_is_made_and_keeps_what_it_has(tmp_path):
    path = tmp_path / "log.jsonl"

    for text in ("", "earlier\n"):
        check_memory_log(read_settings({"JENGA_MEMORY_LOG": str(path)}))
        assert path.read_text() == text
        path.write_text("earlier\n")
    check_memory_log(read_settings({}))


def test_a_log_that_can_no_longer_be_opened_is_left_out(manager, tmp_path, monkeypatch, warnings):
    monkeypatch.setenv("JENGA_MEMORY_LOG", str(tmp_path))

    assert open_memory_log(manager) is None

    assert f"JENGA_MEMORY_LOG='{tmp_path}' cannot be written: it is a folder" in warnings[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is full")
def test_a_disk_that_is_full_ends_the_log_with_one_warning(manager, warnings):
    log = MemoryLog(Path("/dev/full"), manager)

    for _ in range(3):
        log.step()

    assert len(warnings) == 1
    assert "JENGA_MEMORY_LOG='/dev/full' is no longer written" in warnings[0]
    assert "No space left on device" in warnings[0]


def test_a_disk_that_fills_up_later_ends_the_log_with_one_warning(
    manager, tmp_path, monkeypatch, warnings
):
    log = MemoryLog(tmp_path / "log.jsonl", manager)
    log.step()

    class FullDisk:
        def write(self, _):
            raise OSError(28, "No space left on device")

        flush = close = lambda _: None

    log._file.stream.close()
    monkeypatch.setattr(log._file, "stream", FullDisk())
    for _ in range(3):
        log.step()

    assert len(warnings) == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_a_log_of_bounded_size_is_rotated_and_each_file_begins_with_the_geometry(
    manager, tmp_path, monkeypatch
):
    path, limit = tmp_path / "log.jsonl", 4096
    monkeypatch.setenv("JENGA_MEMORY_LOG", str(path))
    monkeypatch.setenv("JENGA_MEMORY_LOG_BYTES", str(limit))
    for _ in range(2):  # engines, of which the second finds the first one's files
        log = open_memory_log(manager)
        for _ in range(50):
            log.step()

    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log.jsonl", "log.jsonl.1"]
    for file in files:
        first, *steps = map(json.loads, file.read_text().splitlines())
        assert first["geometry"]["name"] == manager.geometry.name
        assert steps
        assert file.stat().st_size < limit
    numbers = [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]]
    assert numbers == list(range(numbers[0], 50))


def test_a_log_whose_limit_is_less_than_a_line_has_the_latest_step(manager, tmp_path):
    log = MemoryLog(tmp_path / "log.jsonl", manager, max_bytes=1)

    for _ in range(3):
        log.step()

    header, step = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert header["geometry"]
    assert step["step"] == 2


def test_a_file_that_cannot_be_renamed_ends_the_log(manager, tmp_path, warnings):
    (tmp_path / "log.jsonl.1").mkdir()
    log = MemoryLog(tmp_path / "log.jsonl", manager, max_bytes=1000)

    for _ in range(20):
        log.step()

    assert len(warnings) == 1
    assert "is no longer written" in warnings[0]


def test_a_step_says_which_checkpoints_were_lost_since_the_one_before(tmp_path):
    layers = (FullAttention(name="full", layers=(Layer(name="layer", slot_bytes=64),)),)
    geometry = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(geometry, num_large_pages=8, prefix_caching=True)
    log = MemoryLog(tmp_path / "log.jsonl", manager)
    for name in ("first", "second"):
        keys = [f"{name} {end}".encode() for end in range(5)]
        manager.new_step()
        log.step()
        hit = manager.lookup(keys, max_tokens=79)
        manager.allocate(name, num_tokens=80, hit=hit)
        manager.commit(name, keys, 80)
        manager.free(name)

    log.step()

    _, *steps = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert ["evictions" in step for step in steps] == [False, False, True]
    evictions = steps[-1]["evictions"]
    assert {each["left_by"] for each in evictions} == {"first"}
    assert {each["for_request"] for each in evictions} == {"second"}
    assert (evictions[0]["cause"], evictions[0]["point"]) == ("checkpoint", "ANSWER_END")
    assert all(each["kept_tokens"] < each["num_tokens"] for each in evictions)


def test_a_step_says_what_requests_found_and_which_line_has_the_evictions(tmp_path):
    layers = (FullAttention(name="full", layers=(Layer(name="layer", slot_bytes=64),)),)
    geometry = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    manager = Manager(geometry, num_large_pages=8, prefix_caching=True)
    log = MemoryLog(tmp_path / "log.jsonl", manager)
    for name, text in (("first", "book"), ("second", "text"), ("third", "book")):
        keys = [f"{text} {end}".encode() for end in range(5)]
        manager.new_step()
        log.step()
        hit = manager.lookup(keys, max_tokens=79)
        manager.allocate(name, num_tokens=80, hit=hit)
        manager.commit(name, keys, 80)
        manager.free(name)

    log.step()

    _, *steps = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert "misses" not in steps[0]
    misses = [step["misses"][0] for step in steps[1:]]
    assert [miss["request"] for miss in misses] == ["first", "second", "third"]
    assert [miss["never_tokens"] for miss in misses] == [64, 64, 0]
    third = misses[-1]
    assert third["asked_tokens"] - third["found_tokens"] == third["evicted_tokens"] > 0
    assert third["table"] == "full"
    for loss in third["losses"]:
        line = steps[loss["step"]]
        assert line["step"] == loss["step"]
        names = ("cause", "left_by", "for_request")
        assert [loss[name] for name in names] in [
            [each[name] for name in names] for each in line["evictions"]
        ]

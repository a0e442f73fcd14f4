"""Kernels for one kind of GPU serve layers where they have passed their trials."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jenga.vllm_plugin.trials import kept_trials, tried_kernels
from jenga.vllm_plugin.trials.tried_kernels import KernelChoice, choose_kernels
from jenga_kernels.trials import Verdict, usual_calls
from jenga_kernels.triton.lib.tiles import HOPPER, Machine

pytestmark = pytest.mark.vllm

CUDA = torch.device("cuda:0")

NOT_PASSED = "not passed"
"""In the place of a setting: none, and a trial that was not passed."""

SCAN, DELTA = usual_calls("state_scan")[0], usual_calls("delta_scan")[0]
CALLS = {"state_scan": SCAN, "delta_scan": DELTA}


def set_kernels(monkeypatch, variable, setting):
    """Set what decides which kernels a builder's layers use, before it is made on a Hopper."""
    monkeypatch.setenv(variable, "" if setting == NOT_PASSED else setting)
    monkeypatch.setattr(tried_kernels, "has_trials", lambda _: True)


def settle_kernels(builder, setting):
    """Let trials end as the setting says, if any are to be held for a builder."""
    assert builder.kernels.is_open is (setting in {"", NOT_PASSED})
    assert builder.kernels.own is {"1": True}.get(setting, False)
    if builder.kernels.is_open:
        builder.kernels.decide(is_passed=setting != NOT_PASSED)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Have trials end as said, on a machine with a Hopper; what is held is noted."""
    ends: dict[str, Verdict] = {}
    held: list[str] = []

    def hold(calls, device, *, limit_s):
        assert device == CUDA
        assert 0 < limit_s <= tried_kernels.START_S
        held.extend(call.operation for call in calls)
        return [
            ends.get(call.operation, Verdict(operation=call.operation, is_passed=True))
            for call in calls
        ]

    monkeypatch.setenv("JENGA_CACHE", str(tmp_path))
    monkeypatch.setattr(tried_kernels, "has_trials", lambda device: device.type == "cuda")
    monkeypatch.setattr(tried_kernels, "hold_trials_apart", hold)
    hopper = Machine(capability=HOPPER, num_processors=132)
    monkeypatch.setattr(tried_kernels, "machine_of", lambda _: hopper)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    return ends, held


@pytest.fixture
def warnings(monkeypatch):
    """Get what the module warns of."""
    warned = []
    monkeypatch.setattr(
        tried_kernels.logger, "warning", lambda text, *args: warned.append(text % args)
    )
    return warned


def builder_of(*calls, asked=None, device=CUDA):
    return SimpleNamespace(kernels=KernelChoice(device, asked=asked), calls=lambda: list(calls))


def another_engine(*operations, start="start"):
    """Choose kernels as an engine would that has just begun; of a builder for each operation."""
    builders = [builder_of(CALLS[operation]) for operation in operations]
    assert all(builder.kernels.own is False for builder in builders)
    choose_kernels([*builders, object()], CUDA, start=start)
    assert not any(builder.kernels.is_open for builder in builders)
    found = [builder.kernels.own for builder in builders]
    return found[0] if len(found) == 1 else found


def failed(operation, *, is_final=True):
    return Verdict(operation=operation, is_passed=False, is_final=is_final, reason="off by 3")


def test_kernels_that_passed_are_the_operations_to_choose_from_then_on(trials):
    _, held = trials

    assert [another_engine("state_scan") for _ in range(3)] == [None] * 3

    assert held == ["state_scan"]


def test_trials_of_all_layers_are_held_in_one_process_and_each_decides_for_its_own(trials):
    ends, held = trials
    ends["delta_scan"] = failed("delta_scan")

    assert another_engine("state_scan", "delta_scan") == [None, False]

    assert held == ["state_scan", "delta_scan"]
    assert another_engine("delta_scan", "state_scan") == [False, None]
    assert len(held) == 2


def test_layers_whose_calls_have_the_same_key_have_one_trial_in_the_longest_arena(
    trials, monkeypatch
):
    _, held = trials
    states = SCAN.view("states")
    shorter = type(SCAN)(
        operation="state_scan", arguments=SCAN.arguments | {"states": states.with_rows(100)}
    )
    assert shorter.key == SCAN.key
    tried = []
    hold = tried_kernels.hold_trials_apart
    monkeypatch.setattr(
        tried_kernels,
        "hold_trials_apart",
        lambda calls, *given, **named: tried.extend(calls) or hold(calls, *given, **named),
    )

    builders = [builder_of(shorter, SCAN, shorter), builder_of(shorter)]
    choose_kernels(builders, CUDA, start="start")

    assert tried == [SCAN]
    assert held == ["state_scan"]
    assert [builder.kernels.own for builder in builders] == [None, None]


def test_a_builder_with_a_call_that_did_not_pass_has_the_kernels_of_all_gpus(trials):
    ends, _ = trials
    ends["delta_scan"] = failed("delta_scan")
    builder = builder_of(SCAN, DELTA)

    choose_kernels([builder], CUDA, start="start")

    assert builder.kernels.own is False


def test_kernels_that_did_not_pass_are_not_used_and_that_is_said(trials, tmp_path, warnings):
    ends, held = trials
    ends["delta_scan"] = failed("delta_scan")

    found = [another_engine("delta_scan") for _ in range(2)]

    (kept,) = tmp_path.glob("trials/*/delta_scan-*.json")
    assert found == [False, False]
    assert held == ["delta_scan"]
    assert len(warnings) == 2
    for warning in warnings:
        assert "delta_scan" in warning
        assert "off by 3" in warning
        assert f"once {kept} is removed" in warning

    kept.unlink()
    ends.clear()
    assert another_engine("delta_scan") is None


def test_what_a_trial_could_not_tell_counts_for_this_start_and_no_other(trials, warnings):
    ends, held = trials
    ends["state_scan"] = failed("state_scan", is_final=False)

    # The ranks of one start, one after the other.
    assert [another_engine("state_scan", start="first") for _ in range(4)] == [False] * 4
    assert held == ["state_scan"]
    assert not any("is removed" in warning for warning in warnings)

    ends.clear()
    assert another_engine("state_scan", start="second") is None
    assert held == ["state_scan"] * 2


@pytest.mark.parametrize("asked", [False, True])
def test_what_the_environment_asks_for_is_done_without_a_trial(trials, asked):
    builder = builder_of(SCAN, asked=asked)

    choose_kernels([builder], CUDA, start="start")

    assert builder.kernels.own is asked
    assert trials[1] == []


def test_nothing_is_tried_without_kernels_of_its_own_gpu(trials):
    builder = builder_of(SCAN, device=torch.device("cpu"))

    choose_kernels([builder], torch.device("cpu"), start="start")

    assert builder.kernels.own is None
    assert trials[1] == []


def test_calls_that_a_gpu_has_no_kernels_of_its_own_for_are_not_tried(trials, monkeypatch):
    ada = Machine(capability=89, num_processors=142)
    monkeypatch.setattr(tried_kernels, "machine_of", lambda _: ada)

    assert another_engine("state_scan") is None

    assert trials[1] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200"),
        lambda patch: patch.setattr(tried_kernels.triton, "__version__", "9.9"),
    ],
    ids=["gpu", "triton"],
)
def test_another_gpu_or_compiler_has_trials_of_its_own(trials, change, monkeypatch):
    another_engine("state_scan")

    change(monkeypatch)

    assert another_engine("state_scan") is None
    assert trials[1] == ["state_scan"] * 2


@pytest.mark.usefixtures("trials")
def test_other_kernels_have_trials_of_their_own(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(kept_trials, "_sources", lambda: folder)
    names = set()
    for text in ("a = 1", "a = 2"):
        (folder / "kernel.py").write_text(text)
        names.add(tried_kernels._folder(CUDA).name)

    assert len(names) == 2


def test_a_file_that_cannot_be_read_is_made_anew(trials, tmp_path):
    another_engine("state_scan")
    (kept,) = tmp_path.glob("trials/*/*.json")
    for text in ("", "{", '{"verdict": {"operation": "state_scan"}, "start": ""}', "[]", "3"):
        kept.write_text(text)

        assert another_engine("state_scan") is None

        assert json.loads(kept.read_text())["verdict"]["is_passed"] is True
    assert len(trials[1]) == 6


def test_a_folder_that_cannot_be_written_costs_a_trial_each_time(
    trials, tmp_path, monkeypatch, warnings
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JENGA_CACHE", str(tmp_path / "file"))

    assert [another_engine("state_scan") for _ in range(2)] == [None, None]

    assert trials[1] == ["state_scan"] * 2
    assert "are not stored" in warnings[0]


def test_a_home_that_is_not_known_costs_a_trial_each_time(trials, monkeypatch, warnings):
    monkeypatch.setenv("JENGA_CACHE", "~no_such_user/cache")

    assert another_engine("state_scan") is None

    assert trials[1] == ["state_scan"]
    assert "JENGA_CACHE='~no_such_user/cache'" in warnings[0]


def test_a_disk_that_fills_up_meanwhile_costs_no_second_trial(trials, monkeypatch, warnings):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)

    assert another_engine("state_scan") is None

    assert trials[1] == ["state_scan"]
    assert "No space left on device" in warnings[0]


@pytest.mark.usefixtures("trials")
def test_a_process_that_cannot_be_started_leaves_the_kernels_of_all_gpus(monkeypatch, warnings):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(tried_kernels, "hold_trials_apart", refuse)

    assert another_engine("state_scan") is False

    assert "Cannot allocate memory" in warnings[0]


def test_a_rank_that_has_no_time_left_holds_no_trial(trials, monkeypatch, warnings):
    monkeypatch.setattr(tried_kernels, "START_S", 0.0)

    assert another_engine("state_scan") is False

    assert trials[1] == []
    assert "other trials took the 0 s that a start has for them" in warnings[0]


RANK = """
import sys, time
import torch
from jenga.vllm_plugin.trials import kept_trials
from jenga.vllm_plugin.trials import tried_kernels
from jenga_kernels.trials import Verdict, usual_calls
from jenga_kernels.triton.lib.tiles import HOPPER, Machine
from types import SimpleNamespace

held, ends, start, start_s, ended_s = sys.argv[1:]

def hold(calls, device, *, limit_s):
    with open(held, "a") as file:
        file.write("held\\n")
    if ends == "never":  # as with a kernel that hangs
        time.sleep(limit_s)
        return [Verdict(operation=call.operation, is_passed=False, is_final=False, reason="slow")
                for call in calls]
    time.sleep(float(ends))
    return [Verdict(operation=call.operation, is_passed=True) for call in calls]

tried_kernels.START_S, tried_kernels.ENDED_S = float(start_s), float(ended_s)
tried_kernels.has_trials = lambda device: True
tried_kernels.hold_trials_apart = hold
tried_kernels.machine_of = lambda _: Machine(capability=HOPPER, num_processors=132)
torch.cuda.get_device_name = lambda device: "NVIDIA H100"
tried_kernels.logger.info = lambda text, *args: print(text % args, flush=True)
tried_kernels.logger.warning = tried_kernels.logger.info
device = torch.device("cuda:0")
builder = SimpleNamespace(kernels=tried_kernels.KernelChoice(device, asked=None),
                          calls=lambda: usual_calls("state_scan"))
tried_kernels.choose_kernels([builder], device, start=start)
print("CHOSEN", builder.kernels.own)
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Run ranks of a start at one time; get what each said, and how many trials were held."""

    def run(number, *, ends, start_s=120.0, ended_s=10.0):
        held = tmp_path / "held"
        command = [sys.executable, "-c", RANK, str(held), ends, "start", str(start_s), str(ended_s)]
        environment = os.environ | {"JENGA_CACHE": str(tmp_path)}
        ranks = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(number)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * number
        return said, held.read_text().count("held") if held.exists() else 0

    return run


def test_ranks_that_ask_at_one_time_hold_one_trial(run_ranks):
    said, num_held = run_ranks(3, ends="1")

    assert num_held == 1
    assert all("CHOSEN None" in each for each in said)


@pytest.mark.slow
def test_a_trial_that_runs_out_of_time_is_not_repeated_by_other_ranks(run_ranks):
    said, num_held = run_ranks(4, ends="never", start_s=3.0, ended_s=60.0)

    assert num_held == 1
    assert all("CHOSEN False" in each for each in said)
    assert sum("Trying the specialised kernels of state_scan" in each for each in said) == 1


@pytest.mark.slow
def test_waiting_for_another_rank_has_a_limit(run_ranks, tmp_path):
    """Also where that one never lets the lock go."""
    (first,), _ = run_ranks(1, ends="0")
    assert "CHOSEN None" in first
    (lock,) = tmp_path.glob("trials/*/*.lock")
    for kept in tmp_path.glob("trials/*/*.json"):
        kept.unlink()
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        (said,), num_held = run_ranks(1, ends="0", start_s=1.0, ended_s=0.5)
    finally:
        holder.kill()
        holder.communicate()

    assert "CHOSEN False" in said
    assert "Another process tries specialised kernels" in said
    assert "another process did not end its trials in 1 s" in said
    assert num_held == 1  # of before

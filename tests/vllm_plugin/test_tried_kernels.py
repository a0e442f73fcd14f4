"""Kernels for one kind of GPU serve layers where they have passed their trials."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from jenga.vllm_plugin import tried_kernels
from jenga_kernels.trials import Verdict

pytestmark = pytest.mark.vllm

CUDA = torch.device("cuda:0")

NOT_PASSED = "not passed"
"""In the place of a setting: none, and a trial that was not passed."""


def set_kernels(monkeypatch, variable, setting, *, operation):
    """Set what decides which kernels a builder's layers use; its operation is this one."""
    monkeypatch.setenv(variable, "" if setting == NOT_PASSED else setting)
    is_passed = setting != NOT_PASSED

    def verdict(asked, device):
        assert (asked, device.type) == (operation, "cpu")
        return Verdict(operation=operation, is_passed=is_passed)

    monkeypatch.setattr(tried_kernels, "has_trials", lambda _: True)
    monkeypatch.setattr(tried_kernels, "_verdict", verdict)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Have trials end as said, on a machine with a Hopper; what is held is noted."""
    ends: dict[str, Verdict] = {}
    held: list[str] = []

    def hold(operation, device):
        assert device == CUDA
        held.append(operation)
        return ends.get(operation, Verdict(operation=operation, is_passed=True))

    monkeypatch.setenv("JENGA_CACHE", str(tmp_path))
    monkeypatch.setattr(tried_kernels, "has_trials", lambda device: device.type == "cuda")
    monkeypatch.setattr(tried_kernels, "hold_trial_apart", hold)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    tried_kernels._verdict.cache_clear()
    yield ends, held
    tried_kernels._verdict.cache_clear()


def another_engine(operation):
    """Ask as an engine would that has just begun."""
    tried_kernels._verdict.cache_clear()
    return tried_kernels.own_kernels(operation, CUDA, asked=None)


def failed(operation, *, is_final=True):
    return Verdict(operation=operation, is_passed=False, is_final=is_final, reason="off by 3")


def test_kernels_that_passed_are_the_operations_to_choose_from_then_on(trials):
    _, held = trials

    assert [another_engine("state_scan") for _ in range(3)] == [None] * 3

    assert held == ["state_scan"]


def test_kernels_that_did_not_pass_are_not_used_and_that_is_said(trials, tmp_path, caplog):
    ends, held = trials
    ends["delta_scan"] = failed("delta_scan")

    with caplog.at_level(logging.WARNING, logger=tried_kernels.logger.name):
        tried_kernels.logger.addHandler(caplog.handler)
        try:
            found = [another_engine("delta_scan") for _ in range(2)]
        finally:
            tried_kernels.logger.removeHandler(caplog.handler)

    (kept,) = tmp_path.glob("trials/delta_scan-*.json")
    assert found == [False, False]
    assert held == ["delta_scan"]
    assert "delta_scan" in caplog.text
    assert "off by 3" in caplog.text
    assert f"once {kept} is removed" in caplog.text

    kept.unlink()
    ends.clear()
    assert another_engine("delta_scan") is None


def test_what_a_trial_could_not_tell_is_not_kept(trials, tmp_path):
    ends, held = trials
    ends["state_scan"] = failed("state_scan", is_final=False)
    assert another_engine("state_scan") is False
    assert not list(tmp_path.glob("trials/*.json"))

    ends.clear()

    assert another_engine("state_scan") is None
    assert held == ["state_scan"] * 2


@pytest.mark.parametrize("asked", [False, True])
def test_what_the_environment_asks_for_is_done_without_a_trial(trials, asked):
    assert tried_kernels.own_kernels("paged_attention", CUDA, asked=asked) is asked

    assert trials[1] == []


def test_nothing_is_tried_without_kernels_of_its_own_gpu(trials):
    assert tried_kernels.own_kernels("paged_attention", torch.device("cpu"), asked=None) is None

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
    another_engine("latent_attention")

    change(monkeypatch)

    assert another_engine("latent_attention") is None
    assert trials[1] == ["latent_attention"] * 2


@pytest.mark.usefixtures("trials")
def test_other_kernels_have_trials_of_their_own(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(tried_kernels.jenga_kernels, "__file__", str(folder / "__init__.py"))
    names = set()
    for text in ("a = 1", "a = 2"):
        (folder / "kernel.py").write_text(text)
        names.add(tried_kernels._state_of(CUDA))

    assert len(names) == 2


def test_a_file_that_cannot_be_read_is_made_anew(trials, tmp_path):
    another_engine("state_scan")
    (kept,) = tmp_path.glob("trials/*.json")
    for text in ("", "{", '{"operation": "state_scan"}', "[]", "3"):
        kept.write_text(text)

        assert another_engine("state_scan") is None

        assert json.loads(kept.read_text())["is_passed"] is True
    assert len(trials[1]) == 6


def test_a_folder_that_cannot_be_written_costs_a_trial_each_time(trials, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JENGA_CACHE", str(tmp_path / "file"))

    assert [another_engine("state_scan") for _ in range(2)] == [None, None]

    assert trials[1] == ["state_scan"] * 2


@pytest.mark.usefixtures("trials")
def test_workers_that_ask_at_one_time_hold_one_trial(tmp_path):
    script = f"""
import time
import torch
from jenga.vllm_plugin import tried_kernels
from jenga_kernels.trials import Verdict

def hold(operation, device):
    time.sleep(0.5)
    with open({str(tmp_path / "held")!r}, "a") as file:
        file.write("held\\n")
    return Verdict(operation=operation, is_passed=True)

tried_kernels.has_trials = lambda device: True
tried_kernels.hold_trial_apart = hold
torch.cuda.get_device_name = lambda device: "NVIDIA H100"
assert tried_kernels.own_kernels("state_scan", torch.device("cuda:0"), asked=None) is None
"""
    workers = [subprocess.Popen([sys.executable, "-c", script], env=os.environ) for _ in range(2)]

    assert [worker.wait() for worker in workers] == [0, 0]
    assert (tmp_path / "held").read_text() == "held\n"

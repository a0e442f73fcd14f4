"""Trials of kernels for one kind of GPU: they find what is wrong, and let nothing hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jenga_kernels import trials
from jenga_kernels.trials import TRIALS, TrialError, Verdict, hold_trial, hold_trial_apart
from jenga_kernels.triton.tiles import HOPPER, Machine, machine_of
from tests.kernels.support import DEVICE

CPU = torch.device("cpu")
IS_EMULATED = bool(os.environ.get("EMULATED_GPU"))

TRIED = {
    "heads of 128": {"attention_prefill_hopper_kernel"},
    "windows and caps": {"attention_prefill_hopper_kernel"},
    "heads of 256": {"attention_prefill_hopper_kernel"},
    "float8 pages": {"attention_prefill_hopper_kernel"},
    "latents": {"latent_decode_hopper_kernel"},
    "float8 latents": {"latent_decode_hopper_kernel"},
    "a group of warps": {"state_scan_hopper_kernel"},
    "two groups of warps": {"state_scan_specialized_kernel"},
    "segments": {"state_scan_hopper_kernel", "segment_states_hopper_kernel"},
    "segments by two groups of warps": {
        "state_scan_specialized_kernel",
        "segment_states_hopper_kernel",
    },
    "decays of heads": {"delta_scan_hopper_kernel"},
    "decays of channels": {"delta_scan_hopper_kernel"},
}
"""Trial -> the kernels for Hopper that it tries."""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or machine_of(DEVICE).capability != HOPPER,
    reason="only Hopper has kernels that need a trial",
)
@pytest.mark.parametrize("operation", TRIALS)
def test_kernels_for_this_gpu_pass_their_trials(operation, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as in vLLM's processes

    assert hold_trial_apart(operation, DEVICE) == Verdict(operation=operation, is_passed=True)


@pytest.mark.skipif(not IS_EMULATED, reason="tests/kernels/test_emulated.py emulates a Hopper")
@pytest.mark.skipif(machine_of(DEVICE).capability != HOPPER, reason="only Hopper has them")
@pytest.mark.parametrize("operation", TRIALS)
def test_trials_are_passed_by_the_kernels_they_are_of(operation, monkeypatch):
    from perf.emulator.launches import EmulatedKernel

    launch, launched = EmulatedKernel.launch, []

    def noted(self, *arguments):
        launched.append(self.kernel.name)
        return launch(self, *arguments)

    monkeypatch.setattr(EmulatedKernel, "launch", noted)
    tried = {}

    def cases(device):
        for name, run in TRIALS[operation](device):

            def noted_run(is_portable, name=name, run=run):
                launched.clear()
                results = run(is_portable)
                of_hopper = {each for each in launched if "hopper" in each or "special" in each}
                assert not (is_portable and of_hopper)
                tried[name] = of_hopper
                return results

            yield name, noted_run

    monkeypatch.setitem(trials.TRIALS, "noted", cases)

    hold_trial("noted", CPU, num_launches=1)

    assert tried
    assert tried == {name: TRIED[name] for name in tried}


def wrong(results):
    return [results[0], results[1] + 1.0]


def without_a_number(results):
    return [results[0].index_fill(0, torch.tensor([2]), float("nan")), results[1]]


@pytest.mark.parametrize(
    ("spoiled", "from_launch", "message"),
    [
        (wrong, 0, "of a kind, result 1: off by 1 where the greatest is 3"),
        (without_a_number, 0, "of a kind, result 0: not the same are numbers"),
        (wrong, 3, "of a kind: another launch gives other results"),
        (without_a_number, 3, "of a kind: another launch gives other results"),
    ],
)
def test_a_kernel_that_errs_does_not_pass(spoiled, from_launch, message, monkeypatch):
    launches = []

    def run(is_portable):
        results = [torch.arange(4.0), torch.tensor([float("nan"), 3.0])]
        if is_portable:
            return results
        launches.append(len(launches))
        return spoiled(results) if launches[-1] >= from_launch else results

    monkeypatch.setitem(trials.TRIALS, "made_up", lambda _: iter([("of a kind", run)]))

    with pytest.raises(TrialError, match=message):
        hold_trial("made_up", CPU, num_launches=5)

    assert trials.verdict_here("made_up", CPU).reason.startswith("of a kind")


def test_a_kernel_that_rounds_otherwise_passes(monkeypatch):
    def run(is_portable):
        return [torch.full((3,), 1.0 if is_portable else 1.01), torch.tensor([float("nan")])]

    monkeypatch.setitem(trials.TRIALS, "made_up", lambda _: iter([("of a kind", run)]))

    hold_trial("made_up", CPU)

    assert trials.verdict_here("made_up", CPU) == Verdict(operation="made_up", is_passed=True)


def test_a_compilers_failure_is_the_kernels_and_a_lack_of_memory_is_not(monkeypatch):
    def failing(error):
        def run(is_portable):
            if is_portable:
                return []
            raise error

        return lambda _: iter([("of a kind", run)])

    monkeypatch.setitem(trials.TRIALS, "refused", failing(RuntimeError("no such\ninstruction")))
    monkeypatch.setitem(trials.TRIALS, "large", failing(torch.OutOfMemoryError("2 GiB")))

    refused, large = (trials.verdict_here(name, CPU) for name in ("refused", "large"))

    assert (refused.is_passed, refused.is_final) == (False, True)
    assert refused.reason == "RuntimeError: no such"
    assert (large.is_passed, large.is_final, large.reason) == (False, False, "2 GiB")


def test_a_gpu_that_cannot_be_used_is_no_verdict_on_kernels():
    verdict = trials.verdict_here("state_scan", torch.device("cuda:77"))

    assert (verdict.is_passed, verdict.is_final) == (False, False)
    assert verdict.reason.startswith("the GPU cannot be used: ")


def test_kernels_are_launched_on_the_gpu_that_is_asked_for(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    trials.verdict_here("state_scan", torch.device("cuda:78"))
    trials.verdict_here("state_scan", torch.device("cuda"))

    assert chosen == [torch.device("cuda:78")]


def test_a_gpu_is_started_before_triton_is_asked_what_it_is(monkeypatch):
    """As vLLM has torch look for GPUs, that starts none."""
    called = []

    def hopper(_):
        called.append("asked")
        return Machine(capability=HOPPER, num_processors=132)

    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("started"))
    monkeypatch.setattr(trials, "machine_of", hopper)

    assert trials.has_trials(torch.device("cuda:0"))
    assert called == ["started", "asked"]
    assert not trials.has_trials(CPU)


@pytest.fixture
def other_process(tmp_path, monkeypatch):
    """Have a script run in the place of trials in processes of their own."""

    def start(script):
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return tmp_path / "arguments"

    return start


def test_a_trial_apart_says_what_came_of_it(other_process):
    said = {"operation": "state_scan", "is_passed": False, "is_final": True, "reason": "slow"}
    arguments = other_process(f"echo Triton says; echo '{json.dumps(said)}'; exit 1")

    assert hold_trial_apart("state_scan", torch.device("cuda:1")) == Verdict(**said)

    expected = "-m jenga_kernels.trials state_scan --here --device cuda:1"
    assert arguments.read_text().strip() == expected


def test_a_trial_that_does_not_end_is_ended(other_process):
    other_process("exec sleep 60")

    verdict = hold_trial_apart("delta_scan", torch.device("cuda"), limit_s=0.5)

    assert (verdict.is_passed, verdict.is_final) == (False, False)
    assert verdict.reason == "did not end within 0.5 s"


def test_a_process_that_dies_has_not_passed(other_process):
    other_process("echo begun; echo the last words >&2; kill -9 $$")

    verdict = hold_trial_apart("delta_scan", torch.device("cuda"))

    assert (verdict.is_passed, verdict.is_final) == (False, False)
    assert verdict.reason == "its process ended with -9 and said the last words"


def test_an_unknown_operation_is_refused_before_a_process_begins(other_process):
    arguments = other_process("exit 0")

    for hold in (hold_trial, hold_trial_apart):
        with pytest.raises(
            ValueError, match=r"operation must be one of paged_attention, .* 'gelu'"
        ):
            hold("gelu", CPU)

    assert not arguments.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are trials to hold")
def test_the_command_says_where_there_is_nothing_to_try():
    command = [sys.executable, "-m", "jenga_kernels.trials"]
    root = Path(__file__).parents[2]

    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert "cuda:0 is no GPU that has kernels of its own: expected a Hopper" in ended.stderr

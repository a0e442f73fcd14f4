"""Trials of kernels for one kind of GPU: they find what is wrong, and let nothing hang."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jenga_kernels import trial_runs, trials
from jenga_kernels.trial_calls import FAR_ELEMENTS, PAGED, Call
from jenga_kernels.trial_runs import has_own_kernels, runs_of
from jenga_kernels.trials import (
    Verdict,
    arena_for,
    hold_trial,
    hold_trials_apart,
    usual_calls,
    verdicts_here,
)
from jenga_kernels.triton.lib.tiles import HOPPER, Machine, machine_of
from tests.kernels.support import DEVICE

CPU = torch.device("cpu")
IS_EMULATED = bool(os.environ.get("EMULATED_GPU"))
SCAN = usual_calls("state_scan")[0]

TRIED = {
    "prompts": {"attention_prefill_hopper_kernel"},
    "images": {"attention_prefill_hopper_kernel"},
    "latents": {"latent_decode_hopper_kernel"},
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
"""Way to make a call -> the kernels for Hopper that it tries."""

NO_STATES = ", no states kept"
"""End of the name of a way that launches kernels without checkpoints."""

USUAL = [
    pytest.param(call, id=f"{operation}-{index}")
    for operation in PAGED
    for index, call in enumerate(usual_calls(operation))
]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or machine_of(DEVICE).capability != HOPPER,
    reason="only Hopper has kernels that need a trial",
)
@pytest.mark.parametrize("operation", PAGED)
def test_kernels_for_this_gpu_pass_their_trials(operation, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as in vLLM's processes
    calls = usual_calls(operation)

    assert hold_trials_apart(calls, DEVICE) == [
        Verdict(operation=operation, is_passed=True) for _ in calls
    ]


def note_launches(monkeypatch, tried):
    """Note the kernels for Hopper of each way to make a call, by its name."""
    from perf.emulator.launches import EmulatedKernel

    launch, launched = EmulatedKernel.launch, []

    def noted(self, *arguments):
        launched.append(self.kernel.name)
        return launch(self, *arguments)

    def runs(call, arena):
        for name, run in runs_of(call, arena):

            def noted_run(is_portable, name=name, run=run):
                launched.clear()
                results = run(is_portable)
                of_hopper = {each for each in launched if "hopper" in each or "special" in each}
                assert not (is_portable and of_hopper)
                tried[name] = of_hopper
                return results

            yield name, noted_run

    monkeypatch.setattr(EmulatedKernel, "launch", noted)
    monkeypatch.setattr(trials, "runs_of", runs)


@pytest.mark.skipif(not IS_EMULATED, reason="tests/kernels/test_emulated.py emulates a Hopper")
@pytest.mark.skipif(machine_of(DEVICE).capability != HOPPER, reason="only Hopper has them")
@pytest.mark.parametrize("call", USUAL)
def test_trials_are_passed_by_the_kernels_they_are_of(call, monkeypatch):
    tried = {}
    note_launches(monkeypatch, tried)
    assert has_own_kernels(call, machine_of(DEVICE))

    hold_trial(call, arena_for([call], CPU), num_launches=1)

    assert tried
    assert tried == {name: TRIED[name.removesuffix(NO_STATES)] for name in tried}
    is_scan = call.operation in ("state_scan", "delta_scan")
    assert len(tried) == len({name.removesuffix(NO_STATES) for name in tried}) * (1 + is_scan)


def wrong(results):
    return [results[0], results[1] + 1.0]


def without_a_number(results):
    return [results[0].index_fill(0, torch.tensor([2]), float("nan")), results[1]]


@pytest.fixture
def made_up(monkeypatch):
    """Have every call made in one way, which is given."""

    def make(run):
        monkeypatch.setattr(trials, "runs_of", lambda *_: iter([("of a kind", run)]))
        return next(verdicts_here([Call.of("state_scan", states=torch.zeros(1))], CPU))

    return make


@pytest.mark.parametrize(
    ("spoiled", "from_launch", "message"),
    [
        (wrong, 0, "of a kind, result 1: off by 1 where the greatest is 3"),
        (without_a_number, 0, "of a kind, result 0: not the same are numbers"),
        (wrong, 3, "of a kind: another launch gives other results"),
        (without_a_number, 3, "of a kind: another launch gives other results"),
    ],
)
def test_a_kernel_that_errs_does_not_pass(spoiled, from_launch, message, made_up):
    launches = []

    def run(is_portable):
        results = [torch.arange(4.0), torch.tensor([float("nan"), 3.0])]
        if is_portable:
            return results
        launches.append(len(launches))
        return spoiled(results) if launches[-1] >= from_launch else results

    assert made_up(run) == Verdict(operation="state_scan", is_passed=False, reason=message)


def test_a_kernel_that_rounds_otherwise_passes(made_up):
    def run(is_portable):
        return [torch.full((3,), 1.0 if is_portable else 1.01), torch.tensor([float("nan")])]

    assert made_up(run) == Verdict(operation="state_scan", is_passed=True)


def test_a_compilers_failure_is_the_kernels_and_a_lack_of_memory_is_not(made_up):
    def failing(error):
        def run(is_portable):
            if is_portable:
                return []
            raise error

        return run

    refused = made_up(failing(RuntimeError("no such\ninstruction")))
    large = made_up(failing(torch.OutOfMemoryError("2 GiB")))

    assert (refused.is_passed, refused.is_final) == (False, True)
    assert refused.reason == "RuntimeError: no such"
    assert (large.is_passed, large.is_final, large.reason) == (False, False, "2 GiB")


def test_nothing_is_tried_behind_a_kernel_that_does_not_end(monkeypatch):
    def hold(call, _):
        if call is not SCAN:
            msg = "latents: does not end within 30 s"
            raise trials.EndlessError(msg)

    monkeypatch.setattr(trials, "hold_trial", hold)
    monkeypatch.setattr(trials, "arena_for", lambda *_: None)
    latents, *_ = usual_calls("latent_attention")

    assert list(verdicts_here([SCAN, latents, SCAN], CPU)) == [
        Verdict(operation="state_scan", is_passed=True),
        Verdict(
            operation="latent_attention",
            is_passed=False,
            reason="latents: does not end within 30 s",
        ),
    ]


def test_a_gpu_that_cannot_be_used_is_no_verdict_on_kernels():
    verdicts = list(verdicts_here([SCAN] * 2, torch.device("cuda:77")))

    assert [(each.is_passed, each.is_final) for each in verdicts] == [(False, False)] * 2
    assert verdicts[0].reason.startswith("the GPU cannot be used: ")


def test_kernels_are_launched_on_the_gpu_that_is_asked_for(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    for name in ("cuda:78", "cuda"):
        list(verdicts_here([SCAN], torch.device(name)))

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


# What a call is


@pytest.mark.parametrize("call", USUAL)
def test_calls_are_the_same_in_another_process(call):
    again = Call.from_json(call.to_json())

    assert again == call
    assert again.key == call.key


@pytest.mark.parametrize("text", ["{}", "3", '{"operation": "state_scan", "arguments": 3}', "{"])
def test_what_is_no_call_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a call|Expecting property name"):
        Call.from_json(text)


def attention(*, heads=8, pages=64, distance=1 << 12, offset=0, **options):
    arena = torch.empty(pages * distance + offset, dtype=torch.float16, device="meta")
    pages = arena.as_strided((pages, 16, 2, 64), (distance, 128, 64, 1), offset)
    q = torch.empty(5, heads, 64, dtype=torch.float16, device="meta")
    return Call.of("paged_attention", q=q, k_pages=pages, v_pages=pages, **options)


def test_calls_share_a_trial_where_kernels_are_launched_in_the_same_way():
    one = attention()

    assert attention(pages=80, offset=512).key == one.key
    others = [
        attention(heads=4),
        attention(distance=1 << 13),
        attention(window_tokens=64),
        attention(soft_cap=30.0),
        attention(pages=2**19 + 1),  # past what 32 bits count
    ]
    assert len({one.key, *(each.key for each in others)}) == 1 + len(others)


def test_an_arena_is_as_long_as_the_call_whose_pages_end_last():
    calls = [attention(), attention(pages=80, offset=512)]

    arena = arena_for(calls, CPU)

    assert len(arena) == max(call.arena_bytes for call in calls)
    view = calls[1].view("k_pages")
    assert view.end_bytes == len(arena)
    assert view.within(len(arena)) == view
    assert view.within(len(arena) - 1).shape[0] == 79
    assert view.within(view.offset_bytes).shape[0] == 0


def test_an_arena_takes_what_a_gpu_has_left(monkeypatch):
    """And no more: the engine that asks for trials has most of it."""
    made = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (trials.SPARE_BYTES + 1000, 0))
    monkeypatch.setattr(torch, "empty", lambda size, **_: made.append(size))

    arena_for([SCAN], torch.device("cuda:0"))

    assert made == [1000]


def test_usual_calls_have_pages_past_what_32_bits_count():
    for operation in PAGED:
        views = [view for call in usual_calls(operation) for view in call.pages]
        assert any(view.num_elements > FAR_ELEMENTS for view in views) or operation.endswith("scan")


def test_pages_are_taken_all_over_an_arena_and_what_is_behind_tokens_is_no_number(monkeypatch):
    arena = arena_for([attention(pages=1000)], CPU)
    call, given = attention(pages=1000), {}

    def attend(q, k_pages, _v_pages, table, _starts, lens, **_):
        given.update(k_pages=k_pages, table=table, lens=lens)
        return q

    monkeypatch.setattr(trial_runs, "paged_attention", attend)
    ((_, run),) = runs_of(call, arena)
    run(True)

    used = given["table"].flatten().unique()
    assert used.max() == 999
    assert used.float().diff().max() > 1
    last = int(given["lens"][1]) - 1
    page = given["k_pages"][given["table"][1, last // 16]]
    assert not page[: last % 16 + 1].isnan().any()
    assert page[last % 16 + 1 :].isnan().all()


def test_too_few_pages_are_a_lack_of_memory():
    (verdict,) = verdicts_here([attention(pages=20)], CPU)

    assert (verdict.is_passed, verdict.is_final) == (False, False)
    assert "pages are needed, and there is memory for 20" in verdict.reason


@pytest.mark.skipif(IS_EMULATED, reason="nothing differs there")
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(each, marks=() if each == "paged_attention" else pytest.mark.slow)
        for each in PAGED
    ],
)
def test_calls_can_be_made_wherever_kernels_run(operation, monkeypatch):
    """In the interpreter, too, which has no kernels of a GPU's own."""
    monkeypatch.setattr(trial_runs, "SCANNED", (150, 20, 1))
    monkeypatch.setattr(trial_runs, "CHECKPOINTS_AFTER", (30, 140))
    calls = {
        "paged_attention": attention(window_tokens=64, pages=1000, reads_spans=True),
        "latent_attention": usual_calls("latent_attention")[0],
        "state_scan": SCAN,
        "delta_scan": usual_calls("delta_scan")[0],
    }
    call = calls[operation]

    hold_trial(call, arena_for([call], torch.device(DEVICE)), num_launches=1)


def test_windows_are_left_by_keys_of_a_trial(monkeypatch):
    call, seen = attention(window_tokens=1024, pages=1000), []
    monkeypatch.setattr(
        trial_runs, "paged_attention", lambda *given, **_: seen.append(given[5].tolist())
    )

    ((_, run),) = runs_of(call, arena_for([call], CPU))
    run(True)

    assert max(seen[0]) > 1024


# In a process of its own


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


def line_of(**verdict):
    return f"echo 'verdict {json.dumps({'operation': 'state_scan'} | verdict)}'"


def test_trials_apart_say_what_came_of_each(other_process, tmp_path):
    ends = [{"is_passed": True}, {"is_passed": False, "is_final": True, "reason": "slow"}]
    lines = "; ".join(line_of(**end) for end in ends)
    arguments = other_process(f"cat >{tmp_path}/calls; echo Triton says; {lines}; exit 1")

    verdicts = hold_trials_apart([SCAN] * 2, torch.device("cuda:1"), limit_s=50)

    assert verdicts == [Verdict(operation="state_scan", **end) for end in ends]
    expected = "-m jenga_kernels.trials --here --device cuda:1 --limit 60"
    assert arguments.read_text().strip() == expected
    calls = [Call.from_json(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [SCAN] * 2


CHILD = """
import functools, sys
from jenga_kernels import trials
trials.torch.cuda.is_available = trials.has_trials = lambda *_: True
trials.hold_trial = functools.partial(trials.hold_trial, num_launches=1)
sys.exit(trials.main(sys.argv[3:]))
"""
"""What runs in the place of a process with a Hopper: the same, on kernels as they are elsewhere."""


@pytest.mark.skipif(IS_EMULATED, reason="the other process would need the emulated GPU too")
def test_trials_are_held_in_a_process_of_their_own(other_process, tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    other_process(f'exec {sys.executable} {tmp_path}/child.py "$@"')
    calls = [attention(pages=1000), attention(pages=20), attention(pages=1000, soft_cap=20.0)]

    passed, without_memory, capped = hold_trials_apart(calls, torch.device(DEVICE))

    assert passed == capped == Verdict(operation="paged_attention", is_passed=True)
    assert (without_memory.is_passed, without_memory.is_final) == (False, False)
    assert "there is memory for 20" in without_memory.reason


def test_trials_that_do_not_end_are_ended_and_those_before_count(other_process):
    other_process(f"{line_of(is_passed=True)}; exec sleep 60")

    first, second = hold_trials_apart([SCAN] * 2, torch.device("cuda"), limit_s=2)

    assert first == Verdict(operation="state_scan", is_passed=True)
    assert (second.is_passed, second.is_final) == (False, False)
    assert second.reason == "did not end within 2 s"


def test_a_process_that_cannot_be_killed_is_left_to_the_system(other_process, monkeypatch):
    """What waits in a driver is gone only when that lets it go."""
    other_process(f"{line_of(is_passed=True)}; exec sleep 20")
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    monkeypatch.setattr(trials, "ENDED_S", 0.2)
    began = time.monotonic()

    first, second = hold_trials_apart([SCAN] * 2, torch.device("cuda"), limit_s=1)

    assert time.monotonic() - began < 15
    assert first.is_passed
    expected = "did not end within 1 s, and was not gone 0.2 s after it was killed"
    assert (second.is_final, second.reason) == (False, expected)


def test_a_process_that_dies_has_not_passed(other_process):
    other_process("echo begun; echo the last words >&2; kill -9 $$")

    (verdict,) = hold_trials_apart([SCAN], torch.device("cuda"))

    assert (verdict.is_passed, verdict.is_final) == (False, False)
    assert verdict.reason == "its process ended with -9 and said the last words"


def test_a_process_ends_itself_where_nobody_else_does():
    """Where whoever asked for a trial is gone before it ends."""
    code = (
        "from jenga_kernels import trials\n"
        "trials.torch.cuda.is_available = lambda: trials.time.sleep(60)\n"
        "trials.main(['--here', '--limit', '0.5'])"
    )

    ended = subprocess.run([sys.executable, "-c", code], check=False)

    assert ended.returncode == -trials.signal.SIGALRM


def test_an_unknown_operation_is_refused():
    for refused in (usual_calls, lambda name: Call.of(name, states=torch.zeros(1))):
        with pytest.raises(
            ValueError, match=r"operation must be one of paged_attention, .* 'gelu'"
        ):
            refused("gelu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are trials to hold")
def test_the_command_says_where_there_is_nothing_to_try():
    command = [sys.executable, "-m", "jenga_kernels.trials"]
    root = Path(__file__).parents[3]

    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert "cuda:0 is no GPU that has kernels of its own: expected a Hopper" in ended.stderr

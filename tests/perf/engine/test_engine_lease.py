"""A plan of engines worked through: time limits, failures, what is resumed. No engine is real."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perf.engine.planning import plan, sides
from perf.engine.planning.models import Scale
from perf.engine.planning.workloads import AGENTS, articles
from perf.engine.results.rows import RowFile, read
from perf.engine.runs import export, lease, process
from perf.engine.runs.jobs import Paths
from perf.engine.runs.lease import Lease
from perf.harness import machine

CHILD = Path(__file__).with_name("engine_child.py")
CASE = replace(plan.GEMMA, workloads=(articles(2, 40, 2),))


class Bench:
    """Leases of one folder, with engines that behave as told."""

    def __init__(self, folder):
        self.folder = folder
        self.paths = Paths(folder=folder / "work")
        self.said = []
        self.tell()

    def tell(self, **modes):
        (self.folder / "modes.json").write_text(json.dumps(modes))

    def lease(self, seconds=120.0, scale=Scale.FULL, **options):
        command = (sys.executable, str(CHILD), str(self.folder / "modes.json"))
        return Lease(
            self.paths,
            scale=scale,
            seconds=seconds,
            command=command,
            say=self.said.append,
            **options,
        )

    def rows(self, kind="run"):
        return [row for row in read(self.paths.rows) if row["kind"] == kind]

    @property
    def started(self):
        path = self.folder / "started.txt"
        return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("PERF_COMMIT", "abc")
    # Other tests of this process may have set it.
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    monkeypatch.setattr(process, "LAST_WORDS_S", 1.0)
    monkeypatch.setattr(lease, "CLOSE_CAP_S", 1.0)
    monkeypatch.setattr(plan, "COLD_START_S", 0.0)
    monkeypatch.setattr(lease, "COLD_START_S", 0.0)
    return Bench(tmp_path)


def pair(case=CASE, **options):
    return plan.in_turns(case, sides.STOCK, sides.OURS_PLAIN, **options)


def test_stock_comes_first_and_every_run_has_a_row_and_a_line(bench):
    assert bench.lease().run(pair(num_runs=2))

    rows = bench.rows()
    assert [(row["side"], row["run"]) for row in rows] == [
        ("stock", 1),
        ("stock", 2),
        ("ours", 1),
        ("ours", 2),
    ]
    row = rows[-1]
    assert row["commit"] == "abc"
    assert row["workload"] == "articles"
    assert row["cache_bytes"] == CASE.cache_bytes
    assert row["start_s"] == 1.5
    assert row["machine"] == machine.describe()
    assert sum("tokens/s" in line for line in bench.said) == 4
    assert bench.started == ["gemma-3-4b-stock-1", "gemma-3-4b-ours-1"]


def test_outputs_are_compared_with_those_of_the_first_run(bench):
    bench.lease().run(pair())

    (row,) = bench.rows("comparison")
    assert row["beside"] == {"side": "stock", "turn": 1, "run": 1}
    assert (row["num_same"], row["num_parted"], row["earliest_parting"]) == (1, 1, 1)
    assert (row["num_judged"], row["num_near_ties"]) == (1, 1)


def test_what_has_rows_is_not_run_again_but_at_another_commit(bench, monkeypatch):
    bench.lease().run(pair())
    assert bench.lease().run(pair())
    assert len(bench.started) == 2

    monkeypatch.setenv("PERF_COMMIT", "def")
    bench.lease().run(pair())

    assert len(bench.started) == 4


def test_a_later_call_serves_only_the_runs_that_are_missing(bench):
    bench.lease().run(pair())

    bench.lease().run(pair(num_runs=2))

    runs = [(row["side"], row["run"]) for row in bench.rows()]
    assert runs == [("stock", 1), ("ours", 1), ("stock", 2), ("ours", 2)]


def test_a_start_that_hangs_is_ended_with_the_stacks_of_its_threads_and_holds_up_no_other(bench):
    bench.tell(stock="hangs at start")
    case = replace(CASE, start_cap_s=1.0)

    work = bench.lease()
    assert not work.run(pair(case))

    assert work.num_failed == 1
    (row,) = bench.rows("failure")
    assert (row["side"], row["stage"]) == ("stock", "start")
    assert "took longer than 1 s and was ended with -6" in row["reason"]
    said = "\n".join(row["log_end"])
    assert "hang_forever" in said
    assert said.count("most recent call first") >= 2
    assert [row["side"] for row in bench.rows()] == ["ours"]


def test_a_run_has_a_limit_of_its_own(bench):
    bench.tell(ours="hangs in a run")
    case = replace(CASE, workloads=(replace(CASE.workloads[0], cap_s=1.0),))

    bench.lease().run(pair(case))

    (row,) = bench.rows("failure")
    assert (row["side"], row["stage"]) == ("ours", "run")


@pytest.mark.parametrize(
    ("mode", "stage", "said"),
    [("crashes at start", "start", "ended with 1"), ("crashes in a run", "run", "ended with -11")],
)
def test_a_crash_is_a_row_with_the_end_of_the_log(bench, mode, stage, said):
    bench.tell(stock=mode)

    bench.lease().run(pair())

    (row,) = bench.rows("failure")
    assert row["stage"] == stage
    assert said in row["reason"]
    if stage == "start":
        assert row["error"] == "no such backend"


def test_an_engine_that_ignores_signals_is_killed(bench):
    bench.tell(stock="ignores signals")
    began_s = time.monotonic()

    bench.lease().run(pair(replace(CASE, start_cap_s=0.5))[:1])

    assert time.monotonic() - began_s < 60
    assert bench.rows("failure")


def test_an_entry_that_fails_twice_is_given_up(bench):
    bench.tell(stock="crashes at start")
    bench.lease().run(pair())
    assert bench.lease().run(pair())

    assert bench.lease().run(pair())

    assert bench.started.count("gemma-3-4b-stock-1") == 2


def test_what_the_end_of_a_call_cuts_short_has_not_failed(bench):
    bench.tell(stock="hangs at start")

    work = bench.lease(seconds=2.0)
    workload = replace(CASE.workloads[0], expected_s=-3.0)
    assert not work.run(pair(replace(CASE, workloads=(workload,)))[:1])

    assert work.num_failed == 0
    assert bench.rows("failure") == []
    assert len(bench.rows("cut")) == 1


def test_nothing_is_begun_without_time_for_it(bench, monkeypatch):
    monkeypatch.setattr(lease, "COLD_START_S", 100.0)

    assert not bench.lease(seconds=60.0).run(pair())

    assert bench.started == []
    assert any("needs" in line for line in bench.said)


def test_a_run_is_left_to_a_later_call_where_time_has_become_short(bench):
    slow = replace(AGENTS, expected_s=1000.0)
    case = replace(CASE, workloads=(CASE.workloads[0], slow))

    assert not bench.lease().run(pair(case)[:1])
    assert [row["workload"] for row in bench.rows()] == ["articles"]

    assert bench.lease(seconds=5000.0).run(pair(case)[:1])
    assert [row["workload"] for row in bench.rows()] == ["articles", "agents"]


def test_a_row_that_was_cut_off_is_measured_again(bench):
    bench.lease().run(pair()[:1])
    text = bench.paths.rows.read_text()
    bench.paths.rows.write_text(text[: len(text) // 2])

    assert bench.lease().run(pair()[:1])

    assert len(bench.rows()) == 1


def test_kernels_are_compiled_first_several_at_a_time_and_once(bench):
    entries = pair()
    bench.lease().warm(entries)
    bench.lease().warm(entries)

    assert sorted(bench.started) == ["gemma-3-4b-ours-0", "gemma-3-4b-stock-0"]
    (row,) = bench.rows("compiled")
    assert len(row["pairs"]) == 2
    log = bench.paths.log(("gemma-3-4b", "ours", 0)).read_text()
    assert "TRITON_CACHE_AUTOTUNING" in log
    bench.lease().run(entries)
    assert "TRITON_CACHE_AUTOTUNING" not in bench.paths.log(entries[1].key).read_text()


def test_a_warmer_that_fails_leaves_its_side_cold(bench):
    bench.tell(ours="crashes at start")

    bench.lease().warm(pair())

    warmed = json.loads((bench.paths.caches / "warmed.json").read_text())
    assert warmed == [["gemma-3-4b", "stock"]]


def test_rows_reach_the_folder_that_leaves_the_machine_as_they_come(bench, tmp_path):
    out = tmp_path / "out"
    bench.tell(ours="hangs in a run")
    workload = replace(CASE.workloads[0], cap_s=1.0)

    bench.lease(out=out).run(pair(replace(CASE, workloads=(workload,))))

    assert (out / "rows.jsonl").read_text() == bench.paths.rows.read_text()


def test_another_machine_goes_on_from_what_left_the_first(bench, tmp_path):
    out = tmp_path / "out"
    bench.lease().run(pair()[:1])
    (bench.paths.caches / "triton").mkdir()
    (bench.paths.caches / "triton" / "kernel.cubin").write_bytes(b"\x7fELF")
    assert len(export.leave(bench.paths, out)) == 4

    bench.paths = Paths(folder=tmp_path / "elsewhere")
    assert export.arrive(bench.paths, out) == {"state.tar.xz": 2, "caches.tar.xz": 2}
    assert bench.lease().run(pair())

    assert bench.started == ["gemma-3-4b-stock-1", "gemma-3-4b-ours-1"]
    assert len(bench.rows("comparison")) == 1
    assert (bench.paths.caches / "triton" / "kernel.cubin").exists()


def test_an_engine_sees_its_own_variables_and_its_caches(bench, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "OTHER")
    monkeypatch.setenv("JENGA_GEOMETRY", "lcm")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")

    bench.lease().run(pair())

    log = bench.paths.log(("gemma-3-4b", "ours", 1)).read_text()
    assert f"caches {bench.paths.caches.resolve() / 'triton'}" in log
    assert "VLLM_ATTENTION_BACKEND" not in log
    assert "JENGA_GEOMETRY" not in log
    assert "'VLLM_USE_V2_MODEL_RUNNER'" in log
    assert "'JENGA_SPECIALIZED_SCANS'" in log
    assert "JENGA_SPECIALIZED" not in bench.paths.log(("gemma-3-4b", "stock", 1)).read_text()


GPU_TOOL = """#!/bin/sh
case "$*" in
*memory.used*)
  n=$(cat {folder}/calls 2>/dev/null || echo 0); echo $((n + 1)) > {folder}/calls
  if [ "$n" -ge 1 ] && [ "$n" -le {busy} ]; then echo 9000; else echo 300; fi;;
*) echo "NVIDIA H100 80GB HBM3, 580.1, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W";;
esac
"""


def give_gpu(folder, monkeypatch, *, busy):
    """Put a tool on the path that says 9,000 MiB are in use, but in its first call, for a while."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(GPU_TOOL.format(folder=folder, busy=busy))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


def test_an_engine_waits_until_the_gpus_memory_is_free(bench, tmp_path, monkeypatch):
    give_gpu(tmp_path, monkeypatch, busy=2)

    bench.lease().run(pair()[:1])

    (row,) = bench.rows()
    assert row["memory_before_bytes"] == 300 << 20
    assert row["gpu"] == "h100-80gb-hbm3"
    assert int((tmp_path / "calls").read_text()) == 4


def test_memory_that_stays_in_use_is_said_and_the_engine_tried(bench, tmp_path, monkeypatch):
    give_gpu(tmp_path, monkeypatch, busy=1000)
    monkeypatch.setattr(lease, "MEMORY_CAP_S", 0.6)

    bench.lease().run(pair()[:1])

    assert bench.rows()[0]["memory_before_bytes"] == 9000 << 20
    assert any("9000 MiB of the GPU are still in use" in line for line in bench.said)


def test_trials_are_held_once_where_there_is_time(bench, monkeypatch):
    monkeypatch.setattr(lease, "TRIALS_COMMAND", (sys.executable, "-c", "print('scan: passed')"))
    bench.lease(seconds=60).hold_trials()
    assert bench.rows("trials") == []

    bench.lease(seconds=300).hold_trials()
    bench.lease(seconds=300).hold_trials()

    (row,) = bench.rows("trials")
    assert (row["status"], row["lines"]) == (0, ["scan: passed"])


def test_the_parent_of_engines_imports_no_torch():
    code = "import sys, perf.engine.__main__; print(*sys.modules)"

    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=machine.ROOT
    ).stdout.split()

    assert {"torch", "triton", "vllm", "transformers"} & set(modules) == set()


def test_rows_of_other_commits_and_scales_do_not_count(tmp_path):
    path = tmp_path / "rows.jsonl"
    run = {"kind": "run", "case": "a", "side": "ours", "turn": 1, "workload": "w", "run": 1}
    for commit, scale in (("x", "full"), ("y", "tiny")):
        RowFile(path, commit=commit, scale=scale).add(run | {"seconds": 3.0})

    assert RowFile(path, commit="x", scale="full").runs(("a", "ours", 1)) == {("w", 1)}
    assert RowFile(path, commit="x", scale="tiny").runs(("a", "ours", 1)) == set()
    assert RowFile(path, commit="x", scale="full").measured("a", "ours", "seconds", "w") == 3.0
    assert RowFile(path, commit="x", scale="full").measured("a", "stock", "seconds") is None

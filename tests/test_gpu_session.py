"""A session of GPU work in pieces, with commands that need no GPU."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perf import gpu_session
from perf.gpu_session import Session, Stage, stages, summary, unpack

PERF = Path(gpu_session.__file__).parent


def python(name, code, **changes):
    return Stage(name=name, command=("-c", code), **changes)


def appends(path, word):
    return f"open({str(path)!r}, 'a').write({word!r})"


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "gpu", commit="abc", machine="a GPU", site=None)


def test_a_session_has_every_benchmark_and_every_test_of_kernels_and_engine():
    listed = {name.split()[0] for name in gpu_session.BENCHMARKS + gpu_session.HOST_BENCHMARKS}
    there = {path.stem for pattern in ("bench_*.py", "sweep_*.py") for path in PERF.glob(pattern)}
    names = [stage.name for stage in stages()]

    assert listed == there | {"roofline"}
    assert len(set(names)) == len(names)
    assert names.index("native test_paged_attention") < names.index("roofline")
    assert {"engine test_engine", "native slow test_paged_attention"} <= set(names)


def test_stages_that_ended_are_not_run_again_whether_they_passed_or_failed(session, tmp_path):
    trace = tmp_path / "trace"
    planned = [
        python("passes", appends(trace, "p")),
        python("fails", appends(trace, "f") + "; raise SystemExit(3)"),
    ]

    assert session.run(planned, seconds=60)
    assert session.run(planned, seconds=60)

    assert trace.read_text() == "pf"
    outcomes = session.outcomes()
    assert (outcomes["passes"].returncode, outcomes["fails"].returncode) == (0, 3)
    assert summary(planned, outcomes) == "2 of 2 stages ended, 1 failed: fails"


def test_another_commit_runs_everything_anew(session, tmp_path):
    trace = tmp_path / "trace"
    planned = [python("passes", appends(trace, "p"))]
    session.run(planned, seconds=60)

    later = Session(session.folder, commit="def", machine="a GPU", site=None)
    later.run(planned, seconds=60)

    assert trace.read_text() == "pp"


def test_a_stage_cut_short_is_stopped_with_its_children_and_run_by_the_next_call(
    session, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_session, "NOT_BEGUN_SECONDS", 0.1)
    trace = tmp_path / "trace"
    child = f"import time; time.sleep(2); {appends(trace, 'child ')}"
    begin = appends(trace, "begun ")
    start_child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    long = python("long", f"{begin}; {start_child}; import time; time.sleep(60)")
    after = python("after", appends(trace, "after"))

    assert not session.run([long, after], seconds=1)
    assert session.outcomes() == {}
    time.sleep(2.5)
    assert session.run([python("long", begin), after], seconds=60)

    assert trace.read_text() == "begun begun after"
    rows = (session.folder / "tests.jsonl").read_text().splitlines()
    assert [json.loads(row)["returncode"] for row in rows] == [None, 0, 0]


def test_nothing_is_begun_without_time_for_it(session, tmp_path):
    assert not session.run([python("stage", appends(tmp_path / "trace", "p"))], seconds=1)

    assert not (tmp_path / "trace").exists()
    assert session.outcomes() == {}


@pytest.mark.parametrize(("returncode", "skips"), [(0, True), (1, False)])
def test_benchmarks_skip_their_tests_only_where_those_of_the_kernels_passed(
    session, tmp_path, returncode, skips
):
    trace = tmp_path / "trace"
    record = f"import sys; open({str(trace)!r}, 'w').write(repr(sys.argv))"

    session.run(
        [
            python("native test_kernel", f"raise SystemExit({returncode})"),
            python("bench_kernel", record, is_test=False),
        ],
        seconds=60,
    )

    assert (repr("--skip-tests") in trace.read_text()) == skips
    assert str(session.folder.parent) in trace.read_text()


def test_peers_are_on_the_path_of_benchmarks_alone(session, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    session.site = Path("/site")

    path = {
        sees_peers: session.environment(sees_peers=sees_peers)["PYTHONPATH"].split(os.pathsep)
        for sees_peers in (False, True)
    }

    assert path[False][1:] == ["/site", "/mine"]
    assert path[True][1:] == ["/site", "/site/peers", "/mine"]


def test_a_bundle_is_unpacked_once_by_its_own_script(tmp_path):
    first, second, site = (tmp_path / name for name in ("first", "second", "site"))
    first.mkdir()
    second.mkdir()
    (second / "unpack.sh").write_text('mkdir -p "$2" && echo "$1 $PYTHON" >> "$2/env.sh"')

    unpack(f"{first}:{second}", site)
    unpack(f"{first}:{second}", site)

    assert (site / "env.sh").read_text() == f"{first}:{second} {sys.executable}\n"
    with pytest.raises(ValueError, match="holds unpack"):
        unpack(str(first), tmp_path / "other")


def test_a_session_goes_on_from_the_results_of_an_earlier_one(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace"
    first = python("first", appends(trace, "1"))
    planned = [first, replace(first, name="second", command=("-c", appends(trace, "2")))]
    monkeypatch.setattr(gpu_session, "stages", lambda: planned)
    earlier, later = str(tmp_path / "earlier"), str(tmp_path / "later")

    assert gpu_session.main(["--results", earlier, "--only", "first"]) == 0
    assert gpu_session.main(["--results", later, "--resume", earlier]) == 0
    assert gpu_session.main(["--results", later, "--minutes", "0"]) == 0  # all ended before

    assert trace.read_text() == "12"
    assert "2 of 2 stages ended, 0 failed" in capsys.readouterr().out
    planned.append(python("third", "raise SystemExit(1)"))
    assert gpu_session.main(["--results", later, "--minutes", "0"]) == 2
    assert gpu_session.main(["--results", later]) == 1

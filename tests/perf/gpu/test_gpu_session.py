"""A session of GPU work in pieces, with commands that need no GPU."""

import errno
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from dataclasses import replace
from importlib.metadata import Distribution
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf.gpu import gpu_bundle, gpu_session, gpu_stages
from perf.gpu.gpu_list import TIME_IS_UP
from perf.gpu.gpu_session import Session, summary
from perf.gpu.gpu_stages import Stage, stages
from perf.harness import timing
from tests.conftest import ENVIRONMENT
from tests.vllm_plugin.conftest import engine_environment

PERF = Path(gpu_session.__file__).parents[1]


def python(name, code, **changes):
    return Stage(name=name, command=("-c", code), **changes)


def appends(path, word):
    return f"open({str(path)!r}, 'a').write({word!r})"


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "gpu", commit="abc", machine="a GPU", site=None)


def test_a_session_has_every_benchmark_and_every_test_of_kernels_and_engine():
    benchmarks = gpu_stages.BENCHMARKS + gpu_stages.SWEEPS + gpu_stages.HOST_BENCHMARKS
    listed = {name.split()[0] for name in benchmarks}
    there = {
        path.stem for pattern in ("bench_*.py", "sweep_*.py") for path in PERF.glob(f"*/{pattern}")
    }
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

    assert session.run(planned, seconds=inf)
    assert session.run(planned, seconds=inf)

    assert trace.read_text() == "pf"
    outcomes = session.outcomes()
    assert (outcomes["passes"].returncode, outcomes["fails"].returncode) == (0, 3)
    assert summary(planned, outcomes) == "2 of 2 stages ended, 1 failed: fails"


def test_another_commit_runs_everything_anew(session, tmp_path):
    trace = tmp_path / "trace"
    planned = [python("passes", appends(trace, "p"))]
    session.run(planned, seconds=inf)

    later = Session(session.folder, commit="def", machine="a GPU", site=None)
    later.run(planned, seconds=inf)

    assert trace.read_text() == "pp"


def has_reader(pipe):
    """Whether a process has opened a pipe to read."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def test_a_stage_cut_short_is_stopped_with_its_children_and_run_by_the_next_call(
    session, tmp_path, monkeypatch
):
    trace, pipe = tmp_path / "trace", tmp_path / "pipe"
    os.mkfifo(pipe)
    # It waits for a writer, and lets go of the pipe as it ends.
    child = f"{appends(trace, 'child ')}; pipe = open({str(pipe)!r}); pipe.read()"
    child += f"; {appends(trace, 'lived ')}"
    begin = appends(trace, "begun ")
    start_child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    long = python("long", f"{begin}; {start_child}; import time; time.sleep(3600)")
    after = python("after", appends(trace, "after"))

    def monotonic():
        """Seconds that are over once the child has begun."""
        return 100.0 if trace.exists() and "child" in trace.read_text() else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(gpu_session, "ARCHIVE_SECONDS", 0.1)
        patch.setattr(gpu_session, "time", SimpleNamespace(monotonic=monotonic))
        assert not session.run([long, after], seconds=99)
    assert session.outcomes() == {}
    while has_reader(pipe):
        time.sleep(0.01)
    assert session.run([python("long", begin), after], seconds=inf)

    assert trace.read_text() == "begun child begun after"
    rows = (session.folder / "tests.jsonl").read_text().splitlines()
    assert [json.loads(row)["returncode"] for row in rows] == [None, 0, 0]


def test_nothing_is_begun_without_time_for_it(session, tmp_path):
    assert not session.run([python("stage", appends(tmp_path / "trace", "p"))], seconds=1)

    assert not (tmp_path / "trace").exists()
    assert session.outcomes() == {}


def test_benchmarks_are_told_which_tests_passed(session, tmp_path):
    trace = tmp_path / "trace"
    record = f"import sys; open({str(trace)!r}, 'w').write(' '.join(sys.argv[1:]))"

    session.run(
        [
            python("native test_kv_store", "raise SystemExit(0)"),
            python("native test_pages", "raise SystemExit(1)"),
            python("engine test_engine", "raise SystemExit(0)"),
            python("bench_kernel", record, is_test=False, is_timed=True),
        ],
        seconds=inf,
    )

    passed = "tests/kernels/attention/test_kv_store.py tests/vllm_plugin/engine/test_engine.py"
    results = session.folder.parent
    assert trace.read_text() == f"--results {results} --go-on --tests-passed {passed}"


def test_what_is_timed_runs_alone_and_the_rest_several_at_a_time(session, tmp_path):
    session.num_jobs = 2
    meet = (
        f"import pathlib, time, sys; here = pathlib.Path({str(tmp_path)!r})\n"
        "me, other = sys.argv[1:3]\n"
        "(here / me).touch()\n"
        "while not (here / other).exists(): time.sleep(0.05)"
    )
    seen = (
        f"import pathlib, sys; sys.exit(len(list(pathlib.Path({str(tmp_path)!r}).glob('met_*'))))"
    )
    planned = [
        Stage(name="one", command=("-c", meet, "met_1", "met_2")),
        Stage(name="two", command=("-c", meet, "met_2", "met_1")),
        python("timed", seen, is_test=False, is_timed=True),
    ]

    assert session.run(planned, seconds=inf)

    assert [session.outcomes()[name].returncode for name in ("one", "two", "timed")] == [0, 0, 2]


def test_a_stage_over_its_own_limit_holds_up_no_other_and_fails_the_second_time(session, tmp_path):
    trace = tmp_path / "trace"
    planned = [
        python("hangs", "import time; time.sleep(3600)", limit_seconds=0.5),
        python("after", appends(trace, "after")),
    ]

    assert not session.run(planned, seconds=inf)
    assert trace.read_text() == "after"
    assert set(session.outcomes()) == {"after"}
    assert session.run(planned, seconds=inf)
    assert session.outcomes()["hangs"].returncode == gpu_session.OVER_LIMIT
    assert not session.outcomes()["hangs"].passed


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
    (first / "py.tar.xz").touch()
    (second / "unpack.sh").write_text('mkdir -p "$2" && echo "$1 $PYTHON $CHECK" >> "$2/env.sh"')

    gpu_bundle.unpack(f"{first}:{second}", site)
    gpu_bundle.unpack(f"{first}:{second}", site)

    line = f"{first}:{second} {sys.executable} 0\n"
    assert (site / "env.sh").read_text() == line
    with pytest.raises(ValueError, match="holds unpack"):
        gpu_bundle.unpack(str(first), tmp_path / "other")
    # A part that came later.
    (second / "libs.tar.xz.000").touch()
    gpu_bundle.unpack(f"{first}:{second}", site)
    assert (site / "env.sh").read_text() == line + line


def test_a_bundle_is_cut_into_parts_that_travel_apart(tmp_path):
    bundle, out = tmp_path / "bundle", tmp_path / "out"
    bundle.mkdir()
    contents = {"vllm/_C.so": b"\x7fELF" * 900, "vllm/_moe_C_stable.so": b"expert" * 900}
    with tarfile.open(bundle / "vllm-libs.tar.xz", "w:xz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    for name in ("vllm-py.tar.xz", "peers.tar.xz", "unpack.sh"):
        (bundle / name).write_bytes(name.encode())

    sizes = gpu_bundle.split(bundle, out)

    assert set(sizes) == {"base", "experts", "peers"}
    assert sorted(path.name for path in (out / "base").iterdir()) == [
        "SHA256SUMS",
        "unpack.sh",
        "vllm-libs.tar.xz",
        "vllm-py.tar.xz",
    ]
    assert (out / "peers" / "peers.tar.xz").read_bytes() == b"peers.tar.xz"
    for archive, name in (
        ("base/vllm-libs", "_C.so"),
        ("experts/vllm-experts", "_moe_C_stable.so"),
    ):
        with tarfile.open(out / f"{archive}.tar.xz") as tar:
            (entry,) = tar
            assert entry.name == f"vllm/{name}"
            assert entry.mode == 0o755
            assert tar.extractfile(entry).read() == contents[entry.name]
    for line in (out / "base" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((out / "base" / name).read_bytes()).hexdigest() == digest
    with pytest.raises(ValueError, match="in one piece"):
        gpu_bundle.split(tmp_path, out)


def test_a_package_that_is_not_installed_is_announced_as_installing_it_would(tmp_path):
    gpu_bundle.announce_plugin(tmp_path)

    (package,) = Distribution.discover(path=[str(tmp_path)])
    names = {(point.group, point.name, point.value) for point in package.entry_points}
    assert ("vllm.general_plugins", "jenga", "jenga.vllm_plugin:register") in names
    assert package.metadata["Name"] == "jenga-kv"


def test_engines_of_the_tests_find_what_is_on_the_path_alone(monkeypatch):
    begun = {"PYTHONPATH": "/site", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_OTHER": "1"}
    for name, value in begun.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    monkeypatch.setenv("SET_BY_A_TEST", "1")

    environment = engine_environment()

    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == "/site"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_OTHER" not in environment
    assert "SET_BY_A_TEST" not in environment


def test_the_commit_is_named_for_a_copy_and_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_COMMIT", "abc123")
    assert timing.commit_of() == "abc123"

    monkeypatch.delenv("PERF_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert timing.commit_of() == "unknown"


def test_one_file_keeps_what_a_session_wrote_and_another_goes_on_from_it(
    tmp_path, monkeypatch, capsys
):
    planned = [python("stage", "print('hello')")]
    monkeypatch.setattr(gpu_session, "stages", lambda **_: planned)
    archive = tmp_path / "out.tar.gz"

    first = ["--results", str(tmp_path / "first"), "--archive", str(archive)]
    assert gpu_session.main(first) == 0
    second = ["--results", str(tmp_path / "second"), "--resume", str(archive), "--minutes", "0"]
    assert gpu_session.main(second) == 0

    assert "1 of 1 stages ended, 0 failed" in capsys.readouterr().out
    (log,) = (tmp_path / "second").glob("*/logs/stage.txt")
    assert log.read_text() == "hello\n"


def test_tools_that_are_missing_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_session, "NEEDED", ("pytest", "no_such_tool"))

    with pytest.raises(SystemExit):
        gpu_session.main(["--results", str(tmp_path)])

    assert "the tests need no_such_tool" in capsys.readouterr().err


def test_a_session_goes_on_from_the_results_of_an_earlier_one(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace"
    first = python("first", appends(trace, "1"))
    planned = [first, replace(first, name="second", command=("-c", appends(trace, "2")))]
    monkeypatch.setattr(gpu_session, "stages", lambda **_: planned)
    earlier, later = str(tmp_path / "earlier"), str(tmp_path / "later")

    assert gpu_session.main(["--results", earlier, "--only", "first"]) == 0
    assert gpu_session.main(["--results", later, "--resume", earlier]) == 0
    assert gpu_session.main(["--results", later, "--minutes", "0"]) == 0  # all ended before

    assert trace.read_text() == "12"
    assert "2 of 2 stages ended, 0 failed" in capsys.readouterr().out
    planned.append(python("third", "raise SystemExit(1)"))
    assert gpu_session.main(["--results", later, "--minutes", "0"]) == 2
    assert gpu_session.main(["--results", later]) == 1


def test_a_benchmark_that_was_cut_goes_on_from_its_last_shape(tmp_path):
    path = tmp_path / "rows.jsonl"
    shapes = [("a", "D1"), ("a", "D1"), ("a", "D2"), ("b", "D4"), ("a", "P1"), ("a", "D3")]
    path.write_text("".join(f'{{"commit": "{c}", "shape": "{shape}"}}\n' for c, shape in shapes))

    assert timing.measured_before(path, "a", only="D") == {"D1", "D2"}
    assert timing.measured_before(path, "a", only="P") == frozenset()
    assert timing.measured_before(tmp_path / "none", "a", only="") == frozenset()


def test_outcomes_are_counted_by_file_and_what_failed_is_named():
    log = """
[gw3] [  1%] PASSED tests/kernels/attention/test_kv_store.py::test_one[a b]
[gw1] [  2%] FAILED tests/kernels/attention/test_kv_store.py::test_two
tests/kernels/pages/test_pages.py::test_three PASSED                            [ 50%]
tests/kernels/pages/test_pages.py::test_four[x] SKIPPED (needs a GPU)           [100%]
[gw2] [  3%] FAILED tests/kernels/attention/test_kv_store.py::test_two
FAILED tests/kernels/attention/test_kv_store.py::test_two - AssertionError
"""

    text = gpu_session.tests_by_file(log)

    assert "test_kv_store: 2 failed, 1 passed" in text
    assert "test_pages: 1 passed, 1 skipped" in text
    assert text.endswith("1 failed\ntest_kv_store::test_two")


def test_a_brief_session_runs_all_tests_at_once_and_then_a_list(session, tmp_path, capsys):
    trace = tmp_path / "trace"
    said = "tests/kernels/attention/test_kv_store.py::test_one PASSED [ 50%]"
    record = f"import sys; open({str(trace)!r}, 'w').write(' '.join(sys.argv[1:]))"
    session.kernels = tmp_path / "kernels"
    tests, benchmarks = gpu_stages.brief_stages(test_seconds=30, num_workers=3)
    assert "tests/kernels" in tests.command
    assert tests.command[tests.command.index("-n") + 1] == "3"
    planned = [
        replace(tests, command=("-c", f"print({said!r})")),
        replace(benchmarks, command=("-c", record)),
    ]

    assert session.run(planned, seconds=60)

    assert "test_kv_store: 1 passed\n0 failed" in capsys.readouterr().out
    assert (session.folder / "tests.txt").read_text().startswith("a GPU\ntest_kv_store: 1 passed")
    results, seconds = trace.read_text().removeprefix("--results ").split(" --seconds ")
    assert results == str(session.folder.parent)
    assert 20 < float(seconds) <= 40
    variables = session.environment(sees_peers=False)
    assert variables["TRITON_CACHE_DIR"] == str(session.kernels)


def test_a_list_that_was_not_begun_whole_is_run_by_the_next_call(session):
    _, benchmarks = gpu_stages.brief_stages(test_seconds=30, num_workers=1)
    planned = [replace(benchmarks, command=("-c", f"raise SystemExit({TIME_IS_UP})"))]

    assert not session.run(planned, seconds=60)
    assert session.outcomes() == {}


def test_a_brief_session_runs_the_tests_and_the_list_that_are_named(tmp_path):
    listed = tmp_path / "list.txt"

    tests, benchmarks = gpu_stages.brief_stages(
        tests=["kv_store"], list_path=listed, test_seconds=30, num_workers=1
    )

    assert tests.command[-1] == "tests/kernels/attention/test_kv_store.py"
    assert "-n" not in tests.command
    assert benchmarks.command[-1] == str(listed)


def test_kernels_compiled_before_are_unpacked_beside_the_results(tmp_path, monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(command)
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(gpu_session.subprocess, "run", run)
    monkeypatch.setattr(gpu_session, "brief_stages", lambda **_: [])
    arguments = ["--results", str(tmp_path / "out"), "--brief", "--kernels", "k.tar.xz"]

    assert gpu_session.main(arguments) == 0

    unpacked = [command for command in ran if "perf.gpu.precompiled" in command]
    assert unpacked[0][2:] == [
        "perf.gpu.precompiled",
        str(tmp_path / "kernels"),
        "--unpack",
        "k.tar.xz",
    ]

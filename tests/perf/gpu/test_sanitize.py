import os
import subprocess
import sys

import pytest

from perf.gpu import sanitize


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a compute-sanitizer of its own: it says with what it was called, and returns this."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(returncode, says=""):
        path = tmp_path / "compute-sanitizer"
        path.write_text(
            f"#!/bin/sh\necho called with $PYTORCH_NO_CUDA_MEMORY_CACHING $@ {says}\n"
            f"exit {returncode}\n"
        )
        path.chmod(0o755)

    return make


@pytest.mark.parametrize("returncode", [0, 9])
def test_small_tests_run_under_the_tool_and_its_answer_is_returned(program, capsys, returncode):
    program(returncode)

    assert sanitize.main(["racecheck"]) == returncode

    said = capsys.readouterr().out
    assert "called with 1 --tool racecheck --error-exitcode 9" in said
    assert "test_attention_merge_may_write_onto_a_log_sum_exp" in said


def test_a_machine_that_the_tool_does_not_support_is_named_as_not_checked(program, capsys):
    program(9, says="Device not supported")

    assert sanitize.main(["memcheck"]) == 5

    assert "memcheck is not done" in capsys.readouterr().out


def test_without_the_tool_nothing_is_claimed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "USUAL_PATH", str(tmp_path))

    assert sanitize.main(["memcheck"]) == 5

    assert "memcheck is not done" in capsys.readouterr().out


def test_there_are_such_tests():
    """Where a GPU is, or is emulated: there alone those of one GPU's kernels are."""
    collect = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]

    done = subprocess.run(
        [*collect, *sanitize.small_tests()],
        cwd=sanitize.ROOT,
        env=os.environ | {"EMULATED_GPU": "90"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout

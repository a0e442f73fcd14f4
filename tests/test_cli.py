import builtins
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from jenga import cli


def run(capsys, *arguments):
    """Run the command line; get its exit code, output and errors."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version_is_the_distributions(capsys):
    assert run(capsys, "--version") == (0, f"jenga {version('jenga-kv')}\n", "")


def test_help_names_every_command(capsys):
    code, output, _ = run(capsys, "--help")

    assert code == 0
    assert "demo" in output


def test_demo_help_shows_an_example_of_every_option_that_takes_a_value(capsys):
    code, output, _ = run(capsys, "demo", "--help")

    assert code == 0
    for option in ("--prompt TEXT", "--max-tokens N", "--model DIRECTORY", "--arena-mib N"):
        assert option in output


def test_a_command_is_required(capsys):
    code, output, errors = run(capsys)

    assert (code, output) == (cli.EXIT_MISTAKE, "")
    assert "<command>" in errors.splitlines()[-1]


@pytest.mark.parametrize("value", ["0", "-3", "many", "1.5"])
@pytest.mark.parametrize("option", ["--max-tokens", "--arena-mib"])
def test_demo_refuses_a_number_that_is_not_positive(capsys, option, value):
    code, output, errors = run(capsys, "demo", f"{option}={value}")

    assert (code, output) == (cli.EXIT_MISTAKE, "")
    assert f"{option}: must be a positive integer, got '{value}'" in errors.splitlines()[-1]


def test_demo_refuses_a_model_that_is_no_directory_in_one_line(capsys, tmp_path):
    code, output, errors = run(capsys, "demo", "--model", str(tmp_path / "nowhere"))

    assert (code, output) == (cli.EXIT_MISTAKE, "")
    assert errors == (
        f"jenga: error: --model must be a directory with a config.json, got '{tmp_path}/nowhere'\n"
    )


def test_demo_says_in_one_line_that_vllm_is_missing(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("jenga.demo.run.find_spec", lambda name: None if name == "vllm" else name)

    code, output, errors = run(capsys, "demo", "--model", str(tmp_path))

    assert (code, output) == (cli.EXIT_MISTAKE, "")
    assert errors.startswith("jenga: error: package 'vllm' is not installed; `make env`")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("vLLM failed:\n  two lines"), "vLLM failed: two lines"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ValueError(), "ValueError"),
        (MemoryError(), "not enough memory on this machine for what was asked"),
        (KeyboardInterrupt(), "interrupted"),
    ],
    ids=["two_lines", "system", "no_text", "memory", "interrupt"],
)
def test_a_failure_is_one_line_and_no_traceback(capsys, monkeypatch, error, message):
    def fail(**_):
        raise error

    monkeypatch.setattr("jenga.demo.run.run_demo", fail)

    code, output, errors = run(capsys, "demo")

    assert (code, output, errors) == (cli.EXIT_MISTAKE, "", f"jenga: error: {message}\n")


@pytest.mark.parametrize("model", ["--list", "llama-3.2-1b"])
def test_a_reader_that_stops_reading_is_no_error(model):
    arguments = ["plan", model, "--without-vllm"]
    code = f"import sys; from jenga.cli import main; sys.exit(main({arguments}))"
    reader, writer = os.pipe()
    os.close(reader)

    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False
    )

    os.close(writer)
    assert (ended.returncode, ended.stderr) == (cli.EXIT_UNREAD, b"")


def test_heavy_packages_are_not_imported_for_help(capsys, monkeypatch):
    real_import = builtins.__import__

    def guarded(name, *args, **kwargs):
        assert name.split(".")[0] not in {"torch", "triton", "vllm", "transformers"}, name
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)

    code, _, _ = run(capsys, "demo", "--help")

    assert code == 0


def test_the_module_runs_as_the_command_does():
    command = [sys.executable, "-m", "jenga", "--version"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, f"jenga {version('jenga-kv')}\n")


def test_nothing_may_be_set_aside(capsys):
    command = ("plan", "llama-3.1-8b", "--gpu", "H100", "--json", "--without-vllm", "--reserve")

    budgets = []
    for reserve in ("0", "1GiB"):
        code, output, _ = run(capsys, *command, reserve)
        assert code == 0
        budgets.append(json.loads(output)["arena_bytes"])

    assert budgets[0] - budgets[1] == 1 << 30

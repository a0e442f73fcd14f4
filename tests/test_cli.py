import builtins
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

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
    for option in (
        "--prompt TEXT",
        "--max-tokens N",
        "--model DIRECTORY",
        "--arena-mib N",
        "--picture FILE",
    ):
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


def test_a_demo_whose_ending_failed_prints_the_rest_and_fails(capsys, monkeypatch):
    result = SimpleNamespace(ending_failure="stock vLLM failed: no memory")
    monkeypatch.setattr("jenga.demo.run.run_demo", lambda **_: result)
    monkeypatch.setattr("jenga.demo.report.as_text", lambda _: "the rest")

    code, output, errors = run(capsys, "demo")

    assert (code, output) == (cli.EXIT_MISTAKE, "the rest\n")
    assert errors == "jenga: error: stock vLLM failed: no memory\n"


@pytest.mark.parametrize(
    ("given", "picture"),
    [
        ([], Path("jenga-demo.svg")),
        (["--picture", "a.svg"], Path("a.svg")),
        (["--without-documents"], None),
    ],
    ids=["default", "named", "left_out"],
)
def test_demo_is_told_where_its_picture_goes(capsys, monkeypatch, given, picture):
    asked = {}
    result = SimpleNamespace(ending_failure="")
    monkeypatch.setattr(
        "jenga.demo.run.run_demo", lambda **options: asked.update(options) or result
    )
    monkeypatch.setattr("jenga.demo.report.as_text", lambda _: "")

    code, _, _ = run(capsys, "demo", *given)

    assert code == 0
    assert asked["picture"] == picture


def test_other_packages_say_no_more_than_errors_while_a_command_runs(capsys, monkeypatch):
    for name in cli._QUIET:
        monkeypatch.delenv(name, raising=False)
    child = logging.getLogger("vllm.config.model")
    level = logging.getLogger("vllm").level
    seen = []

    def look(**_):
        seen.append(os.environ["VLLM_LOGGING_LEVEL"])
        seen.append((child.isEnabledFor(logging.WARNING), child.isEnabledFor(logging.ERROR)))
        raise ValueError

    monkeypatch.setattr("jenga.demo.run.run_demo", look)

    run(capsys, "demo")

    assert seen == ["ERROR", (False, True)]
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    assert logging.getLogger("vllm").level == level


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "gemma-3-27b", "--gpu=H200"],
        ["doctor", "gemma-3-27b"],
        [
            *("replay", "--model=gemma-3-4b", "--gpu=L4", "--manager=vllm", "--quiet"),
            "--trace=articles:num_articles=1,num_questions=2,article_tokens=2000",
        ],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_ask_vllm_write_nothing_on_standard_error(arguments):
    # Other tests of the process may have made vLLM quiet.
    variables = {name: value for name, value in os.environ.items() if name not in cli._QUIET}

    ended = subprocess.run(
        [sys.executable, "-m", "jenga", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )

    assert ended.stdout
    assert ended.stderr == ""


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

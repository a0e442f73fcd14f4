import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jenga.demo import run

BIN = Path(sys.executable).parent


def test_engine_output_goes_to_the_file_also_from_child_processes(tmp_path):
    script = (
        "import subprocess, sys; from pathlib import Path; from jenga.demo.run import *\n"
        "from jenga.demo import run\n"
        "print('before')\n"
        "with run._engine_output(Path(sys.argv[1])):\n"
        "    print('inside'); print('error', file=sys.stderr)\n"
        "    subprocess.run(['echo', 'child'])\n"
        "print('after')\n"
    )

    process = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "log"], capture_output=True, text=True, check=True
    )

    assert process.stdout == "before\nafter\n"
    assert process.stderr == ""
    assert sorted((tmp_path / "log").read_text().split()) == ["child", "error", "inside"]


def test_heartbeat_says_what_runs_and_at_which_step(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_HEARTBEAT_S", 0.01)
    log = tmp_path / "log"
    whole = json.dumps({"step": 3, "tokens": {"a": 5, "b": 6}})
    log.write_text(f'{{"geometry": {{}}}}\n{whole}\n{{"step": 4, "tok')
    said = io.StringIO()

    with run._heartbeat("generating", said, memory_log=log):
        while said.getvalue().count("\n") < 2:
            pass

    lines = said.getvalue().splitlines()
    assert lines[0] == "generating ..."
    assert re.fullmatch(r"    \d+ s: step 3, 11 tokens held before it", lines[1])
    assert re.fullmatch(r"    done in \d+ s", lines[-1])


@pytest.mark.parametrize("text", ["", '{"geometry": {}}\n', '{"geome'], ids=["empty", "one", "cut"])
def test_latest_step_of_a_log_without_a_step_is_nothing(tmp_path, text):
    log = tmp_path / "log"
    log.write_text(text)

    assert run._latest_step(log) == ""


def test_environment_leaves_the_choice_of_backend_to_the_engines_argument(monkeypatch):
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    environ = {"VLLM_ATTENTION_BACKEND": "JENGA_TRITON", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    run._prepare_environment(environ)

    assert "VLLM_ATTENTION_BACKEND" not in environ
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_environment_is_prepared_before_weights_are(monkeypatch):
    seen = []

    def directory(*_, **__):
        seen.append(os.environ.get("VLLM_ATTENTION_BACKEND"))
        raise OSError

    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "JENGA_TRITON")
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    monkeypatch.setattr(run, "gemma3_270m_directory", directory)
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")  # set back after the test, as the others are

    with pytest.raises(OSError, match=r"^$"):
        run.run_demo(max_tokens=1, arena_bytes=1)

    assert seen == [None]


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("given", [{}, {"TRITON_INTERPRET": "1"}], ids=["unset", "set"])
def test_the_interpreter_is_left_to_who_starts_the_demo(has_gpu, given, monkeypatch):
    monkeypatch.setattr(run, "has_gpu", lambda: has_gpu)
    environ = dict(given)

    run._prepare_environment(environ)

    assert environ.items() >= given.items()
    assert ("TRITON_INTERPRET" in environ) == bool(given)


def test_cause_of_a_failure_is_found_in_the_output_of_the_engines_process(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore) INFO starting\n(EngineCore) ValueError: the arena is too small\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    general = RuntimeError("Engine core initialization failed. See root cause above.")

    assert run._cause(general, log).endswith("ValueError: the arena is too small")
    assert run._cause(ValueError("prompt too long"), log) == "vLLM failed: prompt too long"


def jenga_demo(*arguments):
    return subprocess.run(
        [BIN / "jenga", "demo", *arguments],
        env={k: v for k, v in os.environ.items() if not k.startswith("JENGA_MEMORY")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.vllm
def test_demo_serves_real_weights_and_accounts_for_their_memory():
    prompts = ["The capital of France is", "Water boils at"]

    process = jenga_demo(
        "--json", "--without-documents", "--max-tokens=6", *(f"--prompt={p}" for p in prompts)
    )

    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout)
    texts = [completion["text"] for completion in result["completions"]]
    assert texts[0].strip().startswith("the capital of the country")
    assert texts[1].strip().startswith("100 degrees Celsius")
    layers = {t["name"]: len(t["layers"]) for t in result["timeline"]["tables"]}
    assert layers == {"sliding_512": 15, "full": 3}
    last = result["timeline"]["steps"][-1]
    assert list(last["request_tokens"].values()) == [10, 8]
    # One page of 16 tokens for each request in every layer, 2,048 bytes a token.
    assert last["held_bytes"]["sliding_512"] == 2 * 15 * 16 * 2048
    assert last["needed_bytes"] == {"sliding_512": 18 * 15 * 2048, "full": 18 * 3 * 2048}
    by_name = {run["name"]: run for run in result["stock"]}
    ours = by_name["vLLM, blocks of 16"]["held_bytes"][-1]
    assert ours == {"sliding_512": 2 * 15 * 16 * 2048, "full": 2 * 3 * 16 * 2048}


@pytest.mark.slow
@pytest.mark.vllm
def test_demo_with_an_arena_too_small_says_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    process = jenga_demo("--arena-mib=1", "--prompt=Hello", "--max-tokens=1")

    assert process.returncode == 2
    assert process.stdout == ""
    error = process.stderr.splitlines()[-1]
    assert error.startswith("jenga: error: vLLM failed: ")
    assert "one request of 2048 tokens (--max-model-len) takes" in error
    assert f"(the engine's output is in {tmp_path}/" in error
    assert "Traceback" not in process.stderr

"""Real engines that share one arena: tokens, moving memory, engines and brokers that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from jenga.broker.folder import ArenaFolder
from tests.vllm_plugin.conftest import ENGINE_OPTIONS, engine_environment, program
from tests.vllm_plugin.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
LARGE_PAGE_BYTES, NUM_PAGES = 192 << 10, 97
PATIENCE_S = 240


class Engine:
    """A process of `shared_engine_process.py`."""

    def __init__(self, process):
        self.process = process

    def ask(self, prompts, num_tokens):
        self.process.stdin.write(json.dumps([prompts, num_tokens]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)

    def generate(self, prompts, num_tokens=8):
        self.ask(prompts, num_tokens)
        return self.answer()


@contextmanager
def engine(model, log, **variables):
    environment = engine_environment(
        by_references=True, VLLM_ENABLE_V1_MULTIPROCESSING="1", **variables
    )
    options = ENGINE_OPTIONS | {
        "model": str(model),
        "attention_backend": "JENGA_TRITON",
        "enable_prefix_caching": True,
        "max_model_len": 320,
        "max_num_seqs": 16,
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, HERE / "shared_engine_process.py", json.dumps(options)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Engine(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def broker(folder, *options):
    command = [sys.executable, "-m", "jenga", "broker", "start", folder.path, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    with program(command, environment, stdout=subprocess.PIPE, text=True) as process:
        assert "lends" in process.stdout.readline()
        yield process


def shared(folder, guarantee_pages):
    return {
        "JENGA_SHARED_ARENA": str(folder.path),
        "JENGA_SHARED_ARENA_GUARANTEE": str(guarantee_pages * LARGE_PAGE_BYTES),
    }


def holdings(folder):
    """Model -> number of large pages, and process of its engine core."""
    with folder.open_books().closing() as books:
        return {
            each.name.rpartition("-")[0]: (len(books.pages_of(row + 1)), each.processes[0].pid)
            for row, each in books.agreements()
        }


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_two_engines_of_other_models_share_an_arena_and_answer_as_alone(tiny_model, tmp_path):
    models = [tiny_model("gemma3"), tiny_model("granite_hybrid")]
    many = [
        prompts_of_lengths([60 + 17 * (i % 9) for i in range(24)], seed=seed, shared_tokens=40)
        for seed in (1, 2)
    ]
    more = [prompts_of_lengths([200] * 24, seed=seed) for seed in (3, 4)]
    alone = []
    for model, prompts, others in zip(models, many, more, strict=True):
        with engine(model, tmp_path / f"alone-{model.name}.log") as one:
            assert one.answer() == "ready"
            alone.append((one.generate(prompts), one.generate(others)))

    folder = ArenaFolder(tmp_path / "arena")
    sizes = ["--large-page-bytes", LARGE_PAGE_BYTES, "--bytes", NUM_PAGES * LARGE_PAGE_BYTES]
    with ExitStack() as stack:
        first_broker = stack.enter_context(broker(folder, *sizes))
        engines = [
            stack.enter_context(engine(model, tmp_path / f"{model.name}.log", **shared(folder, 24)))
            for model in models
        ]
        assert [one.answer() for one in engines] == ["ready", "ready"]
        names = [model.name for model in models]

        # One after the other: what one leaves cached goes to the other, though it is idle.
        assert engines[0].generate(many[0]) == alone[0][0]
        assert engines[0].generate(more[0]) == alone[0][1]
        most_of_first = holdings(folder)[names[0]][0]
        assert engines[1].generate(many[1]) == alone[1][0]
        assert engines[1].generate(more[1]) == alone[1][1]
        held = holdings(folder)
        assert most_of_first > 48
        assert held[names[1]][0] > 48
        assert held[names[0]][0] < most_of_first

        # Both at once, and without a broker for a while.
        first_broker.kill()
        for one, prompts in zip(engines, many, strict=True):
            one.ask(prompts, 8)
        assert [one.answer() for one in engines] == [alone[0][0], alone[1][0]]
        stack.enter_context(broker(folder))
        for one, prompts in zip(engines, more, strict=True):
            one.ask(prompts, 8)
        assert [one.answer() for one in engines] == [alone[0][1], alone[1][1]]

        # One is killed while it serves. The other gets its memory, and answers as before.
        engines[0].ask(more[0], 100)
        time.sleep(0.5)
        os.kill(holdings(folder)[names[0]][1], signal.SIGKILL)
        until(lambda: names[0] not in holdings(folder))
        for prompts in (more[1], many[1]):
            engines[1].generate([prompt[::-1] for prompt in prompts])
        assert engines[1].generate(many[1]) == alone[1][0]
        assert holdings(folder)[names[1]][0] > NUM_PAGES - 24

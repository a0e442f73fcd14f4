"""Real engines that share one arena: tokens, moving memory, engines and brokers that are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from jenga.broker.folder import ArenaFolder
from tests.conftest import ENVIRONMENT, HAS_GPU
from tests.vllm_plugin.conftest import ENGINE_OPTIONS, V2_RUNNER, engine_environment, program
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
LARGE_PAGE_BYTES, NUM_PAGES = 192 << 10, 23
GUARANTEE_PAGES = 8
PATIENCE_S = 120


class Engine:
    """A process of `shared_engine_process.py`."""

    def __init__(self, process, name):
        self.process = process
        self.name = name

    def order(self, action, prompts=(), num_tokens=3):
        self.process.stdin.write(json.dumps([action, prompts, num_tokens]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)

    def ask(self, action, prompts=(), num_tokens=3):
        self.order(action, prompts, num_tokens)
        return self.answer()

    def num_held(self, folder):
        return holdings(folder).get(self.name, 0)


@contextmanager
def engine(model, folder, variables=None, **changes):
    options = ENGINE_OPTIONS | {
        "model": str(model),
        "attention_backend": "JENGA_TRITON",
        "enable_prefix_caching": True,
        "max_num_seqs": 16,
        **changes,
    }
    command = [
        sys.executable,
        HERE / "shared_engine_process.py",
        json.dumps(options),
        folder.path,
        str(GUARANTEE_PAGES * LARGE_PAGE_BYTES),
    ]
    log = (folder.path.parent / f"{model.name}.log").open("w")
    with (
        log,
        subprocess.Popen(
            command,
            env=engine_environment(by_references=True, **(variables or {})),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield Engine(process, f"{model.name}-{process.pid}")
        finally:
            process.kill()


@contextmanager
def broker(folder, *options):
    command = [sys.executable, "-m", "jenga", "broker", "start", folder.path, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    with program(command, environment, stdout=subprocess.PIPE, text=True) as process:
        assert "lends" in process.stdout.readline()
        yield process


def holdings(folder):
    """Name of each engine -> number of its large pages."""
    with folder.open_books().closing() as books:
        return {each.name: len(books.pages_of(row + 1)) for row, each in books.agreements()}


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_two_engines_of_other_models_share_an_arena_and_answer_as_alone(tiny_model, tmp_path):
    models = [tiny_model("gemma3"), tiny_model("granite_hybrid")]
    prompts = [
        prompts_of_lengths([90, 120, 180, 200, 150, 170], seed=seed, shared_tokens=20)
        for seed in (1, 2)
    ]
    folder = ArenaFolder(tmp_path / "arena")
    sizes = ["--large-page-bytes", LARGE_PAGE_BYTES, "--bytes", NUM_PAGES * LARGE_PAGE_BYTES]
    with ExitStack() as stack:
        first_broker = stack.enter_context(broker(folder, *sizes))
        engines = [stack.enter_context(engine(model, folder)) for model in models]
        first, second = engines
        for one, asked in zip(engines, prompts, strict=True):
            one.order("alone", asked)
        alone = [one.answer() for one in engines]

        # One after the other: what one leaves cached goes to the other, though it has no work.
        assert first.ask("generate", prompts[0]) == alone[0]
        most_of_first = first.num_held(folder)
        assert most_of_first > NUM_PAGES - 1 - GUARANTEE_PAGES
        stop = threading.Event()
        rests = []

        def rest():
            while not stop.is_set():
                rests.append(first.ask("rest"))
                time.sleep(0.05)

        resting = threading.Thread(target=rest)
        resting.start()
        answers = second.ask("generate", prompts[1])
        stop.set()
        resting.join()
        assert answers == alone[1]
        assert GUARANTEE_PAGES <= first.num_held(folder) < most_of_first
        assert min(rests) >= GUARANTEE_PAGES

        # Both at once, without a broker and then with the next one.
        first_broker.kill()
        first_broker.wait()
        for one, asked in zip(engines, prompts, strict=True):
            one.order("generate", asked)
        assert [one.answer() for one in engines] == alone
        stack.enter_context(broker(folder))

        # One is killed while it serves. The other gets its memory, and answers as before.
        held_before = second.num_held(folder)
        first.order("generate", prompts[0], 50)
        time.sleep(0.5)
        os.kill(first.process.pid, signal.SIGKILL)
        until(lambda: first.name not in holdings(folder))
        second.ask("generate", [prompt[::-1] for prompt in prompts[1]])
        assert second.ask("generate", prompts[1]) == alone[1]
        assert second.num_held(folder) > held_before


@pytest.mark.slow
def test_a_start_as_on_a_gpu_writes_to_no_large_page_that_others_may_have(tiny_model, tmp_path):
    folder = ArenaFolder(tmp_path / "arena")
    sizes = ["--large-page-bytes", LARGE_PAGE_BYTES, "--bytes", NUM_PAGES * LARGE_PAGE_BYTES]
    options = ENGINE_OPTIONS | {
        "model": str(tiny_model("granite_hybrid")),
        "attention_backend": "JENGA_TRITON",
        "enable_prefix_caching": True,
        **graphs_of(1, 4),
    }
    environment = engine_environment(
        JENGA_SHARED_ARENA=str(folder.path),
        JENGA_SHARED_ARENA_GUARANTEE=str(GUARANTEE_PAGES * LARGE_PAGE_BYTES),
        **{V2_RUNNER: "1"},
    )
    command = [sys.executable, HERE / "shared_start_process.py", json.dumps(options), folder.path]
    with broker(folder, *sizes):
        written = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    assert set(json.loads(written)) <= {0}  # the null page


@pytest.mark.slow
def test_the_check_for_gpus_passes():
    """Without a GPU it runs with a driver that has none."""
    command = [sys.executable, "-m", "tests.vllm_plugin.arena.sharing_on_gpu"]
    options = [] if HAS_GPU else ["--fake"]
    output = subprocess.run(
        [*command, *options],
        check=False,
        cwd=HERE.parents[2],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert output.endswith("passed\n"), output


def test_an_engine_without_work_is_woken_up_to_return_what_the_broker_calls_for(monkeypatch):
    import queue

    from jenga.vllm_plugin.scheduler import resting

    rests, news = [], threading.Event()

    class Manager:
        kv_cache_config = SimpleNamespace(shared_arena="membership")

        def rest(self):
            rests.append(threading.current_thread())

    class Core:
        def __init__(self):
            self.scheduler = SimpleNamespace(kv_cache_manager=Manager())
            self.input_queue = queue.Queue()

    monkeypatch.setattr(resting, "JengaKVCacheManager", Manager)
    monkeypatch.setattr(resting, "wait_for_news", lambda _, seconds: news.wait(seconds))
    core = Core()
    resting.rest(core)
    assert core.input_queue.empty()
    news.set()
    kind, content = core.input_queue.get()
    assert (kind.name, content) == ("WAKEUP", None)
    # It is woken up once, until it has read the news.
    time.sleep(0.05)
    assert core.input_queue.empty()
    resting.rest(core)
    assert core.input_queue.get()[0].name == "WAKEUP"
    assert rests == [threading.main_thread()] * 2

    resting.rest(SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=object())))
    assert len(rests) == 2

"""The check of an arena on a GPU: `python -m tests.vllm_plugin.arena.sharing_on_gpu`.

A broker starts, and two processes write and read its memory. They and the broker are killed. Then
two engines share it, and their answers must be those that they give alone. At last the holder is
killed. Each step prints a line with the seconds since the start. The exit status is 0 if all steps
passed.

`--fake` runs the same steps without a GPU, with a CUDA driver that has none.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jenga.broker.folder import ArenaFolder
from tests.broker import fake_cuda
from tests.vllm_plugin.arena.test_shared_arena import (
    GUARANTEE_PAGES,
    HERE,
    LARGE_PAGE_BYTES,
    engine,
    until,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny import tiny_checkpoints

ROOT = HERE.parents[2]
MODELS = "gemma3", "granite_hybrid"
NUM_BYTES = 5 << 29
"""Bytes of the arena. 32 bits cannot count them.

An engine without work returns nothing here, so there is room for all that both take.
"""

LINES_SHOWN = 30
"""Number of lines shown from the log of each engine after a failure."""


class Steps:
    """Lines of output, one a step."""

    def __init__(self):
        self._start_s = time.monotonic()

    def done(self, text):
        sys.stdout.write(f"{time.monotonic() - self._start_s:6.1f} s  {text}\n")
        sys.stdout.flush()


@contextmanager
def broker(folder, *options):
    command = [sys.executable, "-m", "jenga", "broker", "start", folder.path, *map(str, options)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert "lends" in line, "the broker has ended"
            yield process
        finally:
            process.kill()


class Bytes:
    """A process of `shared_bytes_process.py`."""

    def __init__(self, stack, folder):
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, HERE / "shared_bytes_process.py", folder.path],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def ask(self, action, seed):
        self.process.stdin.write(json.dumps([action, seed]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


def free_bytes():
    """Bytes of the GPU's memory that nobody uses, as the driver counts them."""
    import torch

    return torch.cuda.mem_get_info(0)[0]


def check_bytes(steps, stack, folder, sizes):
    """Write and read from several processes while they and the broker are killed."""
    first_broker = stack.enter_context(broker(folder, *sizes))
    memory = folder.memory
    steps.done(f"a broker has an arena on {memory.device}")
    writer, reader = Bytes(stack, folder), Bytes(stack, folder)
    assert not reader.ask("read", 1), "memory that nobody wrote has the pattern"
    assert writer.ask("write", 1)
    assert reader.ask("read", 1), "the other process reads something else"
    steps.done("one process writes, and another reads it")
    writer.process.kill()
    writer.process.wait()
    assert reader.ask("read", 1)
    assert reader.ask("write", 2)
    steps.done("the first process is killed, and the second reads and writes on")
    first_broker.kill()
    first_broker.wait()
    assert reader.ask("read", 2)
    stack.enter_context(broker(folder))
    third = Bytes(stack, folder)
    assert third.ask("read", 2), "a process that came after another broker reads something else"
    assert folder.memory == memory
    steps.done("the broker is killed and started again, and a third process reads the same")
    for each in (reader, third):
        each.process.kill()
        each.process.wait()


def check_engines(steps, stack, folder, path, *, is_fake):
    """Let two engines share the arena. Return them, their prompts and their answers."""
    models = [tiny_checkpoints.save(name, path) for name in MODELS]
    prompts = [prompts_of_lengths([90, 120, 180, 200], seed=seed) for seed in (1, 2)]
    names = (fake_cuda.FOLDER_VARIABLE, "LD_LIBRARY_PATH") if is_fake else ()
    variables = {name: os.environ[name] for name in names}
    # Without this, an engine measures what it takes beside its arena, as servers do.
    changes = {} if is_fake else {"kv_cache_memory_bytes": None}
    engines = [
        stack.enter_context(engine(models[0], folder, variables, **changes)),
        stack.enter_context(engine(models[1], folder, variables)),
    ]
    for one, asked in zip(engines, prompts, strict=True):
        one.order("alone", asked)
    alone = [one.answer() for one in engines]
    steps.done("two engines answer, each in an arena of its own")
    for name, one, asked, answers in zip(MODELS, engines, prompts, alone, strict=True):
        assert one.ask("generate", asked) == answers, f"{name}: other answers"
        steps.done(f"{name} answers in the shared arena as alone")
    for one, asked in zip(engines, prompts, strict=True):
        one.order("generate", asked)
    assert [one.answer() for one in engines] == alone, "other answers when both compute"
    held = [one.num_held(folder) for one in engines]
    assert min(held) >= GUARANTEE_PAGES
    steps.done(f"both answer at once as alone, with {held} large pages")
    return engines, prompts, alone


def check_lost_memory(steps, folder, log, one, prompts):
    """Kill the holder. The next step of an engine must fail, and say why."""
    holder = folder.memory.holder
    os.kill(holder.pid, signal.SIGKILL)
    until(lambda: not holder.is_alive)
    one.order("generate", prompts)
    assert not one.process.stdout.readline(), "an engine answers without memory"
    one.process.wait()
    assert "MemoryLostError" in log.read_text(), "an engine does not say why it ends"
    steps.done("the holder is killed, and the engine says so and ends")


def check(*, is_fake):
    """Run all steps."""
    steps = Steps()
    free_before = 0 if is_fake else free_bytes()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        pytest.MonkeyPatch.context() as patches,
        ExitStack() as stack,
    ):
        path = Path(name)
        if is_fake:
            fake_cuda.install(path, patches)
        folder = ArenaFolder(path / "arena")
        sizes = ["--large-page-bytes", LARGE_PAGE_BYTES, "--bytes", NUM_BYTES]
        try:
            check_bytes(steps, stack, folder, [*sizes, "--device", "cuda:0"])
            engines, prompts, alone = check_engines(steps, stack, folder, path, is_fake=is_fake)
            engines[0].process.kill()
            engines[0].process.wait()
            until(lambda: engines[0].num_held(folder) == 0)
            assert engines[1].ask("generate", prompts[1]) == alone[1]
            steps.done("one engine is killed, and the other answers as before")
            log = path / f"{MODELS[1]}.log"
            check_lost_memory(steps, folder, log, engines[1], prompts[1])
        except Exception:
            for log in path.glob("*.log"):
                lines = log.read_text().splitlines()[-LINES_SHOWN:]
                sys.stdout.write("\n".join([f"{log.name}:", *lines, ""]))
            raise
        finally:
            stack.close()
            if folder.books.exists():
                folder.remove()
        if not is_fake:
            until(lambda: free_bytes() > free_before - NUM_BYTES // 2)
        steps.done("the arena is removed, and its memory is free")
    steps.done("passed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fake", action="store_true", help="use a CUDA driver without a GPU")
    check(is_fake=parser.parse_args().fake)

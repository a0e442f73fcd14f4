"""Run one vLLM engine in a process of its own, and serve the workloads that `perf.engine` orders.

    python -m perf.engine.runs.child JOB.json --replies FD

The job file describes the engine. Orders arrive as JSON lines on standard input, and replies leave
as JSON lines on the file descriptor. vLLM's own output goes to standard output and standard error.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from perf.engine.planning import models, weights
from perf.engine.planning.models import Scale
from perf.engine.planning.workloads import Prompts, Turn, Workload
from perf.engine.runs import compilations, flash, serving

NUM_WARM_UP_TURNS = 8
"""Number of a workload's first requests that are served as a warm-up before its first run."""

WARMER_LENGTHS = 33, 700, 5000
"""Lengths, in tokens, of three prompts that make kernels compile.

A fourth prompt shares its first `WARMER_HIT` tokens with the longest of them.
"""

WARMER_HIT = 3000
WARMER_OUTPUT_TOKENS = 8

PACKAGES = ("vllm", "torch", "triton", "transformers")


class Child:
    """An engine, and the outputs of its last run of each workload.

    Args:
        job: Contents of the job file (`perf.engine.runs.jobs.job_of`): engine options, and how
            weights are made.
        replies: File descriptor that replies are written to.
    """

    def __init__(self, job: dict[str, Any], replies: int) -> None:
        self._job = job
        self._replies = os.fdopen(replies, "w", encoding="utf-8")
        self._last: dict[str, list[serving.Served]] = {}
        self._warm: set[str] = set()
        self._stats = serving.StepStats()

    def start(self) -> None:
        """Create the engine, and reply with the seconds this took, versions and memory."""
        began_s = time.monotonic()
        job = self._job
        self._watch = compilations.Watch()
        for folder, configuration in job["configurations"].items():
            models.save(configuration, Path(folder))
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if job["options"].get("load_format") == "dummy":
            weights.install(job["draft_folder"], job["draft_acceptance"])
        if job["uses_flash"]:
            flash.install()
        arguments = EngineArgs(**job["options"])
        self._engine = LLMEngine.from_engine_args(
            arguments,
            stat_loggers=[self._stats],  # pyright: ignore[reportArgumentType] (its duck)
        )
        self._prompts = Prompts(self._engine.model_config.get_vocab_size())
        self._reply(
            start_s=time.monotonic() - began_s,
            start_compilations=asdict(self._watch.counts()),
            versions=_versions(),
            memory=_memory(),
            backend=self._backend(),
        )

    def obey(self, order: dict[str, Any]) -> None:
        """Execute an order.

        Raises:
            ValueError: The order is unknown.
        """
        match order["do"]:
            case "serve":
                self._serve(order)
            case "judge":
                self._judge(order)
            case "compile":
                self._compile()
            case unknown:
                msg = f"orders are serve, judge and compile, got {unknown!r}"
                raise ValueError(msg)

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()

    def _serve(self, order: dict[str, Any]) -> None:
        workload = Workload(**order["workload"])
        turns = workload.turns(Scale(self._job["scale"]))
        if workload.name not in self._warm:
            serving.empty_cache(self._engine)
            serving.serve(self._engine, _first(turns), self._prompts, label="warm")
            self._warm.add(workload.name)
        serving.empty_cache(self._engine)
        before = self._watch.counts()
        self._stats.begin()
        served = serving.serve(self._engine, turns, self._prompts, label=str(order["run"]))
        counts = self._watch.counts().since(before)
        self._last[workload.name] = served
        Path(order["outputs"]).write_text(json.dumps([each.output() for each in served]))
        self._reply(
            **serving.summary(served),
            **self._stats.summary(),
            compilations=asdict(counts),
            is_disturbed=counts.is_disturbed,
            memory=_memory(),
        )

    def _judge(self, order: dict[str, Any]) -> None:
        served = self._last[order["workload"]]
        partings = [
            {
                "prompt": served[each["index"]].prompt
                + served[each["index"]].tokens[: each["position"]],
                "tokens": each["tokens"],
            }
            for each in order["partings"]
        ]
        self._reply(gaps=serving.judge(self._engine, partings))

    def _compile(self) -> None:
        """Serve a few prompts, of lengths for which different kernels are chosen."""
        from jenga.sim.workload.requests import Piece, Request

        longest = self._engine.model_config.max_model_len - WARMER_OUTPUT_TOKENS
        texts: list[tuple[Piece, ...]] = [
            (Piece(f"warmer {length}", min(length, longest)),) for length in WARMER_LENGTHS
        ]
        shared = min(WARMER_HIT, longest // 2)
        texts.append(
            (
                Piece(f"warmer {WARMER_LENGTHS[-1]}", shared),
                Piece("warmer end", min(100, longest - shared)),
            )
        )
        requests = [
            Request(name=str(index), prompt=text, output_tokens=WARMER_OUTPUT_TOKENS)
            for index, text in enumerate(texts)
        ]
        turns = [
            Turn(request=request, after=index - 1 if index else None, delay_s=0.0)
            for index, request in enumerate(requests)
        ]
        serving.serve(self._engine, turns, self._prompts, label="compile")
        # All prompts at once, so that a step decodes several requests.
        together = [Turn(request=request, after=None, delay_s=0.0) for request in requests]
        serving.serve(self._engine, together, self._prompts, label="together")
        self._reply(compilations=asdict(self._watch.counts()))

    def _backend(self) -> str:
        """Return the names of the attention backends of the layers."""
        context = self._engine.vllm_config.compilation_config.static_forward_context
        names = {
            layer.get_attn_backend().get_name()
            for layer in context.values()
            if hasattr(layer, "get_attn_backend")
        }
        return ", ".join(sorted(names))

    def _reply(self, **values: object) -> None:
        self._replies.write(json.dumps(values) + "\n")
        self._replies.flush()


def _first(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that warm an engine up, without the users' thinking time."""
    return [
        Turn(request=turn.request, after=turn.after, delay_s=0.0)
        for turn in turns[:NUM_WARM_UP_TURNS]
    ]


def _memory() -> dict[str, int]:
    """Return the GPU's bytes in use and torch's peak; on a CPU the peak bytes of the process."""
    import torch

    if not torch.cuda.is_available():
        import resource

        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_process_bytes": peak_kib << 10}
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "used_bytes": total_bytes - free_bytes,
        "peak_torch_bytes": torch.cuda.max_memory_allocated(),
    }


def _versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            module = sys.modules.get(name)
            found[name] = getattr(module, "__version__", "unknown")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the engine, and execute orders until standard input ends.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m perf.engine.runs.child", description=__doc__)
    parser.add_argument("job", type=Path, help="file of the job")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor for replies")
    options = parser.parse_args(arguments)
    os.set_inheritable(options.replies, False)  # noqa: FBT003  (its only form)
    child = Child(json.loads(options.job.read_text()), options.replies)
    child.start()
    for line in sys.stdin:
        child.obey(json.loads(line))
    child.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

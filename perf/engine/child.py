"""One vLLM engine in a process of its own, which serves what `perf.engine` asks for.

    python -m perf.engine.child JOB.json --replies FD

A job is a file. Orders come as JSON lines on standard input, replies go as JSON lines to the file
descriptor; what vLLM prints goes wherever its output goes.
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

from perf.engine import compilations, flash, models, serving, weights
from perf.engine.models import Scale
from perf.engine.workloads import Prompts, Turn, Workload

NUM_WARM_UP_TURNS = 8
"""Of a workload's requests, served before the first run of it."""

WARMER_LENGTHS = 33, 700, 5000
"""Prompts that compile kernels; a fourth one shares `WARMER_HIT` tokens with the longest."""

WARMER_HIT = 3000
WARMER_OUTPUT_TOKENS = 8

PACKAGES = ("vllm", "torch", "triton", "transformers")


class Child:
    """An engine and what it has served.

    Args:
        job: What `perf.engine` wrote: engine options and how weights are made.
        replies: File descriptor of the replies.
    """

    def __init__(self, job: dict[str, Any], replies: int) -> None:
        self._job = job
        self._replies = os.fdopen(replies, "w", encoding="utf-8")
        self._last: dict[str, list[serving.Served]] = {}
        self._warm: set[str] = set()
        self._stats = serving.StepStats()

    def start(self) -> None:
        """Make the engine, and say how long that took."""
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
        """Do what an order says.

        Raises:
            ValueError: There is no such order.
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
        """Let the engine go."""
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
        """Serve a few prompts of the lengths that kernels are chosen by."""
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
        # And all at once, which decodes several requests in a step.
        together = [Turn(request=request, after=None, delay_s=0.0) for request in requests]
        serving.serve(self._engine, together, self._prompts, label="together")
        self._reply(compilations=asdict(self._watch.counts()))

    def _backend(self) -> str:
        """Name the backend that layers of attention have."""
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
    """Get the turns that warm an engine up, each without what it thinks."""
    return [
        Turn(request=turn.request, after=turn.after, delay_s=0.0)
        for turn in turns[:NUM_WARM_UP_TURNS]
    ]


def _memory() -> dict[str, int]:
    """Get bytes of the GPU in use, and the most that torch has had; of the process on a CPU."""
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
    """Get the versions of what runs."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            module = sys.modules.get(name)
            found[name] = getattr(module, "__version__", "unknown")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until there are no more orders.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m perf.engine.child", description=__doc__)
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

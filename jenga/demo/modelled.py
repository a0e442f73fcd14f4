"""Modelled seconds and a plan of memory for the reader's GPU. Nothing here is measured."""

import argparse
import io
import json
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from jenga.demo.documents import Answer
from jenga.models import ModelFacts, ReadOptions, find_model
from jenga.sim.batching.arena import ActiveRequest, Chunk
from jenga.sim.batching.measured import measured
from jenga.sim.batching.scheduler import CHUNK_TOKENS
from jenga.sim.batching.step_time import StepTime, weights_of
from jenga.sim.commands import plan_command
from jenga.sim.hardware.gpus import GPUS, MIB, Gpu, find_gpu
from jenga.sim.workload.requests import Piece, Request

ASSUMED_GPU = "H100-80G"

LARGE_MODEL = "gemma-3-27b"
"""Model of the same family as the default model, so large that people notice its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersGpu:
    """GPU that seconds and plans are for.

    Attributes:
        name: Name that torch gives it. Empty if this machine has none.
        timed: Name of the GPU whose seconds are modelled, a key of `GPUS`.
        planned: Argument of `jenga plan --gpu`.
    """

    name: str
    timed: str
    planned: str


def readers_gpu(name: str = "", memory_bytes: int = 0) -> ReadersGpu:
    """Find a GPU in the tables.

    A GPU that the tables lack is planned by its memory and timed as an H100.

    Args:
        name: Name that torch gives it, such as "NVIDIA H100 80GB HBM3". Empty for no GPU.
        memory_bytes: Size of its memory in bytes.
    """
    if not name:
        return ReadersGpu(name="", timed=ASSUMED_GPU, planned=ASSUMED_GPU)
    slug = name.lower().removeprefix("nvidia ").replace(" ", "-")
    for gpu in GPUS.values():
        if slug in (gpu.name.lower(), *gpu.folders):
            return ReadersGpu(name=name, timed=gpu.name, planned=gpu.name)
    return ReadersGpu(name=name, timed=ASSUMED_GPU, planned=f"{memory_bytes // MIB}MiB")


def prompt_seconds(model: str, gpu_name: str, answers: Sequence[Answer]) -> float:
    """Get the seconds to read prompts one after the other, by the project's model of a step.

    Args:
        model: Model, as `jenga plan` takes it.
        gpu_name: Name of a GPU, a key of `GPUS`.
        answers: Answers, which say how many tokens each prompt has and how many were found.

    Raises:
        ValueError: The number of parameters of the model is unknown, or its layers are.
    """
    facts = find_model(model)
    gpu = find_gpu(gpu_name)
    clock = _clock(facts, gpu)
    return sum(_seconds(clock, answer) for answer in answers)


def _clock(facts: ModelFacts, gpu: Gpu) -> StepTime:
    spec = facts.spec(ReadOptions(model_dtype="bfloat16"))
    return StepTime(spec, weights_of(facts), gpu, achieved=measured(gpu))


def _seconds(clock: StepTime, answer: Answer) -> float:
    prompt = (Piece("prompt", answer.prompt_tokens),)
    active = ActiveRequest(Request(name="prompt", prompt=prompt, output_tokens=1))
    starts = range(answer.found_tokens, answer.prompt_tokens, CHUNK_TOKENS)
    return sum(
        clock([Chunk(active, start, min(CHUNK_TOKENS, answer.prompt_tokens - start))])
        for start in starts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Output of `jenga plan`.

    Attributes:
        command: Command line that prints it.
        text: Its table of requests that fit.
        plan: The whole plan, as the command's JSON.
    """

    command: str
    text: str
    plan: dict[str, Any]


def planned(model: str, gpu: ReadersGpu) -> Planned:
    """Run `jenga plan` for a model on a GPU, without vLLM.

    Raises:
        ValueError: The model is not known, or does not fit.
    """
    arguments = [model, "--gpu", gpu.planned, "--without-vllm"]
    text = _printed(arguments)
    table = text[text.rfind("\nRequests that fit") + 1 :].split("\n\n")[0]
    return Planned(
        command=f"jenga plan {shlex.quote(model)} --gpu {gpu.planned}",
        text=table,
        plan=json.loads(_printed([*arguments, "--json"])),
    )


def _printed(arguments: Sequence[str]) -> str:
    parser = argparse.ArgumentParser()
    plan_command.configure(parser)
    output = io.StringIO()
    with redirect_stdout(output):
        plan_command.run(parser.parse_args(arguments))
    return output.getvalue()

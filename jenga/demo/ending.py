"""The demo's ending: the same questions on documents, by stock vLLM and by JENGA_TRITON.

Both have the same bytes for their caches, fewer than all layers would need to keep all tokens of
the documents. vLLM runs in the setting that finds most, by a replay on its own manager.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jenga.demo.documents import (
    NUM_DOCUMENTS,
    NUM_QUESTIONS,
    Answer,
    document_tokens_of,
)
from jenga.demo.modelled import (
    LARGE_MODEL,
    Planned,
    ReadersGpu,
    planned,
    prompt_seconds,
)
from jenga.demo.picture import Bar, bars_svg
from jenga.demo.stock_settings import StockSetting, best_setting
from jenga.models import ReadOptions, find_model
from jenga.sim.arenas.vllm_plan import BLOCK_TOKENS
from jenga.sim.batching.need import Need
from jenga.spec import ModelSpec, State

ARENA_SHARE = 0.75
"""Of what all layers would need to keep all tokens of the documents."""

_STATES_OF_A_DOCUMENT = 4

_STEP_TOKENS = 512

_LAST_LINES = 400
"""Of an engine's output that may hold the cause of a failure."""

Waiting = Callable[[str], AbstractContextManager[None]]
"""Says what is waited for, while it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One engine's answers.

    Attributes:
        name: Of the engine.
        setting: How it was run.
        answers: In the order they were asked.
        seconds: Of reading the prompts of the demo's model, modelled; None where not known.
        large_model_seconds: Of `LARGE_MODEL` for the same tokens found and computed, modelled.
    """

    name: str
    setting: str
    answers: tuple[Answer, ...]
    seconds: float | None
    large_model_seconds: float

    @property
    def found_tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.found_tokens for answer in self.answers)

    @property
    def computed_tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.computed_tokens for answer in self.answers)

    @property
    def bar(self) -> Bar:
        """Its tokens, to draw."""
        return Bar(
            name=self.name, found_tokens=self.found_tokens, computed_tokens=self.computed_tokens
        )

    @property
    def texts(self) -> list[str]:
        """What was generated, in order."""
        return [answer.text for answer in self.answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What both engines made of the documents.

    Attributes:
        num_documents: Documents.
        num_questions: Questions on each of them.
        document_tokens: Tokens of a document.
        arena_bytes: Of each engine's cache.
        all_bytes: That all layers would need to keep all tokens of the documents.
        stock: vLLM.
        ours: JENGA_TRITON.
        found_by_setting: Tokens that each tried setting of vLLM finds, by a replay on its manager.
        has_equal_texts: Whether both generated the same texts.
        gpu: For which seconds are modelled.
        plan: What `jenga plan` says; None where it refuses.
        plan_refusal: Why, if it does.
        picture: File of the picture; None where none could be written.
        picture_refusal: Why not.
    """

    num_documents: int
    num_questions: int
    document_tokens: int
    arena_bytes: int
    all_bytes: int
    stock: Side
    ours: Side
    found_by_setting: dict[str, int]
    has_equal_texts: bool
    gpu: ReadersGpu
    plan: Planned | None
    plan_refusal: str
    picture: str | None
    picture_refusal: str


def run_ending(  # noqa: PLR0913  what is run, and where its files go
    *,
    model: Path,
    dtype: str,
    position_limit: int,
    gpu: ReadersGpu,
    options: dict[str, Any],
    picture: Path,
    folder: Path,
    waiting: Waiting,
) -> Ending:
    """Ask both engines, one after the other, each in a process of its own.

    Args:
        model: The model's directory.
        dtype: Of weights, keys and values.
        position_limit: Tokens that the model reads.
        gpu: For which seconds are modelled.
        options: Further arguments of both engines.
        picture: File to write the picture to.
        folder: For what the engines write; their output is kept there where one fails.
        waiting: Says what is waited for.

    Raises:
        ValueError: The model is not one that the questions suit; the message says why.
        RuntimeError: An engine failed; the message names it and the file with its output.
    """
    document_tokens = document_tokens_of(position_limit)
    spec = find_model(str(model)).spec(ReadOptions(model_dtype=dtype))
    all_bytes = bytes_of_all(spec, document_tokens)
    arena_bytes = int(ARENA_SHARE * all_bytes)
    with waiting("choosing vLLM's best setting for documents, by its manager alone"):
        setting, found = best_setting(
            str(model),
            dtype,
            arena_bytes=arena_bytes,
            document_tokens=document_tokens,
            step_tokens=_STEP_TOKENS,
        )
    shared = options | {
        "model": str(model),
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": min(position_limit, 2 * document_tokens),
        "max_num_batched_tokens": _STEP_TOKENS,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": arena_bytes,
        "seed": 0,
    }
    stock_answers = _answers(
        "stock vLLM", shared | _stock_options(setting), document_tokens, folder, waiting
    )
    our_options = shared | {"attention_backend": "JENGA_TRITON"}
    our_answers = _answers("JENGA_TRITON", our_options, document_tokens, folder, waiting)
    return ending_of(
        model=model,
        document_tokens=document_tokens,
        arena_bytes=arena_bytes,
        all_bytes=all_bytes,
        setting=setting.name,
        found_by_setting=found,
        answers=(stock_answers, our_answers),
        gpu=gpu,
        picture=picture,
    )


def bytes_of_all(spec: ModelSpec, document_tokens: int) -> int:
    """Bytes of all tokens of the documents in all layers, and of a few states for each of them."""
    num_slots = {
        layer_type: _STATES_OF_A_DOCUMENT if isinstance(layer_type, State) else document_tokens
        for layer_type, _ in Need(spec).types
    }
    of_one = sum(num_slots[layer_type] * slot for layer_type, slot in Need(spec).types)
    return int(NUM_DOCUMENTS * of_one)


def _stock_options(setting: StockSetting) -> dict[str, Any]:
    # As on a GPU, and as small as our pages: its block on a CPU is 128 tokens.
    return {"block_size": BLOCK_TOKENS, **setting.engine_options}


def ending_of(  # noqa: PLR0913  what was run, and what came of it
    *,
    model: Path,
    document_tokens: int,
    arena_bytes: int,
    all_bytes: int,
    setting: str,
    found_by_setting: dict[str, int],
    answers: tuple[Sequence[Answer], Sequence[Answer]],
    gpu: ReadersGpu,
    picture: Path,
) -> Ending:
    """Put together what both engines answered, model its seconds, plan, and write the picture.

    Args:
        model: The model's directory.
        document_tokens: Tokens of a document.
        arena_bytes: Of each cache.
        all_bytes: See `bytes_of_all`.
        setting: Of vLLM.
        found_by_setting: Tokens found in each setting.
        answers: Of vLLM and of ours.
        gpu: Of the reader.
        picture: File to write.
    """
    stock, ours = (
        _side(model, gpu, name, how, of_one)
        for name, how, of_one in (
            ("vLLM", setting, answers[0]),
            ("Jenga", "default", answers[1]),
        )
    )
    plan, plan_refusal = None, ""
    try:
        plan = planned(str(model), gpu)
    except ValueError as error:
        plan_refusal = str(error)
    written, picture_refusal = str(picture), ""
    try:
        title = (
            f"Prompt tokens: {NUM_DOCUMENTS} documents of {document_tokens:,}, "
            f"{NUM_QUESTIONS} questions each, caches of equal bytes"
        )
        picture.write_text(bars_svg(title, [stock.bar, ours.bar]), encoding="utf-8")
    except OSError as error:
        written, picture_refusal = None, str(error)
    return Ending(
        num_documents=NUM_DOCUMENTS,
        num_questions=NUM_QUESTIONS,
        document_tokens=document_tokens,
        arena_bytes=arena_bytes,
        all_bytes=all_bytes,
        stock=stock,
        ours=ours,
        found_by_setting=found_by_setting,
        has_equal_texts=stock.texts == ours.texts,
        gpu=gpu,
        plan=plan,
        plan_refusal=plan_refusal,
        picture=written,
        picture_refusal=picture_refusal,
    )


def _side(model: Path, gpu: ReadersGpu, name: str, setting: str, answers: Sequence[Answer]) -> Side:
    try:
        seconds = prompt_seconds(str(model), gpu.timed, answers)
    except ValueError:
        seconds = None
    return Side(
        name=name,
        setting=setting,
        answers=tuple(answers),
        seconds=seconds,
        large_model_seconds=prompt_seconds(LARGE_MODEL, gpu.timed, answers),
    )


def _answers(
    name: str, options: dict[str, Any], document_tokens: int, folder: Path, waiting: Waiting
) -> list[Answer]:
    """Start an engine in a process of its own and get what it answers."""
    slug = name.replace(" ", "-").lower()
    job, answers, log = (folder / f"{slug}.{end}" for end in ("job", "answers", "log"))
    job.write_text(json.dumps({"options": options, "document_tokens": document_tokens}))
    environ = {key: value for key, value in os.environ.items() if key != "JENGA_MEMORY_LOG"}
    command = [sys.executable, "-m", "jenga.demo.document_engine", str(job), str(answers)]
    with waiting(f"asking {name} about documents"), log.open("ab") as output:
        ended = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        msg = f"{name} failed: {_cause(log)} (its output is in {log})"
        raise RuntimeError(msg)
    return [Answer(**each) for each in json.loads(answers.read_text(encoding="utf-8"))]


def _cause(log: Path) -> str:
    """Find the last line that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-_LAST_LINES:] if "Error: " in line]
    return (errors or lines or ["it said nothing"])[-1]

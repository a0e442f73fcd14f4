"""The demo's ending: stock vLLM and JENGA_TRITON answer the same questions on documents.

Both caches have the same size in bytes. It is less than all layers would need to keep all tokens
of the documents. vLLM runs in the setting that finds most tokens. A replay on its own manager
chooses the setting.
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
from jenga.spec import ModelSpec

ARENA_SHARE = 0.75
"""Size of each cache, as a share of the bytes that keep all documents' tokens in all layers."""

_STATES_OF_A_DOCUMENT = 4

_STEP_TOKENS = 512

_LAST_LINES = 400
"""Number of last lines of an engine's output that are searched for the cause of a failure."""

Waiting = Callable[[str], AbstractContextManager[None]]
"""Function that reports a task while its context lasts. The argument describes the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One engine's answers.

    Attributes:
        name: Name of the engine.
        setting: Setting that the engine ran in.
        answers: Answers, in the order of the questions.
        seconds: Modelled seconds to read the prompts with the demo's model. None if the model of
            time does not know that model.
        large_model_seconds: Modelled seconds for the same numbers of found and computed tokens with
            `LARGE_MODEL`.
    """

    name: str
    setting: str
    answers: tuple[Answer, ...]
    seconds: float | None
    large_model_seconds: float

    @property
    def found_tokens(self) -> int:
        """Number of tokens of all prompts that were found in the cache."""
        return sum(answer.found_tokens for answer in self.answers)

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of all prompts that were computed."""
        return sum(answer.computed_tokens for answer in self.answers)

    @property
    def bar(self) -> Bar:
        """Bar of the picture for this engine."""
        return Bar(
            name=self.name, found_tokens=self.found_tokens, computed_tokens=self.computed_tokens
        )

    @property
    def texts(self) -> list[str]:
        """Generated texts, in the order of the questions."""
        return [answer.text for answer in self.answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Results of both engines on the documents.

    Attributes:
        num_documents: Number of documents.
        num_questions: Number of questions on each document.
        document_tokens: Number of tokens of a document.
        arena_bytes: Size in bytes of each engine's cache.
        all_bytes: Bytes that all layers would need to keep all tokens of the documents.
        stock: Answers of stock vLLM.
        ours: Answers of JENGA_TRITON.
        found_by_setting: Number of tokens that each tried setting of vLLM finds in a replay on
            vLLM's manager, by the setting's name.
        has_equal_texts: Whether both engines generated the same texts.
        gpu: GPU that seconds are modelled for.
        plan: Output of `jenga plan`. None if it refuses the model.
        plan_refusal: Reason of that refusal, or an empty string.
        picture: Path of the picture's file. None if it could not be written.
        picture_refusal: Reason why it could not be written, or an empty string.
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
        model: Directory of the model.
        dtype: Dtype of weights, keys and values.
        position_limit: Largest number of tokens that the model reads.
        gpu: GPU that seconds are modelled for.
        options: Further arguments of both engines.
        picture: File to write the picture to.
        folder: Folder for the files that the engines write. If an engine fails, its output stays
            there.
        waiting: Function that reports each task while it runs.

    Raises:
        ValueError: The model does not suit the questions. The message says why.
        RuntimeError: An engine failed. The message names it and the file with its output.
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
    """Get the bytes of all documents: all tokens in all layers, and a few states per document."""
    num_slots = {
        layer_type: _STATES_OF_A_DOCUMENT if layer_type.is_state else document_tokens
        for layer_type, _ in Need(spec).types
    }
    of_one = sum(num_slots[layer_type] * slot for layer_type, slot in Need(spec).types)
    return int(NUM_DOCUMENTS * of_one)


def _stock_options(setting: StockSetting) -> dict[str, Any]:
    # This is vLLM's block size on a GPU, and as small as our pages. On a CPU it is 128 tokens.
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
    """Put both engines' answers together, model their seconds, plan, and write the picture.

    Args:
        model: Directory of the model.
        document_tokens: Number of tokens of a document.
        arena_bytes: Size in bytes of each cache.
        all_bytes: Result of `bytes_of_all`.
        setting: Name of the setting that vLLM ran in.
        found_by_setting: Number of tokens found in each setting of vLLM, by its name.
        answers: Answers of vLLM, and answers of JENGA_TRITON.
        gpu: GPU of the reader.
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
    """Start an engine in a process of its own and return its answers."""
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
    """Find the last line that names an error. Without one, return the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-_LAST_LINES:] if "Error: " in line]
    return (errors or lines or ["it said nothing"])[-1]

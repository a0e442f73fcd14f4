"""Layers of a model as vLLM's own classes declare them, determined in a separate process.

The process runs `jenga.vllm_plugin.without_engine.declared_layers`, which is not imported here.
There the plugin builds the model without weights and without a GPU. If `jenga.models` has no reader
for a model, the plan uses vLLM's layers. For all other models they are compared with the plan.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import jenga
from jenga.models import ModelFacts, ReadOptions, find_model, known_type
from jenga.models.config import Config
from jenga.models.exchange import layer_type_from, options_fields
from jenga.policies import NEVER
from jenga.spec import (
    LayerType,
    ModelSpec,
)

TIMEOUT_S = 600.0
"""Most seconds for one model. On an idle machine vLLM's import takes 10 s, a class seldom more."""

_MODULE = "jenga.vllm_plugin.without_engine.declared_layers"
_OPTIONS_FILE = "read_options.json"
_ANSWER_FILE = "declared_layers.json"


def find_served_model(text: str) -> ModelFacts:
    """Find the model that a user names. If it has no reader, vLLM is asked for its layers.

    Raises:
        ValueError: See `jenga.models.find_model`.
    """
    facts = find_model(text)
    return facts if known_type(facts.config) is not None else replace(facts, reader=declared_model)


def declared_model(config: Config, *, name: str, options: ReadOptions | None = None) -> ModelSpec:
    """Ask vLLM's own classes for the layer types of a model.

    Raises:
        ValueError: vLLM is not installed, refuses the model, or takes longer than `TIMEOUT_S`.
    """
    if not is_installed():
        reason = "vLLM, whose classes would be asked, is not installed"
    else:
        answer = _answer(json.dumps(config.as_dict()), options or ReadOptions())
        if isinstance(answer, tuple):
            return ModelSpec(name=name, layer_types=answer)
        reason = f"vLLM's classes say: {answer}"
    model_type = config.as_dict().get("model_type")
    msg = f"{config.source}: no reader is for model_type {model_type!r}, and {reason}"
    raise ValueError(msg)


@functools.cache
def _answer(fields: str, options: ReadOptions) -> tuple[LayerType, ...] | str:
    with Question(json.loads(fields), options) as question:
        return question.answer()


def is_installed() -> bool:
    """Whether vLLM is installed."""
    return find_spec("vllm") is not None


class Question:
    """A question to vLLM for the layers of one model. The answer comes from a process of its own.

    >>> with Question(fields, options) as question:  # doctest: +SKIP
    ...     layer_types = question.answer()
    """

    def __init__(self, fields: Mapping[str, object], options: ReadOptions) -> None:
        """Start the process that will answer. The caller can do something else meanwhile.

        Args:
            fields: Fields of the model's `config.json`.
            options: Options with which the model is run.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="jenga-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        asked = json.dumps(options_fields(options))
        (folder / _OPTIONS_FILE).write_text(asked, encoding="utf-8")
        packages = [str(Path(path).parent) for path in jenga.__path__]
        path = os.pathsep.join([*packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            # With -P, the process imports nothing from the user's current folder.
            [sys.executable, "-P", "-m", _MODULE, str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def answer(self) -> tuple[LayerType, ...] | str:
        """Wait for the layer types, or for the reason why there are none."""
        try:
            _, log = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"no answer within {TIMEOUT_S:g} s"
        file = Path(self._folder.name) / _ANSWER_FILE
        if not file.exists():
            last = log.strip().rpartition("\n")[2]
            return f"their process ended with status {self._process.returncode}: {last}"
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if "error" in answer:
            return str(answer["error"])
        try:
            return tuple(map(layer_type_from, answer["layer_types"]))
        except ValueError as error:  # a type that is registered there and not here
            return str(error)

    def __enter__(self) -> "Question":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._folder.cleanup()


def comparison(facts: ModelFacts, planned: Iterable[LayerType], question: Question) -> str:
    """Wait for the layers that vLLM's classes declare, and compare them in a sentence."""
    declared = question.answer()
    if isinstance(declared, str):
        return f"vLLM's own classes of {facts.name} could not be asked: {declared}"
    different = difference_text(facts, planned, declared)
    return different or f"vLLM's own classes declare the same layers of {facts.name}."


def difference_text(
    facts: ModelFacts, planned: Iterable[LayerType], declared: Iterable[LayerType]
) -> str:
    """Describe in a sentence how vLLM's layers differ. The text is empty if they do not."""
    different = _differences(planned, declared, facts.context_tokens)
    if not different:
        return ""
    return (
        f"vLLM's own classes declare other layers of {facts.name}, by which the plugin would "
        f"serve it: {'; '.join(different)}."
    )


def _differences(
    planned: Iterable[LayerType], declared: Iterable[LayerType], context_tokens: int | None
) -> list[str]:
    """List the kinds of layers that differ between the plan and vLLM's declaration.

    Image embeddings are left out, because an engine has no pages for them.
    """
    ours, theirs = (_layers_by_kind(each, context_tokens) for each in (planned, declared))
    return [
        f"{kind}: {_layers_text(ours.get(kind))} planned, {_layers_text(theirs.get(kind))} declared"
        for kind in dict.fromkeys([*ours, *theirs])
        if ours.get(kind) != theirs.get(kind)
    ]


def _layers_by_kind(
    layer_types: Iterable[LayerType], context_tokens: int | None
) -> dict[str, tuple[int, int]]:
    """Return, for each kind, the number of layers and the bytes of a slot in all of them."""
    found: dict[str, tuple[int, int]] = {}
    for each in layer_types:
        if each.is_consumed:
            continue
        kind = _kind(each, context_tokens)
        num_layers, slot_bytes = found.get(kind, (0, 0))
        num_layers += len(each.layers)
        slot_bytes += each.slot_bytes
        found[kind] = num_layers, slot_bytes
    return found


def _kind(layer_type: LayerType, context_tokens: int | None) -> str:
    if layer_type.typical_tokens:
        # A plan and an engine expect different numbers of encoder tokens.
        return layer_type.kind
    # A window that is no shorter than any text is full attention.
    longest = NEVER if context_tokens is None else context_tokens
    has_token_slots = layer_type.tokens_per_slot == 1 and not layer_type.is_state
    if has_token_slots and layer_type.most_read_tokens >= longest:
        return "full attention"
    return f"{layer_type.kind} ({layer_type.keeps})"


def _layers_text(layers: tuple[int, int] | None) -> str:
    if layers is None:
        return "none"
    num_layers, slot_bytes = layers
    return f"{num_layers} layers of {slot_bytes:,} bytes a slot"

"""Layers of a model as vLLM's own classes declare them: no weights, no GPU, no engine.

    python -m jenga.vllm_plugin.without_engine.declared_layers FOLDER...

Each layer of the model declares what it caches, and the plugin makes layer types from that as it
does in an engine. `jenga plan` runs this in a separate process: see `weightless_model`.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jenga.models.config import Config
from jenga.models.exchange import layer_type_fields, options_from
from jenga.models.options import ReadOptions
from jenga.spec import Layer, LayerType, StatePart
from jenga.vllm_plugin.settings.environment import BACKEND_NAME
from jenga.vllm_plugin.without_engine.weightless_model import have_no_device, weightless_model

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

OPTIONS_FILE = "read_options.json"
"""File in the folder with the fields of `ReadOptions`, beside the model's `config.json`."""

ANSWER_FILE = "declared_layers.json"
"""File that is written to the folder, with the layer types or an error."""

_MOST_CHARACTERS = 400
"""Largest length of vLLM's own errors. Some list every class that vLLM has."""

_STATE_PARTS = ("conv", "recurrent")
"""Names of a state's tensors. With a history there are more, and only their bytes are counted."""


_ATTENTION = "vllm.model_executor.layers.attention"
"""Module of vLLM's attention layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredLayers:
    """The layers of a model that an engine would serve.

    Attributes:
        num_layers: Number of layers of the language model, those without a cache included.
        context_tokens: Number of tokens in the longest text that the model reads.
        layer_types: Layer types. Their layers are named as in `jenga.models`.
    """

    num_layers: int
    context_tokens: int
    layer_types: tuple[LayerType, ...]


def declared_layers(folder: Path, options: ReadOptions) -> DeclaredLayers:
    """Build a model without weights, and get the cache specs of its layers.

    `have_no_device` must be called before vLLM is imported.

    Args:
        folder: Folder with the model's `config.json`. Nothing else in it is read.
        options: How the model is run.

    Raises:
        ValueError: The plugin does not serve the model with these options, or vLLM refuses it.
    """
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = Config(fields, source="config.json").language()
    try:
        return _declared(fields, options)
    except Exception:
        if text.as_dict() == fields:
            raise
        # Encoders of images may need files or packages that the language model does not need.
        with suppress(Exception):
            return _declared(text.as_dict(), options)
        raise


def _declared(fields: Mapping[str, Any], options: ReadOptions) -> DeclaredLayers:
    """Get the layers of a model from the fields of its configuration; see `declared_layers`."""
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, get_shared_kv_cache_layers

    from jenga.vllm_plugin.layers.served_layers import check_layers
    from jenga.vllm_plugin.specs.layer_types import model_spec
    from jenga.vllm_plugin.specs.replay_layout import with_histories

    _attend_as_in_workers()
    config = weightless_model(fields, options)
    model = config.model_config
    stored = get_kv_cache_spec(config)
    check_layers(config, stored)
    specs = with_histories(config, stored)
    sources = get_shared_kv_cache_layers(config)
    return DeclaredLayers(
        num_layers=model.get_total_num_hidden_layers(),
        context_tokens=model.max_model_len,
        layer_types=tuple(_renamed(each, specs, sources) for each in model_spec(specs).layer_types),
    )


def _attend_as_in_workers() -> None:
    """Patch attention layers so that they choose their backends as in a worker.

    Raises:
        ValueError: The plugin was not written for this version of vLLM.
    """
    from jenga.vllm_plugin.patches.patch import put_in_place
    from jenga.vllm_plugin.patches.workers import WORKERS

    put_in_place([each for each in WORKERS if each.module.startswith(_ATTENTION)])


def _renamed(
    layer_type: LayerType, specs: "Mapping[str, KVCacheSpec]", sources: Mapping[str, str]
) -> LayerType:
    """Name layers by their numbers, and add the layers that read them and the parts of states.

    Args:
        layer_type: Layer type with vLLM's names of layers.
        specs: vLLM's cache spec of each layer, by layer name.
        sources: Name of a layer without its own cache -> name of the layer whose cache it reads.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    def numbered(name: str) -> str:
        return f"layers.{next(part for part in name.split('.') if part.isdecimal())}"

    of_number = Counter(numbered(layer.name) for layer in layer_type.layers)
    num_seen: Counter[str] = Counter()
    layers: list[Layer] = []
    for layer in layer_type.layers:
        name, spec = numbered(layer.name), specs[layer.name]
        parts = ()
        if isinstance(spec, MambaSpec) and len(spec.shapes) <= len(_STATE_PARTS):
            parts = tuple(
                StatePart(name=part, shape=tuple(shape), dtype=str(dtype).removeprefix("torch."))
                for part, shape, dtype in zip(
                    _STATE_PARTS[-len(spec.shapes) :], spec.shapes, spec.dtypes, strict=True
                )
            )
        readers = tuple(numbered(one) for one, target in sources.items() if target == layer.name)
        suffix = f".{num_seen[name]}" if of_number[name] > 1 else ""
        num_seen[name] += 1
        layers.append(replace(layer, name=name + suffix, readers=readers, parts=parts))
    return replace(layer_type, layers=tuple(layers))


def _words(error: Exception) -> str:
    """Get an error as one line, without the values of configurations that pydantic prints.

    Refusals of this backend are not cut, because they end with the advice.
    """
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        error_text = "; ".join(each["msg"] for each in error.errors())
    else:
        error_text = f"{type(error).__name__}: {error}"
    line = " ".join(error_text.split())
    is_whole = BACKEND_NAME in line or len(line) <= _MOST_CHARACTERS
    return line if is_whole else f"{line[:_MOST_CHARACTERS]}..."


def main(folders: Sequence[Path]) -> None:
    """Write the answer for the model of each folder to a file in it."""
    have_no_device()
    for folder in folders:
        options = options_from(json.loads((folder / OPTIONS_FILE).read_text(encoding="utf-8")))
        answer: dict[str, Any]
        try:
            found = declared_layers(folder, options)
        except Exception as error:
            answer = {"error": _words(error)}
        else:
            answer = {
                "num_layers": found.num_layers,
                "context_tokens": found.context_tokens,
                "layer_types": [layer_type_fields(each) for each in found.layer_types],
            }
        (folder / ANSWER_FILE).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])

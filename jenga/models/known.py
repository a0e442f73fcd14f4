"""Models to plan for: known models by name, and models in a local directory.

A known model is a file in `data/`. The file holds the fields of the Hugging Face configuration that
decide the size of a token or a state. It also holds the number of parameters, and its source.
"""

import json
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Protocol, cast

from jenga.models.config import Config, load_config
from jenga.models.options import KvFormat, ReadOptions, default_history_tokens
from jenga.models.quantized import QUANTIZATION_FILE, kv_format_of, quantization_of
from jenga.models.reader import read_config
from jenga.models.weights import Weights, find_weights
from jenga.spec import ELEMENT_BYTES, ModelSpec

_PUBLISHED_ELEMENT_BYTES = 2
"""Bytes of one parameter if a known model's file has no `weight_bytes`: bfloat16."""

_HUGGING_FACE_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Name of a model on Hugging Face, with its owner."""


class SpecReader(Protocol):
    """Function that finds the layer types of a configuration, as `read_config` does."""

    def __call__(
        self, config: Config, /, *, name: str, options: ReadOptions | None = None
    ) -> ModelSpec:
        """Read the layer types.

        Raises:
            ValueError: See `jenga.models.read_model`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that are known before it runs, whatever the options of the run.

    Attributes:
        name: Name of a known model, or of its directory or file.
        model_id: Name on Hugging Face; empty for a directory.
        config: Fields of the configuration.
        total_parameters: Number of all parameters; None if unknown.
        active_parameters: Parameters that one token is multiplied with; for a model without
            experts all of them. None if unknown.
        weight_bytes: Bytes of all weights as published, over all ranks; None if unknown.
        parameters_source: Source of the three numbers, and of the configuration if that is not
            the model's own file.
        reader: Function that finds the layer types.
    """

    name: str
    model_id: str
    config: Config
    total_parameters: int | None
    active_parameters: int | None
    weight_bytes: int | None
    parameters_source: str
    reader: SpecReader = read_config

    @property
    def context_tokens(self) -> int | None:
        """Longest text, in tokens, that the configuration allows; None if it names no limit."""
        return self.config.language().context_tokens()

    @property
    def kv_format(self) -> KvFormat:
        """Format of keys and values if no option asks for another."""
        return kv_format_of(self.config)

    @property
    def num_layers(self) -> int:
        """Number of layers of the language model, including those that store nothing.

        Raises:
            ValueError: The configuration does not name it.
        """
        language = self.config.language()
        decoder = "decoder_layers"
        return language.num_layers(decoder if decoder in language else "num_hidden_layers")

    def spec(self, options: ReadOptions | None = None) -> ModelSpec:
        """Get the layer types of the model when it is run with these options.

        Raises:
            ValueError: See `jenga.models.read_model`.
        """
        return self.reader(self.config, name=self.name, options=options)

    def engine_options(self, options: ReadOptions) -> ReadOptions:
        """Return the options of an engine that is not told whether to keep histories.

        With drafts it keeps them in models that have layers for that.
        """
        num_tokens = default_history_tokens(options.draft_tokens)
        if not num_tokens:
            return options
        with_histories = replace(options, history_tokens=num_tokens)
        try:
            self.spec(with_histories)
        except ValueError:
            return options
        return with_histories


def known_names() -> tuple[str, ...]:
    """All names that `known_model` understands, sorted."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _data().iterdir()))


def known_model(name: str) -> ModelFacts:
    """Get a model that is known by name.

    Args:
        name: One of `known_names`.

    Raises:
        ValueError: The name is not one of them.
    """
    file = _data() / f"{name}.json"
    if name not in known_names():
        msg = f"model must be one of {', '.join(known_names())}, got {name!r}"
        raise ValueError(msg)
    fields = cast("dict[str, object]", json.loads(file.read_text(encoding="utf-8")))
    facts = Config(fields, source=name)
    total_parameters = facts.integer("total_parameters")
    if "weight_bytes" in fields:
        weight_bytes = facts.integer("weight_bytes") if "weight_bytes" in facts else None
    else:
        weight_bytes = _PUBLISHED_ELEMENT_BYTES * total_parameters
    return ModelFacts(
        name=name,
        model_id=facts.text("model"),
        config=Config(cast("dict[str, object]", fields["config"]), source=name),
        total_parameters=total_parameters,
        active_parameters=facts.integer("active_parameters", default=total_parameters),
        weight_bytes=weight_bytes,
        parameters_source=facts.text("parameters_source"),
    )


def _data() -> Traversable:
    return resources.files("jenga.models") / "data"


def find_model(text: str) -> ModelFacts:
    """Find the model that a user names.

    Args:
        text: A known name or the Hugging Face name of a known model, in upper or lower case; a
            configuration file; or a directory that holds a `config.json`. The weights of a
            directory are those that an engine would load: see `weights`.

    Raises:
        ValueError: `text` is none of these (the message lists similar names), or a file cannot
            be read.
    """
    path = Path(text).expanduser()
    if path.exists():
        return _local_model(path)
    by_name = {name.lower(): name for name in known_names()}
    wanted = text.lower()
    if wanted in by_name:
        return known_model(by_name[wanted])
    if "/" in text:
        for name in known_names():
            facts = known_model(name)
            if facts.model_id.lower() == wanted:
                return facts
    close = get_close_matches(wanted.rsplit("/", 1)[-1], by_name, n=4, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if _HUGGING_FACE_NAME.fullmatch(text):
        hint += (
            f"{'' if close else ';'} `hf download {text} config.json --local-dir DIRECTORY` "
            f"fetches its configuration, and DIRECTORY is then the model to give"
        )
    msg = (
        f"model must be a local Hugging Face config.json, a directory that holds one, or one of "
        f"the {len(by_name)} known names (`jenga plan --list`), got {text!r}{hint}"
    )
    raise ValueError(msg)


def _local_model(path: Path) -> ModelFacts:
    config = load_config(path)
    folder = path if path.is_dir() else path.parent
    is_config = path.is_dir() or path.name == "config.json"
    quantization = folder / QUANTIZATION_FILE
    if is_config and quantization.exists() and quantization_of(config) is None:
        fields = load_config(quantization).as_dict()
        config = config.with_values({"quantization_config": fields})
    weights = find_weights(folder) if is_config else Weights(num_bytes=None, source="")
    weight_bytes = weights.num_bytes
    parameters = None if weight_bytes is None else _parameters(config, weight_bytes)
    return ModelFacts(
        name=folder.resolve().name if is_config else path.stem,
        model_id="",
        config=config,
        total_parameters=parameters,
        active_parameters=parameters,
        weight_bytes=weight_bytes,
        parameters_source=weights.source,
    )


def _parameters(config: Config, weight_bytes: int) -> int | None:
    """Number of parameters of an unquantised model, from its bytes; None if it is unknown."""
    if quantization_of(config) is not None:
        return None
    for source in (config, config.language()):
        for field in ("dtype", "torch_dtype"):
            if field in source:
                dtype = source.text(field).removeprefix("torch.")
                return weight_bytes // ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else None
    return None

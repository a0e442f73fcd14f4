"""Models to plan for: those known by name, and those in a local directory.

A known model is a file of `data/`: the fields of its Hugging Face configuration that decide what a
token or a state takes, and its number of parameters with the source of that number.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Protocol, cast

from jenga.models.config import Config, load_config
from jenga.models.options import KvFormat, ReadOptions
from jenga.models.quantized import QUANTIZATION_FILE, kv_format_of, quantization_of
from jenga.models.reader import read_config
from jenga.models.weights import Weights, find_weights
from jenga.spec import ELEMENT_BYTES, ModelSpec

_PUBLISHED_ELEMENT_BYTES = 2
"""Bytes of a parameter where a known model's file gives no others: bfloat16."""


class SpecReader(Protocol):
    """Finds the layer types that a configuration describes, as `read_config` does."""

    def __call__(
        self, config: Config, /, *, name: str, options: ReadOptions | None = None
    ) -> ModelSpec:
        """Read them.

        Raises:
            ValueError: See `jenga.models.read_model`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model before it is run in any way.

    Attributes:
        name: How it is asked for.
        model_id: Its name on Hugging Face; empty for a directory.
        config: Fields of its configuration.
        total_parameters: All of them; None where nothing says.
        active_parameters: Those that one token is multiplied with; all of them without experts.
        weight_bytes: Bytes of all weights as published, all ranks together; None where unknown.
        parameters_source: Where the three numbers come from, and the configuration where that is
            not the model's own file.
        reader: Finds its layer types.
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
        """The longest text that the configuration names; None where it names none."""
        return self.config.language().context_tokens()

    @property
    def kv_format(self) -> KvFormat:
        """How keys and values are stored where no option asks for another format."""
        return kv_format_of(self.config)

    @property
    def num_layers(self) -> int:
        """Layers of the language model, those that store nothing too.

        Raises:
            ValueError: The configuration names none.
        """
        language = self.config.language()
        decoder = "decoder_layers"
        return language.num_layers(decoder if decoder in language else "num_hidden_layers")

    def spec(self, options: ReadOptions | None = None) -> ModelSpec:
        """Its layer types as run with some options.

        Raises:
            ValueError: See `jenga.models.read_model`.
        """
        return self.reader(self.config, name=self.name, options=options)


def known_names() -> tuple[str, ...]:
    """Every name that `known_model` understands, sorted."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _data().iterdir()))


def known_model(name: str) -> ModelFacts:
    """A model known by name.

    Args:
        name: Of `known_names`.

    Raises:
        ValueError: It is not among them.
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
    """The model that a user names.

    Args:
        text: A known name or Hugging Face name in any case, a `config.json`, or a directory that
            holds one. A directory's weights are those that an engine would load: see `weights`.

    Raises:
        ValueError: It is none of these; close names are listed. Or a file that cannot be read.
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
    """Parameters of an unquantised model, by its bytes."""
    if quantization_of(config) is not None:
        return None
    for source in (config, config.language()):
        for field in ("dtype", "torch_dtype"):
            if field in source:
                dtype = source.text(field).removeprefix("torch.")
                return weight_bytes // ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else None
    return None

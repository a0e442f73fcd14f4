"""Typed access to a Hugging Face configuration. Every error names the field."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast

T = TypeVar("T")


MOST_LAYERS = 10_000
"""Largest number of layers that is accepted.

It is ten times that of any known model, and so many layers are listed in less than a second.
"""

_LAYERS = "layers_block_type"

_LAYER_FIELDS = ("num_layers", "n_layer", "n_layers")
"""Other names of the field with the number of layers."""

_LANGUAGE_SECTIONS = ("text_config", "llm_config", "language_config")
"""Sections in which multimodal models keep the fields of their language model."""

_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Names of the field with the longest text, in tokens, that a model reads.

The smallest value counts, as in vLLM 0.33.
"""

_STRETCHED_ROTATIONS = frozenset({"linear", "dynamic", "ntk"})
"""Types of rotary position scaling whose `factor` multiplies the longest text.

For other types the field already holds the scaled length.
"""


class Config:
    """The fields of a configuration, or of a section of one.

    Attributes:
        source: Name of the configuration in error messages: a file, and the section within it.
    """

    def __init__(self, fields: Mapping[str, object], *, source: str) -> None:
        self._fields = fields
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def as_dict(self) -> dict[str, object]:
        """All fields, as they were read."""
        return dict(self._fields)

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise the error for a field whose value is not as expected.

        Raises:
            ValueError: Always.
        """
        actual = repr(self._fields[name]) if name in self._fields else "nothing"
        msg = f"{self.source}: field {name!r} must be {expected}, got {actual}"
        raise ValueError(msg)

    def equals(self, name: str, value: object) -> bool:
        """Whether a field equals this value."""
        return self._fields.get(name) == value

    def names(self, name: str) -> bool:
        """Whether there is a field of this name, even if it is null."""
        return name in self._fields

    def window(self, name: str = "sliding_window") -> int | None:
        """Tokens of a window; None if the field is absent, null or 0, as engines read it."""
        if name not in self or self.equals(name, 0):
            return None
        return self.integer(name)

    def integer(self, name: str, *, default: int | None = None) -> int:
        """A positive integer."""
        return self._read(name, default, _is_positive, "a positive integer")

    def side(self, name: str) -> int:
        """A positive integer, or the first of a list such as a height and a width."""
        if isinstance(self._fields.get(name), list):
            return next(iter(self.counts(name)), 0) or self.integer(name)
        return self.integer(name)

    def num_layers(self, name: str = "num_hidden_layers") -> int:
        """Number of layers, at most `MOST_LAYERS`, from this field or one of its usual names.

        transformers saves Nemotron-H without such a field. Its list of layers is counted instead.
        """
        if name not in self:
            name = next((each for each in _LAYER_FIELDS if each in self), name)
        if name not in self and _LAYERS in self:
            name, number = _LAYERS, len(self._list(_LAYERS, None))
        else:
            number = self.integer(name)
        if not 0 < number <= MOST_LAYERS:
            self.refuse(name, f"at most {MOST_LAYERS}")
        return number

    def count(self, name: str, *, default: int | None = None) -> int:
        """An integer that may be zero."""
        return self._read(name, default, _is_count, "an integer of at least 0")

    def number(self, name: str, *, default: float | None = None) -> float:
        """A positive number."""
        return self._read(name, default, _is_number, "a positive number")

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        return self._read(name, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        return self._read(name, default, lambda value: isinstance(value, str), "a string")

    def is_text(self, name: str) -> bool:
        """Whether a field is a string."""
        return isinstance(self._fields.get(name), str)

    def choice(self, name: str, choices: Sequence[str], *, default: str | None = None) -> str:
        """One of some strings."""
        expected = f"one of {', '.join(choices)}"
        return self._read(name, default, lambda value: value in choices, expected)

    def architecture(self, choices: Sequence[str]) -> str:
        """Name of the class that runs the model, by which an engine chooses its code.

        Raises:
            ValueError: The configuration does not name exactly one class, out of `choices`.
        """
        names = self._list("architectures", None)
        if len(names) != 1 or names[0] not in choices:
            self.refuse("architectures", f"a list of one of {', '.join(choices)}")
        return cast("str", names[0])

    def usual_architecture(self) -> str | None:
        """Name of the first class that runs the model; None if the configuration names none."""
        names = self._fields.get("architectures")
        first = cast("list[object]", names)[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else None

    def counts(self, name: str, *, default: Sequence[int] | None = None) -> list[int]:
        """A list of integers of at least 0."""
        values = self._list(name, default)
        if not all(_is_count(value) for value in values):
            self.refuse(name, "a list of integers of at least 0")
        return cast("list[int]", values)

    def indices(
        self, name: str, *, num_layers: int, default: Sequence[int] | None = None
    ) -> list[int]:
        """A list of layer indices, counted from 0."""
        indices = self.counts(name, default=default)
        if any(index >= num_layers for index in indices):
            self.refuse(name, f"layers below {num_layers}")
        return indices

    def layer_counts(self, name: str, *, num_layers: int) -> list[int]:
        """A list of integers of at least 0, one per layer; `kinds` says how a longer one is cut."""
        values = self.counts(name)
        if len(values) not in self._lengths(num_layers):
            self.refuse(name, f"a list of {num_layers} numbers, one per layer")
        return values[:num_layers]

    def has_list(self, name: str) -> bool:
        """Whether a list is present and not empty; engines treat an empty list as absent."""
        return name in self and not self.equals(name, [])

    def kinds(self, name: str, known: Mapping[str, T], *, length: int) -> list[T]:
        """A list of strings, one per layer, each replaced by its meaning.

        A list may have further entries for draft layers (`num_nextn_predict_layers`). They are
        left out.

        Args:
            name: The field.
            known: Meaning of each string that is understood.
            length: Number of the model's layers, without draft layers.
        """
        values = self._list(name, None)
        if len(values) not in self._lengths(length):
            self.refuse(name, f"a list of {length} strings, one per layer")
        values = values[:length]
        for index, value in enumerate(values):
            if value not in known:
                msg = (
                    f"{self.source}: field '{name}[{index}]' must be one of "
                    f"{', '.join(known)}, got {value!r}"
                )
                raise ValueError(msg)
        return [known[cast("str", value)] for value in values]

    def groups(self, name: str) -> list[list[int]]:
        """A list of lists of integers."""
        groups = self._list(name, [])
        for group in groups:
            if not isinstance(group, list) or not all(
                _is_count(value) for value in cast("list[object]", group)
            ):
                self.refuse(name, "a list of lists of integers of at least 0")
        return cast("list[list[int]]", groups)

    def section(self, *names: str) -> "Config":
        """The first section of these names that is present."""
        name = next((name for name in names if name in self), names[0])
        value = self._fields.get(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Config(cast("dict[str, object]", value), source=f"{self.source}: {name}")

    def language(self) -> "Config":
        """The fields of the language model: those of its section, or all if it has no section."""
        name = next((each for each in _LANGUAGE_SECTIONS if each in self), None)
        return self if name is None else self.section(name)

    def context_tokens(self) -> int | None:
        """Longest text, in tokens, that the language model reads; None if no field says it.

        `model_max_length` overrides the other fields. Scaled rotary positions multiply the length.
        """
        lengths = [self.integer(name) for name in _CONTEXT_FIELDS if name in self]
        if "model_max_length" in self:
            lengths = [self.integer("model_max_length")]
        if not lengths:
            return None
        factor = 1.0
        for name in ("rope_parameters", "rope_scaling"):
            rotation = self.section(name) if name in self else Config({}, source=self.source)
            kinds = {rotation._fields.get("rope_type"), rotation._fields.get("type")}
            if kinds & _STRETCHED_ROTATIONS:
                factor = rotation.number("factor", default=1.0)
        return int(min(lengths) * factor)

    def of_layer(self, index: int) -> "Config":
        """The fields of one layer: these, overridden by its entry in `per_layer_config`.

        transformers pads layer numbers with zeros to the same number of digits.
        """
        if "per_layer_config" not in self:
            return self
        layers = self.section("per_layer_config")
        for num_digits in range(1, len(str(MOST_LAYERS)) + 1):
            if (number := f"{index:0{num_digits}}") in layers:
                own = layers.section(number)
                return Config({**self._fields, **own._fields}, source=own.source)
        return self

    def with_defaults(self, defaults: Mapping[str, object]) -> "Config":
        """The same fields, with defaults for those that are absent or null."""
        present = {name: value for name, value in self._fields.items() if value is not None}
        return Config({**defaults, **present}, source=self.source)

    def sections(self, name: str) -> list["Config"]:
        """A list of objects."""
        values = self._list(name, None)
        if not all(isinstance(value, dict) for value in values):
            self.refuse(name, "a list of objects")
        return [
            Config(cast("dict[str, object]", value), source=f"{self.source}: {name}[{index}]")
            for index, value in enumerate(values)
        ]

    def cut(self, name: str, length: int) -> "Config":
        """The same fields, with one list cut to at most `length` entries."""
        value = self._fields.get(name)
        if not isinstance(value, list):
            return self
        return self.with_values({name: cast("list[object]", value)[:length]})

    def with_absent(self, defaults: Mapping[str, object]) -> "Config":
        """The same fields, with defaults for those that are absent; null stays null."""
        return Config({**defaults, **self._fields}, source=self.source)

    def with_values(self, values: Mapping[str, object]) -> "Config":
        """The same fields, some of them overridden."""
        return Config({**self._fields, **values}, source=self.source)

    def renamed(self, names: Mapping[str, str]) -> "Config":
        """The same fields, some of them under a second name as well.

        Args:
            names: Name to add -> name of the field in the file. Absent fields are skipped.
        """
        present = {new: self._fields[old] for new, old in names.items() if old in self}
        return Config({**present, **self._fields}, source=self.source)

    def _lengths(self, num_layers: int) -> tuple[int, int]:
        """Lengths that a list with one entry per layer may have: without or with draft layers."""
        return num_layers, num_layers + self.count("num_nextn_predict_layers", default=0)

    def _list(self, name: str, default: Sequence[object] | None) -> list[object]:
        value = self._fields.get(name)
        if value is None and default is not None:
            return list(default)
        if not isinstance(value, list):
            self.refuse(name, "a list")
        return cast("list[object]", value)

    def _read(
        self, name: str, default: T | None, accepts: Callable[[object], bool], expected: str
    ) -> T:
        value = self._fields.get(name)
        if value is None and default is not None:
            return default
        if not accepts(value):
            self.refuse(name, expected)
        return cast("T", value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def load_config(path: str | Path) -> Config:
    """Load the configuration in a file, or in the `config.json` of a directory.

    Raises:
        ValueError: There is no such file, or it is not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        fields: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"config must be a readable file or a directory with config.json, got {path}: {error}"
        raise ValueError(msg) from error
    except ValueError as error:
        msg = f"{file} must be JSON: {error}"
        raise ValueError(msg) from error
    if not isinstance(fields, dict):
        msg = f"{file} must hold a JSON object, got {type(fields).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - a caller's mistake is a ValueError in this package
    return Config(cast("dict[str, object]", fields), source=str(file))

"""Token budgets of a model's layers, from the field `kv_token_budgets` of its configuration.

No published configuration has the field. A user adds it to the configuration of a model whose
layers have full attention, all of them or some.

Source: PyramidKV (arXiv 2406.02069), where budgets fall from layer to layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from jenga.models.config import Config
from jenga.models.options import ReadOptions
from jenga.models.readers.layers import layer_name
from jenga.spec import FullAttention, Layer, LayerType, TokenBudget

TOKEN_BUDGETS = "kv_token_budgets"
"""Name of the field."""

WEIGHT_BYTES = 4
"""Bytes of a slot that hold, for each KV head, the attention weight that its token got so far.

Layers that choose again as outputs grow have them. The queries of a choice come one in a step.
"""

_FIELDS = frozenset({"layers", "recent_tokens", "sink_tokens", "pool_tokens", "output_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgets:
    """Token budgets of a model's layers.

    Attributes:
        layer_tokens: For each layer, most tokens of a prompt to keep; None means all of them.
        recent_tokens: Number of last tokens of a prompt that are always kept. Their queries choose
            the other tokens.
        sink_tokens: Number of first tokens that are always kept.
        pool_tokens: Number of neighbours whose scores count for a token.
        output_tokens: Number of tokens after the prompt, and after each later choice, at which the
            layers choose again. None means that they choose at the end of the prompt only.
    """

    layer_tokens: tuple[int | None, ...]
    recent_tokens: int
    sink_tokens: int
    pool_tokens: int
    output_tokens: int | None


def token_budgets(config: Config) -> TokenBudgets | None:
    """Read the budgets of a language model, None if it has none.

    Raises:
        ValueError: A field is missing or wrong; the message names it.
    """
    if TOKEN_BUDGETS not in config:
        return None
    num_layers, section = config.num_layers(), config.section(TOKEN_BUDGETS)
    if unknown := section.as_dict().keys() - _FIELDS:
        config.refuse(TOKEN_BUDGETS, f"an object of {sorted(_FIELDS)}, without {sorted(unknown)}")
    recent_tokens = section.integer("recent_tokens", default=32)
    sink_tokens = section.count("sink_tokens", default=4)
    pool_tokens = section.integer("pool_tokens", default=7)
    if pool_tokens % 2 == 0:
        section.refuse("pool_tokens", "odd")
    output_tokens = None
    if section.as_dict().get("output_tokens") is not None:
        output_tokens = section.integer("output_tokens")
        if output_tokens < recent_tokens:
            section.refuse("output_tokens", f"null, or at least the {recent_tokens} recent_tokens")
    layers = section.as_dict().get("layers")
    fixed_tokens = recent_tokens + sink_tokens
    expected = (
        f"a list of {num_layers} items, each null or a number of tokens above the {fixed_tokens} "
        "that are always kept, and not all of them null"
    )
    given = cast("list[object]", layers) if isinstance(layers, list) else []
    layer_tokens: list[int | None] = []
    for tokens in given:
        if tokens is None:
            layer_tokens.append(None)
        elif isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > fixed_tokens:
            layer_tokens.append(tokens)
        else:
            section.refuse("layers", expected)
    if len(layer_tokens) != num_layers or not any(layer_tokens):
        section.refuse("layers", expected)
    return TokenBudgets(
        layer_tokens=tuple(layer_tokens),
        recent_tokens=recent_tokens,
        sink_tokens=sink_tokens,
        pool_tokens=pool_tokens,
        output_tokens=output_tokens,
    )


def with_token_budgets(
    read: Callable[[ReadOptions], Sequence[LayerType]], config: Config, options: ReadOptions
) -> list[LayerType]:
    """Return the layer types of a model, with budgets instead of full attention where it has them.

    Args:
        read: Reads the layer types as if no layer had a budget.
        config: The language model's fields.
        options: How the model is run.

    Raises:
        ValueError: A budget is wrong, or is given to a layer without full attention of its own.
    """
    types, budgets = read(options), token_budgets(config)
    if budgets is None:
        return list(types)
    extra_bytes = 0 if budgets.output_tokens is None else WEIGHT_BYTES
    with_weights = read(replace(options, head_extra_bytes=extra_bytes))
    stored = {
        layer.name: layer
        for each in with_weights
        if isinstance(each, FullAttention)
        for layer in each.layers
    }
    tokens_of = {
        layer_name(index): tokens
        for index, tokens in enumerate(budgets.layer_tokens)
        if tokens is not None
    }
    kept: list[LayerType] = []
    layers_of: dict[int, list[Layer]] = {tokens: [] for tokens in tokens_of.values()}
    for each in types:
        others: list[Layer] = []
        for layer in each.layers:
            is_full = isinstance(each, FullAttention) and not layer.readers
            if is_full and layer.name in tokens_of:
                layers_of[tokens_of.pop(layer.name)].append(stored[layer.name])
            else:
                others.append(layer)
        if others:
            kept.append(replace(each, layers=tuple(others)))
    if tokens_of:
        config.refuse(
            TOKEN_BUDGETS,
            f"null for {', '.join(tokens_of)}: a layer with a budget has full attention to keys "
            "and values of its own, which no other layer reads",
        )
    return kept + [
        TokenBudget(
            name=f"budget_{tokens}",
            layers=tuple(layers),
            mean_budget_tokens=tokens,
            recent_tokens=budgets.recent_tokens,
            steepness=1,
            layer_index=0,
            num_layers=1,
            output_tokens=budgets.output_tokens,
        )
        for tokens, layers in layers_of.items()
    ]

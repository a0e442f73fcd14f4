"""Layers that shrink prompts to a token budget: their configuration, and their cache specs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from jenga.models.config import Config
from jenga.models.readers.token_budgets import WEIGHT_BYTES, TokenBudgets, token_budgets

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class TokenBudgetSpec(FullAttentionSpec):
    """Cache of a layer with a token budget.

    With `output_tokens`, each head of a slot has a word beside its key and value
    (`WEIGHT_BYTES`): the attention weights that its token got so far from the queries of the next
    choice.

    Attributes:
        budget_tokens: Most tokens of a prompt that are kept once it is read.
        recent_tokens: As in `TokenBudgets`.
        sink_tokens: As in `TokenBudgets`.
        pool_tokens: As in `TokenBudgets`.
        output_tokens: As in `TokenBudgets`.
    """

    budget_tokens: int = 1
    recent_tokens: int = 0
    sink_tokens: int = 0
    pool_tokens: int = 1
    output_tokens: int | None = None


def budgets_of(vllm_config: "VllmConfig") -> TokenBudgets | None:
    """Get the token budgets of a model, None if it has none.

    Raises:
        ValueError: A field of them is missing or wrong; the message names it.
    """
    model = vllm_config.model_config
    if model is None:
        return None
    return token_budgets(Config(model.hf_text_config.to_dict(), source="config.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBudget:
    """Token budget of one layer.

    Attributes:
        tokens: Most tokens of a prompt that are kept.
        recent_tokens: As in `TokenBudgets`.
        sink_tokens: As in `TokenBudgets`.
        pool_tokens: As in `TokenBudgets`.
        output_tokens: As in `TokenBudgets`.
    """

    tokens: int
    recent_tokens: int
    sink_tokens: int
    pool_tokens: int
    output_tokens: int | None


def budget_of_layer(
    vllm_config: "VllmConfig", name: str, *, source: str | None
) -> LayerBudget | None:
    """Get the budget of an attention layer, None if it has none.

    Args:
        vllm_config: Configuration of the model.
        name: vLLM's name of the layer.
        source: Name of the layer whose keys and values it reads, if they are not its own.

    Raises:
        ValueError: The layer has a budget and reads another layer, or reads a layer with a budget.
    """
    budgets = budgets_of(vllm_config)
    if budgets is None:
        return None
    tokens = budgets.layer_tokens[extract_layer_index(name)]
    if source is not None:
        if tokens is not None or budgets.layer_tokens[extract_layer_index(source)] is not None:
            msg = (
                f"kv_token_budgets must be null for layers that share a cache, {name} and {source}"
            )
            raise ValueError(msg)
        return None
    if tokens is None:
        return None
    return LayerBudget(
        tokens=tokens,
        recent_tokens=budgets.recent_tokens,
        sink_tokens=budgets.sink_tokens,
        pool_tokens=budgets.pool_tokens,
        output_tokens=budgets.output_tokens,
    )


def budget_spec(spec: Any, budget: LayerBudget) -> TokenBudgetSpec:  # noqa: ANN401
    """Get the spec of a layer with a budget.

    Args:
        spec: Spec that vLLM gives the layer.
        budget: The budget.

    Raises:
        ValueError: The layer has no full attention, or its pages are too long for the budget.
    """
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
        msg = (
            f"kv_token_budgets must be null for layers without full attention, got "
            f"{budget.tokens} for one with a {type(spec).__name__}"
        )
        raise ValueError(msg)
    least_tokens = budget.recent_tokens + budget.sink_tokens + spec.block_size
    if budget.tokens < least_tokens:
        msg = (
            f"kv_token_budgets must be at least {least_tokens}, the {budget.recent_tokens} recent "
            f"tokens, the {budget.sink_tokens} sinks and a page of {spec.block_size}, got "
            f"{budget.tokens}"
        )
        raise ValueError(msg)
    fields = dict(vars(spec))
    if budget.output_tokens is not None:
        fields["state_content_bytes"] = spec.state_content_size_bytes + WEIGHT_BYTES
    return TokenBudgetSpec(
        **fields,
        budget_tokens=budget.tokens,
        recent_tokens=budget.recent_tokens,
        sink_tokens=budget.sink_tokens,
        pool_tokens=budget.pool_tokens,
        output_tokens=budget.output_tokens,
    )


def check_budgets(vllm_config: "VllmConfig", specs: Mapping[str, Any]) -> None:
    """Refuse budgets of layers that do not use them.

    Args:
        vllm_config: Configuration of the model.
        specs: Spec of each layer that stores a cache, by name.

    Raises:
        ValueError: A budget is for a layer that is no attention layer of vLLM's.
    """
    budgets = budgets_of(vllm_config)
    if budgets is None:
        return
    found = {
        extract_layer_index(name)
        for name, spec in specs.items()
        if isinstance(spec, TokenBudgetSpec)
    }
    given = {index for index, tokens in enumerate(budgets.layer_tokens) if tokens is not None}
    if found != given:
        msg = (
            f"kv_token_budgets must be null for layers without attention of their own, got numbers "
            f"for {sorted(given - found)}"
        )
        raise ValueError(msg)

"""Room beside the states of recurrent layers for what their latest tokens brought in.

Asked for by vLLM's --use-replayssm or by JENGA_HISTORY_TOKENS, for Mamba-2 layers and those of the
gated delta rule: steps read a state and write no more than a row of a history for each token, until
these have filled their room. A page then has, of each layer, the states, how many tokens went into
them, and the history; the count that matters is that of the page's first layer. Whoever copies a
page copies all that, so states kept for other requests, in host memory too, need no word on it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from jenga.vllm_plugin.settings.environment import BACKEND_NAME, HISTORY_VARIABLE
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.specs.history_kinds import HISTORY_KINDS, HistoryKind, Part
from jenga.vllm_plugin.specs.layer_types import served_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

logger = init_logger(f"vllm.{__name__}")

_HISTORY_TOKENS = "jenga_history_tokens"
"""Of vLLM's additional options, the one that carries the number of tokens to the engine."""

_ASKED_BY = f"--use-replayssm and {HISTORY_VARIABLE}"

_ROW_BYTES = 16
_ROW_DIMS = 3
"""Of parts with a row of elements for each token, and of recurrent states."""

_COUNT = Part((4,), torch.int32)
"""How many tokens are in the states. One would do: what lies behind begins at 16 bytes."""


def take_replay(vllm_config: "VllmConfig", wanted_tokens: int) -> None:
    """Take on what --use-replayssm asks for, before vLLM serves it with kernels of its own.

    Args:
        vllm_config: Told of how many tokens histories are.
        wanted_tokens: What JENGA_HISTORY_TOKENS asks for, 0 for nothing.

    Raises:
        ValueError: Histories are to be shorter than two steps, or of two lengths, or there is
            nowhere to say so.
    """
    cache = vllm_config.cache_config
    asked = {HISTORY_VARIABLE: wanted_tokens} if wanted_tokens else {}
    if cache.use_replayssm:
        asked["--replayssm-buffer-len"] = cache.replayssm_buffer_len
    if not asked:
        return
    least, num_tokens = 2 * max_decode_tokens(vllm_config), max(asked.values())
    for name, tokens in asked.items():
        if tokens < least:
            msg = f"{name} {tokens}, where twice the tokens of a decoding step are {least}"
            raise Refusal.HISTORIES.error(msg)
        if tokens != num_tokens:
            msg = (
                f"--replayssm-buffer-len {cache.replayssm_buffer_len} beside {HISTORY_VARIABLE} "
                f"{wanted_tokens}"
            )
            raise Refusal.HISTORIES.error(msg)
    if not isinstance(vllm_config.additional_config, dict):
        msg = (
            f"{_ASKED_BY} need an --additional-config that is a mapping, got "
            f"{type(vllm_config.additional_config).__name__}"
        )
        raise ValueError(msg)  # noqa: TRY004  as for every other option
    vllm_config.additional_config[_HISTORY_TOKENS] = num_tokens
    cache.use_replayssm = False


def history_tokens(vllm_config: "VllmConfig") -> int:
    """Get of how many tokens histories are, 0 where every step writes states."""
    options = vllm_config.additional_config
    return options.get(_HISTORY_TOKENS, 0) if isinstance(options, dict) else 0


def max_decode_tokens(vllm_config: "VllmConfig") -> int:
    """Get the most tokens of a decoding request's step: the last one's, and those drafted."""
    return 1 + vllm_config.num_speculative_tokens


def with_histories(
    vllm_config: "VllmConfig", specs: Mapping[str, "KVCacheSpec"]
) -> dict[str, "KVCacheSpec"]:
    """Give recurrent layers room for their histories, where they shall have any.

    Raises:
        ValueError: There are no layers that could, their histories are longer than kernels take, or
            rows of these or of states are not whole loads.
    """
    num_tokens, model = history_tokens(vllm_config), vllm_config.model_config
    if not num_tokens:
        return dict(specs)
    served = served_states(model.architecture)
    found = {name: kind for name, spec in specs.items() if (kind := _kind_of(spec, served))}
    if not found:
        layers = " or ".join(kind.layers for kind in HISTORY_KINDS.values())
        msg = f"a model without {layers}"
        raise Refusal.HISTORIES.error(msg)
    logger.info(
        "%s: %s keep what up to %d tokens brought in beside their states, and write these when "
        "there is no room for more",
        BACKEND_NAME,
        " and ".join(sorted({kind.layers for kind in found.values()})),
        num_tokens,
    )
    return dict(specs) | {
        name: _with_history(name, specs[name], kind, num_tokens, model)  # pyright: ignore[reportArgumentType]
        for name, kind in found.items()
    }


def _kind_of(spec: "KVCacheSpec", served: frozenset[str]) -> HistoryKind | None:
    """Get what a layer keeps; None of one that writes every state, or runs on vLLM's kernels."""
    from vllm.v1.kv_cache_interface import MambaSpec

    if not isinstance(spec, MambaSpec) or spec.mamba_type.name not in served:
        return None
    return HISTORY_KINDS.get(spec.mamba_type.name)


def _with_history(
    name: str, spec: "MambaSpec", kind: HistoryKind, num_tokens: int, model: "ModelConfig"
) -> "MambaSpec":
    if kind.max_tokens and num_tokens > kind.max_tokens:
        msg = f"{num_tokens} tokens in layer {name!r}, which can keep {kind.max_tokens}"
        raise Refusal.HISTORIES.error(msg)
    parts = (_COUNT, *kind.parts(spec, num_tokens, model))
    for part in (Part(spec.shapes[1], spec.dtypes[1]), *parts):
        row_bytes = part.shape[-1] * part.dtype.itemsize
        if len(part.shape) == _ROW_DIMS and row_bytes % _ROW_BYTES:
            msg = f"rows of {row_bytes} bytes in layer {name!r}"
            raise Refusal.HISTORIES.error(msg)
    return replace(
        spec,
        shapes=(*spec.shapes, *(part.shape for part in parts)),
        dtypes=(*spec.dtypes, *(part.dtype for part in parts)),
        num_speculative_blocks=0,  # drafts have rows in the history, and no states
    )

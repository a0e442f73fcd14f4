"""Histories: the inputs of the latest tokens, stored beside the states of recurrent layers.

vLLM's --use-replayssm, JENGA_HISTORY_TOKENS or drafts turn them on, for Mamba-2 layers and layers
of the gated delta rule. A step then reads a state, and writes only a row of the history for each
token. It writes the state only when the history is full.

For each layer, a page holds the states, the number of tokens in them, and the history. Only the
number of the page's first layer is used. A copy of a page includes all of this. So states that are
kept for other requests, in host memory too, need no special treatment.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from jenga.models.options import default_history_tokens
from jenga.vllm_plugin.settings.additional_config import (
    HISTORY_IS_DEFAULT,
    HISTORY_REQUESTS,
    HISTORY_TOKENS,
)
from jenga.vllm_plugin.settings.environment import (
    BACKEND_NAME,
    HISTORY_REQUESTS_VARIABLE,
    HISTORY_VARIABLE,
)
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.specs.layer_types import served_states
from jenga.vllm_plugin.specs.replay_kinds import HISTORY_KINDS, NUM_STATES, HistoryKind, Part

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

logger = init_logger(f"vllm.{__name__}")

_ASKED_BY = f"--use-replayssm and {HISTORY_VARIABLE}"

_ROW_BYTES = 16
_ROW_DIMS = 3
"""Number of dimensions of recurrent states, and of parts with a row of elements for each token."""

_COUNT = Part((4,), torch.int32)
"""Number of tokens in the states.

One element is used. There are four, so that the next part begins at a multiple of 16 bytes.
"""


def take_replay(
    vllm_config: "VllmConfig", wanted_tokens: int | None, wanted_requests: int | None = None
) -> None:
    """Move --use-replayssm to our own option, before vLLM serves it with its own kernels.

    If no length is asked for, the default for the number of drafted tokens is taken.

    Args:
        vllm_config: Configuration to which the length of histories is written.
        wanted_tokens: Value of JENGA_HISTORY_TOKENS, or None. 0 means no histories.
        wanted_requests: Value of JENGA_HISTORY_REQUESTS, or None.

    Raises:
        ValueError: Histories are to be shorter than two decoding steps, or the two settings ask for
            different lengths. Or a number of requests is set without histories, or the additional
            configuration is not a mapping.
    """
    cache = vllm_config.cache_config
    asked = {HISTORY_VARIABLE: wanted_tokens} if wanted_tokens else {}
    if cache.use_replayssm:
        asked["--replayssm-buffer-len"] = cache.replayssm_buffer_len
    if not asked:
        if wanted_tokens is None:
            _take_default(vllm_config)
        if wanted_requests is not None and not history_tokens(vllm_config):
            msg = (
                f"{HISTORY_REQUESTS_VARIABLE}={wanted_requests} has no effect without "
                f"--use-replayssm or {HISTORY_VARIABLE}"
            )
            raise ValueError(msg)
        if wanted_requests is not None:
            _options_of(vllm_config)[HISTORY_REQUESTS] = wanted_requests
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
    options = vllm_config.additional_config
    if not isinstance(options, dict):
        msg = (
            f"{_ASKED_BY} need an --additional-config that is a mapping, got "
            f"{type(options).__name__}"
        )
        raise ValueError(msg)  # noqa: TRY004  as for every other option
    options[HISTORY_TOKENS] = num_tokens
    if wanted_requests is not None:
        options[HISTORY_REQUESTS] = wanted_requests
    cache.use_replayssm = False


def _take_default(vllm_config: "VllmConfig") -> None:
    """Keep histories if tokens are drafted. A worker's configuration may have a length already."""
    num_tokens = default_history_tokens(vllm_config.num_speculative_tokens)
    options = vllm_config.additional_config
    if not num_tokens:
        return
    if not isinstance(options, dict):
        logger.info_once(
            "recurrent layers, if there are any, keep a state for each drafted token and no "
            "history, because --additional-config is no mapping but %s",
            type(options).__name__,
        )
    elif HISTORY_TOKENS not in options:
        options |= {HISTORY_TOKENS: num_tokens, HISTORY_IS_DEFAULT: True}


def _options_of(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Get our own options, and those of the user. There are none if they are not a mapping."""
    options = vllm_config.additional_config
    return options if isinstance(options, dict) else {}


def history_tokens(vllm_config: "VllmConfig") -> int:
    """Get the number of tokens in a history. 0 means that every step writes states."""
    return _options_of(vllm_config).get(HISTORY_TOKENS, 0)


def history_requests(vllm_config: "VllmConfig", spec: "MambaSpec") -> int:
    """Get the fewest requests of a decode step that does not write all of its states.

    Steps with fewer requests are no slower if they write all states.

    Args:
        vllm_config: Configuration, which may set the number.
        spec: Spec of the layers, which have histories. By default the bytes of their states decide.
    """
    options = _options_of(vllm_config)
    if HISTORY_REQUESTS in options:
        return options[HISTORY_REQUESTS]
    state_bytes = prod(spec.shapes[1]) * spec.dtypes[1].itemsize
    return -(-HISTORY_KINDS[spec.mamba_type.name].least_bytes // state_bytes)


def max_decode_tokens(vllm_config: "VllmConfig") -> int:
    """Get the largest number of tokens of a decoding request in a step: one, and its drafts."""
    return 1 + vllm_config.num_speculative_tokens


def with_histories(
    vllm_config: "VllmConfig", specs: Mapping[str, "KVCacheSpec"]
) -> dict[str, "KVCacheSpec"]:
    """Add histories to the specs of recurrent layers, if the configuration has a length of them.

    If the length is the default, specs that cannot have a history stay as they are.

    Raises:
        ValueError: No layer can have a history, the histories are longer than the kernels support,
            or a row of a history or state is not a multiple of 16 bytes. Not with the default.
    """
    try:
        return _with_histories(vllm_config, specs)
    except ValueError:
        if not _options_of(vllm_config).get(HISTORY_IS_DEFAULT):
            raise
        return dict(specs)


def has_history(spec: "KVCacheSpec") -> bool:
    """Whether layers of a spec keep a history beside their states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec) and len(spec.shapes) > NUM_STATES


def _with_histories(
    vllm_config: "VllmConfig", specs: Mapping[str, "KVCacheSpec"]
) -> dict[str, "KVCacheSpec"]:
    num_tokens, model = history_tokens(vllm_config), vllm_config.model_config
    if not num_tokens:
        return dict(specs)
    served = served_states(model.architecture)
    found = {name: kind for name, spec in specs.items() if (kind := _kind_of(spec, served))}
    if not found:
        layers = " or ".join(kind.layers for kind in HISTORY_KINDS.values())
        msg = f"a model without {layers}"
        raise Refusal.HISTORIES.error(msg)
    kept = {
        name: _with_history(name, specs[name], kind, num_tokens, model)  # pyright: ignore[reportArgumentType]
        for name, kind in found.items()
    }
    logger.info(
        "%s: %s keep the inputs of up to %d tokens beside a state, and write the state when there "
        "is no room for more. Without drafts, they write all states in steps of fewer than %s "
        "requests (%s)",
        BACKEND_NAME,
        " and ".join(sorted({kind.layers for kind in found.values()})),
        num_tokens,
        " or ".join(
            map(str, sorted({history_requests(vllm_config, each) for each in kept.values()}))
        ),
        HISTORY_REQUESTS_VARIABLE,
    )
    return dict(specs) | kept


def _kind_of(spec: "KVCacheSpec", served: frozenset[str]) -> HistoryKind | None:
    """Get the kind of a layer's history.

    It is None if the layer writes its state in every step, or runs on vLLM's kernels.
    """
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
        num_speculative_blocks=0,  # drafts have rows in the history instead of states
    )

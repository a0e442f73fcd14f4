"""Room beside the states of Mamba-2 layers for the inputs of their latest tokens.

Asked for by vLLM's --use-replayssm: steps read a state and write no more than their inputs, until
these have filled their room. A page then has, of each layer, the states, the histories, and how
many tokens went into the states; the count that matters is that of the page's first layer. Whoever
copies a page copies all that, so states kept for other requests, in host memory too, need no word
on it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from jenga.vllm_plugin.environment import BACKEND_NAME

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

logger = init_logger(f"vllm.{__name__}")

_HISTORY_TOKENS = "jenga_history_tokens"
"""Of vLLM's additional options, the one that carries --replayssm-buffer-len to the engine."""

_ROW_BYTES = 16
NUM_STATES = 2
"""Of a layer: its convolution's and its recurrence's."""

_COUNT_ELEMENTS = 4
"""Of 32 bits, where one would do: what lies behind it begins at a multiple of 16 bytes."""


def take_replay(vllm_config: "VllmConfig") -> None:
    """Take on what --use-replayssm asks for, before vLLM serves it with kernels of its own.

    Raises:
        ValueError: The history is to be shorter than two steps, or there is nowhere to say so.
    """
    cache = vllm_config.cache_config
    if not cache.use_replayssm:
        return
    least = 2 * max_decode_tokens(vllm_config)
    if cache.replayssm_buffer_len < least:
        msg = (
            f"--replayssm-buffer-len must be at least {least}, twice the tokens of a decoding "
            f"step, got {cache.replayssm_buffer_len}"
        )
        raise ValueError(msg)
    if not isinstance(vllm_config.additional_config, dict):
        msg = (
            f"--use-replayssm needs an --additional-config that is a mapping, got "
            f"{type(vllm_config.additional_config).__name__}"
        )
        raise ValueError(msg)  # noqa: TRY004  as for every other option
    vllm_config.additional_config[_HISTORY_TOKENS] = cache.replayssm_buffer_len
    cache.use_replayssm = False


def history_tokens(vllm_config: "VllmConfig") -> int:
    """Get how many tokens' inputs are kept beside a state, 0 where every step writes it."""
    options = vllm_config.additional_config
    return options.get(_HISTORY_TOKENS, 0) if isinstance(options, dict) else 0


def max_decode_tokens(vllm_config: "VllmConfig") -> int:
    """Get the most tokens of a decoding request's step: the last one's, and those drafted."""
    return 1 + vllm_config.num_speculative_tokens


def with_histories(
    vllm_config: "VllmConfig", specs: Mapping[str, "KVCacheSpec"]
) -> dict[str, "KVCacheSpec"]:
    """Give Mamba-2 layers room for their histories, where they shall have any.

    Raises:
        ValueError: There are no such layers, or rows of their histories are not whole loads.
    """
    num_tokens = history_tokens(vllm_config)
    if not num_tokens:
        return dict(specs)
    found = {name: spec for name, spec in specs.items() if _is_mamba2(spec)}
    if not found:
        msg = (
            f"{BACKEND_NAME} serves --use-replayssm in models of Mamba-2 layers, and there is none"
        )
        raise ValueError(msg)
    logger.info(
        "%s: Mamba-2 layers keep the inputs of up to %d tokens beside their states, and write "
        "these when there is no room for more",
        BACKEND_NAME,
        num_tokens,
    )
    dtype = vllm_config.model_config.dtype
    return dict(specs) | {
        name: _with_history(name, spec, num_tokens, dtype)  # pyright: ignore[reportArgumentType]
        for name, spec in found.items()
    }


def _is_mamba2(spec: "KVCacheSpec") -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec) and spec.mamba_type.name == "MAMBA2"


def _with_history(
    name: str, spec: "MambaSpec", num_tokens: int, dtype: "torch.dtype"
) -> "MambaSpec":
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv, (num_heads, head_dim, d_state) = spec.shapes
    conv_dim = conv[0 if is_conv_state_dim_first() else 1]
    num_groups = (conv_dim - num_heads * head_dim) // (2 * d_state)
    for size in (head_dim, d_state):
        if size * dtype.itemsize % _ROW_BYTES:
            msg = (
                f"{BACKEND_NAME} does not support --use-replayssm in layer {name!r}: rows of its "
                f"history must take multiples of {_ROW_BYTES} bytes, got {size * dtype.itemsize}"
            )
            raise ValueError(msg)
    shapes = (
        (num_heads, num_tokens, head_dim),
        (num_groups, num_tokens, d_state),
        (_COUNT_ELEMENTS,),
        (num_heads, num_tokens),
    )
    dtypes = (dtype, dtype, torch.int32, torch.float32)
    return replace(
        spec,
        shapes=(*spec.shapes, *shapes),
        dtypes=(*spec.dtypes, *dtypes),
        num_speculative_blocks=0,  # drafts have rows in the history, and no states
    )

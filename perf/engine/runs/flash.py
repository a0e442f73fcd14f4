"""FlashAttention-3 over our arena, to separate the memory manager's effect from the kernels'.

Its paged kernel reads keys and values with any strides, provided that the last dimension is
contiguous. If threads copy them (without TMA), pages may have any multiple of 16 tokens. So a layer
of the arena needs no change. These layers keep our kernel, because FlashAttention-3 does not serve
them:

- heads wider than 256;
- caches of another element type than the queries;
- chunked attention, spans of images, ALiBi and cross attention.

No GPU has run this yet.
"""

from collections.abc import Callable
from typing import Any

import torch

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)

FlashAttention = Callable[..., Any]


def arguments(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Translate a call of `paged_attention` to arguments of `flash_attn_varlen_func`.

    The host does not know the longest prompt of a step here. The given `max_seqlen_q` is a bound
    that holds for any division of the tokens into requests.
    """
    num_tokens, num_requests = len(q), len(seq_lens)
    return {
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "out": out,
        "cu_seqlens_q": query_starts,
        "max_seqlen_q": max(1, num_tokens - num_requests + 1),
        "seqused_k": seq_lens,
        "max_seqlen_k": page_table.shape[1] * k_pages.shape[1],
        "softmax_scale": scale,
        "causal": True,
        "window_size": [window_tokens - 1, 0] if window_tokens else [-1, -1],
        "block_table": page_table,
        "softcap": soft_cap or 0.0,
        "fa_version": 3,
        "s_aux": None if sinks is None else sinks.to(torch.bfloat16),
    }


_SHARED = frozenset({"scale", "window_tokens", "soft_cap", "sinks", "out"})


def is_served(q: torch.Tensor, k_pages: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether FlashAttention-3 supports everything that a call of `paged_attention` asks for."""
    others = {name: each for name, each in options.items() if name not in _SHARED}
    others.pop("plan", None)
    is_plain = others.pop("is_causal", True) and all(each is None for each in others.values())
    return (
        is_plain
        and q.dtype in DTYPES
        and k_pages.dtype == q.dtype
        and q.shape[-1] == k_pages.shape[-1] <= MAX_HEAD_DIM
    )


def attention_by(
    flash_attention: FlashAttention, paged_attention: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Make a `paged_attention` that calls FlashAttention-3 for the layers that it supports.

    Args:
        flash_attention: Function with the arguments of vLLM's `flash_attn_varlen_func`.
        paged_attention: Our function, used for all other layers.
    """

    def attend(q: torch.Tensor, **options: Any) -> torch.Tensor:  # noqa: ANN401
        named = ("k_pages", "v_pages", "page_table", "query_starts", "seq_lens")
        tensors = {name: options[name] for name in named}
        others = {name: each for name, each in options.items() if name not in named}
        if not is_served(q, tensors["k_pages"], others):
            return paged_attention(q, **options)
        shared = {name: each for name, each in others.items() if name in _SHARED}
        call = arguments(q, **tensors, **shared)
        flash_attention(**call)
        return call["out"]

    return attend


def install() -> None:
    """Let layers on JENGA_TRITON use FlashAttention-3 from now on.

    Raises:
        ImportError: vLLM's build has no FlashAttention.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from jenga.vllm_plugin.layers.attention import backend as attention

    attention.paged_attention = attention_by(flash_attn_varlen_func, attention.paged_attention)

"""Other implementations of paged attention, on the same pages and strides as ours.

Each peer is a function from a batch to a launch that writes into `out`. It raises
`UnsupportedError` with the reason if it is not installed or does not support the shape.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton

from jenga_kernels.attention.rotation import hadamard_rotation
from perf.shapes.attention_shapes import AttentionBatch
from perf.shapes.cache_layouts import Stored, as_vllm_has_it

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVQuantMode

Launch = Callable[[], object]

VLLM_SEGMENTS = 16
"""Number of splits of a decoding request's keys in vLLM's Triton kernel."""

VLLM_MIN_PROGRAMS = 128
"""Number of programs below which vLLM's Triton backend splits keys."""

VLLM_TILE_PAGES = 32
"""Largest number of pages in a tile of vLLM's Triton kernel: no page has fewer than 16 tokens."""

FA3_MAX_HEAD_DIM = 256
"""Widest head of FlashAttention-3. vLLM's backend uses FlashAttention-4 for wider ones."""

WORKSPACE_BYTES = 512 << 20

NO_SLOT_SCALES = "takes no scale for each slot"


class UnsupportedError(Exception):
    """A peer is not installed, or does not support the shape."""


def vllm_mode(stored: Stored) -> "KVQuantMode":
    """Return the quantisation mode by which vLLM's Triton kernels know such a cache."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    return {
        Stored.BF16: KVQuantMode.NONE,
        Stored.FP8: KVQuantMode.FP8_PER_TENSOR,
        Stored.E5M2: KVQuantMode.FP8_PER_TENSOR,
        Stored.FP8_SLOTS: KVQuantMode.FP8_PER_TOKEN_HEAD,
        Stored.INT8_SLOTS: KVQuantMode.INT8_PER_TOKEN_HEAD,
        Stored.INT4_SLOTS: KVQuantMode.INT4_PER_TOKEN_HEAD,
    }[stored]


def give_vllm_our_signs(head_dim: int, device: torch.device) -> None:
    """Let vLLM rotate rows with our random signs, so that rotated rows differ only in length.

    Then caches with the same contents give the same results. vLLM's time does not change.
    """
    from vllm.v1.attention.ops import int4_per_token_head

    signs = hadamard_rotation(head_dim, torch.float32, device).forward[:, 0].sign()
    int4_per_token_head._RHT_SIGNS_CACHE[head_dim, 0, str(device)] = signs


def vllm_triton(batch: AttentionBatch, out: torch.Tensor) -> Launch:
    """Prepare vLLM's Triton unified attention, as in its TRITON_ATTN backend.

    Scales of slots lie behind each key and value, as in that backend. With four bits per element it
    rotates queries and results itself.
    """
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    shape = batch.shape
    mode = vllm_mode(shape.stored)
    if shape.stored.is_rotated:
        give_vllm_our_signs(shape.head_dim, batch.q.device)
    segments = torch.empty(
        shape.num_tokens,
        shape.num_heads,
        VLLM_SEGMENTS,
        triton.next_power_of_2(shape.head_dim),
        device=out.device,
    )
    sums = torch.empty(2, *segments.shape[:3], device=out.device)
    cache = as_vllm_has_it(batch.cache, shape.cache)
    scale = cache.scale
    if scale is not None:
        scale = scale.expand(len(shape.requests), shape.num_kv_heads)
    window = (shape.window_tokens - 1, 0) if shape.window_tokens else (-1, -1)
    # The kernel's loops read the table up to the end of a tile. vLLM's own tables have the model's
    # maximum length.
    page_table = torch.nn.functional.pad(batch.page_table, (0, VLLM_TILE_PAGES))

    def launch() -> None:
        unified_attention(
            q=batch.q,
            k=cache.k_pages,
            v=cache.v_pages,
            out=out,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=max(queries for queries, _ in shape.requests),
            seqused_k=batch.seq_lens,
            max_seqlen_k=max(stored for _, stored in shape.requests),
            softmax_scale=shape.head_dim**-0.5,
            causal=shape.is_causal,
            window_size=window,
            block_table=page_table,
            softcap=shape.soft_cap or 0.0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=VLLM_MIN_PROGRAMS // shape.num_kv_heads,
            num_par_softmax_segments=VLLM_SEGMENTS,
            softmax_segm_output=segments,
            softmax_segm_max=sums[0],
            softmax_segm_expsum=sums[1],
            sinks=batch.sinks,
            kv_quant_mode=mode,
            k_scale_cache=cache.k_slot_scales,
            v_scale_cache=cache.v_slot_scales,
        )

    return launch


def flash_attention_3(batch: AttentionBatch, out: torch.Tensor) -> Launch:
    """Prepare FlashAttention-3 in vLLM's build. Its schedule is computed before and not timed."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
            is_fa_version_supported,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    if not is_fa_version_supported(3):
        msg = "FlashAttention-3 is not in this build"
        raise UnsupportedError(msg)
    shape = batch.shape
    if shape.stored.has_slot_scales:
        raise UnsupportedError(NO_SLOT_SCALES)
    if shape.stored.is_quantised:
        msg = "needs queries of float8_e4m3fn too"
        raise UnsupportedError(msg)
    if shape.head_dim > FA3_MAX_HEAD_DIM:
        msg = f"heads have at most {FA3_MAX_HEAD_DIM} elements"
        raise UnsupportedError(msg)
    max_queries = max(queries for queries, _ in shape.requests)
    max_stored = max(stored for _, stored in shape.requests)
    window = [shape.window_tokens - 1, 0] if shape.window_tokens else [-1, -1]
    schedule = get_scheduler_metadata(
        batch_size=len(shape.requests),
        max_seqlen_q=max_queries,
        max_seqlen_k=max_stored,
        num_heads_q=shape.num_heads,
        num_heads_kv=shape.num_kv_heads,
        headdim=shape.head_dim,
        cache_seqlens=batch.seq_lens,
        qkv_dtype=batch.q.dtype,
        cu_seqlens_q=batch.query_starts,
        page_size=shape.page_tokens,
        causal=shape.is_causal,
        window_size=window,
        has_softcap=bool(shape.soft_cap),
    )
    sinks = None if batch.sinks is None else batch.sinks.to(torch.bfloat16)

    def launch() -> None:
        flash_attn_varlen_func(
            q=batch.q,
            k=batch.cache.k_pages,
            v=batch.cache.v_pages,
            out=out,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=max_queries,
            seqused_k=batch.seq_lens,
            max_seqlen_k=max_stored,
            softmax_scale=shape.head_dim**-0.5,
            causal=shape.is_causal,
            window_size=window,
            block_table=batch.page_table,
            softcap=shape.soft_cap or 0.0,
            scheduler_metadata=schedule,
            fa_version=3,
            s_aux=sinks,
        )

    return launch


def flashinfer(batch: AttentionBatch, out: torch.Tensor) -> Launch:
    """Prepare FlashInfer's paged wrappers. Planning is not timed."""
    try:
        import flashinfer as library
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    shape = batch.shape
    if shape.stored.has_slot_scales:
        raise UnsupportedError(NO_SLOT_SCALES)
    if shape.has_sinks:
        msg = "sinks need a kernel variant compiled at run time"
        raise UnsupportedError(msg)
    counts = [-(-stored // shape.page_tokens) for _, stored in shape.requests]
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    indices = torch.cat([batch.page_table[request, :count] for request, count in enumerate(counts)])
    last = [(stored - 1) % shape.page_tokens + 1 for _, stored in shape.requests]
    last_tokens = torch.tensor(last, dtype=torch.int32)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=out.device)
    options = {
        "window_left": shape.window_tokens - 1 if shape.window_tokens else -1,
        "logits_soft_cap": shape.soft_cap,
        "q_data_type": batch.q.dtype,
        "kv_data_type": batch.cache.k_pages.dtype,
        "sm_scale": shape.head_dim**-0.5,
    }
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    if shape.num_tokens == len(shape.requests):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(indptr, indices, last_tokens, *heads, shape.page_tokens, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            batch.query_starts.cpu(),
            indptr,
            indices,
            last_tokens,
            *heads,
            shape.page_tokens,
            causal=shape.is_causal,
            **options,
        )

    def launch() -> None:
        wrapper.run(batch.q, (batch.cache.k_pages, batch.cache.v_pages), out=out)

    return launch


PEERS = {
    "vllm-triton": vllm_triton,
    "flash-attention-3": flash_attention_3,
    "flashinfer": flashinfer,
}
"""Name in a row -> function that prepares the launch."""

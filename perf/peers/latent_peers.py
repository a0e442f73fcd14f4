"""Other implementations of latent attention, on the same pages and strides as ours.

Each peer is a function from a batch to a launch that writes into `out`. It raises
`UnsupportedError` with the reason if it is not installed or does not support the shape.
"""

import torch
import triton

from perf.peers.attention_peers import WORKSPACE_BYTES, Launch, UnsupportedError
from perf.shapes.latent_shapes import LATENT_DIM, ROTARY_DIM, SCALE, WIDTH, LatentBatch

FLASH_MLA_PAGE_TOKENS = 64
"""The only page size, in tokens, that FlashMLA's bfloat16 kernels support."""

VLLM_SPLIT_TOKENS = 512
"""Least number of keys in one split of a request in vLLM's Triton backend."""


def vllm_triton(batch: LatentBatch, out: torch.Tensor) -> Launch:
    """Prepare vLLM's Triton decode kernels, as in its TRITON_MLA backend.

    Each query token is a row of its own.
    """
    try:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    shape = batch.shape
    queries = _uniform_queries(batch)
    table = batch.page_table.repeat_interleave(queries, 0)
    offsets = torch.arange(1 - queries, 1, dtype=torch.int32, device=out.device)
    seq_lens = (batch.seq_lens[:, None] + offsets).flatten()
    longest = max(stored for _, stored in shape.requests)
    num_splits = triton.next_power_of_2(max(1, longest // VLLM_SPLIT_TOKENS))
    if out.device.type == "cuda":
        properties = torch.cuda.get_device_properties(out.device)
        num_splits = min(num_splits, 2 * properties.multi_processor_count)
    parts = torch.empty(
        shape.num_tokens, shape.num_heads, num_splits, LATENT_DIM + 1, device=out.device
    )
    lse = torch.empty(shape.num_tokens, shape.num_heads, dtype=out.dtype, device=out.device)
    pages = batch.pages[:, :, None]

    def launch() -> None:
        decode_attention_fwd(
            batch.q,
            pages,
            pages[..., :LATENT_DIM],
            out,
            lse,
            table,
            seq_lens,
            parts,
            num_splits,
            SCALE,
            shape.page_tokens,
            k_scale=batch.latent_scale,
            v_scale=batch.latent_scale,
            is_mla=True,
        )

    return launch


def flash_mla(batch: LatentBatch, out: torch.Tensor) -> Launch:
    """Prepare FlashMLA in vLLM's build.

    Its schedule is made at the first call, which is not timed.
    """
    try:
        from vllm.v1.attention.ops.flashmla import (
            flash_mla_with_kvcache,
            get_mla_metadata,
            is_flashmla_dense_supported,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    is_supported, reason = is_flashmla_dense_supported()
    shape = batch.shape
    queries = _uniform_queries(batch)
    if shape.is_fp8:
        is_supported, reason = False, "needs queries of float8_e4m3fn too"
    elif shape.page_tokens != FLASH_MLA_PAGE_TOKENS:
        is_supported, reason = False, f"needs pages of {FLASH_MLA_PAGE_TOKENS} tokens"
    if not is_supported:
        raise UnsupportedError(reason)
    schedule, _ = get_mla_metadata()
    q = batch.q.view(len(shape.requests), queries, shape.num_heads, WIDTH)

    def launch() -> torch.Tensor:
        results, _ = flash_mla_with_kvcache(
            q=q,
            k_cache=batch.pages[:, :, None],
            block_table=batch.page_table,
            cache_seqlens=batch.seq_lens,
            head_dim_v=LATENT_DIM,
            tile_scheduler_metadata=schedule,
            softmax_scale=SCALE,
            causal=True,
        )
        return results

    out.copy_(launch().view(out.shape))
    return launch


def flashinfer(batch: LatentBatch, out: torch.Tensor) -> Launch:
    """Prepare FlashInfer's MLA wrapper. Planning is not timed."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    shape = batch.shape
    if shape.is_fp8:
        msg = "needs queries of float8_e4m3fn too"
        raise UnsupportedError(msg)
    counts = [-(-stored // shape.page_tokens) for _, stored in shape.requests]
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    indices = torch.cat([batch.page_table[request, :count] for request, count in enumerate(counts)])
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=out.device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        batch.query_starts,
        indptr.to(out.device),
        indices,
        batch.seq_lens,
        shape.num_heads,
        LATENT_DIM,
        ROTARY_DIM,
        shape.page_tokens,
        shape.max_query_tokens > 1,
        SCALE,
        batch.q.dtype,
        batch.pages.dtype,
    )

    def launch() -> None:
        wrapper.run(
            batch.q[..., :LATENT_DIM],
            batch.q[..., LATENT_DIM:],
            batch.pages[..., :LATENT_DIM],
            batch.pages[..., LATENT_DIM:],
            out=out,
        )

    return launch


def _uniform_queries(batch: LatentBatch) -> int:
    """Return the number of query tokens per request, if it is the same for all.

    Raises:
        UnsupportedError: The numbers differ, or are too large for a decode step.
    """
    counts = {queries for queries, _ in batch.shape.requests}
    most_drafted = 8
    if len(counts) > 1 or max(counts) > most_drafted:
        msg = f"needs the same number of query tokens in each request, up to {most_drafted}"
        raise UnsupportedError(msg)
    return counts.pop()


PEERS = {"vllm-triton": vllm_triton, "flash-mla": flash_mla, "flashinfer": flashinfer}
"""Name in a row -> function that prepares the launch."""

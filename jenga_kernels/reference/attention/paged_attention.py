"""Reference of `jenga_kernels.paged_attention`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from jenga_kernels.checks.pages import elements_per_item
from jenga_kernels.checks.tensors import INT4_DTYPE
from jenga_kernels.plans.attention_plan import AttentionPlan
from jenga_kernels.reference.attention.kv_store import as_bytes

BLOCK_QUERIES = 256
"""Most query tokens of a request that are computed at once."""


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None = None,
    chunk_tokens: int | None = None,
    is_causal: bool = True,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_slot_scales: torch.Tensor | None = None,
    v_slot_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,  # noqa: ARG001 - a plan changes no result
) -> torch.Tensor:
    """Attend in blocks of a request's queries; see the operation for the arguments.

    Everything is computed in the dtype of q (softmax at least in float32). So float64 inputs give
    the exact result, and narrower ones the result of plain PyTorch.
    """
    num_kv_heads = k_pages.shape[2]
    if out is None:
        value_dim = v_pages.shape[3] * elements_per_item(v_pages.dtype)
        out = q.new_empty(*q.shape[:2], value_dim)
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    for block in query_blocks(query_starts, seq_lens):
        rows = block.rows
        visible = visible_keys(
            block,
            window_tokens=window_tokens,
            chunk_tokens=chunk_tokens,
            is_causal=is_causal,
            spans=None if spans is None else spans[rows],
        ).to(q.device)
        read = visible.any(0)
        keys, visible = read.nonzero()[:, 0], visible[:, read]
        table_row = page_table[block.request]
        k = gathered(k_pages, table_row, keys, k_scale, q.dtype, slot_scales=k_slot_scales)
        v = gathered(v_pages, table_row, keys, v_scale, q.dtype, slot_scales=v_slot_scales)

        grouped = q[rows].unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k).flatten(0, 1).to(score_dtype) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            distance = keys[None, :] - block.positions[:, None].to(q.device)
            scores = scores + alibi_slopes.to(score_dtype)[:, None, None] * distance
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.to(score_dtype)[:, None, None].expand(-1, len(grouped), 1)
            scores = torch.cat([scores, column], 2)
        log_sums = torch.logsumexp(scores, 2, keepdim=True)
        # A query without keys gets weights of 0. One whose scores are NaN gets weights of NaN.
        weights = torch.exp(scores - log_sums)[:, :, : len(keys)].masked_fill(~visible, 0.0)
        weights = weights.to(q.dtype).unflatten(0, (num_kv_heads, -1))
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
        if lse is not None:
            lse[rows] = log_sums[:, :, 0].T.to(lse.dtype)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlock:
    """Query tokens of one request that are computed at once.

    Attributes:
        request: Index of the request in the batch.
        rows: Rows of the queries.
        first_position: Position of the first of these tokens in its request; below 0 if a request
            has more queries than keys.
        seq_len: Number of keys of the request.
    """

    request: int
    rows: slice
    first_position: int
    seq_len: int

    @property
    def positions(self) -> torch.Tensor:
        """Positions of all these tokens, i64[query_len]."""
        return self.first_position + torch.arange(self.rows.stop - self.rows.start)


def query_blocks(query_starts: torch.Tensor, seq_lens: torch.Tensor) -> Iterator[QueryBlock]:
    """Cut the queries of all requests into blocks, so that a long prompt's scores fit memory."""
    bounds = itertools.pairwise(query_starts.tolist())
    for request, ((start, end), seq_len) in enumerate(zip(bounds, seq_lens.tolist(), strict=True)):
        for block_start in range(start, end, BLOCK_QUERIES):
            yield QueryBlock(
                request=request,
                rows=slice(block_start, min(end, block_start + BLOCK_QUERIES)),
                first_position=seq_len - (end - block_start),
                seq_len=seq_len,
            )


def visible_keys(
    block: QueryBlock,
    *,
    window_tokens: int | None = None,
    chunk_tokens: int | None = None,
    is_causal: bool,
    spans: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask of the keys of its request that each query token reads, bool[query_len, seq_len]."""
    positions, keys = block.positions[:, None], torch.arange(block.seq_len)
    visible = torch.ones(len(positions), len(keys), dtype=torch.bool)
    if is_causal:
        visible &= keys <= positions
    if window_tokens is not None:
        visible &= keys > positions - min(window_tokens, block.seq_len)
    if chunk_tokens is not None:
        chunk_tokens = max(1, min(chunk_tokens, block.seq_len))
        visible &= keys >= positions.clamp(min=0) // chunk_tokens * chunk_tokens
    if spans is not None:
        start, end = spans.cpu()[:, None].unbind(2)
        visible |= (start <= keys) & (keys < end)
    return visible


def gathered(
    pages: torch.Tensor,
    table_row: torch.Tensor,
    tokens: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    slot_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather one request's tokens, [num_tokens, num_kv_heads, head_dim], and read no others."""
    place = (table_row[tokens // pages.shape[1]].long(), tokens % pages.shape[1])
    stored = as_bytes(pages)[place].view(pages.dtype)
    if pages.dtype == INT4_DTYPE and slot_scales is not None:
        return from_int4(stored, slot_scales[place], dtype)
    rows = stored.to(dtype)
    if slot_scales is not None:
        rows = rows * slot_scales[place][..., None].to(dtype)
    return rows if scale is None else rows * scale[:, None].to(dtype)


def from_int4(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore heads of four bits an element to [num_tokens, num_kv_heads, head_dim].

    Args:
        stored: Two elements each, u8[num_tokens, num_kv_heads, head_dim // 2].
        scales: Step and least element of each head, bf16[num_tokens, num_kv_heads, 2].
        dtype: Element type of the result.
    """
    elements = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).to(dtype)
    step, least = scales.to(dtype).unsqueeze(-1).unbind(-2)
    return elements * step + least

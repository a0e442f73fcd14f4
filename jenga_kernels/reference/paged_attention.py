"""Reference of `jenga_kernels.paged_attention`."""

import torch

from jenga_kernels.attention_plan import AttentionPlan
from jenga_kernels.checks.pages import elements_per_item
from jenga_kernels.checks.tensors import INT4_DTYPE


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
    """Attend request by request; see the operation for the arguments.

    Everything is computed in the dtype of q (softmax at least in float32), so float64 inputs give
    the exact result and low-precision ones what plain PyTorch would.
    """
    if out is None:
        value_dim = v_pages.shape[3] * elements_per_item(v_pages.dtype)
        out = q.new_empty(*q.shape[:2], value_dim)
    num_heads, num_kv_heads = q.shape[1], k_pages.shape[2]
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    starts = query_starts.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        visible = visible_keys(
            seq_len - query_len,
            query_len,
            seq_len,
            window_tokens=window_tokens,
            chunk_tokens=chunk_tokens,
            is_causal=is_causal,
            spans=None if spans is None else spans[rows],
        ).to(q.device)
        read = visible.any(0)
        table_row = page_table[request]
        k = gathered(k_pages, table_row, read, k_scale, q.dtype, slot_scales=k_slot_scales)
        v = gathered(v_pages, table_row, read, v_scale, q.dtype, slot_scales=v_slot_scales)
        k = k.repeat_interleave(num_heads // num_kv_heads, 1)
        v = v.repeat_interleave(num_heads // num_kv_heads, 1)

        scores = torch.einsum("qhd,khd->hqk", q[rows], k).to(score_dtype) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            keys = torch.arange(seq_len, device=q.device)
            positions = torch.arange(seq_len - query_len, seq_len, device=q.device)
            distance = keys[None, :] - positions[:, None]
            scores = scores + alibi_slopes.to(score_dtype)[:, None, None] * distance
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.to(score_dtype)[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat([scores, column], 2)
        log_sums = torch.logsumexp(scores, 2, keepdim=True)
        # A query without keys has no weights; one whose scores are not numbers has such weights.
        weights = torch.exp(scores - log_sums)[:, :, :seq_len].masked_fill(~visible, 0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights.to(q.dtype), v)
        if lse is not None:
            lse[rows] = log_sums[:, :, 0].T.to(lse.dtype)
    return out


def visible_keys(
    first_position: int,
    query_len: int,
    seq_len: int,
    *,
    window_tokens: int | None,
    chunk_tokens: int | None,
    is_causal: bool,
    spans: torch.Tensor | None,
) -> torch.Tensor:
    """Which keys each query token of a request reads, bool[query_len, seq_len]."""
    visible = torch.ones(query_len, seq_len, dtype=torch.bool)
    for token in range(query_len):
        position = first_position + token
        if is_causal:
            visible[token, max(0, position + 1) :] = False
        if window_tokens is not None:
            visible[token, : max(0, position - window_tokens + 1)] = False
        if chunk_tokens is not None:
            visible[token, : max(0, position) // chunk_tokens * chunk_tokens] = False
        if spans is not None:
            start, end = spans[token].tolist()
            visible[token, max(0, start) : max(0, end)] = True
    return visible


def gathered(
    pages: torch.Tensor,
    table_row: torch.Tensor,
    read: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    slot_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of one request, [seq_len, num_kv_heads, head_dim], zero where no query reads them."""
    page_tokens = pages.shape[1]
    *heads, num_items = pages.shape[2:]
    row_elements = num_items * elements_per_item(pages.dtype)
    rows = torch.zeros(len(read), *heads, row_elements, dtype=dtype, device=pages.device)
    for token in read.nonzero()[:, 0].tolist():
        page_id = int(table_row[token // page_tokens])
        place = (page_id, token % page_tokens)
        if pages.dtype == INT4_DTYPE and slot_scales is not None:
            rows[token] = from_int4(pages[place], slot_scales[place], dtype)
            continue
        rows[token] = pages[place].to(dtype)
        if slot_scales is not None:
            rows[token] *= slot_scales[place][:, None].to(dtype)
    return rows if scale is None else rows * scale[:, None].to(dtype)


def from_int4(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A token's heads of four bits an element, [num_kv_heads, head_dim].

    Args:
        stored: Two elements each, u8[num_kv_heads, head_dim // 2].
        scales: Step and least element of each head, bf16[num_kv_heads, 2].
        dtype: Of the result.
    """
    elements = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).to(dtype)
    step, least = scales.to(dtype).unsqueeze(-1).unbind(-2)
    return elements * step + least

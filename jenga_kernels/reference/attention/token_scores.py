"""Reference of `jenga_kernels.token_scores`."""

import torch

from jenga_kernels.reference.attention.paged_attention import gathered


def token_scores(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_ends: torch.Tensor,
    seq_lens: torch.Tensor,
    num_queries: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Sum the attention weights of each request's last queries; see the operation."""
    num_kv_heads = k_pages.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out.zero_()
    counts = zip(query_ends.tolist(), seq_lens.tolist(), num_queries.tolist(), strict=True)
    for row, (end, seq_len, num_last) in enumerate(counts):
        rows = slice(end - num_last, end)
        keys = torch.arange(seq_len, device=q.device)
        k = gathered(k_pages, page_table[row], keys, None, q.dtype)
        grouped = q[rows].unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->qhgk", grouped, k).to(dtype) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        log_sums = lse[rows].to(dtype).unflatten(1, (num_kv_heads, -1))
        weights = torch.exp(scores - log_sums[..., None])
        positions = seq_len - num_last + torch.arange(num_last, device=q.device)
        is_read = keys[None, :] <= positions[:, None]
        weights = weights.masked_fill(~is_read[:, None, None, :], 0.0)
        out[row, :, :seq_len] = weights.sum((0, 2)).to(out.dtype)
    return out

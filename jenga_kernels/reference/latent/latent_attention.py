"""Reference of `jenga_kernels.latent_attention`."""

import torch

from jenga_kernels.plans.attention_plan import AttentionPlan
from jenga_kernels.reference.attention.paged_attention import gathered, query_blocks, visible_keys


def latent_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent_dim: int,
    is_causal: bool = True,
    latent_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,  # noqa: ARG001 - a plan changes no result
) -> torch.Tensor:
    """Attend in blocks of a request's queries; see the operation for the arguments.

    Everything is computed in the dtype of q (softmax at least in float32). So float64 inputs give
    the exact result, and narrower ones the result of plain PyTorch.
    """
    out = q.new_empty(*q.shape[:2], latent_dim) if out is None else out
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    for block in query_blocks(query_starts, seq_lens):
        rows = block.rows
        visible = visible_keys(block, is_causal=is_causal).to(q.device)
        read = visible.any(0)
        tokens, visible = read.nonzero()[:, 0], visible[:, read]
        keys = gathered(pages, page_table[block.request], tokens, latent_scale, q.dtype)
        scores = torch.einsum("qhd,kd->hqk", q[rows], keys).to(score_dtype) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        log_sums = torch.logsumexp(scores, 2, keepdim=True)
        weights = torch.exp(scores - log_sums).masked_fill(~visible, 0.0)
        out[rows] = torch.einsum("hqk,kd->qhd", weights.to(q.dtype), keys[:, :latent_dim])
        if lse is not None:
            lse[rows] = log_sums[:, :, 0].T.to(lse.dtype)
    return out

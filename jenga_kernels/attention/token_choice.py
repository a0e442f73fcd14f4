"""The choice of the tokens that a layer with a token budget keeps."""

import torch

from jenga_kernels.checks.tensors import check_at_least, check_dtype, check_shape


def choose_tokens(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kept: torch.Tensor,
    *,
    max_kept: int,
    sink_tokens: int,
    recent_tokens: int,
    pool_tokens: int,
) -> torch.Tensor:
    """Choose the tokens that each KV head of a request keeps.

    A head keeps the first `sink_tokens` tokens, the last `recent_tokens`, and of the others those
    with the greatest scores. The score of a token is the greatest of `pool_tokens` neighbours, so
    that words and their surroundings are kept together. Scores of the recent tokens do not count.
    Of equal scores, the earlier token is kept.

    The contents of seq_lens and num_kept are not checked, because they are on the device. num_kept
    must be at least sink_tokens + recent_tokens, and at most seq_lens and max_kept.

    Args:
        scores: Scores from `token_scores`, f32[num_requests, num_kv_heads, max_tokens].
        seq_lens: Number of tokens of each request, i32[num_requests].
        num_kept: Number of tokens to keep of each request, i32[num_requests].
        max_kept: Length of the rows of the result.
        sink_tokens: Number of first tokens that are always kept.
        recent_tokens: Number of last tokens that are always kept.
        pool_tokens: Number of neighbours whose scores count, the token itself in their middle. It
            is odd.

    Returns:
        The kept tokens of each head in ascending order, i32[num_requests, num_kv_heads, max_kept],
        contiguous. Entries past num_kept are other tokens.

    Raises:
        ValueError: If a shape, dtype or number does not fit.

    Source:
        SnapKV (arXiv 2404.14469), section 4. There, query heads choose; here, KV heads, because a
        slot has one key for all query heads of a group.
    """
    check_shape("scores", scores, (None, None, None))
    num_requests, _, max_tokens = scores.shape
    check_dtype("scores", scores, (torch.float32,))
    for name, tensor in (("seq_lens", seq_lens), ("num_kept", num_kept)):
        check_shape(name, tensor, (num_requests,))
        check_dtype(name, tensor, (torch.int32,))
    check_at_least("sink_tokens", sink_tokens, 0)
    check_at_least("recent_tokens", recent_tokens, 0)
    check_at_least("pool_tokens", pool_tokens, 1)
    if pool_tokens % 2 == 0:
        msg = f"pool_tokens must be odd, got {pool_tokens}"
        raise ValueError(msg)
    if not 0 <= max_kept <= max_tokens:
        msg = f"max_kept must be at most the {max_tokens} tokens of scores, got {max_kept}"
        raise ValueError(msg)
    if scores.numel() == 0:
        return scores.new_empty((*scores.shape[:2], max_kept), dtype=torch.int32)
    tokens = torch.arange(max_tokens, device=scores.device)
    ends = seq_lens[:, None, None].long()
    is_recent = tokens >= ends - recent_tokens
    pooled = torch.nn.functional.max_pool1d(
        scores.masked_fill(is_recent, 0.0), pool_tokens, stride=1, padding=pool_tokens // 2
    )
    pooled = pooled.masked_fill(is_recent | (tokens < sink_tokens), torch.inf)
    pooled = pooled.masked_fill(tokens >= ends, -torch.inf)
    best = pooled.sort(dim=2, descending=True, stable=True).indices
    # Beyond num_kept, tokens get the greatest number, so that they come last.
    is_kept = tokens < num_kept[:, None, None]
    in_order = best.masked_fill(~is_kept, max_tokens).sort(dim=2).values[:, :, :max_kept]
    return in_order.clamp(max=max_tokens - 1).to(torch.int32).contiguous()

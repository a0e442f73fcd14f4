"""How much the last queries of a request attend to each of its tokens."""

import torch
import triton

from jenga_kernels.checks.pages import check_pages
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_contiguous,
    check_dtype,
    check_no_gradients,
    check_positive,
    check_rows,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import launch, with_reference
from jenga_kernels.plans.attention_plan import check_page_table
from jenga_kernels.reference.attention import token_scores as reference
from jenga_kernels.triton.attention.token_scores import token_scores_kernel
from jenga_kernels.triton.lib.addressing import strides
from jenga_kernels.triton.lib.tiles import MIN_ROWS, power_of_two

BLOCK_KEYS = 32
"""Keys of a program. It holds their rows while it goes through the queries."""


@with_reference(reference.token_scores)
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
    """Sum the attention weights that each key gets from the last queries of its request.

    The score of a key in a KV head is the sum of its softmax weights over the request's last
    queries and the query heads of the group. The mask is causal. The weights are those of
    `paged_attention`, from its log-sum-exps, so a sink makes them smaller.

    The contents of the tensors of integers are not checked, because they are on the device. Each
    request must have at least as many tokens and rows of q as queries count.

    Args:
        q: Queries, [num_tokens, num_heads, head_dim], bfloat16, float16 or float32; last dimension
            contiguous.
        k_pages: Keys, [num_pages, page_tokens, num_kv_heads, head_dim], dtype of q. Strides may be
            any multiples of 16 bytes; the last dimension is contiguous.
        page_table: Page tables of the requests, i32[num_requests, max_pages].
        query_ends: One past the row of q of each request's last query, i32[num_requests].
        seq_lens: Number of tokens of each request, its last query's included, i32[num_requests].
        num_queries: Number of last queries of each request that count, i32[num_requests].
        lse: Natural log-sum-exp of the scores of each row of q, from `paged_attention`,
            f32[num_tokens, num_heads].
        scale: Factor of the products of queries and keys.
        soft_cap: As in `paged_attention`.
        out: Scores, written in place and returned, f32[num_requests, num_kv_heads, max_tokens],
            contiguous. Those past a request's tokens become 0. max_tokens must be at least the
            longest of seq_lens, and at most the slots of a row of page_table.

    Returns:
        out.

    Raises:
        ValueError: If a shape, dtype, stride, device or number does not fit, or a gradient is
            required.

    Source:
        SnapKV (arXiv 2404.14469), section 4; PyramidKV (arXiv 2406.02069).
    """
    check_shape("q", q, (None, None, None))
    num_tokens, num_heads, head_dim = q.shape
    check_dtype("q", q, FLOAT_DTYPES)
    check_rows("q", q)
    check_shape("k_pages", k_pages, (None, None, None, head_dim))
    check_dtype("k_pages", k_pages, (q.dtype,))
    num_kv_heads = k_pages.shape[2]
    page_tokens = check_pages(k_pages, k_pages, num_kv_heads, head_dim, q.dtype)
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        msg = f"q must have a multiple of the {num_kv_heads} KV heads, got {num_heads} heads"
        raise ValueError(msg)
    num_requests = check_page_table(page_table)
    counts = {"query_ends": query_ends, "seq_lens": seq_lens, "num_queries": num_queries}
    for name, tensor in counts.items():
        check_shape(name, tensor, (num_requests,))
        check_dtype(name, tensor, (torch.int32,))
        check_contiguous(name, tensor)
    check_shape("lse", lse, (num_tokens, num_heads))
    check_dtype("lse", lse, (torch.float32,))
    check_contiguous("lse", lse)
    check_shape("out", out, (num_requests, num_kv_heads, None))
    check_dtype("out", out, (torch.float32,))
    check_contiguous("out", out)
    max_tokens = out.shape[2]
    if max_tokens > page_table.shape[1] * page_tokens:
        msg = (
            f"out must have at most {page_table.shape[1] * page_tokens} tokens, the slots of a row "
            f"of page_table, got {max_tokens}"
        )
        raise ValueError(msg)
    check_positive("scale", scale)
    if soft_cap is not None:
        check_positive("soft_cap", soft_cap)
    check_same_device(
        q=q,
        k_pages=k_pages,
        page_table=page_table,
        lse=lse,
        out=out,
        **counts,
    )
    check_no_gradients(q=q, k_pages=k_pages, lse=lse, out=out)
    if out.numel() == 0:
        return out
    stride_page, stride_slot, stride_head, _ = strides(k_pages)
    launch(
        token_scores_kernel,
        (triton.cdiv(max_tokens, BLOCK_KEYS), num_kv_heads, num_requests),
        out.device,
        out_ptr=out,
        q_ptr=q,
        k_pages_ptr=k_pages,
        page_table_ptr=page_table,
        query_ends_ptr=query_ends,
        seq_lens_ptr=seq_lens,
        num_queries_ptr=num_queries,
        lse_ptr=lse,
        scale=scale,
        soft_cap=soft_cap,
        max_tokens=max_tokens,
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_pages_page=stride_page,
        stride_pages_slot=stride_slot,
        stride_pages_head=stride_head,
        stride_table_request=page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        BLOCK_M=MIN_ROWS,
        BLOCK_N=BLOCK_KEYS,
        BLOCK_D=max(MIN_ROWS, power_of_two(head_dim)),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out

"""Attention over quantised pages, of which prompts read a copy in 16 bits."""

import torch

from jenga_kernels.attention.dequantise_pages import dequantise_pages
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.tensors import check_same_device
from jenga_kernels.plans.scratch_plan import ScratchPlan, page_bytes, scratch_pages
from jenga_kernels.triton.lib.tiles import has_kernels


def scratch_attention(
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_slot_scales: torch.Tensor | None = None,
    v_slot_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: ScratchPlan,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Compute what `paged_attention` does over quantised pages, with a scratch for the prompts.

    The tokens that prompts read are first restored to the dtype of q, in the scratch. Then the
    kernel of such pages reads them there. Other requests read the quantised pages. Results differ
    from those of `paged_attention` by rounding: of each restored element, and of the products.

    On a CPU without Triton's interpreter, `paged_attention` computes the results without the
    scratch.

    Args:
        q: As in `paged_attention`.
        k_pages: Keys, float8_e4m3fn, float8_e5m2, int8 or uint8, as in `paged_attention`.
        v_pages: Values, as in `paged_attention`.
        page_table: As in `paged_attention`.
        query_starts: As in `paged_attention`.
        seq_lens: As in `paged_attention`.
        scale: As in `paged_attention`.
        window_tokens: As in `paged_attention`.
        chunk_tokens: As in `paged_attention`.
        is_causal: As in `paged_attention`.
        soft_cap: As in `paged_attention`.
        sinks: As in `paged_attention`.
        alibi_slopes: As in `paged_attention`.
        k_scale: As in `paged_attention`.
        v_scale: As in `paged_attention`.
        k_slot_scales: As in `paged_attention`.
        v_slot_scales: As in `paged_attention`.
        out: As in `paged_attention`.
        lse: As in `paged_attention`.
        plan: Work lists of this step, made by `plan_scratch` for these query_starts and seq_lens.
        scratch: Buffer for restored tokens, overwritten, u8[num_bytes], contiguous, with at least
            the bytes that the plan was made for. It must not overlap the cache.

    Returns:
        The results, [num_tokens, num_heads, value_dim].

    Raises:
        ValueError: If a shape, dtype, stride, alignment, device or number does not fit, the plan
            was made for other layers, or a gradient is required.
    """
    shared = {
        "scale": scale,
        "window_tokens": window_tokens,
        "chunk_tokens": chunk_tokens,
        "is_causal": is_causal,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "lse": lse,
    }
    scales = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_slot_scales": k_slot_scales,
        "v_slot_scales": v_slot_scales,
    }
    stored = (q, k_pages, v_pages, page_table, query_starts, seq_lens)
    if not has_kernels(q.device):
        return paged_attention(*stored, **shared, **scales, out=out, plan=plan.whole)
    check_same_device(q=q, scratch=scratch)
    k, v = scratch_pages(scratch, plan.whole.kind, plan.whole.dtype)
    num_pages = plan.page_runs.shape[0]
    if k.shape[0] < num_pages:
        num_bytes = num_pages * page_bytes(plan.whole.kind, plan.whole.dtype)
        msg = f"scratch must have at least the plan's {num_bytes} bytes, got {scratch.numel()}"
        raise ValueError(msg)
    # Checks the arguments of the whole step, and launches nothing if all of it is prompts.
    out = paged_attention(*stored, **shared, **scales, out=out, plan=plan.decode)
    dequantise_pages(k_pages, v_pages, page_table, plan.page_runs, k, v, **scales)
    return paged_attention(
        q,
        k,
        v,
        plan.page_table,
        query_starts,
        plan.seq_lens,
        **shared,
        out=out,
        plan=plan.prompts,
    )

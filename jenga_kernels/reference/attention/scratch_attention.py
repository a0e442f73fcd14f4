"""Reference of `jenga_kernels.scratch_attention`."""

import torch

from jenga_kernels.plans.scratch_plan import ScratchPlan
from jenga_kernels.reference.attention.paged_attention import paged_attention


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
    scratch: torch.Tensor,  # noqa: ARG001 - what is in it changes no result
) -> torch.Tensor:
    """Attend over the quantised pages; see the operation for the arguments."""
    return paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        query_starts,
        seq_lens,
        scale=scale,
        window_tokens=window_tokens,
        chunk_tokens=chunk_tokens,
        is_causal=is_causal,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        k_slot_scales=k_slot_scales,
        v_slot_scales=v_slot_scales,
        out=out,
        lse=lse,
        plan=plan.whole,
    )

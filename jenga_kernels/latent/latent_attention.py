"""Multi-head latent attention over latents in pages, in its absorbed form."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from jenga_kernels.checks.latents import check_latent_pages, check_latent_scale
from jenga_kernels.checks.pages import is_other_float
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    FP8_DTYPE,
    check_contiguous,
    check_dtype,
    check_no_gradients,
    check_positive,
    check_rows,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, rebased, with_reference
from jenga_kernels.plans.attention_plan import (
    AttentionKind,
    AttentionPlan,
    check_page_table,
    check_steps,
)
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.reference.latent import latent_attention as reference
from jenga_kernels.triton.attention.decode import attention_splits_kernel
from jenga_kernels.triton.latent.decode import latent_decode_kernel
from jenga_kernels.triton.latent.prefill import latent_prefill_kernel
from jenga_kernels.triton.lib.addressing import constant_stride, strides
from jenga_kernels.triton.lib.tiles import (
    MIN_ROWS,
    WARPGROUP_ROWS,
    TeamTiles,
    machine_of,
    overlapping,
    power_of_two,
)

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `latent_attention`, in the same order, without the plan."""

    q: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    latent_dim: int
    is_causal: bool
    latent_scale: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.latent_attention)
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
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attend from each head of each query token to the latents of its request.

    A stored row is the key of every head, and its first latent_dim elements are the value of every
    head. The projections from latents to a head's own keys and values are absorbed: the caller
    applies one to q before, and the other to the results after.

    The queries of a request are its last tokens. Prompts, chunks on a long context and decoded
    tokens may share a batch. With a causal mask, query token i of a request is at position
    seq_len - query_len + i. It reads keys up to and including its own.

    Rows of q past query_starts[-1] are padding, and their results are not written. A query that
    reads no key (seq_len 0) gets zeros. Slots and pages that no query reads may hold anything.

    The contents of page_table, query_starts and seq_lens are on the device and are not checked. The
    table must name pages of the cache for every key that is read, and query_starts must end within
    q.

    Args:
        q: Queries, [num_tokens, num_heads, latent_dim + rotary_dim], bfloat16, float16 or float32;
            last dimension contiguous.
        pages: Latents and rotary keys, [num_pages, page_tokens, latent_dim + rotary_dim], dtype of
            q, bfloat16, float16 or float8_e4m3fn; any strides that are multiples of 16 bytes, last
            dimension contiguous. Elements of another dtype than that of q are converted to it when
            they are read.
        page_table: Page tables of the requests, i32[num_requests, max_pages], with at least one
            column. Column i names the page of tokens [i * page_tokens, (i + 1) * page_tokens).
        query_starts: First query token of each request, then the number of query tokens,
            i32[num_requests + 1].
        seq_lens: Number of tokens of each request whose rows are stored, queries included,
            i32[num_requests].
        scale: Factor of the scores, that of the heads before absorption.
        latent_dim: Elements of a latent, a multiple of 16 up to 512.
        is_causal: Whether the mask is causal. False lets every query read all seq_len keys, as
            those of a shared prefix.
        latent_scale: Factor of the stored rows, f32[1]; only with float8_e4m3fn pages.
        out: Results, written in place and returned, [num_tokens, num_heads, latent_dim], dtype of
            q, contiguous. None allocates them.
        lse: Natural log-sum-exp of each row's scores, written in place, f32[num_tokens, num_heads];
            -inf where no key is read. Serves `attention_merge`. None means it is not written.
        plan: Work lists of this step, from `plan_latent_attention`. None makes them for this call
            alone.

    Returns:
        The results, [num_tokens, num_heads, latent_dim].

    Raises:
        ValueError: If a shape, dtype, stride, alignment, device or number does not fit, or the plan
            was made for other layers.

    Source:
        DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, for the absorption. FlashMLA for programs of
        64 rows as wide as a latent.
    """
    given = (
        q,
        pages,
        page_table,
        query_starts,
        seq_lens,
        scale,
        latent_dim,
        is_causal,
        latent_scale,
        out,
        lse,
    )
    call = call_like(_calls if plan is None else plan.calls, *given)
    is_first = call.launches is None
    if is_first:
        call.facts = _check(_Arguments(*given), plan)
    kind: AttentionKind = call.facts
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = q.new_empty(num_tokens, num_heads, latent_dim)
    if plan is None:
        plan = plan_latent_attention(
            query_starts, seq_lens, kind, num_tokens=num_tokens, dtype=q.dtype
        )
    if is_first:
        if num_heads % plan.kind.num_kv_heads == 0:
            # Heads are planned for in groups.
            kind = replace(kind, num_kv_heads=plan.kind.num_kv_heads)
        plan.check(kind, q.dtype, num_tokens, seq_lens.shape[0])
        call.launches = list(_launches(plan, q, pages, page_table, scale=scale))
    tensors = dict(zip(_POINTERS, given, strict=True))
    tensors |= {
        "out_ptr": out,
        "sinks_ptr": None,
        "row_tile_requests_ptr": plan.row_tile_requests,
        "row_tile_indices_ptr": plan.row_tile_indices,
        "partial_out_ptr": plan.partial_out,
        "partial_lse_ptr": plan.partial_lse,
        "unit_starts_ptr": plan.unit_starts,
        "units_per_program_ptr": plan.units_per_program,
        "first_requests_ptr": plan.first_requests,
    }
    call.run(tensors)
    return out


def _launches(
    plan: AttentionPlan,
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    scale: float,
) -> Iterator[Launch]:
    """List the launches that serve the queries of a step.

    Args:
        plan: Plan of the step.
        q: Queries.
        pages: Latents and rotary keys.
        page_table: Page tables of the requests.
        scale: Factor of the scores.
    """
    if plan.num_requests == 0 or plan.num_tokens == 0:
        return
    machine = machine_of(q.device)
    kind = plan.kind
    latent_dim, rotary_dim = kind.head_dim, pages.shape[2] - kind.head_dim
    stride_page, stride_slot, _ = strides(pages)
    block_latent = max(MIN_ROWS, power_of_two(latent_dim))
    shared = {
        "scale": scale,
        "num_requests": plan.num_requests,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_pages_page": stride_page,
        "stride_pages_slot": stride_slot,
        "stride_table_request": page_table.stride(0),
        "NUM_GROUPS": kind.num_kv_heads,
        "GROUP": kind.group_heads,
        "LATENT_DIM": latent_dim,
        "ROTARY_DIM": rotary_dim,
        "PAGE_TOKENS": kind.page_tokens,
        "IS_CAUSAL": kind.is_causal,
        "IS_INVARIANT": plan.is_batch_invariant,
        "QUERY_TOKENS": plan.decode_query_tokens,
        "BLOCK_LATENT": block_latent,
        "BLOCK_ROTARY": max(MIN_ROWS, power_of_two(rotary_dim)),
        "enable_fp_fusion": True,
    }
    if plan.max_row_tiles:
        tiles = plan.tiles.prefill
        yield Launch(
            kernel=latent_prefill_kernel,
            grid=(plan.max_row_tiles * kind.num_kv_heads,),
            constants=shared
            | {
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "num_warps": tiles.num_warps,
                "num_stages": tiles.num_stages,
            },
        )
    team = plan.tiles.specialized_decode
    if plan.decode_query_tokens and team is not None:
        yield _specialized_launch(plan, team, shared, q, pages)
    elif plan.decode_query_tokens:
        tiles = plan.tiles.decode
        # Results of 64 rows leave no registers for offsets that the compiler would keep.
        keeps_offsets = tiles.block_m < WARPGROUP_ROWS
        yield Launch(
            kernel=latent_decode_kernel,
            grid=(plan.tiles.num_programs,),
            constants=shared
            | {
                "SLOT_STRIDE": (
                    constant_stride(stride_slot, kind.page_tokens) if keeps_offsets else None
                ),
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "IS_OVERLAPPED": plan.may_split and machine.has_dependent_launches,
                "num_warps": tiles.num_warps,
                "num_stages": tiles.num_stages,
            },
        )
    if plan.may_split:
        yield Launch(
            kernel=attention_splits_kernel,
            grid=(plan.num_requests, plan.max_decoded_tokens, kind.num_heads),
            constants=shared
            | {
                "NUM_KV_HEADS": kind.num_kv_heads,
                "RESULT_DIM": latent_dim,
                "BLOCK_SPLITS": plan.tiles.block_splits,
                "BLOCK_D": block_latent,
                "IS_OVERLAPPED": machine.has_dependent_launches,
                "num_warps": 4,
            }
            | overlapping(machine),
        )


def _specialized_launch(
    plan: AttentionPlan,
    team: TeamTiles,
    shared: dict[str, object],
    q: torch.Tensor,
    pages: torch.Tensor,
) -> Launch:
    """Build the launch of the decode kernel for Hopper."""
    # Triton's interpreter cannot run Gluon.
    from jenga_kernels.triton.latent.hopper.decode import (  # noqa: PLC0415
        KEYS,
        joined_descriptor,
        latent_decode_hopper_kernel,
        latents_descriptor,
        queries_descriptor,
    )

    block_tokens = math.gcd(plan.kind.page_tokens, KEYS.value)
    return Launch(
        kernel=latent_decode_hopper_kernel,
        grid=(plan.tiles.num_programs * team.num_members,),
        constants=shared
        | {
            "q_descriptor": rebased(queries_descriptor(q), None),
            "pages_descriptor": rebased(latents_descriptor(pages, block_tokens), None),
            "joined_descriptor": (
                rebased(joined_descriptor(pages), None) if team.joins_pages else None
            ),
            "num_pages": pages.shape[0],
            "NUM_HEADS": plan.kind.num_heads,
            "NUM_MEMBERS": team.num_members,
            "BLOCK_T": block_tokens,
            "TAKES_TURNS": team.takes_turns,
            "num_warps": 4,
        },
        descriptors=(
            ("q_descriptor", "q_ptr"),
            ("pages_descriptor", "pages_ptr"),
            ("joined_descriptor", "pages_ptr"),
        ),
    )


def _check(given: _Arguments, plan: AttentionPlan | None) -> AttentionKind:
    """Check everything that follows from the signature of a call, and return its kind of layer.

    Raises:
        ValueError: If something does not fit.
    """
    check_shape("q", given.q, (None, None, None))
    num_tokens, num_heads, width = given.q.shape
    check_dtype("q", given.q, FLOAT_DTYPES)
    check_rows("q", given.q)
    check_shape("pages", given.pages, (None, None, width))
    check_latent_pages(given.pages, given.latent_dim, given.q.dtype)
    num_requests = check_page_table(given.page_table)
    check_steps(given.query_starts, given.seq_lens, num_requests)
    check_positive("scale", given.scale)
    check_latent_scale(given.pages, given.latent_scale)
    if given.out is not None:
        check_shape("out", given.out, (num_tokens, num_heads, given.latent_dim))
        check_dtype("out", given.out, (given.q.dtype,))
        check_contiguous("out", given.out)
    if given.lse is not None:
        check_shape("lse", given.lse, (num_tokens, num_heads))
        check_dtype("lse", given.lse, (torch.float32,))
        check_contiguous("lse", given.lse)
    check_same_device(
        q=given.q,
        pages=given.pages,
        page_table=given.page_table,
        query_starts=given.query_starts,
        latent_scale=given.latent_scale,
        out=given.out,
        lse=given.lse,
        plan=None if plan is None else plan.unit_starts,
    )
    check_no_gradients(q=given.q, pages=given.pages, out=given.out, lse=given.lse)
    return latent_kind_of(
        given.q, given.pages, latent_dim=given.latent_dim, is_causal=given.is_causal
    )


def latent_kind_of(
    q: torch.Tensor, pages: torch.Tensor, *, latent_dim: int, is_causal: bool = True
) -> AttentionKind:
    """Describe the layer of a call. Its tensors have been checked against each other.

    Args:
        q: Queries, [num_tokens, num_heads, latent_dim + rotary_dim].
        pages: Latents and rotary keys, [num_pages, page_tokens, latent_dim + rotary_dim].
        latent_dim: Elements of a latent.
        is_causal: Whether a query reads only keys up to its own position.
    """
    return AttentionKind(
        num_heads=q.shape[1],
        num_kv_heads=1,
        head_dim=latent_dim,
        page_tokens=pages.shape[1],
        is_causal=is_causal,
        is_quantised=pages.dtype == FP8_DTYPE,
        is_other_float=is_other_float(pages.dtype, q.dtype),
    )

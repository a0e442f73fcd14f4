"""Attention over keys and values in pages.

A plain paged cache is two tensors; a layer of an arena is two views with longer strides.

    >>> import torch
    >>> from jenga_kernels import kv_store, paged_attention
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> k_pages, v_pages = torch.zeros(2, 8, 16, 2, 64, device=device)  # 8 pages of 16 tokens
    >>> page_table = torch.tensor([[5, 2]], dtype=torch.int32, device=device)
    >>> q, k, v = torch.ones(20, 4, 64, device=device), *torch.ones(2, 20, 2, 64, device=device)
    >>> slots = torch.tensor([*range(80, 96), *range(32, 36)], device=device)  # pages 5 and 2
    >>> kv_store(k, v, k_pages, v_pages, slots)
    >>> starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    >>> out = paged_attention(
    ...     q, k_pages, v_pages, page_table, starts, starts[1:].contiguous(), scale=0.125
    ... )
    >>> out.shape, bool(torch.allclose(out, v[0, 0, 0]))
    (torch.Size([20, 4, 64]), True)
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.pages import (
    NO_SCALES,
    check_pages,
    check_scales,
    check_slot_scales,
    elements_per_item,
    is_other_float,
)
from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    INT4_DTYPE,
    QUANTISED_DTYPES,
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
    plan_attention,
)
from jenga_kernels.reference.attention import paged_attention as reference
from jenga_kernels.triton.attention.decode import attention_decode_kernel, attention_splits_kernel
from jenga_kernels.triton.attention.prefill import attention_prefill_kernel
from jenga_kernels.triton.lib.addressing import constant_stride, strides
from jenga_kernels.triton.lib.tiles import (
    MIN_ROWS,
    SpecializedTiles,
    machine_of,
    overlapping,
    power_of_two,
)

_calls: Calls = {}
"""Recorded calls of this operation without a plan. A plan records its own calls."""

MAX_HEAD_DIM = 512
"""Widest head whose tiles fit into the registers and the shared memory of one program."""


class _Arguments(NamedTuple):
    """Arguments of `paged_attention`, in the same order, without the plan."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    window_tokens: int | None
    chunk_tokens: int | None
    is_causal: bool
    soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    spans: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_slot_scales: torch.Tensor | None
    v_slot_scales: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.paged_attention)
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
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attend from each query token to the keys of its request, found through the page table.

    The queries of a request are its last tokens. Prompts, chunks on a long context and decoded
    tokens may share a batch. With a causal mask, query token i of a request is at position
    seq_len - query_len + i. It reads keys up to and including its own.

    Rows of q past query_starts[-1] are padding, and their results are not written. A query that
    reads no key (seq_len 0) gets zeros. Slots and pages that no query reads may hold anything, and
    table entries of pages before every window may be stale. Neither affects a result.

    The contents of page_table, query_starts and seq_lens are on the device and are not checked. The
    table must name pages of the cache for every key that is read, and query_starts must end within
    q.

    Args:
        q: Queries, [num_tokens, num_heads, head_dim], bfloat16, float16 or float32; last dimension
            contiguous, head_dim up to 512.
        k_pages: Keys, [num_pages, page_tokens, num_kv_heads, head_dim]. The dtype is that of q,
            bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8. With uint8 the shape is
            [.., head_dim // 2], and each item holds two elements of four bits. Strides may be any
            multiples of 16 bytes; the last dimension is contiguous. Elements of another dtype than
            that of q are converted to it when they are read.
        v_pages: Values, as k_pages with value_dim elements, dtype and strides of k_pages, value_dim
            up to 512. If value_dim is not head_dim, store each slot's value behind its key, so that
            the strides are the same.
        page_table: Page tables of the requests, i32[num_requests, max_pages], with at least one
            column. Column i names the page of tokens [i * page_tokens, (i + 1) * page_tokens).
        query_starts: First query token of each request, then the number of query tokens,
            i32[num_requests + 1].
        seq_lens: Number of tokens of each request whose keys are stored, queries included,
            i32[num_requests].
        scale: Factor of the scores.
        window_tokens: Number of keys that a query reads: its own and the window_tokens - 1 before
            it. None means no window.
        chunk_tokens: Number of tokens of a chunk of chunked attention. A query reads no key before
            the last multiple of chunk_tokens that is not after its position. None means no chunks.
        is_causal: Whether the mask is causal. False lets every query read all seq_len keys, as in
            cross attention, where seq_lens counts encoder tokens and may be smaller than the number
            of queries.
        soft_cap: Cap of the scores, which become soft_cap * tanh(scores / soft_cap). None means no
            cap.
        sinks: Score of one more key for each head, which has no value, [num_heads], dtype of q or
            float32; -inf for a head without one.
        alibi_slopes: ALiBi slopes, f32[num_heads]. slope * (key position - query position) is added
            to the scores.
        spans: Ranges [start, end) of keys that query tokens read in addition to those, before and
            after their own position, i32[num_tokens, 2]; start >= end for none. Keys that a request
            lacks are left out. Serves tokens of an image that see each other. Needs a plan with
            decode_query_tokens 0, or no plan.
        k_scale: Factor of the stored keys, f32[1] or f32[num_kv_heads]; only with float8 pages.
        v_scale: Factor of the stored values, as k_scale; shape of k_scale if both are given.
        k_slot_scales: Factor of the key of each slot and head, f32[num_pages, page_tokens,
            num_kv_heads], any strides. Replaces k_scale with float8_e4m3fn pages, and is required
            with int8 pages. With uint8 pages, the step and the least element of each slot and head,
            bf16[num_pages, page_tokens, num_kv_heads, 2]. See `kv_store`.
        v_slot_scales: As k_slot_scales, for values; strides of k_slot_scales.
        out: Results, written in place and returned, [num_tokens, num_heads, value_dim], dtype of q,
            contiguous; must not overlap q. None allocates them.
        lse: Natural log-sum-exp of each row's scores, sinks included, written in place,
            f32[num_tokens, num_heads]; -inf where no key is read. None means it is not written.
        plan: Work lists of this step. None makes them for this call alone.

    Returns:
        The results, [num_tokens, num_heads, value_dim].

    Raises:
        ValueError: If a shape, dtype, stride, alignment, device or number does not fit, the plan
            was made for other layers, or a gradient is required.

    Source:
        FlashAttention-2 (arXiv 2307.08691) for the loop. The decode work of all requests is cut
        into equal runs of tiles, as in stream-K (arXiv 2301.03598), and merged in a fixed order.
    """
    given = (
        q,
        k_pages,
        v_pages,
        page_table,
        query_starts,
        seq_lens,
        scale,
        window_tokens,
        chunk_tokens,
        is_causal,
        soft_cap,
        sinks,
        alibi_slopes,
        spans,
        k_scale,
        v_scale,
        k_slot_scales,
        v_slot_scales,
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
        out = q.new_empty(num_tokens, num_heads, kind.result_dim)
    elif out.data_ptr() == q.data_ptr() and q.numel():
        # Programs that share the results of wide heads both read the queries.
        msg = "out must not be q"
        raise ValueError(msg)
    if plan is None:
        plan = plan_attention(
            query_starts,
            seq_lens,
            kind,
            num_tokens=num_tokens,
            dtype=q.dtype,
            decode_query_tokens=None if spans is None else 0,
        )
    elif is_first:
        plan.check(kind, q.dtype, num_tokens, seq_lens.shape[0])
    slot_scales = NO_SCALES
    if k_slot_scales is not None:
        slot_scales = check_slot_scales(k_pages, k_slot_scales, v_slot_scales, k_scale, v_scale)
    if is_first:
        is_per_head_scale = any(
            given is not None and given.numel() > 1 for given in (k_scale, v_scale)
        )
        stride_page, stride_slot, stride_head, _ = strides(k_pages)
        shared = {
            "scale": scale,
            "soft_cap": soft_cap,
            "window_tokens": kind.window_tokens,
            "chunk_tokens": kind.chunk_tokens,
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_pages_page": stride_page,
            "stride_pages_slot": stride_slot,
            "stride_pages_head": stride_head,
            "stride_scales_page": slot_scales.strides[0],
            "stride_scales_slot": slot_scales.strides[1],
            "stride_scales_head": slot_scales.strides[2],
            "stride_table_request": page_table.stride(0),
            "num_pages": k_pages.shape[0],
            "IS_PER_HEAD_SCALE": is_per_head_scale,
        }
        call.launches = list(_launches(plan, shared, q, k_pages, v_pages))
    tensors = dict(zip(_POINTERS, given, strict=True))
    tensors |= {
        "out_ptr": out,
        "k_slot_scales_ptr": slot_scales.k,
        "v_slot_scales_ptr": slot_scales.v,
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
    shared: dict[str, object],
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> Iterator[Launch]:
    """List the launches that serve the queries of a step.

    Args:
        plan: Plan of the step.
        shared: Arguments that several kernels take.
        q: Queries.
        k_pages: Keys.
        v_pages: Values.
    """
    if plan.num_requests == 0 or plan.num_tokens == 0:
        return
    kind = plan.kind
    result_dim = kind.result_dim
    machine = machine_of(q.device)
    # Decoding requests begin while the last prompts are read.
    is_overlapped = (
        plan.max_row_tiles > 0 and plan.max_decoded_tokens > 0 and machine.has_dependent_launches
    )
    shared = shared | {
        "IS_FOLLOWED": is_overlapped,
        "NUM_KV_HEADS": kind.num_kv_heads,
        "GROUP": kind.group_heads,
        "HEAD_DIM": kind.head_dim,
        "RESULT_DIM": result_dim,
        "PAGE_TOKENS": kind.page_tokens,
        "IS_CAUSAL": kind.is_causal,
        "BLOCK_D": max(MIN_ROWS, power_of_two(kind.head_dim)),
        "IS_INVARIANT": plan.is_batch_invariant,
        "QUERY_TOKENS": plan.decode_query_tokens,
        "enable_fp_fusion": True,
    }
    if plan.max_row_tiles and plan.tiles.specialized_prefill is not None:
        yield _specialized_launch(plan, plan.tiles.specialized_prefill, shared, q, k_pages, v_pages)
    elif plan.max_row_tiles:
        tiles = plan.tiles.prefill
        part_dim = tiles.part_dim(result_dim)
        num_parts = triton.cdiv(result_dim, part_dim)
        yield Launch(
            kernel=attention_prefill_kernel,
            grid=(plan.max_row_tiles * num_parts, kind.num_kv_heads),
            constants=shared
            | {
                "VALUE_DIM": part_dim,
                "BLOCK_V": max(MIN_ROWS, power_of_two(part_dim)),
                "READS_PAIRS": tiles.reads_pairs,
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "num_warps": tiles.num_warps,
                "num_stages": tiles.num_stages,
            },
        )
    if plan.max_decoded_tokens:
        tiles = plan.tiles.decode
        # Products in float32 leave no registers for offsets that the compiler would keep.
        keeps_offsets = plan.dtype != torch.float32
        part_dim = tiles.part_dim(result_dim)
        num_parts = triton.cdiv(result_dim, part_dim)
        page_stride, slot_stride = shared["stride_pages_page"], shared["stride_pages_slot"]
        yield Launch(
            kernel=attention_decode_kernel,
            grid=(plan.tiles.num_programs * num_parts,),
            constants=shared
            | {
                "num_requests": plan.num_requests,
                "PAGE_STRIDE": constant_stride(page_stride, 1) if keeps_offsets else None,
                "SLOT_STRIDE": (
                    constant_stride(slot_stride, kind.page_tokens) if keeps_offsets else None
                ),
                "VALUE_DIM": part_dim,
                "BLOCK_V": max(MIN_ROWS, power_of_two(part_dim)),
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "IS_OVERLAPPED": plan.may_split and machine.has_dependent_launches,
                "AWAITS_PROMPTS": is_overlapped,
                "num_warps": tiles.num_warps,
                "num_stages": tiles.num_stages,
            }
            | (overlapping(machine) if is_overlapped else {}),
        )
    if plan.may_split:
        yield Launch(
            kernel=attention_splits_kernel,
            grid=(plan.num_requests, plan.max_decoded_tokens, kind.num_heads),
            constants=shared
            | {
                "BLOCK_SPLITS": plan.tiles.block_splits,
                "BLOCK_D": power_of_two(result_dim),
                "IS_OVERLAPPED": machine.has_dependent_launches,
                "num_warps": 4,
            }
            | overlapping(machine),
        )


def _specialized_launch(
    plan: AttentionPlan,
    tiles: SpecializedTiles,
    shared: dict[str, object],
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> Launch:
    """Build the launch of the prefill kernel for Hopper."""
    # Triton's interpreter cannot run Gluon.
    from jenga_kernels.triton.attention.hopper.prefill import (  # noqa: PLC0415
        BOX_DIM,
        attention_prefill_hopper_kernel,
        box_descriptor,
        joined_descriptor,
        rows_descriptor,
    )

    kind = plan.kind
    block_tokens = math.gcd(kind.page_tokens, tiles.block_n)
    num_items = plan.max_row_tiles * kind.num_kv_heads
    num_programs = min(tiles.num_programs, num_items)
    q_descriptor = rows_descriptor(q, kind.group_heads) if tiles.loads_rows else None
    k_joined = v_joined = None
    if tiles.joins_pages:
        k_joined = rebased(joined_descriptor(k_pages, tiles.block_n), None)
        v_joined = rebased(joined_descriptor(v_pages, tiles.block_n), None)
    return Launch(
        kernel=attention_prefill_hopper_kernel,
        grid=(num_programs,),
        constants=shared
        | {
            "q_descriptor": rebased(q_descriptor, None),
            "k_descriptor": rebased(box_descriptor(k_pages, block_tokens), None),
            "v_descriptor": rebased(box_descriptor(v_pages, block_tokens), None),
            "k_joined_descriptor": k_joined,
            "v_joined_descriptor": v_joined,
            "num_items": num_items,
            "num_programs": num_programs,
            "BLOCK_D": max(BOX_DIM.value, power_of_two(kind.head_dim)),
            "BLOCK_N": tiles.block_n,
            "BLOCK_T": block_tokens,
            "NUM_STAGES": tiles.num_stages,
            "TAKES_TURNS": tiles.takes_turns,
            "num_warps": 4,
        },
        descriptors=(
            ("q_descriptor", "q_ptr"),
            ("k_descriptor", "k_pages_ptr"),
            ("v_descriptor", "v_pages_ptr"),
            ("k_joined_descriptor", "k_pages_ptr"),
            ("v_joined_descriptor", "v_pages_ptr"),
        ),
    )


def _check(given: _Arguments, plan: AttentionPlan | None) -> AttentionKind:
    """Check everything that follows from the signature of a call, and return its kind of layer.

    Raises:
        ValueError: If something does not fit.
    """
    check_shape("q", given.q, (None, None, None))
    num_tokens, num_heads, head_dim = given.q.shape
    check_shape("v_pages", given.v_pages, (None, None, None, None))
    value_dim = given.v_pages.shape[3] * elements_per_item(given.v_pages.dtype)
    _check_widths(head_dim, value_dim)
    check_shape("k_pages", given.k_pages, (None, None, None, None))
    num_kv_heads = given.k_pages.shape[2]
    check_dtype("q", given.q, FLOAT_DTYPES)
    check_rows("q", given.q)
    check_pages(
        given.k_pages, given.v_pages, num_kv_heads, head_dim, given.q.dtype, value_dim=value_dim
    )
    num_requests = check_page_table(given.page_table)
    check_steps(given.query_starts, given.seq_lens, num_requests)
    check_positive("scale", given.scale)
    if given.soft_cap is not None:
        check_positive("soft_cap", given.soft_cap)
    _check_heads(given.q, given.sinks, given.alibi_slopes)
    _check_spans(given.spans, num_tokens, plan)
    check_scales(given.k_pages, given.k_scale, given.v_scale, num_kv_heads)
    if given.k_scale is not None and given.v_scale is not None:
        check_shape("v_scale", given.v_scale, given.k_scale.shape)
    check_slot_scales(
        given.k_pages, given.k_slot_scales, given.v_slot_scales, given.k_scale, given.v_scale
    )
    if given.out is not None:
        check_shape("out", given.out, (num_tokens, num_heads, value_dim))
        check_dtype("out", given.out, (given.q.dtype,))
        check_contiguous("out", given.out)
    if given.lse is not None:
        check_shape("lse", given.lse, (num_tokens, num_heads))
        check_dtype("lse", given.lse, (torch.float32,))
        check_contiguous("lse", given.lse)
    check_same_device(
        q=given.q,
        k_pages=given.k_pages,
        v_pages=given.v_pages,
        page_table=given.page_table,
        query_starts=given.query_starts,
        sinks=given.sinks,
        alibi_slopes=given.alibi_slopes,
        spans=given.spans,
        k_scale=given.k_scale,
        v_scale=given.v_scale,
        k_slot_scales=given.k_slot_scales,
        v_slot_scales=given.v_slot_scales,
        out=given.out,
        lse=given.lse,
        plan=None if plan is None else plan.unit_starts,
    )
    check_no_gradients(
        q=given.q,
        k_pages=given.k_pages,
        v_pages=given.v_pages,
        sinks=given.sinks,
        alibi_slopes=given.alibi_slopes,
        out=given.out,
    )
    return kind_of(
        given.q,
        given.k_pages,
        given.v_pages,
        window_tokens=given.window_tokens,
        chunk_tokens=given.chunk_tokens,
        is_causal=given.is_causal,
        has_slot_scales=given.k_slot_scales is not None,
    )


def kind_of(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    window_tokens: int | None,
    chunk_tokens: int | None,
    is_causal: bool,
    has_slot_scales: bool,
) -> AttentionKind:
    """Describe the layer of a call. Its tensors have been checked against each other.

    Args:
        q: Queries, [num_tokens, num_heads, head_dim].
        k_pages: Keys, [num_pages, page_tokens, num_kv_heads, head_dim, or half of it].
        v_pages: Values, [num_pages, page_tokens, num_kv_heads, value_dim, or half of it].
        window_tokens: As in `AttentionKind`.
        chunk_tokens: As in `AttentionKind`.
        is_causal: As in `AttentionKind`.
        has_slot_scales: As in `AttentionKind`.
    """
    _, num_heads, head_dim = q.shape
    return AttentionKind(
        num_heads=num_heads,
        num_kv_heads=k_pages.shape[2],
        head_dim=head_dim,
        value_dim=v_pages.shape[3] * elements_per_item(v_pages.dtype),
        page_tokens=k_pages.shape[1],
        window_tokens=window_tokens,
        chunk_tokens=chunk_tokens,
        is_causal=is_causal,
        is_quantised=k_pages.dtype in QUANTISED_DTYPES,
        has_slot_scales=has_slot_scales,
        is_int4=k_pages.dtype == INT4_DTYPE,
        is_other_float=is_other_float(k_pages.dtype, q.dtype),
    )


def _check_widths(head_dim: int, value_dim: int) -> None:
    if head_dim > MAX_HEAD_DIM:
        msg = f"q must have heads of at most {MAX_HEAD_DIM} elements, got {head_dim}"
        raise ValueError(msg)
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        msg = f"v_pages must have values of 1 to {MAX_HEAD_DIM} elements, got {value_dim}"
        raise ValueError(msg)


def _check_heads(
    q: torch.Tensor, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None
) -> None:
    num_heads = q.shape[1]
    if sinks is not None:
        check_shape("sinks", sinks, (num_heads,))
        check_dtype("sinks", sinks, (q.dtype, torch.float32))
        check_contiguous("sinks", sinks)
    if alibi_slopes is not None:
        check_shape("alibi_slopes", alibi_slopes, (num_heads,))
        check_dtype("alibi_slopes", alibi_slopes, (torch.float32,))
        check_contiguous("alibi_slopes", alibi_slopes)


def _check_spans(spans: torch.Tensor | None, num_tokens: int, plan: AttentionPlan | None) -> None:
    if spans is None:
        return
    check_shape("spans", spans, (num_tokens, 2))
    check_dtype("spans", spans, (torch.int32,))
    check_contiguous("spans", spans)
    if plan is not None and plan.decode_query_tokens:
        msg = (
            f"plan must have decode_query_tokens 0 where spans are given, got "
            f"{plan.decode_query_tokens}"
        )
        raise ValueError(msg)

"""Prompts over quantised pages through a scratch of 16 bits: which ones, and where tokens lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import triton

from jenga_kernels.checks.tensors import (
    check_at_least,
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from jenga_kernels.plans.attention_plan import (
    AttentionKind,
    AttentionPlan,
    check_query_dtype,
    check_steps,
    plan_attention,
)

SCRATCH_PAGE_TOKENS = 128
"""Tokens of a page of the scratch: as many keys as the widest tile of a prompt on a GPU, so that no
tile needs more than one page."""

MIN_ROWS_PER_TOKEN = 512
"""Fewest rows that must read a restored token on average. A row is one head of one query token.

An estimate for an H100, not measured. The kernel of 16 bits has 630 TFLOPS, and those of quantised
pages have 310. So a row that reads a token of head_dim elements saves 4 * head_dim FLOP * (1 / 310
- 1 / 630) per TFLOPS, which is head_dim * 6.6 fs. To restore a token moves 6 * head_dim bytes,
which takes head_dim * 1.7 ps at 3.5 TB/s. Both are equal at 260 rows. With twice as many, the gain
is at least as large as the cost.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchPlan:
    """Work of one step whose prompts read a scratch; made by `plan_scratch`.

    Attributes:
        whole: Plan of the step without a scratch.
        decode: Its requests that are decoded.
        prompts: Its other requests, over the pages of the scratch.
        seq_lens: Number of tokens of each request; 0 for those that are decoded,
            i32[num_requests].
        page_table: Pages of the scratch, i32[num_requests, max_pages]. Entries of pages that are
            not read may be any numbers.
        page_runs: Tokens that each page of the scratch holds, i32[num_pages, 3], as
            `dequantise_pages` takes them.
    """

    whole: AttentionPlan
    decode: AttentionPlan
    prompts: AttentionPlan
    seq_lens: torch.Tensor = field(repr=False)
    page_table: torch.Tensor = field(repr=False)
    page_runs: torch.Tensor = field(repr=False)


def page_bytes(kind: AttentionKind, dtype: torch.dtype) -> int:
    """Bytes of a page of the scratch, for layers of a kind with queries of an element type."""
    row_elements = kind.head_dim + kind.result_dim
    return SCRATCH_PAGE_TOKENS * kind.num_kv_heads * row_elements * dtype.itemsize


def scratch_pages(
    scratch: torch.Tensor, kind: AttentionKind, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """View a buffer as pages of keys and of values.

    Layers of all kinds may share a buffer, because each restores its own tokens before it reads
    them.

    Args:
        scratch: The buffer, u8[num_bytes], contiguous, on the device of the layers.
        kind: Properties of the layers.
        dtype: Element type of the queries.

    Returns:
        Keys, [num_pages, SCRATCH_PAGE_TOKENS, num_kv_heads, head_dim], and values, the same with
        value_dim elements. Both have the given dtype. In a page, the tokens of a head are
        consecutive, each with its key and its value side by side.

    Raises:
        ValueError: If shape, dtype or strides of the buffer do not fit, or it has no room for a
            page.
    """
    check_shape("scratch", scratch, (None,))
    check_dtype("scratch", scratch, (torch.uint8,))
    check_contiguous("scratch", scratch)
    check_query_dtype(dtype)
    num_pages = scratch.numel() // page_bytes(kind, dtype)
    if num_pages == 0:
        msg = (
            f"scratch must have at least {page_bytes(kind, dtype)} bytes, one page of these "
            f"layers, got {scratch.numel()}"
        )
        raise ValueError(msg)
    row_elements = kind.head_dim + kind.result_dim
    elements = scratch[: num_pages * page_bytes(kind, dtype)].view(dtype)
    pages = elements.view(num_pages, kind.num_kv_heads, SCRATCH_PAGE_TOKENS, row_elements)
    by_token = pages.transpose(1, 2)
    return by_token[..., : kind.head_dim], by_token[..., kind.head_dim :]


def plan_scratch(
    plan: AttentionPlan,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    requests: Sequence[tuple[int, int]],
    scratch_bytes: int,
    min_rows_per_token: int = MIN_ROWS_PER_TOKEN,
    is_warp_specialized: bool | None = None,
) -> ScratchPlan | None:
    """Plan a step whose prompts are to read a scratch instead of quantised pages.

    Prompts are the requests with more query tokens than `plan.decode_query_tokens`. The scratch
    holds the tokens that their queries read, so with a window or chunks only the last ones.

    Args:
        plan: Plan of the step over the quantised pages.
        query_starts: First query token of each request, then the number of query tokens,
            i32[num_requests + 1]. The same as for the plan.
        seq_lens: Number of tokens of each request, i32[num_requests]. The same as for the plan.
        requests: (query tokens, tokens) of each request, as the host knows them. The second may be
            an upper bound.
        scratch_bytes: Bytes of the scratch.
        min_rows_per_token: Fewest rows that must read a restored token, on average over the step's
            prompts.
        is_warp_specialized: As in `plan_attention`, for the prompts.

    Returns:
        The plan. None if the step should read its pages without a scratch: it has no prompts, too
        few rows read a token, the tokens do not fit, or the plan is batch-invariant.

    Raises:
        ValueError: If the plan is not for quantised pages, or a number, shape, dtype or device does
            not fit.
    """
    kind = plan.kind
    if not kind.is_quantised:
        msg = "plan must be for quantised pages, got one for pages of 16 or 32 bits"
        raise ValueError(msg)
    check_steps(query_starts, seq_lens, plan.num_requests)
    check_same_device(unit_starts=plan.unit_starts, query_starts=query_starts)
    if len(requests) != plan.num_requests:
        msg = f"requests must have {plan.num_requests} pairs, got {len(requests)}"
        raise ValueError(msg)
    check_at_least("scratch_bytes", scratch_bytes, 0)
    check_at_least("min_rows_per_token", min_rows_per_token, 0)
    prompts = [given for given in requests if given[0] > plan.decode_query_tokens]
    if plan.is_batch_invariant or not prompts or not plan.max_row_tiles:
        return None
    num_pages = sum(_most_pages(*prompt, kind) for prompt in prompts)
    if not 0 < num_pages * page_bytes(kind, plan.dtype) <= scratch_bytes:
        return None
    num_tokens = sum(_read_tokens(*prompt, kind) for prompt in prompts)
    num_rows = kind.group_heads * sum(_pairs(*prompt, kind) for prompt in prompts)
    if num_rows < min_rows_per_token * num_tokens:
        return None
    max_columns = max(1, *(triton.cdiv(tokens, SCRATCH_PAGE_TOKENS) for _, tokens in prompts))
    read_lens, page_table, page_runs = _layout(
        plan, query_starts, seq_lens, num_pages=num_pages, max_columns=max_columns
    )
    return ScratchPlan(
        whole=plan,
        decode=replace(plan, max_row_tiles=0),
        prompts=plan_attention(
            query_starts,
            read_lens,
            replace(
                kind,
                page_tokens=SCRATCH_PAGE_TOKENS,
                is_quantised=False,
                has_slot_scales=False,
                is_int4=False,
            ),
            num_tokens=plan.num_tokens,
            dtype=plan.dtype,
            max_query_tokens=max(tokens for tokens, _ in prompts),
            # The plan serves only the prompts.
            min_query_tokens=min(tokens for tokens, _ in prompts),
            decode_query_tokens=plan.decode_query_tokens,
            is_warp_specialized=is_warp_specialized,
        ),
        seq_lens=read_lens,
        page_table=page_table,
        page_runs=page_runs,
    )


def _reach(kind: AttentionKind) -> int | None:
    """Most tokens that a query reads, itself included; None for all before it."""
    bounds = [bound for bound in (kind.window_tokens, kind.chunk_tokens) if bound is not None]
    return min(bounds, default=None)


def _read_tokens(query_tokens: int, num_tokens: int, kind: AttentionKind) -> int:
    """Most tokens that some query of a prompt reads."""
    reach = _reach(kind)
    return num_tokens if reach is None else min(num_tokens, query_tokens + reach - 1)


def _most_pages(query_tokens: int, num_tokens: int, kind: AttentionKind) -> int:
    """Most pages of the scratch that hold these tokens, wherever the first one lies in its page."""
    read = _read_tokens(query_tokens, num_tokens, kind)
    if read == num_tokens:
        return triton.cdiv(num_tokens, SCRATCH_PAGE_TOKENS)
    return triton.cdiv(read + SCRATCH_PAGE_TOKENS - 1, SCRATCH_PAGE_TOKENS)


def _pairs(query_tokens: int, num_tokens: int, kind: AttentionKind) -> int:
    """Number of pairs of a query and a token that it reads, roughly."""
    if not kind.is_causal:
        return query_tokens * num_tokens
    on_average = num_tokens - query_tokens // 2
    reach = _reach(kind)
    return query_tokens * (on_average if reach is None else min(on_average, reach))


def _layout(
    plan: AttentionPlan,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_pages: int,
    max_columns: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place the tokens of the prompts, one prompt after another; return the lists of a plan.

    All of it is computed on the device, where the numbers of tokens are exact.

    Args:
        plan: Plan of the step over the quantised pages.
        query_starts: As in `plan_scratch`.
        seq_lens: As in `plan_scratch`.
        num_pages: Number of pages that are at least needed, or more.
        max_columns: Columns of the page table.
    """
    kind, device = plan.kind, seq_lens.device
    query_lens = query_starts.diff()
    read_lens = torch.where(query_lens > plan.decode_query_tokens, seq_lens, 0)
    first_positions = (read_lens - query_lens).clamp(min=0)
    first_tokens = torch.zeros_like(read_lens)
    if kind.window_tokens is not None:
        first_tokens = (first_positions - kind.window_tokens + 1).clamp(min=0)
    if kind.chunk_tokens is not None:
        chunk_starts = first_positions // kind.chunk_tokens * kind.chunk_tokens
        first_tokens = torch.maximum(first_tokens, chunk_starts)
    first_columns = first_tokens // SCRATCH_PAGE_TOKENS
    end_columns = (read_lens + SCRATCH_PAGE_TOKENS - 1) // SCRATCH_PAGE_TOKENS
    ends = (end_columns - first_columns).clamp(min=0).cumsum(0, dtype=torch.int32)
    # Column i of a request is page i + shift.
    shifts = torch.zeros_like(ends)
    shifts[1:] = ends[:-1]
    shifts -= first_columns
    columns = torch.arange(max_columns, dtype=torch.int32, device=device)
    pages = torch.arange(num_pages, dtype=torch.int32, device=device)
    owners = torch.searchsorted(ends, pages, right=True, out_int32=True)
    is_used = owners < plan.num_requests
    owners = owners.clamp(max=plan.num_requests - 1)
    page_starts = (pages - shifts[owners]) * SCRATCH_PAGE_TOKENS
    page_runs = torch.stack(
        [
            torch.where(is_used, owners, -1),
            torch.maximum(page_starts, first_tokens[owners]),
            torch.minimum(page_starts + SCRATCH_PAGE_TOKENS, read_lens[owners]),
        ],
        1,
    )
    return read_lens, shifts[:, None] + columns, page_runs

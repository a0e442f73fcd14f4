"""The work of a step for layers with a token budget: which requests choose, and by which queries.

A layer chooses at the end of a prompt, and then after every `output_tokens` tokens. The queries
that choose are the last ones before that point. A step of a prompt has all of them. A decoding
request has one in each step, so the attention weights of its queries are added up from step to
step, in words beside the keys and values. No query is stored: one is larger than the keys of its
token, where several heads share a key.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from jenga.errors import InvariantError
from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec

Numbers = npt.NDArray[np.integer[Any]]
"""A number for each request of the batch."""

_NEVER_AGAIN = 1 << 40
"""Interval of choices that no request reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The requests of a batch, and what a layer does with their tokens. All are i64[num_requests].

    Attributes:
        query_ends: One past the last query of each request in the step.
        num_dropped: Number of tokens that the layer dropped before the step.
        num_held: Number of tokens that it has, those of the step included.
        num_queries: Number of queries of the step that count for the next choice.
        num_earlier: Number of first tokens that have sums of weights from earlier steps.
        num_kept: Number of tokens to keep if the layer chooses after the step, else 0.
    """

    query_ends: Numbers
    num_dropped: Numbers
    num_held: Numbers
    num_queries: Numbers
    num_earlier: Numbers
    num_kept: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The words of requests in which attention weights are added up from step to step.

    Attributes:
        read_pages: i64[num_requests, max_tokens], page of each token whose sum continues.
        written_pages: i64[num_requests, max_tokens], page of each token whose sum a later step
            continues. Both are the null page for other tokens.
        slots: i64[max_tokens], slot of each token in its page.
        is_read: bool[num_requests, max_tokens], whether the sum continues.
    """

    read_pages: torch.Tensor
    written_pages: torch.Tensor
    slots: torch.Tensor
    is_read: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The requests for which a layer chooses in a step.

    Attributes:
        rows: i64[num_packed], their rows among the requests of the group; None means all of them.
        page_table: i32[num_packed, max_pages], pages of each request.
        seq_lens: i32[num_packed], number of tokens that it has.
        num_kept: i32[num_packed], number of tokens that it keeps.
        max_kept: The greatest of num_kept.
    """

    rows: torch.Tensor | None
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    num_kept: torch.Tensor
    max_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A group of requests with queries that count.

    Attributes:
        page_table: i32[num_requests, max_pages], pages of each request from its first kept one.
        query_ends: i32[num_requests], one past the row of its last query.
        seq_lens: i32[num_requests], number of its tokens in these pages.
        num_queries: i32[num_requests], number of its last queries that count.
        max_tokens: The longest of seq_lens.
        sums: Words of the requests, None if all queries that choose are in this step.
        packing: The requests for which the layer chooses in this step, None if there are none.
    """

    page_table: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    num_queries: torch.Tensor
    max_tokens: int
    sums: Sums | None
    packing: Packing | None


def rows_of_step(
    common: CommonAttentionMetadata, prompt_tokens: Numbers, spec: TokenBudgetSpec
) -> Rows:
    """Find where each request of a step stands: the rule of `TokenBudgetPolicy`, for all at once.

    The upper bound of lengths is exact, because drafted tokens are refused.

    Args:
        common: vLLM's metadata of the step.
        prompt_tokens: Number of prompt tokens of each request.
        spec: Spec of the layers' cache, with the number of tokens in a page.

    Raises:
        InvariantError: A step of a prompt lacks queries that choose, and the layers have no words
            to add up weights.
    """
    bounds = common.seq_lens_cpu_upper_bound
    # There are none while vLLM profiles memory or captures graphs.
    num_rows = 0 if bounds is None else min(len(prompt_tokens), common.num_reqs)
    ends = np.zeros(0, np.int64) if bounds is None else bounds[:num_rows].numpy().astype(np.int64)
    prompts = prompt_tokens[:num_rows].astype(np.int64)
    query_starts = common.query_start_loc_cpu[: num_rows + 1].numpy().astype(np.int64)
    begins = ends - np.diff(query_starts)
    interval = spec.output_tokens or _NEVER_AGAIN
    is_after = begins >= prompts
    last = np.where(is_after, begins - (begins - prompts) % interval, 0)
    choice = np.where(is_after, last + interval, prompts)
    num_dropped, dropped_then = (
        -(-np.maximum(at - spec.budget_tokens, 0) // spec.block_size) * spec.block_size
        for at in (last, choice)
    )
    first_query = choice - spec.recent_tokens
    counts = (dropped_then > num_dropped) & (ends > first_query)
    chooses = counts & (ends == choice)
    continues = counts & (begins > first_query)
    if spec.output_tokens is None and (continues | (counts & ~chooses)).any():
        msg = (
            f"steps of tokens {begins.tolist()} to {ends.tolist()} lack some of the "
            f"{spec.recent_tokens} queries that choose at {choice.tolist()} tokens"
        )
        raise InvariantError(msg)
    return Rows(
        query_ends=query_starts[1:],
        num_dropped=num_dropped,
        num_held=ends - num_dropped,
        num_queries=np.where(counts, ends - np.maximum(begins, first_query), 0),
        num_earlier=np.where(continues, begins - num_dropped, 0),
        num_kept=np.where(chooses, ends - dropped_then, 0),
    )


def from_kept_pages(
    common: CommonAttentionMetadata, rows: Rows, page_tokens: int, device: torch.device
) -> CommonAttentionMetadata:
    """Let page tables and lengths begin at the first kept page of each request.

    Args:
        common: vLLM's metadata of the step.
        rows: Requests of the step.
        page_tokens: Number of tokens in a page.
        device: Device of the page tables.
    """
    if not rows.num_dropped.any():
        return common
    dropped = torch.zeros(common.num_reqs, dtype=torch.int32)
    dropped[: len(rows.num_dropped)] = torch.from_numpy(rows.num_dropped)
    offsets = async_tensor_h2d(dropped, device=device)
    table = common.block_table_tensor
    columns = torch.arange(table.shape[1], device=device) + (offsets // page_tokens)[:, None]
    bounds = common.seq_lens_cpu_upper_bound
    return replace(
        common,
        seq_lens=common.seq_lens - offsets,
        seq_lens_cpu_upper_bound=None if bounds is None else bounds - dropped.to(bounds.dtype),
        block_table_tensor=table.gather(1, columns.clamp(max=table.shape[1] - 1)),
    )


def scorings(
    page_table: torch.Tensor, rows: Rows, page_tokens: int, device: torch.device
) -> Iterator[Scoring]:
    """Group the requests with queries that count: those with all of them in the step, and others.

    A long prompt is thus in no group with decoding requests, which have few tokens.

    Args:
        page_table: Page tables of the batch from the first kept pages on.
        rows: Requests of the step.
        page_tokens: Number of tokens in a page.
        device: Device of the page tables.
    """
    is_whole = (rows.num_kept > 0) & (rows.num_earlier == 0)
    is_split = (rows.num_queries > 0) & ~is_whole
    for group in (is_whole, is_split):
        if group.any():
            yield _scoring(page_table, rows, np.flatnonzero(group), page_tokens, device)


def _scoring(
    page_table: torch.Tensor, rows: Rows, group: Numbers, page_tokens: int, device: torch.device
) -> Scoring:
    """Describe a group of requests, by their rows in the batch.

    It is one whose requests have all queries that choose in the step, or one that has none of them.
    """
    kept = rows.num_kept[group]
    fields = np.stack(
        [
            group,
            rows.query_ends[group],
            rows.num_held[group],
            rows.num_queries[group],
            rows.num_earlier[group],
            kept,
        ]
    )
    indices, ends, seq_lens, num_queries, num_earlier, num_kept = async_tensor_h2d(
        torch.from_numpy(fields).to(torch.int32), device=device
    ).unbind(0)
    max_tokens = int(rows.num_held[group].max())
    own_table = page_table[indices.long(), : -(-max_tokens // page_tokens)].contiguous()
    sums = None
    if not kept.all() or rows.num_earlier[group].any():
        tokens = torch.arange(max_tokens, device=device)
        pages = own_table.long()[:, tokens // page_tokens]
        is_read = tokens < num_earlier[:, None]
        is_written = (tokens < seq_lens[:, None]) & (num_kept == 0)[:, None]
        sums = Sums(
            read_pages=pages.masked_fill(~is_read, 0),
            written_pages=pages.masked_fill(~is_written, 0),
            slots=tokens % page_tokens,
            is_read=is_read,
        )
    packing = None
    if kept.any():
        chosen = None
        if not kept.all():
            chosen = async_tensor_h2d(torch.from_numpy(np.flatnonzero(kept)), device=device)
        packing = Packing(
            rows=chosen,
            page_table=own_table if chosen is None else own_table[chosen],
            seq_lens=seq_lens if chosen is None else seq_lens[chosen],
            num_kept=num_kept if chosen is None else num_kept[chosen],
            max_kept=int(kept.max()),
        )
    return Scoring(
        page_table=own_table,
        query_ends=ends,
        seq_lens=seq_lens,
        num_queries=num_queries,
        max_tokens=max_tokens,
        sums=sums,
        packing=packing,
    )

"""Groups of parameters that kernels of attention share."""

from typing import NamedTuple

from jenga_kernels.triton.lib.groups import Pointer


class Results(NamedTuple):
    """Results of the queries."""

    out_ptr: Pointer  # [num_tokens, num_heads, value_dim], contiguous
    lse_ptr: Pointer  # f32[num_tokens, num_heads] or None


class Partials(NamedTuple):
    """Results of parts of the keys, which another kernel merges."""

    partial_out_ptr: Pointer  # f32[num_partials, QUERY_TOKENS * GROUP, value_dim]
    partial_lse_ptr: Pointer  # f32[num_partials, QUERY_TOKENS * GROUP]


class Inputs(NamedTuple):
    """Queries, and the pages of keys and values."""

    q_ptr: Pointer  # [num_tokens, num_heads, head_dim]
    k_pages_ptr: Pointer  # [num_pages, page_tokens, num_kv_heads, head_dim], or u8 with two in each
    v_pages_ptr: Pointer  # the same with value_dim elements


class Requests(NamedTuple):
    """Page tables of the requests, their query tokens and their numbers of tokens."""

    page_table_ptr: Pointer  # i32[num_requests, max_pages]
    query_starts_ptr: Pointer  # i32[num_requests + 1]
    seq_lens_ptr: Pointer  # i32[num_requests]


class DecodeWork(NamedTuple):
    """The decode work of a step, and where each program begins."""

    unit_starts_ptr: Pointer  # i32[num_requests + 1], work before each request, per KV head
    units_per_program_ptr: Pointer  # i32[1]
    first_requests_ptr: Pointer  # i32[num_programs], request where each program begins


class RowWork(NamedTuple):
    """The row tiles of a step's prompts."""

    row_tile_requests_ptr: Pointer  # i32[max_row_tiles], request of each tile, or -1
    row_tile_indices_ptr: Pointer  # i32[max_row_tiles], index among the tiles of the request


class HeadTerms(NamedTuple):
    """Terms of a head's scores."""

    sinks_ptr: Pointer  # [num_heads] or None
    alibi_slopes_ptr: Pointer  # f32[num_heads] or None


class Scales(NamedTuple):
    """Factors of stored keys and values: for all slots, and for each slot."""

    k_scale_ptr: Pointer  # f32[1] or f32[num_kv_heads] or None
    v_scale_ptr: Pointer  # as k_scale_ptr
    k_slot_scales_ptr: Pointer  # f32, or i32 of u8, [num_pages, page_tokens, num_kv_heads], or None
    v_slot_scales_ptr: Pointer  # as k_slot_scales_ptr


class Scores(NamedTuple):
    """How scores are computed, and which keys a query reads."""

    scale: float
    soft_cap: float | None
    window_tokens: int | None
    chunk_tokens: int | None


class Layer(NamedTuple):
    """Properties of a layer for which a kernel is compiled.

    RESULT_DIM is the number of elements of a value. With IS_PER_HEAD_SCALE, `Scales` has a factor
    of keys and values for each KV head. With IS_INVARIANT, a row's result does not depend on the
    other rows of the batch.
    """

    NUM_KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    RESULT_DIM: int
    PAGE_TOKENS: int
    IS_CAUSAL: bool
    IS_PER_HEAD_SCALE: bool
    IS_INVARIANT: bool

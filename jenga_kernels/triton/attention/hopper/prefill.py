# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""The prefill kernel of attention for Hopper, with warps that load and warps that compute.

One warp loads keys and values by TMA, box by box through the page table. Two groups of four warps
have half of a tile of rows each and multiply. While the tensor cores multiply the weights of one
tile of keys with its values, the softmax of the next tile and that of the other group run. The
kernel is written in Gluon, which has no interpreter. `attention.prefill` does the same in Triton.

The warps share a ring of tiles, `ring`:

- keys, then values;
- barriers for ready keys, for free places of keys, and the same for values; one more barrier of
  ready values is for loaded values that must still be zeroed;
- barriers of the groups' turns.

They also share row tiles, `rows`:

- places for the queries of each group, for two row tiles if queries are loaded ahead;
- descriptions of two row tiles, with barriers for ready ones and free places;
- the TMA descriptor of queries.

Source: FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jenga_kernels.triton.attention.groups import HeadTerms, Requests, Results, RowWork, Scores
from jenga_kernels.triton.attention.hopper.load import (
    AT_ONCE,
    BOX_DIM,
    BOX_LAYOUT,
    ROWS_LAYOUT,
    TILE_LAYOUT,
    load_tiles,
)
from jenga_kernels.triton.attention.hopper.rows import GROUP_ROWS, attend_rows
from jenga_kernels.triton.attention.hopper.work import ITEM_LAYOUT, ITEM_NUMBERS
from jenga_kernels.triton.lib.gluon_device import let_next_begin
from jenga_kernels.triton.lib.groups import with_groups


class HopperTiles(NamedTuple):
    """Tiles and flags for which `attention_prefill_hopper_kernel` is compiled."""

    NUM_KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    PAGE_TOKENS: int
    IS_CAUSAL: bool
    BLOCK_N: int
    BLOCK_T: int
    BLOCK_D: int
    NUM_STAGES: int
    TAKES_TURNS: bool
    IS_FOLLOWED: bool


@with_groups(
    results=Results,
    requests=Requests,
    row_work=RowWork,
    terms=HeadTerms,
    scores=Scores,
    tiles=HopperTiles,
)
@gluon.jit(do_not_specialize=["num_pages", "num_items", "num_programs"])
def attention_prefill_hopper_kernel(
    # Outputs
    results,
    # Inputs
    q_ptr,  # [num_tokens, num_heads, head_dim]
    q_descriptor,  # the same, or None: groups of warps then load their own rows
    k_descriptor,  # [num_pages, page_tokens, num_kv_heads, head_dim]
    v_descriptor,  # [num_pages, page_tokens, num_kv_heads, head_dim]
    k_joined_descriptor,  # the same in boxes of AT_ONCE pages, or None
    v_joined_descriptor,
    requests,
    row_work,
    terms,
    spans_ptr,  # i32[num_tokens, 2] or None
    # Scalars
    scores,
    num_pages,
    # Sizes
    num_items,  # row tiles of all KV heads
    num_programs,
    # Strides, in elements
    stride_q_token: gl.int64,
    stride_q_head: gl.int64,
    stride_table_request: gl.int64,
    # Tiles and flags
    tiles: gl.constexpr,
):
    """Compute one row tile after another, with loads up to a row tile ahead.

    Item t * NUM_KV_HEADS + h is tile t of the list of row tiles for KV head h. If the groups take
    turns, one issues its products before the other. Their softmaxes then run at different times,
    each while the other's products run. With IS_FOLLOWED, decoding requests begin on processors
    that have no items left.
    """
    let_next_begin(tiles.IS_FOLLOWED)
    NUM_STAGES: gl.constexpr = tiles.NUM_STAGES
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    NUM_Q: gl.constexpr = 1 if q_descriptor is None else 2
    q = gl.allocate_shared_memory(dtype, [2 * NUM_Q, GROUP_ROWS, tiles.BLOCK_D], TILE_LAYOUT)
    k_tiles = gl.allocate_shared_memory(
        dtype, [NUM_STAGES, tiles.BLOCK_N, tiles.BLOCK_D], TILE_LAYOUT
    )
    v_tiles = gl.allocate_shared_memory(
        dtype, [NUM_STAGES, tiles.BLOCK_N, tiles.BLOCK_D], TILE_LAYOUT
    )
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier_layout)
    v_ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES + 1, 1], barrier_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier_layout)
    items = gl.allocate_shared_memory(gl.int32, [2, ITEM_NUMBERS], ITEM_LAYOUT)
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    for i in gl.static_range(2):
        mbarrier.init(item_ready.index(i), count=1)
        mbarrier.init(item_free.index(i), count=2)
    turns = v_free
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(v_ready.index(NUM_STAGES), count=1)
    if tiles.TAKES_TURNS:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
        mbarrier.init(turns.index(0), count=1)
        mbarrier.init(turns.index(1), count=1)
    fence_async_shared()

    ring = (k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns)
    gl.warp_specialize(
        [
            (
                attend_rows,
                (
                    results,
                    q_ptr,
                    terms,
                    spans_ptr,
                    scores,
                    stride_q_token,
                    stride_q_head,
                    (q, items, item_ready, item_free, q_descriptor),
                    ring,
                    tiles,
                    0,
                ),
            ),
            (
                attend_rows,
                (
                    results,
                    q_ptr,
                    terms,
                    spans_ptr,
                    scores,
                    stride_q_token,
                    stride_q_head,
                    (q, items, item_ready, item_free, q_descriptor),
                    ring,
                    tiles,
                    1,
                ),
            ),
            (
                load_tiles,
                (
                    (q, items, item_ready, item_free, q_descriptor),
                    (k_descriptor, k_joined_descriptor),
                    (v_descriptor, v_joined_descriptor),
                    requests.page_table_ptr,
                    (
                        requests.query_starts_ptr,
                        requests.seq_lens_ptr,
                        row_work.row_tile_requests_ptr,
                        row_work.row_tile_indices_ptr,
                        spans_ptr,
                        num_items,
                        num_programs,
                    ),
                    num_pages,
                    scores.window_tokens,
                    scores.chunk_tokens,
                    stride_table_request,
                    ring,
                    tiles,
                ),
            ),
        ],
        [4, 1],
        [232, 40],  # of a thread; those of the three groups are 504
    )


def box_descriptor(
    pages: torch.Tensor, block_tokens: int, *, block_pages: int = 1
) -> TensorDescriptor:
    """Make the TMA descriptor for boxes of rows of one head of a page, or of neighbouring pages.

    Args:
        pages: Keys or values, [num_pages, page_tokens, num_kv_heads, head_dim], of 16 bits an
            element; any strides that are multiples of 16 bytes, last dimension contiguous.
        block_tokens: Rows of a box in a page; a divisor of page_tokens and a multiple of 8.
        block_pages: Pages of a box.
    """
    # PyTorch leaves the stride of a dimension of size one undefined, but TMA reads it.
    strides = [
        stride if size > 1 else BOX_DIM.value
        for size, stride in zip(pages.shape, pages.stride(), strict=True)
    ]
    block = [block_pages, block_tokens, 1, BOX_DIM.value]
    return TensorDescriptor(pages, list(pages.shape), [*strides[:3], 1], block, BOX_LAYOUT)


def joined_descriptor(pages: torch.Tensor, block_n: int) -> TensorDescriptor | None:
    """Make the TMA descriptor for boxes of AT_ONCE pages; None if tiles do not consist of them.

    Args:
        pages: As `box_descriptor` takes them.
        block_n: Keys of a tile.
    """
    page_tokens = pages.shape[1]
    if block_n % (AT_ONCE.value * page_tokens):
        return None
    return box_descriptor(pages, page_tokens, block_pages=AT_ONCE.value)


def rows_descriptor(q: torch.Tensor, group_heads: int) -> TensorDescriptor | None:
    """Make the TMA descriptor for queries of a group of rows; None if TMA cannot load them.

    Args:
        q: Queries, [num_tokens, num_heads, head_dim], of 16 bits an element, last dimension
            contiguous.
        group_heads: Heads that share a KV head; rows of a token, next to each other.
    """
    whole_tokens, others = divmod(GROUP_ROWS.value, group_heads)
    strides = [
        stride if size > 1 else BOX_DIM.value
        for size, stride in zip(q.shape, q.stride(), strict=True)
    ]
    is_aligned = q.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in strides[:2])
    if others or not is_aligned:
        return None
    block = [whole_tokens, group_heads, BOX_DIM.value]
    return TensorDescriptor(q, list(q.shape), [*strides[:2], 1], block, ROWS_LAYOUT)

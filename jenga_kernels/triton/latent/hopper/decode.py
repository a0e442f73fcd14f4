# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""The decode kernel of latent attention for Hopper, with warps that load and warps that compute.

A program has 64 rows. Their results of 512 elements fill the registers of two groups of four warps,
which have one half of them each. A step has two tiles of keys. Each group computes the scores of
one tile and passes its weights to the other through shared memory. So the softmax of one group runs
while the other's products run. One warp loads latents by TMA, part by part. The kernel is written
in Gluon, which has no interpreter. `latent.decode` does the same in Triton.

Programs work in teams. The programs of a team have different rows of the same requests. They read
the same latents at about the same time, so these come from memory once.

The warps share `room`. It has halves of the queries, halves of the latents of both tiles, their
rotary keys, and weights of both tiles. Then come the description of a run, numbers of rows that the
groups exchange, and barriers. The barriers, in their order, are:

- ready parts of a tile;
- free places of parts;
- parts that are loaded but not ready yet;
- ready weights of each tile;
- the ready description of a run;
- the free place of a run's description;
- ready sums of weights.

Source: FlashMLA, for scores of two tiles in turns, by groups with half of the results each.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jenga_kernels.triton.attention.hopper.load import BOX_DIM, ROWS_LAYOUT, TILE_LAYOUT
from jenga_kernels.triton.attention.hopper.work import ITEM_LAYOUT, ITEM_NUMBERS
from jenga_kernels.triton.latent.hopper.load import HALF_DIM, KEYS, NUM_PARTS, ROWS, load_latents
from jenga_kernels.triton.latent.hopper.rows import NUM_TOLD, attend_half

BOX_LAYOUT = gl.NVMMASharedLayout(128, 16, 3)
"""Layout of a box of latents, [1 page, rows, BOX_DIM]."""

BYTE_BOX_LAYOUT = gl.NVMMASharedLayout(64, 8, 3)
"""Layout of a box of latents in float8."""


@gluon.jit(do_not_specialize=["num_requests", "num_pages"])
def latent_decode_hopper_kernel(
    # Outputs
    out_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF_DIM], contiguous
    lse_ptr,  # f32[num_tokens, NUM_HEADS] or None
    partial_out_ptr,  # f32[num_partials, QUERY_TOKENS * NUM_HEADS, 2 * HALF_DIM]
    partial_lse_ptr,  # f32[num_partials, QUERY_TOKENS * NUM_HEADS]
    # Inputs
    q_descriptor,  # [num_tokens, NUM_HEADS, 2 * HALF_DIM + rotary_dim]
    pages_descriptor,  # [num_pages, page_tokens, 2 * HALF_DIM + rotary_dim]
    joined_descriptor,  # the same in boxes of a tile's pages, or None
    page_table_ptr,  # i32[num_requests, max_pages]
    query_starts_ptr,  # i32[num_requests + 1]
    seq_lens_ptr,  # i32[num_requests]
    unit_starts_ptr,  # i32[num_requests + 1]
    units_per_program_ptr,  # i32[1]
    first_requests_ptr,  # i32[num_teams]
    latent_scale_ptr,  # f32[1] or None
    # Scalars
    scale,
    # Sizes
    num_requests,
    num_pages,
    # Strides, in elements
    stride_table_request: gl.int64,
    # Tiles and flags
    NUM_HEADS: gl.constexpr,
    NUM_MEMBERS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_INVARIANT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
):
    """Do units from t * units_per_program on of all requests in team t.

    Program p has rows from p % NUM_MEMBERS * ROWS on of the requests of team p // NUM_MEMBERS.
    Units and partial results are those of `attention.decode`, but a unit is a step of two tiles.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    IS_CONVERTED: gl.constexpr = pages_descriptor.dtype != dtype
    LOADING_WARPS: gl.constexpr = 4 if IS_CONVERTED else 1
    REGISTERS: gl.constexpr = 216 if IS_CONVERTED else 232
    q = gl.allocate_shared_memory(dtype, [2, ROWS, HALF_DIM], TILE_LAYOUT)
    latents = gl.allocate_shared_memory(dtype, [4, KEYS, HALF_DIM], TILE_LAYOUT)
    rotary = gl.allocate_shared_memory(dtype, [2, KEYS, BOX_DIM], TILE_LAYOUT)
    weights = gl.allocate_shared_memory(dtype, [2, ROWS, KEYS], TILE_LAYOUT)
    items = gl.allocate_shared_memory(gl.int32, [1, ITEM_NUMBERS], ITEM_LAYOUT)
    told = gl.allocate_shared_memory(gl.float32, [2 * NUM_TOLD, ROWS], ITEM_LAYOUT)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2 * NUM_PARTS, 1], barrier_layout)
    free = gl.allocate_shared_memory(gl.int64, [2 * NUM_PARTS, 1], barrier_layout)
    landed = gl.allocate_shared_memory(gl.int64, [2 * NUM_PARTS, 1], barrier_layout)
    weights_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    sums_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    item_ready = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    item_free = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    for part in gl.static_range(2 * NUM_PARTS):
        mbarrier.init(ready.index(part), count=1)
        mbarrier.init(free.index(part), count=1)
        mbarrier.init(landed.index(part), count=1)
    for i in gl.static_range(2):
        mbarrier.init(weights_ready.index(i), count=1)
        mbarrier.init(sums_ready.index(i), count=1)
    mbarrier.init(item_ready, count=1)
    mbarrier.init(item_free, count=2)
    fence_async_shared()

    barriers = (ready, free, landed, weights_ready, item_ready, item_free, sums_ready)
    room = (q, latents, rotary, weights, items, told, barriers)
    gl.warp_specialize(
        [
            (
                attend_half,
                (
                    out_ptr,
                    lse_ptr,
                    partial_out_ptr,
                    partial_lse_ptr,
                    latent_scale_ptr,
                    scale,
                    room,
                    NUM_HEADS,
                    NUM_MEMBERS,
                    QUERY_TOKENS,
                    IS_CAUSAL,
                    TAKES_TURNS,
                    0,
                ),
            ),
            (
                attend_half,
                (
                    out_ptr,
                    lse_ptr,
                    partial_out_ptr,
                    partial_lse_ptr,
                    latent_scale_ptr,
                    scale,
                    room,
                    NUM_HEADS,
                    NUM_MEMBERS,
                    QUERY_TOKENS,
                    IS_CAUSAL,
                    TAKES_TURNS,
                    1,
                ),
            ),
            (
                load_latents,
                (
                    q_descriptor,
                    (pages_descriptor, joined_descriptor),
                    page_table_ptr,
                    (
                        query_starts_ptr,
                        seq_lens_ptr,
                        unit_starts_ptr,
                        units_per_program_ptr,
                        first_requests_ptr,
                        num_requests,
                    ),
                    num_pages,
                    stride_table_request,
                    room,
                    NUM_HEADS,
                    NUM_MEMBERS,
                    PAGE_TOKENS,
                    IS_INVARIANT,
                    BLOCK_T,
                    IS_CONVERTED,
                ),
            ),
        ],
        [4, LOADING_WARPS],
        [REGISTERS, 504 - 2 * REGISTERS],  # of a thread; those of the three groups are 504
    )


def latents_descriptor(
    pages: torch.Tensor, block_tokens: int, *, block_pages: int = 1
) -> TensorDescriptor:
    """Make the TMA descriptor for boxes of rows of a page, or of neighbouring pages.

    Args:
        pages: Latents and rotary keys, [num_pages, page_tokens, width], of 16 or 8 bits an element;
            any strides that are multiples of 16 bytes, last dimension contiguous.
        block_tokens: Rows of a box in a page; a divisor of page_tokens and a multiple of 8.
        block_pages: Pages of a box.
    """
    layout = BYTE_BOX_LAYOUT if pages.element_size() == 1 else BOX_LAYOUT
    return _descriptor(pages, [block_pages, block_tokens, BOX_DIM.value], layout)


def joined_descriptor(pages: torch.Tensor) -> TensorDescriptor | None:
    """Make the TMA descriptor for boxes of a tile's pages; None if tiles are not several pages.

    Args:
        pages: As `latents_descriptor` takes them.
    """
    page_tokens = pages.shape[1]
    if page_tokens == KEYS.value or KEYS.value % page_tokens:
        return None
    return latents_descriptor(pages, page_tokens, block_pages=KEYS.value // page_tokens)


def queries_descriptor(q: torch.Tensor) -> TensorDescriptor:
    """Make the TMA descriptor for queries of a program's rows.

    Args:
        q: Queries, [num_tokens, num_heads, width], of 16 bits an element; any strides that are
            multiples of 16 bytes, last dimension contiguous. The number of heads divides ROWS or is
            a multiple of it.
    """
    heads = min(q.shape[1], ROWS.value)
    return _descriptor(q, [ROWS.value // heads, heads, BOX_DIM.value], ROWS_LAYOUT)


def _descriptor(
    tensor: torch.Tensor, block: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    # PyTorch leaves the stride of a dimension of size one undefined, but TMA reads it.
    strides = [
        stride if size > 1 else BOX_DIM.value
        for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, layout)

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Loading warps of the prefill kernel for Hopper: they keep a ring of tiles full."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jenga_kernels.triton.attention.hopper.work import keys_of, num_rounds, place_of, say
from jenga_kernels.triton.lib.tiles import SWIZZLE_ROWS as _SWIZZLE_ROWS

SWIZZLE_ROWS = gl.constexpr(_SWIZZLE_ROWS)
"""Rows of a swizzle pattern of shared memory. Every box begins a new pattern."""

BOX_DIM = gl.constexpr(64)
"""Elements of a row of such a pattern, 128 bytes."""

AT_ONCE = gl.constexpr(4)
"""Number of boxes whose pages are looked up together, and loaded as one if pages are joined."""

BOX_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)
"""Layout of a box, [1 page, rows, 1 head, BOX_DIM]."""

ROWS_LAYOUT = gl.NVMMASharedLayout(128, 16, 3)
"""Layout of a box of queries, [tokens, heads that share a KV head, BOX_DIM]."""

TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Layout of a tile, which consists of boxes: those of the first BOX_DIM elements, then the next."""

HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Whether the method `reinterpret` has no leading underscore, as from Triton 3.9 on."""

copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Starts the TMA load of a box. Triton 3.9 renamed it."""


@gluon.jit
def load_tiles(
    rows,
    k_descriptors,
    v_descriptors,
    page_table_ptr,  # i32[num_requests, max_pages]
    work,
    num_pages,
    window_tokens,
    chunk_tokens,
    stride_table_request,
    ring,
    tiles: gl.constexpr,
):
    """Load tiles of keys and of values for all row tiles, each as soon as its place is free.

    Queries of row tiles are loaded too if TMA can load them. Keys and values have a descriptor for
    boxes, and one for AT_ONCE neighbouring pages or None.
    """
    q, items, item_ready, item_free, q_descriptor = rows
    _, seq_lens_ptr, _, _, _, _, _ = work
    num_said = 0
    done = 0
    landed_phase = 0
    for round_index in range(num_rounds(work)):
        kv_head, request, row_start, query_start, query_len = place_of(
            round_index, work, tiles.NUM_KV_HEADS
        )
        if request >= 0:
            seq_len = gl.load(seq_lens_ptr + request)
            keys_start, keys_end, tiles_start, num_tiles = keys_of(
                row_start,
                query_start,
                query_len,
                seq_len,
                work,
                window_tokens,
                chunk_tokens,
                tiles.GROUP,
                tiles.IS_CAUSAL,
                tiles.BLOCK_N,
                tiles.BLOCK_T,
            )
            place = num_said % 2
            mbarrier.wait(item_free.index(place), (num_said // 2) & 1 ^ 1)
            say(
                items,
                place,
                (
                    request,
                    kv_head,
                    row_start,
                    query_start,
                    query_len,
                    seq_len,
                    tiles_start,
                    num_tiles,
                ),
            )
            if q_descriptor is None:
                mbarrier.arrive(item_ready.index(place), count=1)
            else:
                token = query_start + row_start // tiles.GROUP
                _load_rows(
                    q,
                    q_descriptor,
                    item_ready.index(place),
                    place,
                    token,
                    kv_head * tiles.GROUP,
                    tiles.GROUP,
                    tiles.BLOCK_D,
                )
            num_said += 1
            table_row_ptr = page_table_ptr + request.to(gl.int64) * stride_table_request
            for tile in range(num_tiles):
                landed_phase = _load_both(
                    k_descriptors,
                    v_descriptors,
                    table_row_ptr,
                    tiles_start + tile * tiles.BLOCK_N,
                    keys_start,
                    keys_end,
                    kv_head,
                    num_pages,
                    done + tile,
                    landed_phase,
                    ring,
                    tiles,
                )
            done += num_tiles
    place = num_said % 2
    mbarrier.wait(item_free.index(place), (num_said // 2) & 1 ^ 1)
    say(items, place, (-1,))
    mbarrier.arrive(item_ready.index(place), count=1)


@gluon.jit
def _load_rows(
    q,
    descriptor,
    ready,
    place,
    token,
    head,
    GROUP: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Start loads of a row tile's queries, from a token and head on, for both groups of warps."""
    NUM_PARTS: gl.constexpr = BLOCK_D // BOX_DIM
    GROUP_ROWS: gl.constexpr = q.shape[1]
    shape: gl.constexpr = [q.shape[0] * NUM_PARTS, GROUP_ROWS // GROUP, GROUP, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = q.reinterpret(q.dtype, shape, descriptor.layout)
    else:
        boxes = q._reinterpret(q.dtype, shape, descriptor.layout)
    mbarrier.expect(ready, 2 * GROUP_ROWS * BLOCK_D * 2)
    for group in gl.static_range(2):
        for part in gl.static_range(NUM_PARTS):
            copy_box(
                descriptor,
                [token + group * (GROUP_ROWS // GROUP), head, part * BOX_DIM],
                ready,
                boxes.index((place * 2 + group) * NUM_PARTS + part),
            )


@gluon.jit
def _live_rows(tile_start, keys_start, keys_end, BLOCK_N: gl.constexpr):
    """Range [start, end) of the rows of a tile that any query reads."""
    return gl.maximum(keys_start - tile_start, 0), gl.minimum(keys_end - tile_start, BLOCK_N)


@gluon.jit
def _load_both(
    k_descriptors,
    v_descriptors,
    table_row_ptr,
    tile_start,
    keys_start,
    keys_end,
    kv_head,
    num_pages,
    index,  # index of the tile in the ring
    landed_phase,
    ring,
    tiles: gl.constexpr,
):
    """Load a tile of keys and one of values; return the next phase of ragged values.

    Values are ragged if some of their loaded rows are dead. A dead slot may hold NaN, and 0 * NaN
    is NaN. So values are zeroed, not only their weights, before they are ready.
    """
    k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, _ = ring
    stage = index % tiles.NUM_STAGES
    phase = (index // tiles.NUM_STAGES) & 1
    _load_tile(
        k_descriptors,
        table_row_ptr,
        tile_start,
        keys_end,
        kv_head,
        num_pages,
        k_tiles,
        stage,
        k_free.index(stage),
        phase ^ 1,
        k_ready.index(stage),
        tiles.PAGE_TOKENS,
        tiles.BLOCK_N,
        tiles.BLOCK_T,
        tiles.BLOCK_D,
    )
    first_live, end_live = _live_rows(tile_start, keys_start, keys_end, tiles.BLOCK_N)
    end_copied = gl.cdiv(end_live, tiles.BLOCK_T) * tiles.BLOCK_T
    is_ragged = (first_live > 0) | (end_live < end_copied)
    _load_tile(
        v_descriptors,
        table_row_ptr,
        tile_start,
        keys_end,
        kv_head,
        num_pages,
        v_tiles,
        stage,
        v_free.index(stage),
        phase ^ 1,
        v_ready.index(gl.where(is_ragged, tiles.NUM_STAGES, stage)),
        tiles.PAGE_TOKENS,
        tiles.BLOCK_N,
        tiles.BLOCK_T,
        tiles.BLOCK_D,
    )
    if is_ragged:
        mbarrier.wait(v_ready.index(tiles.NUM_STAGES), landed_phase)
        landed_phase ^= 1
        zero_rows(v_tiles, stage, 0, first_live, tiles.BLOCK_N, tiles.BLOCK_D)
        zero_rows(v_tiles, stage, end_live, end_copied, tiles.BLOCK_N, tiles.BLOCK_D)
        fence_async_shared()
        mbarrier.arrive(v_ready.index(stage), count=1)
    return landed_phase


@gluon.jit
def _look_up(
    place,  # index of the first box's page in the request, and its slot in the page
    table_row_ptr,  # i32[max_pages]
    tile_start,
    keys_end,
    num_pages,
    FIRST: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr,
):
    """Find pages of a tile's AT_ONCE boxes from FIRST on, their slots, and the place after them.

    Boxes past keys_end get a page that does not exist, which fills them with 0.
    """
    page_index, slot = place
    pages = ()
    slots = ()
    for box in gl.static_range(FIRST, min(FIRST + AT_ONCE, BLOCK_N // BLOCK_T)):
        is_live = tile_start + box * BLOCK_T < keys_end
        pages += (gl.load(table_row_ptr + page_index, mask=is_live, other=num_pages),)
        slots += (slot,)
        slot += BLOCK_T
        page_index += (slot == PAGE_TOKENS).to(gl.int32)
        slot = gl.where(slot == PAGE_TOKENS, 0, slot)
    return pages, slots, (page_index, slot)


@gluon.jit
def _load_tile(
    descriptors,
    table_row_ptr,
    tile_start,
    keys_end,
    kv_head,
    num_pages,
    tiles,
    stage,
    free,
    phase,
    ready,
    PAGE_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Start the loads of a tile of keys or values, once its place is free.

    Pages are looked up a few at a time, the first while the place is awaited. One after another,
    small pages would take long. If they are neighbours, and there is a descriptor for it, one load
    brings all of them.
    """
    descriptor, joined_descriptor = descriptors
    NUM_BOXES: gl.constexpr = BLOCK_N // BLOCK_T
    NUM_PARTS: gl.constexpr = BLOCK_D // BOX_DIM
    shape: gl.constexpr = [tiles.shape[0] * NUM_PARTS * NUM_BOXES, 1, BLOCK_T, 1, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = tiles.reinterpret(descriptor.dtype, shape, descriptor.layout)
    else:
        boxes = tiles._reinterpret(descriptor.dtype, shape, descriptor.layout)
    if joined_descriptor is not None:
        joined_shape: gl.constexpr = [shape[0] // AT_ONCE, AT_ONCE, BLOCK_T, 1, BOX_DIM]
        if HAS_REINTERPRET:
            joined = tiles.reinterpret(descriptor.dtype, joined_shape, joined_descriptor.layout)
        else:
            joined = tiles._reinterpret(descriptor.dtype, joined_shape, joined_descriptor.layout)
    place = (tile_start // PAGE_TOKENS, tile_start % PAGE_TOKENS)
    for first in gl.static_range(0, NUM_BOXES, AT_ONCE):
        pages, slots, place = _look_up(
            place,
            table_row_ptr,
            tile_start,
            keys_end,
            num_pages,
            first,
            PAGE_TOKENS,
            BLOCK_N,
            BLOCK_T,
        )
        if first == 0:
            mbarrier.wait(free, phase)
            mbarrier.expect(ready, BLOCK_N * BLOCK_D * 2)
        if joined_descriptor is None:
            _copy_boxes(
                boxes, descriptor, pages, slots, kv_head, stage, ready, first, NUM_PARTS, NUM_BOXES
            )
        elif are_neighbours(pages, AT_ONCE):
            for part in gl.static_range(NUM_PARTS):
                copy_box(
                    joined_descriptor,
                    [pages[0], 0, kv_head, part * BOX_DIM],
                    ready,
                    joined.index(((stage * NUM_PARTS + part) * NUM_BOXES + first) // AT_ONCE),
                )
        else:
            _copy_boxes(
                boxes, descriptor, pages, slots, kv_head, stage, ready, first, NUM_PARTS, NUM_BOXES
            )


@gluon.jit
def _copy_boxes(
    boxes,
    descriptor,
    pages,
    slots,
    kv_head,
    stage,
    ready,
    FIRST: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    NUM_BOXES: gl.constexpr,
):
    """Start the loads of a tile's AT_ONCE boxes from FIRST on."""
    for box in gl.static_range(FIRST, min(FIRST + AT_ONCE, NUM_BOXES)):
        for part in gl.static_range(NUM_PARTS):
            copy_box(
                descriptor,
                [pages[box - FIRST], slots[box - FIRST], kv_head, part * BOX_DIM],
                ready,
                boxes.index((stage * NUM_PARTS + part) * NUM_BOXES + box),
            )


@gluon.jit
def are_neighbours(pages, NUM_PAGES: gl.constexpr):
    """Whether pages follow one another in the arena. Those that do not exist do not."""
    are = pages[1] == pages[0] + 1
    for i in gl.static_range(2, NUM_PAGES):
        are = are & (pages[i] == pages[0] + i)
    return are


@gluon.jit
def zero_rows(tiles, stage, start, end, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """Zero rows [start, end) of a tile."""
    NUM_BOXES: gl.constexpr = BLOCK_N // SWIZZLE_ROWS
    NUM_PARTS: gl.constexpr = BLOCK_D // BOX_DIM
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    shape: gl.constexpr = [tiles.shape[0] * NUM_PARTS * NUM_BOXES, SWIZZLE_ROWS, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = tiles.reinterpret(tiles.dtype, shape, TILE_LAYOUT)
    else:
        boxes = tiles._reinterpret(tiles.dtype, shape, TILE_LAYOUT)
    rows = gl.arange(0, SWIZZLE_ROWS, gl.SliceLayout(1, layout))
    for box in range(start // SWIZZLE_ROWS, gl.cdiv(end, SWIZZLE_ROWS)):
        is_dead = (box * SWIZZLE_ROWS + rows >= start) & (box * SWIZZLE_ROWS + rows < end)
        for part in gl.static_range(NUM_PARTS):
            place = boxes.index((stage * NUM_PARTS + part) * NUM_BOXES + box)
            values = place.load(layout)
            place.store(gl.where(is_dead[:, None], 0.0, values).to(tiles.dtype))

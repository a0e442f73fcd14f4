# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Loading warps of `hopper.decode`: they keep two tiles of latents full.

A tile has three parts, whose places become free at different times: the halves of the latents, and
the rotary keys. One warp loads them by TMA. For float8 there are four, which also convert: parts
are loaded into the upper half of their place, two parts ahead. Arguments that are needed to find
the runs of a program are passed around as `work`: (first queries and lengths of requests, units
before each, units of a team, first request of each team, number of requests).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from jenga_kernels.triton.attention.hopper.load import (
    BOX_DIM,
    HAS_REINTERPRET,
    TILE_LAYOUT,
    are_neighbours,
    copy_box,
    zero_rows,
)
from jenga_kernels.triton.attention.hopper.work import say
from jenga_kernels.triton.attention.plan import MAX_SPLITS as _MAX_SPLITS
from jenga_kernels.triton.attention.plan import MIN_SPLIT_TILES as _MIN_SPLIT_TILES
from jenga_kernels.triton.latent.tiles import SPECIALIZED_KEYS
from jenga_kernels.triton.lib.tiles import WARPGROUP_ROWS

STORED_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
"""Layout of loaded float8 elements: BOX_DIM elements of each row, then the next BOX_DIM."""

CONVERTED_AT_ONCE = gl.constexpr(8192)
"""Elements converted at once, 64 for each thread of four warps. More take too many registers."""

ROWS = gl.constexpr(WARPGROUP_ROWS)
"""Rows of a program: query tokens of a request, each with all its heads."""

KEYS = gl.constexpr(SPECIALIZED_KEYS // 2)
"""Keys of a tile. A step has two tiles, and a group of warps computes the scores of one."""

HALF_DIM = gl.constexpr(256)
"""Elements of half a latent. A group of warps computes one half of the results."""

NUM_PARTS = gl.constexpr(3)
"""Parts of a tile: left half, right half and rotary keys, in this order."""

PARTS_AHEAD = gl.constexpr(2)
"""Number of parts that are loaded ahead while one is converted.

With three, a load would wait for a place that is freed only after a part that has not been
converted yet.
"""

ROTARY_PART = gl.constexpr(2)

MAX_SPLITS = gl.constexpr(_MAX_SPLITS.value)

MIN_SPLIT_TILES = gl.constexpr(_MIN_SPLIT_TILES.value)


@gluon.jit
def load_latents(
    q_descriptor,
    pages_descriptors,
    page_table_ptr,
    work,
    num_pages,
    stride_table_request,
    room,
    NUM_HEADS: gl.constexpr,
    NUM_MEMBERS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    IS_INVARIANT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    IS_CONVERTED: gl.constexpr,
):
    """Load the queries and all latents of one run after another, as soon as places are free.

    Latents have a descriptor for boxes, and one for the neighbouring pages of a tile or None.
    """
    q, latents, rotary, weights, items, _, barriers = room
    ready, free, landed, _, item_ready, item_free, _ = barriers
    (
        query_starts_ptr,
        seq_lens_ptr,
        unit_starts_ptr,
        units_per_team_ptr,
        first_requests_ptr,
        num_requests,
    ) = work
    team = gl.program_id(0) // NUM_MEMBERS
    first_row = gl.program_id(0) % NUM_MEMBERS * ROWS
    units_per_team = gl.load(units_per_team_ptr)
    unit = team * units_per_team
    team_end = gl.minimum(unit + units_per_team, gl.load(unit_starts_ptr + num_requests))
    request = gl.load(first_requests_ptr + team)
    done = 0
    num_said = 0
    num_landed = 0
    while unit < team_end:
        request, tile_start, tile_end, units_done, partial = _next_run(
            team, unit, team_end, units_per_team, request, work, IS_INVARIANT
        )
        unit += units_done
        query_start = gl.load(query_starts_ptr + request)
        query_len = gl.load(query_starts_ptr + request + 1) - query_start
        seq_len = gl.load(seq_lens_ptr + request)
        # A request without keys also has one unit, which reads no page.
        num_steps = gl.minimum(tile_end, gl.cdiv(seq_len, 2 * KEYS)) - tile_start
        if first_row < query_len * NUM_HEADS:
            table_row_ptr = page_table_ptr + request.to(gl.int64) * stride_table_request
            # The first latents are loaded before the queries, whose place the previous run may
            # still need.
            for step in range(gl.maximum(num_steps, 1)):
                if IS_CONVERTED:
                    if (step == 0) & (num_steps > 0):
                        for part in gl.static_range(PARTS_AHEAD):
                            _ask_for_part(
                                pages_descriptors,
                                table_row_ptr,
                                tile_start,
                                part,
                                seq_len,
                                num_pages,
                                latents,
                                rotary,
                                done & 1,
                                free,
                                landed,
                                PAGE_TOKENS,
                                BLOCK_T,
                            )
                elif step < num_steps:
                    for tile in gl.static_range(2):
                        num_landed += _load_tile(
                            pages_descriptors,
                            table_row_ptr,
                            ((tile_start + step) * 2 + tile) * KEYS,
                            seq_len,
                            num_pages,
                            latents,
                            rotary,
                            tile,
                            (done + step) & 1,
                            num_landed & 1,
                            ready,
                            free,
                            landed,
                            PAGE_TOKENS,
                            BLOCK_T,
                        )
                if step == 0:
                    mbarrier.wait(item_free, num_said & 1 ^ 1)
                    numbers = (
                        request,
                        tile_start,
                        num_steps,
                        query_start,
                        query_len,
                        seq_len,
                        partial,
                    )
                    say(items, 0, numbers, 4 if IS_CONVERTED else 1)
                    _load_queries(
                        q_descriptor,
                        query_start + first_row // NUM_HEADS,
                        first_row % NUM_HEADS,
                        q,
                        weights,
                        item_ready,
                    )
                if IS_CONVERTED:  # noqa: SIM102 - known when it is compiled
                    if step < num_steps:
                        _convert_step(
                            pages_descriptors,
                            table_row_ptr,
                            tile_start + step,
                            step + 1 < num_steps,
                            seq_len,
                            num_pages,
                            latents,
                            rotary,
                            (done + step) & 1,
                            ready,
                            free,
                            landed,
                            PAGE_TOKENS,
                            BLOCK_T,
                        )
            done += num_steps
            num_said += 1
    mbarrier.wait(item_free, num_said & 1 ^ 1)
    say(items, 0, (-1,), 4 if IS_CONVERTED else 1)
    mbarrier.arrive(item_ready, count=1)


@gluon.jit
def _next_run(team, unit, team_end, units_per_team, request, work, IS_INVARIANT: gl.constexpr):
    """Find the next run of a team from `unit` on, as `attention.plan.next_run` does for all heads.

    Returns:
        The request, the steps [start, end) of its keys, their number of units, and the index of
        their partial result, or -1 if they are all units of the request.
    """
    _, seq_lens_ptr, unit_starts_ptr, _, _, _ = work
    units_end = gl.load(unit_starts_ptr + request + 1)
    while unit >= units_end:
        request += 1
        units_end = gl.load(unit_starts_ptr + request + 1)
    units_before = gl.load(unit_starts_ptr + request)
    num_units = units_end - units_before
    in_request = unit - units_before
    if IS_INVARIANT:
        num_tiles = gl.maximum(gl.cdiv(gl.load(seq_lens_ptr + request), 2 * KEYS), 1)
        num_splits = gl.minimum(MAX_SPLITS, gl.cdiv(num_tiles, MIN_SPLIT_TILES))
        split_tiles = gl.cdiv(num_tiles, num_splits)
        units_done = 1
        tile_start = in_request * split_tiles
        tile_end = gl.minimum(num_tiles, tile_start + split_tiles)
        partial = request * MAX_SPLITS + in_request
    else:
        units_done = gl.minimum(num_units - in_request, team_end - unit)
        tile_start = in_request
        tile_end = in_request + units_done
        partial = team + gl.minimum(request, (unit - in_request) // units_per_team)
    partial = gl.where(units_done == num_units, -1, partial)
    return request, tile_start, tile_end, units_done, partial


@gluon.jit
def _load_queries(descriptor, token, head, q, weights, ready):
    """Start loads of a program's queries. Their rotary parts go to the place of weights."""
    PARTS: gl.constexpr = HALF_DIM // BOX_DIM
    TOKENS: gl.constexpr = descriptor.block_type.shape[0]
    HEADS: gl.constexpr = descriptor.block_type.shape[1]
    shape: gl.constexpr = [2 * PARTS, TOKENS, HEADS, BOX_DIM]
    rotary_shape: gl.constexpr = [2, TOKENS, HEADS, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = q.reinterpret(q.dtype, shape, descriptor.layout)
        rotary_boxes = weights.reinterpret(q.dtype, rotary_shape, descriptor.layout)
    else:
        boxes = q._reinterpret(q.dtype, shape, descriptor.layout)
        rotary_boxes = weights._reinterpret(q.dtype, rotary_shape, descriptor.layout)
    mbarrier.expect(ready, ROWS * (2 * HALF_DIM + BOX_DIM) * 2)
    copy_box(descriptor, [token, head, 2 * HALF_DIM], ready, rotary_boxes.index(1))
    for part in gl.static_range(2 * PARTS):
        copy_box(descriptor, [token, head, part * BOX_DIM], ready, boxes.index(part))


@gluon.jit
def _load_tile(
    descriptors,
    table_row_ptr,
    first_key,
    seq_len,
    num_pages,
    latents,
    rotary,
    tile: gl.constexpr,
    phase,
    landed_phase,
    ready,
    free,
    landed,
    PAGE_TOKENS: gl.constexpr,
    BLOCK_T: gl.constexpr,
):
    """Start loads of a tile's parts, each as its place is free; 1 if it ends within a box, else 0.

    Boxes from seq_len on get a page that does not exist, which fills them with 0.
    """
    NUM_BOXES: gl.constexpr = KEYS // BLOCK_T
    # Pages are looked up before the waits for places.
    pages = ()
    slots = ()
    page_index = first_key // PAGE_TOKENS
    slot = first_key % PAGE_TOKENS
    for box in gl.static_range(NUM_BOXES):
        is_live = first_key + box * BLOCK_T < seq_len
        pages += (gl.load(table_row_ptr + page_index, mask=is_live, other=num_pages),)
        slots += (slot,)
        slot += BLOCK_T
        page_index += (slot == PAGE_TOKENS).to(gl.int32)
        slot = gl.where(slot == PAGE_TOKENS, 0, slot)
    # A dead slot may hold NaN, and 0 * NaN is NaN. So latents are zeroed, not only their weights.
    end_live = gl.maximum(gl.minimum(seq_len - first_key, KEYS), 0)
    end_copied = gl.cdiv(end_live, BLOCK_T) * BLOCK_T
    is_ragged = end_live < end_copied

    place: gl.constexpr = tile * NUM_PARTS + ROTARY_PART
    mbarrier.wait(free.index(place), phase ^ 1)
    mbarrier.expect(ready.index(place), KEYS * BOX_DIM * 2)
    _copy_part(
        descriptors, pages, slots, 2 * HALF_DIM, rotary, tile, ready.index(place), BLOCK_T, 1
    )
    for half in gl.static_range(2):
        mbarrier.wait(free.index(tile * NUM_PARTS + half), phase ^ 1)
        lands_at = ready.index(tile * NUM_PARTS + half)
        if is_ragged:
            lands_at = landed.index(half)  # not yet ready
        mbarrier.expect(lands_at, KEYS * HALF_DIM * 2)
        _copy_part(
            descriptors,
            pages,
            slots,
            half * HALF_DIM,
            latents,
            tile * 2 + half,
            lands_at,
            BLOCK_T,
            HALF_DIM // BOX_DIM,
        )
    if is_ragged:
        for half in gl.static_range(2):
            mbarrier.wait(landed.index(half), landed_phase)
            zero_rows(latents, tile * 2 + half, end_live, end_copied, KEYS, HALF_DIM)
            fence_async_shared()
            mbarrier.arrive(ready.index(tile * NUM_PARTS + half), count=1)
    return is_ragged.to(gl.int32)


@gluon.jit
def _copy_part(
    descriptors,
    pages,
    slots,
    first_dim: gl.constexpr,
    places,
    place: gl.constexpr,
    ready,
    BLOCK_T: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Start loads of PARTS * BOX_DIM elements of a tile's rows, from first_dim on."""
    descriptor, joined_descriptor = descriptors
    NUM_BOXES: gl.constexpr = KEYS // BLOCK_T
    shape: gl.constexpr = [places.shape[0] * PARTS * NUM_BOXES, 1, BLOCK_T, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = places.reinterpret(places.dtype, shape, descriptor.layout)
    else:
        boxes = places._reinterpret(places.dtype, shape, descriptor.layout)
    if joined_descriptor is None:
        _copy_boxes(descriptor, pages, slots, first_dim, boxes, place, ready, NUM_BOXES, PARTS)
    elif are_neighbours(pages, NUM_BOXES):
        _copy_pages(
            joined_descriptor, pages[0], first_dim, places, place, ready, places.shape[0], PARTS
        )
    else:
        _copy_boxes(descriptor, pages, slots, first_dim, boxes, place, ready, NUM_BOXES, PARTS)


@gluon.jit
def _copy_boxes(
    descriptor,
    pages,
    slots,
    first_dim: gl.constexpr,
    boxes,
    place: gl.constexpr,
    ready,
    NUM_BOXES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Start loads of a tile box by box."""
    for part in gl.static_range(PARTS):
        for box in gl.static_range(NUM_BOXES):
            copy_box(
                descriptor,
                [pages[box], slots[box], first_dim + part * BOX_DIM],
                ready,
                boxes.index((place * PARTS + part) * NUM_BOXES + box),
            )


@gluon.jit
def _copy_pages(
    descriptor,
    first_page,
    first_dim: gl.constexpr,
    places,
    place: gl.constexpr,
    ready,
    NUM_PLACES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Start loads of a tile whose pages are neighbours, all of them at once."""
    PAGES: gl.constexpr = descriptor.block_type.shape[0]
    PAGE_TOKENS: gl.constexpr = descriptor.block_type.shape[1]
    shape: gl.constexpr = [NUM_PLACES * PARTS, PAGES, PAGE_TOKENS, BOX_DIM]
    if HAS_REINTERPRET:
        tiles = places.reinterpret(descriptor.dtype, shape, descriptor.layout)
    else:
        tiles = places._reinterpret(descriptor.dtype, shape, descriptor.layout)
    for part in gl.static_range(PARTS):
        copy_box(
            descriptor,
            [first_page, 0, first_dim + part * BOX_DIM],
            ready,
            tiles.index(place * PARTS + part),
        )


@gluon.jit
def _ask_for_part(
    descriptors,
    table_row_ptr,
    step,
    part: gl.constexpr,
    seq_len,
    num_pages,
    latents,
    rotary,
    phase,
    free,
    landed,
    PAGE_TOKENS: gl.constexpr,
    BLOCK_T: gl.constexpr,
):
    """Start loads of a stored part into the upper half of its place, once that is free."""
    # The parts of a step are in the order in which they are needed: rotary keys first.
    descriptor, joined_descriptor = descriptors
    tile: gl.constexpr = part // NUM_PARTS
    which: gl.constexpr = (part + ROTARY_PART) % NUM_PARTS
    place: gl.constexpr = tile * NUM_PARTS + which
    NUM_BOXES: gl.constexpr = KEYS // BLOCK_T
    BLOCKS: gl.constexpr = 1 if which == ROTARY_PART else HALF_DIM // BOX_DIM
    places = latents
    if which == ROTARY_PART:
        places = rotary
    in_places: gl.constexpr = tile if which == ROTARY_PART else tile * 2 + which
    first_dim: gl.constexpr = 2 * HALF_DIM if which == ROTARY_PART else which * HALF_DIM
    shape: gl.constexpr = [places.shape[0] * 2 * BLOCKS * NUM_BOXES, 1, BLOCK_T, BOX_DIM]
    if HAS_REINTERPRET:
        boxes = places.reinterpret(descriptor.dtype, shape, descriptor.layout)
    else:
        boxes = places._reinterpret(descriptor.dtype, shape, descriptor.layout)
    first_key = (step * 2 + tile) * KEYS
    pages = ()
    page_index = first_key // PAGE_TOKENS
    first_slot = first_key % PAGE_TOKENS
    slot = first_slot
    for box in gl.static_range(NUM_BOXES):
        is_live = first_key + box * BLOCK_T < seq_len
        pages += (gl.load(table_row_ptr + page_index, mask=is_live, other=num_pages),)
        slot += BLOCK_T
        page_index += (slot == PAGE_TOKENS).to(gl.int32)
        slot = gl.where(slot == PAGE_TOKENS, 0, slot)
    mbarrier.wait(free.index(place), phase ^ 1)
    mbarrier.expect(landed.index(place), KEYS * BLOCKS * BOX_DIM)
    upper: gl.constexpr = in_places * 2 + 1
    lands_at = landed.index(place)
    if joined_descriptor is None:
        _copy_stored(
            descriptor, pages, first_slot, first_dim, boxes, upper, lands_at, PAGE_TOKENS, BLOCKS
        )
    elif are_neighbours(pages, NUM_BOXES):
        _copy_pages(
            joined_descriptor,
            pages[0],
            first_dim,
            places,
            upper,
            lands_at,
            places.shape[0] * 2,
            BLOCKS,
        )
    else:
        _copy_stored(
            descriptor, pages, first_slot, first_dim, boxes, upper, lands_at, PAGE_TOKENS, BLOCKS
        )


@gluon.jit
def _copy_stored(
    descriptor,
    pages,
    slot,
    first_dim: gl.constexpr,
    boxes,
    place: gl.constexpr,
    landed,
    PAGE_TOKENS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Start loads of a stored part box by box."""
    BLOCK_T: gl.constexpr = descriptor.block_type.shape[1]
    NUM_BOXES: gl.constexpr = KEYS // BLOCK_T
    for box in gl.static_range(NUM_BOXES):
        for block in gl.static_range(BLOCKS):
            copy_box(
                descriptor,
                [pages[box], slot, first_dim + block * BOX_DIM],
                landed,
                boxes.index((place * BLOCKS + block) * NUM_BOXES + box),
            )
        slot += BLOCK_T
        slot = gl.where(slot == PAGE_TOKENS, 0, slot)


@gluon.jit
def _convert_step(
    descriptors,
    table_row_ptr,
    step,
    has_next,
    seq_len,
    num_pages,
    latents,
    rotary,
    phase,
    ready,
    free,
    landed,
    PAGE_TOKENS: gl.constexpr,
    BLOCK_T: gl.constexpr,
):
    """Convert the parts of a step once loaded, and start loads of those PARTS_AHEAD later."""
    for part in gl.static_range(2 * NUM_PARTS):
        if part + PARTS_AHEAD < 2 * NUM_PARTS:
            _ask_for_part(
                descriptors,
                table_row_ptr,
                step,
                part + PARTS_AHEAD,
                seq_len,
                num_pages,
                latents,
                rotary,
                phase,
                free,
                landed,
                PAGE_TOKENS,
                BLOCK_T,
            )
        elif has_next:
            _ask_for_part(
                descriptors,
                table_row_ptr,
                step + 1,
                part + PARTS_AHEAD - 2 * NUM_PARTS,
                seq_len,
                num_pages,
                latents,
                rotary,
                phase ^ 1,
                free,
                landed,
                PAGE_TOKENS,
                BLOCK_T,
            )
        _convert_part(
            latents, rotary, step, part, seq_len, phase, ready, landed, descriptors[0].dtype
        )


@gluon.jit
def _convert_part(
    latents,
    rotary,
    step,
    part: gl.constexpr,
    seq_len,
    phase,
    ready,
    landed,
    stored: gl.constexpr,
):
    """Convert a part in the upper half of its place, with zeros from seq_len on.

    They are zeros because a dead slot may hold NaN, and 0 * NaN is NaN.
    """
    tile: gl.constexpr = part // NUM_PARTS
    which: gl.constexpr = (part + ROTARY_PART) % NUM_PARTS
    place: gl.constexpr = tile * NUM_PARTS + which
    end_live = seq_len - (step * 2 + tile) * KEYS
    mbarrier.wait(landed.index(place), phase)
    if which == ROTARY_PART:
        _convert_rows(rotary, tile, 0, end_live, stored, KEYS, BOX_DIM)
    else:
        _convert_rows(latents, tile * 2 + which, 0, end_live, stored, KEYS, HALF_DIM)
    fence_async_shared()
    mbarrier.arrive(ready.index(place), count=1)


@gluon.jit
def _convert_rows(
    tiles,
    stage,
    first_live,
    end_live,
    stored: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Convert elements in the upper half of a place, block by block, with four warps.

    Rows before first_live and from end_live on are zeroed. Blocks are stored in an order that
    overwrites no elements that have not been read.
    """
    WIDTH: gl.constexpr = min(BLOCK_D, CONVERTED_AT_ONCE // BLOCK_N)
    BLOCKS: gl.constexpr = BLOCK_D // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    landed_shape: gl.constexpr = [tiles.shape[0] * 2 * BLOCKS, BLOCK_N, WIDTH]
    shape: gl.constexpr = [tiles.shape[0] * BLOCKS, BLOCK_N, WIDTH]
    if HAS_REINTERPRET:
        in_pages = tiles.reinterpret(stored, landed_shape, STORED_LAYOUT)
        blocks = tiles.reinterpret(tiles.dtype, shape, TILE_LAYOUT)
    else:
        in_pages = tiles._reinterpret(stored, landed_shape, STORED_LAYOUT)
        blocks = tiles._reinterpret(tiles.dtype, shape, TILE_LAYOUT)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    for block in gl.static_range(BLOCKS):
        values = in_pages.index((stage * 2 + 1) * BLOCKS + block).load(layout)
        # Float32 comes between, because two at once are converted from it to the result's type.
        values = values.to(gl.float32).to(tiles.dtype)
        if (first_live > 0) | (end_live < BLOCK_N):
            is_live = (rows >= first_live) & (rows < end_live)
            values = gl.where(is_live[:, None], values, 0.0).to(tiles.dtype)
        blocks.index(stage * BLOCKS + block).store(values)

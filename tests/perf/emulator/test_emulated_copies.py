"""The emulated GPU where the copy engine brings what other warps than its own compute with."""

import pytest
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

from jenga_kernels.triton.attention.hopper.load import copy_box as async_load
from perf.emulator.driver import EmulatedGpu
from perf.emulator.errors import EmulationError
from tests.emulation import forget_the_interpreter


@pytest.fixture(autouse=True)
def emulated_gpu(monkeypatch):
    forget_the_interpreter(monkeypatch)
    monkeypatch.setattr(driver, "_active", EmulatedGpu(90))


def descriptor(tensor, *box, swizzle_bytes=128, padding="zero"):
    layout = gl.NVMMASharedLayout(swizzle_bytes, 8 * tensor.element_size(), len(box))
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), list(box), layout, padding
    )


@gluon.jit
def _box_kernel(out_ptr, boxes, row, column, WAITS: gl.constexpr, BYTES: gl.constexpr):
    ROWS: gl.constexpr = boxes.block_shape[0]
    COLUMNS: gl.constexpr = boxes.block_shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(boxes.dtype, boxes.block_shape, boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, BYTES)
    async_load(boxes, [row, column], ready, tile)
    if WAITS:
        mbarrier.wait(ready, 0)
    values = tile.load(layout)
    mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], values)


def matrix(rows, columns, dtype=torch.bfloat16):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def copy_box(tensor, row, column, *, waits=True, num_bytes=32 * 64 * 2, **layout):
    out = torch.full((32, 64), 7.0, dtype=tensor.dtype)
    boxes = descriptor(tensor, 32, 64, **layout)
    _box_kernel[(1,)](out, boxes, row, column, WAITS=waits, BYTES=num_bytes, num_warps=4)
    return out


@pytest.mark.parametrize("swizzle_bytes", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("row", "column"), [(0, 0), (8, 64), (-5, 0), (60, -24), (3, 90), (200, 0), (9, 13)]
)
def test_a_box_of_a_tensor_is_copied_and_is_zero_outside(row, column, swizzle_bytes):
    tensor = matrix(64, 104)
    padded = torch.zeros(400, 400, dtype=tensor.dtype)
    padded[100:164, 100:204] = tensor
    got = copy_box(tensor, row, column, swizzle_bytes=swizzle_bytes)
    assert torch.equal(got, padded[100 + row :, 100 + column :][:32, :64])


def test_what_lies_outside_may_be_nan():
    got = copy_box(matrix(64, 104), 50, 0, padding="nan")
    assert got.isnan().sum() == 18 * 64


def test_a_box_that_nobody_waited_for_may_not_be_read():
    with pytest.raises(EmulationError, match="load what a copy brings that nobody waited for"):
        copy_box(matrix(64, 64), 0, 0, waits=False)


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(4080, "copies bring more than is expected"), (4112, "deadlock.*4112 bytes, 4096 under way")],
)
def test_a_barrier_expects_as_many_bytes_as_copies_bring(num_bytes, message):
    with pytest.raises(EmulationError, match=message):
        copy_box(matrix(64, 64), 0, 0, num_bytes=num_bytes)


@gluon.jit
def _leave_kernel(boxes):
    tile = gl.allocate_shared_memory(boxes.dtype, boxes.block_shape, boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 4096)
    async_load(boxes, [0, 0], ready, tile)


def test_a_program_may_not_end_before_what_it_copies_has_landed():
    with pytest.raises(EmulationError, match="ends while copies are under way"):
        _leave_kernel[(1,)](descriptor(matrix(64, 64), 32, 64), num_warps=4)


def test_a_tensor_map_is_checked():
    tensor = matrix(64, 104)
    boxes = descriptor(tensor, 32, 64)
    for name, value, message in (
        ("base", tensor.view(-1)[1:], "a base that is a multiple of 16 bytes"),
        ("strides", [100, 1], "strides that are multiples of 16 bytes"),
        ("strides", [104, 2], "neighbours in its innermost dimension"),
    ):
        changed = descriptor(tensor, 32, 64)
        setattr(changed, name, value)
        with pytest.raises(EmulationError, match=message):
            _box_kernel[(1,)](tensor, changed, 0, 0, WAITS=True, BYTES=4096, num_warps=4)
    boxes.shape = [65, 104]
    with pytest.raises(EmulationError, match="in no tensor"):
        _box_kernel[(1,)](tensor.clone(), boxes, 40, 0, WAITS=True, BYTES=4096, num_warps=4)


def _pair(out_ptr, boxes, row):
    values = boxes.load([row, 0]) + boxes.load([row + 32, 0])
    places = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + places, values)


def test_descriptors_of_kernels_that_are_not_in_gluon_are_read_too():
    tensor, out = matrix(70, 64), torch.zeros(32, 64, dtype=torch.bfloat16)
    boxes = PlainDescriptor(tensor, [70, 64], [64, 1], [32, 64])
    JITFunction(_pair)[(1,)](out, boxes, 8)
    padded = torch.cat([tensor, torch.zeros_like(tensor)])
    assert torch.equal(out, padded[8:40] + padded[40:72])


TILES = gl.constexpr(5)
STAGES = gl.constexpr(2)


@gluon.jit
def _produce(boxes, tiles, ready, free, WAITS_FOR_FREE: gl.constexpr):
    for tile in range(TILES):
        stage = tile % STAGES
        if WAITS_FOR_FREE:
            mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 32 * 64 * 2)
        async_load(boxes, [tile * 32, 0], ready.index(stage), tiles.index(stage))


@gluon.jit
def _consume(
    out_ptr,
    tiles,
    ready,
    free,
    WAITS_FOR_READY: gl.constexpr,
    FREES_EARLY: gl.constexpr,
    NUM_FREED: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    for tile in range(TILES):
        stage = tile % STAGES
        if WAITS_FOR_READY:
            mbarrier.wait(ready.index(stage), tile // STAGES & 1)
        if FREES_EARLY:
            mbarrier.arrive(free.index(stage), count=1)
        values = tiles.index(stage).load(layout)
        if not FREES_EARLY and tile < NUM_FREED:
            mbarrier.arrive(free.index(stage), count=1)
        gl.store(out_ptr + (tile * 32 + rows[:, None]) * 64 + columns[None, :], values)


@gluon.jit
def _ring_kernel(
    out_ptr,
    boxes,
    WAITS_FOR_FREE: gl.constexpr,
    WAITS_FOR_READY: gl.constexpr,
    FREES_EARLY: gl.constexpr,
    NUM_FREED: gl.constexpr,
):
    tiles = gl.allocate_shared_memory(boxes.dtype, [STAGES, 32, 64], boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (out_ptr, tiles, ready, free, WAITS_FOR_READY, FREES_EARLY, NUM_FREED),
            ),
            (_produce, (boxes, tiles, ready, free, WAITS_FOR_FREE)),
        ],
        [1],
        [24],
    )


def pass_tiles(num_programs=1, **changes):
    tensor = matrix(160, 64)
    out = torch.zeros_like(tensor)
    flags = {"WAITS_FOR_FREE": True, "WAITS_FOR_READY": True, "FREES_EARLY": False}
    flags |= {"NUM_FREED": 5} | changes
    _ring_kernel[(num_programs,)](out, descriptor(tensor, 32, 64), **flags, num_warps=4)
    assert torch.equal(out, tensor)


def test_a_warp_passes_tiles_to_others_through_two_buffers():
    pass_tiles()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WAITS_FOR_FREE": False}, "1 arrivals more|store where others load"),
        ({"WAITS_FOR_READY": False}, "load what a copy brings that nobody waited for|deadlock"),
        ({"FREES_EARLY": True}, "store where others load|load what a copy brings"),
        ({"NUM_FREED": 2}, r"deadlock.*mbarrier.try_wait.*lacks 1 of 1 arrivals and 0 bytes"),
    ],
)
def test_who_passes_tiles_waits_for_what_others_do(changes, message):
    with pytest.raises(EmulationError, match=message):
        pass_tiles(**changes)


@gluon.jit
def _fill(ones, ready, HAS_FENCE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    ones.store(gl.full([64, 64], 1, gl.bfloat16, layout))
    if HAS_FENCE:
        fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _multiply(out_ptr, ones, ready, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    if WAITS:
        mbarrier.wait(ready, 0)
    total = warpgroup_mma(ones, ones, gl.full([64, 64], 0, gl.float32, layout), use_acc=False)
    gl.store(out_ptr + rows[:, None] * 64 + columns[None, :], total)


@gluon.jit
def _product_kernel(out_ptr, HAS_FENCE: gl.constexpr, WAITS: gl.constexpr):
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ones = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize(
        [(_multiply, (out_ptr, ones, ready, WAITS)), (_fill, (ones, ready, HAS_FENCE))], [1], [24]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((True, True), None),
        ((False, True), "since the last proxy fence"),
        ((True, False), "store where others load"),
    ],
)
def test_tensor_cores_see_what_another_warp_stored_behind_its_fence(flags, message):
    out = torch.zeros(64, 64)

    def launch():
        _product_kernel[(2,)](out, HAS_FENCE=flags[0], WAITS=flags[1], num_warps=4)

    if message:
        with pytest.raises(EmulationError, match=message):
            launch()
        return
    launch()
    assert (out == 64).all()

"""The emulated GPU where warps of a program go ways of their own: copies, barriers, registers."""

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from perf.emulator.driver import EmulatedGpu
from perf.emulator.errors import EmulationError
from perf.emulator.launches import EmulatedKernel

THREADS = 256
GROUP = 128


@pytest.fixture(autouse=True)
def emulated_gpu(monkeypatch):
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
    tma.async_copy_global_to_shared(boxes, [row, column], ready, tile)
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


TILES = gl.constexpr(5)
STAGES = gl.constexpr(2)


@gluon.jit
def _produce(boxes, tiles, ready, free, WAITS_FOR_FREE: gl.constexpr):
    for tile in range(TILES):
        stage = tile % STAGES
        if WAITS_FOR_FREE:
            mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 32 * 64 * 2)
        tma.async_copy_global_to_shared(
            boxes, [tile * 32, 0], ready.index(stage), tiles.index(stage)
        )


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


HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 256
.maxnreg 128
{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r7, %tid.x;
    shr.u32 %r6, %r7, 5; // the warp
    mul.wide.u32 %rd3, %r7, 4;
    add.s64 %rd4, %rd1, %rd3;
    shl.b32 %r1, %r7, 2;
    setp.lt.u32 %p1, %r7, 128; // the first group
"""


def run(body):
    """What a kernel of this body stores, u32 of each thread."""
    result = torch.zeros(THREADS, dtype=torch.int32)
    EmulatedKernel(HEAD + body + "\n    ret;\n}\n").launch((1, 1, 1), [result], 2048)
    return result.numpy().view(np.uint32)


# Warps of the first group exchange values, those of the second elsewhere in the code.
EXCHANGE = """
    st.shared.b32 [%r1], %r7;
    @!%p1 bra $second;
    {first}
    xor.b32 %r2, %r1, {distance};
    ld.shared.b32 %r0, [%r2];
    bra.uni $end;
$second:
    {second}
    xor.b32 %r2, %r1, {distance};
    ld.shared.b32 %r0, [%r2];
$end:
    st.global.b32 [%rd4], %r0;"""


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("bar.sync 1, 128;", "bar.sync 2, 128;", 128),
        ("barrier.sync 1;", "barrier.sync 1;", 512),
        ("bar.sync 3, 256;", "bar.sync 3, 256;", 512),
    ],
)
def test_warps_meet_at_a_barrier_wherever_they_are(first, second, distance):
    got = run(EXCHANGE.format(first=first, second=second, distance=distance))
    assert (got == np.arange(THREADS) ^ (distance // 4)).all()


@pytest.mark.parametrize(
    ("first", "second", "distance", "message"),
    [
        ("bar.sync 1, 128;", "bar.sync 2, 128;", 512, "load what others stored"),
        ("bar.sync 1, 128;", "bar.warp.sync -1;", 128, "load what others stored"),
        ("bar.sync 1, 160;", "bar.sync 2, 128;", 128, "deadlock.*barrier 1 lacks 1 warps"),
        ("barrier.sync 1;", "bar.sync 1, 128;", 128, "barrier 1 of 128 threads, and of 256"),
        ("barrier.sync 1;", "bar.sync 2, 128;", 128, "deadlock.*barrier 1 lacks 4 warps"),
    ],
)
def test_warps_that_do_not_meet_race_or_wait_forever(first, second, distance, message):
    with pytest.raises(EmulationError, match=message):
        run(EXCHANGE.format(first=first, second=second, distance=distance))


def test_warps_may_arrive_without_waiting():
    body = EXCHANGE.format(first="bar.arrive 1, 256;", second="bar.sync 1, 256;", distance=512)
    quick = body.replace("ld.shared.b32 %r0, [%r2];\n    bra", "mov.b32 %r0, %r7;\n    bra")
    assert (run(quick) == np.arange(THREADS) % 128).all()
    with pytest.raises(EmulationError, match="load what others stored"):
        run(body)


def test_a_store_in_a_tensor_is_seen_behind_a_barrier_of_both_warps():
    body = """
    st.global.b32 [%rd4], %r7;
    @!%p1 bra $second;
    {}
    ld.global.b32 %r0, [%rd4 + 128];
    bra.uni $end;
$second:
    bar.sync 2, 128;
$end:"""
    with pytest.raises(EmulationError, match="of two warps access a place of a tensor"):
        run(body.format("bar.sync 1, 128;"))
    both = body.replace("bar.sync 2, 128;", "bar.sync 1, 256;")
    run(both.format("bar.sync 1, 256;"))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("inc.sync.aligned.u32 208", "dec.sync.aligned.u32 48", None),
        ("inc.sync.aligned.u32 216", "dec.sync.aligned.u32 48", "33792 of 32768"),
        ("dec.sync.aligned.u32 136", "dec.sync.aligned.u32 48", r"136 registers, of \[128"),
        ("inc.sync.aligned.u32 100", "dec.sync.aligned.u32 48", "100 registers"),
    ],
)
def test_groups_of_warps_share_the_registers_of_the_launch(first, second, message):
    body = EXCHANGE.format(
        first=f"setmaxnreg.{first}; bar.sync 1, 128;",
        second=f"setmaxnreg.{second}; bar.sync 2, 128;",
        distance=128,
    )
    if message is None:
        run(body)
        return
    with pytest.raises(EmulationError, match=message):
        run(body)


def test_one_thread_of_a_warp_is_elected_and_branches_have_tables():
    body = """
    elect.sync %r0|%p2, -1;
    selp.b32 %r2, 1, 0, %p2;
    and.b32 %r3, %r6, 1;
$table: .branchtargets $even, $odd;
    brx.idx %r3, $table;
$odd:
    add.s32 %r2, %r2, 10;
$even:
    bar.sync 1, 256;
    st.global.b32 [%rd4], %r2;"""
    threads = np.arange(THREADS)
    assert (run(body) == (threads % 32 == 0) + 10 * (threads // 32 % 2)).all()


# One thread makes a barrier at 1024, each of the second group arrives, the first group waits.
SIGNAL = """
    setp.eq.u32 %p2, %r7, 0;
    @%p2 mbarrier.init.shared::cta.b64 [global_smem+1024], 128;
    {made}
    mov.b32 %r5, {parity};
    @!%p1 bra $second;
    {{
        .reg .pred complete;
        waitLoop:
        mbarrier.try_wait.parity.shared::cta.b64 complete, [global_smem+1024], %r5;
        @!complete bra.uni {again};
        done:
    }}
    ld.shared.b32 %r0, [%r1 + 512];
    st.global.b32 [%rd4], %r0;
    bra.uni $end;
$second:
    st.shared.b32 [%r1], %r7;
    {arrive}
$end:"""
SIGNAL_PARTS = {
    "made": "barrier.sync 1;",
    "parity": "0",
    "arrive": "mbarrier.arrive.shared::cta.b64 _, [global_smem+1024];",
    "again": "waitLoop",
}


def signal(**parts):
    return run(SIGNAL.format(**(SIGNAL_PARTS | parts)))


def test_who_waits_for_a_barrier_sees_what_those_stored_who_arrived():
    assert (signal()[:GROUP] == np.arange(GROUP) + GROUP).all()


ARRIVE = SIGNAL_PARTS["arrive"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"made": ""}, "an mbarrier at 1024 that another warp makes|no mbarrier is at 1024"),
        ({"parity": "1"}, "store where others load"),
        ({"again": "done"}, "store where others load"),
        ({"again": "waitLoup"}, "a branch to"),
        ({"arrive": "@%p2 " + ARRIVE}, "deadlock.*lacks 128 of 128 arrivals"),
        ({"arrive": 2 * ARRIVE}, "deadlock.*in phase 2"),
        (
            {"arrive": "mbarrier.arrive.shared::cta.b64 _, [global_smem+1024], 5;"},
            "32 arrivals more|160 arrivals more",
        ),
        ({"arrive": "st.shared.b32 [global_smem+1024], %r5;" + ARRIVE}, "store over an mbarrier"),
        (
            {"made": "@%p2 mbarrier.inval.shared::cta.b64 [global_smem+1024]; barrier.sync 1;"},
            "no mbarrier is at 1024",
        ),
    ],
)
def test_a_barrier_in_shared_memory_is_used_as_it_was_made(parts, message):
    with pytest.raises(EmulationError, match=message):
        signal(**parts)

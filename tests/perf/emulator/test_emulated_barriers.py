"""The emulated GPU where warps of a program wait for each other in other ways than all at once."""

import numpy as np
import pytest
import torch

from perf.emulator.errors import EmulationError
from perf.emulator.launches import EmulatedKernel

THREADS = 256
GROUP = 128

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

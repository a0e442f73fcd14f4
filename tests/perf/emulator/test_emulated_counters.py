"""What an emulated GPU counts of memory."""

import numpy as np
import pytest
import torch

from perf.emulator.launches import EmulatedKernel
from perf.emulator.memory.counters import Counters, Traffic, Turns

LANES = np.arange(64)
WARPS = LANES // 32


def traffic(addresses, num_bytes):
    counted = Traffic()
    counted.note(np.asarray(addresses, dtype=np.int64), num_bytes, WARPS[: len(addresses)])
    return counted


@pytest.mark.parametrize(
    ("stride", "sectors", "asked_bytes"), [(4, 8, 256), (8, 16, 256), (32, 64, 256), (0, 2, 8)]
)
def test_sectors_are_counted_for_each_warp(stride, sectors, asked_bytes):
    counted = traffic(4096 + stride * LANES, 4)
    assert (counted.requests, counted.sectors, counted.asked_bytes) == (2, sectors, asked_bytes)


def test_a_sector_that_is_asked_for_again_comes_from_outside_once():
    counted = traffic(4 * LANES, 4)
    counted.note(4 * LANES[:32], 4, WARPS[:32])
    assert counted.moved_bytes == 256 + 128
    assert counted.distinct_bytes == 256


@pytest.mark.parametrize(
    ("stride", "num_bytes", "taken", "needed"),
    [
        (4, 4, 2, 2),
        (8, 4, 4, 2),
        (128, 4, 64, 2),
        (0, 4, 2, 2),
        (2, 2, 2, 2),
        (16, 16, 8, 8),
        (32, 16, 16, 8),
        (8, 8, 4, 4),
    ],
)
def test_banks_serve_one_word_a_turn(stride, num_bytes, taken, needed):
    counted = Turns()
    counted.note(stride * LANES, num_bytes, LANES)
    assert (counted.taken, counted.needed) == (taken, needed)


def test_rows_of_a_matrix_are_served_by_quarters_of_a_warp():
    counted = Turns()
    # Eight rows of 16 bytes, 128 bytes apart: all in the same four banks.
    counted.note(128 * LANES[:8], 16, LANES[:8])
    assert (counted.taken, counted.needed) == (8, 1)


COPY = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry copy(
    .param .u64 .ptr .global .align 1 copy_param_0,
    .param .u64 .ptr .global .align 1 copy_param_1
)
.reqntid 64
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [copy_param_0];
    ld.param.b64 %rd2, [copy_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    shl.b32 %r2, %r1, 2;
    ld.global.b32 %r3, [%rd5];
    st.shared.b32 [%r2], %r3;
    ld.shared.b32 %r4, [%r2];
    st.global.b32 [%rd4], %r4;
    ret;
}
"""


def test_a_launch_counts_what_it_asks_for():
    counters = Counters()
    target, source = torch.zeros(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
    EmulatedKernel(COPY).launch((1, 1, 1), [target, source], 256, counters)
    assert torch.equal(target, source)
    assert (counters.loads.moved_bytes, counters.stores.moved_bytes) == (256, 256)
    assert (counters.shared.taken, counters.shared.needed) == (4, 4)
    assert counters.instructions == 2 * 11

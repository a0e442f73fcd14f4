"""Launches of the emulated GPU that begin before the one ahead of them has ended."""

import pytest
import torch

from perf.emulator.dependence import Dependence
from perf.emulator.errors import EmulationError
from perf.emulator.launches import EmulatedKernel

THREADS = 32

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid 32
{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r7, %tid.x;
    mov.u32 %r8, %ctaid.x;
    mad.lo.u32 %r6, %r8, 32, %r7;
    mul.wide.u32 %rd3, %r6, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    setp.eq.u32 %p1, %r8, 0; // the first program
"""

WAIT = "griddepcontrol.wait;"
LOAD = "ld.global.b32 %r0, [%rd4];"
STORE = "st.global.b32 [%rd5], %r0;"
AHEAD = "griddepcontrol.launch_dependents; mov.u32 %r0, 5; st.global.b32 [%rd5], %r0;"


def launch(body, *tensors, dependence=None, num_programs=1):
    kernel = EmulatedKernel(HEAD + body + "\n    ret;\n}\n")
    return kernel.launch((num_programs, 1, 1), tensors, 0, dependence=dependence)


def run(body, *, num_programs=1):
    """What a kernel of this body makes of what the launch ahead of it has stored."""
    before, between, after = (torch.zeros(THREADS * num_programs, dtype=torch.int32) for _ in "abc")
    ahead = launch(AHEAD, before, between, num_programs=num_programs)
    launch(body, between, after, dependence=Dependence(ahead), num_programs=num_programs)
    return after.unique().tolist()


@pytest.mark.parametrize("num_programs", [1, 3])
def test_what_the_launch_ahead_stores_may_be_loaded_after_it_has_been_waited_for(num_programs):
    assert run(f"{WAIT} {LOAD} {STORE}", num_programs=num_programs) == [5]


def test_what_the_launch_ahead_does_not_store_may_be_loaded_before():
    others = torch.arange(THREADS, dtype=torch.int32)
    results = torch.zeros_like(others)
    ahead = launch(AHEAD, others, torch.zeros_like(others))

    launch(f"{LOAD} {WAIT} {STORE}", others, results, dependence=Dependence(ahead))

    assert torch.equal(results, others)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (f"{LOAD} {WAIT} {STORE}", "a load before griddepcontrol.wait"),
        (f"mov.u32 %r0, 1; {STORE} {WAIT}", "a store before griddepcontrol.wait"),
        (f"{LOAD.replace('%rd4', '%rd5')} mov.u32 %r0, 1;", "3 programs end without"),
        (f"@!%p1 bra $end; {WAIT} $end: mov.u32 %r0, 1;", "2 programs end without"),
    ],
    ids=["load", "store", "end", "some_end"],
)
def test_what_would_depend_on_when_the_launch_ahead_ends_is_refused(body, named):
    with pytest.raises(EmulationError, match=named):
        run(body, num_programs=3)

"""The recurrence of a selective state space model over prompts, with states in pages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.states import (
    Checkpoints,
    check_prompts,
    check_recurrence,
    checkpoint_tensors,
    per_channel,
)
from jenga_kernels.checks.tensors import check_at_least, check_same_device, shows_values
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, rebased, with_reference
from jenga_kernels.reference.recurrent import state_scan as reference
from jenga_kernels.triton.lib.addressing import named_strides
from jenga_kernels.triton.lib.tiles import Machine, machine_of, overlapping, power_of_two
from jenga_kernels.triton.mamba.groups import STRIDES
from jenga_kernels.triton.mamba.scan_channels import state_scan_channels_kernel
from jenga_kernels.triton.mamba.scan_heads import state_scan_heads_kernel
from jenga_kernels.triton.mamba.segment_states import segment_states_kernel
from jenga_kernels.triton.recurrent.segments import pass_states_kernel
from jenga_kernels.triton.recurrent.tiles import (
    CHUNK_TOKENS,
    LEAST_SEGMENTS,
    ScanTiles,
    are_lone,
    channel_scan_tiles,
    head_scan_tiles,
    hopper_scan_tiles,
    scan_segment_tokens,
)

LEAST_REQUESTS = 128
"""Fewest entries that a program searches for its request. More requests need another compilation,
for the next power of two."""

LONE_STAGES = 3
"""Stages of chunks in shared memory for a program with a multiprocessor to itself; one less for
wide states."""

PASSED_ELEMENTS = 1024
"""Elements of a state that one program carries from segment to segment."""

PASSING_WARPS = 4
"""Warps of a program that carries states from segment to segment."""

UNCUT = {
    "segment_states_ptr": None,
    "num_requests": None,
    "segment_tokens": None,
    "stride_segment_states": 0,
    "BLOCK_R": None,
    "IS_OVERLAPPED": False,
}
"""Arguments of kernels when no request is cut into segments."""

_calls: Calls = {}

_compiled: set[tuple[object, ...]] = set()
"""Kinds of calls for which all kernels have been compiled."""


class _Arguments(NamedTuple):
    """Arguments of `state_scan`, in the same order, with the tensors of the checkpoints."""

    out: torch.Tensor
    states: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    query_starts: torch.Tensor
    initial_slots: torch.Tensor
    state_slots: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limits: tuple[float, float]
    checkpoint_starts: torch.Tensor | None
    checkpoint_after: torch.Tensor | None
    checkpoint_slots: torch.Tensor | None
    allow_tf32: bool
    longest_tokens: int | None
    segment_tokens: int | None
    is_warp_specialized: bool | None
    is_portable: bool
    compile_ahead: bool


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.state_scan)
def state_scan(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    checkpoints: Checkpoints | None = None,
    allow_tf32: bool = False,
    longest_tokens: int | None = None,
    segment_tokens: int | None = None,
    is_warp_specialized: bool | None = None,
    is_portable: bool = False,
    compile_ahead: bool = False,
) -> None:
    """Scan requests' tokens: read each one's state, apply every token, write the states asked for.

    Let s be the step size of a token: softplus(dt + dt_bias), limited to dt_limits. The state h of
    a channel becomes exp(s A) h + s x B. The output is C h + D x, times silu(z).

    - A Mamba-2 layer has one A, dt and dt_bias per head.
    - A Mamba-1 layer has dt and dt_bias per channel, and A per channel and state element. All its
      channels are one head.
    - Linear attention whose states decay by a fixed factor (lightning attention) is Mamba-2 with a
      group for each head. Pass values as x, keys as B, queries as C, and ones as dt, without
      softplus.

    With one A per head, and too few heads to fill a GPU, long requests are cut into segments that
    are scanned in parallel. First, each segment's final state from an initial state of zero is
    computed, then the initial state of each segment. Results may differ in rounding, because sums
    are taken in another order.

    Requests whose state slot is `NULL_SLOT` are padding: their output is zero, and nothing else is
    read or written. No request may write a slot that another one reads or writes.

    Args:
        out: Outputs, written in place, shape and dtype of x.
        states: States, written in place, [num_slots, num_heads, head_dim, d_state], bfloat16,
            float16 or float32; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        x: Inputs, [num_tokens, num_heads, head_dim], bfloat16, float16 or float32.
        dt: Projected step sizes, [num_tokens, num_heads], or [num_tokens, num_heads, head_dim] if
            A has one per channel.
        A: Decay rates, f32[num_heads], or f32[num_heads, head_dim, d_state]; below 0.
        B: Input projections, [num_tokens, num_groups, d_state], dtype of x; the heads of a group
            are next to each other.
        C: Output projections, shape and dtype of B.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1].
        initial_slots: Slot from which each request's state is read, i32[num_requests]; `NULL_SLOT`
            begins with zero.
        state_slots: Slot to which each request's last state is written, i32[num_requests].
        D: Weight of the input itself, [num_heads] or [num_heads, head_dim].
        z: Gates, shape and dtype of x.
        dt_bias: Bias that is added to dt, shape of one token's dt.
        dt_softplus: Whether step sizes pass through softplus.
        dt_limits: Least and greatest step size.
        checkpoints: States to write in addition to the last ones.
        allow_tf32: Whether matrix products of x, B and C in float32 may run on tensor cores, which
            read 10 bits of their mantissas. If A has one per channel, there are no such products.
        longest_tokens: Number of tokens of the longest request, or an upper bound, if the host
            knows it. It decides whether requests are cut. None means that all requests are assumed
            to be equally long.
        segment_tokens: Most tokens of a segment, a multiple of 64. A number that no request exceeds
            leaves requests whole. None lets the operation choose. If A has one per channel, no
            request is cut.
        is_warp_specialized: Whether to use the warp-specialised kernel on Hopper, in which two
            groups of warps share a chunk. It needs 16-bit elements in x, B and C, a head_dim that
            is a multiple of 64, a d_state of 64, 128 or 256, and no gates. For other layers it
            changes nothing. None means True if each program has a multiprocessor to itself.
        is_portable: Whether to use the generic kernels on a GPU that has kernels of its own.
        compile_ahead: Whether the first call of a kind also compiles the kernels for other numbers
            of requests and tokens, so that no later call waits for the compiler.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.

    Source: the recurrence is algorithm 2 of "Mamba: Linear-Time Sequence Modeling with Selective
    State Spaces" (arXiv 2312.00752). Its form by chunks is section 6 of "Transformers are SSMs"
    (arXiv 2405.21060). Lightning attention is that of arXiv 2401.04658.
    """
    given = (
        out,
        states,
        x,
        dt,
        A,
        B,
        C,
        query_starts,
        initial_slots,
        state_slots,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limits,
        *checkpoint_tensors(checkpoints),
        allow_tf32,
        longest_tokens,
        segment_tokens,
        is_warp_specialized,
        is_portable,
        compile_ahead,
    )
    call = call_like(_calls, *given)
    is_first = call.launches is None
    if is_first or shows_values(x):  # on a CPU, values are checked in every call
        _check(_Arguments(*given), checkpoints)
    if is_first:
        call.launches, call.facts = _launches(_Arguments(*given))
    tensors = dict(zip(_POINTERS, given, strict=True))
    if call.facts is not None:
        tensors |= _room_for_segments(states, call.facts)
    call.run(tensors)


def _check(given: _Arguments, checkpoints: Checkpoints | None) -> None:
    """Check a call.

    Raises:
        ValueError: If something does not fit.
    """
    check_recurrence(
        given.out,
        given.states,
        given.x,
        given.dt,
        given.A,
        given.B,
        given.C,
        D=given.D,
        z=given.z,
        dt_bias=given.dt_bias,
        dt_limits=given.dt_limits,
    )
    check_prompts(
        given.query_starts,
        given.initial_slots,
        given.state_slots,
        checkpoints,
        num_tokens=given.x.shape[0],
        num_slots=given.states.shape[0],
    )
    check_same_device(x=given.x, query_starts=given.query_starts)
    _check_segments(given.longest_tokens, given.segment_tokens, is_per_channel=given.A.dim() > 1)


def _launches(given: _Arguments) -> tuple[list[Launch], int | None]:
    """List the launches of a call, and count the segments of its requests: None if they are uncut.

    Args:
        given: Arguments of the call, which have been checked.
    """
    _, num_heads, head_dim = given.x.shape
    num_requests, d_state = len(given.state_slots), given.states.shape[3]
    if num_requests == 0:
        return [], None
    machine = machine_of(given.x.device)
    D = per_channel(given.D, num_heads, head_dim)
    constants = {
        "dt_min": given.dt_limits[0],
        "dt_max": given.dt_limits[1],
        **named_strides(given._asdict() | {"D": D}, STRIDES),
        "stride_initial": given.initial_slots.stride(0),
        "stride_slots": given.state_slots.stride(0),
        "HEADS_PER_GROUP": num_heads // given.B.shape[1],
        "HEAD_DIM": head_dim,
        "D_STATE": d_state,
        "IS_SOFTPLUS": given.dt_softplus,
        "HAS_LIMITS": given.dt_limits != (0.0, float("inf")),
        "enable_fp_fusion": True,
    }
    if given.A.dim() == 1:
        return _head_launches(machine, constants, given)
    # Every state element has its own decay, and one tile has all of a channel's.
    tiles = channel_scan_tiles(machine, head_dim, d_state)
    sizes = _sizes(tiles, d_state) | {"BLOCK_T": tiles.block_tokens}
    num_programs = triton.cdiv(head_dim, tiles.block_dims) * num_heads
    grid = (num_programs, num_requests)
    launch = Launch(kernel=state_scan_channels_kernel, grid=grid, constants=constants | sizes)
    return [launch], None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsKernels:
    """Kernels for a call with one decay for each head.

    Attributes:
        scan: Kernel of the scan.
        lone_scan: Kernel of the scan if each program has a multiprocessor to itself.
        segment_states: Kernel that computes the final states of segments.
        num_programs: Number of programs for a request or a segment.
        arguments: Arguments of the kernels in addition to those of the operation.
        descriptors: Pairs of names: a TMA descriptor among these arguments, and the argument of the
            tensor that it describes.
    """

    scan: triton.JITFunction
    lone_scan: triton.JITFunction
    segment_states: triton.JITFunction
    num_programs: int
    arguments: dict[str, object]
    descriptors: tuple[tuple[str, str], ...] = ()

    def scan_launch(self, machine: Machine, num_scans: int, constants: dict[str, object]) -> Launch:
        """Build the launch that scans this number of requests or segments."""
        is_lone = are_lone(machine, self.num_programs * num_scans)
        return Launch(
            kernel=self.lone_scan if is_lone else self.scan,
            grid=(self.num_programs, num_scans),
            constants=constants,
            descriptors=self.descriptors,
        )


def _head_launches(
    machine: Machine,
    constants: dict[str, object],
    given: _Arguments,
) -> tuple[list[Launch], int | None]:
    """List the launches of a call with one decay per head; count its segments, None if uncut."""
    num_tokens, num_requests = given.x.shape[0], len(given.state_slots)
    hopper_tiles = None
    if not given.is_portable:
        hopper_tiles = hopper_scan_tiles(machine, given.x, given.B, given.C, given.z)
    if hopper_tiles is None:
        kernels = _portable_kernels(machine, given)
    else:
        kernels = _hopper_kernels(given, hopper_tiles)
    constants = constants | kernels.arguments
    segment_tokens = given.segment_tokens
    if segment_tokens is None:
        segment_tokens = scan_segment_tokens(
            machine,
            d_state=given.B.shape[2],
            num_programs=kernels.num_programs,
            num_requests=num_requests,
            num_tokens=num_tokens,
            longest_tokens=given.longest_tokens,
        )
    if given.compile_ahead and not machine.is_interpreter:
        _compile_others(kernels, machine, constants, given)
    longest_tokens = num_tokens if given.longest_tokens is None else given.longest_tokens
    if segment_tokens is None or segment_tokens >= longest_tokens:
        return [kernels.scan_launch(machine, num_requests, constants | UNCUT)], None
    # An upper bound for any distribution of tokens over requests. Programs in excess end at once.
    num_segments = num_requests + (num_tokens - 1) // segment_tokens
    cut = constants | _cut(machine, given.states, num_requests, segment_tokens)
    launches = _segment_launches(
        kernels, machine, cut, num_requests=num_requests, num_segments=num_segments
    )
    return list(launches), num_segments


def _hopper_kernels(given: _Arguments, tiles: ScanTiles) -> HeadsKernels:
    """Choose kernels for Hopper, for one decay per head."""
    # Triton's interpreter cannot run Gluon.
    from jenga_kernels.triton.mamba.hopper.scan import (  # noqa: PLC0415
        state_scan_hopper_kernel,
        steps_descriptor,
    )
    from jenga_kernels.triton.mamba.hopper.scan_specialized import (  # noqa: PLC0415
        state_scan_specialized_kernel,
    )
    from jenga_kernels.triton.mamba.hopper.segment_states import (  # noqa: PLC0415
        segment_states_hopper_kernel,
    )
    from jenga_kernels.triton.recurrent.hopper.chunks import chunk_descriptor  # noqa: PLC0415

    arguments = {
        "x_descriptor": rebased(chunk_descriptor(given.x), None),
        "B_descriptor": rebased(chunk_descriptor(given.B), None),
        "C_descriptor": rebased(chunk_descriptor(given.C), None),
        # A wide state leaves no registers for values read back from shared memory.
        "dt_descriptor": (
            rebased(steps_descriptor(given.dt), None) if tiles.state_parts == 1 else None
        ),
        "STAGES": LONE_STAGES if tiles.state_parts == 1 else LONE_STAGES - 1,
    }
    is_specialized = given.is_warp_specialized
    scan = state_scan_specialized_kernel if is_specialized else state_scan_hopper_kernel
    return HeadsKernels(
        scan=scan,
        lone_scan=scan if is_specialized is not None else state_scan_specialized_kernel,
        segment_states=segment_states_hopper_kernel,
        num_programs=given.x.shape[1] * given.x.shape[2] // tiles.block_dims,
        arguments=arguments | _sizes(tiles, given.B.shape[2]),
        descriptors=tuple((f"{name}_descriptor", f"{name}_ptr") for name in ("x", "B", "C", "dt")),
    )


def _portable_kernels(machine: Machine, given: _Arguments) -> HeadsKernels:
    """Choose generic kernels, for one decay per head."""
    _, num_heads, head_dim = given.x.shape
    d_state = given.B.shape[2]
    tiles = head_scan_tiles(
        machine,
        head_dim,
        d_state,
        given.x.element_size(),
        num_scans=num_heads * len(given.state_slots),
        allow_tf32=given.allow_tf32,
    )
    return HeadsKernels(
        scan=state_scan_heads_kernel,
        lone_scan=state_scan_heads_kernel,
        segment_states=segment_states_kernel,
        num_programs=triton.cdiv(head_dim, tiles.block_dims) * num_heads,
        arguments={"BLOCK_T": tiles.block_tokens, "IS_TF32": given.allow_tf32}
        | _sizes(tiles, d_state),
    )


def _segment_launches(
    kernels: HeadsKernels,
    machine: Machine,
    constants: dict[str, object],
    *,
    num_requests: int,
    num_segments: int,
) -> Iterator[Launch]:
    """List the launches of requests cut into segments: their final and initial states, the scan."""
    yield Launch(
        kernel=kernels.segment_states,
        grid=(kernels.num_programs, num_segments),
        constants=constants,
        descriptors=kernels.descriptors,
    )
    constants = constants | overlapping(machine)
    num_blocks = constants["NUM_HEADS"] * triton.cdiv(constants["HEAD_ELEMENTS"], PASSED_ELEMENTS)
    yield Launch(
        kernel=pass_states_kernel,
        grid=(num_blocks, num_requests),
        constants=constants | {"num_warps": PASSING_WARPS},
    )
    yield kernels.scan_launch(machine, num_segments, constants)


def _compile_others(
    kernels: HeadsKernels,
    machine: Machine,
    constants: dict[str, object],
    given: _Arguments,
) -> None:
    """Compile kernels for other numbers of requests and tokens, so that no call waits for it.

    This is done once for each kind of call.

    Args:
        kernels: Kernels that such calls choose from.
        machine: GPU that runs them.
        constants: Constants of one such call.
        given: Arguments of the same call.
    """
    kinds = [(rows.dtype, rows.shape[1:]) for rows in (given.x, given.dt, given.B, given.states)]
    flags = [constants[name] for name in ("dt_min", "dt_max", "IS_SOFTPLUS")]
    optional = (given.D, given.z, given.dt_bias, given.checkpoint_starts)
    are_none = [tensor is None for tensor in optional]
    kind = (kernels.scan, kernels.lone_scan, *kinds, *flags, *are_none)
    if kind in _compiled:
        return
    _compiled.add(kind)
    tensors = dict(zip(_POINTERS, given, strict=True))
    for kernel in {kernels.scan, kernels.lone_scan}:
        uncut = Launch(
            kernel=kernel,
            grid=(1,),
            constants=constants | UNCUT,
            descriptors=kernels.descriptors,
        )
        uncut.compile(tensors)
    if LEAST_SEGMENTS * kernels.num_programs <= machine.num_processors:
        cut = constants | _cut(machine, given.states, 1, CHUNK_TOKENS)
        tensors = tensors | _room_for_segments(given.states, 1)
        for launch in _segment_launches(kernels, machine, cut, num_requests=1, num_segments=1):
            launch.compile(tensors)


def _cut(
    machine: Machine, states: torch.Tensor, num_requests: int, segment_tokens: int
) -> dict[str, object]:
    """Get arguments of kernels when requests are cut into segments."""
    _, num_heads, head_dim, d_state = states.shape
    return {
        "num_requests": num_requests,
        "segment_tokens": segment_tokens,
        "stride_segment_states": num_heads * head_dim * d_state,
        "NUM_HEADS": num_heads,
        "HEAD_ELEMENTS": head_dim * d_state,
        "BLOCK_R": max(LEAST_REQUESTS, power_of_two(num_requests)),
        "BLOCK_E": PASSED_ELEMENTS,
        "IS_OVERLAPPED": machine.has_dependent_launches,
    }


def _room_for_segments(states: torch.Tensor, num_segments: int) -> dict[str, torch.Tensor]:
    """Allocate buffers for the states and decays of segments."""
    sizes = (num_segments, *states.shape[1:])
    return {
        "segment_states_ptr": torch.empty(sizes, dtype=torch.float32, device=states.device),
        "decays_ptr": torch.empty(sizes[:2], dtype=torch.float32, device=states.device),
    }


def _sizes(tiles: ScanTiles, d_state: int) -> dict[str, int]:
    """Get the arguments and options that set the sizes of a kernel's tiles."""
    return {
        "BLOCK_P": tiles.block_dims,
        "BLOCK_N": max(tiles.least_state, power_of_two(d_state)) // tiles.state_parts,
        "PARTS": tiles.state_parts,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _check_segments(
    longest_tokens: int | None, segment_tokens: int | None, *, is_per_channel: bool
) -> None:
    """Check the arguments that control how requests are cut into segments.

    Raises:
        ValueError: If a number is too small, or requests cannot be cut that way.
    """
    if longest_tokens is not None:
        check_at_least("longest_tokens", longest_tokens, 0)
    if segment_tokens is None:
        return
    if is_per_channel:
        msg = f"segment_tokens must be None where A has one per channel, got {segment_tokens}"
        raise ValueError(msg)
    check_at_least("segment_tokens", segment_tokens, 1)
    if segment_tokens % CHUNK_TOKENS:
        msg = f"segment_tokens must be a multiple of {CHUNK_TOKENS}, got {segment_tokens}"
        raise ValueError(msg)

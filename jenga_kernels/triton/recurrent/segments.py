"""Segments of prompts that are scanned in parallel: their tokens, and the states between them.

A prompt that few programs scan is cut into segments. A first kernel computes the state that each
segment leaves if it begins with zero, and the segment's decay of any other state.
`pass_states_kernel` turns these into the initial states of segments. The scan itself then has a
program for each segment.
"""

import triton
import triton.language as tl

from jenga_kernels.triton.lib.addressing import page_offsets
from jenga_kernels.triton.lib.device import (
    await_kernel_before,
    ceil_div,
    device_function,
    let_next_begin,
)
from jenga_kernels.triton.recurrent.recurrence import mask_if
from jenga_kernels.triton.recurrent.tiles import CHUNK_TOKENS as _CHUNK_TOKENS

CHUNK_TOKENS = tl.constexpr(_CHUNK_TOKENS)
"""Divisor of a segment's tokens, except for a request's last segment."""

CHECKPOINTS = tl.constexpr(128)
"""Number of checkpoints that are searched at once."""

_INT32_MAX = tl.constexpr(2**31 - 1)

AHEAD = tl.constexpr(4)
"""Number of segments whose states are loaded at once."""


@device_function
def segments_of(query_starts_ptr, num_requests, segment_tokens, BLOCK_R: tl.constexpr):
    """Number of segments of each request, i32[BLOCK_R]: at least one, 0 past the last request."""
    requests = tl.arange(0, BLOCK_R)
    is_one = requests < num_requests
    starts = tl.load(query_starts_ptr + requests, mask=is_one, other=0)
    stops = tl.load(query_starts_ptr + requests + 1, mask=is_one, other=0)
    counts = ceil_div(stops - starts, segment_tokens)
    return tl.where(is_one, tl.maximum(counts, 1), 0)


@device_function
def segment_range(number, num_segments, num_tokens):
    """Tokens [first, stop) of one of a request's segments, which are about equally long."""
    tokens_each = ceil_div(ceil_div(num_tokens, num_segments), CHUNK_TOKENS) * CHUNK_TOKENS
    first = tl.minimum(number * tokens_each, num_tokens)
    return first, tl.minimum(first + tokens_each, num_tokens)


@device_function
def segment_at(segment, query_starts_ptr, num_requests, segment_tokens, BLOCK_R: tl.constexpr):
    """Find the request of a segment, given the segment's index among all.

    Returns:
        The request, the segment's index within it, and the request's number of segments. Past the
        last segment of all, the request is BLOCK_R, with 0 segments.
    """
    counts = segments_of(query_starts_ptr, num_requests, segment_tokens, BLOCK_R)
    ends = tl.cumsum(counts, 0)
    request = tl.sum((ends <= segment).to(tl.int32), 0)
    is_it = tl.arange(0, BLOCK_R) == request
    first = tl.sum(tl.where(is_it, ends - counts, 0), 0)
    return request, segment - first, tl.sum(tl.where(is_it, counts, 0), 0)


@device_function
def checkpoints_through(checkpoint_after_ptr, first, end, token):
    """End of those of checkpoints [first, end) that come after at most `token` tokens."""
    last = first
    for tile in range(first, end, CHECKPOINTS):
        places = tile + tl.arange(0, CHECKPOINTS)
        after = tl.load(checkpoint_after_ptr + places, mask=places < end, other=_INT32_MAX)
        last += tl.sum((after <= token).to(tl.int32), 0)
    return last


@triton.jit(do_not_specialize=["num_requests", "segment_tokens"])
def pass_states_kernel(
    # Outputs, read too
    segment_states_ptr,  # f32[num_segments, num_heads, head_dim, d_state]
    # Inputs
    states_ptr,  # [num_slots, num_heads, head_dim, d_state]
    decays_ptr,  # f32[num_segments, num_heads]
    query_starts_ptr,  # i32[num_requests + 1]
    initial_slots_ptr,  # i32[num_requests]
    state_slots_ptr,  # i32[num_requests]
    # Sizes
    num_requests,
    segment_tokens,
    # Strides, in elements
    stride_states_slot: tl.int64,
    stride_states_head: tl.int64,
    stride_states_dim: tl.int64,
    stride_segment_states: tl.int64,
    stride_initial: tl.int64,
    stride_slots: tl.int64,
    # Tiles and flags
    NUM_HEADS: tl.constexpr,
    HEAD_ELEMENTS: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):
    """Turn states that request r's segments leave into initial states, in program (b, r).

    The former begin with zero. A program has BLOCK_E elements of one head's state. The state that
    the last segment leaves is not read: the scan writes it to its slot.
    """
    BLOCKS: tl.constexpr = (HEAD_ELEMENTS + BLOCK_E - 1) // BLOCK_E
    let_next_begin(IS_OVERLAPPED)
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    request = tl.program_id(1)
    elements = (tl.program_id(0) % BLOCKS) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_element = elements < HEAD_ELEMENTS
    state_slot = tl.load(state_slots_ptr + request * stride_slots)
    initial_slot = tl.load(initial_slots_ptr + request * stride_initial)
    counts = segments_of(query_starts_ptr, num_requests, segment_tokens, BLOCK_R)
    requests = tl.arange(0, BLOCK_R)
    first = tl.sum(tl.where(requests < request, counts, 0), 0)
    last = first + tl.sum(tl.where(requests == request, counts, 0), 0) - 1
    states_ptr += page_offsets(initial_slot, stride_states_slot) + head * stride_states_head
    places = (elements // D_STATE) * stride_states_dim + elements % D_STATE
    is_begun = (initial_slot > 0) & (state_slot > 0)
    h = tl.load(states_ptr + places, mask=mask_if(is_begun, is_element), other=0.0).to(tl.float32)
    await_kernel_before(IS_OVERLAPPED)
    if state_slot <= 0:
        return

    segment_states_ptr += page_offsets(first, stride_segment_states)
    segment_states_ptr += head * HEAD_ELEMENTS + elements
    decays_ptr += page_offsets(first, NUM_HEADS) + head
    for segment in range(first, last + 1, AHEAD):
        added = ()
        decays = ()
        for i in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
            is_read = segment + i < last
            place = segment_states_ptr + i * stride_segment_states
            added += (tl.load(place, mask=mask_if(is_read, is_element), other=0.0),)
            decays += (tl.load(decays_ptr + i * NUM_HEADS, mask=is_read, other=0.0),)
        for i in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
            place = segment_states_ptr + i * stride_segment_states
            tl.store(place, h, mask=mask_if(segment + i <= last, is_element))
            h = h * decays[i] + added[i]
        segment_states_ptr += AHEAD * stride_segment_states
        decays_ptr += AHEAD * NUM_HEADS

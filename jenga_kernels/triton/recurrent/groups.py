"""Groups of parameters that kernels of recurrent layers share."""

from typing import NamedTuple

from jenga_kernels.triton.lib.groups import Pointer


class Requests(NamedTuple):
    """Tokens of the requests, and the slots from which states are read and to which they go."""

    query_starts_ptr: Pointer  # i32[num_requests + 1]
    initial_slots_ptr: Pointer  # i32[num_requests]
    state_slots_ptr: Pointer  # i32[num_requests] or i32[num_requests, max_tokens]


class Checkpoints(NamedTuple):
    """States to write in addition to the last ones."""

    checkpoint_starts_ptr: Pointer  # i32[num_requests + 1] or None
    checkpoint_after_ptr: Pointer  # i32[num_checkpoints] or None
    checkpoint_slots_ptr: Pointer  # i32[num_checkpoints] or None


class ReplayRequests(NamedTuple):
    """Tokens of the requests, and how many of them a state includes. The rest is replayed."""

    query_starts_ptr: Pointer  # i32[num_requests + 1]
    slots_ptr: Pointer  # i32[num_requests]
    computed_tokens_ptr: Pointer  # i32[num_requests]
    state_tokens_ptr: Pointer  # i32[num_requests]
    next_state_tokens_ptr: Pointer  # i32[num_requests]


class ReplaySlots(NamedTuple):
    """As `ReplayRequests`, where each request has one token."""

    slots_ptr: Pointer  # i32[num_requests]
    computed_tokens_ptr: Pointer  # i32[num_requests]
    state_tokens_ptr: Pointer  # i32[num_requests]
    next_state_tokens_ptr: Pointer  # i32[num_requests]

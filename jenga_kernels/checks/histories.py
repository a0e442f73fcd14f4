"""Histories: inputs or changes of recent tokens, kept beside recurrent states seldom written."""

from dataclasses import dataclass

import torch

from jenga_kernels.checks.states import (
    NULL_SLOT,
    check_contiguous_rows,
    check_not_expanded,
    check_query_starts,
    check_slots,
)
from jenga_kernels.checks.tensors import (
    check_at_least,
    check_dtype,
    check_rows,
    check_same_device,
    check_shape,
    shows_values,
)

MAX_DELTA_HISTORY = 64
"""Most tokens of a `DeltaHistory`. More would not fit into registers and shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHistory:
    """Inputs of each slot's latest tokens to a selective state space model.

    Token t of a request is in row t % history_tokens of each tensor.

    Attributes:
        x: Inputs, [num_slots, num_heads, history_tokens, head_dim]; any strides that are multiples
            of 16 bytes, last dimension contiguous.
        dt: Step sizes, f32[num_slots, num_heads, history_tokens]; last dimension contiguous.
        B: Input projections, [num_slots, num_groups, history_tokens, d_state], strides as for x.
    """

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHistory:
    """Changes that each slot's latest tokens made to a state of the gated delta rule.

    Token t of a request is in row t % history_tokens of each tensor. The state after a token is the
    decayed state before it, plus the outer product of the token's change and key.

    Attributes:
        changes: Difference between each value and the one that the state held under the key, times
            beta and the factor that scales the key to length one, [num_slots, num_v_heads,
            history_tokens, head_v_dim]; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        keys: Keys as given, not scaled to length one, [num_slots, num_qk_heads, history_tokens,
            head_k_dim], strides as for changes.
        decays: Logarithms of the decays, to base two, f32[num_slots, num_v_heads, history_tokens]
            or f32[num_slots, num_v_heads, history_tokens, head_k_dim]; last dimension contiguous.
    """

    changes: torch.Tensor
    keys: torch.Tensor
    decays: torch.Tensor


def next_states(
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    query_tokens: torch.Tensor | int = 1,
    *,
    history_tokens: int,
    max_query_tokens: int = 1,
    writes_states: bool = False,
) -> torch.Tensor:
    """Get how many tokens each request's state is to include after a call that keeps histories.

    A state is written as late as the history allows: when the history might have no room for the
    next call. The state then includes the call's first token, which is never a draft.

    Args:
        computed_tokens: Number of tokens of each request before the call, i32[num_requests].
        state_tokens: Number of them that its state includes, i32[num_requests].
        query_tokens: Number of tokens of the call, i32[num_requests] or one number for all.
        history_tokens: Rows of the history, at least twice max_query_tokens.
        max_query_tokens: Most tokens of a request in any call.
        writes_states: Whether the call writes every state, so that it includes the first token.

    Raises:
        ValueError: If the history is too short for calls of max_query_tokens tokens.
    """
    check_at_least("max_query_tokens", max_query_tokens, 1)
    if history_tokens < 2 * max_query_tokens:
        msg = (
            f"history_tokens must be at least {2 * max_query_tokens} for {max_query_tokens} tokens "
            f"of a call, got {history_tokens}"
        )
        raise ValueError(msg)
    end = computed_tokens + query_tokens
    first = torch.minimum(computed_tokens + 1, end)
    if writes_states:
        return first
    is_written = end - state_tokens > history_tokens - max_query_tokens
    return torch.where(is_written, first, state_tokens)


def check_history_part(
    name: str, tensor: torch.Tensor, sizes: tuple[int | None, ...], *dtypes: torch.dtype
) -> None:
    """Check a tensor with rows of elements for each token of a history.

    Raises:
        ValueError: If shape, dtype, strides or alignment do not fit.
    """
    check_shape(name, tensor, sizes)
    check_at_least(f"the tokens of {name}", tensor.shape[2], 1)
    check_dtype(name, tensor, dtypes)
    check_rows(name, tensor)
    check_not_expanded(name, tensor)


def check_replay(
    slots: torch.Tensor,
    query_starts: torch.Tensor | None,
    *,
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    next_state_tokens: torch.Tensor,
    num_tokens: int,
    num_slots: int,
    history_tokens: int,
    writes_states: bool = False,
) -> int:
    """Check the slots and token counts of a call's requests.

    Values are checked only on the CPU, where reading them waits for nothing.

    Args:
        slots: As the operation takes them; so are all tensors up to next_state_tokens.
        query_starts: First token of each request, then the number of tokens. None means one each.
        computed_tokens: Number of tokens of each request before the call.
        state_tokens: Number of tokens that its state includes before the call.
        next_state_tokens: Number of tokens that its state includes after the call.
        num_tokens: Rows of the call's tensors.
        num_slots: Number of slots of the states.
        history_tokens: Rows of a slot's history.
        writes_states: Whether every state is to include the one token of its request.

    Returns:
        num_requests.

    Raises:
        ValueError: If a shape, dtype, stride, device or value does not fit.
    """
    counts = {
        "computed_tokens": computed_tokens,
        "state_tokens": state_tokens,
        "next_state_tokens": next_state_tokens,
    }
    num_requests = num_tokens
    if query_starts is not None:
        if writes_states:
            msg = "query_starts must be None if writes_states is True, got a tensor"
            raise ValueError(msg)
        num_requests = check_query_starts(query_starts, num_tokens)
    for name, tensor in ({"slots": slots} | counts).items():
        check_shape(name, tensor, (num_requests,))
        check_dtype(name, tensor, (torch.int32,))
        if name in counts:
            check_contiguous_rows(name, tensor)
    check_slots("slots", slots, num_slots)
    check_same_device(slots=slots, query_starts=query_starts, **counts)
    if shows_values(slots):
        query_tokens = torch.ones_like(slots) if query_starts is None else query_starts.diff()
        _check_counts(slots, query_tokens, history_tokens=history_tokens, **counts)
        is_early = (slots > NULL_SLOT) & (next_state_tokens != computed_tokens + 1)
        if writes_states and is_early.any():
            request = int(is_early.nonzero()[0])
            msg = (
                f"next_state_tokens must be {computed_tokens[request] + 1} for request {request} "
                f"if writes_states is True, got {next_state_tokens[request]}"
            )
            raise ValueError(msg)
    return num_requests


def _check_counts(
    slots: torch.Tensor,
    query_tokens: torch.Tensor,
    *,
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    next_state_tokens: torch.Tensor,
    history_tokens: int,
) -> None:
    """Check numbers of tokens, on the CPU.

    Raises:
        ValueError: If they do not fit each other or the history.
    """
    rows = zip(
        slots.tolist(),
        query_tokens.tolist(),
        computed_tokens.tolist(),
        state_tokens.tolist(),
        next_state_tokens.tolist(),
        strict=True,
    )
    owners: dict[int, int] = {}
    for request, (slot, num_tokens, computed, stored, stored_next) in enumerate(rows):
        if slot <= NULL_SLOT:
            continue
        if owners.setdefault(slot, request) != request:
            msg = (
                f"slots must be of one request each, got slot {slot} of requests {owners[slot]} "
                f"and {request}"
            )
            raise ValueError(msg)
        if not 0 <= stored <= computed:
            msg = (
                f"state_tokens must be 0 to the {computed} computed tokens of request {request}, "
                f"got {stored}"
            )
            raise ValueError(msg)
        if stored_next != stored and not computed <= stored_next <= computed + num_tokens:
            msg = (
                f"next_state_tokens must be {stored} or {computed} to {computed + num_tokens} for "
                f"request {request}, got {stored_next}"
            )
            raise ValueError(msg)
        if computed + num_tokens - stored > history_tokens:
            msg = (
                f"history must have {computed + num_tokens - stored} tokens for those of request "
                f"{request} since its state, got {history_tokens}"
            )
            raise ValueError(msg)

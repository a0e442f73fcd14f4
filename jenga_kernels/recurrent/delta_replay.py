"""The gated delta rule for a few tokens, mostly without state writes."""

from typing import NamedTuple

import torch
import triton

from jenga_kernels.checks.delta import check_delta_rule, has_channel_decays
from jenga_kernels.checks.histories import (
    MAX_DELTA_HISTORY,
    DeltaHistory,
    check_history_part,
    check_replay,
)
from jenga_kernels.checks.states import check_contiguous_rows, check_not_expanded
from jenga_kernels.checks.tensors import (
    check_dtype,
    check_no_gradients,
    check_same_device,
    check_shape,
    shows_values,
)
from jenga_kernels.launches import Calls, Launch, call_like, pointer_names, with_reference
from jenga_kernels.reference.recurrent import delta_replay as reference
from jenga_kernels.triton.delta.groups import STRIDES
from jenga_kernels.triton.delta.replay import delta_replay_kernel
from jenga_kernels.triton.delta.replay_products import delta_replay_products_kernel
from jenga_kernels.triton.delta.replay_write import delta_replay_write_kernel
from jenga_kernels.triton.delta.tiles import delta_replay_tiles, delta_update_tiles
from jenga_kernels.triton.lib.addressing import named_strides
from jenga_kernels.triton.lib.tiles import Machine, machine_of, power_of_two
from jenga_kernels.triton.recurrent.tiles import LEAST_PRODUCT

_calls: Calls = {}


class _Arguments(NamedTuple):
    """Arguments of `delta_replay`, in the same order, with the tensors of the history."""

    out: torch.Tensor
    states: torch.Tensor
    history_changes: torch.Tensor
    history_keys: torch.Tensor
    history_decays: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    slots: torch.Tensor
    computed_tokens: torch.Tensor
    state_tokens: torch.Tensor
    next_state_tokens: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    scale: float | None
    qk_l2norm: bool
    query_starts: torch.Tensor | None
    writes_states: bool


_POINTERS = pointer_names(_Arguments)


@with_reference(reference.delta_replay)
def delta_replay(
    out: torch.Tensor,
    states: torch.Tensor,
    history: DeltaHistory,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    betas: torch.Tensor,
    slots: torch.Tensor,
    computed_tokens: torch.Tensor,
    state_tokens: torch.Tensor,
    next_state_tokens: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    query_starts: torch.Tensor | None = None,
    writes_states: bool = False,
) -> None:
    """Apply the next token of each request, or the next few, to a state that is seldom written.

    The rule and its tensors are those of `jenga_kernels.delta_update`. That operation
    reads and writes the whole state for each token. This one reads an older state and a history:
    the changes that the tokens since then made. It writes only the changes of its own tokens to the
    history. It writes the state only if `next_state_tokens` asks for it.

    Tokens may be rejected. The next call then has fewer computed tokens, and overwrites the
    rejected ones in the history.

    Requests whose slot is `NULL_SLOT` are padding: their output is zero, and nothing else is read
    or written. No two requests may have the same slot.

    Args:
        out: Outputs, written in place, shape and dtype of v.
        states: States, written in place, [num_slots, num_v_heads, head_v_dim, head_k_dim],
            bfloat16, float16 or float32; any strides that are multiples of 16 bytes, last dimension
            contiguous.
        history: Changes of recent tokens, written in place. Keys have the dtype of k, changes that
            of states or float32. At most 64 tokens; up to 16 take fewer instructions.
        q: Queries, [num_tokens, num_qk_heads, head_k_dim], dtype of v; the value heads that share
            one are next to each other. At most 128 elements a head.
        k: Keys, shape and dtype of q.
        v: Values, [num_tokens, num_v_heads, head_v_dim], bfloat16, float16 or float32.
        gates: Natural logarithms of the decays, [num_tokens, num_v_heads], or [num_tokens,
            num_v_heads, head_k_dim] if every key channel has its own decay; at most 0. With A_log
            they are projections, and the logarithms are -exp(A_log) softplus(gates + dt_bias).
        betas: Degree to which a value replaces the one that the state holds under its key,
            [num_tokens, num_v_heads]. With A_log they are projections, which pass through a
            sigmoid.
        slots: Slot of each request's state and history, i32[num_requests], any stride.
        computed_tokens: Number of tokens of each request before this call, i32[num_requests].
        state_tokens: Number of them that its state includes, i32[num_requests]. The others are in
            the history. 0 begins with zero, whatever the slot holds.
        next_state_tokens: Number of tokens that its state includes after the call,
            i32[num_requests]. Either state_tokens, and no state is written, or at least
            computed_tokens and at most the end of the call's own tokens. See
            `jenga_kernels.checks.histories.next_states`.
        A_log: Logarithms of the decay rates, [num_v_heads]. None means that gates and betas are
            not projections.
        dt_bias: Bias that is added to gates, shape of one token's gates.
        scale: Factor of the queries. None means head_k_dim ** -0.5.
        qk_l2norm: Whether queries and keys are scaled to length one.
        query_starts: First token of each request, then the number of tokens,
            i32[num_requests + 1]. None means one token each. A call may update the state of a
            request without tokens.
        writes_states: Whether the call writes every state after its token. Every request then has
            one token, query_starts is None, and next_state_tokens is computed_tokens + 1. A kernel
            of its own serves such a call. It does what `delta_update` does, after it has added
            the tokens of the history, if there are any.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit; on the CPU also if
            the history does not hold a request's tokens since its state.

    Source: ReplaySSM (dao-lab.ai/blog/2026/replayssm). Its steps do not write the state. They keep
        the change of each token: a sum of outer products needs no states in between.
    """
    given = (
        out,
        states,
        history.changes,
        history.keys,
        history.decays,
        q,
        k,
        v,
        gates,
        betas,
        slots,
        computed_tokens,
        state_tokens,
        next_state_tokens,
        A_log,
        dt_bias,
        scale,
        qk_l2norm,
        query_starts,
        writes_states,
    )
    call = call_like(_calls, *given)
    if call.launches is None or shows_values(v):  # on a CPU, values are checked in every call
        call.launches = _launches(_Arguments(*given))
    call.run(dict(zip(_POINTERS, given, strict=True)))


def _launches(given: _Arguments) -> list[Launch]:
    """Check a call, and list the launches of a step.

    Raises:
        ValueError: If something does not fit.
    """
    scale = check_delta_rule(
        given.out,
        given.states,
        given.q,
        given.k,
        given.v,
        given.gates,
        given.betas,
        A_log=given.A_log,
        dt_bias=given.dt_bias,
        scale=given.scale,
    )
    num_tokens, num_v_heads, head_v_dim = given.v.shape
    _, num_qk_heads, head_k_dim = given.q.shape
    is_per_channel = has_channel_decays(given.gates)
    _check_history(given)
    history_tokens = given.history_changes.shape[2]
    num_requests = check_replay(
        given.slots,
        given.query_starts,
        computed_tokens=given.computed_tokens,
        state_tokens=given.state_tokens,
        next_state_tokens=given.next_state_tokens,
        num_tokens=num_tokens,
        num_slots=given.states.shape[0],
        history_tokens=history_tokens,
        writes_states=given.writes_states,
    )
    check_same_device(v=given.v, slots=given.slots)
    if num_requests == 0:
        return []
    machine = machine_of(given.v.device)
    tiles = delta_replay_tiles(
        machine,
        head_k_dim,
        head_v_dim,
        state_element_bytes=given.states.element_size(),
        key_element_bytes=given.k.element_size(),
        history_tokens=history_tokens,
        is_per_channel=is_per_channel,
        has_one_token=given.query_starts is None,
    )
    history = {
        "changes": given.history_changes,
        "keys": given.history_keys,
        "decays": given.history_decays,
    }
    constants = {
        "scale": scale,
        **named_strides(given._asdict() | history, STRIDES),
        "stride_slots": given.slots.stride(0),
        "HEADS_PER_GROUP": num_v_heads // num_qk_heads,
        "HEAD_K_DIM": head_k_dim,
        "HEAD_V_DIM": head_v_dim,
        "HISTORY_TOKENS": history_tokens,
        "IS_PER_CHANNEL": is_per_channel,
        "IS_NORMALIZED": given.qk_l2norm,
        "PRECISION": "ieee" if given.v.dtype == torch.float32 else "tf32x3",
        "BLOCK_K": max(2 * LEAST_PRODUCT, power_of_two(head_k_dim)),
        "BLOCK_V": tiles.block_values,
        "BLOCK_L": max(LEAST_PRODUCT, power_of_two(history_tokens)),
        "BLOCK_LINE": tiles.block_line,
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
    }
    if given.writes_states:
        return [_write_launch(machine, constants, given)]
    kernel = delta_replay_products_kernel if tiles.is_at_once else delta_replay_kernel
    grid = (num_v_heads * triton.cdiv(head_v_dim, tiles.block_values), num_requests)
    return [Launch(kernel=kernel, grid=grid, constants=constants)]


def _write_launch(machine: Machine, constants: dict[str, object], given: _Arguments) -> Launch:
    """Make the launch for one token of each request if every state is written."""
    num_requests, num_v_heads, head_v_dim = given.v.shape
    head_k_dim = given.k.shape[2]
    tiles = delta_update_tiles(machine, head_k_dim, head_v_dim, given.states.element_size())
    constants = constants | {
        "BLOCK_K": power_of_two(head_k_dim),
        "BLOCK_V": tiles.block_values,
        "BLOCK_LINE": tiles.block_line,
        "num_warps": 1,
    }
    grid = (num_v_heads * triton.cdiv(head_v_dim, tiles.block_values), num_requests)
    return Launch(kernel=delta_replay_write_kernel, grid=grid, constants=constants)


def _check_history(given: _Arguments) -> None:
    """Check the tensors of a history.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    changes, keys, decays = given.history_changes, given.history_keys, given.history_decays
    num_slots, num_v_heads, head_v_dim, head_k_dim = given.states.shape
    sizes = (num_slots, num_v_heads, None, head_v_dim)
    check_history_part("history.changes", changes, sizes, given.states.dtype, torch.float32)
    history_tokens = changes.shape[2]
    if history_tokens > MAX_DELTA_HISTORY:
        msg = f"history.changes must have at most {MAX_DELTA_HISTORY} tokens, got {history_tokens}"
        raise ValueError(msg)
    sizes = (num_slots, given.k.shape[1], history_tokens, head_k_dim)
    check_history_part("history.keys", keys, sizes, given.k.dtype)
    sizes = (num_slots, num_v_heads, history_tokens)
    if has_channel_decays(given.gates):
        sizes = (*sizes, head_k_dim)
    check_shape("history.decays", decays, sizes)
    check_dtype("history.decays", decays, (torch.float32,))
    check_contiguous_rows("history.decays", decays)
    check_not_expanded("history.decays", decays)
    parts = {"history.changes": changes, "history.keys": keys, "history.decays": decays}
    check_same_device(k=given.k, **parts)
    check_no_gradients(**parts)

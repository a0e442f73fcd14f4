"""Groups of parameters that the kernels of the gated delta rule share."""

from typing import NamedTuple

from jenga_kernels.triton.lib.groups import Pointer


class Inputs(NamedTuple):
    """Inputs of the recurrence. Gates and dt_bias may have a dimension for channels of keys."""

    q_ptr: Pointer  # [num_tokens, num_qk_heads, head_k_dim]
    k_ptr: Pointer  # [num_tokens, num_qk_heads, head_k_dim]
    v_ptr: Pointer  # [num_tokens, num_v_heads, head_v_dim]
    gates_ptr: Pointer  # [num_tokens, num_v_heads] or [num_tokens, num_v_heads, head_k_dim]
    betas_ptr: Pointer  # [num_tokens, num_v_heads]
    A_log_ptr: Pointer  # [num_v_heads] or None
    dt_bias_ptr: Pointer  # [num_v_heads] or [num_v_heads, head_k_dim], or None


class ChunkInputs(NamedTuple):
    """Inputs from which the matrices of chunks are made: all but the values."""

    q_ptr: Pointer  # [num_tokens, num_qk_heads, head_k_dim]
    k_ptr: Pointer  # [num_tokens, num_qk_heads, head_k_dim]
    gates_ptr: Pointer  # [num_tokens, num_v_heads] or [num_tokens, num_v_heads, head_k_dim]
    betas_ptr: Pointer  # [num_tokens, num_v_heads]
    A_log_ptr: Pointer  # [num_v_heads] or None
    dt_bias_ptr: Pointer  # [num_v_heads] or [num_v_heads, head_k_dim], or None


class Chunks(NamedTuple):
    """Queries, keys and matrices of chunks of BLOCK_T tokens.

    With a decay for each head, queries and keys are those of the num_qk_heads heads, `since_start`
    and `until_end` have the decays within chunks, and there are no kept keys. With a decay for each
    channel, queries and keys of the num_v_heads heads include them.
    """

    queries_ptr: Pointer  # [num_qk_heads or num_v_heads, num_tokens, BLOCK_K]
    keys_ptr: Pointer  # [num_qk_heads or num_v_heads, num_tokens, BLOCK_K]
    kept_keys_ptr: Pointer  # None or [num_v_heads, num_tokens, BLOCK_K]
    scores_ptr: Pointer  # [num_v_heads, num_tokens, BLOCK_T]
    solution_ptr: Pointer  # [num_v_heads, num_tokens, BLOCK_T]
    since_start_ptr: Pointer  # f32[num_v_heads, num_tokens] or None
    until_end_ptr: Pointer  # f32[num_v_heads, num_tokens] or None
    decays_ptr: Pointer  # f32[num_v_heads, num_chunks] or f32[num_v_heads, num_chunks, BLOCK_K]


class History(NamedTuple):
    """Changes, keys and decays of the tokens since the state was written."""

    history_changes_ptr: Pointer  # [num_slots, num_v_heads, history_tokens, head_v_dim]
    history_keys_ptr: Pointer  # [num_slots, num_qk_heads, history_tokens, head_k_dim]
    history_decays_ptr: Pointer  # f32[num_slots, num_v_heads, history_tokens] or [.., head_k_dim]


STRIDES = {
    "out": ("token", "head"),
    "states": ("slot", "head", "dim"),
    "changes": ("slot", "head", "token"),
    "keys": ("slot", "head", "token"),
    "decays": ("slot", "head", "token"),
    "q": ("token", "head"),
    "k": ("token", "head"),
    "v": ("token", "head"),
    "gates": ("token", "head"),
    "betas": ("token",),
    "dt_bias": ("head",),
}
"""Tensor -> dimensions of which kernels take strides. See `addressing.named_strides`.

Changes, keys and decays are those of a history.
"""

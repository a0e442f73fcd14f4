"""The work of one engine step for layers of latent attention."""

from dataclasses import replace

import torch

from jenga_kernels.attention_plan import (
    AttentionKind,
    AttentionPlan,
    check_query_dtype,
    plan_attention,
)
from jenga_kernels.checks.tensors import FP8_DTYPE, check_at_least
from jenga_kernels.triton.latent.tiles import (
    group_heads,
    latent_rows,
    latent_tiles,
    specialized_latent_tiles,
)
from jenga_kernels.triton.lib.tiles import MIN_ROWS, WARPGROUP_ROWS, AttentionTiles, machine_of


def plan_latent_attention(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kind: AttentionKind,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    max_query_tokens: int | None = None,
    decode_query_tokens: int | None = None,
    is_batch_invariant: bool = False,
    is_warp_specialized: bool | None = None,
    tiles: AttentionTiles | None = None,
) -> AttentionPlan:
    """Count the work of a step, for every `latent_attention` of layers of one kind.

    All heads read the same latents, but the results of more than a few rows fit into no program.
    So heads work in groups, and the plan's `kind` has a head of keys for each group, although these
    are stored once. Where warps specialise, programs work in teams instead.

    Args:
        query_starts: First query token of each request, and their number, i32[num_requests + 1].
        seq_lens: Tokens of each request whose latents are stored, queries included,
            i32[num_requests].
        kind: What the layers have in common: num_kv_heads 1, head_dim that of a latent, neither
            window nor chunks.
        num_tokens: Rows of the queries, padding included.
        dtype: Element type of the queries.
        max_query_tokens: No request has more query tokens; None: num_tokens.
        decode_query_tokens: Up to so many query tokens a request is decoded, its keys split over
            programs; 0 sends all requests to the prefill kernel. None takes what costs no more than
            one token. With speculative decoding, pass 1 + the number of drafted tokens.
        is_batch_invariant: Split a request's keys by its own length alone.
        is_warp_specialized: On Hopper, have more than 32 rows of a request decoded by the kernel
            whose warps specialise, where queries have 16-bit elements, pages a multiple of 16
            tokens, latents 512 elements and heads are a divisor or a multiple of 64; elsewhere it
            changes nothing. None: as True.
        tiles: Tiles to use instead of those chosen for the machine.

    Returns:
        The plan, good for one step; `AttentionPlan.update` brings it to the next.

    Raises:
        ValueError: If a shape, dtype, device or size does not fit.
    """
    if kind.num_kv_heads != 1:
        msg = f"kind must have num_kv_heads 1, got {kind.num_kv_heads}"
        raise ValueError(msg)
    if kind.window_tokens is not None or kind.chunk_tokens is not None:
        msg = f"kind must have neither window nor chunks, got {kind}"
        raise ValueError(msg)
    if decode_query_tokens is None:
        decode_query_tokens = max(1, MIN_ROWS // kind.num_heads)
    decode_query_tokens = check_at_least("decode_query_tokens", decode_query_tokens, 0)
    check_query_dtype(dtype)
    machine = machine_of(seq_lens.device)
    element_bytes = dtype.itemsize
    stored_bytes = FP8_DTYPE.itemsize if kind.is_quantised else element_bytes
    if tiles is None and is_warp_specialized is not False and not kind.is_other_float:
        tiles = specialized_latent_tiles(
            machine,
            num_heads=kind.num_heads,
            latent_dim=kind.head_dim,
            page_tokens=kind.page_tokens,
            query_tokens=decode_query_tokens,
            element_bytes=element_bytes,
            stored_bytes=stored_bytes,
        )
    is_converted = kind.is_quantised or kind.is_other_float
    max_rows = latent_rows(machine, element_bytes=element_bytes, is_converted=is_converted)
    if tiles is not None:
        max_rows = (tiles.decode if decode_query_tokens else tiles.prefill).block_m
    if decode_query_tokens > max_rows:
        msg = f"decode_query_tokens must be at most {max_rows}, got {decode_query_tokens}"
        raise ValueError(msg)
    if tiles is not None and tiles.specialized_decode is not None:
        group = kind.num_heads
        needed = -(-group * decode_query_tokens // WARPGROUP_ROWS)
        if tiles.specialized_decode.num_members != needed:
            msg = (
                f"tiles must have teams of {needed} programs, got "
                f"{tiles.specialized_decode.num_members}"
            )
            raise ValueError(msg)
    else:
        group = group_heads(kind.num_heads, max(1, decode_query_tokens), max_rows)
    if tiles is None:
        tiles = latent_tiles(
            machine,
            element_bytes=element_bytes,
            stored_bytes=stored_bytes,
            is_converted=is_converted,
            decode_rows=max(1, decode_query_tokens) * group,
        )
    return plan_attention(
        query_starts,
        seq_lens,
        replace(kind, num_kv_heads=kind.num_heads // group),
        num_tokens=num_tokens,
        dtype=dtype,
        max_query_tokens=max_query_tokens,
        decode_query_tokens=decode_query_tokens,
        is_batch_invariant=is_batch_invariant,
        tiles=tiles,
    )

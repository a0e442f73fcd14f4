"""The work of one engine step for layers of latent attention."""

from dataclasses import replace

import torch

from jenga_kernels.checks.tensors import FP8_DTYPE, check_at_least
from jenga_kernels.plans.attention_plan import (
    AttentionKind,
    AttentionPlan,
    check_query_dtype,
    plan_attention,
)
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

    All heads read the same latents, but no program has room for the results of more than a few
    rows. So heads are split into groups. In the plan's `kind`, each group has a KV head, although
    latents are stored once. With the warp-specialised kernel, programs work in teams instead.

    Args:
        query_starts: First query token of each request, then the number of query tokens,
            i32[num_requests + 1].
        seq_lens: Number of tokens of each request whose latents are stored, queries included,
            i32[num_requests].
        kind: Properties that the layers have in common: num_kv_heads 1, head_dim that of a latent,
            no window and no chunks.
        num_tokens: Rows of the queries, padding included.
        dtype: Element type of the queries.
        max_query_tokens: Most query tokens of any request. None means num_tokens.
        decode_query_tokens: Most query tokens of a request that is decoded, its keys split over
            programs; 0 sends all requests to the prefill kernel. None means as many as cost no more
            than one token. With speculative decoding, pass 1 + the number of draft tokens.
        is_batch_invariant: Whether to split a request's keys by its own length alone.
        is_warp_specialized: Whether to decode more than 32 rows of a request with the
            warp-specialised kernel on Hopper. It needs queries of 16 bits, pages of a multiple of
            16 tokens, and latents of 512 elements. The number of heads must divide 64 or be a
            multiple of it. For other layers it changes nothing. None means True.
        tiles: Tiles to use instead of those chosen for the machine.

    Returns:
        The plan, valid for one step. `AttentionPlan.update` makes it valid for the next.

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

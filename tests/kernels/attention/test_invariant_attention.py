"""Batch-invariant attention: to the last bit the same for a token, whatever is computed with it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from jenga_kernels.attention.paged_attention import paged_attention
from tests.kernels.attention.attention_cases import (
    HALVED_TILES,
    SMALL_TILES,
    Batch,
    Options,
    Shape,
    make_batch,
)
from tests.kernels.support import DEVICE

NUM_TOKENS = 150
CUTS = ((0, 150), (0, 1, 40, 41, 44, 120, 148, 149, 150), (0, 64, 128, 150))
"""Where a prompt is cut: nowhere, anywhere, also as if tokens were decoded, and where tiles end."""

OPTIONS = {
    "causal": Options(),
    "window": Options(window_tokens=20),
    "wide_window": Options(window_tokens=100),
    "chunked": Options(chunk_tokens=48),
    "soft_cap": Options(soft_cap=2.0, window_tokens=70),
    "sinks": Options(has_sinks=True, window_tokens=70),
    "alibi": Options(has_alibi=True),
}


def results_in_pieces(batch: Batch, cuts, **plan) -> torch.Tensor:
    """Compute the tokens of a batch of one prompt piece by piece."""
    out = []
    for start, end in pairwise(cuts):
        piece = replace(
            batch,
            q=batch.q[start:end],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=DEVICE),
        )
        made = piece.plan(decode_query_tokens=0, is_batch_invariant=True, **plan)
        out.append(paged_attention(**piece.arguments, plan=made))
    return torch.cat(out)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    "shape",
    [
        Shape(requests=((NUM_TOKENS, NUM_TOKENS),)),
        pytest.param(
            Shape(requests=((NUM_TOKENS, NUM_TOKENS),), dtype=torch.bfloat16, num_heads=14),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Shape(
                requests=((NUM_TOKENS, NUM_TOKENS),),
                dtype=torch.bfloat16,
                pages_dtype=torch.float8_e4m3fn,
                page_tokens=48,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float32", "bfloat16", "fp8_in_pages_of_48"],
)
def test_invariant_attention_ignores_where_a_prompt_is_cut(shape, options):
    batch = make_batch(shape, options)

    whole, *others = (results_in_pieces(batch, cuts, tiles=SMALL_TILES) for cuts in CUTS)

    for other in others:
        assert torch.equal(other, whole)


def test_invariant_attention_of_wide_heads_ignores_where_a_prompt_is_cut():
    shape = Shape(requests=((NUM_TOKENS, NUM_TOKENS),), dtype=torch.bfloat16, head_dim=512)
    batch = make_batch(shape, Options(window_tokens=70))

    whole, *others = (results_in_pieces(batch, cuts, tiles=HALVED_TILES) for cuts in CUTS)

    for other in others:
        assert torch.equal(other, whole)


def test_invariant_attention_ignores_other_requests():
    shape = Shape(requests=((40, 90), (1, 130), (70, 70), (0, 0), (3, 60)))
    batch = make_batch(shape, Options(window_tokens=50, has_sinks=True))
    plan = {"decode_query_tokens": 0, "is_batch_invariant": True, "tiles": SMALL_TILES}

    together = paged_attention(**batch.arguments, plan=batch.plan(**plan))

    for request in range(len(shape.requests)):
        start, end = batch.query_starts[request : request + 2].tolist()
        alone = replace(
            batch,
            q=batch.q[start:end],
            page_table=batch.page_table[request : request + 1],
            seq_lens=batch.seq_lens[request : request + 1],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
        )
        out = paged_attention(**alone.arguments, plan=alone.plan(**plan))
        assert torch.equal(out, together[start:end])

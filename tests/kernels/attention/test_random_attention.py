"""Random batches, layers and options, each against the reference."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jenga_kernels.checks.tensors import (
    E5M2_DTYPE,
    FP8_DTYPE,
    INT4_DTYPE,
    SCALED_DTYPES,
    SLOT_SCALED_DTYPES,
)
from tests.kernels.attention.attention_cases import (
    HALVED_TILES,
    SMALL_TILES,
    Options,
    Shape,
    check_batch,
    make_batch,
)

SETTINGS = {
    "derandomize": True,
    "database": None,
}


STORED = {
    "fp8": torch.float8_e4m3fn,
    "e5m2": E5M2_DTYPE,
    "int8": torch.int8,
    "int4": INT4_DTYPE,
}


@st.composite
def requests(draw):
    """(query tokens, tokens stored): prompts, chunks, decoded tokens, nothing; few have no keys."""
    stored = draw(st.integers(0, 90))
    queries = draw(st.sampled_from([0, 1, 3, stored // 2, stored, stored + 7]))
    return (queries, stored)


@st.composite
def shapes(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Shape(
        requests=tuple(draw(st.lists(requests(), min_size=1, max_size=5))),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 80, 96, 112, 128, 192, 256, 320, 512])),
        value_dim=draw(st.sampled_from([None, None, 16, 64, 128, 192])),
        page_tokens=draw(st.sampled_from([16, 32, 48, 64, 528])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        pages_dtype=draw(st.sampled_from([None, *STORED.values()])),
        is_head_major=draw(st.booleans()),
        num_padding_tokens=draw(st.integers(0, 3)),
    )


@st.composite
def options(draw, shape):
    is_causal = draw(st.booleans())
    has_slot_scales = shape.pages_dtype in SLOT_SCALED_DTYPES
    if shape.pages_dtype == FP8_DTYPE:
        has_slot_scales = draw(st.booleans())
    has_scales = shape.pages_dtype in SCALED_DTYPES and not has_slot_scales
    sizes = st.one_of(st.none(), st.integers(1, 100))
    return Options(
        is_causal=is_causal,
        window_tokens=draw(sizes) if is_causal else None,
        chunk_tokens=draw(sizes) if is_causal else None,
        soft_cap=draw(st.sampled_from([None, 1.0, 50.0])),
        has_sinks=draw(st.booleans()),
        has_alibi=draw(st.booleans()),
        has_spans=is_causal and draw(st.booleans()),
        num_scales=draw(st.sampled_from([0, 1, shape.num_kv_heads])) if has_scales else 0,
        has_slot_scales=has_slot_scales,
    )


def check_random(data):
    shape = data.draw(shapes())
    chosen = data.draw(options(shape))
    group_heads = shape.num_heads // shape.num_kv_heads
    decode_query_tokens = data.draw(st.sampled_from([0, 1, 3])) if not chosen.has_spans else 0
    # Narrow heads are never cut on a GPU, but may be.
    tiles = data.draw(st.sampled_from([SMALL_TILES, HALVED_TILES]))
    tiles = replace(
        tiles,
        num_programs=data.draw(st.integers(1, 30)),
        decode=replace(tiles.decode, block_m=16 if group_heads * decode_query_tokens <= 16 else 32),
    )

    check_batch(
        make_batch(shape, chosen, seed=data.draw(st.integers(0, 1000))),
        tiles=tiles,
        decode_query_tokens=decode_query_tokens,
        is_batch_invariant=data.draw(st.booleans()),
    )


@settings(max_examples=6, **SETTINGS)
@given(st.data())
def test_paged_attention_agrees_with_its_reference_on_random_batches(data):
    check_random(data)


@pytest.mark.slow
@settings(max_examples=100, **SETTINGS)
@given(st.data())
def test_paged_attention_agrees_with_its_reference_on_many_random_batches(data):
    check_random(data)


FEATURES = {
    "window": {"window_tokens": 20},
    "chunk": {"chunk_tokens": 24},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "spans": {"has_spans": True},
    "fp8": {"num_scales": 2},
    "e5m2": {"num_scales": 2},
    "int8": {"has_slot_scales": True},
    "int4": {"has_slot_scales": True},
    "cross": {"is_causal": False},
}
PAIRS = [
    pair
    for pair in combinations(FEATURES, 2)
    if ("cross" not in pair or not {"window", "chunk"} & set(pair)) and not set(pair) <= set(STORED)
]


@pytest.mark.slow
@pytest.mark.parametrize("is_batch_invariant", [False, True], ids=["balanced", "invariant"])
@pytest.mark.parametrize("pair", PAIRS, ids="_and_".join)
def test_paged_attention_combines(pair, is_batch_invariant):
    chosen = Options(**{name: value for one in pair for name, value in FEATURES[one].items()})
    requests = ((40, 40), (1, 77), (0, 0), (3, 50), (11, 70), (1, 1))
    if "cross" in pair:
        requests += ((30, 7), (4, 2), (2, 0))
    usual = Shape(
        requests=requests,
        dtype=torch.bfloat16,
        pages_dtype=next((STORED[name] for name in pair if name in STORED), None),
    )

    for shape in (
        usual,
        replace(usual, head_dim=80, num_heads=6, page_tokens=48, is_head_major=False),
    ):
        check_batch(
            make_batch(shape, chosen), tiles=SMALL_TILES, is_batch_invariant=is_batch_invariant
        )


@pytest.mark.parametrize("has_alibi", [False, True], ids=["cross", "cross_and_alibi"])
@pytest.mark.parametrize("decode_query_tokens", [0, 8], ids=["prefill", "decode"])
def test_paged_attention_reads_an_encoder_of_fewer_tokens_than_queries(
    decode_query_tokens, has_alibi
):
    shape = Shape(requests=((40, 7), (5, 3), (1, 0), (20, 0), (3, 40), (8, 120)))
    batch = make_batch(shape, Options(is_causal=False, has_alibi=has_alibi, has_sinks=True))

    check_batch(batch, tiles=SMALL_TILES, decode_query_tokens=decode_query_tokens)

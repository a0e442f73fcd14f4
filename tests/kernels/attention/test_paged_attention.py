from dataclasses import replace

import pytest
import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.tensors import SCALED_DTYPES
from jenga_kernels.reference.attention import paged_attention as reference
from jenga_kernels.triton.lib.tiles import Machine, max_decode_rows
from tests.kernels.attention.attention_cases import (
    HALVED_TILES,
    SMALL_TILES,
    Options,
    Shape,
    check_batch,
    make_batch,
)
from tests.kernels.crossed import crossed, halved
from tests.kernels.support import DEVICE

MIXED = ((40, 40), (1, 77), (0, 0), (3, 50), (11, 70), (1, 1))
"""A prompt, decoded tokens, nothing, drafted tokens, a chunk on a context, and so on."""

SHAPES = {
    "one_decoded_token": Shape(requests=((1, 1),)),
    "one_prompt": Shape(requests=((70, 70),)),
    "mixed_batch": Shape(requests=MIXED),
    "only_decoding": Shape(requests=((1, 90), (1, 5), (1, 200), (1, 33))),
    "more_requests_than_programs": Shape(requests=((1, 20),) * 19),
    "token_major_pages": Shape(requests=MIXED, is_head_major=False),
    "padding_tokens": Shape(requests=MIXED, num_padding_tokens=9),
    "padding_requests": Shape(requests=((1, 50), (5, 40), (0, 0), (0, 0)), num_padding_tokens=2),
    "queries_without_keys": Shape(requests=((1, 0), (1, 30), (1, 0))),
    "multi_query": Shape(requests=MIXED, num_heads=6, num_kv_heads=1),
    "multi_head": Shape(requests=MIXED, num_heads=3, num_kv_heads=3),
    "group_of_seven": Shape(requests=MIXED, num_heads=14, num_kv_heads=2),
    "group_of_sixteen": Shape(requests=MIXED, num_heads=16, num_kv_heads=1),
    "head_dim_80": Shape(requests=MIXED, head_dim=80),
    "head_dim_96": Shape(requests=MIXED, head_dim=96),
    "head_dim_112": Shape(requests=MIXED, head_dim=112),
    "head_dim_128": Shape(requests=MIXED, head_dim=128),
    "head_dim_192": Shape(requests=MIXED, head_dim=192),
    "head_dim_256": Shape(requests=MIXED, head_dim=256),
    "head_dim_320": Shape(requests=MIXED, head_dim=320),
    "head_dim_512": Shape(requests=MIXED, num_heads=16, head_dim=512),
    "head_dim_512_token_major": Shape(
        requests=MIXED, num_heads=8, num_kv_heads=1, head_dim=512, is_head_major=False
    ),
    "page_of_48_tokens": Shape(requests=MIXED, page_tokens=48),
    "page_of_128_tokens": Shape(requests=MIXED, page_tokens=128),
    "page_of_528_tokens": Shape(requests=MIXED, page_tokens=528),
    "page_of_784_tokens": Shape(requests=((1, 1000), (20, 900)), page_tokens=784),
    "page_of_1344_tokens": Shape(requests=((1, 1400), (33, 1360)), page_tokens=1344),
}

OPTIONS = {
    "causal": Options(),
    "window": Options(window_tokens=20),
    "window_of_one": Options(window_tokens=1),
    "wide_window": Options(window_tokens=1000),
    "chunked": Options(chunk_tokens=48),
    "cross": Options(is_causal=False),
    "soft_cap": Options(soft_cap=2.0),
    "sinks": Options(has_sinks=True),
    "alibi": Options(has_alibi=True),
    "spans": Options(has_spans=True),
    "window_and_spans": Options(window_tokens=20, has_spans=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_paged_attention_agrees_with_its_reference(shape):
    check_batch(make_batch(shape, Options()), tiles=SMALL_TILES)


DTYPES = [
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_paged_attention_has_option(options, dtype):
    check_batch(make_batch(Shape(requests=MIXED, dtype=dtype), options), tiles=SMALL_TILES)


WIDE = Shape(requests=MIXED, num_heads=8, head_dim=512, dtype=torch.bfloat16)

OTHER_FLOATS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
]
"""Element types of queries and of pages."""


@crossed(
    {
        "dtype, pages_dtype": OTHER_FLOATS,
        "is_batch_invariant": {"balanced": False, "invariant": True},
    }
)
def test_paged_attention_reads_pages_of_another_float_type(dtype, pages_dtype, is_batch_invariant):
    shape = Shape(requests=MIXED, dtype=dtype, pages_dtype=pages_dtype, head_dim=80)
    batch = make_batch(shape, Options(window_tokens=40, has_sinks=True))

    check_batch(batch, tiles=SMALL_TILES, is_batch_invariant=is_batch_invariant)
    check_batch(batch)


@pytest.mark.parametrize("tiles", [SMALL_TILES, HALVED_TILES], ids=["whole", "halves"])
def test_paged_attention_of_wide_heads_reads_pages_of_another_float_type(tiles):
    check_batch(make_batch(replace(WIDE, pages_dtype=torch.float16), Options()), tiles=tiles)


@halved("options", OPTIONS, first=0)
def test_paged_attention_has_option_with_the_tiles_chosen(options):
    check_batch(make_batch(Shape(requests=MIXED), options))


@halved("options", OPTIONS, first=1)
def test_paged_attention_of_wide_heads_in_halves_has_option(options):
    check_batch(make_batch(WIDE, options), tiles=HALVED_TILES)


@crossed(
    {
        "head_dim": [272, 512, 320, 328, 384],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
    }
)
def test_paged_attention_computes_halves_of_any_head_dim(head_dim, dtype):
    shape = replace(WIDE, head_dim=head_dim, dtype=dtype, num_padding_tokens=3)

    check_batch(make_batch(shape, Options(has_sinks=True)), tiles=HALVED_TILES)


@crossed(
    {
        "num_scales": {"unscaled": 0, "per_tensor": 1, "per_head": 2},
        "tiles": {"whole": SMALL_TILES, "halves": HALVED_TILES},
    }
)
def test_paged_attention_of_wide_heads_reads_fp8(tiles, num_scales):
    shape = replace(WIDE, pages_dtype=torch.float8_e4m3fn)

    check_batch(make_batch(shape, Options(num_scales=num_scales)), tiles=tiles)


@pytest.mark.parametrize("tiles", [SMALL_TILES, HALVED_TILES], ids=["whole", "halves"])
@pytest.mark.parametrize("is_batch_invariant", [False, True], ids=["balanced", "invariant"])
def test_paged_attention_of_wide_heads_decodes_drafted_tokens(tiles, is_batch_invariant):
    requests = [(8, 100), (8, 8), (5, 700), (1, 40)]
    batch = make_batch(replace(WIDE, requests=requests), Options(window_tokens=300))

    check_batch(
        batch,
        tiles=replace(tiles, decode=replace(tiles.decode, block_m=32)),
        decode_query_tokens=8,
        max_query_tokens=8,
        is_batch_invariant=is_batch_invariant,
    )


def test_wide_heads_have_decode_tiles_for_drafted_tokens_of_groups():
    def rows(capability, head_dim=512, element_bytes=2):
        machine = Machine(capability=capability, num_processors=100)
        return max_decode_rows(machine, head_dim=head_dim, element_bytes=element_bytes)

    assert [rows(capability) for capability in (80, 90, 100, 120)] == [64, 128, 128, 64]
    assert [rows(capability, element_bytes=4) for capability in (80, 90)] == [16, 64]
    assert rows(90, head_dim=320) == 128
    assert rows(90, head_dim=256) is None
    assert rows(0) is None


@pytest.mark.parametrize("window_tokens", [16, 17, 33])
def test_paged_attention_window_counts_its_own_token_at_page_edges(window_tokens):
    shape = Shape(requests=((1, 100), (40, 96), (1, 97)), page_tokens=32)

    check_batch(make_batch(shape, Options(window_tokens=window_tokens)), tiles=SMALL_TILES)


@pytest.mark.parametrize("decode_query_tokens", [0, 8], ids=["prefill", "decode"])
def test_paged_attention_takes_heads_without_sinks_among_others(decode_query_tokens):
    shape = Shape(requests=((1, 0), (3, 200), (20, 0), (2, 0), (1, 5)), num_padding_tokens=2)
    batch = make_batch(shape, Options(has_sinks=True))
    batch.sinks[::2] = float("-inf")

    check_batch(batch, tiles=SMALL_TILES, decode_query_tokens=decode_query_tokens)


def test_paged_attention_leaves_out_what_spans_name_of_keys_that_are_not_there():
    options = Options(window_tokens=9, has_spans=True)
    # Each request's first key is read, so that none of its slots is NaN.
    batch = make_batch(Shape(requests=((40, 40), (5, 5), (7, 7))), options)
    for row, span in enumerate(((-40, 12), (-9, -2), (20, 10_000), (90, 95), (-1, -1))):
        batch.spans[row::5] = torch.tensor(span, dtype=torch.int32)

    check_batch(batch, tiles=SMALL_TILES)


@crossed(
    {
        "num_scales": {"unscaled": 0, "per_tensor": 1, "per_head": 2},
        "dtype": [torch.bfloat16, torch.float16],
        "pages_dtype": SCALED_DTYPES,
    }
)
def test_paged_attention_reads_fp8(num_scales, dtype, pages_dtype):
    shape = Shape(requests=MIXED, dtype=dtype, pages_dtype=pages_dtype)

    check_batch(make_batch(shape, Options(num_scales=num_scales)), tiles=SMALL_TILES)


@pytest.mark.parametrize("pages_dtype", SCALED_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("decode_query_tokens", [0, 3], ids=["prefill", "decode"])
def test_paged_attention_hides_no_nan_of_fp8_pages(decode_query_tokens, dtype, pages_dtype):
    shape = Shape(requests=((1, 40), (3, 50)), dtype=dtype, pages_dtype=pages_dtype)
    batch = make_batch(shape, Options())
    plan = batch.plan(decode_query_tokens=decode_query_tokens)
    nan = torch.tensor(0x7F, dtype=torch.uint8, device=DEVICE)
    batch.v_pages.view(torch.uint8)[int(batch.page_table[0, 1]), 3, 1, 5] = nan
    batch.k_pages.view(torch.uint8)[int(batch.page_table[1, 0]), 2, 0, 4] = nan

    out = paged_attention(**batch.arguments, plan=plan)

    naive = reference.paged_attention(**batch.arguments)
    assert naive.isnan().any()
    assert torch.equal(out.isnan(), naive.isnan())


@pytest.mark.parametrize("query_len", [2, 8])
def test_paged_attention_decodes_drafted_tokens(query_len):
    requests = [(query_len, 100), (query_len, query_len), (query_len - 1, 300), (1, 40)]
    batch = make_batch(Shape(requests=requests, num_heads=8), Options(window_tokens=60))
    tiles = replace(SMALL_TILES, decode=replace(SMALL_TILES.decode, block_m=32))

    check_batch(batch, tiles=tiles, decode_query_tokens=8, max_query_tokens=8)


def test_paged_attention_may_leave_all_requests_to_one_kernel():
    batch = make_batch(Shape(requests=MIXED), Options())

    check_batch(batch, tiles=SMALL_TILES, decode_query_tokens=0)
    check_batch(make_batch(Shape(requests=((1, 60), (2, 9))), Options()), max_query_tokens=2)


def test_paged_attention_without_a_plan_is_the_same():
    batch = make_batch(Shape(requests=MIXED), Options(window_tokens=30))

    alone = paged_attention(**batch.arguments)

    assert torch.equal(alone, paged_attention(**batch.arguments, plan=batch.plan()))


def test_paged_attention_with_one_plan_serves_many_layers_and_steps():
    shape = Shape(requests=((1, 50), (20, 30)))
    first = make_batch(shape, Options())
    second = make_batch(replace(shape, requests=((20, 90), (1, 7))), Options(), seed=1)
    plan = first.plan(tiles=SMALL_TILES)

    plan.update(second.query_starts, second.seq_lens)
    updated = paged_attention(**second.arguments, plan=plan)

    again = paged_attention(**second.arguments, plan=second.plan(tiles=SMALL_TILES))
    assert torch.equal(updated, again)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 300])
def test_paged_attention_may_be_spread_over_any_number_of_programs(num_programs):
    batch = make_batch(Shape(requests=((1, 90), (2, 400), (0, 0), (1, 3), (30, 64))), Options())

    check_batch(batch, tiles=replace(SMALL_TILES, num_programs=num_programs))


@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        pytest.param(64, SMALL_TILES, id="narrow"),
        pytest.param(512, HALVED_TILES, id="wide", marks=pytest.mark.slow),
    ],
)
def test_paged_attention_in_batch_invariant_mode_ignores_the_rest_of_the_batch(head_dim, tiles):
    shape = Shape(requests=((1, 300), (40, 50), (1, 700), (2, 33), (1, 9)), head_dim=head_dim)
    batch = make_batch(shape, Options(has_sinks=True))
    whole = paged_attention(
        **batch.arguments, plan=batch.plan(tiles=tiles, is_batch_invariant=True)
    )
    check_batch(batch, tiles=tiles, is_batch_invariant=True)

    for request in range(len(shape.requests)):
        start, end = batch.query_starts[request : request + 2].tolist()
        alone = replace(
            batch,
            q=batch.q[start:end],
            page_table=batch.page_table[request : request + 1],
            seq_lens=batch.seq_lens[request : request + 1],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
        )
        plan = alone.plan(tiles=tiles, is_batch_invariant=True)
        assert torch.equal(paged_attention(**alone.arguments, plan=plan), whole[start:end])


def test_paged_attention_of_no_tokens_or_requests_is_empty():
    batch = make_batch(Shape(requests=((0, 0),)), Options())
    assert paged_attention(**batch.arguments).shape == (0, 4, 64)

    no_requests = replace(
        batch,
        page_table=batch.page_table[:0],
        seq_lens=batch.seq_lens[:0],
        query_starts=batch.query_starts[:1],
    )
    assert paged_attention(**no_requests.arguments).shape == (0, 4, 64)


def test_paged_attention_reaches_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    num_pages = 2**31 // (16 * 128) + 8
    arena = torch.empty(num_pages, 16, 1, 128, dtype=torch.float16, device=DEVICE)
    batch = make_batch(
        Shape(requests=((1, 33), (20, 48)), num_heads=2, num_kv_heads=1, dtype=torch.float16),
        Options(),
    )
    far = batch.page_table.clone()
    used = range(len(batch.k_pages))
    for page in used:
        arena[num_pages - 1 - page, ..., :64] = batch.k_pages[page]
        arena[num_pages - 1 - page, ..., 64:] = batch.v_pages[page]
    near = paged_attention(**batch.arguments)

    moved = replace(
        batch,
        k_pages=arena[..., :64],
        v_pages=arena[..., 64:],
        page_table=(num_pages - 1 - far).to(torch.int32),
    )

    assert arena.numel() > 2**31
    assert torch.equal(paged_attention(**moved.arguments), near)


def test_paged_attention_reads_queries_past_2_to_the_31_elements():
    # Rows nobody touches cost no memory, so these queries are mostly not there.
    shape = Shape(requests=((1, 33), (20, 48)), num_heads=2, num_kv_heads=1, dtype=torch.float16)
    batch = make_batch(shape, Options())
    step = 2**31 // 20 // 8 * 8
    far = torch.empty(21 * step, dtype=torch.float16, device=DEVICE).as_strided(
        (21, 2, 64), (step, 64, 1)
    )
    far.copy_(batch.q)

    for decode_query_tokens in (0, 1):
        plan = batch.plan(decode_query_tokens=decode_query_tokens)
        near = paged_attention(**batch.arguments, plan=plan)
        assert torch.equal(paged_attention(**batch.arguments | {"q": far}, plan=plan), near)


@pytest.mark.parametrize("num_programs", [1, 7], ids=["whole", "in_parts"])
def test_paged_attention_writes_results_past_2_to_the_31_elements(num_programs):
    shape = Shape(requests=((1, 90), (1, 200)), num_heads=128, num_kv_heads=8, dtype=torch.float16)
    batch = make_batch(shape, Options())
    tiles = replace(SMALL_TILES, num_programs=num_programs)
    near = paged_attention(**batch.arguments, plan=batch.plan(tiles=tiles))
    num_tokens = 2**31 // (128 * 64) + 8
    q = torch.empty(num_tokens, 128, 64, dtype=torch.float16, device=DEVICE)
    q[-2:] = batch.q
    moved = replace(batch, q=q, query_starts=batch.query_starts + num_tokens - 2)
    out, lse = torch.empty_like(q), torch.empty(num_tokens, 128, device=DEVICE)

    plan = moved.plan(tiles=tiles, max_query_tokens=1)
    paged_attention(**moved.arguments, out=out, lse=lse, plan=plan)

    assert out.numel() > 2**31
    assert torch.equal(out[-2:], near)

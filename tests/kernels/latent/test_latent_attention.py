from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from jenga_kernels.attention.attention_merge import attention_merge
from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.plans.attention_plan import AttentionKind
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.reference.latent import latent_attention as reference
from jenga_kernels.triton.latent.tiles import group_heads
from jenga_kernels.triton.lib.tiles import AttentionTiles, LoopTiles
from tests.kernels.latent.latent_cases import Shape, check_batch, make_batch
from tests.kernels.support import DEVICE, check_close

MIXED = ((20, 20), (1, 77), (0, 0), (3, 50), (11, 40), (1, 1))
"""A prompt, decoded tokens, nothing, drafted tokens, a chunk on a context, and so on."""

SMALL_TILES = AttentionTiles(
    decode=LoopTiles(block_m=16, block_n=32, num_warps=4, num_stages=2),
    prefill=LoopTiles(block_m=64, block_n=32, num_warps=4, num_stages=2),
    num_programs=7,
    block_splits=4,
)
"""Tiles that cut even short requests into many pieces."""

DEEPSEEK = {"latent_dim": 512, "rotary_dim": 64, "dtype": torch.bfloat16}

SHAPES = {
    "one_decoded_token": Shape(requests=((1, 1),)),
    "one_prompt": Shape(requests=((70, 70),)),
    "mixed_batch": Shape(requests=MIXED),
    "only_decoding": Shape(requests=((1, 90), (1, 5), (1, 200), (1, 33))),
    "more_requests_than_programs": Shape(requests=((1, 20),) * 11),
    "padding_tokens": Shape(requests=MIXED, num_padding_tokens=9),
    "padding_requests": Shape(requests=((1, 50), (5, 40), (0, 0), (0, 0)), num_padding_tokens=2),
    "queries_without_keys": Shape(requests=((1, 0), (1, 30), (4, 0), (1, 0))),
    "more_queries_than_keys": Shape(requests=((5, 2), (2, 1))),
    "all_keys_for_every_query": Shape(requests=((5, 90), (1, 40), (20, 7)), is_causal=False),
    "one_head": Shape(requests=MIXED, num_heads=1),
    "heads_in_two_groups": Shape(requests=((9, 40), (1, 77), (3, 20)), num_heads=32),
    "heads_in_groups_that_leave_rows": Shape(requests=((9, 40), (1, 77)), num_heads=22),
    "a_prime_number_of_heads": Shape(requests=((1, 40), (9, 30)), num_heads=17),
    "float16": Shape(requests=MIXED, dtype=torch.float16),
    "bfloat16": Shape(requests=MIXED, dtype=torch.bfloat16),
    "fp8": Shape(requests=MIXED, dtype=torch.bfloat16, is_fp8=True),
    "fp8_with_a_scale": Shape(requests=MIXED, dtype=torch.bfloat16, is_fp8=True, has_scale=True),
    "fp8_read_in_float32": Shape(requests=MIXED, is_fp8=True, has_scale=True),
    "bfloat16_read_in_float32": Shape(requests=MIXED, pages_dtype=torch.bfloat16),
    "float16_read_in_bfloat16": Shape(
        requests=MIXED, dtype=torch.bfloat16, pages_dtype=torch.float16
    ),
    "sizes_that_are_no_powers_of_two": Shape(requests=MIXED, latent_dim=96, rotary_dim=24),
    "a_narrow_rotary_key": Shape(requests=MIXED, rotary_dim=8),
    "page_of_48_tokens": Shape(requests=MIXED, page_tokens=48),
    "page_of_64_tokens": Shape(requests=MIXED, page_tokens=64),
    "page_of_784_tokens": Shape(requests=((1, 1000), (5, 900)), page_tokens=784),
    "page_of_1344_tokens": Shape(requests=((1, 1400),), page_tokens=1344),
    "deepseek_decode": Shape(requests=((1, 130), (2, 40)), num_heads=16, **DEEPSEEK),
    "deepseek_chunk": Shape(requests=((5, 37),), num_heads=16, page_tokens=64, **DEEPSEEK),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_latent_attention_agrees_with_its_reference(shape):
    check_batch(make_batch(shape), tiles=SMALL_TILES)


@pytest.mark.parametrize("num_requests", [1, 3, 40])
def test_latent_attention_keeps_no_more_parts_than_its_programs_can_make(num_requests):
    # Requests of one tile beside some of many, so that splits begin and end anywhere.
    requests = tuple((1, (33, 160, 7)[request % 3]) for request in range(num_requests))
    batch = make_batch(Shape(requests=requests, num_heads=32))

    plan = batch.plan(tiles=SMALL_TILES)

    num_pairs = 2 * num_requests  # heads work in groups of 16
    assert plan.partial_out.shape[0] == 7 + min(7, num_pairs)
    check_batch(batch, tiles=SMALL_TILES)


@pytest.mark.parametrize("num_heads", [64, 128])
def test_latent_attention_has_the_heads_of_large_models_with_the_tiles_chosen(num_heads):
    requests = ((1, 50), (1, 0), (2, 33))

    check_batch(make_batch(Shape(requests=requests, num_heads=num_heads, **DEEPSEEK)))


@pytest.mark.parametrize(("num_heads", "query_len"), [(4, 2), (4, 8), (16, 4)])
def test_latent_attention_decodes_drafted_tokens(num_heads, query_len):
    requests = [(query_len, 100), (query_len, query_len), (query_len - 1, 150), (1, 40)]
    batch = make_batch(Shape(requests=requests, num_heads=num_heads))
    tiles = replace(SMALL_TILES, decode=replace(SMALL_TILES.decode, block_m=32))

    check_batch(batch, tiles=tiles, decode_query_tokens=query_len, max_query_tokens=query_len)


def test_latent_attention_may_leave_all_requests_to_one_kernel():
    check_batch(make_batch(Shape(requests=MIXED)), tiles=SMALL_TILES, decode_query_tokens=0)
    check_batch(make_batch(Shape(requests=((1, 60), (1, 9)))), max_query_tokens=1)


def test_latent_attention_without_a_plan_is_the_same():
    batch = make_batch(Shape(requests=MIXED))

    alone = latent_attention(**batch.arguments)

    assert torch.equal(alone, latent_attention(**batch.arguments, plan=batch.plan()))


def test_latent_attention_with_one_plan_serves_many_layers_and_steps():
    first = make_batch(Shape(requests=((1, 50), (20, 30))))
    second = make_batch(Shape(requests=((20, 90), (1, 7))), seed=1)
    plan = first.plan(tiles=SMALL_TILES)

    plan.update(second.query_starts, second.seq_lens)
    updated = latent_attention(**second.arguments, plan=plan)

    again = latent_attention(**second.arguments, plan=second.plan(tiles=SMALL_TILES))
    assert torch.equal(updated, again)


@pytest.mark.parametrize("num_programs", [1, 100])
def test_latent_attention_may_be_spread_over_any_number_of_programs(num_programs):
    requests = ((1, 90), (1, 300), (0, 0), (1, 3), (9, 64))

    check_batch(
        make_batch(Shape(requests=requests, num_heads=6)),
        tiles=replace(SMALL_TILES, num_programs=num_programs),
    )


def test_latent_attention_in_batch_invariant_mode_ignores_the_rest_of_the_batch():
    shape = Shape(requests=((1, 200), (9, 50), (1, 420), (1, 33)), num_heads=6)
    batch = make_batch(shape)
    options = {"tiles": SMALL_TILES, "is_batch_invariant": True}
    whole = latent_attention(**batch.arguments, plan=batch.plan(**options))
    check_batch(batch, **options)

    for request in range(len(shape.requests)):
        start, end = batch.query_starts[request : request + 2].tolist()
        alone = replace(
            batch,
            q=batch.q[start:end],
            page_table=batch.page_table[request : request + 1],
            seq_lens=batch.seq_lens[request : request + 1],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
        )
        got = latent_attention(**alone.arguments, plan=alone.plan(**options))
        assert torch.equal(got, whole[start:end])


def test_latent_attention_in_batch_invariant_mode_ignores_where_a_prompt_is_cut():
    batch = make_batch(Shape(requests=((120, 120),), num_heads=6))
    results = []
    for cuts in ((0, 120), (0, 1, 40, 41, 44, 118, 119, 120)):
        pieces = []
        for start, end in pairwise(cuts):
            piece = replace(
                batch,
                q=batch.q[start:end],
                query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
                seq_lens=torch.tensor([end], dtype=torch.int32, device=DEVICE),
            )
            plan = piece.plan(tiles=SMALL_TILES, is_batch_invariant=True, decode_query_tokens=0)
            pieces.append(latent_attention(**piece.arguments, plan=plan))
        results.append(torch.cat(pieces))

    assert torch.equal(*results)


def test_latent_attention_over_a_shared_prefix_merges_with_that_over_the_rest():
    # Two requests of one query each share the first 64 tokens: four pages of 16.
    whole = make_batch(Shape(requests=((1, 90), (1, 70))))
    table = whole.page_table
    table[1, :4] = table[0, :4]
    wanted_lse, prefix_lse, rest_lse = (torch.empty(2, 4, device=DEVICE) for _ in range(3))
    wanted = latent_attention(**whole.arguments, lse=wanted_lse)
    prefix = replace(
        whole,
        shape=replace(whole.shape, is_causal=False),
        page_table=table[:1, :4],
        query_starts=torch.tensor([0, 2], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([64], dtype=torch.int32, device=DEVICE),
    )
    rest = replace(whole, page_table=table[:, 4:], seq_lens=whole.seq_lens - 64)

    merged = attention_merge(
        latent_attention(**prefix.arguments, lse=prefix_lse),
        prefix_lse,
        latent_attention(**rest.arguments, lse=rest_lse),
        rest_lse,
        lse=rest_lse,
    )

    # A merge rounds each weight once more: as far apart as two orders of the same sums.
    check_close(merged, wanted, wanted, slack=4 * torch.finfo(torch.float32).eps)
    check_close(rest_lse, wanted_lse, wanted_lse, slack=4 * torch.finfo(torch.float32).eps)


def test_latent_attention_of_no_tokens_or_requests_is_empty():
    batch = make_batch(Shape(requests=((0, 0),)))
    assert latent_attention(**batch.arguments).shape == (0, 4, 64)

    no_requests = replace(
        batch,
        page_table=batch.page_table[:0],
        seq_lens=batch.seq_lens[:0],
        query_starts=batch.query_starts[:1],
    )
    assert latent_attention(**no_requests.arguments).shape == (0, 4, 64)


def test_latent_attention_reaches_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    batch = make_batch(Shape(requests=((1, 33), (20, 48)), dtype=torch.float16))
    num_pages = 2**31 // (16 * 80) + 8
    arena = torch.empty(num_pages, 16, 80, dtype=torch.float16, device=DEVICE)
    used = batch.page_table[batch.page_table < 2**30]
    for page in used.unique().tolist():
        arena[num_pages - 1 - page] = batch.pages[page]

    moved = replace(
        batch, pages=arena, page_table=(num_pages - 1 - batch.page_table).to(torch.int32)
    )

    assert arena.numel() > 2**31
    near, far = latent_attention(**batch.arguments), latent_attention(**moved.arguments)
    assert torch.equal(far, near)


@pytest.mark.gpu
@pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="needs a GPU: the interpreter loads in order"
)
def test_latent_attention_that_loads_ahead_is_the_same_as_that_which_does_not():
    requests = ((1, 3000), (2, 1500), (70, 400))
    batch = make_batch(Shape(requests=requests, num_heads=128, page_tokens=64, **DEEPSEEK))
    plan = batch.plan()
    tiles = replace(
        plan.tiles,
        decode=replace(plan.tiles.decode, num_stages=1),
        prefill=replace(plan.tiles.prefill, num_stages=1),
    )

    ahead = latent_attention(**batch.arguments, plan=plan)
    in_order = latent_attention(**batch.arguments, plan=batch.plan(tiles=tiles))

    assert torch.equal(ahead, in_order)


@st.composite
def requests(draw):
    """(query tokens, tokens stored): prompts, chunks, decoded tokens, nothing."""
    stored = draw(st.integers(0, 90))
    queries = draw(st.sampled_from([0, min(1, stored), min(3, stored), stored // 2, stored]))
    return (queries, stored)


def check_random(data):
    is_fp8 = data.draw(st.booleans())
    shape = Shape(
        requests=tuple(data.draw(st.lists(requests(), min_size=1, max_size=5))),
        num_heads=data.draw(st.sampled_from([1, 3, 16, 20])),
        latent_dim=data.draw(st.sampled_from([32, 64, 112])),
        rotary_dim=data.draw(st.sampled_from([16, 32])),
        page_tokens=data.draw(st.sampled_from([16, 32, 48, 64, 528])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        is_fp8=is_fp8,
        has_scale=is_fp8 and data.draw(st.booleans()),
        is_causal=data.draw(st.booleans()),
        num_padding_tokens=data.draw(st.integers(0, 3)),
    )
    block_m = data.draw(st.sampled_from([16, 64]))

    check_batch(
        make_batch(shape, seed=data.draw(st.integers(0, 1000))),
        tiles=replace(
            SMALL_TILES,
            num_programs=data.draw(st.sampled_from([1, 4, 30])),
            decode=replace(SMALL_TILES.decode, block_m=block_m),
        ),
        decode_query_tokens=data.draw(st.sampled_from([0, 1, 3, 8])),
        is_batch_invariant=data.draw(st.booleans()),
    )


SETTINGS = {
    "derandomize": True,
    "database": None,
}


@settings(max_examples=5, **SETTINGS)
@given(st.data())
def test_latent_attention_agrees_with_its_reference_on_random_batches(data):
    check_random(data)


@pytest.mark.slow
@settings(max_examples=100, **SETTINGS)
@given(st.data())
def test_latent_attention_agrees_with_its_reference_on_many_random_batches(data):
    check_random(data)


@pytest.mark.parametrize(
    ("num_heads", "query_tokens", "max_rows", "group"),
    [(128, 1, 64, 64), (128, 3, 64, 16), (64, 8, 64, 8), (20, 1, 16, 10), (17, 1, 16, 1)],
)
def test_heads_work_in_groups_that_divide_them_and_fit(num_heads, query_tokens, max_rows, group):
    assert group_heads(num_heads, query_tokens, max_rows) == group


def good_arguments():
    return make_batch(Shape(requests=((1, 20), (3, 20)), dtype=torch.float16)).arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_latent_attention_hides_no_nan_of_fp8_pages(dtype):
    batch = make_batch(Shape(requests=((1, 40), (30, 50), (1, 9)), dtype=dtype, is_fp8=True))
    nan = torch.tensor(0x7F, dtype=torch.uint8, device=DEVICE)
    for request, element in ((0, 5), (1, 70)):
        batch.pages.view(torch.uint8)[int(batch.page_table[request, 1]), 3, element] = nan

    out = latent_attention(**batch.arguments)

    naive = reference.latent_attention(**batch.arguments)
    assert naive.isnan().any()
    assert torch.equal(out.isnan(), naive.isnan())


def plan_of(arguments, *, kind=None, **changes):
    kind = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "page_tokens": 16} | (kind or {})
    options = {"num_tokens": 4, "dtype": torch.float16} | changes
    steps = (arguments["query_starts"], arguments["seq_lens"])
    return plan_latent_attention(*steps, AttentionKind(**kind), **options)


BAD_ARGUMENTS = {
    "a_flat_query": ("q", lambda a: {"q": a["q"].flatten(1)}),
    "queries_of_another_width": ("pages", lambda a: {"q": a["q"][..., :64]}),
    "integer_queries": ("q", lambda a: {"q": a["q"].int()}),
    "queries_that_require_a_gradient": ("q", lambda a: {"q": a["q"].clone().requires_grad_()}),
    "pages_in_float32_of_other_queries": ("pages", lambda a: {"pages": a["pages"].float()}),
    "pages_with_heads": ("pages", lambda a: {"pages": a["pages"][:, :, None]}),
    "scattered_pages": ("pages", lambda a: {"pages": a["pages"].repeat(1, 1, 2)[..., ::2]}),
    "pages_off_alignment": (
        "pages",
        lambda _: {"pages": torch.zeros(9, 16, 81, dtype=torch.float16, device=DEVICE)[..., :80]},
    ),
    "pages_without_tokens": ("pages", lambda a: {"pages": a["pages"][:, :0]}),
    "a_latent_of_no_elements": ("latent_dim", lambda _: {"latent_dim": 0}),
    "a_latent_of_odd_width": ("latent_dim", lambda _: {"latent_dim": 56}),
    "a_wide_rotary_key": (
        "pages",
        lambda a: {"q": a["q"].repeat(1, 1, 2), "pages": a["pages"].repeat(1, 1, 2)},
    ),
    "no_rotary_key": ("pages", lambda _: {"latent_dim": 80}),
    "a_64_bit_page_table": ("page_table", lambda a: {"page_table": a["page_table"].long()}),
    "a_transposed_page_table": (
        "page_table",
        lambda a: {"page_table": a["page_table"].T.contiguous().T},
    ),
    "a_page_table_without_columns": (
        "page_table",
        lambda a: {"page_table": a["page_table"][:, :0], "seq_lens": a["seq_lens"] * 0},
    ),
    "too_few_query_starts": ("query_starts", lambda a: {"query_starts": a["query_starts"][:2]}),
    "lengths_of_64_bits": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].long()}),
    "a_scale_of_zero": ("scale", lambda _: {"scale": 0.0}),
    "a_scale_of_pages_that_have_none": (
        "latent_scale",
        lambda _: {"latent_scale": torch.ones(1, device=DEVICE)},
    ),
    "results_of_the_width_of_queries": ("out", lambda a: {"out": a["q"].contiguous()}),
    "results_of_another_dtype": ("out", lambda _: {"out": torch.zeros(4, 4, 64, device=DEVICE)}),
    "sums_of_another_shape": ("lse", lambda _: {"lse": torch.zeros(4, 3, device=DEVICE)}),
    "a_plan_for_fewer_tokens": ("plan", lambda a: {"plan": plan_of(a, num_tokens=3)}),
    "a_plan_for_three_heads": ("plan", lambda a: {"plan": plan_of(a, kind={"num_heads": 3})}),
    "a_plan_for_another_dtype": ("plan", lambda a: {"plan": plan_of(a, dtype=torch.float32)}),
    "a_plan_for_other_pages": ("plan", lambda a: {"plan": plan_of(a, kind={"page_tokens": 32})}),
    "a_plan_for_a_prefix": ("plan", lambda a: {"plan": plan_of(a, kind={"is_causal": False})}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_latent_attention_refuses(name, change):
    arguments = good_arguments()
    out = torch.full((4, 4, 64), 7.0, dtype=torch.float16, device=DEVICE)
    arguments |= {"out": out} | change(arguments)

    with pytest.raises(ValueError, match=f"^{name} "):
        latent_attention(**arguments)

    assert (out == 7.0).all()


BAD_PLANS = {
    "several_heads_of_keys": ("kind", {"kind": {"num_kv_heads": 2}}),
    "a_window": ("kind", {"kind": {"window_tokens": 5}}),
    "a_negative_number_of_tokens": ("num_tokens", {"num_tokens": -1}),
    "queries_of_64_bits": ("dtype", {"dtype": torch.float64}),
    "more_tokens_than_rows": (
        "decode_query_tokens",
        {"decode_query_tokens": 17, "tiles": SMALL_TILES},
    ),
    "fewer_than_no_drafts": ("decode_query_tokens", {"decode_query_tokens": -1}),
}


@pytest.mark.parametrize(("name", "changes"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_plan_latent_attention_refuses(name, changes):
    with pytest.raises(ValueError, match=f"^{name} "):
        plan_of(good_arguments(), **changes)

"""Attention by the prefill kernel for Hopper whose warps specialise; nothing interprets it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jenga_kernels.plans.attention_plan import specialized_prefill_tiles
from jenga_kernels.triton.lib.tiles import (
    HOPPER,
    INTERPRETER,
    Machine,
    machine_of,
    specialized_tiles,
)
from tests.kernels.attention.attention_cases import (
    SMALL_TILES,
    Options,
    Shape,
    check_batch,
    make_batch,
)
from tests.kernels.attention.test_compiled_attention import launch
from tests.kernels.attention.test_random_attention import SETTINGS, options, shapes
from tests.kernels.compiling import compile_job
from tests.kernels.support import DEVICE

only_on_hopper = pytest.mark.skipif(
    machine_of(torch.device(DEVICE)).capability != HOPPER,
    reason="only Hopper runs it; tests/kernels/test_emulated.py does so in software",
)

REQUESTS = ((150, 150), (40, 300), (1, 70), (0, 0), (129, 400))
"""More than a tile of queries, chunks on contexts of several tiles of keys, a single token."""

SHAPES = {
    "mixed_batch": Shape(requests=REQUESTS),
    "one_token": Shape(requests=((1, 1),)),
    "queries_without_keys": Shape(requests=((3, 0), (2, 30)), num_padding_tokens=3),
    "more_queries_than_keys": Shape(requests=((40, 7), (140, 100))),
    "tokens_to_the_end_of_tiles": Shape(requests=((128, 128), (64, 256))),
    "token_major_pages": Shape(requests=REQUESTS, is_head_major=False),
    "multi_query": Shape(requests=((90, 200),), num_heads=6, num_kv_heads=1),
    "multi_head": Shape(requests=((90, 200),), num_heads=3, num_kv_heads=3),
    "head_dim_16": Shape(requests=((90, 200),), head_dim=16),
    "head_dim_80": Shape(requests=((90, 200),), head_dim=80),
    "head_dim_128": Shape(requests=REQUESTS, head_dim=128),
    "head_dim_192": Shape(requests=((90, 200),), head_dim=192),
    "head_dim_256": Shape(requests=((90, 200),), head_dim=256),
    "page_of_48_tokens": Shape(requests=REQUESTS, page_tokens=48),
    "page_of_128_tokens": Shape(requests=REQUESTS, page_tokens=128),
    "page_of_528_tokens": Shape(requests=((90, 700),), page_tokens=528),
    "page_of_784_tokens": Shape(requests=((90, 900),), page_tokens=784),
    "page_of_1344_tokens": Shape(requests=((90, 1400),), page_tokens=1344),
}

OPTIONS = {
    "causal": Options(),
    "window": Options(window_tokens=20),
    "window_of_one": Options(window_tokens=1),
    "window_of_tiles": Options(window_tokens=200),
    "chunked": Options(chunk_tokens=48),
    "cross": Options(is_causal=False),
    "soft_cap": Options(soft_cap=2.0),
    "sinks": Options(has_sinks=True),
    "alibi": Options(has_alibi=True),
    "spans": Options(has_spans=True),
    "all": Options(
        window_tokens=150,
        chunk_tokens=200,
        soft_cap=2.0,
        has_sinks=True,
        has_alibi=True,
        has_spans=True,
    ),
}


def check(shape, options):
    batch = make_batch(replace(shape, dtype=torch.bfloat16), options)
    check_batch(batch, decode_query_tokens=0, is_warp_specialized=True)


@only_on_hopper
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_specialized_prefill_agrees_with_the_reference(shape):
    check(shape, Options(window_tokens=100))


@only_on_hopper
def test_specialized_prefill_agrees_with_the_reference_under_a_window_of_wide_tiles():
    check(Shape(requests=((150, 1100), (1, 1), (70, 650))), Options(window_tokens=600))


@only_on_hopper
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_specialized_prefill_has_option(options):
    check(Shape(requests=((150, 150), (40, 300)), head_dim=128), options)


@only_on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_specialized_prefill_goes_round_its_ring_of_tiles(head_dim):
    check(Shape(requests=((30, 1400),), head_dim=head_dim, num_heads=2), Options())


@only_on_hopper
@pytest.mark.parametrize("options", [Options(), Options(window_tokens=150, has_spans=True)])
def test_specialized_prefill_programs_do_one_row_tile_after_another(options):
    shape = Shape(requests=REQUESTS, head_dim=128, dtype=torch.bfloat16)
    batch = make_batch(shape, options)
    tiles = batch.plan(is_warp_specialized=True, decode_query_tokens=0).tiles
    few = replace(tiles, specialized_prefill=replace(tiles.specialized_prefill, num_programs=3))

    check_batch(batch, decode_query_tokens=0, tiles=few)


JOINED_SHAPES = {
    "pages_of_8_tokens": Shape(requests=REQUESTS, page_tokens=8, run_pages=20),
    "pages_of_16_tokens": Shape(requests=REQUESTS, head_dim=128, run_pages=9),
    "pages_of_32_tokens": Shape(requests=REQUESTS, page_tokens=32, run_pages=9, num_heads=2),
    "wide_heads": Shape(requests=((70, 500),), head_dim=256, run_pages=12),
    "no_neighbours": Shape(requests=((70, 300),)),
    "all_neighbours": Shape(requests=((70, 700),), run_pages=1000),
    "token_major": Shape(requests=REQUESTS, is_head_major=False, run_pages=9),
}


@only_on_hopper
@pytest.mark.parametrize("options", [Options(), Options(window_tokens=150)])
@pytest.mark.parametrize("shape", JOINED_SHAPES.values(), ids=JOINED_SHAPES.keys())
def test_specialized_prefill_loads_neighbouring_pages_as_one_box(shape, options):
    batch = make_batch(replace(shape, dtype=torch.bfloat16), options)
    tiles = batch.plan(is_warp_specialized=True, decode_query_tokens=0).tiles
    joining = replace(tiles.specialized_prefill, joins_pages=True)

    check_batch(batch, decode_query_tokens=0, tiles=replace(tiles, specialized_prefill=joining))


@only_on_hopper
def test_specialized_prefill_takes_heads_without_sinks_and_spans_of_keys_that_are_not_there():
    shape = Shape(requests=((20, 0), (150, 150), (9, 9)), dtype=torch.bfloat16)
    batch = make_batch(shape, Options(window_tokens=40, has_sinks=True, has_spans=True))
    batch.sinks[::2] = float("-inf")
    for row, span in enumerate(((-200, 12), (-9, -2), (70, 10_000), (190, 195))):
        batch.spans[row::4] = torch.tensor(span, dtype=torch.int32)

    check_batch(batch, decode_query_tokens=0, is_warp_specialized=True)


@only_on_hopper
def test_specialized_prefill_takes_float16_beside_decoded_tokens():
    batch = make_batch(Shape(requests=REQUESTS, dtype=torch.float16), Options())
    check_batch(batch, is_warp_specialized=True)


@st.composite
def long_requests(draw):
    """(query tokens, tokens stored), of several tiles too."""
    stored = draw(st.integers(0, 500))
    return (draw(st.sampled_from([0, min(1, stored), stored // 3, stored])), stored)


@only_on_hopper
@pytest.mark.slow
@settings(max_examples=30, **SETTINGS)
@given(st.data())
def test_specialized_prefill_agrees_with_the_reference_on_random_batches(data):
    shape = replace(
        data.draw(shapes()),
        requests=tuple(data.draw(st.lists(long_requests(), min_size=1, max_size=3))),
        head_dim=data.draw(st.sampled_from([16, 64, 80, 128, 192, 256])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )
    batch = make_batch(shape, data.draw(options(shape)), seed=data.draw(st.integers(0, 1000)))
    check_batch(batch, decode_query_tokens=0, is_warp_specialized=True)


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        (INTERPRETER, {}),
        (Machine(capability=80, num_processors=108), {}),
        (Machine(capability=100, num_processors=148), {}),
        (Machine(capability=90, num_processors=132), {"head_dim": 512}),
        (Machine(capability=90, num_processors=132), {"page_tokens": 20}),
    ],
    ids=["interpreter", "a100", "b200", "wide_head", "odd_page"],
)
def test_what_the_specialized_kernel_cannot_do_has_no_tiles(machine, changes):
    fitting = {"head_dim": 128, "page_tokens": 16, "element_bytes": 2}
    hopper = Machine(capability=90, num_processors=132)
    assert specialized_tiles(hopper, **fitting) is not None
    assert specialized_tiles(machine, **fitting | changes) is None


def test_narrow_windows_have_tiles_of_fewer_keys():
    hopper = Machine(capability=90, num_processors=132)
    fitting = {"page_tokens": 16, "element_bytes": 2}

    def keys(head_dim, window_tokens):
        tiles = specialized_tiles(hopper, head_dim=head_dim, window_tokens=window_tokens, **fitting)
        return tiles.block_n, tiles.num_stages

    assert keys(128, None) == keys(128, 1024) == (128, 2)
    assert keys(128, 128) == keys(128, 512) == keys(64, 128) == (64, 4)
    assert keys(256, 128) == keys(256, None) == (64, 2)


def test_specialized_tiles_ask_for_row_tiles_of_their_size():
    hopper = Machine(capability=90, num_processors=132)
    specialized = specialized_tiles(hopper, head_dim=64, page_tokens=16, element_bytes=2)
    batch = make_batch(Shape(requests=((3, 3),), dtype=torch.bfloat16), Options())
    with pytest.raises(ValueError, match="128 prefill rows, got 32"):
        batch.plan(tiles=replace(SMALL_TILES, specialized_prefill=specialized))


@pytest.mark.parametrize(
    ("pages_dtype", "has_slot_scales"),
    [(torch.int8, True), (torch.float8_e4m3fn, False), (torch.float16, False)],
    ids=["int8", "float8", "float16"],
)
def test_specialized_tiles_are_refused_for_pages_of_another_dtype(pages_dtype, has_slot_scales):
    hopper = Machine(capability=90, num_processors=132)
    specialized = specialized_tiles(hopper, head_dim=64, page_tokens=16, element_bytes=2)
    shape = Shape(requests=((3, 3),), dtype=torch.bfloat16, pages_dtype=pages_dtype)
    batch = make_batch(shape, Options(has_slot_scales=has_slot_scales))
    assert specialized_prefill_tiles(hopper, batch.kind, torch.bfloat16) is None
    with pytest.raises(ValueError, match="where pages have another dtype than queries"):
        batch.plan(tiles=replace(SMALL_TILES, specialized_prefill=specialized))


def compile_the_usual_head():
    launch(head_dim=128, is_warp_specialized=True)


def compile_other_heads():
    for head_dim in (64, 256):
        launch(head_dim=head_dim, is_warp_specialized=True)


def compile_joined_pages():
    for head_dim, page_tokens in ((64, 16), (128, 16), (128, 32), (256, 16)):
        launch(
            head_dim=head_dim, page_tokens=page_tokens, is_warp_specialized=True, joins_pages=True
        )


def compile_options():
    for head_dim in (64, 128, 256):
        spans = torch.zeros(4096, 2, dtype=torch.int32)
        launch(
            head_dim=head_dim,
            page_tokens=528,
            is_warp_specialized=True,
            window_tokens=512,
            chunk_tokens=8192,
            soft_cap=50.0,
            sinks=torch.zeros(8),
            alibi_slopes=torch.zeros(8),
            lse=torch.zeros(4096, 8),
            spans=spans,
            decode_query_tokens=0,
        )
        launch(head_dim=head_dim, page_tokens=128, is_warp_specialized=True, is_causal=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        compile_the_usual_head,
        compile_other_heads,
        compile_joined_pages,
        compile_options,
    ],
)
def test_specialized_prefill_compiles_without_spills(job):
    kernels = compile_job(job, 90)

    found = [kernel for kernel in kernels if kernel.name == "attention_prefill_hopper_kernel"]
    assert found
    for kernel in found:
        # All options at once leave no registers for a mask that is asked for only sometimes.
        assert kernel.stack_bytes <= (48 if job is compile_options else 0), kernel
        assert kernel.shared_bytes <= 227 << 10, kernel
        assert kernel.counts["wgmma"] > 0, kernel
        assert kernel.counts["tma"] > 0, kernel
        # The softmax of a tile runs while the tile before is multiplied with its values.
        assert kernel.beside_products["special"] == kernel.loop_counts["special"], kernel

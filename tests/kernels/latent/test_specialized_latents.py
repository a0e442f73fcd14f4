"""Latent attention by the decode kernel for Hopper whose warps specialise."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.triton.latent.tiles import specialized_latent_tiles
from jenga_kernels.triton.lib.tiles import HOPPER, INTERPRETER, Machine, machine_of
from tests.kernels.attention.test_random_attention import SETTINGS
from tests.kernels.compiling import compile_job
from tests.kernels.latent.latent_cases import Shape, check_batch, make_batch
from tests.kernels.latent.test_compiled_latents import launch
from tests.kernels.support import DEVICE

only_on_hopper = pytest.mark.skipif(
    machine_of(torch.device(DEVICE)).capability != HOPPER,
    reason="only Hopper runs it; tests/kernels/test_emulated.py does so in software",
)

DEEPSEEK = {
    "latent_dim": 512,
    "rotary_dim": 64,
    "num_heads": 64,
    "page_tokens": 64,
    "dtype": torch.bfloat16,
}

SHAPES = {
    "one_token": Shape(requests=((1, 1),), **DEEPSEEK),
    "one_step": Shape(requests=((1, 128),), **DEEPSEEK),
    "a_tile_without_keys": Shape(requests=((1, 60), (1, 200)), **DEEPSEEK),
    "tiles_that_end_in_a_box": Shape(requests=((1, 65), (1, 127), (1, 300)), **DEEPSEEK),
    "no_keys": Shape(requests=((1, 0), (0, 0), (1, 70)), num_padding_tokens=3, **DEEPSEEK),
    "heads_of_two_programs": Shape(requests=((1, 200),), **DEEPSEEK | {"num_heads": 128}),
    "page_of_16_tokens": Shape(requests=((1, 200),), **DEEPSEEK | {"page_tokens": 16}),
    "page_of_48_tokens": Shape(requests=((1, 200),), **DEEPSEEK | {"page_tokens": 48}),
    "page_of_528_tokens": Shape(requests=((1, 700),), **DEEPSEEK | {"page_tokens": 528}),
    "a_narrow_rotary_key": Shape(requests=((1, 200),), **DEEPSEEK | {"rotary_dim": 16}),
    "float16": Shape(requests=((1, 200),), **DEEPSEEK | {"dtype": torch.float16}),
    "fp8": Shape(requests=((1, 300), (1, 0), (1, 65)), is_fp8=True, **DEEPSEEK),
    "fp8_with_a_scale": Shape(
        requests=((1, 200), (1, 128)), is_fp8=True, has_scale=True, **DEEPSEEK | {"page_tokens": 16}
    ),
    "fp8_read_in_float16": Shape(
        requests=((1, 127),), is_fp8=True, **DEEPSEEK | {"dtype": torch.float16}
    ),
    "all_keys_for_every_query": Shape(requests=((1, 200),), is_causal=False, **DEEPSEEK),
    "beside_a_prompt": Shape(requests=((1, 200), (20, 30), (1, 90)), **DEEPSEEK),
}


@only_on_hopper
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_specialized_latents_agree_with_their_reference(shape):
    batch = make_batch(shape)
    plan = batch.plan()
    assert plan.tiles.specialized_decode

    check_batch(batch)


@only_on_hopper
@pytest.mark.parametrize("num_teams", [1, 3, 40])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_specialized_latents_do_one_run_after_another(num_teams, takes_turns):
    requests = ((1, 300), (0, 0), (1, 0), (1, 1), (1, 128), (1, 500))
    batch = make_batch(Shape(requests=requests, **DEEPSEEK))
    tiles = batch.plan().tiles
    team = replace(tiles.specialized_decode, takes_turns=takes_turns)

    check_batch(batch, tiles=replace(tiles, num_programs=num_teams, specialized_decode=team))


@only_on_hopper
@pytest.mark.parametrize(
    ("num_heads", "query_len", "num_members"), [(16, 4, 1), (32, 3, 2), (64, 3, 3), (128, 2, 4)]
)
def test_specialized_latents_decode_drafted_tokens(num_heads, query_len, num_members):
    requests = [(query_len, 300), (query_len, query_len), (query_len - 1, 129), (1, 40), (2, 129)]
    batch = make_batch(Shape(requests=requests, **DEEPSEEK | {"num_heads": num_heads}))
    plan = {"decode_query_tokens": query_len, "max_query_tokens": query_len}
    tiles = batch.plan(**plan).tiles
    assert tiles.specialized_decode.num_members == num_members

    check_batch(batch, tiles=replace(tiles, num_programs=2), **plan)


SMALL_PAGES = DEEPSEEK | {"page_tokens": 16}
SEVERAL = ((1, 300), (1, 0), (1, 65), (1, 500))


@only_on_hopper
@pytest.mark.parametrize(
    "shape",
    [
        Shape(requests=SEVERAL, run_pages=12, **SMALL_PAGES),
        Shape(requests=SEVERAL, run_pages=12, is_fp8=True, **SMALL_PAGES),
        Shape(requests=SEVERAL, run_pages=9, **DEEPSEEK | {"page_tokens": 32}),
        Shape(requests=SEVERAL, run_pages=9, is_fp8=True, **DEEPSEEK | {"page_tokens": 32}),
        Shape(requests=((1, 300),), **SMALL_PAGES),
        Shape(requests=((1, 300),), run_pages=9, **DEEPSEEK | {"page_tokens": 48}),
    ],
    ids=["16_tokens", "fp8", "32_tokens", "fp8_32_tokens", "no_neighbours", "48_tokens"],
)
def test_specialized_latents_load_neighbouring_pages_as_one_box(shape):
    batch = make_batch(shape)
    tiles = batch.plan().tiles
    joining = replace(tiles.specialized_decode, joins_pages=True)

    check_batch(batch, tiles=replace(tiles, specialized_decode=joining))


@only_on_hopper
def test_specialized_latents_in_batch_invariant_mode_ignore_the_rest_of_the_batch():
    requests = ((1, 200), (1, 1100), (1, 33))
    batch = make_batch(Shape(requests=requests, **DEEPSEEK))
    whole = latent_attention(**batch.arguments, plan=batch.plan(is_batch_invariant=True))
    check_batch(batch, is_batch_invariant=True)

    for request in range(len(requests)):
        alone = replace(
            batch,
            q=batch.q[request : request + 1],
            page_table=batch.page_table[request : request + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            seq_lens=batch.seq_lens[request : request + 1],
        )
        out = latent_attention(**alone.arguments, plan=alone.plan(is_batch_invariant=True))
        assert torch.equal(out, whole[request : request + 1])


@st.composite
def random_shapes(draw):
    """Batches of up to three requests of some query tokens each, and how many teams do them."""
    query_tokens = draw(st.integers(1, 4))
    requests = draw(
        st.lists(
            st.tuples(st.integers(0, query_tokens), st.integers(0, 700)), min_size=1, max_size=3
        )
    )
    num_heads = draw(st.sampled_from([16, 32, 64, 128]))
    shape = Shape(
        requests=tuple((queries, max(queries, stored)) for queries, stored in requests),
        num_heads=num_heads,
        latent_dim=512,
        rotary_dim=draw(st.sampled_from([16, 48, 64])),
        page_tokens=draw(st.sampled_from([16, 48, 64, 256, 784])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        is_fp8=draw(st.booleans()),
        is_causal=draw(st.booleans()),
        num_padding_tokens=draw(st.integers(0, 2)),
    )
    return shape, max(query_tokens, 33 // num_heads + 1), draw(st.integers(1, 9))


@only_on_hopper
@pytest.mark.slow
@settings(max_examples=30, **SETTINGS)
@given(random_shapes(), st.booleans(), st.integers(0, 1000))
def test_specialized_latents_agree_with_the_reference_on_random_batches(
    drawn, is_batch_invariant, seed
):
    shape, query_tokens, num_teams = drawn
    batch = make_batch(shape, seed=seed)
    plan = {"decode_query_tokens": query_tokens, "is_batch_invariant": is_batch_invariant}
    tiles = batch.plan(**plan).tiles
    assert tiles.specialized_decode is not None

    check_batch(batch, tiles=replace(tiles, num_programs=num_teams), **plan)


FITTING = {
    "num_heads": 64,
    "latent_dim": 512,
    "page_tokens": 16,
    "query_tokens": 1,
    "element_bytes": 2,
    "stored_bytes": 2,
}


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        (INTERPRETER, {}),
        (Machine(capability=80, num_processors=108), {}),
        (Machine(capability=100, num_processors=148), {}),
        (Machine(capability=90, num_processors=132), {"element_bytes": 4, "stored_bytes": 4}),
        (Machine(capability=90, num_processors=132), {"latent_dim": 256}),
        (Machine(capability=90, num_processors=132), {"page_tokens": 24}),
        (Machine(capability=90, num_processors=132), {"num_heads": 96}),
        (Machine(capability=90, num_processors=132), {"num_heads": 32}),
    ],
    ids=["interpreter", "a100", "b200", "f32", "latent", "odd_page", "heads", "few_rows"],
)
def test_what_the_specialized_latent_kernel_cannot_do_has_no_tiles(machine, changes):
    hopper = Machine(capability=90, num_processors=132)
    assert specialized_latent_tiles(hopper, **FITTING) is not None
    assert specialized_latent_tiles(hopper, **FITTING | {"stored_bytes": 1}) is not None
    assert specialized_latent_tiles(machine, **FITTING | changes) is None


def test_teams_have_a_program_for_each_64_rows_and_leave_few_processors_idle():
    hopper = Machine(capability=90, num_processors=132)

    def team(num_heads, query_tokens):
        changes = {"num_heads": num_heads, "query_tokens": query_tokens}
        tiles = specialized_latent_tiles(hopper, **FITTING | changes)
        return tiles.num_programs, tiles.specialized_decode.num_members

    assert team(64, 1) == team(16, 3) == (132, 1)
    assert team(128, 1) == (66, 2)
    assert team(128, 3) == (22, 6)
    assert team(128, 200) == (1, 400)


def test_tiles_of_teams_of_another_size_are_refused():
    hopper = Machine(capability=90, num_processors=132)
    tiles = specialized_latent_tiles(hopper, **FITTING)
    batch = make_batch(Shape(requests=((1, 3),), **DEEPSEEK | {"num_heads": 128}))
    with pytest.raises(ValueError, match="teams of 2 programs, got 1"):
        batch.plan(tiles=tiles)


def compile_large_models():
    launch(num_heads=128, page_tokens=64)
    launch(num_heads=64, page_tokens=16, dtype=torch.float16)


def compile_fp8():
    launch(num_heads=128, page_tokens=64, is_fp8=True)
    launch(num_heads=64, page_tokens=16, is_fp8=True, dtype=torch.float16)


def compile_drafted_tokens():
    launch(num_heads=128, page_tokens=528, decode_query_tokens=3)
    launch(num_heads=16, page_tokens=784, decode_query_tokens=8)


def compile_joined_pages():
    launch(num_heads=64, page_tokens=16, joins_pages=True)
    launch(num_heads=64, page_tokens=32, joins_pages=True)
    launch(num_heads=128, page_tokens=16, is_fp8=True, joins_pages=True)


PRODUCTS = 2 * (576 // 16 + 2 * 64 // 16)
"""Of a step, of both groups of warps: scores of 64 keys, then half of the values of 128."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        compile_large_models,
        compile_drafted_tokens,
        compile_fp8,
        compile_joined_pages,
    ],
)
def test_specialized_latents_compile_without_spills(job):
    kernels = compile_job(job, 90)

    found = [kernel for kernel in kernels if kernel.name == "latent_decode_hopper_kernel"]
    assert found
    for kernel in found:
        # Loading warps keep ids of pages, and have few registers.
        assert kernel.stack_bytes <= (24 if job is compile_joined_pages else 0), kernel
        assert kernel.shared_bytes <= 227 << 10, kernel
        assert kernel.counts["wgmma"] == PRODUCTS, kernel
        # Weights of its own tile do not pass through shared memory, nor do rotary queries.
        assert kernel.counts["wgmma_of_registers"] == 2 * (4 + 4), kernel
        assert kernel.counts["tma"] >= 9 * 3, kernel
        if job is compile_fp8:
            # Conversions that take two elements at a time.
            assert kernel.counts["half_to_bfloat"] == 0, kernel

import pytest
import torch

from jenga_kernels.pages.pack_slots import pack_slots
from jenga_kernels.reference.pages import pack_slots as reference
from tests.kernels.compiling import compile_job
from tests.kernels.support import DEVICE, generator, randn, shuffled_page_table, strided_layer

I32 = torch.int32

SHAPES = {
    # (tokens, kept tokens) of each request, KV heads, head_dim, value_dim, page_tokens, head-major
    "two_requests": ([(70, 40), (33, 9)], 2, 64, 64, 16, True),
    "more_than_a_tile": ([(300, 200)], 1, 16, 16, 16, True),
    "odd_page_and_value_dim": ([(90, 31)], 2, 80, 48, 24, True),
    "token_major": ([(50, 20)], 3, 32, 32, 16, False),
    "nothing_to_drop": ([(40, 40)], 2, 32, 32, 16, True),
    "one_keeps_nothing": ([(40, 0), (20, 4)], 1, 32, 32, 16, True),
}


def make_layer(shape, dtype=torch.float32, seed=0):
    """A layer whose slots outside of the requests are NaN, and the arguments of the operation."""
    requests, num_kv_heads, head_dim, value_dim, page_tokens, is_head_major = shape
    rng = generator(seed)
    counts = [-(-tokens // page_tokens) for tokens, _ in requests]
    num_pages = sum(counts) + 3
    layer = strided_layer(
        num_pages,
        page_tokens,
        num_kv_heads,
        head_dim,
        dtype,
        is_head_major=is_head_major,
        value_dim=value_dim,
    )
    table = shuffled_page_table(counts, num_pages, rng)
    max_kept = max(kept for _, kept in requests)
    sources = torch.full((len(requests), num_kv_heads, max_kept), 1 << 20, dtype=I32)
    for row, (tokens, kept) in enumerate(requests):
        places = torch.arange(tokens)
        pages = table[row].cpu()[places // page_tokens].long()
        for stored, width in ((layer.k_pages, head_dim), (layer.v_pages, value_dim)):
            stored[pages, places % page_tokens] = randn((tokens, num_kv_heads, width), dtype, rng)
        for head in range(num_kv_heads):
            order = torch.randperm(tokens, generator=rng)[:kept]
            sources[row, head, :kept] = order.sort().values.to(I32)
    return layer, {
        "k_pages": layer.k_pages,
        "v_pages": layer.v_pages,
        "page_table": table,
        "sources": sources.to(DEVICE),
        "num_kept": torch.tensor([kept for _, kept in requests], dtype=I32, device=DEVICE),
        "seq_lens": torch.tensor([tokens for tokens, _ in requests], dtype=I32, device=DEVICE),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_pack_slots_moves_what_is_kept_and_touches_no_other_slot(shape, dtype):
    got, arguments = make_layer(shape, dtype)
    want, expected = make_layer(shape, dtype)

    pack_slots(**arguments)
    reference.pack_slots(**expected)

    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got.arena.view(bits), want.arena.view(bits))


def test_kept_tokens_end_at_the_end_of_their_request_in_their_order():
    shape = ([(45, 18)], 2, 32, 32, 16, True)
    before, arguments = make_layer(shape)
    old = before.k_pages.clone()
    table, page_tokens = arguments["page_table"][0].long(), 16

    pack_slots(**arguments)

    for head in range(2):
        for place, source in enumerate(arguments["sources"][0, head].tolist()):
            target = 45 - 18 + place
            moved = before.k_pages[table[target // page_tokens], target % page_tokens, head]
            assert torch.equal(moved, old[table[source // page_tokens], source % page_tokens, head])


def test_packing_what_is_packed_changes_nothing():
    layer, arguments = make_layer(SHAPES["two_requests"])
    pack_slots(**arguments)
    once = layer.arena.clone()
    for row, (tokens, kept) in enumerate(SHAPES["two_requests"][0]):
        arguments["sources"][row, :, :kept] = torch.arange(tokens - kept, tokens, device=DEVICE)

    pack_slots(**arguments)

    assert torch.equal(layer.arena.view(I32), once.view(I32))


def test_pack_slots_reaches_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    num_pages = 2**31 // (16 * 2 * 256) + 8
    pages = torch.empty(num_pages, 16, 1, 512, dtype=torch.float16, device=DEVICE)
    k_pages, v_pages = pages[..., :256], pages[..., 256:]
    last = num_pages - 1
    pages[last, 3] = 7.0

    pack_slots(
        k_pages,
        v_pages,
        torch.tensor([[last, 1]], dtype=I32, device=DEVICE),
        torch.tensor([[[3]]], dtype=I32, device=DEVICE),
        torch.tensor([1], dtype=I32, device=DEVICE),
        torch.tensor([16], dtype=I32, device=DEVICE),
    )

    assert pages.numel() > 2**31
    assert bool((pages[last, 15] == 7.0).all())


BAD_ARGUMENTS = {
    "quantised_pages": ("k_pages", lambda a: {"k_pages": a["k_pages"].to(torch.float8_e4m3fn)}),
    "values_of_another_dtype": ("v_pages", lambda a: {"v_pages": a["v_pages"].half()}),
    "values_of_fewer_heads": ("v_pages", lambda a: {"v_pages": a["v_pages"][:, :, :1]}),
    "wide_page_table": ("page_table", lambda a: {"page_table": a["page_table"].long()}),
    "sources_of_fewer_heads": ("sources", lambda a: {"sources": a["sources"][:, :1]}),
    "sources_of_64_bits": ("sources", lambda a: {"sources": a["sources"].long()}),
    "counts_of_fewer_requests": ("num_kept", lambda a: {"num_kept": a["num_kept"][:1]}),
    "lengths_of_64_bits": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].long()}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_pack_slots_refuses_and_moves_nothing(name, change):
    layer, arguments = make_layer(SHAPES["two_requests"])
    arguments |= change(arguments)
    before = layer.arena.clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        pack_slots(**arguments)

    assert torch.equal(layer.arena.view(I32), before.view(I32))


def compile_all():
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 256)):
        arena = torch.zeros(4, 3, 16, 2, 2 * head_dim, dtype=dtype)[:, 1]
        ints = {"dtype": I32}
        pack_slots(
            arena[..., :head_dim],
            arena[..., head_dim:],
            torch.zeros(2, 4, **ints),
            torch.zeros(2, 2, 32, **ints),
            torch.zeros(2, **ints),
            torch.zeros(2, **ints),
        )


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_pack_slots_compiles_to_wide_copies(capability):
    for kernel in compile_job(compile_all, capability):
        assert kernel.stack_bytes == 0, kernel
        assert kernel.counts["load_128"] >= 2, kernel
        assert kernel.counts["store_128"] >= 2, kernel

"""Caches whose slots have scales of their own, in int8, float8 and four bits."""

from dataclasses import replace

import pytest
import torch

from jenga_kernels.attention.kv_store import NO_SLOT, kv_store
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.tensors import E5M2_DTYPE, INT4_DTYPE
from jenga_kernels.reference.attention import kv_store as reference_kv_store
from jenga_kernels.reference.attention.paged_attention import from_int4
from tests.kernels.attention.attention_cases import (
    HALVED_TILES,
    SMALL_TILES,
    Options,
    Shape,
    check_batch,
    make_batch,
)
from tests.kernels.attention.test_compiled_attention import launch
from tests.kernels.compiling import compile_job
from tests.kernels.crossed import crossed
from tests.kernels.support import DEVICE, generator, randn, row_parts, strided_layer

DTYPES = (torch.int8, torch.float8_e4m3fn, INT4_DTYPE)
MIXED = ((40, 40), (1, 77), (0, 0), (3, 50), (11, 70), (1, 1))


def slot_scales(stored, num_pages, page_tokens, num_kv_heads, *, is_head_major=True):
    """Scales of keys and of values of one layer of an arena, all that number."""
    rows = (num_kv_heads, page_tokens) if is_head_major else (page_tokens, num_kv_heads)
    arena = torch.full((num_pages, 3, 2, *rows), float("nan"), device=DEVICE)
    if stored == INT4_DTYPE:
        arena = arena[..., None].repeat(1, 1, 1, 1, 1, 2).bfloat16()
    sides = [arena[:, 1, side] for side in range(2)]
    if is_head_major:
        sides = [side.transpose(1, 2) for side in sides]
    return arena, sides


def new_tokens(shape, dtype, rng):
    num_tokens, num_pages, page_tokens, num_kv_heads, head_dim = shape
    k, v = (randn((num_tokens, num_kv_heads, head_dim), dtype, rng) for _ in range(2))
    slots = torch.randperm(num_pages * page_tokens, generator=rng)[:num_tokens]
    slots[torch.rand(num_tokens, generator=rng) < 0.2] = NO_SLOT
    return k, v, slots.to(DEVICE)


@pytest.mark.parametrize("is_head_major", [True, False], ids=["head_major", "token_major"])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kv_store_scales_each_head_of_each_slot(dtype, stored, is_head_major):
    rng = generator(1)
    shape = (37, 4, 48, 3, 80)
    k, v, slots = new_tokens(shape, dtype, rng)
    k[3], v[4] = 1e4, -1e4
    k[5, 1], v[6, 2, 7] = float("inf"), float("-inf")
    k[7], v[8, :, 1:] = 0.0, 0.0
    k[9, 0], v[10, 1, 3] = float("nan"), float("nan")
    k[11], v[12] = k[11] * 1e-6, v[12] * 1e-37
    slots[3:13] = torch.arange(10, device=DEVICE) + 96
    slots[13:][(slots[13:] >= 96) & (slots[13:] < 106)] = NO_SLOT
    made = {}

    for name, store in (("got", kv_store), ("want", reference_kv_store.kv_store)):
        layer = strided_layer(*shape[1:], stored, is_head_major=is_head_major)
        scales, (k_scales, v_scales) = slot_scales(stored, *shape[1:4], is_head_major=is_head_major)
        store(
            k,
            v,
            layer.k_pages,
            layer.v_pages,
            slots,
            k_slot_scales=k_scales,
            v_slot_scales=v_scales,
        )
        arena = layer.arena if stored in (torch.int8, INT4_DTYPE) else layer.arena.float()
        made[name] = (arena, scales, layer, k_scales)

    # What is no number has no bits of its own: a GPU's differ from PyTorch's.
    for got, want in zip(made["got"][:2], made["want"][:2], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    _, _, layer, k_scales = made["got"]
    live = (slots >= 0) & k.isfinite().all(2).all(1)
    pages, inside = slots[live] // 48, slots[live] % 48
    exact = k[live].double()
    greatest = exact.abs().amax(2, keepdim=True)
    if stored == INT4_DTYPE:
        rows = zip(layer.k_pages[pages, inside], k_scales[pages, inside], strict=True)
        restored = torch.stack([from_int4(*row, torch.float64) for row in rows])
        # Half a step; a step and a least element that are bfloat16, in steps of their own.
        extent = exact.amax(2, keepdim=True) - exact.amin(2, keepdim=True)
        allowed = extent / 30 + (extent + greatest) * 2.0**-8
    else:
        restored = layer.k_pages[pages, inside].double()
        restored *= k_scales[pages, inside][..., None].double()
        # Half a step of int8, and of float8 of that binade; and a place of the scale itself.
        allowed = greatest * (0.5 / 127) if stored == torch.int8 else exact.abs() * 2.0**-4
        allowed = allowed + greatest * (2.0**-10 / 448 + 2.0**-22)
    assert ((restored - exact).abs() <= allowed).all()


SHAPES = {
    "mixed": Shape(requests=MIXED),
    "odd_page_and_head_dim": Shape(
        requests=MIXED, head_dim=80, num_heads=6, page_tokens=48, is_head_major=False
    ),
    "wide_head": Shape(requests=((9, 40), (1, 77), (3, 50)), head_dim=256, page_tokens=32),
    "wider_head": Shape(requests=((9, 40), (1, 77)), head_dim=512, num_kv_heads=1),
    "values_of_another_width": Shape(requests=MIXED, head_dim=96, value_dim=64),
    "large_pages": Shape(requests=((200, 900), (1, 530)), head_dim=128, page_tokens=528),
}


@crossed(
    {
        "shape": SHAPES,
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "stored": DTYPES,
    }
)
def test_paged_attention_reads_slots_with_scales(shape, dtype, stored):
    shape = replace(shape, dtype=dtype, pages_dtype=stored)

    check_batch(make_batch(shape, Options(has_slot_scales=True)), tiles=SMALL_TILES)


TILES = {"whole": SMALL_TILES, "halved": HALVED_TILES}

OPTIONS = {
    "window": Options(has_slot_scales=True, window_tokens=20, soft_cap=2.0, has_sinks=True),
    "chunk": Options(has_slot_scales=True, chunk_tokens=24, has_alibi=True),
    "cross": Options(has_slot_scales=True, is_causal=False),
    "spans": Options(has_slot_scales=True, window_tokens=20, has_spans=True),
}


@crossed({"options": OPTIONS, "stored": DTYPES, "tiles": TILES})
def test_paged_attention_combines_slot_scales(tiles, options, stored):
    shape = Shape(requests=MIXED, dtype=torch.bfloat16, pages_dtype=stored, head_dim=80)

    for is_batch_invariant in (False, True):
        check_batch(make_batch(shape, options), tiles=tiles, is_batch_invariant=is_batch_invariant)


def test_values_next_to_nothing_keep_their_digits_beside_larger_ones():
    # Scales of values next to 2**-30 and 2**-10: by themselves the first are nothing in float16.
    shape = Shape(requests=((1, 70), (1, 30)), dtype=torch.bfloat16, pages_dtype=torch.int8)
    batch = make_batch(shape, Options(has_slot_scales=True))
    for first, pages in ((2.0**-30, batch.page_table[0]), (2.0**-10, batch.page_table[1])):
        batch.v_slot_scales[pages.long()[:2]] = first

    check_batch(batch, tiles=SMALL_TILES, decode_query_tokens=1)


def test_a_head_that_is_not_finite_gives_no_numbers_to_those_who_read_it():
    shape = Shape(requests=((1, 20), (1, 20)), dtype=torch.bfloat16, pages_dtype=torch.int8)
    batch = make_batch(shape, Options(has_slot_scales=True))
    k, v = (torch.ones(1, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    v[0, 1, 5] = float("inf")
    slot = batch.page_table[0, :1].long() * 16 + 3
    scales = {"k_slot_scales": batch.k_slot_scales, "v_slot_scales": batch.v_slot_scales}

    kv_store(k, v, batch.k_pages, batch.v_pages, slot, **scales)
    out = paged_attention(**batch.arguments)

    assert out[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()
    assert out[1].isfinite().all()


def refused_calls():
    shape = Shape(requests=((1, 20),), dtype=torch.bfloat16, pages_dtype=torch.int8)
    batch = make_batch(shape, Options(has_slot_scales=True))
    scales = batch.k_slot_scales
    wide = torch.zeros_like(batch.k_pages, dtype=torch.bfloat16)
    one = torch.ones(1, device=DEVICE)
    yield {"k_slot_scales": None}, "must be given together"
    yield {"k_slot_scales": None, "v_slot_scales": None}, "must be given with pages of torch.int8"
    yield {"k_pages": wide, "v_pages": wide.clone()}, "needs pages of torch.float8_e4m3fn or torch"
    yield {"v_slot_scales": scales[:-1]}, r"v_slot_scales must have shape \(5, 16, 2\), got"
    yield {"v_slot_scales": scales.double()}, "v_slot_scales must be torch.float32"
    yield {"v_slot_scales": scales.contiguous()}, "must have the strides of k_slot_scales"
    yield {"k_scale": one}, "k_scale needs pages of torch.float8_e4m3fn or .*, got torch.int8"
    floats = {"k_pages": batch.k_pages.view(torch.float8_e4m3fn)}
    floats["v_pages"] = batch.v_pages.view(torch.float8_e4m3fn)
    yield floats | {"v_scale": one}, "must be None where slots have scales of their own"
    halves = {"k_pages": batch.k_pages.view(E5M2_DTYPE), "v_pages": batch.v_pages.view(E5M2_DTYPE)}
    yield halves, "k_slot_scales needs pages of .*, got torch.float8_e5m2"


@pytest.mark.parametrize("index", range(9))
def test_slot_scales_that_do_not_fit_are_refused_before_anything_is_written(index):
    changes, message = list(refused_calls())[index]
    shape = Shape(requests=((1, 20),), dtype=torch.bfloat16, pages_dtype=torch.int8)
    batch = make_batch(shape, Options(has_slot_scales=True))
    arguments = batch.arguments | changes
    k, v = (torch.ones(1, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    names = ("k_pages", "v_pages", "k_scale", "v_scale", "k_slot_scales", "v_slot_scales")
    stored = {name: arguments[name] for name in names}
    before = {name: t.clone() for name, t in stored.items() if t is not None}

    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        kv_store(k, v, slots=torch.zeros(1, dtype=torch.int64, device=DEVICE), **stored)

    for name, tensor in before.items():
        now = stored[name].contiguous().view(torch.uint8)
        assert torch.equal(tensor.contiguous().view(torch.uint8), now)


def test_a_plan_for_scales_elsewhere_is_refused():
    shape = Shape(requests=((1, 20),), dtype=torch.bfloat16, pages_dtype=torch.int8)
    batch = make_batch(shape, Options(has_slot_scales=True))
    plan = replace(batch, options=Options()).plan()

    with pytest.raises(ValueError, match=r"plan must be made for .*has_slot_scales=True"):
        paged_attention(**batch.arguments, plan=plan)
    with pytest.raises(ValueError, match="has_slot_scales must be False"):
        replace(batch.kind, is_quantised=False)
    with pytest.raises(ValueError, match="is_int4 must be False"):
        replace(batch.kind, has_slot_scales=False, is_int4=True)


def test_scales_that_overlap_are_not_written():
    layer = strided_layer(2, 16, 2, 64, torch.int8)
    k, v = (torch.ones(1, 2, 64, device=DEVICE) for _ in range(2))
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    own = torch.ones(2, 16, 2, device=DEVICE)
    expanded = torch.ones(2, 16, 1, device=DEVICE).expand(2, 16, 2)

    for scales, message in (((own, own), "must not be k_slot"), ((expanded,) * 2, "overlap")):
        with pytest.raises(ValueError, match=message):
            kv_store(
                k,
                v,
                layer.k_pages,
                layer.v_pages,
                slots,
                k_slot_scales=scales[0],
                v_slot_scales=scales[1],
            )


def test_slot_scales_reach_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    page_elements = 2 * 16 * 64
    num_pages = 2**31 // page_elements + 3
    arena = torch.empty(num_pages, 16, 2, 64, dtype=torch.int8, device=DEVICE)
    k_pages, v_pages = arena[:, :, :1], arena[:, :, 1:]
    scales = torch.empty(num_pages, 2**11, device=DEVICE)
    sides = [scales[:, first : first + 16, None] for first in (64, 128)]
    assert max(arena.numel(), scales.numel()) > 2**31
    k, v = (randn((1, 1, 64), torch.float32, generator(side)) for side in range(2))
    slots = torch.tensor([(num_pages - 1) * 16 + 3], device=DEVICE)
    table, ones = torch.tensor([[num_pages - 1]], device=DEVICE), torch.ones(1, device=DEVICE)

    kv_store(k, v, k_pages, v_pages, slots, k_slot_scales=sides[0], v_slot_scales=sides[1])
    read = make_read(k_pages, v_pages, sides, table.int() * ones.int(), num_tokens=4)

    assert (read - v[0]).abs().max() <= v.abs().max() * 0.51 / 127


def make_read(k_pages, v_pages, sides, table, *, num_tokens):
    """What a query with a window of one reads of a request of so many tokens."""
    q = torch.ones(1, 1, 64, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([num_tokens], dtype=torch.int32, device=DEVICE)
    return paged_attention(
        q,
        k_pages,
        v_pages,
        table,
        starts,
        lens,
        scale=1.0,
        window_tokens=1,
        k_slot_scales=sides[0],
        v_slot_scales=sides[1],
    )[0]


def compile_int8():
    compile_store(torch.bfloat16, torch.int8)
    compile_store(torch.float16, torch.int8)


def compile_float8():
    compile_store(torch.bfloat16, torch.float8_e4m3fn)


def compile_int4():
    compile_store(torch.bfloat16, INT4_DTYPE)
    compile_store(torch.float16, INT4_DTYPE)


def compile_store(dtype, stored):
    for head_dim in (64, 80, 256, 512):
        k = torch.zeros(33, 2, head_dim, dtype=dtype)
        key, value, row_items = row_parts(head_dim, head_dim, stored)
        layer = torch.zeros(4, 2, 16, row_items, dtype=stored).transpose(1, 2)
        scales = torch.zeros(2, 4, 2, 16).transpose(2, 3)
        if stored == INT4_DTYPE:
            scales = scales[..., None].expand(-1, -1, -1, -1, 2).bfloat16()
        kv_store(
            k,
            k,
            layer[..., key],
            layer[..., value],
            torch.zeros(33, dtype=torch.int64),
            k_slot_scales=scales[0],
            v_slot_scales=scales[1],
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "capability"),
    [
        (compile_int8, 80),
        (compile_int8, 90),
        (compile_float8, 90),
        (compile_int4, 80),
        (compile_int4, 90),
    ],
)
def test_stores_with_slot_scales_compile_to_wide_copies(job, capability):
    for kernel in compile_job(job, capability):
        assert kernel.stack_bytes == 0, kernel
        assert kernel.counts["load_128"] >= 2, kernel
        # Half as many bytes as are loaded at once, or a quarter; and the two scales of each row.
        assert kernel.counts["store_global"] <= 6, kernel
        assert kernel.counts["store_64"] >= (0 if job is compile_int4 else 2), kernel


def compile_decoding():
    for stored in DTYPES:
        launch(
            head_dim=128,
            num_heads=32,
            num_kv_heads=8,
            pages_dtype=stored,
            has_slot_scales=True,
            max_query_tokens=1,
        )


@pytest.mark.slow
def test_decoding_with_slot_scales_takes_few_instructions_a_tile():
    kernels = [k for k in compile_job(compile_decoding, 90) if k.name == "attention_decode_kernel"]

    # 32 KiB of keys and values, 16 of four bits each; 605 without scales of slots in float8.
    for kernel, most in zip(kernels, (900, 770, 780), strict=True):
        assert kernel.loop_instructions <= most, kernel
        assert kernel.loop_counts["matrix"] == 64, kernel


def compile_drafts():
    for stored in (torch.int8, INT4_DTYPE):
        for head_dim in (64, 128, 256):
            launch(
                head_dim=head_dim,
                pages_dtype=stored,
                has_slot_scales=True,
                decode_query_tokens=8,
                max_query_tokens=8,
            )


def compile_queries_in_float32():
    for stored in (torch.int8, INT4_DTYPE):
        for head_dim in (64, 128, 256):
            launch(
                head_dim=head_dim,
                dtype=torch.float32,
                pages_dtype=stored,
                has_slot_scales=True,
                max_query_tokens=1,
            )


@pytest.mark.slow
@pytest.mark.parametrize("job", [compile_drafts, compile_queries_in_float32])
@pytest.mark.parametrize("capability", [80, 90])
def test_decoding_with_slot_scales_spills_nothing(job, capability):
    kernels = compile_job(job, capability)

    assert len([each for each in kernels if each.name == "attention_decode_kernel"]) == 6
    assert all(each.stack_bytes == 0 for each in kernels), kernels

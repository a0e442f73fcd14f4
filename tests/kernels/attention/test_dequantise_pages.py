from dataclasses import replace

import pytest
import torch

from jenga_kernels.attention.dequantise_pages import dequantise_pages
from jenga_kernels.checks.tensors import E5M2_DTYPE, FP8_DTYPE, INT4_DTYPE
from jenga_kernels.reference.attention import dequantise_pages as reference
from tests.kernels.attention.attention_cases import Options, Shape, make_batch, read_range
from tests.kernels.compiling import compile_job
from tests.kernels.support import DEVICE, generator, row_parts, strided_layer

I32 = torch.int32

REQUESTS = ((40, 40), (1, 77), (0, 0), (3, 50), (11, 70), (1, 1))

SHAPES = {
    "mixed": Shape(requests=REQUESTS),
    "odd_page_and_head_dim": Shape(
        requests=REQUESTS, head_dim=80, num_heads=6, page_tokens=48, is_head_major=False
    ),
    "wider_head": Shape(requests=((9, 40), (1, 77)), head_dim=512, num_kv_heads=1),
    "values_of_another_width": Shape(requests=REQUESTS, head_dim=96, value_dim=64),
    "large_pages": Shape(requests=((200, 900), (1, 530)), head_dim=128, page_tokens=528),
}

STORED = {
    "e4m3": (FP8_DTYPE, Options()),
    "e4m3_per_tensor": (FP8_DTYPE, Options(num_scales=1)),
    "e4m3_per_head": (FP8_DTYPE, Options(num_scales=2)),
    "e5m2_per_tensor": (E5M2_DTYPE, Options(num_scales=1)),
    "e4m3_slots": (FP8_DTYPE, Options(has_slot_scales=True)),
    "int8_slots": (torch.int8, Options(has_slot_scales=True)),
    "int4_slots": (INT4_DTYPE, Options(has_slot_scales=True)),
}


def runs_of(ranges, out_page_tokens, rng):
    """Runs of tokens in random order, among them pages that get none: a list of triples."""
    runs = [(-1, 0, out_page_tokens), (0, 5, 5)]
    for request, (start, end) in enumerate(ranges):
        first_page = start // out_page_tokens
        for page in range(first_page, -(-end // out_page_tokens)):
            page_start = page * out_page_tokens
            runs.append((request, max(start, page_start), min(end, page_start + out_page_tokens)))
    return [runs[index] for index in torch.randperm(len(runs), generator=rng).tolist()]


def make_arguments(shape, options, stored, dtype, *, out_page_tokens=32, seed=0):
    """Arguments of the operation, and the arena of its outputs, in which every element is 7."""
    batch = make_batch(replace(shape, pages_dtype=stored, dtype=torch.float32), options, seed=seed)
    rng = generator(seed)
    ranges = [read_range(*request, options, ()) for request in shape.requests]
    runs = runs_of(ranges, out_page_tokens, rng)
    outputs = strided_layer(
        len(runs) + 1,
        out_page_tokens,
        shape.num_kv_heads,
        shape.head_dim,
        dtype,
        value_dim=shape.value_dim,
    )
    outputs.arena.fill_(7.0)
    names = ("k_pages", "v_pages", "page_table", "k_scale", "v_scale")
    names += ("k_slot_scales", "v_slot_scales")
    return outputs.arena, {name: getattr(batch, name) for name in names} | {
        "page_runs": torch.tensor(runs, dtype=I32, device=DEVICE),
        "k_out": outputs.k_pages,
        "v_out": outputs.v_pages,
    }


def check_same(got, want, *, stored, dtype):
    # A GPU rounds the sum of four-bit elements in bfloat16 once, PyTorch through float32 twice.
    rounds_once = DEVICE.type == "cuda" and (stored, dtype) == (INT4_DTYPE, torch.bfloat16)
    torch.testing.assert_close(
        got, want, rtol=2.0**-7 if rounds_once else 0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("case", STORED.values(), ids=STORED.keys())
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.slow),
        pytest.param(torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dequantise_pages_restores_its_runs_and_writes_nothing_else(shape, dtype, case):
    stored, options = case
    if options.num_scales > 1:
        options = Options(num_scales=shape.num_kv_heads)
    got, arguments = make_arguments(shape, options, stored, dtype)
    want, expected = make_arguments(shape, options, stored, dtype)

    dequantise_pages(**arguments)
    reference.dequantise_pages(**expected)

    assert got.isfinite().all()
    assert (want != 7.0).any()
    check_same(got, want, stored=stored, dtype=dtype)


@pytest.mark.parametrize("case", STORED.values(), ids=STORED.keys())
@pytest.mark.parametrize("out_page_tokens", [8, 24, 128])
def test_dequantise_pages_reads_no_token_before_its_runs(out_page_tokens, case):
    stored, options = case
    options = Options(
        window_tokens=20, num_scales=options.num_scales, has_slot_scales=options.has_slot_scales
    )
    shape = SHAPES["odd_page_and_head_dim"]
    if options.num_scales > 1:
        options = Options(window_tokens=20, num_scales=shape.num_kv_heads)
    pages = {"out_page_tokens": out_page_tokens}
    got, arguments = make_arguments(shape, options, stored, torch.bfloat16, **pages)
    want, expected = make_arguments(shape, options, stored, torch.bfloat16, **pages)

    dequantise_pages(**arguments)
    reference.dequantise_pages(**expected)

    # Slots before the window are NaN, and so are their scales; page tables lead out of the cache.
    assert got.isfinite().all()
    check_same(got, want, stored=stored, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [FP8_DTYPE, E5M2_DTYPE, torch.int8], ids=str)
def test_dequantise_pages_restores_every_element_there_is(stored, dtype):
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).to(DEVICE)
    pages = every.view(stored).view(1, 16, 1, 16)
    scales = {}
    if stored == torch.int8:
        ones = torch.ones(1, 16, 1, device=DEVICE)
        scales = {"k_slot_scales": ones, "v_slot_scales": ones}
    k_out, v_out = torch.zeros(2, 1, 16, 1, 16, dtype=dtype, device=DEVICE)

    dequantise_pages(
        pages,
        pages,
        torch.zeros(1, 1, dtype=I32, device=DEVICE),
        torch.tensor([[0, 0, 16]], dtype=I32, device=DEVICE),
        k_out,
        v_out,
        **scales,
    )

    want = pages.cpu().float().to(dtype)
    for out in (k_out, v_out):
        torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_dequantise_pages_of_no_runs_writes_nothing():
    arena, arguments = make_arguments(SHAPES["mixed"], Options(), FP8_DTYPE, torch.bfloat16)

    dequantise_pages(**arguments | {"page_runs": arguments["page_runs"][:0]})

    assert (arena == 7.0).all()


def test_dequantise_pages_reaches_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so these buffers are mostly not there.
    num_pages = 2**31 // (16 * 512) + 8
    last = num_pages - 1
    stored = torch.empty(num_pages, 16, 1, 512, dtype=torch.uint8, device=DEVICE)
    stored[last, 3] = torch.full((512,), 1.5).to(FP8_DTYPE).view(torch.uint8).to(DEVICE)
    pages = stored.view(FP8_DTYPE)
    page_elements = 2**31
    out = torch.empty(page_elements + 8192, dtype=torch.float16, device=DEVICE)
    out = out.as_strided((2, 16, 1, 512), (page_elements, 512, 512, 1))

    dequantise_pages(
        pages[..., :256],
        pages[..., 256:],
        torch.tensor([[0, last]], dtype=I32, device=DEVICE),
        torch.tensor([[-1, 0, 0], [0, 19, 20]], dtype=I32, device=DEVICE),
        out[..., :256],
        out[..., 256:],
    )

    assert pages.numel() > 2**31
    assert bool((out[1, 3] == 1.5).all())


def plain():
    return make_arguments(SHAPES["mixed"], Options(num_scales=1), FP8_DTYPE, torch.bfloat16)


def halved(arguments, name):
    return arguments[name][..., : arguments[name].shape[-1] // 2]


BAD_ARGUMENTS = {
    "pages_of_16_bits": (
        "k_pages",
        lambda a: {name: a[name].bfloat16() for name in ("k_pages", "v_pages")},
    ),
    "values_of_another_dtype": ("v_pages", lambda a: {"v_pages": a["v_pages"].view(torch.int8)}),
    "values_of_fewer_heads": ("v_pages", lambda a: {"v_pages": a["v_pages"][:, :, :1]}),
    "pages_of_narrower_heads": ("k_pages", lambda a: {"k_pages": halved(a, "k_pages")}),
    "wide_page_table": ("page_table", lambda a: {"page_table": a["page_table"].long()}),
    "runs_of_64_bits": ("page_runs", lambda a: {"page_runs": a["page_runs"].long()}),
    "runs_without_ends": ("page_runs", lambda a: {"page_runs": a["page_runs"][:, :2]}),
    "scattered_runs": ("page_runs", lambda a: {"page_runs": a["page_runs"][::2]}),
    "more_runs_than_pages": ("page_runs", lambda a: {"page_runs": a["page_runs"].repeat(2, 1)}),
    "integer_outputs": (
        "k_out",
        lambda a: {name: a[name].to(I32) for name in ("k_out", "v_out")},
    ),
    "outputs_of_two_dtypes": ("v_out", lambda a: {"v_out": a["v_out"].half()}),
    "outputs_of_other_strides": ("v_out", lambda a: {"v_out": a["v_out"].contiguous()}),
    "outputs_of_fewer_heads": (
        "k_pages",
        lambda a: {name: a[name][:, :, :1] for name in ("k_out", "v_out")},
    ),
    "outputs_that_overlap": (
        "k_out",
        lambda a: {name: a[name][:1].expand(99, -1, -1, -1) for name in ("k_out", "v_out")},
    ),
    "values_onto_keys": ("v_out", lambda a: {"v_out": a["k_out"]}),
    "scales_of_another_shape": ("k_scale", lambda _: {"k_scale": torch.ones(3, device=DEVICE)}),
    "slot_scales_beside_others": (
        "k_scale",
        lambda _: {
            name: torch.ones(21, 16, 2, device=DEVICE)
            for name in ("k_slot_scales", "v_slot_scales")
        },
    ),
    "outputs_that_require_a_gradient": (
        "k_out",
        lambda _: {
            name: torch.zeros(99, 32, 2, 64, device=DEVICE, requires_grad=name == "k_out")
            for name in ("k_out", "v_out")
        },
    ),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_dequantise_pages_refuses_and_writes_nothing(name, change):
    arena, arguments = plain()
    arguments |= change(arguments)

    with pytest.raises(ValueError, match=f"^{name} "):
        dequantise_pages(**arguments)

    assert (arena == 7.0).all()


def compile_float8():
    compile_restoring(FP8_DTYPE)
    compile_restoring(FP8_DTYPE, has_slot_scales=True)


def compile_other_elements():
    compile_restoring(E5M2_DTYPE)
    compile_restoring(torch.int8, has_slot_scales=True)
    compile_restoring(INT4_DTYPE, has_slot_scales=True)


def compile_restoring(stored, *, has_slot_scales=False):
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 80, 128, 256, 512):
            key, value, row_items = row_parts(head_dim, head_dim, stored)
            layer = torch.zeros(4, 2, 16, row_items, dtype=stored).transpose(1, 2)
            out = torch.zeros(3, 2, 128, 2 * head_dim, dtype=dtype).transpose(1, 2)
            one = torch.ones(1)
            scales = {"k_scale": one, "v_scale": one}
            if has_slot_scales:
                by_side = torch.zeros(2, 4, 2, 16).transpose(2, 3)
                if stored == INT4_DTYPE:
                    by_side = by_side[..., None].expand(-1, -1, -1, -1, 2).bfloat16()
                scales = {"k_slot_scales": by_side[0], "v_slot_scales": by_side[1]}
            dequantise_pages(
                layer[..., key],
                layer[..., value],
                torch.zeros(2, 4, dtype=I32),
                torch.zeros(3, 3, dtype=I32),
                out[..., :head_dim],
                out[..., head_dim:],
                **scales,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "capability"),
    [
        (compile_float8, 89),
        (compile_float8, 90),
        (compile_other_elements, 80),
        (compile_other_elements, 89),
        (compile_other_elements, 90),
    ],
)
def test_dequantise_pages_compiles_to_wide_copies(job, capability):
    for kernel in compile_job(job, capability):
        assert kernel.stack_bytes == 0, kernel
        # All elements are stored 16 bytes at a time.
        assert kernel.counts["store_128"] == kernel.counts["store_global"], kernel
        assert kernel.counts["store_128"] >= 2, kernel

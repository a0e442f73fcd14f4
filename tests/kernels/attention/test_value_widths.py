"""Keys and values of different width, as those of MiMo-V2: 192 elements and 128."""

from dataclasses import replace

import pytest
import torch

from jenga_kernels.attention.kv_store import kv_store
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.tensors import SCALED_DTYPES
from jenga_kernels.plans.attention_plan import AttentionKind, plan_attention
from jenga_kernels.reference.attention import kv_store as reference_kv_store
from jenga_kernels.triton.lib.tiles import LoopTiles, SpecializedTiles
from perf.harness.machine_code import SHARED_BYTES
from tests.kernels.attention.attention_cases import (
    HALVED_TILES,
    SMALL_TILES,
    Options,
    Shape,
    check_batch,
    make_batch,
)
from tests.kernels.compiling import compile_job
from tests.kernels.crossed import crossed
from tests.kernels.support import DEVICE, generator, randn, strided_layer

MIXED = ((40, 40), (1, 77), (0, 0), (3, 50), (11, 70), (1, 1))

MIMO = Shape(
    requests=MIXED, num_heads=8, head_dim=192, value_dim=128, dtype=torch.bfloat16, page_tokens=48
)

OPTIONS = {
    "causal": Options(),
    "window_and_sinks": Options(window_tokens=20, has_sinks=True),
    "chunked": Options(chunk_tokens=48, soft_cap=2.0),
    "cross": Options(is_causal=False, has_alibi=True),
    "spans": Options(window_tokens=20, has_spans=True),
}


@crossed({"options": OPTIONS, "tiles": {"whole": SMALL_TILES, "halves": HALVED_TILES}})
def test_paged_attention_of_other_widths_has_option(options, tiles):
    check_batch(make_batch(MIMO, options), tiles=tiles)


DTYPES = [
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [
        (80, 112),
        (128, 16),
        *(
            pytest.param(*widths, marks=pytest.mark.slow)
            for widths in ((64, 128), (256, 320), (112, 80), (96, 24), (320, 40), (512, 128))
        ),
    ],
)
def test_paged_attention_takes_any_two_widths(head_dim, value_dim, dtype):
    shape = replace(MIMO, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    batch = make_batch(replace(shape, num_padding_tokens=3), Options())

    check_batch(batch, tiles=SMALL_TILES)
    check_batch(batch, tiles=HALVED_TILES)
    check_batch(batch)


@crossed(
    {
        "num_scales": {"unscaled": 0, "per_tensor": 1, "per_head": 2},
        "pages_dtype": SCALED_DTYPES,
        "value_dim": [128, 48],
    }
)
def test_paged_attention_of_other_widths_reads_fp8(value_dim, num_scales, pages_dtype):
    shape = replace(MIMO, value_dim=value_dim, pages_dtype=pages_dtype)

    check_batch(make_batch(shape, Options(num_scales=num_scales)), tiles=SMALL_TILES)


@pytest.mark.parametrize("is_batch_invariant", [False, True], ids=["balanced", "invariant"])
def test_paged_attention_of_other_widths_decodes_drafted_tokens(is_batch_invariant):
    requests = [(8, 100), (8, 8), (5, 700), (1, 40)]
    batch = make_batch(replace(MIMO, requests=requests), Options(window_tokens=300))

    check_batch(
        batch,
        tiles=replace(SMALL_TILES, decode=replace(SMALL_TILES.decode, block_m=32)),
        decode_query_tokens=8,
        max_query_tokens=8,
        is_batch_invariant=is_batch_invariant,
    )


def test_paged_attention_without_a_plan_allocates_results_as_wide_as_values():
    batch = make_batch(MIMO, Options())

    out = paged_attention(**batch.arguments)

    assert out.shape == (*batch.q.shape[:2], 128)
    assert torch.equal(out, paged_attention(**batch.arguments, plan=batch.plan()))


@pytest.mark.parametrize("is_head_major", [True, False], ids=["head_major", "token_major"])
@pytest.mark.parametrize("pages_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 512), (80, 16)])
def test_kv_store_writes_keys_and_values_of_their_own_width(
    head_dim, value_dim, pages_dtype, is_head_major
):
    rng = generator(2)
    k = randn((37, 3, head_dim), torch.float16, rng)
    v = randn((37, 3, value_dim), torch.float16, rng)
    slots = torch.randperm(4 * 16, generator=rng)[:37]
    slots[::5] = -1
    slots = slots.to(DEVICE)
    got, want = (
        strided_layer(
            4, 16, 3, head_dim, pages_dtype, value_dim=value_dim, is_head_major=is_head_major
        )
        for _ in range(2)
    )

    kv_store(k, v, got.k_pages, got.v_pages, slots)
    reference_kv_store.kv_store(k, v, want.k_pages, want.v_pages, slots)

    assert torch.equal(got.arena.view(torch.uint8), want.arena.view(torch.uint8))


def test_values_wider_than_the_kernels_have_tiles_for_are_refused():
    batch = make_batch(replace(MIMO, value_dim=528), Options())
    with pytest.raises(
        ValueError, match=r"^v_pages must have values of 1 to 512 elements, got 528"
    ):
        paged_attention(**batch.arguments)


def test_results_of_another_width_than_values_are_refused():
    batch = make_batch(MIMO, Options())
    with pytest.raises(ValueError, match=r"^out "):
        paged_attention(**batch.arguments, out=torch.empty_like(batch.q))


def test_a_plan_made_for_values_as_wide_as_keys_is_refused():
    batch = make_batch(MIMO, Options())
    other = make_batch(replace(MIMO, value_dim=None), Options())
    with pytest.raises(ValueError, match=r"^plan "):
        paged_attention(**batch.arguments, plan=other.plan())


def test_value_pages_with_strides_of_their_own_are_refused():
    batch = make_batch(MIMO, Options())
    with pytest.raises(ValueError, match=r"^v_pages must have the strides of k_pages"):
        paged_attention(**batch.arguments | {"v_pages": batch.v_pages.contiguous()})


def test_value_pages_that_overlap_keys_are_refused():
    kv = torch.zeros(4, 16, 2, 320, dtype=torch.float16, device=DEVICE)
    k, v = kv.new_zeros(5, 2, 192), kv.new_zeros(5, 2, 128)
    slots = torch.arange(5, device=DEVICE)
    for k_pages, v_pages in (
        (kv[..., :192], kv[..., 184:312]),
        (kv[..., 120:312], kv[..., :128]),
    ):
        with pytest.raises(ValueError, match=r"^v_pages must not overlap k_pages"):
            kv_store(k, v, k_pages, v_pages, slots)


def test_a_kind_told_that_values_are_as_wide_as_keys_is_that_without_a_width():
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_tokens": 16}
    assert AttentionKind(**sizes, value_dim=64) == AttentionKind(**sizes)
    assert AttentionKind(**sizes, value_dim=128) != AttentionKind(**sizes)
    assert AttentionKind(**sizes, value_dim=128).result_dim == 128
    with pytest.raises(ValueError, match=r"^value_dim "):
        AttentionKind(**sizes, value_dim=0)


def test_halves_of_a_narrow_value_are_one():
    tiles = LoopTiles(block_m=16, block_n=16, num_warps=4, num_stages=2, value_parts=2)
    assert [tiles.part_dim(value_dim) for value_dim in (8, 16, 24, 40, 512)] == [8, 16, 16, 32, 256]


def test_tiles_whose_warps_specialize_are_refused_for_values_of_another_width():
    batch = make_batch(MIMO, Options())
    specialized = SpecializedTiles(
        block_n=64, num_stages=2, takes_turns=False, loads_rows=True, num_programs=4
    )
    with pytest.raises(ValueError, match=r"^tiles must have no specialized_prefill"):
        batch.plan(tiles=replace(SMALL_TILES, specialized_prefill=specialized))


def launch(*, head_dim, value_dim, dtype=torch.bfloat16, pages_dtype=None, **options):
    num_tokens, num_heads, num_kv_heads = 4096, 16, 2
    kv = torch.empty(64, num_kv_heads, 16, head_dim + value_dim, dtype=pages_dtype or dtype)
    kv = kv.transpose(1, 2)
    k_pages, v_pages = kv[..., :head_dim], kv[..., head_dim:]
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_tokens=16,
        window_tokens=options.get("window_tokens"),
        is_quantised=pages_dtype is not None,
    )
    steps = torch.zeros(34, dtype=torch.int32), torch.zeros(33, dtype=torch.int32)
    plan = plan_attention(
        *steps, kind, num_tokens=num_tokens, dtype=dtype, is_warp_specialized=True
    )
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    table = torch.zeros(33, 64, dtype=torch.int32)
    paged_attention(q, k_pages, v_pages, table, *steps, scale=head_dim**-0.5, plan=plan, **options)
    if pages_dtype is None:
        k, v = torch.empty(33, 2, head_dim, dtype=dtype), torch.empty(33, 2, value_dim, dtype=dtype)
        kv_store(k, v, k_pages, v_pages, torch.zeros(33, dtype=torch.int64))


def compile_mimo():
    launch(head_dim=192, value_dim=128)
    launch(head_dim=192, value_dim=128, window_tokens=128, sinks=torch.zeros(16))


def compile_other_widths():
    launch(head_dim=64, value_dim=128)
    launch(head_dim=128, value_dim=64, dtype=torch.float16)
    launch(head_dim=256, value_dim=512)
    launch(head_dim=512, value_dim=128)


def compile_float32():
    launch(head_dim=192, value_dim=128, dtype=torch.float32)


def compile_fp8():
    scale = torch.ones(2)
    scales = {"pages_dtype": torch.float8_e4m3fn, "k_scale": scale, "v_scale": scale}
    launch(head_dim=192, value_dim=128, window_tokens=128, **scales)


JOBS = [
    (compile_mimo, 90),
    *[
        pytest.param(job, capability, marks=pytest.mark.slow)
        for job, capability in (
            *[(compile_mimo, capability) for capability in (80, 100, 120)],
            *[(compile_other_widths, capability) for capability in (80, 90)],
            *[(compile_float32, capability) for capability in (80, 90)],
            *[(compile_fp8, capability) for capability in (89, 90)],
        )
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "capability"), JOBS)
def test_other_widths_compile_to_wide_loads_and_tensor_cores_without_spills(job, capability):
    kernels = compile_job(job, capability)

    assert {"attention_prefill_kernel", "attention_decode_kernel"} <= {k.name for k in kernels}
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        if kernel.name == "attention_prefill_kernel" and job is not compile_float32:
            matrix = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma")
            assert kernel.counts[matrix] > 0, kernel
        if kernel.name in {"attention_prefill_kernel", "attention_decode_kernel"}:
            assert kernel.counts["load_128"] >= 5, kernel
            assert kernel.counts["store_128"] > 0, kernel

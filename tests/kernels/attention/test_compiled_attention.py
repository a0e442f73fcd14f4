from dataclasses import replace
from functools import partial

import pytest
import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.pages import is_other_float
from jenga_kernels.checks.tensors import E5M2_DTYPE, INT4_DTYPE, QUANTISED_DTYPES
from jenga_kernels.plans.attention_plan import AttentionKind, plan_attention
from perf.harness.machine_code import SHARED_BYTES
from tests.kernels.compiling import compile_job
from tests.kernels.support import row_parts


def launch(
    *,
    head_dim,
    page_tokens=16,
    dtype=torch.bfloat16,
    pages_dtype=None,
    num_heads=8,
    num_kv_heads=2,
    decode_query_tokens=None,
    max_query_tokens=None,
    is_warp_specialized=False,
    joins_pages=False,
    is_batch_invariant=False,
    has_slot_scales=False,
    **options,
):
    num_tokens = 4096
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    key, value, row_items = row_parts(head_dim, head_dim, pages_dtype or dtype)
    pages = torch.empty(64, num_kv_heads, page_tokens, row_items, dtype=pages_dtype or dtype)
    pages = pages.transpose(1, 2)
    if has_slot_scales:
        scales = torch.empty(64, 2, num_kv_heads, page_tokens).transpose(2, 3)
        if pages_dtype == INT4_DTYPE:
            scales = scales[..., None].expand(-1, -1, -1, -1, 2).bfloat16()
        options |= {"k_slot_scales": scales[:, 0], "v_slot_scales": scales[:, 1]}
    query_starts = torch.zeros(34, dtype=torch.int32)
    seq_lens = torch.zeros(33, dtype=torch.int32)
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        window_tokens=options.get("window_tokens"),
        chunk_tokens=options.get("chunk_tokens"),
        is_causal=options.get("is_causal", True),
        is_quantised=pages_dtype in QUANTISED_DTYPES,
        is_other_float=is_other_float(pages_dtype or dtype, dtype),
        has_slot_scales=has_slot_scales,
        is_int4=pages_dtype == INT4_DTYPE,
    )
    make_plan = partial(
        plan_attention,
        query_starts,
        seq_lens,
        kind,
        num_tokens=num_tokens,
        dtype=dtype,
        decode_query_tokens=decode_query_tokens,
        max_query_tokens=max_query_tokens,
    )
    plan = make_plan(is_warp_specialized=is_warp_specialized, is_batch_invariant=is_batch_invariant)
    if joins_pages:
        joining = replace(plan.tiles.specialized_prefill, joins_pages=True)
        plan = make_plan(tiles=replace(plan.tiles, specialized_prefill=joining))
    paged_attention(
        q,
        pages[..., key],
        pages[..., value],
        torch.zeros(33, 64, dtype=torch.int32),
        query_starts,
        seq_lens,
        scale=head_dim**-0.5,
        plan=plan,
        **options,
    )


def compile_usual():
    launch(head_dim=64)
    launch(head_dim=128, window_tokens=1024, soft_cap=50.0, sinks=torch.zeros(8))
    launch(head_dim=256, page_tokens=784, window_tokens=512)


def compile_head_dims():
    for head_dim in (80, 96, 112, 128, 192, 256):
        launch(head_dim=head_dim)


def compile_prompts_beside_decoding_requests():
    launch(head_dim=128)
    launch(head_dim=128, is_warp_specialized=True)


def compile_decoding_requests_alone():
    launch(head_dim=128, max_query_tokens=1)


def compile_prompts_alone():
    launch(head_dim=128, decode_query_tokens=0)
    launch(head_dim=128, decode_query_tokens=0, is_warp_specialized=True)


def compile_a_narrow_head():
    launch(head_dim=8)


def compile_pages_of_whole_tiles():
    for head_dim in (64, 128, 256):
        launch(head_dim=head_dim, page_tokens=128)


def compile_options():
    launch(head_dim=128, is_causal=False, lse=torch.zeros(4096, 8))
    launch(head_dim=64, alibi_slopes=torch.zeros(8), soft_cap=30.0)
    launch(head_dim=128, decode_query_tokens=8)
    for head_dim in (64, 128, 256):
        spans = torch.zeros(4096, 2, dtype=torch.int32)
        launch(head_dim=head_dim, window_tokens=512, spans=spans, decode_query_tokens=0)


def compile_drafted_tokens_of_wide_groups():
    for head_dim in (128, 256):
        for num_heads in (16, 32):
            launch(
                head_dim=head_dim, num_heads=num_heads, decode_query_tokens=8, max_query_tokens=8
            )


def compile_invariant():
    for head_dim in (64, 128, 256):
        launch(head_dim=head_dim, window_tokens=512, decode_query_tokens=0, is_batch_invariant=True)


def compile_fp8():
    for head_dim in (64, 128, 256):
        for num_scales in (1, 2):
            scale = torch.ones(num_scales)
            launch(head_dim=head_dim, pages_dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)


def compile_e5m2():
    scale = torch.ones(1)
    for head_dim in (64, 128, 256, 512):
        kwargs = {"pages_dtype": E5M2_DTYPE, "k_scale": scale, "v_scale": scale}
        launch(head_dim=head_dim, **kwargs)
        launch(head_dim=head_dim, window_tokens=512, soft_cap=50.0, sinks=torch.zeros(8), **kwargs)
    spans = torch.zeros(4096, 2, dtype=torch.int32)
    for head_dim in (96, 192):
        launch(head_dim=head_dim, page_tokens=784, dtype=torch.float16, pages_dtype=E5M2_DTYPE)
        launch(head_dim=head_dim, spans=spans, decode_query_tokens=0, pages_dtype=E5M2_DTYPE)


def compile_other_float():
    for head_dim in (64, 128, 256, 512):
        launch(head_dim=head_dim, pages_dtype=torch.float16)
        launch(head_dim=head_dim, dtype=torch.float16, pages_dtype=torch.bfloat16)
    launch(head_dim=128, window_tokens=512, soft_cap=50.0, sinks=torch.zeros(8))
    launch(head_dim=128, num_heads=32, decode_query_tokens=8, pages_dtype=torch.float16)


def compile_other_float_in_float32():
    for head_dim in (64, 128, 256):
        launch(head_dim=head_dim, dtype=torch.float32, pages_dtype=torch.bfloat16)


def launch_slot_scales(pages_dtype):
    kwargs = {"pages_dtype": pages_dtype, "has_slot_scales": True}
    for head_dim in (64, 128, 256):
        launch(head_dim=head_dim, **kwargs)
        launch(head_dim=head_dim, window_tokens=512, soft_cap=50.0, sinks=torch.zeros(8), **kwargs)
    launch(head_dim=80, page_tokens=784, dtype=torch.float16, **kwargs)
    launch(head_dim=128, page_tokens=128, num_heads=32, decode_query_tokens=8, **kwargs)


def compile_int8():
    launch_slot_scales(torch.int8)


def compile_int4():
    launch_slot_scales(INT4_DTYPE)


def compile_fp8_with_slot_scales():
    launch_slot_scales(torch.float8_e4m3fn)


def compile_float32():
    for head_dim in (64, 128, 256):
        launch(head_dim=head_dim, dtype=torch.float32, window_tokens=512)


JOBS = [
    (compile_usual, 90),
    (compile_usual, 80),
    pytest.param(compile_usual, 100, marks=pytest.mark.slow),
    pytest.param(compile_usual, 120, marks=pytest.mark.slow),
    *[
        pytest.param(job, capability, marks=pytest.mark.slow)
        for job in (
            compile_head_dims,
            compile_pages_of_whole_tiles,
            compile_options,
            compile_invariant,
            compile_fp8,
            compile_e5m2,
            compile_other_float,
            compile_int8,
            compile_int4,
            compile_fp8_with_slot_scales,
            compile_float32,
        )
        for capability in (80, 90)
        # Compute capability 8.0 has no conversion from float8_e4m3fn.
        if capability != 80 or job not in {compile_fp8, compile_fp8_with_slot_scales}
    ],
    *[
        pytest.param(job, 89, marks=pytest.mark.slow)
        for job in (compile_fp8, compile_fp8_with_slot_scales)
    ],
    pytest.param(compile_e5m2, 120, marks=pytest.mark.slow),
]

SPILLED_BYTES = {(compile_int8, 80): 8}
"""One number, of the rows of 16 heads a group; half the keys would spill none, and take a seventh
more instructions."""


LOADED_AT_ONCE = {compile_float32, compile_fp8, compile_e5m2, compile_other_float}
"""Jobs with tiles that leave no room to load a step ahead."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_attention_in_float32_over_other_floats_fits_into_shared_memory(capability):
    for kernel in compile_job(compile_other_float_in_float32, capability):
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.slow
@pytest.mark.parametrize(("job", "capability"), JOBS)
def test_attention_compiles_to_wide_loads_and_tensor_cores_without_spills(job, capability):
    kernels = compile_job(job, capability)

    names = {kernel.name for kernel in kernels}
    assert "attention_prefill_kernel" in names
    for kernel in kernels:
        assert kernel.stack_bytes <= SPILLED_BYTES.get((job, capability), 0), kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        if kernel.name == "attention_prefill_kernel" and job is not compile_float32:
            assert kernel.counts["load_shared_byte"] == 0, kernel
        if kernel.name == "attention_prefill_kernel" and job is not compile_float32:
            matrix = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma")
            assert kernel.counts[matrix] > 0, kernel
        if kernel.name in {"attention_prefill_kernel", "attention_decode_kernel"}:
            # Queries, and at least one step of keys and one of values; where slots have scales, a
            # thread may have 8 bytes of a step, and of four bits an element fewer.
            wide = {compile_int8: 4, compile_fp8_with_slot_scales: 4, compile_int4: 2}.get(job, 9)
            assert kernel.counts["load_128"] >= wide, kernel
            assert kernel.counts["store_128"] > 0, kernel
            if capability == 90 and job not in LOADED_AT_ONCE:
                # Loads of a step are under way while the one before is computed.
                assert kernel.counts["cp_async_ahead"] > 0, kernel


def compile_one_token_each():
    launch(head_dim=64, max_query_tokens=1)


def test_attention_merges_no_more_tokens_than_requests_may_have():
    kernels = {kernel.name: kernel for kernel in compile_job(compile_one_token_each, 90)}

    assert "attention_prefill_kernel" not in kernels
    assert kernels["attention_splits_kernel"].grid == (33, 1, 8)


@pytest.mark.slow
def test_attention_compiles_for_heads_narrower_than_a_matrix_instruction():
    assert all(kernel.stack_bytes == 0 for kernel in compile_job(compile_a_narrow_head, 90))


def compile_decoding():
    launch(head_dim=128, num_heads=32, num_kv_heads=8, max_query_tokens=1)
    launch(head_dim=128, num_heads=32, num_kv_heads=8, max_query_tokens=1, window_tokens=1024)
    launch(head_dim=64, num_heads=64, num_kv_heads=8, max_query_tokens=1)


def compile_decoding_under_a_brief_window():
    sinks = torch.zeros(64)
    for soft_cap in (None, 50.0):
        launch(
            head_dim=64,
            num_heads=64,
            num_kv_heads=8,
            max_query_tokens=1,
            window_tokens=128,
            soft_cap=soft_cap,
            sinks=sinks,
        )


def launch_decoding(pages_dtype):
    scale = torch.ones(1)
    launch(
        head_dim=128,
        num_heads=32,
        num_kv_heads=8,
        pages_dtype=pages_dtype,
        k_scale=scale,
        v_scale=scale,
    )


def compile_decoding_of_fp8():
    launch_decoding(torch.float8_e4m3fn)


def compile_decoding_of_e5m2():
    launch_decoding(E5M2_DTYPE)


@pytest.mark.slow
def test_attention_decodes_with_few_instructions_a_tile():
    kernels = [k for k in compile_job(compile_decoding, 90) if k.name == "attention_decode_kernel"]

    # 32 KiB of keys and values, for which an H200's memory takes about 1,500 cycles of a processor.
    for kernel, most in zip(kernels, (320, 350, 380), strict=True):
        assert kernel.loop_counts["load_ahead"] == 17, kernel
        assert kernel.loop_counts["matrix"] == 32, kernel
        assert kernel.loop_instructions <= most, kernel
        # Loads, the rows' greatest scores, weights for all warps; sums wait for the end.
        assert kernel.loop_counts["wait"] <= 10, kernel
    # Three programs of these would fit on a processor.
    assert kernels[0].registers <= 168, kernels[0]


@pytest.mark.slow
def test_attention_under_brief_windows_has_eight_programs_of_one_warp_a_processor():
    kernels = compile_job(compile_decoding_under_a_brief_window, 90)

    decode = [kernel for kernel in kernels if kernel.name == "attention_decode_kernel"]
    assert len(decode) == 2
    for kernel in decode:
        assert kernel.num_warps == 1, kernel
        assert kernel.stack_bytes == 0, kernel
        assert 8 * kernel.shared_bytes <= 227 << 10, kernel
        assert kernel.grid == (8 * 132,), kernel


@pytest.mark.slow
def test_attention_converts_fp8_in_pairs():
    kernels = {kernel.name: kernel for kernel in compile_job(compile_decoding_of_fp8, 90)}

    decode, prefill = kernels["attention_decode_kernel"], kernels["attention_prefill_kernel"]
    for kernel in (decode, prefill):
        assert kernel.counts["half_to_bfloat"] == 0, kernel
        assert kernel.counts["load_shared_byte"] == 0, kernel
    # 128 of each of K and V a thread, two at once, and the weights.
    assert decode.loop_counts["convert"] == 128 + 8, decode
    assert decode.loop_instructions <= 620, decode
    assert prefill.loop_instructions <= 495, prefill


@pytest.mark.slow
def test_attention_takes_e5m2_as_halves_without_conversions():
    kernels = {kernel.name: kernel for kernel in compile_job(compile_decoding_of_e5m2, 90)}

    decode, prefill = kernels["attention_decode_kernel"], kernels["attention_prefill_kernel"]
    for kernel in (decode, prefill):
        assert kernel.counts["half_to_bfloat"] == 0, kernel
        assert kernel.counts["load_shared_byte"] == 0, kernel
    # The weights alone; two instructions make four halves.
    assert decode.loop_counts["convert"] == 8, decode
    assert decode.loop_instructions <= 560, decode
    assert prefill.loop_instructions <= 495, prefill


def compile_soft_cap():
    launch(head_dim=128, num_heads=32, num_kv_heads=16, soft_cap=50.0)


@pytest.mark.slow
def test_attention_caps_scores_with_few_instructions():
    kernels = {kernel.name: kernel for kernel in compile_job(compile_soft_cap, 90)}

    # Two exponentials and a reciprocal of each of 32 scores, and what rescales two rows.
    assert kernels["attention_prefill_kernel"].loop_counts["special"] == 3 * 32 + 2
    assert kernels["attention_prefill_kernel"].loop_instructions <= 555


DRAFTING_JOBS = [90, pytest.param(89, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("capability", DRAFTING_JOBS)
def test_attention_of_many_rows_of_drafted_tokens_fits_into_registers(capability):
    kernels = compile_job(compile_drafted_tokens_of_wide_groups, capability)

    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        if capability == 90:
            assert kernel.stack_bytes == 0, kernel


def compile_drafted_tokens_in_float32():
    for num_heads in (8, 16, 32):
        launch(
            head_dim=256,
            num_heads=num_heads,
            dtype=torch.float32,
            decode_query_tokens=8,
            max_query_tokens=8,
        )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89])
def test_attention_of_drafted_tokens_in_float32_fits_into_shared_memory(capability):
    kernels = compile_job(compile_drafted_tokens_in_float32, capability)

    assert {"attention_prefill_kernel", "attention_decode_kernel"} <= {k.name for k in kernels}
    assert all(kernel.shared_bytes <= SHARED_BYTES[89] for kernel in kernels)


def compile_wide_heads():
    launch(head_dim=512)
    launch(head_dim=320, page_tokens=784, window_tokens=512, soft_cap=50.0, sinks=torch.zeros(8))
    launch(head_dim=512, num_heads=14, decode_query_tokens=0, lse=torch.zeros(4096, 14))


def compile_options_of_wide_heads():
    launch(head_dim=512, dtype=torch.float16, page_tokens=128, window_tokens=1024)
    launch(head_dim=512, is_causal=False, lse=torch.zeros(4096, 8))
    launch(head_dim=384, alibi_slopes=torch.zeros(8), soft_cap=30.0, chunk_tokens=768)
    spans = torch.zeros(4096, 2, dtype=torch.int32)
    launch(head_dim=512, window_tokens=512, spans=spans, decode_query_tokens=0)


def compile_wide_heads_in_fp8():
    for num_scales in (1, 2):
        scale = torch.ones(num_scales)
        scales = {"pages_dtype": torch.float8_e4m3fn, "k_scale": scale, "v_scale": scale}
        launch(head_dim=512, **scales)
        launch(head_dim=320, page_tokens=784, window_tokens=512, soft_cap=50.0, **scales)


def compile_wide_heads_in_float32():
    launch(head_dim=512, dtype=torch.float32, window_tokens=512)
    launch(head_dim=512, dtype=torch.float32, pages_dtype=torch.float8_e4m3fn)


def compile_wide_heads_in_float32_without_fp8():
    launch(head_dim=512, dtype=torch.float32, window_tokens=512)


def compile_drafted_tokens_of_wide_heads():
    for num_heads in (8, 16):
        launch(head_dim=512, num_heads=num_heads, decode_query_tokens=8, max_query_tokens=8)
    launch(
        head_dim=512,
        num_heads=16,
        pages_dtype=torch.float8_e4m3fn,
        decode_query_tokens=8,
        max_query_tokens=8,
    )


WIDE_JOBS = [
    (compile_wide_heads, 90),
    *[
        pytest.param(job, capability, marks=pytest.mark.slow)
        for job, capability in (
            *[(compile_wide_heads, capability) for capability in (80, 100, 120)],
            *[(compile_options_of_wide_heads, capability) for capability in (80, 90, 100, 120)],
            *[(compile_wide_heads_in_fp8, capability) for capability in (89, 90, 100, 120)],
            *[(compile_wide_heads_in_float32, capability) for capability in (89, 90)],
            (compile_wide_heads_in_float32_without_fp8, 80),
            *[
                (compile_drafted_tokens_of_wide_heads, capability)
                for capability in (89, 90, 100, 120)
            ],
        )
    ],
]

HALF_PRODUCTS = 512 // 16 + 32 // 16
"""Of a step of 32 keys and a warpgroup: 512 elements of scores, then half of the values."""

DECODE_PRODUCTS = {0, 2 * 512 // 16 + 1}
"""Of a step of 16 keys: each warpgroup computes all scores; fewer rows take other instructions."""


SPILLED_BYTES_OF_WIDE_HEADS = {(compile_wide_heads_in_fp8, 89): 8}
"""One number, outside the loop; 8 warps would spill none, and leave room for half the programs."""


@pytest.mark.slow
@pytest.mark.parametrize(("job", "capability"), WIDE_JOBS)
def test_attention_of_wide_heads_compiles_to_large_tiles_without_spills(job, capability):
    is_float32 = job.__name__.startswith("compile_wide_heads_in_float32")
    for kernel in compile_job(job, capability):
        limit = SPILLED_BYTES_OF_WIDE_HEADS.get((job, capability), 0)
        assert kernel.stack_bytes <= limit, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        is_prefill = kernel.name == "attention_prefill_kernel"
        if not is_prefill and kernel.name != "attention_decode_kernel":
            continue
        assert kernel.counts["load_128"] >= 12, kernel
        assert kernel.counts["store_128"] > 0, kernel
        if is_float32:
            continue
        if capability == 90 and is_prefill:
            # Two or three loops, of the tiles that need a mask and of those that need none.
            assert kernel.counts["wgmma"] // HALF_PRODUCTS in {2, 3}, kernel
            assert kernel.counts["wgmma"] % HALF_PRODUCTS == 0, kernel
        elif capability == 90:
            assert kernel.counts["wgmma"] in DECODE_PRODUCTS, kernel
            # Two steps are under way while one is computed.
            assert kernel.counts["cp_async_ahead"] > 0, kernel
        elif capability == 100 and is_prefill:
            assert kernel.counts["tcgen05"] > 0, kernel
        else:
            assert kernel.counts["mma"] + kernel.counts["tcgen05"] > 0, kernel


def compile_more_drafted_rows_than_wide_heads_have():
    launch(head_dim=512, num_heads=32, decode_query_tokens=8, max_query_tokens=8)


@pytest.mark.slow
def test_attention_leaves_to_prefill_what_wide_heads_have_no_rows_to_decode():
    kernels = compile_job(compile_more_drafted_rows_than_wide_heads_have, 89)

    assert {"attention_prefill_kernel", "attention_decode_kernel"} <= {k.name for k in kernels}
    assert all(kernel.shared_bytes <= SHARED_BYTES[89] for kernel in kernels)


def overlaps(job, capability):
    """Whether each kernel lets the next one begin, and waits for the one before: name -> both."""
    return {
        kernel.name: (
            kernel.counts["let_next_begin"] > 0,
            kernel.counts["await_kernel_before"] > 0,
        )
        for kernel in compile_job(job, capability)
        if kernel.name != "attention_plan_kernel"
    }


def test_decoding_requests_begin_while_the_last_prompts_are_read():
    assert overlaps(compile_prompts_beside_decoding_requests, 90) == {
        "attention_prefill_kernel": (True, False),
        "attention_prefill_hopper_kernel": (True, False),
        "attention_decode_kernel": (True, True),
        "attention_splits_kernel": (False, True),
    }
    assert overlaps(compile_decoding_requests_alone, 90) == {
        "attention_decode_kernel": (True, False),
        "attention_splits_kernel": (False, True),
    }
    assert overlaps(compile_prompts_alone, 90) == {
        "attention_prefill_kernel": (False, False),
        "attention_prefill_hopper_kernel": (False, False),
    }
    assert not any(any(each) for each in overlaps(compile_decoding_requests_alone, 80).values())

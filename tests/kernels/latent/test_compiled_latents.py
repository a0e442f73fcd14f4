from dataclasses import replace
from functools import partial

import pytest
import torch

from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.plans.attention_plan import AttentionKind
from jenga_kernels.plans.latent_plan import plan_latent_attention
from perf.harness.machine_code import SHARED_BYTES
from tests.kernels.compiling import compile_job

LATENT_DIM = 512
WIDTH = 576


def launch(
    *,
    num_heads,
    page_tokens=16,
    dtype=torch.bfloat16,
    is_fp8=False,
    pages_dtype=None,
    decode_query_tokens=None,
    is_warp_specialized=None,
    joins_pages=False,
):
    num_tokens, num_requests = 4096, 33
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=LATENT_DIM,
        page_tokens=page_tokens,
        is_quantised=is_fp8,
        is_other_float=pages_dtype is not None,
    )
    query_starts = torch.zeros(num_requests + 1, dtype=torch.int32)
    seq_lens = torch.zeros(num_requests, dtype=torch.int32)
    pages_dtype = torch.float8_e4m3fn if is_fp8 else pages_dtype or dtype
    make_plan = partial(
        plan_latent_attention,
        query_starts,
        seq_lens,
        kind,
        num_tokens=num_tokens,
        dtype=dtype,
        decode_query_tokens=decode_query_tokens,
        is_warp_specialized=is_warp_specialized,
    )
    plan = make_plan()
    if joins_pages:
        joining = replace(plan.tiles.specialized_decode, joins_pages=True)
        plan = make_plan(tiles=replace(plan.tiles, specialized_decode=joining))
    latent_attention(
        torch.empty(num_tokens, num_heads, WIDTH, dtype=dtype),
        torch.empty(64, 3, page_tokens, WIDTH, dtype=pages_dtype)[:, 1],
        torch.zeros(num_requests, 64, dtype=torch.int32),
        query_starts,
        seq_lens,
        scale=0.1,
        latent_dim=LATENT_DIM,
        latent_scale=torch.ones(1) if is_fp8 else None,
        lse=torch.zeros(num_tokens, num_heads),
        plan=plan,
    )


def compile_sixteen_heads():
    launch(num_heads=16)


def compile_usual():
    launch(num_heads=16)
    launch(num_heads=128, page_tokens=64, is_warp_specialized=False)


def compile_other_shapes():
    launch(num_heads=32, page_tokens=784)
    plain = {"is_warp_specialized": False}
    launch(num_heads=64, page_tokens=16, **plain)
    launch(num_heads=128, page_tokens=16, decode_query_tokens=3, **plain)
    launch(num_heads=16, page_tokens=64, decode_query_tokens=8, dtype=torch.float16, **plain)
    launch(num_heads=20, page_tokens=1344)


def compile_fp8():
    launch(num_heads=16, is_fp8=True)
    launch(num_heads=128, page_tokens=64, is_fp8=True, is_warp_specialized=False)


def compile_other_float():
    launch(num_heads=16, pages_dtype=torch.float16)
    launch(num_heads=128, page_tokens=64, dtype=torch.float16, pages_dtype=torch.bfloat16)


def compile_other_float_in_float32():
    launch(num_heads=16, dtype=torch.float32, pages_dtype=torch.bfloat16)


def compile_float32():
    launch(num_heads=16, dtype=torch.float32)


JOBS = [
    (compile_sixteen_heads, 80),
    (compile_usual, 90),
    *[
        pytest.param(job, capability, marks=pytest.mark.slow)
        for job, capability in (
            (compile_usual, 80),
            (compile_usual, 100),
            (compile_usual, 120),
            (compile_other_shapes, 80),
            (compile_other_shapes, 90),
            (compile_fp8, 89),
            (compile_fp8, 90),
            (compile_other_float, 80),
            (compile_other_float, 90),
            (compile_float32, 80),
            (compile_float32, 90),
        )
    ],
]

WARPGROUP_PRODUCTS = 36 * 2 + 64 // 16
"""Of a step of 64 keys: 576 elements of scores, for two halves of the keys; then the values."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_latent_attention_in_float32_over_other_floats_fits_into_shared_memory(capability):
    for kernel in compile_job(compile_other_float_in_float32, capability):
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel


@pytest.mark.slow
@pytest.mark.parametrize(("job", "capability"), JOBS)
def test_latent_attention_compiles_to_wide_loads_and_tensor_cores_without_spills(job, capability):
    kernels = compile_job(job, capability)

    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
    walks = [k for k in kernels if k.name in {"latent_prefill_kernel", "latent_decode_kernel"}]
    assert len({kernel.name for kernel in walks}) == 2
    for kernel in walks:
        # Queries and a step of latents; and no narrow store but those of sums.
        assert kernel.counts["load_128"] >= 8, kernel
        assert kernel.counts["store_global"] - kernel.counts["store_128"] <= 2, kernel
        if job is not compile_float32:
            assert kernel.counts["wgmma"] + kernel.counts["mma"] > 0, kernel
        if job is not compile_float32:
            # A page id, and a step of latents loaded ahead.
            assert kernel.counts["cp_async"] >= 16, kernel
        if job is not compile_float32 and capability == 90 and kernel.counts["wgmma"] == 0:
            assert kernel.counts["cp_async_ahead"] > 0, kernel
        if job in {compile_usual, compile_other_shapes} and capability == 90:
            assert kernel.counts["wgmma"] in {0, WARPGROUP_PRODUCTS}, kernel
            assert kernel.counts["wgmma"] > 0 or kernel.name == "latent_decode_kernel", kernel
    if job is compile_usual and capability == 90:
        decoded = {k.counts["wgmma"] for k in walks if k.name == "latent_decode_kernel"}
        assert decoded == {0, WARPGROUP_PRODUCTS}

import pytest
import torch

from jenga_kernels.attention_plan import AttentionKind
from jenga_kernels.latent_attention import latent_attention
from jenga_kernels.latent_plan import plan_latent_attention
from tests.kernels.compiling import compile_job

LATENT_DIM = 512
WIDTH = 576


def launch(
    *, num_heads, page_tokens=16, dtype=torch.bfloat16, is_fp8=False, decode_query_tokens=None
):
    num_tokens, num_requests = 4096, 33
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=LATENT_DIM,
        page_tokens=page_tokens,
        is_fp8=is_fp8,
    )
    query_starts = torch.zeros(num_requests + 1, dtype=torch.int32)
    seq_lens = torch.zeros(num_requests, dtype=torch.int32)
    pages_dtype = torch.float8_e4m3fn if is_fp8 else dtype
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
        plan=plan_latent_attention(
            query_starts,
            seq_lens,
            kind,
            num_tokens=num_tokens,
            dtype=dtype,
            decode_query_tokens=decode_query_tokens,
        ),
    )


def compile_sixteen_heads():
    launch(num_heads=16)


def compile_many_heads():
    launch(num_heads=128, page_tokens=64)


def compile_other_shapes():
    launch(num_heads=32, page_tokens=784)
    launch(num_heads=64, page_tokens=16)
    launch(num_heads=128, page_tokens=16, decode_query_tokens=3)
    launch(num_heads=16, page_tokens=64, decode_query_tokens=8, dtype=torch.float16)
    launch(num_heads=20, page_tokens=1344)


def compile_fp8():
    launch(num_heads=16, is_fp8=True)
    launch(num_heads=128, page_tokens=64, is_fp8=True)


def compile_float32():
    launch(num_heads=16, dtype=torch.float32)


JOBS = [
    (compile_sixteen_heads, 80),
    (compile_sixteen_heads, 90),
    (compile_many_heads, 90),
    pytest.param(compile_many_heads, 80, marks=pytest.mark.slow),
    pytest.param(compile_sixteen_heads, 100, marks=pytest.mark.slow),
    pytest.param(compile_many_heads, 100, marks=pytest.mark.slow),
    pytest.param(compile_other_shapes, 80, marks=pytest.mark.slow),
    pytest.param(compile_other_shapes, 90, marks=pytest.mark.slow),
    pytest.param(compile_fp8, 89, marks=pytest.mark.slow),
    pytest.param(compile_fp8, 90, marks=pytest.mark.slow),
    pytest.param(compile_float32, 80, marks=pytest.mark.slow),
    pytest.param(compile_float32, 90, marks=pytest.mark.slow),
]

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Compute capability -> shared memory of one program at most, from the CUDA programming guide."""

WARPGROUP_PRODUCTS = 36 * 2 + 64 // 16
"""Of one step of 64 keys: 576 elements of scores in two halves of the keys, then values."""


@pytest.mark.parametrize(("job", "capability"), JOBS)
def test_latent_attention_compiles_to_wide_loads_and_tensor_cores_without_spills(job, capability):
    kernels = {kernel.name: kernel for kernel in compile_job(job, capability)}

    assert {"latent_prefill_kernel", "latent_decode_kernel"} <= kernels.keys()
    for name, kernel in kernels.items():
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        if name not in {"latent_prefill_kernel", "latent_decode_kernel"}:
            continue
        # Queries and a step of latents; and no narrow store but that of sums.
        assert kernel.counts["load_128"] >= 8, kernel
        assert kernel.counts["store_global"] - kernel.counts["store_128"] <= 2, kernel
        has_many_rows = name == "latent_prefill_kernel" or job is compile_many_heads
        if job is compile_float32:
            continue
        if capability == 90 and job is not compile_fp8 and has_many_rows:
            assert kernel.counts["wgmma"] == WARPGROUP_PRODUCTS, kernel
        elif job in {compile_sixteen_heads, compile_many_heads, compile_fp8}:
            assert kernel.counts["mma"] > 0, kernel
        if job is not compile_fp8:
            assert kernel.counts["cp_async"] > 0, kernel

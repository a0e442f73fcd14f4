import pytest
import torch

from jenga_kernels.attention_plan import AttentionKind, plan_attention
from jenga_kernels.paged_attention import paged_attention
from tests.kernels.compiling import SHARED_BYTES, compile_job


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
    **options,
):
    num_tokens = 4096
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    pages = torch.empty(64, num_kv_heads, page_tokens, 2 * head_dim, dtype=pages_dtype or dtype)
    pages = pages.transpose(1, 2)
    query_starts = torch.zeros(34, dtype=torch.int32)
    seq_lens = torch.zeros(33, dtype=torch.int32)
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        window_tokens=options.get("window_tokens"),
        is_causal=options.get("is_causal", True),
        is_fp8=pages_dtype is not None,
    )
    plan = plan_attention(
        query_starts,
        seq_lens,
        kind,
        num_tokens=num_tokens,
        dtype=dtype,
        decode_query_tokens=decode_query_tokens,
        max_query_tokens=max_query_tokens,
    )
    paged_attention(
        q,
        pages[..., :head_dim],
        pages[..., head_dim:],
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


def compile_fp8():
    for head_dim in (64, 128, 256):
        for num_scales in (1, 2):
            scale = torch.ones(num_scales)
            launch(head_dim=head_dim, pages_dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)


def compile_float32():
    for head_dim in (64, 128, 256):
        launch(head_dim=head_dim, dtype=torch.float32, window_tokens=512)


JOBS = [
    (compile_usual, 90),
    (compile_usual, 80),
    pytest.param(compile_usual, 120, marks=pytest.mark.slow),
    *[
        pytest.param(job, capability, marks=pytest.mark.slow)
        for job in (
            compile_head_dims,
            compile_pages_of_whole_tiles,
            compile_options,
            compile_fp8,
            compile_float32,
        )
        for capability in (80, 90)
        # Compute capability 8.0 has no conversion from float8_e4m3fn.
        if (job, capability) != (compile_fp8, 80)
    ],
]


@pytest.mark.parametrize(("job", "capability"), JOBS)
def test_attention_compiles_to_wide_loads_and_tensor_cores_without_spills(job, capability):
    kernels = compile_job(job, capability)

    names = {kernel.name for kernel in kernels}
    assert "attention_prefill_kernel" in names
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        if kernel.name == "attention_prefill_kernel" and job is not compile_float32:
            assert kernel.counts["wgmma" if capability == 90 else "mma"] > 0, kernel
        if kernel.name in {"attention_prefill_kernel", "attention_decode_kernel"}:
            # Queries, and at least one step of keys and one of values.
            assert kernel.counts["load_128"] >= 9, kernel
            assert kernel.counts["store_128"] > 0, kernel
            if capability == 90 and job not in {compile_float32, compile_fp8}:
                # Loads of a step are under way while the one before is computed.
                assert kernel.counts["cp_async_ahead"] > 0, kernel


def compile_one_token_each():
    launch(head_dim=64, max_query_tokens=1)


def test_attention_merges_no_more_tokens_than_requests_may_have():
    kernels = {kernel.name: kernel for kernel in compile_job(compile_one_token_each, 90)}

    assert "attention_prefill_kernel" not in kernels
    assert kernels["attention_splits_kernel"].grid == (33, 1, 8)


def test_attention_compiles_for_heads_narrower_than_a_matrix_instruction():
    assert all(kernel.stack_bytes == 0 for kernel in compile_job(compile_a_narrow_head, 90))


DRAFTING_JOBS = [90, pytest.param(89, marks=pytest.mark.slow)]


@pytest.mark.parametrize("capability", DRAFTING_JOBS)
def test_attention_of_many_rows_of_drafted_tokens_fits_into_registers(capability):
    kernels = compile_job(compile_drafted_tokens_of_wide_groups, capability)

    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        if capability == 90:
            assert kernel.stack_bytes == 0, kernel

"""What vLLM's CPU build stores in a float8 cache, and what the kernels store."""

import pytest
import torch

from jenga_kernels.attention.kv_store import kv_store

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def ops():
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU build has a float8 cache only with AVX-512")
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("not vLLM's CPU build")
    return _custom_ops


def stored_by_stock(ops, values):
    num_tokens, num_kv_heads, head_dim = values.shape
    cache = torch.zeros(1, num_kv_heads, 2 * num_tokens, head_dim, dtype=torch.uint8)
    k_cache, v_cache = cache.chunk(2, dim=2)
    slots = torch.arange(num_tokens)
    ops.cpu_attn_reshape_and_cache(
        values, values, k_cache, v_cache, slots, "vec", kv_cache_dtype="fp8"
    )
    return v_cache[0].transpose(0, 1).view(FP8)


def test_the_kernels_round_to_nearest_where_stock_on_a_cpu_truncates(ops):
    values = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(0))
    nearest = values.to(FP8)
    too_far = nearest.float().abs() > values.abs()
    truncated = torch.where(too_far, nearest.view(torch.uint8) - 1, nearest.view(torch.uint8))

    k_pages, v_pages = torch.zeros(2, 1, *values.shape, dtype=torch.uint8).view(FP8)
    kv_store(values, values, k_pages, v_pages, torch.arange(len(values)))

    assert torch.equal(v_pages[0].view(torch.uint8), nearest.view(torch.uint8))
    assert torch.equal(stored_by_stock(ops, values).view(torch.uint8), truncated)
    assert 0.4 < too_far.float().mean() < 0.6


def test_stock_on_a_cpu_stores_what_float8_holds_exactly(ops):
    values = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(1)).to(FP8)

    assert torch.equal(stored_by_stock(ops, values.float()).float(), values.float())

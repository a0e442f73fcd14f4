"""Caches of benchmarks lie as the plugin has them, and hold the same for vLLM's kernels."""

import pytest
import torch

from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.reference.attention.paged_attention import from_int4
from perf.peers import attention_peers
from perf.shapes.cache_layouts import (
    CacheShape,
    Stored,
    as_vllm_has_it,
    fill,
    make_cache,
    vllm_gain,
)

pytest.importorskip("vllm", reason="vLLM is not installed")

CPU = torch.device("cpu")
CACHE_DTYPES = {
    Stored.FP8_SLOTS: "fp8_per_token_head",
    Stored.INT8_SLOTS: "int8_per_token_head",
    Stored.INT4_SLOTS: "int4_per_token_head",
}


def shape_of(stored, head_dim=64):
    return CacheShape(
        stored=stored, num_kv_heads=2, head_dim=head_dim, page_tokens=16, num_layers=3
    )


@pytest.mark.parametrize("stored", CACHE_DTYPES, ids=lambda stored: stored.value)
def test_caches_whose_slots_have_scales_lie_as_the_plugin_has_them(stored):
    from jenga.vllm_plugin.layers.cache_views import cache_views

    shape = shape_of(stored)
    cache = make_cache(shape, 5, CPU)
    arena = torch.empty(0, dtype=torch.uint8).set_(
        cache.k_pages.untyped_storage(),
        shape.layer_bytes,
        (5, 2, 16, 2 * stored.row_bytes(64)),
        (cache.page_stride_bytes, shape.layer_bytes // 2, 2 * stored.row_bytes(64), 1),
    )
    if stored is Stored.INT8_SLOTS:
        arena = arena.view(torch.int8)

    views = cache_views(None, arena, head_dim=64, cache_dtype=CACHE_DTYPES[stored])

    for name in ("k_pages", "v_pages", "k_slot_scales", "v_slot_scales"):
        ours, plugins = getattr(cache, name), views[name]
        assert (ours.dtype, ours.shape) == (plugins.dtype, plugins.shape)
        assert (ours.data_ptr(), ours.stride()) == (plugins.data_ptr(), plugins.stride())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_of_four_bits_stands_for_the_same_numbers_in_vllms_layout(head_dim):
    shape = shape_of(Stored.INT4_SLOTS, head_dim)
    cache = make_cache(shape, 5, CPU)
    fill(cache, torch.tensor([1, 2, 4]))

    theirs = as_vllm_has_it(cache, shape)

    for side in ("k", "v"):
        pages, scales = getattr(theirs, f"{side}_pages"), getattr(theirs, f"{side}_slot_scales")
        words = scales.contiguous().view(torch.int32)[..., None]
        elements = torch.stack([pages & 15, pages >> 4], -1).flatten(-2)
        steps = (words & ~15).view(torch.float32)
        read = steps * (elements.int() - (words & 15)) / vllm_gain(head_dim)
        ours = from_int4(
            getattr(cache, f"{side}_pages"), getattr(cache, f"{side}_slot_scales"), torch.float32
        )
        assert torch.equal(read, ours)
        assert (ours[[0, 3]] == 0).all()
        assert 0.9 < ours[[1, 2, 4]].std() < 1.1
        assert len((words & 15).unique()) > 2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_vllm_rotates_as_we_do_once_it_has_our_signs(head_dim, monkeypatch):
    from vllm.v1.attention.ops import int4_per_token_head as module

    monkeypatch.setattr(module, "_RHT_SIGNS_CACHE", {})
    rows = torch.randint(-8, 8, (3, head_dim)).float()
    rotation = hadamard_rotation(head_dim, torch.float32, CPU)
    before = module.single_rht(rows)

    attention_peers.give_vllm_our_signs(head_dim, CPU)

    ours = rows @ rotation.forward
    assert not torch.equal(before, ours * vllm_gain(head_dim))
    assert torch.equal(module.single_rht(rows), ours * vllm_gain(head_dim))
    assert torch.equal(module.single_rht(ours, inverse=True), head_dim / vllm_gain(head_dim) * rows)

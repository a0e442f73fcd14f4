"""A layer's part of the arena as the kernels see it, where slots have scales of their own."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm

HEAD_DIM, VALUE_DIM, PAGE_TOKENS, NUM_PAGES = 96, 64, 48, 5


def layers_of(*, num_kv_heads, is_head_major, dtype, slot_bytes):
    """What vLLM hands three layers of an arena: views of one page behind another's."""
    page_bytes = num_kv_heads * PAGE_TOKENS * slot_bytes
    arena = torch.zeros(NUM_PAGES, 3, page_bytes, dtype=torch.int8)
    rows = (num_kv_heads, PAGE_TOKENS) if is_head_major else (PAGE_TOKENS, num_kv_heads)
    views = [arena[:, layer].unflatten(1, (*rows, slot_bytes)) for layer in range(3)]
    views = [view if is_head_major else view.transpose(1, 2) for view in views]
    return arena, [view.view(dtype) for view in views]


@pytest.mark.parametrize("is_head_major", [True, False], ids=["head_major", "token_major"])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "per_byte"),
    [
        ("int8_per_token_head", torch.int8, 1),
        ("fp8_per_token_head", torch.uint8, 1),
        ("int4_per_token_head", torch.uint8, 2),
    ],
)
def test_slots_and_their_scales_fill_a_layers_part_of_each_page(
    cache_dtype, dtype, per_byte, num_kv_heads, is_head_major
):
    from jenga.vllm_plugin.layers.cache_views import cache_views
    from jenga_kernels.checks.pages import check_slot_scales

    key_bytes, value_bytes = HEAD_DIM // per_byte, VALUE_DIM // per_byte
    arena, layers = layers_of(
        num_kv_heads=num_kv_heads,
        is_head_major=is_head_major,
        dtype=dtype,
        slot_bytes=key_bytes + value_bytes + 8,
    )

    views = cache_views(None, layers[1], head_dim=HEAD_DIM, cache_dtype=cache_dtype)

    shape = (NUM_PAGES, PAGE_TOKENS, num_kv_heads)
    assert views["k_pages"].shape == (*shape, key_bytes)
    assert views["v_pages"].shape == (*shape, value_bytes)
    scales_shape = shape if per_byte == 1 else (*shape, 2)
    assert views["k_slot_scales"].shape == views["v_slot_scales"].shape == scales_shape
    check_slot_scales(views["k_pages"], views["k_slot_scales"], views["v_slot_scales"], None, None)
    assert views["k_scale"] is views["v_scale"] is None
    parts = [views[name] for name in ("k_pages", "v_pages", "k_slot_scales", "v_slot_scales")]
    for number, part in enumerate(parts, 1):
        assert part.data_ptr() % (16 if number < 3 else 4) == 0
        ones = torch.full(part.shape, number, dtype=torch.uint8)
        if number > 2:
            words = part.view(torch.int32)
            assert (words == 0).all()
            words[:] = torch.full((4,), number, dtype=torch.uint8).view(torch.int32)
        else:
            assert (part.view(torch.uint8) == 0).all()
            part.view(torch.uint8)[:] = ones
    assert (arena[:, [0, 2]] == 0).all()
    written = arena[:, 1].flatten().bincount().tolist()
    slots = NUM_PAGES * PAGE_TOKENS * num_kv_heads
    assert written == [0, key_bytes * slots, value_bytes * slots, 4 * slots, 4 * slots]


def test_other_caches_have_the_scales_of_their_layer():
    from jenga.vllm_plugin.layers.cache_views import cache_views

    layer = SimpleNamespace(_k_scale=torch.tensor(2.0), _v_scale=torch.ones(3, 1))
    stored = torch.zeros(2, 3, 16, 128, dtype=torch.uint8)

    plain = cache_views(layer, stored.float(), head_dim=64, cache_dtype="auto")
    float8 = cache_views(layer, stored, head_dim=64, cache_dtype="fp8")
    halved = cache_views(layer, stored, head_dim=64, cache_dtype="fp8_e5m2")

    assert [plain[name] for name in ("k_scale", "v_scale", "k_slot_scales")] == [None] * 3
    assert float8["k_pages"].dtype == torch.float8_e4m3fn
    assert halved["k_pages"].dtype == torch.float8_e5m2
    assert (float8["k_scale"].shape, float8["v_scale"].shape) == ((1,), (3,))


def test_the_backend_counts_the_scales_of_slots():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend
    from jenga.vllm_plugin.specs.layer_types import model_spec

    shape = {"block_size": 16, "num_kv_heads": 3, "head_size": 128, "head_size_v": 64}
    for mode, dtype in (
        (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8),
        (KVQuantMode.FP8_PER_TOKEN_HEAD, torch.uint8),
    ):
        spec = FullAttentionSpec(**shape, dtype=dtype, kv_quant_mode=mode)
        counted = JengaTritonBackend.customize_spec(spec)
        (layer_type,) = model_spec({"layer": counted}).layer_types
        assert layer_type.layers[0].slot_bytes == 3 * (128 + 64 + 8)

    plain = FullAttentionSpec(**shape, dtype=torch.bfloat16)
    assert JengaTritonBackend.customize_spec(plain) is plain
    four_bits = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD}
    counted = JengaTritonBackend.customize_spec(FullAttentionSpec(**shape, **four_bits))
    (layer_type,) = model_spec({"layer": counted}).layer_types
    assert layer_type.layers[0].slot_bytes == 3 * (64 + 32 + 8)
    narrow = FullAttentionSpec(**shape | {"head_size_v": 80}, **four_bits)
    with pytest.raises(ValueError, match=r"heads of \[80, 128\] elements, which must be multiples"):
        model_spec({"layer": JengaTritonBackend.customize_spec(narrow)})
    turbo = FullAttentionSpec(
        **shape, dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC
    )
    with pytest.raises(ValueError, match=r"quantised KV \(TURBOQUANT_4BIT_NC\)"):
        model_spec({"layer": turbo})

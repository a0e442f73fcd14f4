import pytest
import torch
import triton

from jenga_kernels.attention.kv_store import NO_SLOT, kv_store
from jenga_kernels.reference.attention import kv_store as reference_kv_store
from jenga_kernels.triton.lib.tiles import machine_of
from tests.kernels.compiling import compile_job
from tests.kernels.support import DEVICE, generator, randn, strided_layer

SHAPES = {
    # num_tokens, num_pages, page_tokens, num_kv_heads, head_dim
    "one_token": (1, 3, 16, 1, 64),
    "odd_page_and_head_dim": (37, 4, 48, 3, 80),
    "large_odd_page": (50, 2, 784, 2, 112),
    "wide_head": (19, 5, 16, 1, 256),
    "wider_head": (19, 5, 16, 2, 512),
    "more_rows_than_a_program": (700, 48, 16, 4, 64),
}


def stored_bytes(arena: torch.Tensor) -> torch.Tensor:
    return arena.contiguous().view(torch.uint8)


def new_tokens(shape, dtype, rng):
    num_tokens, num_pages, page_tokens, num_kv_heads, head_dim = shape
    qkv = randn((num_tokens, 3 * num_kv_heads, head_dim), dtype, rng)
    k, v = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
    slots = torch.randperm(num_pages * page_tokens, generator=rng)[:num_tokens]
    slots[torch.rand(num_tokens, generator=rng) < 0.2] = NO_SLOT
    return k, v, slots.to(DEVICE)


@pytest.mark.parametrize("is_head_major", [True, False], ids=["head_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kv_store_writes_its_slots_and_nothing_else(shape, dtype, is_head_major):
    rng = generator(0)
    k, v, slots = new_tokens(shape, dtype, rng)
    got = strided_layer(*shape[1:], dtype, is_head_major=is_head_major)
    want = strided_layer(*shape[1:], dtype, is_head_major=is_head_major)

    kv_store(k, v, got.k_pages, got.v_pages, slots)
    reference_kv_store.kv_store(k, v, want.k_pages, want.v_pages, slots)

    assert torch.equal(stored_bytes(got.arena), stored_bytes(want.arena))


@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kv_store_rounds_to_another_float_type(shape, dtype, pages_dtype):
    rng = generator(3)
    k, v, slots = new_tokens(shape, dtype, rng)
    k[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), 0.0, 65504.0])
    k[0, 0, 4:8] = torch.tensor([65519.0, 1e5, -1e5, 1e-7]).to(dtype)
    # Halves between two numbers that are stored, among them.
    v[...] = (v * 2048).round() / 2048
    got = strided_layer(*shape[1:], pages_dtype)
    want = strided_layer(*shape[1:], pages_dtype)

    kv_store(k, v, got.k_pages, got.v_pages, slots)
    reference_kv_store.kv_store(k, v, want.k_pages, want.v_pages, slots)

    assert torch.equal(stored_bytes(got.arena), stored_bytes(want.arena))


# Around the greatest number, and around the least: halves of it, and three of them.
EXTREMES = {
    torch.float8_e4m3fn: (448.0, 464.0, 465.0, 2**-6, 2**-9, 2**-10, 3 * 2**-10),
    torch.float8_e5m2: (57344.0, 61440.0, 65504.0, 2**-14, 2**-16, 2**-17, 3 * 2**-17),
}


@pytest.mark.parametrize("pages_dtype", EXTREMES, ids=str)
@pytest.mark.parametrize("num_scales", [0, 1, 3], ids=["unscaled", "per_tensor", "per_head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kv_store_rounds_and_saturates_to_fp8(dtype, num_scales, pages_dtype):
    rng = generator(1)
    shape = (33, 4, 16, 3, 80)
    k, v, slots = new_tokens(shape, dtype, rng)
    k[3] = 6e4
    v[4] = -6e4
    k[5], v[6], v[7] = float("inf"), float("-inf"), 0.0
    k[8, :, :7] = torch.tensor(EXTREMES[pages_dtype])
    k[9], v[10, 1, 3] = float("nan"), -float("nan")
    # Numbers of all magnitudes, halves between two that are stored among them.
    v[11:20] *= 2.0 ** torch.randint(-20, 15, (9, 3, 80), generator=rng).to(DEVICE)
    v[20:] = (v[20:] * 8).round() / 8
    scales = [None, None]
    if num_scales:
        scales = [torch.rand(num_scales, generator=rng).to(DEVICE) + 0.5 for _ in range(2)]
    got = strided_layer(*shape[1:], pages_dtype)
    want = strided_layer(*shape[1:], pages_dtype)

    kv_store(k, v, got.k_pages, got.v_pages, slots, k_scale=scales[0], v_scale=scales[1])
    reference_kv_store.kv_store(
        k, v, want.k_pages, want.v_pages, slots, k_scale=scales[0], v_scale=scales[1]
    )

    assert torch.equal(stored_bytes(got.arena), stored_bytes(want.arena))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="there is a GPU, if an emulated one")
def test_tensors_on_other_devices_than_a_gpu_and_the_cpu_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

    with pytest.raises(ValueError, match=r"NVIDIA GPU or on the CPU, got some on mps, .* no GPU"):
        machine_of.__wrapped__(torch.device("mps"))


def test_kv_store_of_no_tokens_writes_nothing():
    layer = strided_layer(2, 16, 1, 64, torch.float32)
    before = stored_bytes(layer.arena).clone()
    empty = torch.empty(0, 1, 64, device=DEVICE)

    kv_store(
        empty,
        empty,
        layer.k_pages,
        layer.v_pages,
        torch.empty(0, dtype=torch.int64, device=DEVICE),
    )

    assert torch.equal(stored_bytes(layer.arena), before)


def test_kv_store_of_no_heads_or_pages_writes_nothing():
    slots = torch.full((3,), NO_SLOT, device=DEVICE)
    no_heads = torch.empty(3, 0, 64, device=DEVICE)
    k, no_pages = torch.zeros(3, 2, 64, device=DEVICE), torch.empty(0, 16, 2, 64, device=DEVICE)

    kv_store(no_heads, no_heads, *torch.empty(2, 4, 16, 0, 64, device=DEVICE), slots)
    kv_store(k, k, no_pages, no_pages, slots)


def test_kv_store_reaches_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    page_elements = 2 * 16 * 64
    num_pages = 2**31 // page_elements + 8
    arena = torch.empty(num_pages, 16, 1, 128, dtype=torch.float16, device=DEVICE)
    k_pages, v_pages = arena[..., :64], arena[..., 64:]
    rng = generator(2)
    k, v = randn((2, 1, 64), torch.float16, rng), randn((2, 1, 64), torch.float16, rng)
    slots = torch.tensor([5, (num_pages - 1) * 16 + 15], device=DEVICE)

    kv_store(k, v, k_pages, v_pages, slots)

    assert arena.numel() > 2**31
    assert torch.equal(k_pages[-1, 15], k[1])
    assert torch.equal(v_pages[-1, 15], v[1])
    assert torch.equal(k_pages[0, 5], k[0])


def arguments():
    layer = strided_layer(4, 16, 2, 64, torch.float16)
    k = torch.zeros(5, 2, 64, dtype=torch.float16, device=DEVICE)
    return {
        "k": k,
        "v": k.clone(),
        "k_pages": layer.k_pages,
        "v_pages": layer.v_pages,
        "slots": torch.arange(5, device=DEVICE),
    }


BAD_ARGUMENTS = {
    "slots_of_another_length": ("slots", lambda a: {"slots": a["slots"][:4]}),
    "slots_of_32_bits": ("slots", lambda a: {"slots": a["slots"].int()}),
    "scattered_slots": ("slots", lambda _: {"slots": torch.arange(10, device=DEVICE)[::2]}),
    "values_of_another_shape": ("v", lambda a: {"v": a["v"][:, :1]}),
    "values_of_another_dtype": ("v", lambda a: {"v": a["v"].float()}),
    "integer_keys": ("k", lambda a: {"k": a["k"].int(), "v": a["v"].int()}),
    "pages_of_another_dtype": ("k_pages", lambda a: {"k_pages": a["k_pages"].float()}),
    "pages_of_another_head_dim": ("k_pages", lambda a: {"k_pages": a["k_pages"][..., :32]}),
    "value_pages_of_another_layout": (
        "v_pages",
        lambda a: {"v_pages": a["v_pages"].contiguous()},
    ),
    "a_scattered_last_dimension": (
        "k",
        lambda _: {"k": torch.zeros(5, 2, 128, dtype=torch.float16, device=DEVICE)[..., ::2]},
    ),
    "rows_off_alignment": (
        "k",
        lambda _: {"k": torch.zeros(5, 2, 65, dtype=torch.float16, device=DEVICE)[..., :64]},
    ),
    "pages_that_are_all_the_same": (
        "k_pages",
        lambda a: {name: a[name][:1].expand(4, -1, -1, -1) for name in ("k_pages", "v_pages")},
    ),
    "slots_that_overlap": (
        "k_pages",
        lambda _: {
            name: torch.zeros(8192, dtype=torch.float16, device=DEVICE).as_strided(
                (4, 16, 2, 64), (1024, 64, 32, 1)
            )
            for name in ("k_pages", "v_pages")
        },
    ),
    "values_onto_keys": ("v_pages", lambda a: {"v_pages": a["k_pages"]}),
    "values_onto_parts_of_keys": (
        "v_pages",
        lambda _: dict(
            zip(
                ("k_pages", "v_pages"),
                torch.zeros(4, 16, 2, 96, dtype=torch.float16, device=DEVICE)
                .unfold(3, 64, 32)
                .permute(3, 0, 1, 2, 4),
                strict=True,
            )
        ),
    ),
    "keys_that_require_a_gradient": ("k", lambda a: {"k": a["k"].clone().requires_grad_()}),
    "a_scale_without_fp8": ("k_scale", lambda _: {"k_scale": torch.ones(1, device=DEVICE)}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_kv_store_refuses(name, change):
    args = arguments()
    args |= change(args)

    with pytest.raises(ValueError, match=f"^{name} "):
        kv_store(**args)


def compile_plain():
    compile_kv_store(torch.bfloat16, torch.bfloat16)
    compile_kv_store(torch.float32, torch.float32)


def compile_fp8():
    compile_kv_store(torch.float16, torch.float8_e4m3fn)


def compile_e5m2():
    compile_kv_store(torch.bfloat16, torch.float8_e5m2)


def compile_kv_store(dtype, pages):
    for head_dim in (64, 80, 256, 512):
        k = torch.zeros(33, 2, head_dim, dtype=dtype)
        layer = torch.zeros(4, 2, 16, 2 * head_dim, dtype=pages).transpose(1, 2)
        slots = torch.zeros(33, dtype=torch.int64)
        kv_store(k, k, layer[..., :head_dim], layer[..., head_dim:], slots)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "capability"),
    [
        (compile_plain, 80),
        (compile_plain, 90),
        (compile_fp8, 90),
        (compile_e5m2, 80),
        (compile_e5m2, 90),
    ],
)
def test_kv_store_compiles_to_wide_copies(job, capability):
    for kernel in compile_job(job, capability):
        assert kernel.stack_bytes == 0, kernel
        assert kernel.counts["load_128"] >= 2, kernel
        assert kernel.counts["load_128"] >= kernel.counts["store_128"], kernel
        # A thread stores what it loads at once; half as many bytes, where 16 bits become 8.
        kind = "store_128" if job is compile_plain else "store_64"
        assert kernel.counts[kind] == kernel.counts["store_global"], kernel

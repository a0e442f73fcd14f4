import pytest
import torch

from jenga_kernels.attention.kv_store import NO_SLOT
from jenga_kernels.latent.latent_store import latent_store
from jenga_kernels.reference.latent import latent_store as reference
from tests.kernels.compiling import compile_job
from tests.kernels.latent.latent_cases import strided_latents
from tests.kernels.support import DEVICE, generator, randn

SHAPES = {
    # num_tokens, num_pages, page_tokens, latent_dim, rotary_dim
    "one_token": (1, 3, 16, 512, 64),
    "deepseek": (37, 4, 64, 512, 64),
    "odd_page_and_widths": (50, 2, 784, 96, 24),
    "more_rows_than_a_program": (1100, 80, 16, 32, 16),
}


def stored_bytes(arena: torch.Tensor) -> torch.Tensor:
    return arena.contiguous().view(torch.uint8)


def new_tokens(shape, dtype, rng):
    """Latents apart from rotary keys, as a model makes them: parts of wider rows."""
    num_tokens, num_pages, page_tokens, latent_dim, rotary_dim = shape
    wide = randn((num_tokens, latent_dim + rotary_dim + 16), dtype, rng)
    slots = torch.randperm(num_pages * page_tokens, generator=rng)[:num_tokens]
    slots[torch.rand(num_tokens, generator=rng) < 0.2] = NO_SLOT
    return {
        "latents": wide[:, :latent_dim],
        "rotary_keys": wide[:, latent_dim : latent_dim + rotary_dim],
        "slots": slots.to(DEVICE),
    }


def check_store(shape, arguments, pages_dtype, latent_scale=None):
    _, num_pages, page_tokens, latent_dim, rotary_dim = shape
    layer = (num_pages, page_tokens, latent_dim + rotary_dim, pages_dtype)
    got, got_arena = strided_latents(*layer)
    want, want_arena = strided_latents(*layer)

    latent_store(**arguments, pages=got, latent_scale=latent_scale)
    reference.latent_store(**arguments, pages=want, latent_scale=latent_scale)

    assert torch.equal(stored_bytes(got_arena), stored_bytes(want_arena))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_latent_store_writes_its_slots_and_nothing_else(shape, dtype):
    check_store(shape, new_tokens(shape, dtype, generator(0)), dtype)


@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_latent_store_rounds_to_another_float_type(dtype, pages_dtype):
    shape = (33, 4, 16, 128, 64)

    check_store(shape, new_tokens(shape, dtype, generator(2)), pages_dtype)


@pytest.mark.parametrize("has_scale", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_latent_store_rounds_and_saturates_to_fp8(dtype, has_scale):
    shape = (33, 4, 16, 128, 64)
    arguments = new_tokens(shape, dtype, generator(1))
    arguments["latents"][3] = 1e4
    arguments["rotary_keys"][4] = -1e4
    arguments["latents"][5], arguments["rotary_keys"][6] = float("-inf"), float("nan")
    scale = torch.tensor([0.37], device=DEVICE) if has_scale else None

    check_store(shape, arguments, torch.float8_e4m3fn, scale)


def test_latent_store_of_no_tokens_writes_nothing():
    pages, arena = strided_latents(2, 16, 80, torch.float32)
    before = stored_bytes(arena).clone()

    latent_store(
        torch.empty(0, 64, device=DEVICE),
        torch.empty(0, 16, device=DEVICE),
        pages,
        torch.empty(0, dtype=torch.int64, device=DEVICE),
    )

    assert torch.equal(stored_bytes(arena), before)


def test_latent_store_reaches_past_2_to_the_31_elements():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    num_pages = 2**31 // (16 * 576) + 8
    pages = torch.empty(num_pages, 16, 576, dtype=torch.float16, device=DEVICE)
    rng = generator(2)
    latents, rotary_keys = (randn((2, width), torch.float16, rng) for width in (512, 64))
    slots = torch.tensor([5, (num_pages - 1) * 16 + 15], device=DEVICE)

    latent_store(latents, rotary_keys, pages, slots)

    assert pages.numel() > 2**31
    assert torch.equal(pages[-1, 15], torch.cat([latents[1], rotary_keys[1]]))
    assert torch.equal(pages[0, 5], torch.cat([latents[0], rotary_keys[0]]))


def good_arguments():
    pages, _ = strided_latents(4, 16, 80, torch.float16)
    return {
        "latents": torch.zeros(5, 64, dtype=torch.float16, device=DEVICE),
        "rotary_keys": torch.zeros(5, 16, dtype=torch.float16, device=DEVICE),
        "pages": pages,
        "slots": torch.arange(5, device=DEVICE),
    }


BAD_ARGUMENTS = {
    "latents_with_heads": ("latents", lambda a: {"latents": a["latents"][:, None]}),
    "integer_latents": ("latents", lambda a: {"latents": a["latents"].int()}),
    "latents_that_require_a_gradient": (
        "latents",
        lambda a: {"latents": a["latents"].clone().requires_grad_()},
    ),
    "scattered_latents": ("latents", lambda a: {"latents": a["latents"].repeat(1, 2)[:, ::2]}),
    "latents_of_odd_width": ("latent_dim", lambda a: {"latents": a["latents"][:, :60]}),
    "pages_that_are_all_the_same": (
        "pages",
        lambda a: {"pages": a["pages"][:1].expand(4, -1, -1)},
    ),
    "fewer_rotary_keys": ("rotary_keys", lambda a: {"rotary_keys": a["rotary_keys"][:4]}),
    "narrower_rotary_keys": ("rotary_keys", lambda a: {"rotary_keys": a["rotary_keys"][:, :8]}),
    "rotary_keys_of_another_dtype": (
        "rotary_keys",
        lambda a: {"rotary_keys": a["rotary_keys"].float()},
    ),
    "rotary_keys_off_alignment": (
        "rotary_keys",
        lambda _: {
            "rotary_keys": torch.zeros(5, 17, dtype=torch.float16, device=DEVICE)[:, :16],
        },
    ),
    "pages_of_another_dtype": ("pages", lambda a: {"pages": a["pages"].float()}),
    "pages_with_heads": ("pages", lambda a: {"pages": a["pages"][:, :, None]}),
    "pages_without_rotary_keys": ("pages", lambda a: {"pages": a["pages"][..., :64]}),
    "slots_of_another_length": ("slots", lambda a: {"slots": a["slots"][:4]}),
    "slots_of_32_bits": ("slots", lambda a: {"slots": a["slots"].int()}),
    "scattered_slots": ("slots", lambda _: {"slots": torch.arange(10, device=DEVICE)[::2]}),
    "a_scale_without_fp8": (
        "latent_scale",
        lambda _: {"latent_scale": torch.ones(1, device=DEVICE)},
    ),
    "two_scales": (
        "latent_scale",
        lambda a: {
            "latent_scale": torch.ones(2, device=DEVICE),
            "pages": a["pages"].to(torch.float8_e4m3fn),
        },
    ),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_latent_store_refuses_and_writes_nothing(name, change):
    arguments = good_arguments()
    arguments |= change(arguments)
    before = stored_bytes(arguments["pages"]).clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        latent_store(**arguments)

    assert torch.equal(stored_bytes(arguments["pages"]), before)


def compile_plain():
    compile_latent_store(torch.bfloat16, torch.bfloat16)
    compile_latent_store(torch.float32, torch.float32)


def compile_all():
    compile_plain()
    compile_latent_store(torch.float16, torch.float8_e4m3fn)


def compile_latent_store(dtype, pages_dtype):
    rows = torch.zeros(33, 512 + 64, dtype=dtype)
    pages = torch.zeros(4, 3, 16, 576, dtype=pages_dtype)[:, 1]
    latent_store(rows[:, :512], rows[:, 512:], pages, torch.zeros(33, dtype=torch.int64))


@pytest.mark.parametrize(
    ("job", "capability"),
    [(compile_all, 90), pytest.param(compile_plain, 80, marks=pytest.mark.slow)],
)
def test_latent_store_compiles_to_wide_copies(job, capability):
    for kernel in compile_job(job, capability):
        assert kernel.stack_bytes == 0, kernel
        assert kernel.counts["load_128"] >= 2, kernel
        assert kernel.counts["store_128"] + kernel.counts["store_64"] >= 1, kernel

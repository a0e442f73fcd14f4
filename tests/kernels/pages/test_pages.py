import pytest
import torch

from jenga_kernels.pages.page_clear import page_clear
from jenga_kernels.pages.page_copy import NO_PAGE, page_copy
from jenga_kernels.reference.pages import page_clear as clear_reference
from jenga_kernels.reference.pages import page_copy as copy_reference
from tests.kernels.compiling import compile_job
from tests.kernels.support import DEVICE, generator


def arena_pages(num_pages, page_bytes, dtype):
    arena = torch.randint(0, 255, (num_pages, page_bytes + 64), generator=generator(0))
    arena = arena.to(torch.uint8).to(DEVICE)
    return arena, arena[:, 32 : 32 + page_bytes].view(dtype)


def ids(*page_ids):
    return torch.tensor(page_ids, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page_bytes", [16, 4096, 300 * 1024], ids="{}_bytes".format)
def test_page_copy_copies_whole_pages_and_nothing_else(page_bytes, dtype):
    got_arena, got = arena_pages(9, page_bytes, dtype)
    want_arena, want = arena_pages(9, page_bytes, dtype)
    source_ids, target_ids = ids(3, 8, NO_PAGE, 1, 3), ids(7, 0, 2, NO_PAGE, 5)

    page_copy(got, source_ids, target_ids)
    copy_reference.page_copy(want, source_ids, target_ids)

    assert torch.equal(got_arena, want_arena)


@pytest.mark.parametrize("page_bytes", [16, 4096, 300 * 1024], ids="{}_bytes".format)
def test_page_clear_zeroes_whole_pages_and_nothing_else(page_bytes):
    got_arena, got = arena_pages(9, page_bytes, torch.uint8)
    want_arena, want = arena_pages(9, page_bytes, torch.uint8)

    page_clear(got, ids(8, NO_PAGE, 2))
    clear_reference.page_clear(want, ids(8, NO_PAGE, 2))

    assert torch.equal(got_arena, want_arena)


def test_page_copy_reaches_past_2_to_the_31_words():
    # Pages nobody touches cost no memory, so this arena is mostly not there.
    pages = torch.empty(2**13 + 8, 2**20, dtype=torch.uint8, device=DEVICE)
    pages[3, :] = 7

    page_copy(pages, ids(3), ids(2**13 + 7))

    assert pages.numel() > 2**33
    assert (pages[-1] == 7).all()


def test_a_single_page_may_have_any_stride():
    arena = torch.full((80,), 7, dtype=torch.uint8, device=DEVICE)

    page_clear(arena.as_strided((1, 64), (5, 1)), ids(0))

    assert arena.tolist() == [0] * 64 + [7] * 16


def test_page_copy_of_nothing_changes_nothing():
    arena, pages = arena_pages(3, 64, torch.uint8)
    before = arena.clone()

    page_copy(pages, ids(), ids())
    page_clear(pages, ids())

    assert torch.equal(arena, before)


BAD_ARGUMENTS = {
    "pages_that_require_a_gradient": (
        "pages",
        lambda _: {"pages": torch.zeros(4, 64, requires_grad=True)},
    ),
    "pages_of_three_dimensions": ("pages", lambda a: {"pages": a["pages"][None]}),
    "pages_of_odd_bytes": ("pages", lambda a: {"pages": a["pages"][:, :24]}),
    "pages_off_alignment": ("pages", lambda a: {"pages": a["pages"][:, 8:24]}),
    "pages_that_are_all_the_same": ("pages", lambda a: {"pages": a["pages"][:1].expand(4, -1)}),
    "pages_that_overlap": (
        "pages",
        lambda a: {"pages": a["pages"][0].as_strided((3, 32), (16, 1))},
    ),
    "ids_of_32_bits": ("source_ids", lambda a: {"source_ids": a["source_ids"].int()}),
    "fewer_targets": ("target_ids", lambda a: {"target_ids": a["target_ids"][:1]}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_page_copy_refuses(name, change):
    arguments = {
        "pages": arena_pages(4, 64, torch.uint8)[1],
        "source_ids": ids(0, 1),
        "target_ids": ids(2, 3),
    }
    arguments |= change(arguments)

    with pytest.raises(ValueError, match=f"^{name} "):
        page_copy(**arguments)


def compile_pages():
    pages = torch.zeros(4, 32768, dtype=torch.uint8)
    page_copy(pages, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    page_clear(pages, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("capability", [80, 90])
def test_page_kernels_compile_to_wide_copies(capability):
    kernels = compile_job(compile_pages, capability)

    assert {kernel.name for kernel in kernels} == {"page_copy_kernel", "page_clear_kernel"}
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.counts["store_128"] == kernel.counts["store_global"] > 0, kernel


def compile_many_pages():
    pages = torch.zeros(4, 32768, dtype=torch.uint8)
    pairs = torch.zeros(2, 2**16 + 1, dtype=torch.int64)
    page_copy(pages, pairs[0], pairs[1])
    page_clear(pages, pairs[1])


def test_page_kernels_take_more_pages_than_a_grid_has_rows():
    kernels = compile_job(compile_many_pages, 90)

    assert {kernel.grid for kernel in kernels} == {(2 * (2**16 + 1),)}


def compile_copies_of_odd_and_even_numbers():
    pages = torch.zeros(4, 32768, dtype=torch.uint8)
    for num_copies in (1, 2, 3, 4, 5):
        pairs = torch.zeros(2, num_copies, dtype=torch.int64)
        page_copy(pages, pairs[0], pairs[1])
        page_clear(pages, pairs[1])


def test_page_kernels_are_compiled_once_for_any_number_of_pages():
    assert len(compile_job(compile_copies_of_odd_and_even_numbers, 90)) == 2

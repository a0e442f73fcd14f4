import pytest
import torch
import triton
import triton.language as tl

from jenga_kernels.triton.lib import rows
from jenga_kernels.triton.lib.rows import load_rows, store_rows
from tests.kernels.support import DEVICE, generator, poison

load_on_gpu = rows._load_rows
store_on_gpu = rows._store_rows


@triton.jit
def _copy_kernel(
    ours_ptr,
    plain_ptr,
    source_ptr,
    offsets_ptr,
    HAS_DEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offsets = tl.load(offsets_ptr + tl.arange(0, BLOCK_N))
    targets = (tl.arange(0, BLOCK_N) * BLOCK_D).to(tl.int64)
    every = offsets >= 0
    live = None
    if HAS_DEAD:
        live = tl.arange(0, BLOCK_N) % 3 != 0
    ours = load_rows(source_ptr, offsets, live, HEAD_DIM, BLOCK_D)
    plain = load_on_gpu(source_ptr, offsets, live, HEAD_DIM, BLOCK_D)
    if HAS_DEAD:
        store_rows(ours_ptr, targets, ours, live, HEAD_DIM, BLOCK_D)
        store_on_gpu(plain_ptr, targets, plain, live, HEAD_DIM, BLOCK_D)
    else:
        store_rows(ours_ptr, targets, ours, every, BLOCK_D, BLOCK_D)
        store_on_gpu(plain_ptr, targets, plain, every, BLOCK_D, BLOCK_D)


@pytest.mark.parametrize("has_dead", [True, False], ids=["dead_rows", "all_live"])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_copied_whole_in_the_interpreter_are_those_a_gpu_would_load(dtype, head_dim, has_dead):
    rng = generator(4)
    source = torch.randn(50, 100, generator=rng).to(dtype).to(DEVICE)
    offsets = (torch.randperm(50, generator=rng)[:32] * 100).to(DEVICE)
    ours, plain = (torch.full((32, 128), poison(dtype), dtype=dtype, device=DEVICE) for _ in "ab")

    _copy_kernel[(1,)](
        ours_ptr=ours,
        plain_ptr=plain,
        source_ptr=source,
        offsets_ptr=offsets,
        HAS_DEAD=has_dead,
        HEAD_DIM=head_dim,
        BLOCK_N=32,
        BLOCK_D=128,
    )

    assert torch.equal(ours.nan_to_num(9.0), plain.nan_to_num(9.0))
    rows_read = torch.arange(32) % 3 != 0 if has_dead else torch.ones(32, dtype=torch.bool)
    expected = source[offsets.cpu() // 100, :head_dim][rows_read]
    assert torch.equal(ours[rows_read, :head_dim], expected)

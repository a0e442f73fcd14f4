"""What the tests of kernels share: arenas with dead slots, page tables, the derived tolerance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jenga_kernels.checks.pages import elements_per_item

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=rng).to(dtype).to(DEVICE)


def max_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Greatest absolute difference; infinite if something is not finite."""
    difference = (got.double() - exact.double()).abs()
    if not torch.isfinite(difference).all():
        return float("inf")
    return difference.max().item() if difference.numel() else 0.0


def check_close(
    got: torch.Tensor,
    exact: torch.Tensor,
    naive: torch.Tensor,
    *,
    bound: float = 2.0,
    slack: float = 0.0,
) -> None:
    """Check that an error is at most twice that of plain PyTorch in the same dtype.

    One unit in the last place of the largest result is granted on top, since the plain version may
    happen to be exact, and `slack` for what a method is known to lose.
    """
    unit = torch.finfo(got.dtype).eps * max(1e-6, exact.abs().max().item() if exact.numel() else 0)
    error, allowed = max_error(got, exact), bound * max_error(naive, exact) + unit + slack
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


@dataclass(frozen=True)
class PagedLayer:
    """K and V pages of one layer in an arena shared by several, and the arena's bytes."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    arena: torch.Tensor


def poison(dtype: torch.dtype) -> float:
    """What dead slots hold."""
    return float("nan") if dtype.is_floating_point else 0x5A


def strided_layer(
    num_pages: int,
    page_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    num_layers: int = 3,
    layer: int = 1,
    is_head_major: bool = True,
    value_dim: int | None = None,
) -> PagedLayer:
    """One layer of an arena in page-layer layout, every element NaN.

    A page holds all layers; a layer's part is [heads, tokens, K|V] or [tokens, heads, K|V]. Values
    have head_dim elements unless it is said how many. In uint8 there are two elements in each.
    """
    key, value, row_items = row_parts(head_dim, value_dim or head_dim, dtype)
    rows = (num_kv_heads, page_tokens) if is_head_major else (page_tokens, num_kv_heads)
    arena = torch.full(
        (num_pages, num_layers, *rows, row_items), poison(dtype), dtype=torch.float32
    )
    arena = arena.to(dtype).to(DEVICE)
    interior = arena[:, layer]
    if is_head_major:
        interior = interior.transpose(1, 2)
    return PagedLayer(k_pages=interior[..., key], v_pages=interior[..., value], arena=arena)


def row_parts(head_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[slice, slice, int]:
    """Where a slot's key and value lie, and its items: values begin at multiples of 16 bytes."""
    per_item = elements_per_item(dtype)
    keys, values = head_dim // per_item, value_dim // per_item
    unit = 16 if per_item > 1 else 1
    start = -(-keys // unit) * unit
    return slice(keys), slice(start, start + values), start + -(-values // unit) * unit


def shuffled_page_table(
    num_pages_of_requests: Sequence[int],
    num_pages: int,
    rng: torch.Generator,
    *,
    extra: int = 1,
    run_pages: int = 1,
) -> torch.Tensor:
    """i32[num_requests, max_pages]: distinct pages in random order, page 0 never used.

    Runs of 1 to run_pages pages keep their order. Entries past a request's pages are page 0, the
    null page.
    """
    columns = max([0, *num_pages_of_requests]) + extra
    table = torch.zeros(len(num_pages_of_requests), columns, dtype=torch.int32)
    order = 1 + torch.randperm(num_pages - 1, generator=rng)
    if run_pages > 1:
        lengths = torch.randint(1, run_pages + 1, (num_pages,), generator=rng)
        runs = torch.arange(1, num_pages).tensor_split(lengths.cumsum(0))
        order = torch.cat([runs[i] for i in torch.randperm(len(runs), generator=rng)])
    taken = 0
    for request, count in enumerate(num_pages_of_requests):
        table[request, :count] = order[taken : taken + count].to(torch.int32)
        taken += count
    return table.to(DEVICE)

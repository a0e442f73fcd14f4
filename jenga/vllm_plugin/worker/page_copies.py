"""Copies of pages within a worker's arena."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.vllm_plugin.orders.copy_rounds import CopyRound
from jenga_kernels.pages.page_copy import page_copy


def arena_of(kv_caches: Iterable[Any]) -> torch.Tensor:
    """Get a view of the whole buffer that all caches lie in, i8[arena_bytes].

    Args:
        kv_caches: vLLM's caches, tensors or sequences of tensors, all views of the arena.
    """
    first = next(iter(kv_caches))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
    arena = torch.empty(0, dtype=torch.int8, device=tensor.device)
    return arena.set_(tensor.untyped_storage())


def copy_pages(arena: torch.Tensor, num_large_pages: int, copies: CopyRound) -> None:
    """Make one round of copies within the arena.

    Args:
        arena: The arena, i8[arena_bytes]. It is written in place.
        num_large_pages: Number of large pages in the arena.
        copies: The copies.
    """
    num_pages = num_large_pages * copies.small_pages_per_large_page
    pages = arena.view(num_pages, -1)  # [num_pages, page_bytes]
    ids = async_tensor_h2d(
        [copies.source_pages, copies.target_pages], dtype=torch.int64, device=arena.device
    )
    page_copy(pages, ids[0], ids[1])

"""A worker's side of host memory: the buffer beside its arena, and copies between both.

A small page lies in one piece in either, so that neighbours are moved by one copy. Copies are made
on the stream on which the step runs, in the order in which they were ordered: nothing is waited
for, and nothing can be read or written over too early.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import finalize

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.logger import init_logger

from jenga.errors import InvariantError
from jenga.request import CopyPath
from jenga.vllm_plugin.copy_rounds import CopyRound, runs_of_copies
from jenga.vllm_plugin.environment import BACKEND_NAME

logger = init_logger(f"vllm.{__name__}")

_memory_of = WeakTensorKeyDictionary()
"""The first cache of an arena -> host memory beside it, which goes with it."""


def first_cache(kv_caches: Iterable[Any]) -> torch.Tensor:
    """Get the first of vLLM's caches, tensors or sequences of tensors, all views of the arena."""
    first = next(iter(kv_caches))
    return first if isinstance(first, torch.Tensor) else first[0]


def allocate_host_memory(kv_caches: Iterable[Any], num_bytes: int) -> None:
    """Put host memory beside an arena, where a GPU reaches it without the CPU's help.

    Args:
        kv_caches: vLLM's caches.
        num_bytes: Of the memory.

    Raises:
        MemoryError: The system does not give, or does not lock, so much.
    """
    cache = first_cache(kv_caches)
    try:
        memory = torch.empty(num_bytes, dtype=torch.int8)
        if cache.device.type == "cuda":
            _lock(memory)
    except RuntimeError as error:
        msg = (
            f"--kv-offloading-size: {num_bytes} bytes of host memory cannot be had and locked on "
            f"this rank: {error}"
        )
        raise MemoryError(msg) from error
    _memory_of[cache] = memory
    logger.info(
        "%s: %d bytes of host memory on this rank for what its arena evicts",
        BACKEND_NAME,
        num_bytes,
    )


def host_memory_of(kv_caches: Iterable[Any]) -> torch.Tensor:
    """Get the host memory beside an arena, i8[host_bytes].

    Raises:
        InvariantError: There is none.
    """
    memory = _memory_of.get(first_cache(kv_caches))
    if memory is None:
        msg = "pages are to be copied to host memory or from there, and there is none"
        raise InvariantError(msg)
    return memory


def _lock(memory: torch.Tensor) -> None:
    """Lock memory as long as it lives; torch's own is rounded up to a power of two."""
    cuda: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, memory.nbytes, 0)))
    # What is freed locked stays locked, and another engine's cannot be at its addresses.
    finalize(memory, cuda.cudaHostUnregister, address).atexit = False


def copy_through_host(
    kv_caches: Iterable[Any], arena: torch.Tensor, num_large_pages: int, copies: CopyRound
) -> None:
    """Make one round of copies between an arena and the host memory beside it.

    Args:
        kv_caches: vLLM's caches.
        arena: In which they lie, i8[arena_bytes].
        num_large_pages: Of the arena.
        copies: What to copy.

    Raises:
        InvariantError: There is no host memory beside the arena.
    """
    memory = host_memory_of(kv_caches)
    large_page_bytes = arena.numel() // num_large_pages
    page_bytes = large_page_bytes // copies.small_pages_per_large_page
    pages = arena.view(-1, page_bytes)
    host_pages = memory.view(-1, page_bytes)
    if copies.path == CopyPath.TO_HOST:
        _copy_runs(pages, host_pages, copies.source_pages, copies.target_pages)
    else:
        _copy_runs(host_pages, pages, copies.source_pages, copies.target_pages)


def _copy_runs(
    sources: torch.Tensor,
    targets: torch.Tensor,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
) -> None:
    for source, target, num_pages in runs_of_copies(source_pages, target_pages):
        targets[target : target + num_pages].copy_(
            sources[source : source + num_pages], non_blocking=True
        )

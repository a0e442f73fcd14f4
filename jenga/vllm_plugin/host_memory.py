"""A worker's side of host memory: the buffer beside its arena, and copies between both.

A small page lies in one piece in either, so that neighbours are moved by one copy. Copies are made
on the stream on which the step runs, in the order in which they were ordered: nothing is waited
for, and nothing can be read or written over too early. What is saved or loaded ahead is copied on a
stream of its own, which begins where the step's copies end, and for which the next step waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
"""The first cache of an arena -> `_HostMemory` beside it, which goes with it."""


@dataclass(slots=True)
class _HostMemory:
    """Host memory of one arena.

    Attributes:
        memory: i8[host_bytes].
        beside: The stream of what is copied beside a step; None where there are none.
        is_copying: Whether that has been given copies that no step has waited for.
    """

    memory: torch.Tensor
    beside: torch.cuda.Stream | None
    is_copying: bool = False


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
        beside = None
        if cache.device.type == "cuda":
            _lock(memory)
            beside = torch.cuda.Stream(cache.device)
    except RuntimeError as error:
        msg = (
            f"--kv-offloading-size: {num_bytes} bytes of host memory cannot be had and locked on "
            f"this rank: {error}"
        )
        raise MemoryError(msg) from error
    _memory_of[cache] = _HostMemory(memory, beside)
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
    return _host_of(kv_caches).memory


def _host_of(kv_caches: Iterable[Any]) -> _HostMemory:
    host = _memory_of.get(first_cache(kv_caches))
    if host is None:
        msg = "pages are to be copied to host memory or from there, and there is none"
        raise InvariantError(msg)
    return host


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


def copy_ahead(
    kv_caches: Iterable[Any],
    arena: torch.Tensor,
    num_large_pages: int,
    rounds: Sequence[CopyRound],
) -> None:
    """Begin copies either way beside what the step's stream is given from here on.

    They read what it has written so far. Until `finish_ahead`, it may not write the pages read, nor
    touch those written.

    Args:
        kv_caches: vLLM's caches.
        arena: In which they lie, i8[arena_bytes].
        num_large_pages: Of the arena.
        rounds: What to copy, in this order.

    Raises:
        InvariantError: There is no host memory beside the arena.
    """
    host = _host_of(kv_caches)
    if host.beside is not None:
        host.beside.wait_stream(torch.cuda.current_stream(host.beside.device))
    # The context of no stream changes nothing.
    with torch.cuda.stream(host.beside):
        for copies in rounds:
            copy_through_host(kv_caches, arena, num_large_pages, copies)
    host.is_copying = True


def finish_ahead() -> None:
    """Let the step's stream wait for copies begun ahead, if there are any."""
    for host in _memory_of.values():
        if host.is_copying:
            if host.beside is not None:
                torch.cuda.current_stream(host.beside.device).wait_stream(host.beside)
            host.is_copying = False


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

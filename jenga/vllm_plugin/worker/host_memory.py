"""A worker's side of host memory: the buffer beside its arena, and copies between both.

A small page lies in one piece in either, so that neighbours are moved by one copy. Copies are made
on the stream on which the step runs, in the order in which they were ordered: nothing is waited
for, and nothing can be read or written over too early. What is saved or loaded ahead is copied on a
stream of its own, which begins where the step's copies end, and for which the next step waits.
"""

from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch
from vllm.logger import init_logger

from jenga.tables.request import CopyPath
from jenga.vllm_plugin.scheduler.copy_rounds import CopyRound, runs_of_copies
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

logger = init_logger(f"vllm.{__name__}")


class HostMemory:
    """Host memory of one arena, where a GPU reaches it without the CPU's help.

    Attributes:
        memory: i8[host_bytes].
    """

    __slots__ = ("_beside", "_is_copying", "memory")

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate it.

        Args:
            device: Of the arena.
            num_bytes: Of the memory.

        Raises:
            MemoryError: The system does not give, or does not lock, so much.
        """
        try:
            self.memory = torch.empty(num_bytes, dtype=torch.int8)
            # The stream of what is copied beside a step.
            self._beside: torch.cuda.Stream | None = None
            if device.type == "cuda":
                _lock(self.memory)
                self._beside = torch.cuda.Stream(device)
        except RuntimeError as error:
            msg = (
                f"--kv-offloading-size: {num_bytes} bytes of host memory cannot be had and locked "
                f"on this rank: {error}"
            )
            raise MemoryError(msg) from error
        self._is_copying = False  # whether that stream has copies that no step has waited for
        logger.info(
            "%s: %d bytes of host memory on this rank for what its arena evicts",
            BACKEND_NAME,
            num_bytes,
        )

    def copy(self, arena: torch.Tensor, num_large_pages: int, copies: CopyRound) -> None:
        """Make one round of copies between the arena and this memory.

        Args:
            arena: i8[arena_bytes].
            num_large_pages: Of the arena.
            copies: What to copy.
        """
        large_page_bytes = arena.numel() // num_large_pages
        page_bytes = large_page_bytes // copies.small_pages_per_large_page
        pages = arena.view(-1, page_bytes)
        host_pages = self.memory.view(-1, page_bytes)
        if copies.path == CopyPath.TO_HOST:
            _copy_runs(pages, host_pages, copies.source_pages, copies.target_pages)
        else:
            _copy_runs(host_pages, pages, copies.source_pages, copies.target_pages)

    def copy_ahead(
        self, arena: torch.Tensor, num_large_pages: int, rounds: Sequence[CopyRound]
    ) -> None:
        """Begin copies either way beside what the step's stream is given from here on.

        They read what it has written so far. Until `finish_ahead`, it may not write the pages read,
        nor touch those written.

        Args:
            arena: i8[arena_bytes].
            num_large_pages: Of the arena.
            rounds: What to copy, in this order.
        """
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        # The context of no stream changes nothing.
        with torch.cuda.stream(self._beside):
            for copies in rounds:
                self.copy(arena, num_large_pages, copies)
        self._is_copying = True

    def finish_ahead(self) -> None:
        """Let the step's stream wait for copies begun ahead, if there are any."""
        if self._is_copying and self._beside is not None:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
        self._is_copying = False


def _lock(memory: torch.Tensor) -> None:
    """Lock memory as long as it lives; torch's own is rounded up to a power of two."""
    cuda: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, memory.nbytes, 0)))
    # What is freed locked stays locked, and another engine's cannot be at its addresses.
    finalize(memory, cuda.cudaHostUnregister, address).atexit = False


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

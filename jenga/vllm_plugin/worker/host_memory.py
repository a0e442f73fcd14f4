"""Host memory of a worker: a buffer beside its arena, and copies between the two.

A small page is contiguous in both, so one call copies a run of consecutive pages. Copies are made
on the step's stream in the order of the orders. Nothing waits for them, and no page is read or
overwritten too early. Pages that are written back or prefetched ahead are copied on a stream of
their own. It starts after the step's copies, and the next step waits for it.
"""

from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch
from vllm.logger import init_logger

from jenga.tables.request import CopyPath
from jenga.vllm_plugin.orders.copy_rounds import CopyRound, runs_of_copies
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

logger = init_logger(f"vllm.{__name__}")


class HostMemory:
    """Host memory of one arena. It is pinned if the arena is on a GPU, so that copies are async.

    Attributes:
        memory: The buffer, i8[host_bytes].
    """

    __slots__ = ("_beside", "_is_copying", "memory")

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate the memory.

        Args:
            device: Device of the arena.
            num_bytes: Size of the memory.

        Raises:
            MemoryError: The system cannot allocate or pin that many bytes.
        """
        try:
            self.memory = torch.empty(num_bytes, dtype=torch.int8)
            # The stream for copies that run beside a step. None on a CPU.
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
            "%s: %d bytes of host memory on this rank for pages that its arena evicts",
            BACKEND_NAME,
            num_bytes,
        )

    def copy(self, arena: torch.Tensor, num_large_pages: int, copies: CopyRound) -> None:
        """Make one round of copies between the arena and this memory.

        Args:
            arena: The arena, i8[arena_bytes].
            num_large_pages: Number of large pages in the arena.
            copies: The copies. One side is in host memory.
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
        """Begin copies in either direction that run beside later work on the step's stream.

        They see all earlier writes of the step's stream. Until `finish_ahead`, that stream must not
        write their sources, and must not read or write their targets.

        Args:
            arena: The arena, i8[arena_bytes].
            num_large_pages: Number of large pages in the arena.
            rounds: The copies, in the order in which to make them.
        """
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        # On a CPU there is no stream, and this context has no effect.
        with torch.cuda.stream(self._beside):
            for copies in rounds:
                self.copy(arena, num_large_pages, copies)
        self._is_copying = True

    def finish_ahead(self) -> None:
        """Let the step's stream wait for copies of `copy_ahead`, if there are any."""
        if self._is_copying and self._beside is not None:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
        self._is_copying = False


def _lock(memory: torch.Tensor) -> None:
    """Pin memory for as long as it lives.

    torch's own pinned memory is not used, because its size is rounded up to a power of two.
    """
    cuda: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, memory.nbytes, 0)))
    # Memory that is freed while pinned stays pinned: then another engine could not pin its own
    # memory at the same addresses.
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

"""Engines in this process that have joined a shared arena, and the arena's bytes in workers."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from jenga.broker.client import SocketLender, attach
from jenga.broker.folder import ArenaFolder
from jenga.broker.memory import CPU, UNTRIED, ArenaMemory, DeviceArray
from jenga.errors import InvariantError
from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig
from jenga.vllm_plugin.settings.environment import BACKEND_NAME
from jenga.vllm_plugin.settings.shared_arena import Membership, arena_share

if TYPE_CHECKING:
    import mmap

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")

_lenders: dict[str, SocketLender] = {}
"""Name of an engine -> its connection to the broker, in the process of its scheduler."""

_attached: dict[str, object] = {}
"""Name of an engine -> its connection to the broker, in the process of a worker."""

_mapped: dict[str, ArenaMemory] = {}
"""Name of an engine -> the memory that a worker in this process has mapped for it."""


def join_shared_arena(vllm_config: "VllmConfig", configs: "Sequence[KVCacheConfig]") -> None:
    """Join the shared arena that an engine's settings name, if they do, and tell the workers.

    Args:
        vllm_config: Configuration of the engine.
        configs: Cache configuration of each worker. They are written to.

    Raises:
        BrokerError: The broker is not there or refuses.
    """
    share = arena_share(vllm_config)
    if share is None:
        return
    model = Path(vllm_config.model_config.model).name
    name = f"{model}-{os.getpid()}"
    if _lenders:  # further engines in one process
        name += f"-{len(_lenders)}"
    lender = SocketLender(
        ArenaFolder(Path(share.folder)),
        name,
        guarantee_pages=share.guarantee_pages,
        limit_pages=share.limit_pages,
        large_page_bytes=share.large_page_bytes,
    )
    _lenders[name] = lender
    membership = Membership(
        folder=share.folder, name=name, steps_in_flight=vllm_config.max_concurrent_batches
    )
    for config in configs:
        if isinstance(config, JengaKVCacheConfig):
            config.shared_arena = membership
    logger.info(
        "%s: engine %s shares the arena in %s: %d to %d of its %d large pages",
        BACKEND_NAME,
        name,
        share.folder,
        share.guarantee_pages,
        share.limit_pages,
        share.num_pages - 1,
    )


def lender_of(membership: Membership) -> SocketLender:
    """Get the connection of an engine that has joined in this process."""
    return _lenders[membership.name]


def views_of_shared_arena(
    membership: Membership, views: dict[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Get the same views of the shared arena as these are of a buffer. It is not cleared.

    Args:
        membership: The engine, which has joined.
        views: Views of one buffer that is as long as the arena, by layer name. It needs no memory.
        device: Device of this worker.

    Raises:
        BrokerError: The broker is not there, or does not know the engine.
        RuntimeError: The memory is lost, or the CUDA driver does not open it.
        ValueError: The memory is on another GPU.
    """
    folder = ArenaFolder(Path(membership.folder))
    _attached[membership.name] = attach(folder, membership.name)
    memory = folder.memory
    if memory.device != CPU:
        logger.warning("%s: %s", BACKEND_NAME, UNTRIED)
    arena = _tensor_over(memory.map(device.index or 0), device)
    _mapped[membership.name] = memory
    return {
        name: torch.as_strided(
            arena.view(view.dtype), view.size(), view.stride(), view.storage_offset()
        )
        for name, view in views.items()
    }


def _tensor_over(mapped: "mmap.mmap | DeviceArray", device: torch.device) -> torch.Tensor:
    """Get a tensor of int8 over mapped bytes, which it keeps mapped."""
    if not isinstance(mapped, DeviceArray):
        return torch.frombuffer(mapped, dtype=torch.int8)
    arena = torch.as_tensor(mapped, device=device)
    if arena.data_ptr() != mapped.address:
        msg = f"torch copied the arena at {mapped.address:#x} to {arena.data_ptr():#x}"
        raise InvariantError(msg)
    return arena


def check_memory(config: "KVCacheConfig") -> None:
    """Check before a step that the memory of a shared arena is still there, if an engine has it.

    Raises:
        MemoryLostError: The process that held memory of a GPU has ended.
    """
    if isinstance(config, JengaKVCacheConfig) and config.shared_arena is not None:
        _mapped[config.shared_arena.name].check()


def wait_for_news(membership: Membership, most_seconds: float) -> None:
    """Wait until the broker has something to say to an engine, in a thread of its own."""
    _lenders[membership.name].wait(most_seconds)


def is_shared(config: Any) -> bool:  # noqa: ANN401 (a configuration of vLLM)
    """Whether a cache configuration is of an engine that shares an arena."""
    return isinstance(config, JengaKVCacheConfig) and config.shared_arena is not None

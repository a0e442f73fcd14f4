"""Engines in this process that have joined a shared arena, and the arena's bytes in workers."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from jenga.broker.client import SocketLender, attach
from jenga.broker.folder import ArenaFolder
from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig
from jenga.vllm_plugin.settings.environment import BACKEND_NAME
from jenga.vllm_plugin.settings.shared_arena import Membership, arena_share

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")

_lenders: dict[str, SocketLender] = {}
"""Name of an engine -> its connection to the broker, in the process of its scheduler."""

_attached: dict[str, object] = {}
"""Name of an engine -> its connection to the broker, in the process of a worker."""


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
    membership: Membership, views: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Get the same views of the shared arena as these are of a buffer. It is not cleared.

    Args:
        membership: The engine, which has joined.
        views: Views of one buffer that is as long as the arena, by layer name.

    Raises:
        BrokerError: The broker is not there, or does not know the engine.
    """
    folder = ArenaFolder(Path(membership.folder))
    _attached[membership.name] = attach(folder, membership.name)
    with folder.arena.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    arena = torch.frombuffer(mapped, dtype=torch.int8)  # keeps the mapping
    return {
        name: torch.as_strided(
            arena.view(view.dtype), view.size(), view.stride(), view.storage_offset()
        )
        for name, view in views.items()
    }


def wait_for_news(membership: Membership, most_seconds: float) -> None:
    """Wait until the broker has something to say to an engine, in a thread of its own."""
    _lenders[membership.name].wait(most_seconds)


def is_shared(config: Any) -> bool:  # noqa: ANN401 (a configuration of vLLM)
    """Whether a cache configuration is of an engine that shares an arena."""
    return isinstance(config, JengaKVCacheConfig) and config.shared_arena is not None

"""The share of an engine in an arena that several engines share, read from the settings."""

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from jenga.broker.client import BrokerError, check_join
from jenga.broker.folder import ArenaFolder
from jenga.broker.memory import MemoryLostError
from jenga.vllm_plugin.settings.additional_config import HOST_BYTES, SHARED_ARENA
from jenga.vllm_plugin.settings.environment import (
    GUARANTEE_VARIABLE,
    SHARED_ARENA_VARIABLE,
    Settings,
)
from jenga.vllm_plugin.settings.refusals import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaShare:
    """Share of a shared arena that an engine asks for.

    Attributes:
        folder: Folder of the arena.
        large_page_bytes: Size of a large page in bytes.
        num_pages: Number of large pages of the arena, including the null page.
        guarantee_pages: Number of large pages that the engine always has.
        limit_pages: Most large pages that it may have.
    """

    folder: str
    large_page_bytes: int
    num_pages: int
    guarantee_pages: int
    limit_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """An engine that shares an arena, as its workers know it.

    Attributes:
        folder: Folder of the arena.
        name: Name of the engine in the broker's books.
        steps_in_flight: Most steps that are scheduled and not processed, including the next one.
    """

    folder: str
    name: str
    steps_in_flight: int


def arena_share(vllm_config: "VllmConfig") -> ArenaShare | None:
    """Get the share that a configuration has, or None if the engine has an arena of its own."""
    options = vllm_config.additional_config
    share = options.get(SHARED_ARENA) if isinstance(options, dict) else None
    return None if share is None else ArenaShare(**share)


def share_arena(vllm_config: "VllmConfig", settings: Settings) -> None:
    """Let an engine use large pages of a shared arena, if its settings ask for that.

    Raises:
        ValueError: There is no such arena, or its memory is lost or on another device. Or its
            broker is not there, or would refuse the engine, or the configuration asks for what
            cannot be served with it.
    """
    if settings.shared_arena is None or arena_share(vllm_config) is not None:
        return
    met = _not_served(vllm_config)
    if met:
        raise Refusal.SHARED_ARENA.error(met)
    folder = ArenaFolder(settings.shared_arena.absolute())
    with folder.open_books().closing() as books:
        large_page_bytes, num_pages = books.large_page_bytes, books.num_pages
    _check_memory(folder)
    guarantee_pages = -(-settings.guarantee_bytes // large_page_bytes)
    limit_pages = num_pages - 1
    if settings.limit_bytes:
        limit_pages = min(limit_pages, settings.limit_bytes // large_page_bytes)
    if guarantee_pages > limit_pages:
        msg = (
            f"{GUARANTEE_VARIABLE}={settings.guarantee_bytes} takes {guarantee_pages} large pages "
            f"of {large_page_bytes} bytes, but this engine may have {limit_pages} of "
            f"{SHARED_ARENA_VARIABLE}={folder.path}"
        )
        raise ValueError(msg)
    share = ArenaShare(
        folder=str(folder.path),
        large_page_bytes=large_page_bytes,
        num_pages=num_pages,
        guarantee_pages=guarantee_pages,
        limit_pages=limit_pages,
    )
    options = vllm_config.additional_config
    if not isinstance(options, dict):
        msg = "an --additional-config that is not a mapping"
        raise Refusal.SHARED_ARENA.error(msg)
    try:
        check_join(
            folder,
            f"an engine of process {os.getpid()}",
            guarantee_pages=guarantee_pages,
            limit_pages=limit_pages,
            large_page_bytes=large_page_bytes,
        )
    except BrokerError as error:
        msg = f"{SHARED_ARENA_VARIABLE}={folder.path}: {error}"
        raise ValueError(msg) from error
    options[SHARED_ARENA] = asdict(share)
    vllm_config.cache_config.num_gpu_blocks_override = num_pages
    # Its steps would write to large pages that other engines have.
    vllm_config.kernel_config.enable_jit_warmup = False


def _check_memory(folder: ArenaFolder) -> None:
    """Refuse an arena whose memory is lost, or on another device than this engine."""
    from vllm.platforms import current_platform

    place = f"{SHARED_ARENA_VARIABLE}={folder.path}"
    try:
        memory = folder.memory
        memory.check()
    except MemoryLostError as error:
        msg = f"{place}: {error}"
        raise ValueError(msg) from error
    device = current_platform.device_type
    if memory.device.partition(":")[0] != device:
        msg = (
            f"{place}: its memory is on {memory.device}, and this engine runs on {device}; "
            f"`jenga broker start --device {device}` makes an arena for it"
        )
        raise ValueError(msg)


def _not_served(vllm_config: "VllmConfig") -> str:
    """Get the options that a shared arena does not serve. It may be empty."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculation = vllm_config.speculative_config
    num_ranks = parallel.world_size * parallel.data_parallel_size
    options = vllm_config.additional_config
    found = {
        f"{num_ranks} ranks": num_ranks > 1,
        "--num-gpu-blocks-override": vllm_config.cache_config.num_gpu_blocks_override is not None,
        "--kv-offloading-size": isinstance(options, dict) and HOST_BYTES in options,
        "--enable-sleep-mode": model is not None and model.enable_sleep_mode,
        "--ec-transfer-config": vllm_config.ec_transfer_config is not None,
        # It times steps on any pages of the arena, and recurrent layers write to them.
        "enable_adaptive_verification": (
            speculation is not None and speculation.enable_adaptive_verification
        ),
    }
    return ", ".join(name for name, is_found in found.items() if is_found)

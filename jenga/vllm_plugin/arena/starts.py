"""What an arena has room for, said as the engine starts: how long a request, how many states."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from jenga.policies import policy_of
from jenga.tables.capacity import Capacity
from jenga.vllm_plugin.arena.layout import (
    JengaKVCacheConfig,
    geometry_of,
    large_pages_of_longest_request,
    project_groups,
    stage_of,
)
from jenga.vllm_plugin.settings.environment import BACKEND_NAME
from jenga.vllm_plugin.settings.refusals import Refusal

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")


@contextmanager
def _model_tokens(model_config: "ModelConfig", num_tokens: int) -> Generator[None]:
    """Let vLLM's specs, which read the greatest length where it is set, count with another."""
    before = model_config.max_model_len
    model_config.max_model_len = num_tokens
    try:
        yield
    finally:
        model_config.max_model_len = before


def needed_large_pages(
    vllm_config: "VllmConfig", groups: Sequence[KVCacheGroupSpec], num_tokens: int
) -> int:
    """Get the large pages of the smallest arena that takes a request of a length.

    The null page is one of them.

    Args:
        vllm_config: Of the engine.
        groups: Made by `layout.get_kv_cache_groups`, of a rank or of all.
        num_tokens: The length: prompt and answer.
    """
    with _model_tokens(vllm_config.model_config, num_tokens):
        return 1 + large_pages_of_longest_request(vllm_config, groups)


def longest_request_tokens(
    vllm_config: "VllmConfig", groups: Sequence[KVCacheGroupSpec], num_large_pages: int
) -> int:
    """Get the greatest --max-model-len with which an engine starts; 0 where there is none.

    It is at most the present one, which steps have no more tokens than with.

    Args:
        vllm_config: Of the engine.
        groups: Made by `layout.get_kv_cache_groups`, of a rank or of all.
        num_large_pages: Of the arena, the null page included.
    """
    low, high = 0, vllm_config.model_config.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if needed_large_pages(vllm_config, groups, middle) <= num_large_pages:
            low = middle
        else:
            high = middle - 1
    return low


def check_longest_request(
    vllm_config: "VllmConfig",
    groups: Sequence[KVCacheGroupSpec],
    kv_cache_specs: Sequence[Mapping[str, "KVCacheSpec"]],
    available_memory: Sequence[int],
) -> None:
    """Refuse an arena without room for one request of the greatest length, before vLLM does.

    Where vLLM is to find the length, a request of one token must fit.

    Args:
        vllm_config: Of the engine.
        groups: Made by `layout.get_kv_cache_groups`, of all ranks.
        kv_cache_specs: Of each worker vLLM's cache spec of each layer, by layer name.
        available_memory: Of each worker, in bytes.

    Raises:
        ValueError: It has none; the message says which length fits, and how many bytes all would
            take.
    """
    model_config = vllm_config.model_config
    if not groups or min(available_memory) <= 0:
        return  # nothing to store, or nowhere to: vLLM says so
    stages = [stage_of(project_groups(groups, specs)) for specs in kv_cache_specs]
    rooms = [
        num_bytes // stage.large_page_bytes
        for num_bytes, stage in zip(available_memory, stages, strict=True)
    ]
    override = vllm_config.cache_config.num_gpu_blocks_override
    num_large_pages = min(rooms) if override is None else override
    is_fitted = model_config.original_max_model_len == -1
    asked_tokens = 1 if is_fitted else model_config.max_model_len
    needed = needed_large_pages(vllm_config, groups, asked_tokens)
    if needed <= num_large_pages:
        return
    longest_tokens = longest_request_tokens(vllm_config, groups, num_large_pages)
    most_bytes = max(stage.large_page_bytes for stage in stages)
    if longest_tokens:
        fits = f"--max-model-len {longest_tokens} fits, and auto finds it"
    else:
        least_bytes = needed_large_pages(vllm_config, groups, 1) * most_bytes
        fits = f"no --max-model-len fits, as one token takes {least_bytes} bytes"
    if override is not None:
        msg = f"{override}, where {needed} are needed: {fits}"
        raise Refusal.BLOCKS_OVERRIDE.error(msg)
    worker = rooms.index(num_large_pages)
    place = f" on worker {worker}" if len(stages) > 1 else ""
    msg = (
        f"{BACKEND_NAME}: one request of {asked_tokens} tokens (--max-model-len) takes {needed} "
        f"large pages of {stages[worker].large_page_bytes} bytes, the null page included, and "
        f"{available_memory[worker]} bytes of cache memory{place} hold {num_large_pages}: {fits}. "
        f"{needed * most_bytes} bytes{' on each worker' if place else ''} would do "
        f"(--kv-cache-memory-bytes, or a higher --gpu-memory-utilization)"
    )
    raise ValueError(msg)


def requests_with_states(config: JengaKVCacheConfig) -> int | None:
    """Get how many requests of one token an arena holds at once; None where layers have no states.

    That is their states, and a page of every other layer type.
    """
    geometry = geometry_of(config)
    if not any(table.is_state for table in geometry.page_tables):
        return None
    policies = [policy_of(table) for table in geometry.page_tables]
    capacity = Capacity(geometry, policies, config.num_blocks)
    pages = capacity.peak_pages(1, chunk_tokens=1)
    low, high = (
        0,
        config.num_blocks * max(table.small_pages_per_large_page for table in geometry.page_tables),
    )
    while low < high:
        middle = (low + high + 1) // 2
        if capacity.large_pages([middle * count for count in pages]) < config.num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def report_states(vllm_config: "VllmConfig", config: KVCacheConfig) -> None:
    """Log how many requests' states fit where --max-num-seqs asks for more.

    Args:
        vllm_config: Of the engine.
        config: Of any worker: all have as many large pages.
    """
    if not isinstance(config, JengaKVCacheConfig) or not config.kv_cache_groups:
        return
    num_requests = requests_with_states(config)
    max_requests = vllm_config.scheduler_config.max_num_seqs
    if num_requests is not None and num_requests < max_requests:
        logger.info(
            "%s: states of %d requests fit at once, beside a page of each other layer type; "
            "further ones of --max-num-seqs %d wait",
            BACKEND_NAME,
            num_requests,
            max_requests,
        )


def report_graphs(estimated_bytes: int, config: JengaKVCacheConfig, *, is_left_out: bool) -> None:
    """Log what vLLM estimated that CUDA graphs take, beside the arena of a worker.

    Args:
        estimated_bytes: 0 where nothing was estimated; then nothing is logged.
        config: Of the worker.
        is_left_out: Whether the arena was made smaller by them.
    """
    if not estimated_bytes or not config.kv_cache_groups:
        return
    large_page_bytes = stage_of(config.kv_cache_groups).large_page_bytes
    logger.info(
        "%s: CUDA graphs are estimated to take %d bytes, %.1f %% of the arena's %d, which %s",
        BACKEND_NAME,
        estimated_bytes,
        100 * estimated_bytes / (config.num_blocks * large_page_bytes),
        config.num_blocks * large_page_bytes,
        "has so many fewer"
        if is_left_out
        else "leaves them out of account (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0)",
    )

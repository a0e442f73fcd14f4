"""Checks and log lines at the start of an engine: the requests and states that its arena holds."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from jenga.tables.capacity import Capacity
from jenga.vllm_plugin.arena.layout import (
    JengaKVCacheConfig,
    geometry_of,
    large_pages_of_longest_request,
    project_groups,
    stage_of,
)
from jenga.vllm_plugin.settings.environment import BACKEND_NAME, GUARANTEE_VARIABLE
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.settings.shared_arena import arena_share

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")


@contextmanager
def _model_tokens(model_config: "ModelConfig", num_tokens: int) -> Generator[None]:
    """Set --max-model-len within this context, because vLLM's cache specs read it from there."""
    before = model_config.max_model_len
    model_config.max_model_len = num_tokens
    try:
        yield
    finally:
        model_config.max_model_len = before


def needed_large_pages(
    vllm_config: "VllmConfig", groups: Sequence[KVCacheGroupSpec], num_tokens: int
) -> int:
    """Get the number of large pages of the smallest arena that holds a request of a given length.

    The null page is included.

    Args:
        vllm_config: Configuration of the engine.
        groups: Groups from `layout.get_kv_cache_groups`, of one rank or of all ranks.
        num_tokens: Number of tokens of the request, prompt and answer together.
    """
    with _model_tokens(vllm_config.model_config, num_tokens):
        return 1 + large_pages_of_longest_request(vllm_config, groups)


def longest_request_tokens(
    vllm_config: "VllmConfig", groups: Sequence[KVCacheGroupSpec], num_large_pages: int
) -> int:
    """Get the largest --max-model-len with which the engine starts. 0 means that there is none.

    The result is at most the present value. Steps have no more tokens with a smaller value than
    with the present one, so counting with the present steps is safe.

    Args:
        vllm_config: Configuration of the engine.
        groups: Groups from `layout.get_kv_cache_groups`, of one rank or of all ranks.
        num_large_pages: Number of large pages of the arena, the null page included.
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
    """Refuse an arena that cannot hold one request of --max-model-len tokens, before vLLM does.

    If vLLM is to find the length itself (`auto`), a request of one token must fit.

    Args:
        vllm_config: Configuration of the engine.
        groups: Groups from `layout.get_kv_cache_groups`, of all ranks.
        kv_cache_specs: For each worker, vLLM's cache spec of each layer, by layer name.
        available_memory: For each worker, bytes for its cache.

    Raises:
        ValueError: The arena is too small. The message says which length fits. It also says how
            many bytes the whole length takes or, with a fixed number of blocks, how many blocks.
            Or an engine that shares an arena takes more beside it than it was allowed to.
    """
    model_config = vllm_config.model_config
    share = arena_share(vllm_config)
    if share is not None and min(available_memory) < 0:
        msg = (
            f"{BACKEND_NAME}: beside the shared arena this engine takes {-min(available_memory)} "
            f"bytes more than --gpu-memory-utilization "
            f"{vllm_config.cache_config.gpu_memory_utilization} allows; raise it if the GPU has "
            f"room, and start engines on one GPU one after another, because each counts what "
            f"others take meanwhile"
        )
        raise ValueError(msg)
    if not groups or (share is None and min(available_memory) <= 0):
        return  # without layers or memory: vLLM reports that itself
    stages = [stage_of(project_groups(groups, specs)) for specs in kv_cache_specs]
    rooms = [
        num_bytes // stage.large_page_bytes
        for num_bytes, stage in zip(available_memory, stages, strict=True)
    ]
    override = vllm_config.cache_config.num_gpu_blocks_override
    num_large_pages = min(rooms) if override is None else override
    if share is not None:
        num_large_pages = 1 + share.guarantee_pages
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
    if share is not None:
        msg = (
            f"{BACKEND_NAME}: one request of {asked_tokens} tokens (--max-model-len) takes "
            f"{needed - 1} large pages, and {GUARANTEE_VARIABLE} guarantees "
            f"{share.guarantee_pages} large pages of {share.large_page_bytes} bytes: {fits}"
        )
        raise ValueError(msg)
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
    """Get the number of requests of one token that an arena holds at once.

    Each of them takes its states, and a page of every other layer type. None means that no layer
    has states.
    """
    geometry = geometry_of(config)
    if not any(table.is_state for table in geometry.page_tables):
        return None
    policies = [table.policy() for table in geometry.page_tables]
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
    """Log the number of requests whose states fit, if --max-num-seqs is larger.

    Args:
        vllm_config: Configuration of the engine.
        config: Configuration of any worker, because all have the same number of large pages.
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
    """Log vLLM's estimate of the memory of CUDA graphs, compared with the arena of a worker.

    Nothing is logged without an estimate, or with a shared arena, which graphs make no smaller.

    Args:
        estimated_bytes: Estimated bytes. 0 means that vLLM made no estimate.
        config: Configuration of the worker.
        is_left_out: Whether vLLM made the arena smaller by these bytes.
    """
    if not estimated_bytes or not config.kv_cache_groups or config.shared_arena is not None:
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

"""vLLM 0.33's hook for the layout of cache memory, implemented by `layout`.

vLLM 0.32 has no such hook, so there is no base class to inherit from. The methods are those of
`vllm.v1.core.kv_cache_config_builder.KVCacheConfigBuilder` in 0.33.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from jenga.vllm_plugin.arena import layout

if TYPE_CHECKING:
    from collections.abc import Generator

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_is_thrown_away: ContextVar[bool] = ContextVar("is_thrown_away", default=False)


@contextmanager
def thrown_away() -> "Generator[None]":
    """Build arenas that serve only to measure CUDA graphs: see `layout.least_large_pages`."""
    token = _is_thrown_away.set(True)
    try:
        yield
    finally:
        _is_thrown_away.reset(token)


class JengaKVCacheConfigBuilder:
    """Builds one group per page table. `num_blocks` counts large pages, the null page included."""

    def get_kv_cache_groups(
        self, vllm_config: "VllmConfig", kv_cache_spec: dict[str, "KVCacheSpec"]
    ) -> list["KVCacheGroupSpec"]:
        """See `layout.get_kv_cache_groups`."""
        return layout.get_kv_cache_groups(vllm_config, kv_cache_spec)

    def get_kv_cache_config_from_groups(
        self,
        vllm_config: "VllmConfig",
        kv_cache_groups: list["KVCacheGroupSpec"],
        num_blocks: int,
    ) -> "KVCacheConfig":
        """See `layout.cut_arena`."""
        if _is_thrown_away.get() and kv_cache_groups:
            num_blocks = layout.least_large_pages(kv_cache_groups)
        return layout.cut_arena(vllm_config, kv_cache_groups, num_blocks)

    def _get_pool_bytes_per_block(
        self, vllm_config: "VllmConfig", kv_cache_groups: list["KVCacheGroupSpec"]
    ) -> int:
        """See `layout.pool_bytes_per_block`."""
        return layout.pool_bytes_per_block(vllm_config, kv_cache_groups)

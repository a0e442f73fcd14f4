"""Names of vLLM's planner of cache memory that are replaced: functions in 0.32, a hook in 0.33."""

import functools
from collections.abc import Callable
from typing import Any

from jenga.vllm_plugin.replacement import Function, Replacement

_BUILDER_PATH = "jenga.vllm_plugin.config_builder.JengaKVCacheConfigBuilder"


def _when_selected(function_name: str, num_before: int = 0) -> Callable[[Function], Function]:
    """Call `jenga.vllm_plugin.layout.<function_name>` where the configuration selects us.

    Args:
        function_name: In that module.
        num_before: Arguments before the configuration, which ours does not take.
    """

    def make(original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            from jenga.vllm_plugin import layout
            from jenga.vllm_plugin.config import is_selected

            if is_selected(args[num_before]):
                return getattr(layout, function_name)(*args[num_before:], **kwargs)
            return original(*args, **kwargs)

        return replacement

    return make


def _get_kv_cache_config_builder_cls(original: Function) -> Function:
    @functools.wraps(original)
    def get_kv_cache_config_builder_cls(vllm_config: Any) -> str:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        return _BUILDER_PATH if is_selected(vllm_config) else original(vllm_config)

    return get_kv_cache_config_builder_cls


FUNCTIONS = (
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_kv_cache_groups",
        reason="unifies page sizes; ours keeps one page table per layer type",
        parameters=("vllm_config", "kv_cache_spec"),
        make=_when_selected("get_kv_cache_groups"),
        series=("0.32",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_kv_cache_config_from_groups",
        reason="one block size and one number of blocks for all groups",
        parameters=("vllm_config", "kv_cache_groups", "available_memory"),
        make=_when_selected("get_kv_cache_config_from_groups"),
        series=("0.32",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="_pool_bytes_per_block",
        reason="vLLM's unit of the whole pool is our large page",
        parameters=("vllm_config", "kv_cache_groups"),
        make=_when_selected("pool_bytes_per_block"),
        series=("0.32",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="_max_memory_usage_bytes_from_groups",
        reason="counts a small page of any group as a whole block, and so refuses what fits",
        parameters=("vllm_config", "kv_cache_groups"),
        make=_when_selected("max_memory_usage_bytes_from_groups"),
        series=("0.32",),
    ),
)
"""What 0.32 has instead of a hook."""

HOOK = (
    Replacement(
        module="vllm.platforms",
        name="current_platform.get_kv_cache_config_builder_cls",
        reason="the official hook, which only a platform of one's own could fill",
        parameters=("vllm_config",),
        make=_get_kv_cache_config_builder_cls,
        series=("0.33",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_planning",
        name="_max_memory_usage_bytes_from_groups",
        reason="counts a small page of any group as a whole block; the hook is not asked",
        parameters=("builder", "vllm_config", "kv_cache_groups"),
        make=_when_selected("max_memory_usage_bytes_from_groups", num_before=1),
        series=("0.33",),
    ),
)
"""The hook that 0.33 has, and what it leaves out."""

IN_ALL = (
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_max_concurrency_for_kv_cache_config",
        reason="the same count, in the capacity that vLLM reports",
        parameters=("vllm_config", "kv_cache_config"),
        make=_when_selected("max_concurrency"),
    ),
)
"""What both have."""

PLANNER = (*FUNCTIONS, *HOOK, *IN_ALL)
"""In place once a configuration selects us."""

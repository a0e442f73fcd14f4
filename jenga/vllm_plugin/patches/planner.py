"""Replaced names of vLLM's planner of cache memory: functions in 0.32, a hook in 0.33."""

import functools
from collections.abc import Callable
from typing import Any

from jenga.vllm_plugin.patches.patch import Function, Replacement

_BUILDER_PATH = "jenga.vllm_plugin.arena.config_builder.JengaKVCacheConfigBuilder"


def _when_selected(function_name: str, num_before: int = 0) -> Callable[[Function], Function]:
    """Call `jenga.vllm_plugin.arena.layout.<function_name>` if the backend is selected.

    Args:
        function_name: Name of a function in that module.
        num_before: Number of arguments before the configuration, which our function does not take.
    """

    def make(original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            from jenga.vllm_plugin.arena import layout
            from jenga.vllm_plugin.config import is_selected

            if is_selected(args[num_before]):
                return getattr(layout, function_name)(*args[num_before:], **kwargs)
            return original(*args, **kwargs)

        return replacement

    return make


def _get_kv_cache_groups(original: Function) -> Function:
    @functools.wraps(original)
    def get_kv_cache_groups(vllm_config: Any, kv_cache_spec: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.arena import layout
        from jenga.vllm_plugin.arena.ranks import workers
        from jenga.vllm_plugin.arena.starts import check_longest_request
        from jenga.vllm_plugin.config import is_selected

        if not is_selected(vllm_config):
            return original(vllm_config, kv_cache_spec)
        groups = layout.get_kv_cache_groups(vllm_config, kv_cache_spec)
        if (known := workers()) is not None:
            check_longest_request(vllm_config, groups, *known)
        return groups

    return get_kv_cache_groups


def _get_kv_cache_config_builder_cls(original: Function) -> Function:
    @functools.wraps(original)
    def get_kv_cache_config_builder_cls(vllm_config: Any) -> str:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        return _BUILDER_PATH if is_selected(vllm_config) else original(vllm_config)

    return get_kv_cache_config_builder_cls


def _project_kv_cache_groups_to_worker(original: Function) -> Function:
    @functools.wraps(original)
    def project(global_kv_cache_groups: Any, worker_spec: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.arena.layout import JengaGroupSpec, project_groups

        if any(isinstance(group, JengaGroupSpec) for group in global_kv_cache_groups):
            return project_groups(global_kv_cache_groups, worker_spec)
        return original(global_kv_cache_groups, worker_spec)

    return project


def _resolve_kv_cache_layout(original: Function) -> Function:
    @functools.wraps(original)
    def resolve(vllm_config: Any, supported_layouts: Any, kv_cache_specs: Any = None) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        if is_selected(vllm_config) and supported_layouts:
            fewest = min(supported_layouts, key=len)
            common = [name for name in fewest if all(name in each for each in supported_layouts)]
            supported_layouts = [common] * len(supported_layouts)
        return original(vllm_config, supported_layouts, kv_cache_specs)

    return resolve


def _get_global_kv_cache_groups(original: Function) -> Function:
    @functools.wraps(original)
    def get_global_kv_cache_groups(vllm_config: Any, kv_cache_specs: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.arena.ranks import planned_for, without_image_rows

        with planned_for(kv_cache_specs):
            return original(vllm_config, without_image_rows(kv_cache_specs))

    return get_global_kv_cache_groups


def _get_kv_cache_configs(original: Function) -> Function:
    @functools.wraps(original)
    def get_kv_cache_configs(
        vllm_config: Any,  # noqa: ANN401
        kv_cache_specs: Any,  # noqa: ANN401
        available_memory: Any,  # noqa: ANN401
        *groups: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.arena.joined import join_shared_arena
        from jenga.vllm_plugin.arena.layout import report_ranks
        from jenga.vllm_plugin.arena.ranks import planned_for, without_image_rows
        from jenga.vllm_plugin.arena.starts import check_longest_request, report_states
        from jenga.vllm_plugin.config import is_selected

        if not is_selected(vllm_config):
            return original(vllm_config, kv_cache_specs, available_memory, *groups)
        for known in groups:  # 0.32 groups layers in the next call, and checks there
            check_longest_request(vllm_config, known, kv_cache_specs, available_memory)
        with planned_for(kv_cache_specs, available_memory):
            layers = without_image_rows(kv_cache_specs)
            configs = original(vllm_config, layers, available_memory, *groups)
        report_ranks(vllm_config, configs, available_memory)
        report_states(vllm_config, configs[0])
        join_shared_arena(vllm_config, configs)
        return configs

    return get_kv_cache_configs


FUNCTIONS = (
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_kv_cache_groups",
        reason="makes page sizes equal; our page tables have small pages of different sizes",
        parameters=("vllm_config", "kv_cache_spec"),
        make=_get_kv_cache_groups,
        series=("0.32",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_kv_cache_config_from_groups",
        reason="assumes one block size and one number of blocks for all groups",
        parameters=("vllm_config", "kv_cache_groups", "available_memory"),
        make=_when_selected("get_kv_cache_config_from_groups"),
        series=("0.32",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="_pool_bytes_per_block",
        reason="the unit of vLLM's block pool is our large page",
        parameters=("vllm_config", "kv_cache_groups"),
        make=_when_selected("pool_bytes_per_block"),
        series=("0.32",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="_max_memory_usage_bytes_from_groups",
        reason="counts each small page as a whole block, and so refuses requests that fit",
        parameters=("vllm_config", "kv_cache_groups"),
        make=_when_selected("max_memory_usage_bytes_from_groups"),
        series=("0.32",),
    ),
)
"""Functions that are replaced in 0.32, which has no hook."""

RANKS = (
    Replacement(
        module="vllm.v1.engine.core",
        name="resolve_kv_cache_layout",
        reason="expects equal layouts of all ranks; a rank without attention layers supports any",
        parameters=("vllm_config", "supported_layouts", "kv_cache_specs"),
        make=_resolve_kv_cache_layout,
    ),
    *(
        Replacement(
            module=module,
            name="_project_kv_cache_groups_to_worker",
            reason="compares only names of layers; large pages are as long as a rank's layers need",
            parameters=("global_kv_cache_groups", "worker_spec"),
            make=_project_kv_cache_groups_to_worker,
            series=(series,),
        )
        for series, module in (
            ("0.32", "vllm.v1.core.kv_cache_utils"),
            ("0.33", "vllm.v1.core.kv_cache_planning"),
        )
    ),
    Replacement(
        module="vllm.v1.engine.core",
        name="get_global_kv_cache_groups",
        reason="does not tell the grouping of layers which of them share a pipeline rank",
        parameters=("vllm_config", "kv_cache_specs"),
        make=_get_global_kv_cache_groups,
        series=("0.33",),
    ),
    *(
        Replacement(
            module="vllm.v1.engine.core",
            name="get_kv_cache_configs",
            reason=(
                "the same in 0.32; in both versions, only it knows how much fits on all ranks, and "
                "it reports one rank after the other, in GiB"
            ),
            parameters=("vllm_config", "kv_cache_specs", "available_memory", *further),
            make=_get_kv_cache_configs,
            series=(series,),
        )
        for series, further in (("0.32", ()), ("0.33", ("global_kv_cache_groups",)))
    ),
)
"""Functions that assign layers to ranks, if a model is spread over a pipeline."""

HOOK = (
    Replacement(
        module="vllm.platforms",
        name="current_platform.get_kv_cache_config_builder_cls",
        reason="the official hook, which otherwise only a platform plugin could use",
        parameters=("vllm_config",),
        make=_get_kv_cache_config_builder_cls,
        series=("0.33",),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_planning",
        name="_max_memory_usage_bytes_from_groups",
        reason="counts each small page as a whole block, and does not ask the hook",
        parameters=("builder", "vllm_config", "kv_cache_groups"),
        make=_when_selected("max_memory_usage_bytes_from_groups", num_before=1),
        series=("0.33",),
    ),
)
"""The hook of 0.33, and a function that the hook does not cover."""

IN_ALL = (
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_max_concurrency_for_kv_cache_config",
        reason="counts blocks in the same way, for the capacity that vLLM reports",
        parameters=("vllm_config", "kv_cache_config"),
        make=_when_selected("max_concurrency"),
    ),
)
"""Functions that are replaced in 0.32 and 0.33."""

PLANNER = (*FUNCTIONS, *HOOK, *RANKS, *IN_ALL)
"""Applied once a configuration selects the backend."""

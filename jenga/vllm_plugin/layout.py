"""How vLLM's workers lay out the arena, and how much a request may take of it.

Most of these functions take the place of vLLM's own of the same names and signatures, or are what
`config_builder` answers vLLM's hook with; `planner_replacements` says why.
"""

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    iter_layer_specs,
)

from jenga.geometry import Geometry, PageTable, check_arena, exact_lcm
from jenga.planner import plan
from jenga.vllm_plugin.config import TOKENS_PER_PAGE
from jenga.vllm_plugin.environment import BACKEND_NAME, read_settings
from jenga.vllm_plugin.specs import (
    kinds_of_states,
    layer_names,
    model_spec,
    served_states,
    table_spec,
)
from jenga.vllm_plugin.speculation import draft_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")


@dataclass
class JengaGroupSpec(KVCacheGroupSpec):
    """A group of vLLM that is one page table of a geometry."""

    geometry: Geometry | None = None
    table_index: int = 0


@dataclass
class JengaKVCacheConfig(KVCacheConfig):
    """A configuration in which each group has its own page size and number of pages.

    `num_blocks` is the number of large pages, the null page included. Where `keeps_images_whole`,
    the tokens of an image read each other, so all of them must be computed in one step.
    Where `has_draft_layers`, what drafts has keys and values of its own.
    """

    geometry: Geometry | None = None
    keeps_images_whole: bool = False
    has_draft_layers: bool = True

    def table_of(self, layer_name: str) -> PageTable:
        """Get the page table that stores a layer."""
        return next(t for t in geometry_of(self).page_tables if layer_name in layer_names(t))

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Get the number of small pages of the layers placed by `tensor`, over the whole arena."""
        return self.num_blocks * self.table_of(tensor.layers[0]).small_pages_per_large_page

    @property
    def has_mamba_layers(self) -> bool:
        """Whether vLLM must see to one of `num_blocks` for each request: states have small pages.

        A request that finds none waits, and the padding of a CUDA graph takes the null page.
        """
        return False

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Never: the kernels read no slot beyond a request's tokens, whatever bytes it holds."""
        return False


def geometry_of(config: JengaKVCacheConfig) -> Geometry:
    """Get the geometry of a configuration that has one."""
    if config.geometry is None:
        msg = "this configuration was made without a geometry"
        raise ValueError(msg)
    return config.geometry


def groups_of_tokens(config: JengaKVCacheConfig) -> KVCacheConfig:
    """Get a configuration with only those groups whose pages hold tokens, not states."""
    groups = zip(config.kv_cache_groups, geometry_of(config).page_tables, strict=True)
    return replace(config, kv_cache_groups=[group for group, table in groups if not table.is_state])


def _geometry_of_groups(groups: list[KVCacheGroupSpec]) -> Geometry:
    first = groups[0]
    if not isinstance(first, JengaGroupSpec) or first.geometry is None:
        msg = f"expected groups made by get_kv_cache_groups, got {type(first).__name__}"
        raise TypeError(msg)
    return first.geometry


def get_kv_cache_groups(
    vllm_config: "VllmConfig", kv_cache_spec: dict[str, "KVCacheSpec"]
) -> list[KVCacheGroupSpec]:
    """Plan the geometry of a model's layers: one group per page table.

    Raises:
        ValueError: A layer's cache is of a kind the plugin cannot serve; the message names it.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        msg = "JENGA_TRITON does not support --disable-hybrid-kv-cache-manager"
        raise ValueError(msg)
    if not kv_cache_spec:
        return []
    model = model_spec(kv_cache_spec, draft_layers=draft_layers(vllm_config, kv_cache_spec))
    served = served_states(vllm_config.model_config.architecture)
    others = kinds_of_states(kv_cache_spec) - served
    if others and vllm_config.speculative_config is not None:
        msg = (
            f"{BACKEND_NAME} does not support speculative decoding with recurrent layers of kind "
            f"{' and '.join(sorted(others))}; supported are {' and '.join(sorted(served))}"
        )
        raise ValueError(msg)
    if others and vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "%s keeps states of %s layers for other requests, not of %s: prefix caching is off",
            BACKEND_NAME,
            " and ".join(sorted(served)),
            " and ".join(sorted(others)),
        )
        vllm_config.cache_config.enable_prefix_caching = False
    tokens_per_page = vllm_config.cache_config.block_size or TOKENS_PER_PAGE
    make = {"planned": plan, "lcm": exact_lcm}[read_settings(os.environ).geometry]
    geometry = make(model, tokens_per_page=tokens_per_page)
    return [
        JengaGroupSpec(
            layer_names=layer_names(table),
            kv_cache_spec=table_spec(table, kv_cache_spec),
            geometry=geometry,
            table_index=index,
        )
        for index, table in enumerate(geometry.page_tables)
    ]


def get_kv_cache_config_from_groups(
    vllm_config: "VllmConfig", kv_cache_groups: list[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """Cut as many large pages as the memory holds, or as many as the options say.

    Raises:
        ValueError: The memory does not hold one large page per page table beside the null page.
    """
    if not kv_cache_groups:
        return cut_arena(vllm_config, kv_cache_groups, 1)
    geometry = _geometry_of_groups(kv_cache_groups)
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        if available_memory == 0:
            # A throw-away arena, to measure CUDA graphs with.
            override = least_large_pages(kv_cache_groups)
        available_memory = override * geometry.large_page_bytes
    num_large_pages = check_arena(geometry, available_memory)
    return cut_arena(vllm_config, kv_cache_groups, num_large_pages)


def least_large_pages(kv_cache_groups: list[KVCacheGroupSpec]) -> int:
    """Get the large pages of the smallest arena: all that CUDA graphs are measured with.

    vLLM asks for a block per request there, hundreds of large pages, but captured requests read
    and write the null page alone.
    """
    return 1 + len(kv_cache_groups)


def cut_arena(
    vllm_config: "VllmConfig", kv_cache_groups: list[KVCacheGroupSpec], num_large_pages: int
) -> KVCacheConfig:
    """Cut the arena: every layer a strided view of one buffer.

    Raises:
        ValueError: There is not one large page per page table beside the null page.
    """
    cache_config = vllm_config.cache_config
    if not kv_cache_groups:
        return JengaKVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    geometry = _geometry_of_groups(kv_cache_groups)
    check_arena(geometry, num_large_pages * geometry.large_page_bytes)
    _log_geometry(geometry, num_large_pages, prefix_caching=cache_config.enable_prefix_caching)
    arena_bytes = num_large_pages * geometry.large_page_bytes
    tensors: list[KVCacheTensor] = []
    for table in geometry.page_tables:
        layers = table.layer_type.layers[table.layer_start : table.layer_end]
        tensors.extend(
            KVCacheTensor(
                size=arena_bytes,
                layers=[layer.name],
                layer_stride=layer.slot_bytes * table.tokens_per_page,
                block_stride=table.small_page_bytes,
                offset=offset_bytes,
            )
            for layer, offset_bytes in zip(layers, table.layer_offset_bytes, strict=True)
        )
    return JengaKVCacheConfig(
        num_blocks=num_large_pages,
        kv_cache_tensors=tensors,
        kv_cache_groups=kv_cache_groups,
        prefix_cache_retention_interval=cache_config.prefix_cache_retention_interval,
        geometry=geometry,
        keeps_images_whole=vllm_config.model_config.is_mm_prefix_lm,
        has_draft_layers=bool(
            draft_layers(vllm_config, [n for group in kv_cache_groups for n in group.layer_names])
        ),
    )


def _log_geometry(geometry: Geometry, num_large_pages: int, *, prefix_caching: bool) -> None:
    logger.info(
        "%s: %s geometry, %d large pages of %d bytes; small pages (bytes x number in a large "
        "page): %s; prefix caching %s",
        BACKEND_NAME,
        geometry.name,
        num_large_pages,
        geometry.large_page_bytes,
        ", ".join(
            f"{table.name} {table.small_page_bytes} x {table.small_pages_per_large_page}"
            for table in geometry.page_tables
        ),
        "on" if prefix_caching else "off",
    )


def pool_bytes_per_block(
    vllm_config: "VllmConfig",  # noqa: ARG001
    kv_cache_groups: list[KVCacheGroupSpec],
) -> int:
    """Get the unit in which the whole arena is counted: the large page."""
    return _geometry_of_groups(kv_cache_groups).large_page_bytes


def _pages_of_longest_request(vllm_config: "VllmConfig", group: KVCacheGroupSpec) -> int:
    """Get the most small pages of a group that one request can hold."""
    return max(
        cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
        for spec in iter_layer_specs(group.kv_cache_spec)
    )


def max_memory_usage_bytes_from_groups(
    vllm_config: "VllmConfig", kv_cache_groups: list[KVCacheGroupSpec]
) -> int:
    """Get the bytes of the large pages that one request of the greatest length needs."""
    if not kv_cache_groups:
        return 0
    geometry = _geometry_of_groups(kv_cache_groups)
    num_large_pages = sum(
        cdiv(_pages_of_longest_request(vllm_config, group), table.small_pages_per_large_page)
        for group, table in zip(kv_cache_groups, geometry.page_tables, strict=True)
    )
    return num_large_pages * geometry.large_page_bytes


def max_concurrency(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> float:
    """Get how many requests of the greatest length the arena holds, sharing large pages."""
    if not isinstance(kv_cache_config, JengaKVCacheConfig):
        msg = f"expected a JengaKVCacheConfig, got {type(kv_cache_config).__name__}"
        raise TypeError(msg)
    geometry = geometry_of(kv_cache_config)
    large_pages_per_request = sum(
        Fraction(_pages_of_longest_request(vllm_config, group), table.small_pages_per_large_page)
        for group, table in zip(kv_cache_config.kv_cache_groups, geometry.page_tables, strict=True)
    )
    return float((kv_cache_config.num_blocks - 1) / large_pages_per_request)

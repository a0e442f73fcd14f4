"""Layout of the arena in vLLM's workers, and the largest share that a request may need.

Most of these functions replace vLLM's functions of the same names and signatures, or implement
vLLM's hook in `config_builder`. `patches.planner` gives the reasons.
"""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from jenga.admission.reserve import STEP_TOKENS
from jenga.errors import InvariantError
from jenga.geometry import Geometry, PageTable, check_arena, exact_lcm
from jenga.planning.pipeline import Stage, plan_pipeline
from jenga.planning.planner import plan
from jenga.policies import Image, RequestFacts
from jenga.spec import ImageEmbedding, Layer
from jenga.tables.capacity import Capacity
from jenga.vllm_plugin.arena.ranks import image_rows, layers_of_ranks
from jenga.vllm_plugin.arena.step_cost import step_tokens
from jenga.vllm_plugin.config import TOKENS_PER_PAGE, host_bytes
from jenga.vllm_plugin.settings.environment import BACKEND_NAME, read_settings
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.settings.shared_arena import Membership, arena_share
from jenga.vllm_plugin.settings.speculation import draft_layers
from jenga.vllm_plugin.specs.image_rows import ENCODER_CACHE_PATH, IMAGE_LAYER
from jenga.vllm_plugin.specs.layer_types import (
    common_spec,
    kinds_of_states,
    layer_names,
    model_spec,
    served_states,
    table_spec,
    with_images_in_kv_pages,
    without_images,
)
from jenga.vllm_plugin.specs.replay_layout import (
    has_history,
    max_decode_tokens,
    with_histories,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")


@dataclass
class JengaGroupSpec(KVCacheGroupSpec):
    """A group of vLLM that is one page table of a geometry.

    Attributes:
        geometry: Geometry of the arena.
        table_index: Index of the page table in the geometry.
        stages: Parts of the model that the ranks of its pipeline store.
        rank: Rank whose layers the group has, possibly no layers. None means that it has those of
            all ranks.
        image_row: Embedding of an image's token, which lives in the token's slot of this group
            until keys and values are written there. None means that none does.
    """

    geometry: Geometry | None = None
    table_index: int = 0
    stages: tuple[Stage, ...] = ()
    rank: int | None = None
    image_row: Layer | None = None

    @property
    def first_layers(self) -> tuple[str, ...]:
        """Name of the group's first layer on each rank that has any."""
        shares = [stage.shares[self.table_index] for stage in self.stages]
        return tuple(share.layers[0].name for share in shares if share.layers)


@dataclass
class JengaKVCacheConfig(KVCacheConfig):
    """A configuration in which each group has its own page size and number of pages.

    `num_blocks` of vLLM's class is the number of large pages, the null page included.

    Attributes:
        geometry: Geometry of all ranks of a pipeline together. Each rank stores a part of a page.
        keeps_images_whole: Whether tokens of an image read each other, so that one step must
            compute all of them.
        has_draft_layers: Whether a draft head or model has keys and values of its own.
        num_host_large_pages: Number of large pages of host memory on each worker. 0 means none.
        data_parallel_index: Index of the engine among the data-parallel ones.
        history_query_tokens: Largest number of tokens of a decoding request in a step, if there are
            histories beside states. 0 means that there are none.
        step_tokens: Fixed cost of a step, in tokens of a prompt.
        page_tokens: Number of tokens in a page by the options, also if no layer stores tokens.
        shared_arena: Membership in an arena that several engines share. None means that the arena
            is this engine's own.
        traces_endpoint: URL to which spans of requests are sent. None means that there are none.
    """

    geometry: Geometry | None = None
    keeps_images_whole: bool = False
    has_draft_layers: bool = True
    num_host_large_pages: int = 0
    data_parallel_index: int = 0
    history_query_tokens: int = 0
    step_tokens: float = STEP_TOKENS
    page_tokens: int = TOKENS_PER_PAGE
    shared_arena: Membership | None = None
    traces_endpoint: str | None = None

    def table_of(self, layer_name: str) -> PageTable:
        """Get the page table that stores a layer."""
        return next(t for t in geometry_of(self).page_tables if layer_name in layer_names(t))

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Get the number of small pages in the whole arena, for the layers of a tensor."""
        return self.num_blocks * self.table_of(tensor.layers[0]).small_pages_per_large_page

    @property
    def has_mamba_layers(self) -> bool:
        """Whether vLLM must provide one of `num_blocks` for each request's state.

        It need not, because states have small pages. A request that gets none waits, and padding in
        a CUDA graph uses the null page.
        """
        return False

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new pages must be cleared: never, as kernels read only slots of tokens."""
        return False


def geometry_of(config: JengaKVCacheConfig) -> Geometry:
    """Get the geometry of a configuration.

    Raises:
        ValueError: The configuration has none.
    """
    if config.geometry is None:
        msg = "this configuration was made without a geometry"
        raise ValueError(msg)
    return config.geometry


def group_tables(geometry: Geometry) -> tuple[PageTable, ...]:
    """Get the page tables that are groups of vLLM: all but that of image embeddings, the last."""
    return tuple(
        table for table in geometry.page_tables if not isinstance(table.layer_type, ImageEmbedding)
    )


def image_table_index(geometry: Geometry) -> int | None:
    """Get the index of the page table of image embeddings, or None."""
    last = len(geometry.page_tables) - 1
    is_there = isinstance(geometry.page_tables[last].layer_type, ImageEmbedding)
    return last if is_there else None


def host_table_index(geometry: Geometry) -> int | None:
    """Get the index of the page table in whose slots image embeddings live, or None."""
    return next(
        (
            index
            for index, table in enumerate(geometry.page_tables)
            if table.layer_type.holds_images
        ),
        None,
    )


def first_layers(config: JengaKVCacheConfig) -> list[tuple[str, ...]]:
    """Get for each page table its first layer on each pipeline rank that has any."""
    return [
        group.first_layers for group in config.kv_cache_groups if isinstance(group, JengaGroupSpec)
    ]


def groups_of_tokens(config: JengaKVCacheConfig) -> KVCacheConfig:
    """Get the configuration without groups of states, whose pages do not hold tokens."""
    groups = zip(config.kv_cache_groups, group_tables(geometry_of(config)), strict=True)
    return replace(config, kv_cache_groups=[group for group, table in groups if not table.is_state])


def _first_group(groups: Sequence[KVCacheGroupSpec]) -> tuple[JengaGroupSpec, Geometry]:
    first = groups[0]
    if not isinstance(first, JengaGroupSpec) or first.geometry is None:
        msg = f"expected groups made by get_kv_cache_groups, got {type(first).__name__}"
        raise TypeError(msg)
    return first, first.geometry


def stage_of(groups: Sequence[KVCacheGroupSpec]) -> Stage:
    """Get the stage of the pipeline rank that has these groups.

    Raises:
        TypeError: The groups are of several ranks, or not of this package.
    """
    first, _ = _first_group(groups)
    if first.rank is None and len(first.stages) > 1:
        msg = f"expected the groups of one rank, got those of {len(first.stages)}"
        raise TypeError(msg)
    return first.stages[first.rank or 0]


def project_groups(
    groups: Sequence[KVCacheGroupSpec], worker_spec: Mapping[str, "KVCacheSpec"]
) -> list[KVCacheGroupSpec]:
    """Reduce the groups of a model to the layers of one worker.

    Args:
        groups: Groups made by `get_kv_cache_groups`.
        worker_spec: vLLM's cache spec of each layer of the worker, by layer name.

    Raises:
        InvariantError: The worker's layers are not those of one rank.
    """
    if not groups:
        return []
    stages = _first_group(groups)[0].stages
    names = worker_spec.keys() - {IMAGE_LAYER}
    ranks = [
        rank for rank, stage in enumerate(stages) if stage.layer_names - {IMAGE_LAYER} == names
    ]
    if len(ranks) != 1:
        msg = f"expected the layers of one of {len(stages)} ranks, got {sorted(worker_spec)}"
        raise InvariantError(msg)
    projected: list[KVCacheGroupSpec] = []
    # Image embeddings have a share, the last one, and no group.
    for group, share in zip(groups, stages[ranks[0]].shares, strict=False):
        names = [layer.name for layer in share.layers]
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs) and names:
            # A group without layers keeps its spec, since its page table is as long on every rank.
            spec = common_spec({name: spec.kv_cache_specs[name] for name in names})
        cut = copy(group)
        cut.layer_names, cut.kv_cache_spec = names, spec
        if isinstance(cut, JengaGroupSpec):
            cut.rank = ranks[0]
        projected.append(cut)
    return projected


def _page_tokens(vllm_config: "VllmConfig") -> int:
    """Get the number of tokens in a page that the options ask for."""
    return vllm_config.cache_config.block_size or TOKENS_PER_PAGE


def get_kv_cache_groups(
    vllm_config: "VllmConfig", kv_cache_spec: dict[str, "KVCacheSpec"]
) -> list[KVCacheGroupSpec]:
    """Plan the geometry of a model's layers, and make one group per page table.

    Raises:
        ValueError: The plugin cannot serve a layer's kind of cache. The message names the layer.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise Refusal.ONE_CACHE_GROUP.error()
    if not kv_cache_spec:
        return []
    settings = read_settings(os.environ)
    kv_cache_spec = with_histories(vllm_config, {**kv_cache_spec, **image_rows()})
    model = model_spec(kv_cache_spec, draft_layers=draft_layers(vllm_config, kv_cache_spec))
    served = served_states(vllm_config.model_config.architecture)
    others = kinds_of_states(kv_cache_spec) - served
    if others and vllm_config.speculative_config is not None:
        msg = f"{' and '.join(sorted(others))}, where {' and '.join(sorted(served))} are ours"
        raise Refusal.DRAFT_STATES_OF_TARGET.error(msg)
    if others and vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "%s can cache states of %s layers, but not of %s layers: prefix caching is off",
            BACKEND_NAME,
            " and ".join(sorted(served)),
            " and ".join(sorted(others)),
        )
        vllm_config.cache_config.enable_prefix_caching = False
        if not settings.embeddings_in_kv_pages:
            model = without_images(model)
    images = [each for each in model.layer_types if isinstance(each, ImageEmbedding)]
    image_row = None
    if images and settings.embeddings_in_kv_pages:
        longest_tokens = vllm_config.model_config.max_model_len
        model = with_images_in_kv_pages(model, longest_tokens)
        image_row = images[0].layers[0]
    if images:
        vllm_config.ec_manager_config.encoder_cache_manager_cls = ENCODER_CACHE_PATH
    tokens_per_page = _page_tokens(vllm_config)
    make = {"planned": plan, "lcm": exact_lcm}[settings.geometry]
    share = arena_share(vllm_config)
    if share is not None:
        # All engines of a shared arena have large pages of one size.
        make = partial(plan, large_page_bytes=share.large_page_bytes)
    pipeline = plan_pipeline(
        model,
        layers_of_ranks(kv_cache_spec),
        lambda model: make(model, tokens_per_page=tokens_per_page),
    )
    return [
        JengaGroupSpec(
            layer_names=layer_names(table),
            kv_cache_spec=table_spec(table, kv_cache_spec),
            geometry=pipeline.geometry,
            table_index=index,
            stages=pipeline.stages,
            image_row=image_row if table.layer_type.holds_images else None,
        )
        for index, table in enumerate(group_tables(pipeline.geometry))
    ]


def get_kv_cache_config_from_groups(
    vllm_config: "VllmConfig", kv_cache_groups: list[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """Cut as many large pages as the memory holds, or as many as the options ask for.

    Raises:
        ValueError: The memory does not hold the null page and one large page per page table.
    """
    if not kv_cache_groups:
        return cut_arena(vllm_config, kv_cache_groups, 1)
    stage = stage_of(kv_cache_groups)
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        if available_memory == 0:
            # A temporary arena, only to measure CUDA graphs.
            override = least_large_pages(kv_cache_groups)
        available_memory = override * stage.large_page_bytes
    num_large_pages = check_arena(_geometry_of_rank(kv_cache_groups), available_memory)
    return cut_arena(vllm_config, kv_cache_groups, num_large_pages)


def _geometry_of_rank(groups: Sequence[KVCacheGroupSpec]) -> Geometry:
    """Get the geometry with the large page size of the rank that has these groups."""
    _, geometry = _first_group(groups)
    return replace(geometry, large_page_bytes=stage_of(groups).large_page_bytes)


def least_large_pages(kv_cache_groups: list[KVCacheGroupSpec]) -> int:
    """Get the number of large pages of the smallest arena. It suffices to measure CUDA graphs.

    vLLM asks for a block per request there, so hundreds of large pages. Captured requests read and
    write only the null page.
    """
    _, geometry = _first_group(kv_cache_groups)
    return 1 + len(geometry.page_tables)


def cut_arena(
    vllm_config: "VllmConfig", kv_cache_groups: list[KVCacheGroupSpec], num_large_pages: int
) -> KVCacheConfig:
    """Cut the arena. Every layer gets a strided view of one buffer.

    Raises:
        ValueError: There are fewer large pages than the null page and one per page table.
    """
    cache_config = vllm_config.cache_config
    if not kv_cache_groups:
        return JengaKVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    first, geometry = _first_group(kv_cache_groups)
    stage = stage_of(kv_cache_groups)
    arena_bytes = num_large_pages * stage.large_page_bytes
    check_arena(_geometry_of_rank(kv_cache_groups), arena_bytes)
    if len(first.stages) == 1:
        _log_geometry(geometry, num_large_pages, prefix_caching=cache_config.enable_prefix_caching)
    tensors = [
        KVCacheTensor(
            size=arena_bytes,
            layers=[layer.name],
            layer_stride=layer.slot_bytes * table.tokens_per_page,
            block_stride=share.small_page_bytes,
            offset=offset_bytes,
        )
        for table, share in zip(group_tables(geometry), stage.shares, strict=False)
        for layer, offset_bytes in zip(share.layers, share.layer_offset_bytes, strict=True)
    ]
    return JengaKVCacheConfig(
        num_blocks=num_large_pages,
        kv_cache_tensors=tensors,
        kv_cache_groups=kv_cache_groups,
        prefix_cache_retention_interval=cache_config.prefix_cache_retention_interval,
        geometry=geometry,
        keeps_images_whole=vllm_config.model_config.is_mm_prefix_lm,
        has_draft_layers=bool(
            draft_layers(
                vllm_config, [name for table in geometry.page_tables for name in layer_names(table)]
            )
        ),
        num_host_large_pages=_num_host_large_pages(vllm_config, first),
        data_parallel_index=vllm_config.parallel_config.data_parallel_index,
        history_query_tokens=max_decode_tokens(vllm_config) if _has_history(kv_cache_groups) else 0,
        step_tokens=step_tokens(vllm_config),
        page_tokens=_page_tokens(vllm_config),
        traces_endpoint=vllm_config.observability_config.otlp_traces_endpoint,
    )


def _has_history(kv_cache_groups: Sequence[KVCacheGroupSpec]) -> bool:
    return any(
        has_history(spec)
        for group in kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    )


def _num_host_large_pages(vllm_config: "VllmConfig", group: JengaGroupSpec) -> int:
    """Get the number of large pages in host memory of each worker. It is equal on all ranks.

    Raises:
        ValueError: Prefix caching is off, so that nothing would use them, or there are too few.
    """
    total_bytes = host_bytes(vllm_config)
    if not total_bytes:
        return 0
    if not vllm_config.cache_config.enable_prefix_caching:
        raise Refusal.OFFLOADING_WITHOUT_CACHING.error()
    bytes_of_ranks = sum(stage.large_page_bytes for stage in group.stages)
    num_bytes = bytes_of_ranks * vllm_config.parallel_config.tensor_parallel_size
    num_large_pages, least = total_bytes // num_bytes, 1 + len(group.stages[0].shares)
    if num_large_pages < least:
        msg = (
            f"{total_bytes / 2**30:.3g} GiB, where {least} large pages on each rank take "
            f"{least * num_bytes / 2**30:.3g}"
        )
        raise Refusal.OFFLOADING_SIZE.error(msg)
    return num_large_pages


def host_memory_bytes(config: JengaKVCacheConfig) -> int:
    """Get the size in bytes of the host memory of the worker with this configuration."""
    if not config.num_host_large_pages:
        return 0
    return config.num_host_large_pages * stage_of(config.kv_cache_groups).large_page_bytes


def _log_geometry(
    geometry: Geometry, num_large_pages: int, *, prefix_caching: bool, num_ranks: int = 1
) -> None:
    logger.info(
        "%s: %s geometry%s, %d large pages of %d bytes; small pages (bytes x number in a large "
        "page): %s; prefix caching %s",
        BACKEND_NAME,
        geometry.name,
        f" of {num_ranks} pipeline ranks together" if num_ranks > 1 else "",
        num_large_pages,
        geometry.large_page_bytes,
        ", ".join(
            f"{table.name} {table.small_page_bytes} x {table.small_pages_per_large_page}"
            for table in geometry.page_tables
        ),
        "on" if prefix_caching else "off",
    )


def report_ranks(
    vllm_config: "VllmConfig", configs: Sequence[KVCacheConfig], available_memory: Sequence[int]
) -> None:
    """Log how an arena is spread over the ranks of a pipeline. With one rank, log nothing.

    Args:
        vllm_config: Configuration of the engine.
        configs: Cache configuration of each worker. All have the same number of large pages.
        available_memory: Memory of each worker for its arena, in bytes.
    """
    groups, num_large_pages = configs[0].kv_cache_groups, configs[0].num_blocks
    if not groups or len(_first_group(groups)[0].stages) == 1:
        return
    first, geometry = _first_group(groups)
    left_bytes: dict[int, int] = {}  # pipeline rank -> least of its workers
    for config, num_bytes in zip(configs, available_memory, strict=True):
        rank = _first_group(config.kv_cache_groups)[0].rank or 0
        left = num_bytes - num_large_pages * stage_of(config.kv_cache_groups).large_page_bytes
        left_bytes[rank] = min(left, left_bytes.get(rank, left))
    _log_geometry(
        geometry,
        num_large_pages,
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
        num_ranks=len(first.stages),
    )
    for rank, stage in enumerate(first.stages):
        logger.info(
            "%s: pipeline rank %d: large pages of %d bytes; small pages (layers, bytes, bytes of "
            "padding): %s; %d bytes are left beside the arena",
            BACKEND_NAME,
            rank,
            stage.large_page_bytes,
            ", ".join(
                f"{table.name} {len(share.layers)}, {share.small_page_bytes}, {share.padding_bytes}"
                for table, share in zip(geometry.page_tables, stage.shares, strict=True)
            ),
            left_bytes[rank],
        )


def pool_bytes_per_block(
    vllm_config: "VllmConfig",  # noqa: ARG001
    kv_cache_groups: list[KVCacheGroupSpec],
) -> int:
    """Get the size in bytes of the unit that the arena is counted in: the large page."""
    return stage_of(kv_cache_groups).large_page_bytes


def _pages_of_longest_request(
    vllm_config: "VllmConfig", groups: Sequence[KVCacheGroupSpec], geometry: Geometry
) -> list[int]:
    """Get the largest number of small pages of each page table that one request can hold.

    It is vLLM's count, or the count of an admission if that is larger. vLLM assumes that a chunk of
    local attention begins with a page, and leaves out the slots of drafts.
    """
    model_tokens = vllm_config.model_config.max_model_len
    step_tokens = vllm_config.max_in_flight_tokens + vllm_config.num_lookahead_tokens
    policies = [table.policy() for table in geometry.page_tables]
    chunk_tokens = min(model_tokens, step_tokens)
    admitted = Capacity(geometry, policies, 0).peak_pages(
        model_tokens,
        chunk_tokens=chunk_tokens,
        facts=_facts_of_longest_request(geometry, model_tokens, chunk_tokens),
    )
    counted = [
        max(
            cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
            for spec in iter_layer_specs(group.kv_cache_spec)
        )
        for group in groups
    ]
    counted += [0] * (len(admitted) - len(counted))  # of image embeddings
    return [max(pages) for pages in zip(counted, admitted, strict=True)]


def _facts_of_longest_request(
    geometry: Geometry, model_tokens: int, chunk_tokens: int
) -> RequestFacts:
    """Get the facts of a prompt of the largest length that is full of the largest images.

    It has only as many images as its first step can begin. Later steps begin no more.
    """
    index = image_table_index(geometry)
    if index is None:
        return RequestFacts(prompt_tokens=model_tokens)
    layer_type = geometry.page_tables[index].layer_type
    largest = layer_type.typical_tokens if isinstance(layer_type, ImageEmbedding) else 1
    num_tokens = min(largest, model_tokens)
    num_images = min(cdiv(model_tokens, num_tokens), chunk_tokens // num_tokens + 2)
    return RequestFacts(
        prompt_tokens=model_tokens,
        images=tuple(
            Image(start_token=number * num_tokens, num_tokens=num_tokens)
            for number in range(num_images)
        ),
    )


def large_pages_of_longest_request(
    vllm_config: "VllmConfig", groups: Sequence[KVCacheGroupSpec]
) -> int:
    """Get the largest number of large pages that one request can hold, without the null page."""
    _, geometry = _first_group(groups)
    pages = _pages_of_longest_request(vllm_config, groups, geometry)
    return sum(
        cdiv(num_pages, table.small_pages_per_large_page)
        for num_pages, table in zip(pages, geometry.page_tables, strict=True)
    )


def max_memory_usage_bytes_from_groups(
    vllm_config: "VllmConfig", kv_cache_groups: list[KVCacheGroupSpec]
) -> int:
    """Get the size in bytes of the large pages that one request of the largest length needs."""
    if not kv_cache_groups:
        return 0
    num_large_pages = large_pages_of_longest_request(vllm_config, kv_cache_groups)
    return num_large_pages * stage_of(kv_cache_groups).large_page_bytes


def max_concurrency(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> float:
    """Get the number of requests of the largest length that the arena holds.

    It may be fractional, because requests share large pages.

    Raises:
        TypeError: The configuration was not made by this package.
    """
    if not isinstance(kv_cache_config, JengaKVCacheConfig):
        msg = f"expected a JengaKVCacheConfig, got {type(kv_cache_config).__name__}"
        raise TypeError(msg)
    geometry = geometry_of(kv_cache_config)
    pages = _pages_of_longest_request(vllm_config, kv_cache_config.kv_cache_groups, geometry)
    large_pages_per_request = sum(
        Fraction(num_pages, table.small_pages_per_large_page)
        for num_pages, table in zip(pages, geometry.page_tables, strict=True)
    )
    return float((kv_cache_config.num_blocks - 1) / large_pages_per_request)

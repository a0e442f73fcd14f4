"""Layers of one of our models as vLLM describes them, and the arena that vLLM's planner cuts."""

import importlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Layer,
    LayerType,
    ModelSpec,
    SlidingWindow,
    State,
    check_positive,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

BLOCK_TOKENS = 16
"""Tokens of a block in vLLM on a GPU. Its attention kernels ask for multiples of it."""

LAYER_OUTERMOST = "LBNHC"
"""Layout that vLLM's attention backends prefer."""

BLOCK_OUTERMOST = "BLHNC"
"""Layout that vLLM wants for pages of mixed sizes, which lie side by side in one block."""

NEVER = 1 << 24
"""A number of tokens that no request reaches."""

_MAMBA2_DIMENSIONS = 3
"""Dimensions of a Mamba-2 state: heads, head width, state size. Mamba-1: channels, state size."""

_VALUE_BYTES = 16
"""Bytes of the values of a token: the least that kernels take. All others are declared as keys."""

_LEAST_BLOCKS = 2
"""Fewest blocks of an arena: the null block and another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockOptions:
    """Options of vLLM that decide what its manager keeps and finds.

    Attributes:
        retention_tokens: Distance in tokens between the windows and states that are kept within a
            prompt. It is a multiple of the block size. 0 keeps only those at the prompt's end and
            at branches. None keeps all. vLLM's `--prefix-cache-retention-interval`.
        match_tokens: Tokens of a prefix hash. A prefix can be found at multiples of it. None for
            the tokens of a block. vLLM's `--prefix-match-unit`.
        is_hybrid: Whether windows and states have blocks of their own. False for vLLM's
            `--disable-hybrid-kv-cache-manager`.
    """

    retention_tokens: int | None = 0
    match_tokens: int | None = None
    is_hybrid: bool = True

    def __post_init__(self) -> None:
        if self.retention_tokens is not None and self.retention_tokens < 0:
            msg = f"retention_tokens must be at least 0, got {self.retention_tokens}"
            raise ValueError(msg)
        if self.match_tokens is not None:
            check_positive("options of vLLM", "match_tokens", self.match_tokens)

    @property
    def text(self) -> str:
        """Options that differ from vLLM's defaults, in the format of `read_stock_options`."""
        parts: list[str] = []
        if self.retention_tokens is None:
            parts.append(f"retention={_DENSE}")
        elif self.retention_tokens:
            parts.append(f"retention={self.retention_tokens}")
        if self.match_tokens is not None:
            parts.append(f"match={self.match_tokens}")
        if not self.is_hybrid:
            parts.append(f"hybrid={_OFF}")
        return ",".join(parts)


DEFAULT_STOCK = StockOptions()
"""vLLM's defaults."""

_DEFAULT, _DENSE, _OFF = "default", "dense", "off"


def read_stock_options(text: str) -> StockOptions:
    """Read options of vLLM from text such as "retention=8192,match=16", "hybrid=off" or "default".

    Raises:
        ValueError: The text has an unknown option, or a value that the option does not take.
    """
    fields: dict[str, Any] = {}
    for part in text.split(",") if text != _DEFAULT else ():
        name, _, value = part.partition("=")
        match name, value:
            case "retention", "dense":
                fields["retention_tokens"] = None
            case (("retention" | "match"), _) if value.isascii() and value.isdecimal():
                fields[f"{name}_tokens"] = int(value)
            case "hybrid", "off":
                fields["is_hybrid"] = False
            case _:
                msg = (
                    f"options of vLLM must be {_DEFAULT}, or of retention={_DENSE}, "
                    f"retention=TOKENS, match=TOKENS and hybrid={_OFF}, got {part!r}"
                )
                raise ValueError(msg)
    return StockOptions(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPlan:
    """An arena as vLLM cuts it.

    Attributes:
        vllm_config: vLLM's configuration, with the planner's changes.
        kv_cache_config: Configuration for vLLM's manager.
        block_bytes: Bytes of one block in all its layers.
        group_layers: Number of layers of each group.
        scheduler_tokens: Number of tokens in whose multiples vLLM's scheduler works.
        hash_tokens: Tokens between two prefix hashes.
    """

    vllm_config: Any
    kv_cache_config: "KVCacheConfig"
    block_bytes: int
    group_layers: tuple[int, ...]
    scheduler_tokens: int
    hash_tokens: int


def stock_planner() -> Any:  # noqa: ANN401 (a module of vLLM)
    """Return the module of vLLM's planner. vLLM 0.33 has moved it."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def plan_stock(
    model: ModelSpec,
    arena_bytes: int,
    *,
    prefix_caching: bool,
    options: StockOptions = DEFAULT_STOCK,
) -> StockPlan:
    """Cut an arena with vLLM's planner.

    Args:
        model: Model with the layers.
        arena_bytes: Bytes of all blocks.
        prefix_caching: Whether blocks are kept for later requests.
        options: Options of vLLM.

    Raises:
        ValueError: The planner refuses the layers or an option, or the arena does not hold two
            blocks.
    """
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        resolve_kv_cache_block_sizes,
    )

    planner = stock_planner()
    config = VllmConfig()
    cache_config = config.cache_config
    cache_config.enable_prefix_caching = prefix_caching
    cache_config.block_size = attention_block_tokens(model)
    cache_config.mamba_cache_mode = "align" if prefix_caching else "none"
    cache_config.prefix_cache_retention_interval = options.retention_tokens
    cache_config.prefix_match_unit = options.match_tokens
    config.scheduler_config.disable_hybrid_kv_cache_manager = not options.is_hybrid
    layer_specs = specs(model, prefix_caching=prefix_caching)
    refusals: list[str] = []
    for layout in layouts(model):
        cache_config.kv_cache_layout = layout
        try:
            groups = planner.get_kv_cache_groups(config, layer_specs)
            planned = planner.get_kv_cache_config_from_groups(config, groups, arena_bytes)
        except (NotImplementedError, ValueError, AssertionError) as error:
            refusals.append(f"{layout}: {error}")
            continue
        break
    else:
        raise ValueError("; ".join(refusals))
    if planned.num_blocks < _LEAST_BLOCKS:
        msg = f"arena_bytes must hold {_LEAST_BLOCKS} blocks, got {arena_bytes}"
        raise ValueError(msg)
    scheduled = generate_scheduler_kv_cache_config([planned])
    block_tokens = [group.kv_cache_spec.block_size for group in scheduled.kv_cache_groups]
    scheduler_tokens, hash_tokens = math.lcm(*block_tokens), 1
    if prefix_caching:
        if len(block_tokens) == 1:
            cache_config.block_size = block_tokens[0]
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(scheduled, config)
    return StockPlan(
        vllm_config=config,
        kv_cache_config=scheduled,
        block_bytes=planned.kv_cache_tensors[0].size // planned.num_blocks,
        group_layers=tuple(len(group.layer_names) for group in groups),
        scheduler_tokens=scheduler_tokens,
        hash_tokens=hash_tokens,
    )


def layouts(model: ModelSpec) -> tuple[str, str]:
    """Return the layouts to try, in order.

    Compressed keys are declared to be block-outermost, as DeepSeek-V4's are.
    """
    is_compressed = any(each.tokens_per_slot > 1 for each in model.layer_types)
    if is_compressed:
        return BLOCK_OUTERMOST, LAYER_OUTERMOST
    return LAYER_OUTERMOST, BLOCK_OUTERMOST


def _stored(model: ModelSpec) -> list[tuple[LayerType, Layer]]:
    return [
        (layer_type, layer)
        for layer_type in model.layer_types
        if not layer_type.is_consumed
        for layer in layer_type.layers
    ]


def attention_block_tokens(model: ModelSpec) -> int:
    """Return the tokens of an attention block: enough that its page is no smaller than a state.

    Source: vLLM 0.32, `Platform._align_hybrid_block_size`.
    """
    stored = _stored(model)
    state_bytes = max((one.slot_bytes for kind, one in stored if kind.is_state), default=0)
    token_bytes = max((one.slot_bytes for kind, one in stored if not kind.is_state), default=0)
    if not state_bytes or not token_bytes:
        return BLOCK_TOKENS
    return BLOCK_TOKENS * -(-state_bytes // (BLOCK_TOKENS * token_bytes))


def layer_name(layer_type: LayerType, layer: Layer) -> str:
    """Return the name of a layer that vLLM is given."""
    return f"{layer_type.name}.{layer.name}"


def specs(model: ModelSpec, *, prefix_caching: bool) -> "dict[str, KVCacheSpec]":
    """Describe each layer by a cache spec of vLLM."""
    stored = _stored(model)
    block_tokens = attention_block_tokens(model)
    token_bytes = max((one.slot_bytes for kind, one in stored if not kind.is_state), default=0)
    padded_bytes = block_tokens * token_bytes or None
    return {
        layer_name(layer_type, layer): (
            _state_spec(layer_type, layer, block_tokens, padded_bytes, caching=prefix_caching)
            if isinstance(layer_type, State)
            else _spec(layer_type, layer, block_tokens)
        )
        for layer_type, layer in stored
    }


def _state_spec(
    layer_type: State, layer: Layer, block_tokens: int, padded_bytes: int | None, *, caching: bool
) -> "KVCacheSpec":
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    recurrent = next((part for part in layer.parts if part.name == "recurrent"), None)
    is_mamba2 = recurrent is not None and len(recurrent.shape) == _MAMBA2_DIMENSIONS
    return MambaSpec(
        block_size=block_tokens if caching else NEVER,
        shapes=((layer.slot_bytes,),),
        dtypes=(torch.int8,),
        page_size_padded=padded_bytes,
        mamba_cache_mode="align" if caching else "none",
        num_speculative_blocks=layer_type.draft_tokens,
        num_prefill_checkpoint_blocks=int(caching and is_mamba2),
        prefill_checkpoint_alignment=1 if caching and is_mamba2 else None,
    )


def _spec(layer_type: LayerType, layer: Layer, block_tokens: int) -> "KVCacheSpec":
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )

    # Heads, their size and their dtype matter only through the bytes of a token.
    shape: dict[str, Any] = {
        "block_size": layer_type.tokens_per_page or block_tokens,
        "num_kv_heads": 1,
        "head_size": layer.slot_bytes // 2,
        "dtype": torch.int8,
    }
    match layer_type:
        case SlidingWindow(window_tokens=window_tokens):
            return SlidingWindowSpec(**shape, sliding_window=window_tokens)
        case ChunkedLocal(chunk_tokens=chunk_tokens):
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk_tokens)
        case CrossAttention():
            return CrossAttentionSpec(**shape)
        case FullAttention(tokens_per_slot=tokens_per_slot):
            return FullAttentionSpec(**shape, tokens_per_state=tokens_per_slot)
        case _:
            return FullAttentionSpec(**shape)


def attention_specs(model: ModelSpec) -> "dict[str, KVCacheSpec]":
    """Describe each layer by a cache spec as its model gives it, before vLLM pads any page.

    Raises:
        ValueError: vLLM cannot describe a layer.
    """
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    found: dict[str, KVCacheSpec] = {}
    for layer_type, layer in _stored(model):
        if isinstance(layer_type, State):
            parts = layer.parts
            found[layer_name(layer_type, layer)] = MambaSpec(
                block_size=NEVER,
                shapes=tuple(each.shape for each in parts) or ((layer.slot_bytes,),),
                dtypes=tuple(getattr(torch, each.dtype) for each in parts) or (torch.int8,),
                num_speculative_blocks=layer_type.draft_tokens,
            )
            continue
        spec: Any = _spec(layer_type, layer, BLOCK_TOKENS)
        found[layer_name(layer_type, layer)] = replace(
            spec, head_size=layer.slot_bytes - _VALUE_BYTES, head_size_v=_VALUE_BYTES
        )
    return found

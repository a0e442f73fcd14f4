"""The arena of vLLM's own KVCacheManager, for the layers of one of our models."""

import math
from typing import TYPE_CHECKING, Any

from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    Layer,
    LayerType,
    ModelSpec,
    SlidingWindow,
    State,
)
from perf.waste_replay import CHUNK_TOKENS, Bytes, Need, Request, encoder_tokens

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request as StockRequest

BLOCK_TOKENS = 16
"""Of vLLM on a GPU, and the multiple its attention kernels ask for."""

LAYER_OUTERMOST = "LBNHC"
"""What vLLM's attention backends prefer."""

BLOCK_OUTERMOST = "BLHNC"
"""What vLLM wants for pages of mixed sizes, side by side in one block."""

NEVER = 1 << 24
"""A length that no request reaches."""


class StockArena:
    """An arena under vLLM's manager, prefix caching off, cut by vLLM's planner.

    Blocks whose content is only cached count as free either way; off, a state takes one block.
    """

    def __init__(self, model: ModelSpec, arena_bytes: int) -> None:
        """Plan.

        Raises:
            ValueError: vLLM's planner refuses the layers, or the arena holds no block.
        """
        from vllm.config import VllmConfig
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_kv_cache_config_from_groups,
            get_kv_cache_groups,
        )

        self._need = Need(model)
        self._encoder_tokens = 0
        if any(isinstance(each, CrossAttention) for each in model.layer_types):
            self._encoder_tokens = encoder_tokens(model)
        config = VllmConfig()
        refusals: list[str] = []
        for layout in layouts(model):
            config.cache_config.kv_cache_layout = layout
            try:
                groups = get_kv_cache_groups(config, specs(model))
                planned = get_kv_cache_config_from_groups(config, groups, arena_bytes)
            except (NotImplementedError, ValueError, AssertionError) as error:
                refusals.append(f"{layout}: {error}")
                continue
            break
        else:
            raise ValueError("; ".join(refusals))
        if planned.num_blocks < 2:
            msg = f"arena_bytes must hold two blocks, got {arena_bytes}"
            raise ValueError(msg)
        self.block_bytes = planned.kv_cache_tensors[0].size // planned.num_blocks
        self.group_layers = [len(group.layer_names) for group in groups]
        self._num_blocks = planned.num_blocks
        scheduled = generate_scheduler_kv_cache_config([planned])
        block_sizes = [group.kv_cache_spec.block_size for group in scheduled.kv_cache_groups]
        self._manager = KVCacheManager(
            scheduled,
            max_model_len=NEVER,
            max_in_flight_tokens=CHUNK_TOKENS,
            scheduler_block_size=math.lcm(*block_sizes),
            hash_block_size=1,
            enable_caching=False,
        )
        self._requests: dict[str, StockRequest] = {}

    def new_step(self) -> None:
        """See `Arena`."""
        self._manager.new_step_starts()

    def grow(self, request: Request, num_tokens: int, *, is_new: bool) -> bool:
        """See `Arena`."""
        stock = self._stock_request(request) if is_new else self._requests[request.name]
        stock.num_computed_tokens = request.num_processed_tokens
        blocks = self._manager.allocate_slots(
            stock,
            num_tokens - request.num_processed_tokens,
            num_encoder_tokens=self._encoder_tokens if is_new else 0,
            full_sequence_must_fit=is_new,
        )
        if blocks is None:
            return False
        self._requests[request.name] = stock
        return True

    def _stock_request(self, request: Request) -> "StockRequest":
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as StockRequest

        prompt = [0] * request.facts.prompt_tokens
        return StockRequest(request.name, prompt, SamplingParams(max_tokens=1), None)

    def free(self, request: Request) -> None:
        """See `Arena`."""
        self._manager.free(self._requests.pop(request.name))

    def held_bytes(self, requests: list[Request]) -> Bytes:
        """What the running requests hold, in whole blocks; what is not used counts as padding."""
        num_free = self._manager.block_pool.get_num_free_blocks()
        held = (self._num_blocks - 1 - num_free) * self.block_bytes
        used = sum(self._need.of(request) for request in requests)
        return Bytes(used=used, padding=held - used)


def layouts(model: ModelSpec) -> tuple[str, str]:
    """Layouts to try; compressed keys are declared to be block-outermost, as DeepSeek-V4's are."""
    is_compressed = any(
        isinstance(each, FullAttention) and each.tokens_per_slot > 1 for each in model.layer_types
    )
    if is_compressed:
        return BLOCK_OUTERMOST, LAYER_OUTERMOST
    return LAYER_OUTERMOST, BLOCK_OUTERMOST


def specs(model: ModelSpec) -> "dict[str, KVCacheSpec]":
    """Describe each layer in vLLM's words.

    vLLM knows no token budgets: such layers keep every token. It keeps image embeddings elsewhere.
    """
    stored = [
        (layer_type, layer)
        for layer_type in model.layer_types
        if not isinstance(layer_type, ImageEmbedding)
        for layer in layer_type.layers
    ]
    state_bytes = max(
        (one.slot_bytes for kind, one in stored if isinstance(kind, State)), default=0
    )
    token_bytes = max(
        (one.slot_bytes for kind, one in stored if not isinstance(kind, State)), default=0
    )
    block_tokens, padded_bytes = BLOCK_TOKENS, None
    if state_bytes and token_bytes:
        # vLLM 0.32, `Platform._align_hybrid_block_size`: an attention page no smaller than a state.
        block_tokens *= -(-state_bytes // (BLOCK_TOKENS * token_bytes))
        padded_bytes = block_tokens * token_bytes
    return {
        f"{layer_type.name}.{layer.name}": _spec(layer_type, layer, block_tokens, padded_bytes)
        for layer_type, layer in stored
    }


def _spec(
    layer_type: LayerType, layer: Layer, block_tokens: int, padded_state_bytes: int | None
) -> "KVCacheSpec":
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    if isinstance(layer_type, State):
        return MambaSpec(
            block_size=NEVER,
            shapes=((layer.slot_bytes,),),
            dtypes=(torch.int8,),
            page_size_padded=padded_state_bytes,
        )
    # Heads, their size and their dtype enter only through the bytes of a token.
    shape: dict[str, Any] = {
        "block_size": getattr(layer_type, "tokens_per_page", None) or block_tokens,
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

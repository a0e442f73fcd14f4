"""Our manager and vLLM's KVCacheManager behind the same interface, for `bench_manager`."""

from typing import Any

from jenga.geometry import Geometry
from jenga.manager import Manager
from jenga.sim.arenas.vllm_plan import stock_planner
from jenga.spec import ChunkedLocal, FullAttention, ModelSpec, SlidingWindow, State
from jenga.tables.request import PrefixHit

PREFIX_TOKENS = 32768
"""Length of a long request's prefix, in tokens."""

HASH_TOKENS = 16


def hashes_of(seed: int, num_tokens: int) -> list[bytes]:
    return [f"{seed:08}{i:024}".encode() for i in range(num_tokens // HASH_TOKENS)]


class Ours:
    """`jenga.manager.Manager`, called in the same way as by the vLLM plugin."""

    def __init__(self, geometry: Geometry, arena_bytes: int) -> None:
        self.first_seed = 0
        self.manager = Manager(
            geometry,
            num_large_pages=geometry.num_large_pages(arena_bytes),
            prefix_caching=True,
            hash_tokens=HASH_TOKENS,
        )
        self.answer_tokens = self.manager.answer_interval_tokens
        self.hashes: dict[str, list[bytes]] = {}
        self.tokens: dict[str, int] = {}

    def begin(self, name: str, seed: int, num_tokens: int) -> None:
        """Create a request of `num_tokens` tokens. The seed determines its content."""
        self.hashes[name] = hashes_of(self.first_seed + seed, num_tokens + 4096)
        self.tokens[name] = 0

    def lookup(self, name: str, num_tokens: int) -> PrefixHit:
        """Look up the request's cached prefix."""
        return self.manager.lookup(self.hashes[name], max_tokens=num_tokens - 1)

    def advance(self, name: str, num_tokens: int, hit: PrefixHit | None = None) -> None:
        """Allocate slots for `num_tokens` further tokens, and commit them."""
        processed = hit.num_tokens if hit is not None else self.tokens[name]
        if num_tokens == 1 and self.answer_tokens and not processed % self.answer_tokens:
            prefix_hash = self.hashes[name][processed // HASH_TOKENS - 1]
            self.manager.keep_state(name, prefix_hash, processed)
        num_tokens += processed
        self.manager.allocate(name, num_tokens=num_tokens, num_processed_tokens=processed, hit=hit)
        self.manager.commit(name, self.hashes[name], num_tokens)
        self.tokens[name] = num_tokens

    def keep_states(self, name: str) -> None:
        """Keep the request's states, if its length is a multiple of the hash interval."""
        if self.tokens[name] % HASH_TOKENS == 0:
            prefix_hash = self.hashes[name][self.tokens[name] // HASH_TOKENS - 1]
            self.manager.keep_state(name, prefix_hash, self.tokens[name])
            self.manager.take_copies()

    def new_step(self) -> None:
        """Begin a step."""
        self.manager.take_copies()
        self.manager.new_step()

    def finish(self, name: str) -> None:
        """End a request."""
        self.manager.free(name)


class Stock:
    """vLLM's KVCacheManager, called in the same way as by vLLM's scheduler."""

    def __init__(self, model: ModelSpec, arena_bytes: int) -> None:
        from vllm.config import VllmConfig
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import KVCacheConfig

        self.first_seed = 0
        specs, self.block_tokens = stock_specs(model)
        vllm_config = VllmConfig()
        vllm_config.cache_config.kv_cache_layout = "LBNHC"
        groups = stock_planner().get_kv_cache_groups(vllm_config, specs)
        block_bytes = max(
            sum(specs[name].page_size_bytes for name in group.layer_names) for group in groups
        )
        config = KVCacheConfig(
            num_blocks=arena_bytes // block_bytes, kv_cache_tensors=[], kv_cache_groups=groups
        )
        self.num_groups = len(groups)
        self.manager = KVCacheManager(
            config,
            max_model_len=PREFIX_TOKENS + 8192,
            scheduler_block_size=self.block_tokens,
            hash_block_size=HASH_TOKENS if self.block_tokens == HASH_TOKENS else self.block_tokens,
            enable_caching=True,
        )
        self.requests: dict[str, Any] = {}

    def begin(self, name: str, seed: int, num_tokens: int) -> None:
        """Create a request of `num_tokens` tokens. The seed determines its content."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(name, [seed] * num_tokens, SamplingParams(max_tokens=4096), None)
        hashes = hashes_of(self.first_seed + seed, num_tokens + 4096)
        ratio = self.block_tokens // HASH_TOKENS
        request.block_hashes = hashes[ratio - 1 :: ratio]
        self.requests[name] = request

    def lookup(self, name: str, _num_tokens: int) -> tuple[Any, ...]:
        """Look up the request's cached prefix."""
        return self.manager.get_computed_blocks(self.requests[name])

    def advance(self, name: str, num_tokens: int, hit: tuple[Any, ...] | None = None) -> None:
        """Allocate slots for `num_tokens` further tokens, and commit them.

        Raises:
            MemoryError: vLLM has too few free blocks.
        """
        request = self.requests[name]
        blocks, num_hit = (None, 0) if hit is None else hit[:2]
        allocated = self.manager.allocate_slots(request, num_tokens, num_hit, blocks)
        if allocated is None:
            raise MemoryError
        request.num_computed_tokens += num_hit + num_tokens
        while request.num_tokens <= request.num_computed_tokens:
            request.append_output_token_ids(1)

    def keep_states(self, name: str) -> None:
        """Do nothing: vLLM keeps states by itself."""

    def new_step(self) -> None:
        """Begin a step."""
        self.manager.new_step_starts()

    def finish(self, name: str) -> None:
        """End a request."""
        self.manager.free(self.requests.pop(name))


def stock_specs(model: ModelSpec) -> tuple[dict[str, Any], int]:
    """Return vLLM's spec of each layer, and vLLM's choice of tokens per attention block."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    attention = [
        layer_type
        for layer_type in model.layer_types
        if isinstance(layer_type, FullAttention | SlidingWindow | ChunkedLocal)
    ]
    states = [layer_type for layer_type in model.layer_types if isinstance(layer_type, State)]
    slot_bytes = max(layer.slot_bytes for each in attention for layer in each.layers)
    state_bytes = max((layer.slot_bytes for each in states for layer in each.layers), default=0)
    # vLLM's platforms choose the same: an attention block that is no smaller than a state.
    block_tokens = HASH_TOKENS * max(1, -(-state_bytes // (HASH_TOKENS * slot_bytes)))
    specs: dict[str, Any] = {}
    for layer_type in attention:
        for layer in layer_type.layers:
            shape = {
                "block_size": block_tokens,
                "num_kv_heads": 1,
                "head_size": layer.slot_bytes // 4,
                "dtype": torch.bfloat16,
            }
            name = f"{layer_type.name}.{layer.name}"
            match layer_type:
                case SlidingWindow(window_tokens=window_tokens):
                    specs[name] = SlidingWindowSpec(**shape, sliding_window=window_tokens)
                case ChunkedLocal(chunk_tokens=chunk_tokens):
                    specs[name] = ChunkedLocalAttentionSpec(
                        **shape, attention_chunk_size=chunk_tokens
                    )
                case _:
                    specs[name] = FullAttentionSpec(**shape)
    for layer_type in states:
        for layer in layer_type.layers:
            specs[f"{layer_type.name}.{layer.name}"] = MambaSpec(
                block_size=block_tokens,
                shapes=((layer.slot_bytes,),),
                dtypes=(torch.int8,),
                page_size_padded=block_tokens * slot_bytes,
                mamba_cache_mode="align",
            )
    return specs, block_tokens

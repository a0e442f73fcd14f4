"""Replay of a run on vLLM's own memory manager, to count the memory that it would hold.

vLLM's planner groups the same layers. vLLM's `KVCacheManager` gets the same requests, which grow by
the same tokens in the same steps. Only its bookkeeping runs: nothing is computed.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jenga.demo.memory import StoredTable, Timeline
from jenga.errors import InvariantError
from jenga.sim.arenas.vllm_plan import stock_planner

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

_LAYOUT = "LBNHC"
"""Layout with layers outermost, as vLLM's own backends prefer. The groups depend on it."""

_CPU_BLOCK_TOKENS = 128
"""Tokens of vLLM's block on a CPU if the user chose none. vLLM 0.33 sets it only in workers."""

_PROBE_BYTES = 1 << 40
"""Bytes of memory to plan for. The plan serves only to learn the bytes of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockTimeline:
    """Memory that vLLM would hold, step by step.

    Attributes:
        name: Name of the configuration of vLLM.
        block_tokens: Number of tokens of a block in an attention layer.
        block_bytes: Size of a block in bytes. Every group takes whole blocks.
        num_groups: Number of groups that vLLM's planner puts the layers in.
        held_bytes: For each step of the run, bytes of the blocks that each layer type holds.
    """

    name: str
    block_tokens: int
    block_bytes: int
    num_groups: int
    held_bytes: tuple[dict[str, int], ...]


def replay_on_stock(timeline: Timeline, engine_options: dict[str, Any]) -> list[StockTimeline]:
    """Replay a run on vLLM's manager, in several configurations of vLLM.

    - vLLM as it configures itself on this machine.
    - vLLM with blocks of as many tokens as our small pages, if that differs and the model has no
      states.
    - vLLM with its hybrid manager off, so that every layer keeps every token. This needs several
      layer types, and no states.

    Args:
        timeline: Timeline of the run.
        engine_options: Arguments of the run's engine. The attention backend is ignored.
    """
    options = {key: value for key, value in engine_options.items() if key != "attention_backend"}
    has_states = any(table.is_state for table in timeline.tables)
    own_tokens = {table.tokens_per_page for table in timeline.tables if not table.is_state}
    runs = [_replay(timeline, "vLLM", options)]
    for block_tokens in sorted(own_tokens - {runs[0].block_tokens}):
        if not has_states:  # with states, a block is as large as a state
            name = f"vLLM, blocks of {block_tokens}"
            runs.append(_replay(timeline, name, options | {"block_size": block_tokens}))
    if not has_states and len(timeline.layer_types) > 1:
        uniform = {"disable_hybrid_kv_cache_manager": True}
        runs.append(_replay(timeline, "vLLM, hybrid manager off", options | uniform))
    return runs


def _replay(timeline: Timeline, name: str, options: dict[str, Any]) -> StockTimeline:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    planner = stock_planner()
    config = EngineArgs(**options).create_engine_config()
    if current_platform.is_cpu() and not config.cache_config.user_specified_block_size:
        config.cache_config.block_size = _CPU_BLOCK_TOKENS
    config.cache_config.kv_cache_layout = _LAYOUT
    specs = _specs(timeline, config)
    groups = planner.get_kv_cache_groups(config, dict(specs))
    planned = planner.get_kv_cache_config_from_groups(config, groups, _PROBE_BYTES)
    block_bytes = planned.kv_cache_tensors[0].size // planned.num_blocks
    return StockTimeline(
        name=name,
        block_tokens=_block_tokens(timeline, config)[0],
        block_bytes=block_bytes,
        num_groups=len(groups),
        held_bytes=_held_bytes(timeline, config, groups, block_bytes),
    )


def _specs(timeline: Timeline, config: "VllmConfig") -> "dict[str, KVCacheSpec]":
    """Make vLLM's cache spec of each layer of a run, with vLLM's own block size."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    block_tokens, padded_state_bytes = _block_tokens(timeline, config)
    dtype: torch.dtype = config.model_config.dtype
    specs: dict[str, KVCacheSpec] = {}
    for table in timeline.tables:
        for layer in table.layers:
            if table.is_state:
                specs[layer.name] = MambaSpec(
                    block_size=config.model_config.max_model_len,
                    shapes=((layer.slot_bytes,),),
                    dtypes=(_byte_dtype(),),
                    page_size_padded=padded_state_bytes,
                )
                continue
            # Only the bytes of a token matter, not the number and size of heads.
            shape = {
                "block_size": block_tokens,
                "num_kv_heads": 1,
                "head_size": layer.slot_bytes // (2 * dtype.itemsize),
                "dtype": dtype,
            }
            specs[layer.name] = (
                FullAttentionSpec(**shape)
                if table.window_tokens is None
                else SlidingWindowSpec(**shape, sliding_window=table.window_tokens)
            )
    return specs


def _byte_dtype() -> "torch.dtype":
    import torch

    return torch.int8


def _block_tokens(timeline: Timeline, config: "VllmConfig") -> tuple[int, int | None]:
    """Get the number of tokens of vLLM's blocks, and the bytes that it pads a state to.

    The bytes are None unless the model has both states and attention. In such a model, vLLM
    enlarges the blocks of attention layers until one is as large as a state, and then pads states
    to that size. vLLM does this in its workers, from the loaded layers, so the rule is repeated
    here.

    Source: vLLM 0.32, `vllm/platforms/interface.py`, `_align_hybrid_block_size`.
    """
    from vllm.platforms import current_platform

    block_tokens: int = config.cache_config.block_size
    state_bytes = max((_slot_bytes(t) for t in timeline.tables if t.is_state), default=0)
    token_bytes = max((_slot_bytes(t) for t in timeline.tables if not t.is_state), default=0)
    if not state_bytes or not token_bytes:
        return block_tokens, None
    kernel_tokens = 32 if current_platform.is_cpu() else 16
    step_tokens = max(kernel_tokens, block_tokens)
    block_tokens = step_tokens * math.ceil(state_bytes / (step_tokens * token_bytes))
    return block_tokens, block_tokens * token_bytes


def _slot_bytes(table: StoredTable) -> int:
    """Get the largest slot of a page table's layers, in bytes."""
    return max(layer.slot_bytes for layer in table.layers)


def _held_bytes(
    timeline: Timeline,
    config: "VllmConfig",
    groups: "list[KVCacheGroupSpec]",
    block_bytes: int,
) -> tuple[dict[str, int], ...]:
    manager = _manager(timeline, config, groups)
    shares = [_shares(timeline, group) for group in groups]
    requests: dict[str, Any] = {}
    held: list[dict[str, int]] = []
    for step in timeline.steps:
        _advance(manager, requests, step.request_tokens)
        blocks = [
            sum(
                not block.is_null
                for request_id in requests
                for block in manager.coordinator.single_type_managers[index].req_to_blocks[
                    request_id
                ]
            )
            for index in range(len(groups))
        ]
        held.append(
            {
                layer_type: round(
                    sum(
                        num_blocks * block_bytes * share.get(layer_type, 0.0)
                        for num_blocks, share in zip(blocks, shares, strict=True)
                    )
                )
                for layer_type in timeline.layer_types
            }
        )
    return tuple(held)


def _manager(
    timeline: Timeline, config: "VllmConfig", groups: "list[KVCacheGroupSpec]"
) -> "KVCacheManager":
    """Make vLLM's manager, with so many blocks that it never refuses a request."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    tokens = max((sum(step.request_tokens.values()) for step in timeline.steps), default=0)
    num_requests = max((len(step.request_tokens) for step in timeline.steps), default=0)
    block_sizes = [group.kv_cache_spec.block_size for group in groups]
    num_blocks = 1 + sum(tokens // size + 2 * num_requests for size in block_sizes)
    aligned_tokens = math.lcm(*block_sizes)
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=config.model_config.max_model_len,
        scheduler_block_size=aligned_tokens,
        hash_block_size=aligned_tokens,
        enable_caching=False,
    )


def _shares(timeline: Timeline, group: "KVCacheGroupSpec") -> dict[str, float]:
    """Get the share of a group's bytes, 0 to 1, that each layer type has."""
    bytes_of: dict[str, int] = {}
    for table in timeline.tables:
        for layer in table.layers:
            if layer.name in group.layer_names:
                bytes_of[table.layer_type] = bytes_of.get(table.layer_type, 0) + layer.slot_bytes
    total_bytes = sum(bytes_of.values())
    return {layer_type: part / total_bytes for layer_type, part in bytes_of.items()}


def _advance(
    manager: "KVCacheManager", requests: dict[str, Any], request_tokens: dict[str, int]
) -> None:
    """Free, add and grow requests of vLLM's manager until they are those of a step."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    for request_id in list(requests):
        # A request that has fewer tokens than before was preempted and began again.
        gone = request_id not in request_tokens
        if gone or request_tokens[request_id] < requests[request_id].num_computed_tokens:
            manager.free(requests.pop(request_id))
    for request_id, num_tokens in request_tokens.items():
        if request_id not in requests:
            requests[request_id] = Request(
                request_id=request_id,
                prompt_token_ids=[0],
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
            )
        request = requests[request_id]
        num_new_tokens = num_tokens - request.num_computed_tokens
        if num_new_tokens:
            manager.new_step_starts()
            if manager.allocate_slots(request, num_new_tokens) is None:
                msg = f"vLLM's manager refused {num_new_tokens} tokens of request {request_id!r}"
                raise InvariantError(msg)
            request.num_computed_tokens = num_tokens

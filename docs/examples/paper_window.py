"""Sliding-window layers as in section 5.3 of the Jenga paper, from outside the package.

`register` is called in every process, as a plugin of vLLM's group `vllm.general_plugins`.
"""

from dataclasses import dataclass

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import jenga
from jenga.policies import TokenSlots


@dataclass(frozen=True)
class PaperWindowPolicy(TokenSlots):
    window_tokens: int  # tokens that a query reads, its own included

    def update_last_access(self, _facts, num_processed_tokens, num_tokens, /):
        """Return the slots that a step touches. Slots before them are given up."""
        return range(max(0, num_processed_tokens - self.window_tokens + 1), num_tokens)

    def peak_slots(self, _facts, num_tokens, chunk_tokens, /):
        """Return the most slots that a step of `chunk_tokens` tokens touches."""
        return min(num_tokens, self.window_tokens - 1 + chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperWindow(jenga.LayerType):
    name: str
    layers: tuple[jenga.Layer, ...]
    window_tokens: int

    kind = "paper window"

    @property
    def keeps(self):
        return f"the last {self.window_tokens:,} tokens"

    def policy(self, _page_slots, /):
        return PaperWindowPolicy(self.window_tokens)


class PaperWindowSpec(SlidingWindowSpec):
    """What attention layers of this type return from `get_kv_cache_spec`."""


def register():
    KVCacheSpecRegistry.register(PaperWindowSpec, SlidingWindowManager)
    jenga.register_layer_type(
        PaperWindow,
        example={"window_tokens": 5},
        cache_spec=PaperWindowSpec,
        fields_of=lambda spec: {"window_tokens": spec.sliding_window},
    )

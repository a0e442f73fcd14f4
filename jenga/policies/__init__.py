"""One policy per layer type: which pages its requests touch, and which prefixes can be hit."""

from jenga.geometry import PageTable
from jenga.policies.base import NEVER, LayerPolicy, RequestFacts
from jenga.policies.chunked_local import ChunkedLocalPolicy
from jenga.policies.full_attention import FullAttentionPolicy
from jenga.policies.sliding_window import SlidingWindowPolicy
from jenga.policies.state import StatePolicy
from jenga.spec import ChunkedLocal, FullAttention, SlidingWindow, State

__all__ = ["NEVER", "LayerPolicy", "RequestFacts", "policy_of"]


def policy_of(page_table: PageTable) -> LayerPolicy:
    """The policy of a page table's layer type; a new type is one more row.

    Raises:
        ValueError: The layer type has no policy.
    """
    match page_table.layer_type:
        case FullAttention():
            return FullAttentionPolicy()
        case SlidingWindow(window_tokens=window_tokens):
            return SlidingWindowPolicy(window_tokens)
        case ChunkedLocal(chunk_tokens=chunk_tokens):
            return ChunkedLocalPolicy(chunk_tokens)
        case State():
            return StatePolicy()
        case layer_type:
            msg = f"layer type {layer_type.name!r}: {type(layer_type).__name__} has no policy"
            raise ValueError(msg)

"""One policy per layer type: which slots its requests touch, and which prefixes can be hit."""

from jenga.geometry import PageTable
from jenga.policies.base import ALL_PAGES, NEVER, Grain, Image, LayerPolicy, RequestFacts
from jenga.policies.chunked_local import ChunkedLocalPolicy
from jenga.policies.cross_attention import CrossAttentionPolicy
from jenga.policies.full_attention import FullAttentionPolicy
from jenga.policies.image_embedding import ImageEmbeddingPolicy
from jenga.policies.sliding_window import SlidingWindowPolicy
from jenga.policies.state import StatePolicy
from jenga.policies.token_budget import TokenBudgetPolicy
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    SlidingWindow,
    State,
    TokenBudget,
)

__all__ = ["ALL_PAGES", "NEVER", "Grain", "Image", "LayerPolicy", "RequestFacts", "policy_of"]


def policy_of(page_table: PageTable) -> LayerPolicy:  # noqa: PLR0911  one row per layer type
    """Return the policy of a page table's layer type. A new layer type is one more row."""
    match page_table.layer_type:
        case FullAttention():
            return FullAttentionPolicy()
        case SlidingWindow(window_tokens=window_tokens):
            return SlidingWindowPolicy(window_tokens)
        case ChunkedLocal(chunk_tokens=chunk_tokens):
            return ChunkedLocalPolicy(chunk_tokens)
        case CrossAttention():
            return CrossAttentionPolicy(page_table.tokens_per_page)
        case ImageEmbedding():
            return ImageEmbeddingPolicy(page_table.tokens_per_page)
        case TokenBudget() as spec:
            return TokenBudgetPolicy(spec)
        case State() as spec:
            return StatePolicy(num_slots=spec.slots_per_request)

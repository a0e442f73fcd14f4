"""One policy per layer type: which slots its requests touch, and which prefixes can be hit."""

from jenga.policies.base import (
    ALL_PAGES,
    NEVER,
    Grain,
    Image,
    LayerPolicy,
    RequestFacts,
    TokenSlots,
    last_gapless_end,
)

__all__ = [
    "ALL_PAGES",
    "NEVER",
    "Grain",
    "Image",
    "LayerPolicy",
    "RequestFacts",
    "TokenSlots",
    "last_gapless_end",
]

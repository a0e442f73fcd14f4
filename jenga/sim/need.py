"""What the next tokens of requests need, whatever holds it."""

from jenga.demand import needed_tokens
from jenga.geometry import has_pages, tokens_per_slot
from jenga.spec import CrossAttention, ImageEmbedding, ModelSpec

ENCODER_TYPES = (CrossAttention, ImageEmbedding)


def encoder_tokens(model: ModelSpec) -> int:
    """Tokens of the one image, or stretch of audio, of each request; 0 without an encoder."""
    return max(
        (each.typical_tokens for each in model.layer_types if isinstance(each, ENCODER_TYPES)),
        default=0,
    )


class Need:
    """Bytes that the next token of a request reads or writes.

    Attributes:
        types: Per layer type, its layers' bytes of one token.
    """

    def __init__(self, model: ModelSpec) -> None:
        """Image embeddings are left out."""
        self.types = [
            (
                each,
                sum(layer.slot_bytes for layer in each.layers) / tokens_per_slot(each),
            )
            for each in model.layer_types
            if has_pages(each) and not isinstance(each, ImageEmbedding)
        ]

    def of_tokens(self, num_tokens: int) -> float:
        """Of a request with so many tokens."""
        return sum(
            needed_tokens(layer_type, num_tokens) * token_bytes
            for layer_type, token_bytes in self.types
        )

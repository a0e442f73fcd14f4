"""Bytes that the next tokens of requests need, whatever memory manager holds them."""

from jenga.geometry import exact_lcm
from jenga.planning.demand import needed_tokens
from jenga.sim.batching.arena import ActiveRequest
from jenga.spec import ModelSpec


def encoder_tokens(model: ModelSpec) -> int:
    """Tokens of the one image, or stretch of audio, of each request. 0 without an encoder."""
    return max(each.typical_tokens for each in model.layer_types)


class Need:
    """Bytes that the next tokens of a request read or write.

    Attributes:
        types: Layer types, each with the bytes of one token in all its layers.
    """

    def __init__(self, model: ModelSpec) -> None:
        """Collect the layer types of a model. Image embeddings are left out."""
        self.types = [
            (each, each.token_bytes)
            for each in model.layer_types
            if each.has_pages and not each.is_consumed
        ]
        kept = tuple(layer_type for layer_type, _ in self.types)
        tokens = exact_lcm(
            ModelSpec(name=model.name, layer_types=kept), tokens_per_page=1, alignment_bytes=1
        )
        self._tables = [
            (table.policy(), table.payload_bytes / table.tokens_per_page)
            for table in tokens.page_tables
        ]

    def of_tokens(self, num_tokens: int) -> float:
        """Bytes that the token after `num_tokens` tokens needs, in a typical request."""
        return sum(
            needed_tokens(layer_type, num_tokens) * token_bytes
            for layer_type, token_bytes in self.types
        )

    def of_step(self, active: ActiveRequest) -> float:
        """Bytes that all tokens of a request in steps in flight need."""
        start, end = active.num_processed, active.num_computed
        return sum(
            len(policy.update_last_access(active.facts, start, end)) * token_bytes
            for policy, token_bytes in self._tables
        )

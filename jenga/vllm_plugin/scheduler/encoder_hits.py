"""Prefix hits of encoder-decoder models: encoder outputs are found again by their content.

The encoder inputs are audio or images. vLLM's hashes of decoder tokens include the first encoder
input of the request, although no token is its placeholder. Inputs of encoder-decoder models begin
at token 0 and cover as many tokens as the encoder makes. Two requests with the same tokens and
different audio therefore share no hash.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING

from jenga.geometry import Geometry
from jenga.policies.base import Image
from jenga.spec import CrossAttention

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from jenga.tables.request import PrefixHit


class EncoderHits:
    """Knows what cross attention stores for a request, and whether a lookup found all of it."""

    __slots__ = ("_found_by", "_tables")

    def __init__(self, geometry: Geometry) -> None:
        """Start without a lookup.

        Args:
            geometry: Geometry of the arena.
        """
        self._tables = frozenset(
            index
            for index, table in enumerate(geometry.page_tables)
            if isinstance(table.layer_type, CrossAttention)
        )
        self._found_by: str | None = None

    def can_name(self, request: "Request") -> bool:
        """Whether the hashes of a request's tokens identify its encoder inputs.

        They do not if there are several inputs, because the hashes include only the first.
        """
        return not self._tables or len(request.mm_features) <= 1

    def images(self, request: "Request") -> tuple[Image, ...]:
        """Get the encoder tokens that cross attention stores for a request, as one image.

        They lie in its pages without a gap, and its first token already reads them.
        """
        if not self._tables or not request.mm_features:
            return ()
        num_tokens = sum(feature.mm_position.length for feature in request.mm_features)
        return (Image(start_token=0, num_tokens=num_tokens, content=_content(request)),)

    def most_hit_tokens(self, request: "Request") -> int:
        """Get the largest number of a request's tokens that may be hit.

        The last token is always computed, for its logits. A request with encoder inputs must hit
        fewer tokens than its encoder makes: vLLM does not send an input to the workers if the hit
        covers its tokens, but the encoder may have to read the input again.
        """
        most_tokens = request.num_tokens - 1
        if not self._tables:
            return most_tokens
        spans = [feature.mm_position.length - 1 for feature in request.mm_features]
        return min([most_tokens, *spans])

    def settle(self, request: "Request", hit: "PrefixHit") -> "PrefixHit":
        """Remove encoder outputs from a hit unless all page tables of cross attention have them.

        An encoder writes the pages of all layers. If it ran for a partial hit, it would write pages
        that other requests read.

        Returns:
            The hit. `are_found` refers to it from now on.
        """
        if not self._tables:
            return hit
        if request.mm_features and all(hit.pages[index] for index in self._tables):
            self._found_by = request.request_id
            return hit
        self._found_by = None
        return hit.without_tables(self._tables)

    def are_found(self, request: "Request") -> bool:
        """Whether the last hit was of this request and has all of its encoder outputs."""
        return self._found_by == request.request_id


def _content(request: "Request") -> bytes:
    """Hash a request's encoder inputs, its LoRA adapter and its cache salt.

    The adapter is included because it changes what layers store.
    """
    lora = request.lora_request
    name = (
        [(feature.identifier, feature.mm_position.length) for feature in request.mm_features],
        None if lora is None else (lora.lora_name, lora.lora_path),
        request.cache_salt,
    )
    return blake2b(repr(name).encode(), digest_size=32).digest()

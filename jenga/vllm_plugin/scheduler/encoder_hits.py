"""Encoder inputs of requests, and prefix hits of what encoders made of them.

The encoder inputs are audio or images. They are found again by their content.

In encoder-decoder models, vLLM's hashes of decoder tokens include the first encoder input of the
request, although no token is its placeholder. Inputs of such models begin at token 0 and cover as
many tokens as the encoder makes. Two requests with the same tokens and different audio therefore
share no hash.
"""

from bisect import bisect_left
from hashlib import blake2b
from typing import TYPE_CHECKING

from jenga.geometry import Geometry
from jenga.policies.base import Image
from jenga.spec import CrossAttention, ImageEmbedding

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

    from jenga.tables.request import PrefixHit


class EncoderHits:
    """Knows what layers store of a request's images, and whether a lookup found all of it."""

    __slots__ = ("_found_by", "_has_embeddings", "_tables")

    def __init__(self, geometry: Geometry) -> None:
        """Start without a lookup.

        Args:
            geometry: Geometry of the arena.
        """
        self._has_embeddings = any(
            isinstance(table.layer_type, ImageEmbedding) or table.layer_type.holds_images
            for table in geometry.page_tables
        )
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
        """Get the encoder inputs of a request of which the arena stores something.

        In cross attention they are one image. Its tokens lie in the pages without a gap, and the
        first token of the request already reads them.
        """
        if self._has_embeddings and request.mm_features:
            return tuple(map(image_of, request.mm_features))
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


def image_of(feature: "MultiModalFeatureSpec") -> Image:
    """Describe an encoder input whose embeddings take the place of tokens of its request.

    It begins with the first token that an embedding replaces. No step encodes it before.

    Args:
        feature: The encoder input. Its embeddings depend on its identifier alone: vLLM includes the
            adapter there if an adapter changes the encoder.
    """
    place = feature.mm_position
    num_embeds = place.get_num_embeds()
    start, end = 0, place.length
    if (counts := place.embeds_cumsum) is not None:
        start, end = bisect_left(counts, 1), bisect_left(counts, num_embeds) + 1
    name = (feature.identifier, num_embeds)
    return Image(
        start_token=place.offset + start,
        num_tokens=num_embeds,
        placeholder_tokens=end - start,
        content=blake2b(repr(name).encode(), digest_size=32).digest(),
    )


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

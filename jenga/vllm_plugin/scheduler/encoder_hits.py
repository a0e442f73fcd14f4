"""What an encoder makes of a request's audio or image, found again by its content.

vLLM's hashes of a decoder's tokens name the first encoder input of their request, though none of
them stands for it: inputs of encoder-decoder models begin at token 0 and cover as many as the
encoder makes. Two requests with the same tokens and other audio share no hash.
"""

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from jenga.geometry import Geometry
from jenga.policies.base import Image
from jenga.spec import CrossAttention

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from jenga.tables.request import PrefixHit


class EncoderHits:
    """Says of requests what cross attention reads, and whether all of it was found."""

    __slots__ = ("_found_by", "_tables")

    def __init__(self, geometry: Geometry) -> None:
        """Nothing was found.

        Args:
            geometry: How the arena is cut.
        """
        self._tables = frozenset(
            index
            for index, table in enumerate(geometry.page_tables)
            if isinstance(table.layer_type, CrossAttention)
        )
        self._found_by: str | None = None

    def can_name(self, request: "Request") -> bool:
        """Whether hashes of a request's tokens tell its encoder inputs from others."""
        return not self._tables or len(request.mm_features) <= 1

    def images(self, request: "Request") -> tuple[Image, ...]:
        """What layers of cross attention store of a request: all of its encoder's tokens, as one.

        They lie in its pages without a gap, and are read by its first token.
        """
        if not self._tables or not request.mm_features:
            return ()
        num_tokens = sum(feature.mm_position.length for feature in request.mm_features)
        return (Image(start_token=0, num_tokens=num_tokens, content=_content(request)),)

    def most_hit_tokens(self, request: "Request") -> int:
        """Tokens of a request that may be hit: all but the last, whose logits are wanted.

        Of a request with encoder inputs fewer than its encoder makes: vLLM sends its workers no
        inputs that as many tokens of the request cover, and an encoder may have to read them again.
        """
        most_tokens = request.num_tokens - 1
        if not self._tables:
            return most_tokens
        spans = [feature.mm_position.length - 1 for feature in request.mm_features]
        return min([most_tokens, *spans])

    def settle(self, request: "Request", hit: "PrefixHit") -> "PrefixHit":
        """Leave what an encoder made out of a hit unless every layer has it.

        The encoder writes the pages of all layers, and would write those that others read.

        Returns:
            The hit, of which `are_found` tells from now on.
        """
        if not self._tables:
            return hit
        if request.mm_features and all(hit.pages[index] for index in self._tables):
            self._found_by = request.request_id
            return hit
        self._found_by = None
        pages = tuple(
            [] if index in self._tables else pages for index, pages in enumerate(hit.pages)
        )
        return replace(hit, pages=pages)

    def are_found(self, request: "Request") -> bool:
        """Whether the last hit, if it was of this request, has all that its encoder would make."""
        return self._found_by == request.request_id


def _content(request: "Request") -> bytes:
    """Name what layers store of a request's encoder inputs: an adapter changes it too."""
    lora = request.lora_request
    name = (
        [(feature.identifier, feature.mm_position.length) for feature in request.mm_features],
        None if lora is None else (lora.lora_name, lora.lora_path),
        request.cache_salt,
    )
    return blake2b(repr(name).encode(), digest_size=32).digest()

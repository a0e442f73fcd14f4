"""Images that layers of cross attention read: their numbers of tokens, and the spec of their cache.

Such an image is one token of its prompt. It has many more tokens in layers of cross attention,
which the model's processor counts and stores beside the image's pixels.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import CrossAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

IMAGE_TOKENS = "image_tokens"
"""Field of an image's processed data that has its number of tokens in cross attention."""

IMAGE_MODELS = frozenset({"MllamaForConditionalGeneration"})
"""Models whose layers of cross attention read images, in vLLM's names."""


def image_tokens(feature: Any) -> int:  # noqa: ANN401
    """Get the number of tokens that an image has in layers of cross attention.

    Args:
        feature: vLLM's description of the image.

    Raises:
        ValueError: The description lacks the number.
    """
    if feature.data is None or IMAGE_TOKENS not in feature.data:
        msg = (
            f"image {feature.identifier!r} must come with its field {IMAGE_TOKENS!r}, got "
            f"{None if feature.data is None else sorted(feature.data)}"
        )
        raise ValueError(msg)
    return int(feature.data[IMAGE_TOKENS].data)


@dataclass(frozen=True)
class ImageAttentionSpec(CrossAttentionSpec):
    """Cache of a layer of cross attention to images.

    Attributes:
        most_image_tokens: Number of tokens of the largest image.
        most_images: Largest number of images in a prompt.
    """

    most_image_tokens: int = 1
    most_images: int = 1

    def max_memory_usage_bytes(self, vllm_config: "VllmConfig") -> int:
        """Get the bytes of the largest image. An engine starts only if its arena holds one."""
        return cdiv(self.most_image_tokens, self.block_size) * self.page_size_bytes

    def max_num_blocks_per_req(
        self,
        vllm_config: "VllmConfig",
        max_len: int,
    ) -> int:
        """Get the width of a page table. vLLM also indexes it by the tokens of a request."""
        pages = self.most_images * cdiv(self.most_image_tokens, self.block_size)
        return max(pages, cdiv(max_len, self.block_size))

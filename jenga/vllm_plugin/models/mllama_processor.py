"""Prompts of Llama 3.2 Vision for vLLM: an image is one token, and its tiles are data beside it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import BatchFeature, MllamaConfig
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from jenga.vllm_plugin.specs.image_features import IMAGE_TOKENS

if TYPE_CHECKING:
    from vllm.config.multimodal import MultiModalDummyOptions
    from vllm.inputs import MultiModalDataDict
    from vllm.multimodal.inputs import MultiModalKwargsItems
    from vllm.multimodal.parse import MultiModalDataItems

MOST_IMAGES = 32
"""Largest number of images in a prompt, unless --limit-mm-per-prompt sets a smaller one.

Page tables are as wide as so many of the largest images need.
"""


def tile_tokens(config: Any) -> int:  # noqa: ANN401
    """Get the number of tokens of a tile: its patches, and one for the class.

    Args:
        config: Configuration of the vision model.
    """
    return (config.image_size // config.patch_size) ** 2 + 1


def most_image_tokens(config: Any) -> int:  # noqa: ANN401
    """Get the number of tokens of an image with the most tiles.

    Args:
        config: Configuration of the vision model.
    """
    return config.max_num_tiles * tile_tokens(config)


class MllamaProcessingInfo(BaseProcessingInfo):
    """Sizes of images, and how many a prompt may have."""

    def get_hf_config(self) -> MllamaConfig:
        """Get the model's configuration."""
        return self.ctx.get_hf_config(MllamaConfig)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Get the largest number of images in a prompt."""
        return {"image": MOST_IMAGES}

    def get_mm_max_tokens_per_item(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
    ) -> Mapping[str, int]:
        """Get the tokens of the largest image. vLLM profiles the encoder with such images."""
        return {"image": most_image_tokens(self.get_hf_config().vision_config)}


class MllamaDummyInputsBuilder(BaseDummyInputsBuilder[MllamaProcessingInfo]):
    """Makes the largest images, to profile memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Get a text with a placeholder for each image."""
        processor: Any = self.info.get_hf_processor()
        return processor.image_token * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: "MultiModalDummyOptions",
    ) -> "MultiModalDataDict":
        """Get images that fill the most tiles."""
        vision: Any = self.info.get_hf_config().vision_config
        rows, columns = max(vision.supported_aspect_ratios, key=lambda ratio: ratio[0] * ratio[1])
        return {
            "image": self._get_dummy_images(
                width=columns * vision.image_size,
                height=rows * vision.image_size,
                num_images=mm_counts.get("image", 0),
                overrides=mm_options.get("image"),
            )
        }


class MllamaMultiModalProcessor(BaseMultiModalProcessor[MllamaProcessingInfo]):
    """Cuts images into tiles, and finds their tokens in a prompt."""

    def _postprocess_hf_mm_data(
        self,
        mm_inputs: Mapping[str, object],
        hf_processor_mm_kwargs: Mapping[str, object],
        processed_data: BatchFeature,
    ) -> BatchFeature:
        """Remove the dimension of the batch, and count the tokens of each image."""
        if "pixel_values" not in processed_data:
            return processed_data
        for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
            processed_data[name] = processed_data[name].squeeze(0)
        num_tiles = processed_data["aspect_ratio_mask"].sum(-1)
        tokens = tile_tokens(self.info.get_hf_config().vision_config)
        processed_data[IMAGE_TOKENS] = num_tiles * tokens
        return processed_data

    def _get_mm_fields_config(
        self,
        hf_inputs: BatchFeature,
        hf_processor_mm_kwargs: Mapping[str, object],
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Say how fields divide among images: each image has one row."""
        return {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "aspect_ratio_ids": MultiModalFieldConfig.batched("image"),
            "aspect_ratio_mask": MultiModalFieldConfig.batched("image"),
            IMAGE_TOKENS: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: "MultiModalDataItems",
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: "MultiModalKwargsItems",
    ) -> Sequence[PromptUpdate]:
        """Leave the token of an image as it is. Its embedding is that of the token."""
        token = self.info.get_hf_config().image_token_index
        details = PromptUpdateDetails(
            full=[token], is_embed=lambda full: torch.zeros(len(full), dtype=torch.bool)
        )
        return [PromptReplacement(modality="image", target=[token], replacement=details)]

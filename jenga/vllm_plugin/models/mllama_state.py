"""Llama 3.2 Vision on vLLM's second model runner, which asks a model for a class of its own."""

from typing import TYPE_CHECKING, Any

from torch.nn.functional import pad
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from jenga.vllm_plugin.layers.attention.image_batches import (
    ImageBatch,
    image_builders,
    store_encoded,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from jenga.vllm_plugin.layers.attention.image_attention import JengaImageMetadataBuilder


class MllamaState(DefaultModelState):
    """Tells builders the images of a step, and stores those that it encodes in pages.

    Steps call `prepare_attn` first, then `execute_mm_encoder` if they encode.
    """

    WORD_BITS = 32
    """Tokens in a word of the sampler's mask of prompt tokens."""

    _batch: ImageBatch
    _builders: "Sequence[tuple[int, JengaImageMetadataBuilder]]"

    def prepare_attn(
        self,
        input_batch: "InputBatch",
        cudagraph_mode: "CUDAGraphMode",
        block_tables: "tuple[torch.Tensor, ...]",
        slot_mappings: "torch.Tensor",
        attn_groups: list[Any],
        *args: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Build a step's metadata. Rows of vLLM's dummy steps have no images."""
        known = {} if self.encoder_cache is None else self.encoder_cache.mm_features
        features = [known.get(name, ()) for name in input_batch.req_ids]
        rows = {name: row for row, name in enumerate(input_batch.req_ids)}
        self._batch = ImageBatch(rows, features, block_tables)
        self._builders = image_builders(attn_groups)
        for _, builder in self._builders:
            builder.features = lambda: features
        return super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **named
        )

    def execute_mm_encoder(self, scheduled_encoder_inputs: dict[str, list[int]]) -> None:
        """Encode images, and write their keys and values to pages. Nothing else is kept of them."""
        super().execute_mm_encoder(scheduled_encoder_inputs)
        encoded = self.encoder_cache.encoder_outputs
        if scheduled_encoder_inputs:
            outputs = [
                encoded[self._batch.features[self._batch.rows[name]][number].identifier]
                for name, numbers in scheduled_encoder_inputs.items()
                for number in numbers
            ]
            store_encoded(
                self.model, self._builders, self._batch, scheduled_encoder_inputs, outputs
            )
        encoded.clear()

    def custom_sampler(self, sampler: Any) -> None:  # noqa: ANN401
        """Make room for the token of an image where the sampler marks tokens of prompts.

        The token is behind the vocabulary. Its mark would otherwise be in the row of another
        request, or behind the last row.
        """
        penalties = sampler.penalties_state
        num_words = self.model_config.hf_config.image_token_index // self.WORD_BITS + 1
        missing = max(0, num_words - penalties.prompt_bin_mask.shape[1])
        penalties.prompt_bin_mask = pad(penalties.prompt_bin_mask, (0, missing))

"""Images of a batch, as vLLM's model runners have them: what rows read, and where it is stored.

Both runners pass an `ImageBatch`. The first one makes it of its persistent batch. The second one
has a class of the model for this (`jenga/vllm_plugin/models/mllama_state.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jenga.errors import InvariantError
from jenga.vllm_plugin.layers.attention.image_attention import (
    JengaImageMetadataBuilder,
    stored_images,
)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Requests of a step, with their images and pages.

    Attributes:
        rows: Request -> its row in the batch.
        features: vLLM's descriptions of the images of each row.
        page_tables: For each page table of the arena, [num_rows, max_pages].
    """

    rows: Mapping[str, int]
    features: Sequence[Sequence[Any]]
    page_tables: Sequence[torch.Tensor]


def image_builders(attn_groups: Sequence[Any]) -> list[tuple[int, JengaImageMetadataBuilder]]:
    """Get the builders of a model's layers of cross attention, with their page tables.

    Args:
        attn_groups: Groups of layers for each page table, as both model runners have them.

    Returns:
        The index of the page table, and its builder.
    """
    return [
        (index, builder)
        for index, groups in enumerate(attn_groups)
        for group in groups
        for builder in group.metadata_builders
        if isinstance(builder, JengaImageMetadataBuilder)
    ]


def follow_batch(model_runner: Any) -> None:  # noqa: ANN401
    """Let builders of the first model runner see the images of the batch's rows.

    The runner must have its builders. Nothing is done for the second one, whose builders are told
    in each step.
    """
    if hasattr(model_runner, "model_state"):
        return

    def features() -> list[Sequence[Any]]:
        requests = model_runner.requests
        return [requests[name].mm_features for name in model_runner.input_batch.req_ids]

    for _, builder in image_builders(model_runner.attn_groups):
        builder.features = features


def batch_of(model_runner: Any) -> ImageBatch:  # noqa: ANN401
    """Get the running batch of vLLM's first model runner. Its page tables must be on the device."""
    batch = model_runner.input_batch
    num_tables = len(model_runner.attn_groups)
    return ImageBatch(
        rows=batch.req_id_to_index,
        features=[model_runner.requests[name].mm_features for name in batch.req_ids],
        page_tables=[
            batch.block_table[index].get_device_tensor(batch.num_reqs)
            for index in range(num_tables)
        ],
    )


def store_encoded(
    model: Any,  # noqa: ANN401
    builders: Sequence[tuple[int, JengaImageMetadataBuilder]],
    batch: ImageBatch,
    inputs: Mapping[str, Sequence[int]],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Write the keys and values of the images that a step encoded to their pages.

    Args:
        model: The model; its `store_images` writes them.
        builders: Result of `image_builders`.
        batch: Requests of the step.
        inputs: Request -> numbers of its images that the step encoded.
        outputs: Output of the encoder for each of them, [num_tokens, hidden_size], in order.

    Raises:
        InvariantError: The outputs are of other images, or of other numbers of tokens.
    """
    states = torch.cat(list(outputs))
    num_images = sum(map(len, inputs.values()))
    for index, builder in builders:
        page_tokens = builder.page_tokens
        slots: list[torch.Tensor] = []
        for name, numbers in inputs.items():
            row = batch.rows[name]
            images = stored_images(batch.features[row], page_tokens)
            own_pages = batch.page_tables[index][row].long()
            for number in numbers:
                image = images[number]
                tokens = torch.arange(image.num_tokens, device=own_pages.device)
                pages = own_pages[image.first_page + tokens // page_tokens]
                slots.append(pages * page_tokens + tokens % page_tokens)
        num_slots = sum(map(len, slots))
        if len(outputs) != num_images or len(states) != num_slots:
            msg = (
                f"{num_images} images of {num_slots} tokens were to be encoded, got {len(outputs)} "
                f"of {len(states)}"
            )
            raise InvariantError(msg)
        model.store_images(states, torch.cat(slots), builder.layer_names)

"""The places of a step's images: what the scheduler tells the workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.config.ec_manager_config import EncoderCacheManagerMetadata

from jenga.page_ids import SmallPageId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages(EncoderCacheManagerMetadata):
    """Small pages of the images of one step, sent to the workers.

    Attributes:
        reads: Identifier of an image -> its pages that the step's requests hold. The null page
            stands for pages that none of them reads any more.
        writes: Identifier of an image that the step encodes -> for each place in a prompt that
            shows the image, the pages to write.
    """

    reads: Mapping[str, Sequence[SmallPageId]] = field(
        default_factory=dict[str, Sequence[SmallPageId]]
    )
    writes: Mapping[str, Sequence[Sequence[SmallPageId]]] = field(
        default_factory=dict[str, Sequence[Sequence[SmallPageId]]]
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSlots:
    """Slots of the tokens that stand for an image, without those whose keys and values are there.

    Attributes:
        first_row: Row of the image that the first slot is for.
        slots: i64[num_rows - first_row], one slot for each row from there on. Slot i of page p has
            the number `p * tokens_per_page + i`.
    """

    first_row: int
    slots: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStepImages(EncoderCacheManagerMetadata):
    """Slots of the images of one step, where embeddings live in the slots of their tokens.

    Attributes:
        reads: Identifier of an image -> slots in which all rows lie that the step reads.
        writes: Identifier of an image that the step encodes -> the slots to write, for each place
            in a prompt that shows the image.
    """

    reads: Mapping[str, RowSlots] = field(default_factory=dict[str, RowSlots])
    writes: Mapping[str, Sequence[RowSlots]] = field(default_factory=dict[str, Sequence[RowSlots]])

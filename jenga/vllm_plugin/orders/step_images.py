"""The pages of a step's images: what the scheduler tells the workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.config.ec_manager_config import EncoderCacheManagerMetadata

from jenga.page_ids import SmallPageId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages(EncoderCacheManagerMetadata):
    """Small pages of the images of one step, sent to the workers.

    Attributes:
        reads: Identifier of an image -> its pages that the step's requests hold. The null page
            stands for pages that none of them reads any more.
        writes: Identifier of an image that the step encodes -> for each request that gets it, the
            pages to write.
    """

    reads: Mapping[str, Sequence[SmallPageId]] = field(
        default_factory=dict[str, Sequence[SmallPageId]]
    )
    writes: Mapping[str, Sequence[Sequence[SmallPageId]]] = field(
        default_factory=dict[str, Sequence[Sequence[SmallPageId]]]
    )

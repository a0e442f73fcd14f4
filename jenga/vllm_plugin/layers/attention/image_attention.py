"""Cross attention to images, in a decoder whose other layers attend to text.

A token reads the last group of consecutive images of its prompt, up to itself. Each image begins on
a page of its own, so a group has gaps between its images. The images of a group are therefore read
one after the other, and the results are merged. Rows before any image read nothing.

An image's keys and values depend on nothing but the image. They are written right after its encoder
ran, before the layers of the step run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from jenga.vllm_plugin.layers.attention.attention_builder import JengaTritonMetadataBuilder
from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend, JengaTritonImpl
from jenga.vllm_plugin.specs.image_features import ImageAttentionSpec, image_tokens
from jenga_kernels.attention.attention_merge import attention_merge
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.plans.attention_plan import AttentionPlan, plan_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of a request, as layers of cross attention store it.

    Attributes:
        start_token: Token of the prompt that stands for it.
        num_tokens: Number of its tokens in these layers.
        first_page: Number of its first page in the request's page table.
    """

    start_token: int
    num_tokens: int
    first_page: int


def stored_images(features: Sequence[Any], page_tokens: int) -> list[StoredImage]:
    """Get the images of a request in the order of its prompt.

    Args:
        features: vLLM's descriptions of the images.
        page_tokens: Number of slots in a page.
    """
    images: list[StoredImage] = []
    first_page = 0
    for feature in features:
        num_tokens = image_tokens(feature)
        images.append(StoredImage(feature.mm_position.offset, num_tokens, first_page))
        first_page += cdiv(num_tokens, page_tokens)
    return images


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one request that read the same images.

    Attributes:
        row: Row of the request in the batch.
        num_rows: Number of its rows of the step that are in the segment.
        images: The images, none for rows before any image.
    """

    row: int
    num_rows: int
    images: tuple[StoredImage, ...]


def segments_of(
    images: Sequence[StoredImage], *, row: int, first_position: int, num_rows: int
) -> list[Segment]:
    """Cut a request's rows of a step where the images change that they read.

    Args:
        images: Images of the request, in the order of the prompt.
        row: Row of the request in the batch.
        first_position: Position of the first row in the request.
        num_rows: Number of rows.
    """
    end_position = first_position + num_rows
    seen: tuple[StoredImage, ...] = ()
    segments: list[Segment] = []
    start = first_position
    for image in images:
        if image.start_token >= end_position:
            break
        if image.start_token > start:
            segments.append(Segment(row, image.start_token - start, seen))
            start = image.start_token
        is_next = bool(seen) and seen[-1].start_token + 1 == image.start_token
        seen = (*seen, image) if is_next else (image,)
    if start < end_position:
        segments.append(Segment(row, end_position - start, seen))
    return segments


@dataclass(frozen=True, slots=True)
class ImagePass:
    """Attention of all segments to one image each, the first of their group or a further one.

    Attributes:
        page_table: i32[num_segments, max_pages], pages of the image that each segment reads.
        seq_lens: i32[num_segments], number of its tokens. 0 if a group has no further image.
        plan: Work lists.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    plan: AttentionPlan


@dataclass
class JengaImageMetadata(AttentionMetadata):
    """A step's metadata, shared by all layers of cross attention to images.

    Attributes:
        query_starts: i32[num_segments + 1], first row of each segment, and the end.
        passes: One for each image of the largest group. There is none if no row reads an image.
        reads_images: bool[num_actual_tokens, 1], whether a row reads images.
    """

    query_starts: torch.Tensor
    passes: list[ImagePass]
    reads_images: torch.Tensor


def _no_images() -> Sequence[Sequence[Any]]:
    return ()


class JengaImageMetadataBuilder(JengaTritonMetadataBuilder):
    """Builds a step's metadata for layers of cross attention to images.

    Its work lists depend on where images are in the prompts of a step, so no CUDA graph holds them.

    Attributes:
        features: Function that gets vLLM's descriptions of the images of each row of the batch.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    @classmethod
    def get_cudagraph_support(
        cls,
        vllm_config: "VllmConfig",
        kv_cache_spec: "KVCacheSpec",
    ) -> AttentionCGSupport:
        """Get the batches that a CUDA graph may hold: none."""
        return AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: "KVCacheSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.features: Callable[[], Sequence[Sequence[Any]]] = _no_images

    @property
    def page_tokens(self) -> int:
        """Number of slots in a page."""
        return self._kind.page_tokens

    def calls(self) -> list[Any]:
        """Return no calls: specialised kernels are not tried for these layers."""
        return []

    def build(  # pyright: ignore[reportIncompatibleMethodOverride] (other metadata)
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> JengaImageMetadata:
        """Build a step's metadata and its work lists."""
        common = common_attn_metadata
        segments = self._segments(common)
        counts = torch.tensor([0, *(segment.num_rows for segment in segments)], dtype=torch.int32)
        query_starts = async_tensor_h2d(counts.cumsum(0, dtype=torch.int32), device=self.device)
        num_passes = max((len(segment.images) for segment in segments), default=0)
        reads = torch.zeros(common.num_actual_tokens, dtype=torch.bool)
        if num_passes:
            flags = torch.tensor([bool(segment.images) for segment in segments])
            shown = flags.repeat_interleave(counts[1:])
            reads[: len(shown)] = shown
        return JengaImageMetadata(
            query_starts=query_starts,
            passes=[
                self._pass(common, segments, query_starts, number) for number in range(num_passes)
            ],
            reads_images=async_tensor_h2d(reads, device=self.device)[:, None],
        )

    def _segments(self, common: CommonAttentionMetadata) -> list[Segment]:
        starts = common.query_start_loc_cpu.tolist()
        # The upper bound is exact for prompts. A decoded token is past every image in any case.
        bounds = common.seq_lens_cpu_upper_bound
        seq_lens = [0] * (len(starts) - 1) if bounds is None else bounds.tolist()
        features = self.features()
        segments: list[Segment] = []
        for row, (start, end, seq_len) in enumerate(
            zip(starts[:-1], starts[1:], seq_lens, strict=False)
        ):
            images = stored_images(features[row], self.page_tokens) if row < len(features) else []
            segments += segments_of(
                images, row=row, first_position=seq_len - (end - start), num_rows=end - start
            )
        return segments

    def _pass(
        self,
        common: CommonAttentionMetadata,
        segments: Sequence[Segment],
        query_starts: torch.Tensor,
        number: int,
    ) -> ImagePass:
        """Plan the attention of all segments to the image of this number in their group."""
        images = [
            segment.images[number] if number < len(segment.images) else None for segment in segments
        ]
        lengths = [0 if image is None else image.num_tokens for image in images]
        fields = torch.tensor(
            [
                [segment.row, 0 if image is None else image.first_page, length]
                for segment, image, length in zip(segments, images, lengths, strict=True)
            ],
            dtype=torch.int64,
        )
        rows, first_pages, seq_lens = async_tensor_h2d(fields, device=self.device).unbind(1)
        table = common.block_table_tensor
        num_pages = max(1, cdiv(max(lengths), self.page_tokens))
        columns = first_pages[:, None] + torch.arange(num_pages, device=self.device)
        page_table = table[rows[:, None], columns.clamp(max=table.shape[1] - 1)]
        seq_lens = seq_lens.to(torch.int32)
        plan = plan_attention(
            query_starts,
            seq_lens,
            self._kind,
            num_tokens=common.num_actual_tokens,
            dtype=self._dtype,
            max_query_tokens=max(segment.num_rows for segment in segments),
            min_query_tokens=min(segment.num_rows for segment in segments),
            decode_query_tokens=self._decode_query_tokens,
            is_batch_invariant=self._is_batch_invariant,
            is_warp_specialized=False,
        )
        return ImagePass(page_table.to(torch.int32), seq_lens, plan)


class JengaImageImpl(JengaTritonImpl):
    """Runs one layer of cross attention to images."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (other metadata)
        self,
        layer: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: JengaImageMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run attention and write `output`, [num_tokens, num_heads, value_dim], in place.

        Rows that read no image are 0.
        """
        if attn_metadata is None or not attn_metadata.passes:
            return output.fill_(0)
        num_tokens = attn_metadata.reads_images.shape[0]
        query = query[:num_tokens]
        merged = self._attend(layer, query, kv_cache, attn_metadata, 0)
        for number in range(1, len(attn_metadata.passes)):
            further = self._attend(layer, query, kv_cache, attn_metadata, number)
            attention_merge(*merged, *further, out=merged[0], lse=merged[1])
        reads = attn_metadata.reads_images[:, :, None]
        output[:num_tokens] = torch.where(reads, merged[0], 0)
        return output

    def _attend(
        self,
        layer: Any,  # noqa: ANN401
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: JengaImageMetadata,
        number: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Get the results of a pass, and their log-sum-exp."""
        image_pass = metadata.passes[number]
        shape = query.shape
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
        paged_attention(
            query,
            page_table=image_pass.page_table,
            query_starts=metadata.query_starts,
            seq_lens=image_pass.seq_lens,
            scale=self.scale,
            is_causal=False,
            out=out,
            lse=lse,
            plan=image_pass.plan,
            **self._views(layer, kv_cache),
        )
        return out, lse


class JengaImageBackend(JengaTritonBackend):
    """Paged attention to images."""

    # Keys and values are written when an image is encoded, not in a step of the layer.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[JengaImageImpl]:
        """Get the class that runs a layer."""
        return JengaImageImpl

    @staticmethod
    def get_builder_cls() -> type[JengaImageMetadataBuilder]:
        """Get the class that builds a step's metadata."""
        return JengaImageMetadataBuilder


class ImageAttention(Attention):
    """A layer of cross attention to images.

    `forward` gets queries only, because keys and values of images are in the cache.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        most_image_tokens: int,
        most_images: int,
        **named: Any,  # noqa: ANN401
    ) -> None:
        """Make the layer.

        Args:
            args: Arguments of vLLM's class.
            most_image_tokens: Number of tokens of the largest image.
            most_images: Largest number of images in a prompt.
            named: Arguments of vLLM's class.
        """
        super().__init__(
            *args,
            attn_type=AttentionType.ENCODER_DECODER,
            attn_backend=JengaImageBackend,
            **named,
        )
        self._most_image_tokens = most_image_tokens
        self._most_images = most_images

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of images.

        Args:
            key: [num_tokens, num_kv_heads, head_dim].
            value: The same shape.
            slots: i64[num_tokens].
        """
        self.impl.do_kv_cache_update(self, key, value, self.kv_cache, slots)  # pyright: ignore[reportAttributeAccessIssue]

    def get_kv_cache_spec(self, vllm_config: "VllmConfig") -> ImageAttentionSpec:
        """Get the spec of the layer's cache."""
        return ImageAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
            most_image_tokens=self._most_image_tokens,
            most_images=self._most_images,
        )


def reads_images_of(layer_name: str) -> torch.Tensor | None:
    """Get which rows of the running step read images.

    Args:
        layer_name: Name of a layer of cross attention to images.

    Returns:
        bool[num_tokens, 1], or None if the step has no metadata: vLLM profiles memory.
    """
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict):
        metadata = metadata.get(layer_name)
    return metadata.reads_images if isinstance(metadata, JengaImageMetadata) else None


def reads_any_image(layer_name: str) -> bool:
    """Whether any row of the running step reads an image. It is true if vLLM profiles memory."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict):
        metadata = metadata.get(layer_name)
    return not isinstance(metadata, JengaImageMetadata) or bool(metadata.passes)

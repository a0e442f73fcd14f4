"""A step's metadata for the attention layers of a page table, built once before they run."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import vllm.envs
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, KVQuantMode

from jenga.vllm_plugin.layers.attention.captured_plans import CapturedPlans
from jenga.vllm_plugin.layers.attention.prompt_scratch import plan_of_step, scratch_on
from jenga.vllm_plugin.layers.cpu_serving import prepare_device
from jenga.vllm_plugin.settings.environment import SCRATCH_VARIABLE, read_settings
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.settings.speculation import decode_query_tokens, most_group_heads
from jenga.vllm_plugin.trials.tried_kernels import KernelChoice
from jenga_kernels.checks.pages import is_other_float
from jenga_kernels.plans.attention_plan import AttentionKind, AttentionPlan, plan_attention
from jenga_kernels.plans.scratch_plan import ScratchPlan, page_bytes, scratch_pages
from jenga_kernels.trial_calls import Call

logger = init_logger(f"vllm.{__name__}")

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass
class JengaTritonMetadata(AttentionMetadata):
    """A step's metadata, shared by all layers of one kind and page table.

    Attributes:
        num_actual_tokens: Number of tokens in the step. In a CUDA graph it includes padding.
        query_starts: i32[num_requests + 1], index of each request's first token, and the end.
        seq_lens: i32[num_requests], number of tokens of each request, this step's included. In
            cross attention, number of tokens that its encoder makes.
        page_table: i32[num_requests, max_pages], small pages of each request.
        plan: The step's work lists.
        spans: i32[num_actual_tokens, 2], the keys [start, end) that a token of an image reads in
            addition. None if the step has no such tokens.
        lse: f32[num_actual_tokens, num_heads], where each layer writes the log-sum-exps of its
            scores. None if the step needs none.
        scratch: u8[num_bytes], to which the step's prompts restore quantised keys and values. None
            if they read the arena's pages.
        scratch_plan: Work lists of a step with such a buffer.
    """

    num_actual_tokens: int
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    plan: AttentionPlan
    spans: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    scratch: torch.Tensor | None = None
    scratch_plan: ScratchPlan | None = None


def image_spans(
    common: CommonAttentionMetadata, window_tokens: int | None = None, *, is_clamped: bool = False
) -> torch.Tensor | None:
    """Find the image of each token of a step whose image lets it read more keys.

    Args:
        common: vLLM's metadata of the step.
        window_tokens: Number of last tokens that a token reads, itself included. None means that it
            reads from the start.
        is_clamped: Whether the window also limits which tokens of an image are read.

    Returns:
        i32[num_tokens, 2] on the host, the image's tokens [start, end) in the request, or (0, 0)
        for a token that reads no more. None if no token of the step reads more.
    """
    starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    spans: torch.Tensor | None = None
    for request, images in (common.mm_req_doc_ranges or {}).items():
        first_row, end_row = int(starts[request]), int(starts[request + 1])
        if not images or first_row == end_row or seq_lens is None:
            continue
        # The upper bound is exact for prompts. A decoded token is past every image in any case.
        first_position = int(seq_lens[request]) - (end_row - first_row)
        for start, last in images:
            is_whole = is_clamped or window_tokens is None or start > first_position - window_tokens
            # A single token in a step is the last of its image, so all others are before it.
            # Decoded tokens therefore need no spans, and their CUDA graphs have none.
            if end_row - first_row == 1 and is_whole:
                continue
            first = max(start - first_position, 0) + first_row
            end = min(last + 1 - first_position + first_row, end_row)
            if first < end:
                if spans is None:
                    spans = torch.zeros(common.num_actual_tokens, 2, dtype=torch.int32)
                spans[first:end] = torch.tensor([start, last + 1], dtype=torch.int32)
                if is_clamped and window_tokens is not None:
                    reached = first_position - first_row + 1 - window_tokens
                    starts_seen = torch.arange(first, end, dtype=torch.int32) + reached
                    spans[first:end, 0].clamp_(min=starts_seen)
    return spans


def attention_kind(spec: AttentionSpec, num_heads: int, dtype: torch.dtype) -> AttentionKind:
    """Describe attention layers to the kernels.

    Args:
        spec: vLLM's spec of their cache.
        num_heads: Number of query heads.
        dtype: Element type of the queries.
    """
    return AttentionKind(
        num_heads=num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        value_dim=spec.head_size_v,
        page_tokens=spec.block_size,
        window_tokens=getattr(spec, "sliding_window", None),
        chunk_tokens=getattr(spec, "attention_chunk_size", None),
        is_causal=not isinstance(spec, CrossAttentionSpec),
        is_quantised=spec.kv_quant_mode is not KVQuantMode.NONE,
        has_slot_scales=spec.kv_quant_mode.is_per_token_head,
        is_int4=spec.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD,
        is_other_float=is_other_float(spec.dtype, dtype),
    )


def fill_rejected_slots(
    common: CommonAttentionMetadata, *, page_tokens: int, max_tokens: int
) -> None:
    """Let a draft model also write the keys and values of rejected tokens, into their own slots.

    vLLM leaves their slots out, but counts the tokens in the request's length. Kernels multiply the
    content of these slots by zero, and unwritten bytes may be NaN.

    Args:
        common: Metadata of the draft's first step. Its slot mapping is written in place.
        page_tokens: Number of slots in a small page.
        max_tokens: Largest number of tokens for which a request has slots.
    """
    starts, slots = common.query_start_loc, common.slot_mapping
    rows = torch.arange(slots.shape[0], dtype=starts.dtype, device=starts.device)
    requests = torch.searchsorted(starts[1:], rows, right=True)
    positions = (common.seq_lens[requests] - starts[requests + 1] + rows).to(torch.int64)
    has_slot = positions < max_tokens
    positions = positions.clamp(max=max_tokens - 1)
    pages = common.block_table_tensor[requests, positions // page_tokens].to(torch.int64)
    own = pages * page_tokens + positions % page_tokens
    slots.copy_(torch.where((slots < 0) & has_slot, own, slots))


@dataclass(frozen=True, slots=True)
class ImageReach:
    """How far tokens of an image read other tokens of it, beyond the causal mask and window.

    Attributes:
        is_read: Whether they read other tokens of their image at all.
        is_clamped: Whether their window also limits which tokens of the image they read.
    """

    is_read: bool = True
    is_clamped: bool = False


def image_reach(vllm_config: "VllmConfig", layer_names: list[str]) -> ImageReach:
    """Find out how far the layers of a page table read images.

    In most models every layer reads whole images. In Gemma 4, layers with a window read an image
    as far as the window reaches, and the others read it as text. vLLM marks only the layers with a
    window, so the others are recognised by the marked layers in the model.

    Raises:
        ValueError: The layers of the page table differ in this.
    """
    context = vllm_config.compilation_config.static_forward_context
    clamped = {
        name
        for name, layer in context.items()
        if getattr(layer, "mm_prefix_clamp_sliding_window", False)
    }
    own = clamped.intersection(layer_names)
    if own and own != set(layer_names):
        raise Refusal.IMAGE_REACH.error(str(sorted(layer_names)))
    return ImageReach(is_read=bool(own) or not clamped, is_clamped=bool(own))


class JengaTritonMetadataBuilder(AttentionMetadataBuilder[JengaTritonMetadata]):
    """Builds a step's metadata for the layers of one kind and page table.

    A CUDA graph holds the addresses of the work lists that it was captured with. The lists' sizes
    depend on the batch size, so each captured size has its own lists. They are rewritten in place
    before every replay. vLLM's own options turn graphs off (`enforce_eager`, `cudagraph_mode`).

    A draft model runs between two steps of its target, over page tables of its own. It gets a new
    plan for each of its steps, and its graphs hold no attention.

    With `VLLM_BATCH_INVARIANT`, every token goes to the prefill kernel. Other requests may change
    where a prompt is cut, how much of it is a prefix hit, and whether the request is preempted and
    computed again. So any token may be decoded in one run and prefilled in another.

    Attributes:
        kernels: Choice of the kernels for prompts.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: "VllmConfig", kv_cache_spec: "KVCacheSpec"
    ) -> AttentionCGSupport:
        """Get the batches that a CUDA graph may hold.

        With speculative decoding, these have several tokens per request if the decode kernel can
        process all of them in one tile, or if batches are invariant.
        """
        if vllm_config.speculative_config is None or not isinstance(kv_cache_spec, AttentionSpec):
            return cls._cudagraph_support
        if vllm.envs.VLLM_BATCH_INVARIANT:
            return AttentionCGSupport.UNIFORM_BATCH
        group_heads = most_group_heads(vllm_config, kv_cache_spec.num_kv_heads)
        head_dim = kv_cache_spec.head_size
        if decode_query_tokens(vllm_config, group_heads, head_dim=head_dim) is None:
            return cls._cudagraph_support
        return AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: "KVCacheSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        prepare_device(device)
        if not isinstance(kv_cache_spec, AttentionSpec):
            msg = f"expected the spec of an attention layer, got {type(kv_cache_spec).__name__}"
            raise TypeError(msg)
        num_heads = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self._kind = attention_kind(kv_cache_spec, num_heads, vllm_config.model_config.dtype)
        self._image_reach = image_reach(vllm_config, layer_names)
        self._dtype = vllm_config.model_config.dtype
        speculation, settings = vllm_config.speculative_config, read_settings(os.environ)
        self._leaves_out_rejected = speculation is not None and speculation.uses_draft_model()
        self._max_tokens = vllm_config.model_config.max_model_len
        self._is_batch_invariant = vllm.envs.VLLM_BATCH_INVARIANT
        self._decode_query_tokens = (
            0
            if self._is_batch_invariant
            else decode_query_tokens(
                vllm_config, self._kind.group_heads, head_dim=self._kind.head_dim
            )
        )
        self._reads_images = self._image_reach.is_read and vllm_config.model_config.is_mm_prefix_lm
        # Invariant batches do not use these kernels, so no trial is needed.
        asked = False if self._is_batch_invariant else settings.has_specialized_prefill
        self.kernels = KernelChoice(device, asked=asked)
        # In cross attention, the host's bounds count tokens of the decoder.
        has_scratch = self._kind.is_quantised and self._kind.is_causal
        if settings.prompt_scratch_bytes and not self._kind.is_quantised:
            logger.warning_once(
                "%s has no effect on layers whose cache is not quantised", SCRATCH_VARIABLE
            )
        scratch_bytes = settings.prompt_scratch_bytes if has_scratch else 0
        least_bytes = page_bytes(self._kind, self._dtype)
        if 0 < scratch_bytes < least_bytes:
            msg = (
                f"{SCRATCH_VARIABLE}={scratch_bytes}: expected at least {least_bytes} bytes, for a "
                f"page of these layers"
            )
            raise ValueError(msg)
        self._scratch = scratch_on(device, scratch_bytes) if scratch_bytes else None
        self._layers = vllm_config.compilation_config.static_forward_context
        self._captured = CapturedPlans()

    def calls(self) -> list[Call]:
        """Describe the calls of `paged_attention` that the layers will make, for trials.

        There are none for quantised pages, which specialised kernels do not read. If prompts read a
        scratch instead, the calls are those over the scratch.
        """
        scratch = None
        if self._kind.is_quantised:
            if self._scratch is None:
                return []
            scratch = scratch_pages(self._scratch, self._kind, self._dtype)
        layers = [self._layers[name] for name in self.layer_names]
        return [
            layer.impl.call_of(
                layer,
                self._kind,
                dtype=self._dtype,
                decode_query_tokens=self._decode_query_tokens,
                reads_spans=self._reads_images and scratch is None,
                scratch=scratch,
            )
            for layer in layers
        ]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> JengaTritonMetadata:
        """Build a step's metadata and its work lists.

        Raises:
            NotImplementedError: The step is not causal, and the layers are, or the reverse.
        """
        common = common_attn_metadata
        if common.causal is not self._kind.is_causal:
            msg = f"causal must be {self._kind.is_causal} in these layers, got {common.causal}"
            raise NotImplementedError(msg)
        reach = self._image_reach
        spans = None
        if reach.is_read:
            window_tokens = self._kind.window_tokens
            spans = image_spans(common, window_tokens, is_clamped=reach.is_clamped)
        plan, scratch_plan = self._plan(common, has_spans=spans is not None), None
        # Steps of a draft model (fast_build) have few query tokens each.
        if self._scratch is not None and spans is None and not fast_build:
            scratch_plan = plan_of_step(
                plan,
                common,
                scratch_bytes=self._scratch.numel(),
                is_warp_specialized=self.kernels.own,
            )
        return JengaTritonMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_starts=common.query_start_loc,
            seq_lens=common.seq_lens,
            page_table=common.block_table_tensor,
            plan=plan,
            scratch=None if scratch_plan is None else self._scratch,
            scratch_plan=scratch_plan,
            # Copied from pinned memory. Otherwise the host would wait for earlier steps.
            spans=None if spans is None else async_tensor_h2d(spans, device=self.device),
        )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> JengaTritonMetadata:
        """Build the metadata of one step of a draft model."""
        if draft_index == 0 and self._leaves_out_rejected:
            fill_rejected_slots(
                common_attn_metadata,
                page_tokens=self._kind.page_tokens,
                max_tokens=self._max_tokens,
            )
        return self.build(0, common_attn_metadata, fast_build=True)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> JengaTritonMetadata:
        """Build metadata whose tensors keep their addresses, for a batch of decoding requests."""
        metadata = self.build(0, common_attn_metadata)
        metadata.plan = self._captured.keep(
            metadata.plan, max_query_tokens=common_attn_metadata.max_query_len
        )
        return metadata

    def _plan(self, common: CommonAttentionMetadata, *, has_spans: bool) -> AttentionPlan:
        # A step with spans gets a plan of its own. If a graph is replayed, it reads the kept plan.
        captured = self._captured.updated(
            common.query_start_loc,
            common.seq_lens,
            num_tokens=common.num_actual_tokens,
            max_query_tokens=common.max_query_len,
        )
        if captured is not None and not has_spans:
            return captured
        counts = common.query_start_loc_cpu.diff()
        return plan_attention(
            common.query_start_loc,
            common.seq_lens,
            self._kind,
            num_tokens=common.num_actual_tokens,
            dtype=self._dtype,
            max_query_tokens=common.max_query_len,
            min_query_tokens=min(filter(None, counts.tolist()), default=None),
            # Only the prefill kernel reads spans.
            decode_query_tokens=0 if has_spans else self._decode_query_tokens,
            is_batch_invariant=self._is_batch_invariant,
            is_warp_specialized=self.kernels.own,
        )

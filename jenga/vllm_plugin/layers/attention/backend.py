"""The attention backend JENGA_TRITON: vLLM's backend interface, served by `jenga_kernels`."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from jenga.vllm_plugin.config import CACHE_DTYPES, is_quantised
from jenga.vllm_plugin.layers.attention.attention_builder import (
    JengaTritonMetadata,
    JengaTritonMetadataBuilder,
)
from jenga.vllm_plugin.layers.attention.prompt_scratch import scratch_on
from jenga.vllm_plugin.layers.cache_views import (
    E5M2,
    INT4,
    SLOT_SCALES_BYTES,
    CacheViews,
    cache_views,
)
from jenga.vllm_plugin.patches.all_patches import check_watch
from jenga.vllm_plugin.settings.environment import BACKEND_NAME, read_settings
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.specs.layer_types import HEAD_DIMS, INT4_ROW_ELEMENTS
from jenga_kernels.attention.kv_store import kv_store
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.attention.rotation import Rotation, hadamard_rotation
from jenga_kernels.attention.scratch_attention import scratch_attention
from jenga_kernels.plans.attention_plan import AttentionKind
from jenga_kernels.trial_calls import FEW_TOKENS, Call
from jenga_kernels.triton.lib.tiles import ADA

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

_ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


class JengaTritonBackend(AttentionBackend):
    """Paged attention over small pages of the arena, in Triton."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type["JengaTritonImpl"]:
        """Get the class that runs a layer."""
        return JengaTritonImpl

    @staticmethod
    def get_builder_cls() -> type[JengaTritonMetadataBuilder]:
        """Get the class that builds a step's metadata."""
        return JengaTritonMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: "KVCacheSpec | None" = None,
    ) -> list[int | MultipleOf]:
        """Get the page sizes that the kernels read: any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Get the layouts of a page: layer by layer, and within a layer head by head.

        A head's tokens are consecutive. VLLM_KV_CACHE_LAYOUT=BLNHC selects token-major order.
        """
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether the kernels serve a head dimension: a multiple of 16 from 64 to 512."""
        return head_size in HEAD_DIMS

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether sliding windows are served: they are."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether attention sinks are served: they are."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether tokens of an image may attend to earlier and later tokens of it: they may."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether results can be independent of other requests in the batch: they can."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether each head of a quantised cache may have its own scale: it may."""
        return True

    @classmethod
    def customize_spec(cls, spec: "AttentionSpec") -> "AttentionSpec":
        """Add the bytes of scales to a slot if each slot has its own.

        vLLM's Triton backend does the same.
        """
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        row_bytes = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        if spec.kv_quant_mode.name == INT4.upper():
            row_bytes //= 2
        return replace(spec, state_content_bytes=row_bytes + SLOT_SCALES_BYTES)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,  # noqa: ANN401
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,  # noqa: ANN401
    ) -> str | None:
        """Get the reason why a combination is not served, or None if it is.

        Reasons are:

        - float8_e4m3fn on a GPU that cannot convert it,
        - rows with four bits an element that do not start at the kernels' alignment,
        - a vLLM in which the plugin cannot see which backend a configuration selects. On such a
          version no combination is served.
        """
        try:
            check_watch()
        except (AttributeError, ImportError, ValueError) as error:
            return f"{BACKEND_NAME} cannot be selected on this vLLM: {error}"
        is_fp8 = kv_cache_dtype is not None and kv_cache_dtype.startswith("fp8")
        is_converted = is_fp8 and kv_cache_dtype != E5M2
        if is_converted and device_capability is not None and device_capability.to_int() < ADA:
            return f"--kv-cache-dtype {kv_cache_dtype} needs compute capability 8.9"
        if kv_cache_dtype == INT4 and head_size % INT4_ROW_ELEMENTS:
            return (
                f"--kv-cache-dtype {INT4} needs heads of a multiple of {INT4_ROW_ELEMENTS} "
                f"elements, got {head_size}"
            )
        return None

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Whether KV connectors can read the arena: no, they assume one number of pages."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether an attention type is served: a decoder's self-attention or cross attention."""
        return attn_type in _ATTENTION_TYPES


class JengaTritonImpl(AttentionImpl[JengaTritonMetadata]):
    """Runs one attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type not in _ATTENTION_TYPES:
            raise Refusal.ATTENTION_LAYER.error(attn_type)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = scale
        self.window_tokens = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.scratch_bytes = 0
        if is_quantised(kv_cache_dtype):
            self.scratch_bytes = read_settings(os.environ).prompt_scratch_bytes
        # Strides of the queries when vLLM profiles memory. Every step has the same strides.
        self.query_strides: tuple[int, ...] | None = None
        # On the host: a device tensor made now would be lost with the weights in deep sleep.
        self.alibi_slopes = (
            None
            if alibi_slopes is None
            else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        )

    def _slopes(self, device: torch.device) -> torch.Tensor | None:
        """Get the ALiBi slopes on the device of the queries. They are moved there once."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self.alibi_slopes

    def _views(self, layer: Any, kv_cache: torch.Tensor) -> CacheViews:  # noqa: ANN401
        return cache_views(
            layer, kv_cache, head_dim=self.head_size, cache_dtype=self.kv_cache_dtype
        )

    def call_of(
        self,
        layer: Any,  # noqa: ANN401
        kind: AttentionKind,
        *,
        dtype: torch.dtype,
        decode_query_tokens: int | None,
        reads_spans: bool,
        scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Call:
        """Describe the calls of `paged_attention` that the layer will make.

        Args:
            layer: vLLM's layer, with its cache bound.
            kind: Kind of the layer.
            dtype: Element type of the queries.
            decode_query_tokens: As in `plan_attention`.
            reads_spans: Whether tokens of images attend to later tokens of their image.
            scratch: Pages of keys and of values that prompts read instead of the layer's cache.
        """
        views = self._views(layer, layer.kv_cache)
        if scratch is not None:
            views = CacheViews(
                k_pages=scratch[0],
                v_pages=scratch[1],
                k_scale=None,
                v_scale=None,
                k_slot_scales=None,
                v_slot_scales=None,
            )
        shape = (FEW_TOKENS, self.num_heads, self.head_size)
        q = torch.empty(shape, dtype=dtype, device="meta")
        if self.query_strides is not None:
            q = torch.empty_strided(shape, self.query_strides, dtype=dtype, device="meta")
        return Call.of(
            "paged_attention",
            q=q,
            window_tokens=kind.window_tokens,
            chunk_tokens=kind.chunk_tokens,
            is_causal=kind.is_causal,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            decode_query_tokens=decode_query_tokens,
            reads_spans=reads_spans,
            **views,  # pyright: ignore[reportArgumentType] (of a TypedDict)
        )

    def do_kv_cache_update(
        self,
        layer: Any,  # noqa: ANN401
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's keys and values into their slots."""
        num_tokens = slot_mapping.shape[0]
        key, value = key[:num_tokens], value[:num_tokens]
        if self.kv_cache_dtype == INT4:
            key, value = key @ _rotation(key).forward, value @ _rotation(value).forward
        kv_store(key, value, slots=slot_mapping, **self._views(layer, kv_cache))

    def forward(
        self,
        layer: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: JengaTritonMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run attention and write `output`, [num_tokens, num_heads, value_dim], in place.

        Without metadata, `output` is filled with zeros.

        Raises:
            ValueError: A quantised output is asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Refusal.QUANTISED_OUTPUT.error()
        if attn_metadata is None:  # vLLM profiles memory without a cache
            self.query_strides = query.stride()
            if self.scratch_bytes:
                scratch_on(query.device, self.scratch_bytes)
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        query, results, scale = query[:num_tokens], output[:num_tokens], self.scale
        if self.kv_cache_dtype == INT4:
            rotation = _rotation(query)
            query, scale = query @ rotation.forward, scale / rotation.gain
            results = torch.empty_like(results)
        shared = {
            "page_table": attn_metadata.page_table,
            "query_starts": attn_metadata.query_starts,
            "seq_lens": attn_metadata.seq_lens,
            "scale": scale,
            "window_tokens": self.window_tokens,
            "chunk_tokens": attn_metadata.plan.kind.chunk_tokens,
            "is_causal": attn_metadata.plan.kind.is_causal,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks,
            "alibi_slopes": self._slopes(query.device),
            "out": results,
            "lse": attn_metadata.lse,
            **self._views(layer, kv_cache),
        }
        scratch, scratch_plan = attn_metadata.scratch, attn_metadata.scratch_plan
        if scratch is not None and scratch_plan is not None:
            scratch_attention(query, **shared, plan=scratch_plan, scratch=scratch)
        else:
            spans, plan = attn_metadata.spans, attn_metadata.plan
            paged_attention(query, **shared, spans=spans, plan=plan)
        if self.kv_cache_dtype == INT4:
            torch.matmul(results, _rotation(results).back, out=output[:num_tokens])
        return output


def _rotation(rows: torch.Tensor) -> Rotation:
    """Get the rotation for rows that are stored with four bits an element."""
    return hadamard_rotation(rows.shape[-1], rows.dtype, rows.device)

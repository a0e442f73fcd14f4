"""JENGA_TRITON for layers of multi-head latent attention (MLA): latents in pages of the arena.

The layer is vLLM's `MLAAttention`, which calls a backend in two ways:

- `forward_mqa` gets queries with the heads' key projections absorbed, and reads latents directly.
  It serves requests with few new tokens, through `latent_attention`.
- `forward_mha` serves long chunks of prompts. vLLM computes each head's keys and values and runs
  its own kernel. Only the latents of earlier chunks are read from our pages.

`latent_builder` decides which requests go which way.

A float8 cache has one scale per layer, for latents and rotary keys. Queries are not quantised. As
in stock vLLM, a long chunk of a prompt reads its own tokens unquantised.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonImpl,
    MLACommonMetadata,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)
from vllm.v1.attention.backend import AttentionType

from jenga.vllm_plugin.config import CACHE_DTYPES
from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend
from jenga.vllm_plugin.layers.attention.latent_builder import (
    JengaLatentDecode,
    JengaLatentMetadataBuilder,
)
from jenga.vllm_plugin.layers.cache_views import E5M2, SLOT_SCALE_DTYPES
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga_kernels.checks.tensors import FP8_DTYPE
from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.latent.latent_store import latent_store
from jenga_kernels.trial_calls import FEW_TOKENS, Call

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

_WIDTHS = (320, 576)
"""Numbers of elements in a stored row: a latent of 256 or 512, and a rotary key of 64.

vLLM's metadata also allows one other width, for layers without rotary keys.
"""


class JengaLatentBackend(JengaTritonBackend):
    """Latent attention over small pages of the arena, in Triton."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        name for name in CACHE_DTYPES if name not in (E5M2, *SLOT_SCALE_DTYPES)
    ]

    @staticmethod
    def get_impl_cls() -> type["JengaLatentImpl"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Get the class that runs a layer."""
        return JengaLatentImpl

    @staticmethod
    def get_builder_cls() -> type[JengaLatentMetadataBuilder]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Get the class that builds a step's metadata."""
        return JengaLatentMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """Whether layers store latents: they do."""
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether stored rows of this number of elements are served."""
        return head_size in _WIDTHS

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether sliding windows are served: not over latents."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether attention sinks are served: not over latents."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether tokens of an image may attend to later tokens of it: not over latents."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether each head may have its own scale: no, a latent belongs to all heads."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether an attention type is served: a decoder's self-attention."""
        return attn_type == AttentionType.DECODER


def _stored(
    kv_cache: torch.Tensor, k_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Get the pages of a layer's cache and their scale.

    Args:
        kv_cache: [num_pages, page_tokens, latent_dim + rotary_dim]. uint8 stands for float8_e4m3fn,
            and vLLM passes it as that when attention runs.
        k_scale: The layer's scale, one element.

    Returns:
        The pages, and their scale f32[1]. The scale is None if they are not quantised.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(FP8_DTYPE)
    return kv_cache, k_scale.reshape(1) if kv_cache.dtype == FP8_DTYPE else None


def gathered_latents(
    pages: torch.Tensor,
    chunk: "MLACommonPrefillMetadata.ContextChunk",
    page_table: torch.Tensor,
    *,
    dtype: torch.dtype,
    latent_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the rows of tokens computed before this step from their pages.

    Args:
        pages: [num_pages, page_tokens, latent_dim + rotary_dim], `dtype` or float8_e4m3fn; any
            strides.
        chunk: vLLM's description of the tokens: a range of each of some requests.
        page_table: i32[requests of the chunk, max_pages].
        dtype: Element type of the result.
        latent_scale: Scale that stored rows are multiplied with, f32[1]. None if they are not
            quantised.

    Returns:
        [num_tokens, latent_dim + rotary_dim], one request's tokens after another's.
    """
    num_tokens, page_tokens = chunk.num_context_tokens, pages.shape[1]
    requests = chunk.token_to_seq[:num_tokens].long()
    rows = torch.arange(num_tokens, device=pages.device)
    tokens = rows - chunk.cu_seq_lens[requests] + chunk.starts[requests]
    stored = pages[page_table[requests, tokens // page_tokens].long(), tokens % page_tokens]
    if latent_scale is None:
        return stored.to(dtype)
    return (stored.float() * latent_scale).to(dtype)


class JengaLatentImpl(MLACommonImpl[MLACommonMetadata[JengaLatentDecode]]):
    """Runs one layer of latent attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_arguments: Any,  # noqa: ANN401 (vLLM's, passed on)
    ) -> None:
        features = {
            "ALiBi": alibi_slopes,
            "sliding windows": sliding_window,
            "soft caps": logits_soft_cap,
            f"type {attn_type}": attn_type != AttentionType.DECODER,
        }
        refused = [feature for feature, in_use in features.items() if in_use]
        if refused:
            raise Refusal.LATENT_FEATURES.error(", ".join(refused))
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_arguments,
        )
        self.supports_quant_query_input = False

    def call_of(
        self,
        layer: Any,  # noqa: ANN401
        *,
        dtype: torch.dtype,
        decode_query_tokens: int | None,
    ) -> Call:
        """Describe the calls of `latent_attention` that the layer will make.

        Args:
            layer: vLLM's layer, with its cache bound.
            dtype: Element type of the queries.
            decode_query_tokens: As in `plan_latent_attention`.
        """
        pages, latent_scale = _stored(layer.kv_cache, layer._k_scale)
        q = torch.empty(FEW_TOKENS, self.num_heads, pages.shape[2], dtype=dtype, device="meta")
        return Call.of(
            "latent_attention",
            q=q,
            pages=pages,
            latent_dim=self.kv_lora_rank,
            latent_scale=latent_scale,
            decode_query_tokens=decode_query_tokens,
        )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write a step's latents and rotary keys into their slots."""
        pages, latent_scale = _stored(kv_cache, k_scale)
        num_tokens = slot_mapping.shape[0]
        latent_store(
            kv_c_normed[:num_tokens],
            k_pe[:num_tokens].squeeze(1),
            pages,
            slot_mapping,
            latent_scale=latent_scale,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[JengaLatentDecode],
        layer: Any,  # noqa: ANN401 (has the scale of quantised pages)
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run attention over latents with the key projections absorbed into the queries.

        Returns:
            Results in the latents' space, [num_tokens, num_heads, latent_dim], and None.

        Raises:
            ValueError: The step has no absorbed requests.
        """
        decode = attn_metadata.decode
        if decode is None:
            msg = "attn_metadata must have decoding requests, got none"
            raise ValueError(msg)
        pages, latent_scale = _stored(kv_c_and_k_pe_cache, layer._k_scale)
        out = latent_attention(
            torch.cat(q, dim=-1) if isinstance(q, tuple) else q,
            pages,
            decode.block_table,
            decode.query_starts,
            decode.seq_lens,
            scale=self.scale,
            latent_dim=self.kv_lora_rank,
            latent_scale=latent_scale,
            plan=decode.plan,
        )
        return out, None

    def _compute_prefill_context(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[JengaLatentDecode],
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run attention over the tokens computed before this step, in chunks of vLLM's size.

        vLLM's own gather is not used. On a CPU it needs contiguous pages, and cannot read float8.

        Returns:
            Results, [num_tokens, num_heads, v_head_dim], and log-sum-exps, [num_heads, num_tokens].

        Raises:
            ValueError: The step has no prompts with such tokens.
        """
        prefill = attn_metadata.prefill
        if prefill is None or prefill.chunked_context is None or prefill.prefill_backend is None:
            msg = "attn_metadata must have prompts with a context, got none"
            raise ValueError(msg)
        context = prefill.chunked_context
        pages, latent_scale = _stored(kv_c_and_k_pe_cache, k_scale)
        output = output_lse = None
        for chunk in context.chunks:
            rows = gathered_latents(
                pages,
                chunk,
                prefill.block_table[chunk.request_slice],
                dtype=q.dtype,
                latent_scale=latent_scale,
            )
            latents, rotary = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            k_nope, v = (
                self.kv_b_proj(latents)[0]
                .view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
                .split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            )
            part, part_lse = prefill.prefill_backend.run_prefill_context_chunk(
                chunk=chunk,
                q=q[chunk.token_slice],
                k=self._concat_k_nope_k_pe(k_nope, rotary.unsqueeze(1)),
                v=v,
            )
            if output is None or output_lse is None:
                output, output_lse = init_mla_context_partial(
                    context, part, part_lse, num_tokens=q.shape[0]
                )
            accumulate_mla_context_chunk(chunk, part, part_lse, output, output_lse)
        if output is None or output_lse is None:
            msg = "the context of prompts must have tokens, got none"
            raise ValueError(msg)
        return output, output_lse

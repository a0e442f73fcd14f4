"""What the layers of latent attention share in a step: who is absorbed, and its work, counted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from jenga.vllm_plugin.captured_plans import CapturedPlans
from jenga_kernels.attention_plan import AttentionKind, AttentionPlan
from jenga_kernels.latent_plan import plan_latent_attention
from jenga_kernels.triton.device import skip_overflow_checks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class JengaLatentDecode(MLACommonDecodeMetadata):
    """What layers need for the requests whose heads' projections are absorbed.

    Attributes:
        query_starts: i32[num_requests + 1], where each request's tokens begin.
        plan: The step's work lists.
    """

    query_starts: torch.Tensor
    plan: AttentionPlan


def absorbed_query_tokens(*, latent_dim: int, nope_dim: int, value_dim: int) -> int:
    """Most new tokens of a request for which reading its latents as they are costs less.

    Read so, a query's head multiplies with a latent twice for each token of the context, instead of
    with its own key and value; but these have to be made first, once for all queries. Both are
    multiplications of matrices, so their counts decide: no GPU has timed the two.

    Args:
        latent_dim: Elements of a latent.
        nope_dim: Elements of a head's own key, without the rotary part.
        value_dim: Elements of a head's value.
    """
    saved_per_query = 2 * latent_dim - nope_dim - value_dim
    if saved_per_query <= 0:
        msg = f"latent_dim must exceed half of {nope_dim} + {value_dim}, got {latent_dim}"
        raise ValueError(msg)
    return max(1, latent_dim * (nope_dim + value_dim) // saved_per_query)


class JengaLatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata[JengaLatentDecode]]):
    """Prepares what layers of latent attention share in a step.

    vLLM's own builder describes the long chunks of prompts. As in `attention_builder`, each size of
    a captured batch keeps its work lists, made anew in place before every replay.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self,
        kv_cache_spec: "AttentionSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if device.type == "cpu":
            skip_overflow_checks()
        self._kind = AttentionKind(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.mla_dims.kv_lora_rank,
            page_tokens=kv_cache_spec.block_size,
        )
        self.reorder_batch_threshold = max(
            self.reorder_batch_threshold,
            absorbed_query_tokens(
                latent_dim=self.mla_dims.kv_lora_rank,
                nope_dim=self.mla_dims.qk_nope_head_dim,
                value_dim=self.mla_dims.v_head_dim,
            ),
        )
        self._captured = CapturedPlans()

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLACommonMetadata[JengaLatentDecode]:
        """Collect tensors that stay where they are, for a batch of decoding requests."""
        metadata = self.build(0, common_attn_metadata)
        if metadata.decode is None or metadata.num_prefills:
            msg = (
                f"a CUDA graph must have decoding requests alone, got {metadata.num_prefills} more"
            )
            raise NotImplementedError(msg)
        metadata.decode.plan = self._captured.keep(
            metadata.decode.plan, max_query_tokens=common_attn_metadata.max_query_len
        )
        return metadata

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> JengaLatentDecode:
        query_lens = query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]
        max_query_tokens = int(query_lens.max())
        plan = self._captured.updated(
            query_start_loc_device,
            seq_lens_device,
            num_tokens=num_decode_tokens,
            max_query_tokens=max_query_tokens,
        )
        if plan is None:
            plan = plan_latent_attention(
                query_start_loc_device,
                seq_lens_device,
                self._kind,
                num_tokens=num_decode_tokens,
                dtype=self.model_config.dtype,
                max_query_tokens=max_query_tokens,
            )
        return JengaLatentDecode(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_starts=query_start_loc_device,
            plan=plan,
        )

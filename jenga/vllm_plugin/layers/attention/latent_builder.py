"""A step's metadata for layers of latent attention (MLA).

A request is absorbed if its queries include the heads' key projections and read latents directly.
This module decides which requests are absorbed, and builds their work lists.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import vllm.envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVQuantMode

from jenga.vllm_plugin.layers.attention.attention_builder import fill_rejected_slots
from jenga.vllm_plugin.layers.attention.captured_plans import CapturedPlans
from jenga.vllm_plugin.layers.cpu_serving import prepare_device
from jenga.vllm_plugin.settings.environment import read_settings
from jenga.vllm_plugin.settings.speculation import DRAFT_PREFIX, drafted_query_tokens
from jenga.vllm_plugin.trials.tried_kernels import KernelChoice
from jenga_kernels.checks.pages import is_other_float
from jenga_kernels.plans.attention_plan import AttentionKind, AttentionPlan
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.trial_calls import Call
from jenga_kernels.triton.lib.tiles import MIN_ROWS

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

MAX_DECODE_QUERY_TOKENS = MIN_ROWS
"""Number of query tokens of one head that fit into the decode kernel's tile on every GPU.

It holds for every dtype. Requests with more query tokens go to the prefill kernel.
"""


@dataclass
class JengaLatentDecode(MLACommonDecodeMetadata):
    """A step's metadata for the absorbed requests.

    Attributes:
        query_starts: i32[num_requests + 1], index of each request's first token, and the end.
        plan: The step's work lists.
    """

    query_starts: torch.Tensor
    plan: AttentionPlan


def absorbed_query_tokens(*, latent_dim: int, nope_dim: int, value_dim: int) -> int:
    """Get the largest number of a request's new tokens for which absorption costs less.

    An absorbed query head is multiplied with each latent of the context twice. Otherwise it is
    multiplied with a key and a value of its head, which must first be computed, once for all
    queries. Both ways are matrix products, so the number of multiplications decides. The two have
    not been timed on a GPU.

    Args:
        latent_dim: Number of elements in a latent.
        nope_dim: Number of elements in a head's key, without the rotary part.
        value_dim: Number of elements in a head's value.

    Raises:
        ValueError: A latent is so short that absorption always costs less.
    """
    saved_per_query = 2 * latent_dim - nope_dim - value_dim
    if saved_per_query <= 0:
        msg = f"latent_dim must exceed half of {nope_dim} + {value_dim}, got {latent_dim}"
        raise ValueError(msg)
    return max(1, latent_dim * (nope_dim + value_dim) // saved_per_query)


def count_absorbed(vllm_config: VllmConfig) -> None:
    """Let vLLM's memory profile cover a step in which all requests are absorbed.

    In the profile run, vLLM's layer has no cache to read. It allocates keys and values for as many
    rows as a chunk of context has. An absorbed token needs three rows in the latents' space: its
    query without the rotary part, its query with it, and its result. With many tokens in a step
    this is more memory, so the number of rows is raised.

    Args:
        vllm_config: Configuration after the model and its draft model were made.
    """
    layers = get_layers_from_vllm_config(vllm_config, cast("type[Any]", MLAAttention))
    for name, layer in layers.items():
        num_tokens = most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        if not absorbs_all([name]):
            of_request = absorbed_query_tokens(
                latent_dim=layer.kv_lora_rank,
                nope_dim=layer.qk_nope_head_dim,
                value_dim=layer.v_head_dim,
            )
            of_request = max(of_request, drafted_query_tokens(vllm_config))
            num_tokens = min(most_tokens, vllm_config.scheduler_config.max_num_seqs * of_request)
        per_token = 3 * layer.kv_lora_rank + layer.qk_rope_head_dim
        num_rows = -(-num_tokens * per_token // (layer.qk_nope_head_dim + layer.v_head_dim))
        num_rows = max(num_rows, layer.chunked_prefill_workspace_size)
        layer._chunked_prefill_workspace_size = num_rows


def absorbs_all(layer_names: Iterable[str]) -> bool:
    """Whether all requests are absorbed; `JengaLatentMetadataBuilder` explains when."""
    is_draft_model = any(name.startswith(DRAFT_PREFIX) for name in layer_names)
    return is_draft_model or vllm.envs.VLLM_BATCH_INVARIANT


def latent_query_tokens(num_tokens: int) -> int | None:
    """Get the value of `decode_query_tokens` for `plan_latent_attention`.

    Requests with up to that number of query tokens go to the decode kernel.

    Args:
        num_tokens: Largest number of query tokens of a decoding request: one, and its drafts.

    Returns:
        The number, or None to let the kernel take as many tokens as cost no more than one. None is
        also returned if drafts are longer than a tile.
    """
    return num_tokens if 1 < num_tokens <= MAX_DECODE_QUERY_TOKENS else None


class JengaLatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata[JengaLatentDecode]]):
    """Builds a step's metadata for layers of latent attention.

    vLLM's own builder describes the long chunks of prompts. As in `attention_builder`, each
    captured batch size keeps its work lists, which are rewritten in place before every replay.

    All requests are absorbed, long prompts too, in two cases:

    - In a separate draft model. It reads one more token than its target in a step, and the lengths
      on the host, which describe prompts, do not count that token.
    - With `VLLM_BATCH_INVARIANT`. A token's result then does not depend on where its prompt is cut.

    Attributes:
        kernels: Choice of the kernels for decoding requests.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    @classmethod
    def get_cudagraph_support(
        cls,
        vllm_config: "VllmConfig",
        kv_cache_spec: "KVCacheSpec",
    ) -> AttentionCGSupport:
        """Get the batches that a CUDA graph may hold.

        With speculative decoding, these have several tokens per request if the decode kernel can
        process all of them in one tile, or if batches are invariant.
        """
        if vllm.envs.VLLM_BATCH_INVARIANT:
            return AttentionCGSupport.UNIFORM_BATCH
        if latent_query_tokens(drafted_query_tokens(vllm_config)) is None:
            return cls._cudagraph_support
        return AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: "AttentionSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        prepare_device(device)
        self._kind = AttentionKind(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.mla_dims.kv_lora_rank,
            page_tokens=kv_cache_spec.block_size,
            is_quantised=kv_cache_spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR,
            is_other_float=is_other_float(kv_cache_spec.dtype, vllm_config.model_config.dtype),
        )
        # vLLM's threshold so far: the drafts of a decoding request, and one token.
        self._decode_query_tokens = latent_query_tokens(self.reorder_batch_threshold)
        self.reorder_batch_threshold = max(
            self.reorder_batch_threshold,
            absorbed_query_tokens(
                latent_dim=self.mla_dims.kv_lora_rank,
                nope_dim=self.mla_dims.qk_nope_head_dim,
                value_dim=self.mla_dims.v_head_dim,
            ),
        )
        self._is_draft_model = any(name.startswith(DRAFT_PREFIX) for name in layer_names)
        if self._is_draft_model:
            self._decode_query_tokens = latent_query_tokens(drafted_query_tokens(vllm_config))
        self._is_batch_invariant = vllm.envs.VLLM_BATCH_INVARIANT
        if self._is_batch_invariant:
            self._decode_query_tokens = 0
        if absorbs_all(layer_names):
            self.reorder_batch_threshold = vllm_config.scheduler_config.max_num_batched_tokens + 1
        asked = read_settings(os.environ).has_specialized_latents
        self.kernels = KernelChoice(device, asked=asked)
        self._layer_names = tuple(layer_names)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._page_tokens = kv_cache_spec.block_size
        self._max_tokens = vllm_config.model_config.max_model_len
        self._captured = CapturedPlans()

    def calls(self) -> list[Call]:
        """Describe the calls of `latent_attention` that the layers will make, for trials."""
        layers = [self._layers[name] for name in self._layer_names]
        return [
            layer.impl.call_of(
                layer,
                dtype=self.model_config.dtype,
                decode_query_tokens=self._decode_query_tokens,
            )
            for layer in layers
        ]

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> MLACommonMetadata[JengaLatentDecode]:
        """Build the metadata of one step of a draft model."""
        if draft_index == 0 and self._is_draft_model:
            fill_rejected_slots(
                common_attn_metadata,
                page_tokens=self._page_tokens,
                max_tokens=self._max_tokens,
            )
        return self.build(0, common_attn_metadata, fast_build=True)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLACommonMetadata[JengaLatentDecode]:
        """Build metadata whose tensors keep their addresses, for a batch of decoding requests.

        Raises:
            NotImplementedError: The batch has other requests too.
        """
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
                decode_query_tokens=self._decode_query_tokens,
                is_batch_invariant=self._is_batch_invariant,
                is_warp_specialized=self.kernels.own,
            )
        return JengaLatentDecode(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_starts=query_start_loc_device,
            plan=plan,
        )

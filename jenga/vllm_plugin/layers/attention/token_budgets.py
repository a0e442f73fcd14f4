"""Attention layers that shrink to a token budget: at the end of a prompt, and as outputs grow.

In the step that ends a prompt, the layer scores the prompt's tokens by the attention of its last
queries. Each KV head then moves the tokens that it keeps to the last slots of the prompt. Slots of
later tokens stay as they are, and whole pages at the start are given up. From the next step on, the
layer reads the page table from its first kept page. With `output_tokens`, it does the same to all
tokens that it has after each so many further ones.

A step never goes past a choice, and the step that ends a prompt has all queries that choose
(`cut_at_choice`). So neither chunks of prompts nor preemptions change what is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from jenga.vllm_plugin.layers.attention.attention_builder import (
    JengaTritonMetadata,
    JengaTritonMetadataBuilder,
)
from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend, JengaTritonImpl
from jenga.vllm_plugin.layers.attention.budget_steps import (
    Numbers,
    Packing,
    Scoring,
    Sums,
    from_kept_pages,
    rows_of_step,
    scorings,
)
from jenga.vllm_plugin.layers.cache_views import CacheViews, split_pages
from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec
from jenga_kernels.attention.token_choice import choose_tokens
from jenga_kernels.attention.token_scores import token_scores
from jenga_kernels.pages.pack_slots import pack_slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass
class JengaBudgetMetadata(JengaTritonMetadata):
    """A step's metadata, shared by all layers of one budget.

    Page tables and lengths of requests past a choice begin at the first kept page.

    Attributes:
        scorings: The requests with queries that count for a choice, in groups.
    """

    scorings: tuple[Scoring, ...] = ()


def _no_prompts(_common: CommonAttentionMetadata) -> Numbers:
    return np.zeros(0, np.int64)


class JengaBudgetMetadataBuilder(JengaTritonMetadataBuilder):
    """Builds a step's metadata for layers of one budget.

    Page tables and lengths are made anew in each step, so no CUDA graph holds them.

    Attributes:
        prompt_tokens: Function that gets the number of prompt tokens of each request of the batch,
            given vLLM's metadata of the step.
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
        if not isinstance(kv_cache_spec, TokenBudgetSpec):
            msg = f"expected the spec of a token budget, got {type(kv_cache_spec).__name__}"
            raise TypeError(msg)
        self._budget_spec = kv_cache_spec
        self.prompt_tokens: Callable[[CommonAttentionMetadata], Numbers] = _no_prompts

    def calls(self) -> list[Any]:
        """Return no calls: specialised kernels are not tried for these layers."""
        return []

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> JengaBudgetMetadata:
        """Build a step's metadata and its work lists."""
        page_tokens = self._kind.page_tokens
        prompt_tokens = self.prompt_tokens(common_attn_metadata)
        rows = rows_of_step(common_attn_metadata, prompt_tokens, self._budget_spec)
        common = from_kept_pages(common_attn_metadata, rows, page_tokens, self.device)
        groups = tuple(scorings(common.block_table_tensor, rows, page_tokens, self.device))
        plain = super().build(common_prefix_len, common, fast_build)
        return JengaBudgetMetadata(
            num_actual_tokens=plain.num_actual_tokens,
            query_starts=plain.query_starts,
            seq_lens=plain.seq_lens,
            page_table=plain.page_table,
            plan=plain.plan,
            spans=plain.spans,
            lse=self._new_lse(plain.num_actual_tokens) if groups else None,
            scorings=groups,
        )

    def _new_lse(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self._kind.num_heads)
        return torch.empty(shape, dtype=torch.float32, device=self.device)


class JengaBudgetImpl(JengaTritonImpl):
    """Runs one attention layer with a token budget."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401
        """Make it.

        Raises:
            ValueError: The layer has a window or ALiBi, which depend on the places of keys.
        """
        super().__init__(*args, **named)
        if self.window_tokens is not None or self.alibi_slopes is not None:
            msg = "kv_token_budgets must be null for layers with a window or with ALiBi"
            raise ValueError(msg)

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
        """Run attention, then add up weights and shrink the requests for which the layer chooses.

        `output` is written in place, [num_tokens, num_heads, value_dim].
        """
        super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        if isinstance(attn_metadata, JengaBudgetMetadata) and attn_metadata.lse is not None:
            for scoring in attn_metadata.scorings:
                scores = self._score(layer, query, kv_cache, scoring, attn_metadata.lse)
                if scoring.packing is not None:
                    self._pack(layer, kv_cache, scores, scoring.packing)
        return output

    def _views(self, layer: Any, kv_cache: torch.Tensor) -> CacheViews:  # noqa: ANN401
        if layer.jenga_budget.output_tokens is None:
            return super()._views(layer, kv_cache)
        rows, _ = split_pages(kv_cache, num_words=1)
        return CacheViews(
            k_pages=rows[..., : self.head_size],
            v_pages=rows[..., self.head_size :],
            k_scale=None,
            v_scale=None,
            k_slot_scales=None,
            v_slot_scales=None,
        )

    def _score(
        self,
        layer: Any,  # noqa: ANN401
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scoring: Scoring,
        lse: torch.Tensor,
    ) -> torch.Tensor:
        """Sum the weights of the queries that count, with those of earlier steps.

        Returns:
            f32[num_requests, num_kv_heads, max_tokens].
        """
        scores = query.new_empty(
            (len(scoring.seq_lens), self.num_kv_heads, scoring.max_tokens), dtype=torch.float32
        )
        token_scores(
            query[: len(lse)],
            self._views(layer, kv_cache)["k_pages"],
            scoring.page_table,
            scoring.query_ends,
            scoring.seq_lens,
            scoring.num_queries,
            lse,
            scale=self.scale,
            soft_cap=self.soft_cap,
            out=scores,
        )
        if scoring.sums is not None:
            _, (words,) = split_pages(kv_cache, num_words=1)
            _add_up(scores, words, scoring.sums)
        return scores

    def _pack(
        self,
        layer: Any,  # noqa: ANN401
        kv_cache: torch.Tensor,
        scores: torch.Tensor,
        packing: Packing,
    ) -> None:
        """Move the tokens that each KV head keeps to the last slots of each request."""
        views, budget = self._views(layer, kv_cache), layer.jenga_budget
        sources = choose_tokens(
            scores if packing.rows is None else scores[packing.rows],
            packing.seq_lens,
            packing.num_kept,
            max_kept=packing.max_kept,
            sink_tokens=budget.sink_tokens,
            recent_tokens=budget.recent_tokens,
            pool_tokens=budget.pool_tokens,
        )
        pack_slots(
            views["k_pages"],
            views["v_pages"],
            packing.page_table,
            sources,
            packing.num_kept,
            packing.seq_lens,
        )


def _add_up(scores: torch.Tensor, words: torch.Tensor, sums: Sums) -> None:
    """Add the sums of earlier steps to scores, and store the sums that later steps continue.

    Args:
        scores: Weights of this step, f32[num_requests, num_kv_heads, max_tokens], written in place.
        words: Sums in the pages of the layer, f32[num_pages, page_tokens, num_kv_heads], written
            in place. Words that no step wrote may hold anything.
        sums: The words of the requests.
    """
    by_token = scores.transpose(1, 2)
    earlier = words[sums.read_pages, sums.slots]
    by_token += earlier.where(sums.is_read[..., None], 0.0)
    words[sums.written_pages, sums.slots] = by_token


class JengaBudgetBackend(JengaTritonBackend):
    """Paged attention of layers with a token budget."""

    @staticmethod
    def get_impl_cls() -> type[JengaBudgetImpl]:
        """Get the class that runs a layer."""
        return JengaBudgetImpl

    @staticmethod
    def get_builder_cls() -> type[JengaBudgetMetadataBuilder]:
        """Get the class that builds a step's metadata."""
        return JengaBudgetMetadataBuilder


# Model runner


def follow_prompts(model_runner: Any) -> None:  # noqa: ANN401
    """Let the builders see the prompts of the batch's rows. The runner must have its builders."""

    def of_first_runner(_common: CommonAttentionMetadata) -> Numbers:
        batch = model_runner.input_batch
        return batch.num_prompt_tokens[: batch.num_reqs]

    def of_second_runner(common: CommonAttentionMetadata) -> Numbers:
        states, slots = model_runner.req_states, common.req_idx
        # Rows of vLLM's dummy steps name slots of no request.
        if slots is None or not states.index_to_req_id.keys() >= set(slots.tolist()):
            return _no_prompts(common)
        return states.prompt_len.np[slots]

    is_second = hasattr(model_runner, "model_state")
    tables: Sequence[Any] = getattr(model_runner, "attn_groups", ())
    for groups in tables:
        for group in groups:
            for builder in group.metadata_builders:
                if isinstance(builder, JengaBudgetMetadataBuilder):
                    builder.prompt_tokens = of_second_runner if is_second else of_first_runner

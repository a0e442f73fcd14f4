"""Attention layers whose prompts shrink to a token budget.

In the step that ends a prompt, the layer scores the prompt's tokens by the attention of its last
queries. Each KV head then moves the tokens that it keeps to the last slots of the prompt. Slots of
later tokens stay as they are, and whole pages at the start are given up. From the next step on, the
layer reads the page table from its first kept page.

A step never goes past the end of a prompt, and the step that ends one has all queries that choose
(`end_of_prompt`). So neither chunks of prompts nor preemptions change what is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from jenga.policies.token_budget import dropped_tokens
from jenga.vllm_plugin.layers.attention import JengaTritonBackend, JengaTritonImpl
from jenga.vllm_plugin.layers.attention_builder import (
    JengaTritonMetadata,
    JengaTritonMetadataBuilder,
)
from jenga.vllm_plugin.specs.token_budgets import TokenBudgetSpec
from jenga_kernels.pack_slots import pack_slots
from jenga_kernels.token_choice import choose_tokens
from jenga_kernels.token_scores import token_scores

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The prompts that end in a step, and that a layer shrinks.

    Attributes:
        page_table: i32[num_prompts, max_pages], pages of each prompt.
        query_ends: i32[num_prompts], one past the row of its last query.
        seq_lens: i32[num_prompts], number of its tokens.
        num_kept: i32[num_prompts], number of tokens that it keeps.
        max_tokens: The longest of seq_lens.
        max_kept: The greatest of num_kept.
    """

    page_table: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    num_kept: torch.Tensor
    max_tokens: int
    max_kept: int


@dataclass
class JengaBudgetMetadata(JengaTritonMetadata):
    """A step's metadata, shared by all layers of one budget.

    Page tables and lengths of requests past their prompts begin at the first kept page.

    Attributes:
        packing: The prompts that the step ends, None if it ends none beyond the budget.
    """

    packing: Packing | None = None


def _no_prompts() -> Sequence[int]:
    return ()


class JengaBudgetMetadataBuilder(JengaTritonMetadataBuilder):
    """Builds a step's metadata for layers of one budget.

    Page tables and lengths are made anew in each step, so no CUDA graph holds them.

    Attributes:
        prompt_tokens: Function that gets the number of prompt tokens of each row of the batch.
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
        self._budget_tokens = kv_cache_spec.budget_tokens
        self.prompt_tokens: Callable[[], Sequence[int]] = _no_prompts

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
        common, page_tokens = common_attn_metadata, self._kind.page_tokens
        rows = _rows(common, self.prompt_tokens(), self._budget_tokens, page_tokens)
        dropped = [row.num_dropped if row.is_after else 0 for row in rows]
        dropped += [0] * (common.num_reqs - len(rows))
        packing = self._packing(common, [row for row in rows if row.is_ending])
        if any(dropped):
            common = _from_kept_pages(common, dropped, page_tokens, self.device)
        plain = super().build(common_prefix_len, common, fast_build)
        return JengaBudgetMetadata(
            num_actual_tokens=plain.num_actual_tokens,
            query_starts=plain.query_starts,
            seq_lens=plain.seq_lens,
            page_table=plain.page_table,
            plan=plain.plan,
            spans=plain.spans,
            lse=None if packing is None else self._new_lse(plain.num_actual_tokens),
            packing=packing,
        )

    def _new_lse(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self._kind.num_heads)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _packing(self, common: CommonAttentionMetadata, rows: "Sequence[_Row]") -> Packing | None:
        if not rows:
            return None
        fields = torch.tensor(
            [
                [row.row, row.query_end, row.prompt_tokens, row.prompt_tokens - row.num_dropped]
                for row in rows
            ],
            dtype=torch.int32,
        )
        indices, ends, seq_lens, num_kept = async_tensor_h2d(
            fields.T.contiguous(), device=self.device
        ).unbind(0)
        max_tokens = max(row.prompt_tokens for row in rows)
        num_pages = -(-max_tokens // self._kind.page_tokens)
        return Packing(
            page_table=common.block_table_tensor[indices.long(), :num_pages].contiguous(),
            query_ends=ends,
            seq_lens=seq_lens,
            num_kept=num_kept,
            max_tokens=max_tokens,
            max_kept=max(row.prompt_tokens - row.num_dropped for row in rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of the batch: a request whose prompt is beyond the budget.

    Attributes:
        row: Its number.
        query_end: One past its last query of the step.
        prompt_tokens: Number of tokens of its prompt.
        num_dropped: Number of them that are dropped.
        is_ending: Whether the step ends the prompt.
        is_after: Whether the prompt has ended before.
    """

    row: int
    query_end: int
    prompt_tokens: int
    num_dropped: int
    is_ending: bool
    is_after: bool


def _rows(
    common: CommonAttentionMetadata,
    prompt_tokens: Sequence[int],
    budget_tokens: int,
    page_tokens: int,
) -> list[_Row]:
    """Find where each request of a step stands.

    The upper bound of lengths is exact for prompts, and above the prompt for decoded tokens.
    """
    bounds = common.seq_lens_cpu_upper_bound
    if bounds is None:  # vLLM profiles memory, or captures graphs
        return []
    rows: list[_Row] = []
    ends = common.query_start_loc_cpu.tolist()[1:]
    for row, (end, seq_len, num_tokens) in enumerate(
        zip(ends, bounds.tolist(), prompt_tokens, strict=False)
    ):
        num_dropped = dropped_tokens(num_tokens, budget_tokens, page_tokens)
        rows.append(
            _Row(
                row=row,
                query_end=end,
                prompt_tokens=num_tokens,
                num_dropped=num_dropped,
                is_ending=num_dropped > 0 and seq_len == num_tokens,
                is_after=seq_len > num_tokens,
            )
        )
    return rows


def _from_kept_pages(
    common: CommonAttentionMetadata, dropped: Sequence[int], page_tokens: int, device: torch.device
) -> CommonAttentionMetadata:
    """Let page tables and lengths begin at the first kept page of each request.

    Args:
        common: vLLM's metadata of the step.
        dropped: Number of tokens before it in each row.
        page_tokens: Number of tokens in a page.
        device: Device of the page tables.
    """
    offsets = async_tensor_h2d(torch.tensor(dropped, dtype=torch.int32), device=device)
    table = common.block_table_tensor
    columns = torch.arange(table.shape[1], device=device) + (offsets // page_tokens)[:, None]
    bounds = common.seq_lens_cpu_upper_bound
    return replace(
        common,
        seq_lens=common.seq_lens - offsets,
        seq_lens_cpu_upper_bound=(
            None if bounds is None else bounds - torch.tensor(dropped, dtype=bounds.dtype)
        ),
        block_table_tensor=table.gather(1, columns.clamp(max=table.shape[1] - 1)),
    )


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
        """Run attention, then shrink the prompts that end in the step.

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
        if isinstance(attn_metadata, JengaBudgetMetadata):
            packing, lse = attn_metadata.packing, attn_metadata.lse
            if packing is not None and lse is not None:
                self._pack(layer, query, kv_cache, packing, lse)
        return output

    def _pack(
        self,
        layer: Any,  # noqa: ANN401
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        packing: Packing,
        lse: torch.Tensor,
    ) -> None:
        """Move the tokens that each KV head keeps of the ending prompts to their last slots."""
        views, budget = self._views(layer, kv_cache), layer.jenga_budget
        scores = query.new_empty(
            (len(packing.seq_lens), self.num_kv_heads, packing.max_tokens), dtype=torch.float32
        )
        token_scores(
            query[: len(lse)],
            views["k_pages"],
            packing.page_table,
            packing.query_ends,
            packing.seq_lens,
            lse,
            scale=self.scale,
            num_queries=budget.recent_tokens,
            soft_cap=self.soft_cap,
            out=scores,
        )
        sources = choose_tokens(
            scores,
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

    def prompt_tokens() -> list[int]:
        batch = model_runner.input_batch
        return batch.num_prompt_tokens[: batch.num_reqs].tolist()

    tables: Sequence[Any] = getattr(model_runner, "attn_groups", ())
    for groups in tables:
        for group in groups:
            for builder in group.metadata_builders:
                if isinstance(builder, JengaBudgetMetadataBuilder):
                    builder.prompt_tokens = prompt_tokens

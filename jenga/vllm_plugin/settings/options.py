"""Options of vLLM that are accepted and have no effect here. A warning names those in use."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedOption:
    """An option without effect.

    Attributes:
        section: Field of `VllmConfig` with the configuration that has the option.
        field: Name of the option's field there. Not every version of vLLM has it.
        flag: Option as users write it.
        reason: Why the option has no effect, as a clause.
    """

    section: str
    field: str
    flag: str
    reason: str

    def text(self) -> str:
        """Get a sentence that the option has no effect, with the reason."""
        return f"{self.flag} has no effect ({self.reason})"


def _attention(reason: str, *fields: str) -> tuple[UnusedOption, ...]:
    return tuple(
        UnusedOption(
            section="attention_config",
            field=field,
            flag=f"--attention-config.{field}",
            reason=reason,
        )
        for field in fields
    )


_KEPT = "the cache keeps content that other requests are likely to read"

UNUSED_OPTIONS = (
    UnusedOption(
        section="cache_config",
        field="prefix_cache_retention_interval",
        flag="--prefix-cache-retention-interval",
        reason=_KEPT,
    ),
    UnusedOption(
        section="cache_config",
        field="enable_mamba_shared_prefix_checkpoint",
        flag="--enable-mamba-shared-prefix-checkpoint",
        reason=_KEPT,
    ),
    UnusedOption(
        section="cache_config",
        field="mamba_cache_mode",
        flag="--mamba-cache-mode",
        reason="states are kept within a step, at all points from which requests may continue",
    ),
    UnusedOption(
        section="cache_config",
        field="mamba_block_size",
        flag="--mamba-block-size",
        reason="a state has its own small page, whatever the number of its tokens",
    ),
    UnusedOption(
        section="cache_config",
        field="swa_bounded_replay",
        flag="--no-swa-bounded-replay",
        reason="it is for DeepSeek-V4.1, which is refused; windows are found in the cache",
    ),
    UnusedOption(
        section="mamba_config",
        field="backend",
        flag="--mamba-backend",
        reason="recurrent layers run on kernels of this package",
    ),
    UnusedOption(
        section="mamba_config",
        field="ssu_algorithm",
        flag="--mamba-ssu-algorithm",
        reason="recurrent layers run on kernels of this package",
    ),
    UnusedOption(
        section="mamba_config",
        field="stochastic_rounding_philox_rounds",
        flag="--mamba-cache-philox-rounds",
        reason="states are rounded to nearest",
    ),
    *_attention(
        "attention over the cache runs on kernels of this package",
        "flash_attn_max_num_splits_for_cuda_graph",
        "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph",
        "use_trtllm_attention",
        "disable_flashinfer_q_quantization",
        "minimax_m3_msa_decode_backend",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    ),
    *_attention(
        "it is for sparse attention, which is refused",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "indexer_tp_shard_min_rows",
        "minimax_m3_indexer_cp",
        "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor",
    ),
)
"""All options without effect."""


def options_without_effect(vllm_config: "VllmConfig") -> list[UnusedOption]:
    """List the options without effect that are in use: those that differ from their defaults."""
    in_use: list[UnusedOption] = []
    for option in UNUSED_OPTIONS:
        section = getattr(vllm_config, option.section)
        usual = type(section)()
        if getattr(section, option.field, None) != getattr(usual, option.field, None):
            in_use.append(option)
    return in_use

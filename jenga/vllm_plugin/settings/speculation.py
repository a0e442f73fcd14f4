"""Speculative decoding: which of vLLM's methods are served, and which layers draft."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.settings.switch import backend_member

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SERVED_METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Values of `method` in --speculative-config that are served."""

SERVED_MTP_TYPES = (
    "deepseek_mtp",
    "gemma4_mtp",
    "glm4_moe_mtp",
    "mimo_v2_mtp",
    "nemotron_h_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
)
"""Model types, in vLLM's words, whose layers that predict further tokens are served."""

DRAFT_PREFIX = "draft_model."
"""How vLLM begins the names of a draft model's layers."""

MTP_PART = "mtp"
"""A part of the names of layers that predict further tokens, where they are counted apart."""

MAX_DECODE_ROWS = 128
"""Query rows of a request in the largest tile of the decode kernel; more go to that of prompts.
Of the widest heads a machine may have smaller ones."""


def _has_states(model: "ModelConfig | None") -> bool:
    return model is not None and (model.is_hybrid or model.is_attention_free)


def speculation_refusals(vllm_config: "VllmConfig") -> dict[Refusal, str | bool]:
    """Say of each feature of speculative decoding that we refuse what was found of it."""
    speculation, model = vllm_config.speculative_config, vllm_config.model_config
    if speculation is None:
        return {}
    backend, drafts, method = (
        speculation.attention_backend,
        speculation.draft_model_config,
        speculation.method,
    )
    mtp_type = drafts.hf_config.model_type if method == "mtp" else ""
    is_other_backend = backend is not None and backend is not backend_member()
    return {
        Refusal.DRAFT_METHOD: "" if method in SERVED_METHODS else str(method),
        Refusal.DRAFT_WITH_STATES: speculation.uses_draft_model() and _has_states(drafts),
        Refusal.DRAFT_MTP_LAYERS: "" if mtp_type in SERVED_MTP_TYPES else mtp_type,
        Refusal.DRAFT_SEVERAL_MTP_LAYERS: (
            method == "mtp" and bool(speculation.use_multi_module_mtp())
        ),
        Refusal.DRAFT_ENCODER_DECODER: model is not None and model.is_encoder_decoder,
        Refusal.DRAFT_PIPELINE: vllm_config.parallel_config.pipeline_parallel_size > 1,
        Refusal.DRAFT_PARALLEL: speculation.parallel_drafting,
        Refusal.DRAFT_BACKEND: getattr(backend, "name", str(backend)) if is_other_backend else "",
    }


def prepare_speculation(vllm_config: "VllmConfig") -> None:
    """Let a draft model's layers run on the backend too: vLLM does not take it from the target."""
    speculation = vllm_config.speculative_config
    if speculation is not None:
        speculation.attention_backend = backend_member()


def draft_layers(vllm_config: "VllmConfig", names: Iterable[str]) -> frozenset[str]:
    """Find the layers of a draft model among those of both models.

    Those of an EAGLE head, and those that predict further tokens (MTP), have the names of their
    target's, with the numbers after them, or the latter a name of their own.
    """
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return frozenset()
    if speculation.uses_draft_model():
        return frozenset(name for name in names if name.startswith(DRAFT_PREFIX))
    from vllm.model_executor.models.utils import extract_layer_index

    first = vllm_config.model_config.get_total_num_hidden_layers()
    return frozenset(
        name for name in names if MTP_PART in name.split(".") or extract_layer_index(name) >= first
    )


def check_draft(type_names: Iterable[str]) -> None:
    """Refuse a draft model that vLLM could not run: it gives all its layers one page table.

    Args:
        type_names: Names of its layer types.

    Raises:
        ValueError: There are several.
    """
    names = list(type_names)
    if len(names) > 1:
        raise Refusal.DRAFT_LAYER_TYPES.error(" and ".join(names))


def drafted_query_tokens(vllm_config: "VllmConfig") -> int:
    """Get the most query tokens of a decoding request: those drafted, and the last one's own.

    A draft model reads one more: it first takes in what the target has accepted.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return 1
    return 1 + speculation.num_speculative_tokens + speculation.max_num_new_slots_for_drafting


def most_group_heads(vllm_config: "VllmConfig", num_kv_heads: int) -> int:
    """Get the most query heads that may share a head of keys in a layer of either model."""
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    models = [vllm_config.model_config, speculation.draft_model_config if speculation else None]
    return max(
        -(-model.get_num_attention_heads(parallel) // num_kv_heads)
        for model in models
        if model is not None
    )


def decode_query_tokens(
    vllm_config: "VllmConfig", group_heads: int, *, head_dim: int
) -> int | None:
    """Get up to how many query tokens a request is decoded, as `plan_attention` takes it.

    Args:
        vllm_config: Of the engine.
        group_heads: Query heads that share a head of keys.
        head_dim: Elements of a head.

    Returns:
        None for what costs no more than one token: also where drafts are longer than the kernel
        for decoding has rows.
    """
    # In workers alone: not where engines are configured, before there is a device.
    import torch
    from vllm.platforms import current_platform

    from jenga_kernels.triton.lib.tiles import machine_of, max_decode_rows

    num_tokens = drafted_query_tokens(vllm_config)
    if num_tokens == 1:
        return None
    most_rows = max_decode_rows(
        machine_of(torch.device(current_platform.device_type)),
        head_dim=head_dim,
        element_bytes=vllm_config.model_config.dtype.itemsize,
    )
    return num_tokens if num_tokens * group_heads <= (most_rows or MAX_DECODE_ROWS) else None

"""Speculative decoding: methods of vLLM that are served, and layers of draft models."""

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
"""vLLM's model types of the served layers that predict further tokens (MTP)."""

DRAFT_PREFIX = "draft_model."
"""Prefix that vLLM gives the names of a draft model's layers."""

MTP_PART = "mtp"
"""Part of the names of layers that predict further tokens, if they are numbered separately."""

MAX_DECODE_ROWS = 128
"""Number of query rows of a request in the largest tile of the decode kernel.

Requests with more rows go to the prefill kernel. Some GPUs have smaller tiles for the widest heads.
"""


def _has_states(model: "ModelConfig | None") -> bool:
    return model is not None and (model.is_hybrid or model.is_attention_free)


def speculation_refusals(vllm_config: "VllmConfig") -> dict[Refusal, str | bool]:
    """Look for each refused feature of speculative decoding; `check_refusals` takes the result."""
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
    """Select the backend for a draft model too, because vLLM does not take it from the target."""
    speculation = vllm_config.speculative_config
    if speculation is not None:
        speculation.attention_backend = backend_member()


def draft_layers(vllm_config: "VllmConfig", names: Iterable[str]) -> frozenset[str]:
    """Find the layers of a draft model among the layers of both models.

    Layers of an EAGLE head, and layers that predict further tokens (MTP), are named like layers of
    the target, and their numbers follow the target's. MTP layers may instead have `mtp` in their
    names.

    Args:
        vllm_config: Configuration of the engine.
        names: Names of the layers of both models.
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
    """Refuse a draft model with several layer types, because vLLM gives it only one page table.

    Args:
        type_names: Names of its layer types.

    Raises:
        ValueError: There are several layer types.
    """
    names = list(type_names)
    if len(names) > 1:
        raise Refusal.DRAFT_LAYER_TYPES.error(" and ".join(names))


def drafted_query_tokens(vllm_config: "VllmConfig") -> int:
    """Get the largest number of query tokens of a decoding request: one, and its drafts.

    A draft model reads one more token, because it first processes what the target has accepted.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return 1
    return 1 + speculation.num_speculative_tokens + speculation.max_num_new_slots_for_drafting


def most_group_heads(vllm_config: "VllmConfig", num_kv_heads: int) -> int:
    """Get the largest number of query heads that share a KV head in a layer of either model."""
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
    """Get the value of `decode_query_tokens` for `plan_attention`.

    Requests with up to that number of query tokens go to the decode kernel.

    Args:
        vllm_config: Configuration of the engine.
        group_heads: Number of query heads that share a KV head.
        head_dim: Number of elements in a head.

    Returns:
        The number, or None to let the kernel take as many tokens as cost no more than one. None is
        also returned if a request with drafts has more rows than the decode kernel's tile.
    """
    # Imported here, because only workers have a device. An engine is configured without one.
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

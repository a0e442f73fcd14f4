"""Rows of image embeddings in the arena: when they are kept there, and how a worker reports them.

A vision encoder makes one row for each token that stands for an image. A worker measures a row once
its model is loaded, and reports it among the cache specs of its layers, as if a layer stored it.
The planner turns the report into the layer type `ImageEmbedding`. Its page table is no group of
vLLM, because the images of a request are not numbered like its tokens.
"""

import os
from typing import TYPE_CHECKING, Any

from jenga.models.readers.token_budgets import TOKEN_BUDGETS
from jenga.spec import ELEMENT_BYTES, Layer, StatePart
from jenga.vllm_plugin.settings.environment import BACKEND_NAME, read_settings
from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.specs.image_features import IMAGE_MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

IMAGE_LAYER = "image_embeddings"
"""Name under which the rows are reported and planned. No layer of a model has it."""

WHOLE_IMAGE_MODELS = frozenset(
    {"Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration"}
)
"""Models whose image tokens read each other, and that tests run with embeddings in the arena."""

ENCODER_CACHE_PATH = "jenga.vllm_plugin.scheduler.encoder_cache.ArenaEncoderCache"
"""Path of the class that takes the place of vLLM's encoder cache in the scheduler."""


def puts_embeddings(vllm_config: "VllmConfig") -> bool:
    """Whether the model puts embeddings in the place of tokens."""
    model = vllm_config.model_config
    return model is not None and model.supports_multimodal_inputs and not model.is_encoder_decoder


def why_not_in_arena(vllm_config: "VllmConfig") -> str:
    """Get the reason why embeddings stay in vLLM's encoder cache. It is empty if they do not."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not puts_embeddings(vllm_config):
        return "the model puts no embeddings in the place of tokens"
    options: Any = model.multimodal_config
    settings = read_settings(os.environ)
    reasons = {
        "JENGA_IMAGE_EMBEDDINGS=0": not settings.keeps_image_embeddings,
        "layers of cross attention read the images": model.architecture in IMAGE_MODELS,
        "prefix caching is off": (
            not cache.enable_prefix_caching and not settings.embeddings_in_kv_pages
        ),
        "another encoder cache manager is chosen": (
            vllm_config.ec_manager_config.encoder_cache_manager_cls
            not in (None, ENCODER_CACHE_PATH)
        ),
        "the model is spread over a pipeline": vllm_config.parallel_config.pipeline_parallel_size
        > 1,
        "several engines share the arena": settings.shared_arena is not None,
        "a draft head reads tokens ahead": vllm_config.num_prefill_lookahead_tokens > 0,
        "embeddings are pruned": bool(
            options is not None and options.is_multimodal_pruning_enabled()
        ),
        "tokens of an image read each other, and no test has run this model": (
            model.is_mm_prefix_lm and model.architecture not in WHOLE_IMAGE_MODELS
        ),
        "prompts may be embeddings": bool(model.enable_prompt_embeds),
        "the model does not generate text": model.runner_type != "generate",
    }
    if settings.embeddings_in_kv_pages:
        reasons |= {
            "slots have scales of their own": cache.cache_dtype.endswith("per_token_head"),
            "layers have token budgets": hasattr(model.hf_text_config, TOKEN_BUDGETS),
        }
    return next((reason for reason, is_met in reasons.items() if is_met), "")


def why_not_in_kv_pages(vllm_config: "VllmConfig") -> str:
    """Get the reason why embeddings cannot be in pages of keys and values, where they are to be.

    It is empty if they can, or if they are not to be there. The encoder and the layers may show
    another reason later.
    """
    is_asked = read_settings(os.environ).embeddings_in_kv_pages and puts_embeddings(vllm_config)
    return why_not_in_arena(vllm_config) if is_asked else ""


def measured_spec(
    vllm_config: "VllmConfig",
    model_runner: Any,  # noqa: ANN401
) -> "KVCacheSpec | None":
    """Run a worker's encoder once for each kind of input, and report the rows that it makes.

    Args:
        vllm_config: Configuration of the engine.
        model_runner: Either of vLLM's, with its model loaded.

    Returns:
        A spec whose block holds the rows of the largest input. None if embeddings stay in vLLM's
        encoder cache. The log then says why.

    Raises:
        ValueError: Embeddings are to be in pages of keys and values, and cannot be.
    """
    import torch
    from vllm.logger import init_logger

    reason = why_not_in_arena(vllm_config)
    outputs: list[torch.Tensor] = []
    if not reason:
        with torch.inference_mode():
            outputs = _dummy_outputs(vllm_config, model_runner)
        reason = _why_not_these(outputs)
    if reason and puts_embeddings(vllm_config) and read_settings(os.environ).embeddings_in_kv_pages:
        raise Refusal.EMBEDDINGS_IN_KV_PAGES.error(reason)
    if reason:
        if vllm_config.model_config.supports_multimodal_inputs:
            logger = init_logger(f"vllm.{__name__}")
            logger.info_once(
                "%s: embeddings stay in vLLM's encoder cache: %s", BACKEND_NAME, reason
            )
        return None
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    # As in latent attention, a token has one row. vLLM's spec of it can describe any row.
    return MLAAttentionSpec(
        block_size=max(len(rows) for rows in outputs),
        num_kv_heads=1,
        head_size=outputs[0].shape[-1],
        dtype=outputs[0].dtype,
    )


def _dummy_outputs(vllm_config: "VllmConfig", model_runner: Any) -> "list[torch.Tensor]":  # noqa: ANN401
    """Encode the largest input of each kind."""
    from vllm.model_executor.models.interfaces import supports_realtime
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    model = model_runner.get_model()
    if supports_realtime(model):
        return []
    budget = getattr(model_runner, "mm_budget", None) or MultiModalBudget(
        vllm_config, MULTIMODAL_REGISTRY, enable_cache=False
    )
    outputs: list[torch.Tensor] = []
    for modality in budget.mm_max_toks_per_item:
        items = budget.get_dummy_encoder_profile_inputs(modality, 1)
        for _, _, batch in group_and_batch_mm_kwargs(items, device=model_runner.device):
            outputs += model.embed_multimodal(**batch)
    budget.reset_cache()
    return outputs


def _why_not_these(outputs: "Sequence[torch.Tensor]") -> str:
    """Get the reason why an encoder's outputs cannot be kept in pages. It is empty if they can."""
    if not outputs:
        return "the encoder makes no rows before requests arrive"
    if any(rows.dim() != 2 for rows in outputs):  # noqa: PLR2004
        return f"the encoder makes no rows, but {[tuple(rows.shape) for rows in outputs]}"
    kinds = {(rows.shape[-1], rows.dtype) for rows in outputs}
    if len(kinds) > 1:
        return f"rows of several kinds: {sorted(map(str, kinds))}"
    if _dtype_name(outputs[0].dtype) not in ELEMENT_BYTES:
        return f"rows of {outputs[0].dtype}"
    return ""


def _dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def image_layer(spec: Any) -> Layer:  # noqa: ANN401  an MLAAttentionSpec
    """Describe one row to the memory manager, given the spec that a worker reported."""
    row = StatePart(name="row", shape=(spec.head_size,), dtype=_dtype_name(spec.dtype))
    return Layer(name=IMAGE_LAYER, slot_bytes=row.num_bytes, parts=(row,))

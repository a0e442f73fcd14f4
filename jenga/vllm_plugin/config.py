"""Checks of vLLM's configuration: is the backend selected, can it serve, and which options it sets.

`patches.engine` calls `prepare_config` before vLLM's platform sets options, and `finish_config`
after it.
"""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.logger import init_logger

from jenga.models.readers.token_budgets import TOKEN_BUDGETS
from jenga.models.unserved import HYMBA_MODEL_TYPE, SPARSE_MODEL_TYPES
from jenga.vllm_plugin.metrics.memory_log import check_memory_log
from jenga.vllm_plugin.settings.additional_config import HOST_BYTES, check_additional_config
from jenga.vllm_plugin.settings.environment import (
    BACKEND_NAME,
    BACKEND_VARIABLE,
    read_settings,
    selects_backend,
)
from jenga.vllm_plugin.settings.options import options_without_effect
from jenga.vllm_plugin.settings.refusals import Refusal, check_refusals
from jenga.vllm_plugin.settings.shared_arena import share_arena
from jenga.vllm_plugin.settings.speculation import prepare_speculation, speculation_refusals
from jenga.vllm_plugin.settings.switch import backend_member
from jenga.vllm_plugin.specs.image_features import IMAGE_MODELS
from jenga.vllm_plugin.specs.image_rows import why_not_in_kv_pages
from jenga.vllm_plugin.specs.replay_layout import take_replay

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")  # under vLLM's logger, so its level and format apply

TOKENS_PER_PAGE = 16
"""Number of tokens in a small page of an attention layer, unless --block-size says otherwise.

It is the finest granularity at which vLLM hashes prefixes.
"""

CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
)
"""Values of --kv-cache-dtype that are served. vLLM's fp8 is float8_e4m3fn.

vLLM's own Triton backend treats fp8_e5m2 as float8_e4m3fn, a format that an A100 lacks. Here
fp8_e5m2 is float8_e5m2.
"""


_NO_ENCODER_CACHE = "jenga.vllm_plugin.scheduler.image_hits.NoEncoderCache"
"""Class that takes the place of vLLM's encoder cache for cross attention to images."""


def is_selected(vllm_config: "VllmConfig") -> bool:
    """Whether a configuration selects JENGA_TRITON."""
    return vllm_config.attention_config.backend is backend_member()


def is_quantised(cache_dtype: str) -> bool:
    """Whether a value of --kv-cache-dtype is for elements of a byte or less."""
    return cache_dtype.startswith("fp8") or cache_dtype.endswith("per_token_head")


def uses_sparse_latents(model: "ModelConfig") -> bool:
    """Whether a model has latent attention that reads only tokens chosen by an indexer."""
    config = model.hf_text_config
    return model.use_mla and (
        getattr(config, "index_topk", None) is not None or config.model_type in SPARSE_MODEL_TYPES
    )


def _refusals(vllm_config: "VllmConfig") -> dict[Refusal, str | bool]:
    """Look for each refused feature in a configuration.

    Returns:
        For each feature, whether it is asked for, or the value that asks for it. False and the
        empty string mean that it is not.
    """
    from vllm.platforms import current_platform

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    attention, is_invariant = vllm_config.attention_config, vllm.envs.VLLM_BATCH_INVARIANT
    other_backends = [
        f"{kind}: {backend.name}"
        for kind, backend in attention.backend_per_kind.items()
        if backend is not backend_member()
    ]
    offloading_size, offloading_backend = cache.kv_offloading_size, cache.kv_offloading_backend
    has_states = model is not None and (model.is_hybrid or model.is_attention_free)
    is_block_size_wrong = cache.user_specified_block_size and cache.block_size % TOKENS_PER_PAGE
    is_platform_served = current_platform.is_cuda() or current_platform.is_cpu()
    return {
        Refusal.PLATFORM: "" if is_platform_served else current_platform.device_name,
        Refusal.EXTERNAL_LAUNCHER: (
            parallel.pipeline_parallel_size > 1
            and parallel.distributed_executor_backend == "external_launcher"
        ),
        Refusal.DECODE_CONTEXT_PARALLELISM: parallel.decode_context_parallel_size > 1,
        Refusal.PREFILL_CONTEXT_PARALLELISM: parallel.prefill_context_parallel_size > 1,
        Refusal.MICROBATCHES: parallel.use_ubatching,
        Refusal.ROUTED_EXPERTS: vllm_config.aux_output_config.enabled,
        Refusal.KV_CONNECTORS: vllm_config.kv_transfer_config is not None,
        Refusal.ENCODER_CACHE_CONNECTORS: vllm_config.ec_transfer_config is not None,
        Refusal.OFFLOADING_BACKEND: (
            offloading_backend
            if offloading_size is not None and offloading_backend != "native"
            else ""
        ),
        Refusal.OFFLOADING_SIZE: (
            str(offloading_size)
            if offloading_size is not None and not 0 < offloading_size < math.inf
            else ""
        ),
        Refusal.BLOCK_SIZE: str(cache.block_size) if is_block_size_wrong else "",
        Refusal.ONE_CACHE_GROUP: scheduler.disable_hybrid_kv_cache_manager is True,
        Refusal.BACKEND_PER_KIND: ", ".join(other_backends),
        Refusal.CACHE_DTYPE: "" if cache.cache_dtype in CACHE_DTYPES else cache.cache_dtype,
        Refusal.KV_SHARING_FAST_PREFILL: cache.kv_sharing_fast_prefill,
        Refusal.STOCHASTIC_ROUNDING: vllm_config.mamba_config.enable_stochastic_rounding,
        Refusal.CACHE_METRICS: vllm_config.observability_config.kv_cache_metrics,
        Refusal.INVARIANT_STATES: is_invariant and has_states,
        Refusal.INVARIANT_SPECIALIZED: (
            is_invariant and bool(read_settings(os.environ).has_specialized_prefill)
        ),
        Refusal.ENCODER_ALONE: vllm_config.is_mm_encoder_only,
        Refusal.HISPARSE: attention.hisparse_config is not None,
        Refusal.SPARSE_LATENTS: model is not None and uses_sparse_latents(model),
        Refusal.DIFFUSION: model is not None and model.is_diffusion,
        Refusal.HYMBA: model is not None and model.hf_text_config.model_type == HYMBA_MODEL_TYPE,
        Refusal.IMAGE_ATTENTION: ", ".join(_unserved_with_images(vllm_config)),
        Refusal.EMBEDDINGS_IN_KV_PAGES: why_not_in_kv_pages(vllm_config),
        Refusal.TOKEN_BUDGETS: ", ".join(_unserved_with_budgets(vllm_config)),
        Refusal.PROMPT_SCRATCH: ", ".join(_unserved_with_scratch(vllm_config)),
        Refusal.QUERY_QUANTIZATION: (
            model is not None and model.use_mla and attention.use_prefill_query_quantization
        ),
        **speculation_refusals(vllm_config),
    }


def attends_to_images(vllm_config: "VllmConfig") -> bool:
    """Whether layers of cross attention of the model read images."""
    model = vllm_config.model_config
    return model is not None and model.architecture in IMAGE_MODELS


def _unserved_with_images(vllm_config: "VllmConfig") -> list[str]:
    """Name the options that are not served together with cross attention to images."""
    if not attends_to_images(vllm_config):
        return []
    multimodal = vllm_config.model_config.multimodal_config
    checks = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "--kv-cache-dtype int4_per_token_head": (
            vllm_config.cache_config.cache_dtype == "int4_per_token_head"
        ),
        "--mm-processor-cache-type shm": (
            multimodal is not None and multimodal.mm_processor_cache_type == "shm"
        ),
    }
    return [option for option, is_used in checks.items() if is_used]


def has_token_budgets(vllm_config: "VllmConfig") -> bool:
    """Whether layers of the model shrink prompts to token budgets."""
    model = vllm_config.model_config
    return model is not None and getattr(model.hf_text_config, TOKEN_BUDGETS, None) is not None


def _unserved_with_budgets(vllm_config: "VllmConfig") -> list[str]:
    """Name the options that are not served together with token budgets of layers."""
    if not has_token_budgets(vllm_config):
        return []
    from jenga.vllm_plugin.specs.token_budgets import budgets_of

    budgets, model = budgets_of(vllm_config), vllm_config.model_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    cache = vllm_config.cache_config
    recent_tokens = 0 if budgets is None else budgets.recent_tokens
    least_tokens = scheduler.max_num_seqs + 2 * recent_tokens
    threshold = scheduler.long_prefill_token_threshold
    checks = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype != "auto",
        "--kv-offloading-size": cache.kv_offloading_size is not None,
        "a model of images or audio": model.is_multimodal_model or model.is_encoder_decoder,
        "a model with recurrent layers": model.is_hybrid or model.is_attention_free,
        "latent attention": model.use_mla,
        "chunked local attention": getattr(model, "attention_chunk_size", None) is not None,
        f"--max-num-batched-tokens below {least_tokens}, --max-num-seqs and twice recent_tokens": (
            scheduler.max_num_batched_tokens < least_tokens
        ),
        f"--long-prefill-token-threshold below {2 * recent_tokens}, twice recent_tokens": (
            0 < threshold < 2 * recent_tokens
        ),
    }
    return [option for option, is_used in checks.items() if is_used]


def _unserved_with_scratch(vllm_config: "VllmConfig") -> list[str]:
    """Name the options with which a scratch for prompts would have no effect, if there is one."""
    if not read_settings(os.environ).prompt_scratch_bytes:
        return []
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    checks = {
        # With "auto", the layers of a checkpoint may have scales, and then a quantised cache.
        f"--kv-cache-dtype {cache_dtype}": cache_dtype in {"float16", "bfloat16"},
        "latent attention": model is not None and model.use_mla,
        "VLLM_BATCH_INVARIANT": vllm.envs.VLLM_BATCH_INVARIANT,
    }
    return [option for option, is_used in checks.items() if is_used]


def run_images_eagerly(vllm_config: "VllmConfig") -> None:
    """Turn compilation and CUDA graphs off for a model whose cross attention reads images.

    It must be called before vLLM derives its options of compilation. The work of these layers
    depends on where images are in prompts, and no graph can hold it.
    """
    if is_selected(vllm_config) and attends_to_images(vllm_config):
        vllm_config.model_config.enforce_eager = True


def warn_of_options(vllm_config: "VllmConfig") -> None:
    """Warn about options in use that have no effect, or another one, if the backend is selected.

    It must be called before vLLM itself sets options for the model. Until then, each option that
    differs from its default was set by the user.
    """
    model = vllm_config.model_config
    is_prepared = model is None or getattr(model, "config_updated", False)
    if is_prepared or not is_selected(vllm_config):
        return
    for option in options_without_effect(vllm_config):
        logger.warning_once("%s: %s", BACKEND_NAME, option.text())
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        logger.warning_once(
            "%s: --num-gpu-blocks-override %d counts large pages, whose length the log tells",
            BACKEND_NAME,
            override,
        )


def select_by_environment(vllm_config: "VllmConfig") -> None:
    """Select the backend if VLLM_ATTENTION_BACKEND names it and no argument selects a backend.

    Raises:
        ValueError: The variable names a backend of jenga that does not exist.
    """
    attention = vllm_config.attention_config
    if attention.backend is None and selects_backend(os.environ):
        attention.backend = backend_member()


def prepare_config(vllm_config: "VllmConfig") -> bool:
    """Check a configuration that selects the backend, and set the options that the backend needs.

    It is called before vLLM's platform sets options. A configuration that selects another backend
    stays as it is.

    Returns:
        Whether the backend is selected.

    Raises:
        ValueError: The backend is selected, and the configuration asks for a refused feature, or
            the backend was not written for this version of vLLM. Or an environment variable or a
            key of --additional-config is wrong.
    """
    from jenga.vllm_plugin.patches.all_patches import apply_replacements

    select_by_environment(vllm_config)
    if not is_selected(vllm_config):
        _warn_of_other_choice(vllm_config)
        return False
    apply_replacements()
    settings = read_settings(os.environ)
    if vllm_config.parallel_config.rank == 0:  # other machines may lack the log's folder
        check_memory_log(settings)
    check_additional_config(vllm_config.additional_config)
    check_refusals(_refusals(vllm_config))
    _set_cache_options(vllm_config)
    _take_offloading(vllm_config)
    take_replay(vllm_config, settings.history_tokens, settings.history_requests)
    prepare_speculation(vllm_config)
    share_arena(vllm_config, settings)
    return True


def _warn_of_other_choice(vllm_config: "VllmConfig") -> None:
    """Warn if an argument selects another backend than the environment does."""
    named = os.environ.get(BACKEND_VARIABLE, "").strip()
    if named.upper().startswith("JENGA"):
        backend = vllm_config.attention_config.backend
        logger.warning_once(
            "%s=%s gives way to the backend selected as an argument, %s",
            BACKEND_VARIABLE,
            named,
            getattr(backend, "name", backend),
        )


def _take_offloading(vllm_config: "VllmConfig") -> None:
    """Move --kv-offloading-size to our own option, before vLLM makes a KV connector from it.

    Raises:
        ValueError: The additional configuration is not a mapping.
    """
    size_gib = vllm_config.cache_config.kv_offloading_size
    if size_gib is None:
        return
    if not isinstance(vllm_config.additional_config, dict):
        msg = (
            f"--kv-offloading-size needs an --additional-config that is a mapping, got "
            f"{type(vllm_config.additional_config).__name__}"
        )
        raise ValueError(msg)  # noqa: TRY004  as for every other option
    # Rounded up: a tiny size becomes 1 byte, which is refused later as less than a page. 0 would
    # mean that no host memory is asked for.
    vllm_config.additional_config[HOST_BYTES] = math.ceil(size_gib * (1 << 30))
    vllm_config.cache_config.kv_offloading_size = None


def host_bytes(vllm_config: "VllmConfig") -> int:
    """Get the size of host memory for evicted pages, in bytes, over all ranks. 0 means none."""
    options = vllm_config.additional_config
    return options.get(HOST_BYTES, 0) if isinstance(options, dict) else 0


def _set_cache_options(vllm_config: "VllmConfig") -> None:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not cache.user_specified_block_size:
        cache.block_size = TOKENS_PER_PAGE
        cache.user_specified_block_size = True  # keeps platforms from choosing another
    if model is not None:
        # vLLM disables separate page tables for models with a chunk size here. Layers read their
        # chunk size elsewhere.
        model.attention_chunk_size = None
        if model.is_mm_prefix_lm:
            # A token of an image reads later tokens of that image, so one step must have them all.
            vllm_config.scheduler_config.disable_chunked_mm_input = True
    if attends_to_images(vllm_config):
        # The encoder's outputs go to pages at once.
        vllm_config.ec_manager_config.encoder_cache_manager_cls = _NO_ENCODER_CACHE
    if model is not None and (model.is_hybrid or model.is_attention_free):
        # vLLM's other modes end a step at each state to keep. Our layers keep states within a step.
        cache.mamba_cache_mode = "none"
        cache.mamba_block_size = model.max_model_len
        cache.mamba_page_size_padded = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOptions:
    """Options that vLLM's CPU platform changes for latent attention.

    vLLM changes them because its own CPU backends cannot serve latent attention.

    Attributes:
        block_size: Number of tokens in a page.
        enable_prefix_caching: Whether pages are kept for other requests.
        enable_chunked_prefill: Whether a prompt may take several steps.
        max_num_batched_tokens: Largest number of tokens in a step.
    """

    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    max_num_batched_tokens: int


def wanted_options(vllm_config: "VllmConfig") -> WantedOptions:
    """Read the options as they are before vLLM's platform changes them."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    return WantedOptions(
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def finish_config(vllm_config: "VllmConfig", wanted: WantedOptions) -> None:
    """Restore the options that vLLM's platform has changed.

    Args:
        vllm_config: Configuration to write to.
        wanted: Values to restore for latent attention.
    """
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    cache.mamba_page_size_padded = None
    if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
        cache.block_size = wanted.block_size
        cache.enable_prefix_caching = wanted.enable_prefix_caching
        scheduler.enable_chunked_prefill = wanted.enable_chunked_prefill
        scheduler.max_num_batched_tokens = wanted.max_num_batched_tokens


def checked_backend_path(attn_selector_config: Any) -> str:  # noqa: ANN401 (a named tuple of vLLM's)
    """Get the class path of the backend for an attention layer.

    Raises:
        ValueError: The backend cannot serve the layer. The message lists the reasons.
    """
    from vllm.platforms import current_platform

    from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend
    from jenga.vllm_plugin.layers.attention.latent import JengaLatentBackend

    backend = JengaLatentBackend if attn_selector_config.use_mla else JengaTritonBackend
    capability = current_platform.get_device_capability()
    reasons = backend.validate_configuration(
        device_capability=capability,  # pyright: ignore[reportArgumentType] (None on a CPU)
        **attn_selector_config._asdict(),
    )
    if reasons:
        msg = f"{'; '.join(reasons)}: {attn_selector_config}"
        raise Refusal.ATTENTION_LAYER.error(msg)
    return f"{backend.__module__}.{backend.__qualname__}"

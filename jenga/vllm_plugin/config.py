"""What the plugin asks of vLLM's configuration: is it selected, can it serve, what it sets."""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.logger import init_logger

from jenga.vllm_plugin.metrics.memory_log import check_memory_log
from jenga.vllm_plugin.settings.environment import (
    BACKEND_NAME,
    BACKEND_VARIABLE,
    read_settings,
    selects_backend,
)
from jenga.vllm_plugin.settings.options import options_without_effect
from jenga.vllm_plugin.settings.refusals import Refusal, check_refusals
from jenga.vllm_plugin.settings.refused_models import SPARSE_MODEL_TYPES
from jenga.vllm_plugin.settings.speculation import prepare_speculation, speculation_refusals
from jenga.vllm_plugin.settings.switch import backend_member
from jenga.vllm_plugin.specs.state_history import take_replay

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")  # under vLLM's logger, so its level and format apply

TOKENS_PER_PAGE = 16
"""Tokens of an attention layer's small page unless --block-size says otherwise: the finest
granularity at which vLLM hashes prefixes."""

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
"""Values of --kv-cache-dtype that are served; vLLM's fp8 is float8_e4m3fn.

Its own Triton backend takes fp8_e5m2 for that too, which an A100 does not know; here it is what its
name says.
"""


_HOST_BYTES = "jenga_host_bytes"
"""Of vLLM's additional options, the one that carries --kv-offloading-size to the engine."""


def is_selected(vllm_config: "VllmConfig") -> bool:
    """Whether a configuration selects JENGA_TRITON."""
    return vllm_config.attention_config.backend is backend_member()


def uses_sparse_latents(model: "ModelConfig") -> bool:
    """Whether a model has latent attention that reads the tokens an indexer chooses."""
    config = model.hf_text_config
    return model.use_mla and (
        getattr(config, "index_topk", None) is not None or config.model_type in SPARSE_MODEL_TYPES
    )


def _refusals(vllm_config: "VllmConfig") -> dict[Refusal, str | bool]:
    """Say of each feature that a configuration may ask for and we refuse what was found of it."""
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
        Refusal.QUERY_QUANTIZATION: (
            model is not None and model.use_mla and attention.use_prefill_query_quantization
        ),
        **speculation_refusals(vllm_config),
    }


def warn_of_options(vllm_config: "VllmConfig") -> None:
    """Warn of options in use that have no effect, or another one, where the backend is selected.

    Called before vLLM sets options of a model by itself, so that all that differ were asked for.
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
    """Select the backend where VLLM_ATTENTION_BACKEND does and no argument selects one.

    Raises:
        ValueError: It names a backend of jenga that does not exist.
    """
    attention = vllm_config.attention_config
    if attention.backend is None and selects_backend(os.environ):
        attention.backend = backend_member()


def prepare_config(vllm_config: "VllmConfig") -> bool:
    """See whether a configuration selects the backend; if so check it and set what we need.

    Called before vLLM's platform has its say.

    Returns:
        Whether the backend is selected.

    Raises:
        ValueError: The backend is selected together with a feature that is refused, on a version
            of vLLM it was not written for, or an environment variable is wrong.
    """
    from jenga.vllm_plugin.patches.all_patches import apply_replacements

    select_by_environment(vllm_config)
    if not is_selected(vllm_config):
        _warn_of_other_choice(vllm_config)
        return False
    apply_replacements()
    settings = read_settings(os.environ)
    if vllm_config.parallel_config.rank == 0:  # other ranks may be on machines without its folder
        check_memory_log(settings)
    check_refusals(_refusals(vllm_config))
    _set_cache_options(vllm_config)
    _take_offloading(vllm_config)
    take_replay(vllm_config, settings.history_tokens)
    prepare_speculation(vllm_config)
    return True


def _warn_of_other_choice(vllm_config: "VllmConfig") -> None:
    """Say that an argument selects another backend than the environment does."""
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
    """Take on what --kv-offloading-size asks for, before vLLM makes a KV connector of it."""
    size_gib = vllm_config.cache_config.kv_offloading_size
    if size_gib is None:
        return
    if not isinstance(vllm_config.additional_config, dict):
        msg = (
            f"--kv-offloading-size needs an --additional-config that is a mapping, got "
            f"{type(vllm_config.additional_config).__name__}"
        )
        raise ValueError(msg)  # noqa: TRY004  as for every other option
    # Rounded up, so that what is less than a page is refused as such.
    vllm_config.additional_config[_HOST_BYTES] = math.ceil(size_gib * (1 << 30))
    vllm_config.cache_config.kv_offloading_size = None


def host_bytes(vllm_config: "VllmConfig") -> int:
    """Get the bytes of host memory that evicted pages go to, of all ranks together."""
    options = vllm_config.additional_config
    return options.get(_HOST_BYTES, 0) if isinstance(options, dict) else 0


def _set_cache_options(vllm_config: "VllmConfig") -> None:
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not cache.user_specified_block_size:
        cache.block_size = TOKENS_PER_PAGE
        cache.user_specified_block_size = True  # keeps platforms from choosing another
    if model is not None:
        # vLLM turns page tables of their own off for models with it; layers read theirs elsewhere.
        model.attention_chunk_size = None
        if model.is_mm_prefix_lm:
            # A token of an image reads those after it, so they must be there in the same step.
            vllm_config.scheduler_config.disable_chunked_mm_input = True
    if model is not None and (model.is_hybrid or model.is_attention_free):
        # vLLM's other mode ends steps where states are kept; ours are kept on the way.
        cache.mamba_cache_mode = "none"
        cache.mamba_block_size = model.max_model_len
        cache.mamba_page_size_padded = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOptions:
    """Options that vLLM's CPU platform changes for latent attention, which its own cannot serve.

    Attributes:
        block_size: Tokens of a page.
        enable_prefix_caching: Whether pages are kept for other requests.
        enable_chunked_prefill: Whether a prompt may take several steps.
        max_num_batched_tokens: Most tokens of a step.
    """

    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    max_num_batched_tokens: int


def wanted_options(vllm_config: "VllmConfig") -> WantedOptions:
    """Read the options as they are before vLLM's platform has its say."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    return WantedOptions(
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def finish_config(vllm_config: "VllmConfig", wanted: WantedOptions) -> None:
    """Undo what vLLM's platform does to the options set before."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    cache.mamba_page_size_padded = None
    if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
        cache.block_size = wanted.block_size
        cache.enable_prefix_caching = wanted.enable_prefix_caching
        scheduler.enable_chunked_prefill = wanted.enable_chunked_prefill
        scheduler.max_num_batched_tokens = wanted.max_num_batched_tokens


def checked_backend_path(attn_selector_config: Any) -> str:  # noqa: ANN401 (a named tuple of vLLM's)
    """Get the class path of the backend, for a layer it can serve.

    Raises:
        ValueError: It cannot; the message lists why.
    """
    from vllm.platforms import current_platform

    from jenga.vllm_plugin.layers.attention import JengaTritonBackend
    from jenga.vllm_plugin.layers.latent import JengaLatentBackend

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

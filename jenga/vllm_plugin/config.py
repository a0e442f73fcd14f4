"""What the plugin asks of vLLM's configuration: is it selected, can it serve, what it sets."""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.logger import init_logger

from jenga.vllm_plugin.environment import (
    BACKEND_NAME,
    BACKEND_VARIABLE,
    read_settings,
    selects_backend,
)
from jenga.vllm_plugin.memory_log import check_memory_log
from jenga.vllm_plugin.speculation import prepare_speculation, unsupported_speculation
from jenga.vllm_plugin.state_history import take_replay
from jenga.vllm_plugin.switch import backend_member

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

_SPARSE_MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
"""Models of latent attention that read chosen tokens alone, whatever else their options say."""


def is_selected(vllm_config: "VllmConfig") -> bool:
    """Whether a configuration selects JENGA_TRITON."""
    return vllm_config.attention_config.backend is backend_member()


def uses_sparse_latents(model: "ModelConfig") -> bool:
    """Whether a model has latent attention that reads the tokens an indexer chooses."""
    config = model.hf_text_config
    return model.use_mla and (
        getattr(config, "index_topk", None) is not None or config.model_type in _SPARSE_MODEL_TYPES
    )


def _unsupported_features(vllm_config: "VllmConfig") -> list[str]:
    """Name each feature in use that the plugin cannot serve."""
    from vllm.platforms import current_platform

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    other_backends = {
        kind: backend.name
        for kind, backend in vllm_config.attention_config.backend_per_kind.items()
        if backend is not backend_member()
    }
    checks = {
        f"vLLM's platform {current_platform.device_name}; the kernels are for NVIDIA's GPUs": (
            not (current_platform.is_cuda() or current_platform.is_cpu())
        ),
        # Each rank would plan and schedule for itself, from its own layers alone.
        "pipeline parallelism with --distributed-executor-backend external_launcher": (
            parallel.pipeline_parallel_size > 1
            and parallel.distributed_executor_backend == "external_launcher"
        ),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "steps in parts that overlap (--enable-dbo, --ubatch-size)": parallel.use_ubatching,
        # They are kept beside the cache, as many as it would have blocks.
        "--enable-return-routed-experts": vllm_config.aux_output_config.enabled,
        "KV connectors (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        f"--kv-offloading-backend {cache.kv_offloading_backend}": (
            cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native"
        ),
        "--disable-hybrid-kv-cache-manager": scheduler.disable_hybrid_kv_cache_manager is True,
        f"other attention backends per kind {other_backends}": bool(other_backends),
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype not in CACHE_DTYPES,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "--enable-mamba-cache-stochastic-rounding": (
            vllm_config.mamba_config.enable_stochastic_rounding
        ),
        # The pages whose lives they count are not vLLM's.
        "--kv-cache-metrics": vllm_config.observability_config.kv_cache_metrics,
        # What a step reads of a prompt is scanned in pieces that begin where the step does.
        "batch invariance (VLLM_BATCH_INVARIANT) of recurrent layers": (
            vllm.envs.VLLM_BATCH_INVARIANT
            and model is not None
            and (model.is_hybrid or model.is_attention_free)
        ),
        "batch invariance (VLLM_BATCH_INVARIANT) with JENGA_SPECIALIZED_PREFILL=1": (
            vllm.envs.VLLM_BATCH_INVARIANT and read_settings(os.environ).has_specialized_prefill
        ),
        "an engine of the encoder alone (--mm-encoder-only)": vllm_config.is_mm_encoder_only,
        "HiSparse": vllm_config.attention_config.hisparse_config is not None,
        "sparse multi-head latent attention": model is not None and uses_sparse_latents(model),
        "generation by diffusion, not token by token (canvas_length in the model's config)": (
            model is not None and model.is_diffusion
        ),
        # Keys that vLLM makes of long prompts would have to be float8 too.
        "use_prefill_query_quantization with multi-head latent attention": (
            model is not None
            and model.use_mla
            and vllm_config.attention_config.use_prefill_query_quantization
        ),
    }
    checks |= unsupported_speculation(vllm_config)
    return [feature for feature, in_use in checks.items() if in_use]


def _options_without_effect(vllm_config: "VllmConfig") -> list[str]:
    """Name each option in use that asks for what the plugin decides by itself."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    usual = type(cache)()
    # What vLLM sets where nothing was asked for.
    state_tokens = {None, cache.block_size, model.max_model_len if model is not None else None}
    checks = {
        "--prefix-cache-retention-interval": (
            cache.prefix_cache_retention_interval != usual.prefix_cache_retention_interval
        ),
        "--enable-mamba-shared-prefix-checkpoint": cache.enable_mamba_shared_prefix_checkpoint,
        "--mamba-block-size": cache.mamba_block_size not in state_tokens,
        "--mamba-backend": vllm_config.mamba_config.backend.name == "FLASHINFER",
    }
    return [option for option, in_use in checks.items() if in_use]


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
        ValueError: The backend is selected together with a feature it does not support, on a
            version of vLLM it was not written for, or an environment variable is wrong.
    """
    from jenga.vllm_plugin.replacements import apply_replacements

    select_by_environment(vllm_config)
    if not is_selected(vllm_config):
        _warn_of_other_choice(vllm_config)
        return False
    apply_replacements()
    settings = read_settings(os.environ)
    if vllm_config.parallel_config.rank == 0:  # other ranks may be on machines without its folder
        check_memory_log(settings)
    unsupported = _unsupported_features(vllm_config)
    if unsupported:
        msg = f"{BACKEND_NAME} does not support: {'; '.join(unsupported)}"
        raise ValueError(msg)
    without_effect = _options_without_effect(vllm_config)
    if without_effect:
        logger.warning_once(
            "%s has kernels of its own and decides what is kept for others; without effect: %s",
            BACKEND_NAME,
            ", ".join(without_effect),
        )
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        logger.warning_once(
            "%s: --num-gpu-blocks-override %d counts large pages, whose length the log tells",
            BACKEND_NAME,
            vllm_config.cache_config.num_gpu_blocks_override,
        )
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
    if not 0 < size_gib < math.inf:
        msg = f"--kv-offloading-size must be a positive number of GiB, got {size_gib}"
        raise ValueError(msg)
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
    if cache.user_specified_block_size:
        if cache.block_size % TOKENS_PER_PAGE:
            msg = f"--block-size must be a multiple of {TOKENS_PER_PAGE}, got {cache.block_size}"
            raise ValueError(msg)
    else:
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

    from jenga.vllm_plugin.attention import JengaTritonBackend
    from jenga.vllm_plugin.latent import JengaLatentBackend

    backend = JengaLatentBackend if attn_selector_config.use_mla else JengaTritonBackend
    capability = current_platform.get_device_capability()
    reasons = backend.validate_configuration(
        device_capability=capability,  # pyright: ignore[reportArgumentType] (None on a CPU)
        **attn_selector_config._asdict(),
    )
    if reasons:
        msg = (
            f"{BACKEND_NAME} cannot serve a layer of this model: {'; '.join(reasons)} "
            f"({attn_selector_config})"
        )
        raise ValueError(msg)
    return f"{backend.__module__}.{backend.__qualname__}"

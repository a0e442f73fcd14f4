"""Every name of vLLM that this plugin replaces, with the reason for each.

Each replacement that is given a configuration calls the original unless that selects JENGA_TRITON.
All but the first are put in place only once a configuration selects it, so a process that never
does runs vLLM's own functions. Before that the installed version and the signature of each name are
checked, so that another vLLM is refused with a message instead of failing later. Names of the
worker's modules wait until its device is set: importing some of them initialises CUDA, after which
the process that made the configuration could not fork, and a worker would not yet have its GPU.

Official hooks are used where vLLM has them: the backend enumerations and their `register`, the
attention backend interface (layouts, supported features), and `KVCacheConfig.num_blocks_of`, which
is overridden in a subclass.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

SUPPORTED_VERSIONS = ("0.32",)
"""Release series of vLLM whose names are known to be as below."""

_Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One name of vLLM and what takes its place.

    Attributes:
        module: Where the name is looked up at run time.
        name: The name, dotted for a method.
        reason: Why no official hook serves.
        parameters: The original's parameter names, which must be as when this was written.
        make: Builds the replacement from the original.
    """

    module: str
    name: str
    reason: str
    parameters: tuple[str, ...]
    make: Callable[[_Function], _Function]


def _check_and_update_config(original: _Function) -> _Function:
    @functools.wraps(original)
    def check_and_update_config(vllm_config: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import finish_config, prepare_config, wanted_options

        if prepare_config(vllm_config):
            wanted = wanted_options(vllm_config)
            original(vllm_config)
            finish_config(vllm_config, wanted)
        else:
            original(vllm_config)

    return check_and_update_config


def _get_attn_backend_cls(original: _Function) -> _Function:
    def get_attn_backend_cls(
        selected_backend: Any,  # noqa: ANN401
        attn_selector_config: Any,  # noqa: ANN401
        num_heads: int | None = None,
    ) -> str:
        from jenga.vllm_plugin.config import checked_backend_path
        from jenga.vllm_plugin.switch import backend_member

        if selected_backend is backend_member():
            return checked_backend_path(attn_selector_config)
        return original(selected_backend, attn_selector_config, num_heads)

    return get_attn_backend_cls


def _update_block_size_for_backend(original: _Function) -> _Function:
    def update_block_size_for_backend(vllm_config: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        # Small pages have each type's own size: nothing is enlarged or padded to another's.
        if not is_selected(vllm_config):
            original(vllm_config)

    return update_block_size_for_backend


def _when_selected(function_name: str) -> Callable[[_Function], _Function]:
    """Call `jenga.vllm_plugin.layout.<function_name>` where the configuration selects us."""

    def make(original: _Function) -> _Function:
        @functools.wraps(original)
        def replacement(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            from jenga.vllm_plugin import layout
            from jenga.vllm_plugin.config import is_selected

            function = getattr(layout, function_name) if is_selected(vllm_config) else original
            return function(vllm_config, *args, **kwargs)

        return replacement

    return make


def _kv_cache_manager(original: _Function) -> _Function:
    @functools.wraps(original, updated=())
    def make_kv_cache_manager(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.cache_manager import JengaKVCacheManager
        from jenga.vllm_plugin.layout import JengaKVCacheConfig

        if isinstance(kwargs.get("kv_cache_config"), JengaKVCacheConfig):
            return JengaKVCacheManager(*args, **kwargs)
        return original(*args, **kwargs)

    return make_kv_cache_manager


def _enqueue_waiting_request(original: _Function) -> _Function:
    @functools.wraps(original)
    def enqueue(self: Any, request: Any) -> None:  # noqa: ANN401
        original(self, request)
        _announce(self, request, first=False)

    return enqueue


def _preempt_request(original: _Function) -> _Function:
    @functools.wraps(original)
    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        original(self, request, *args, **kwargs)
        _announce(self, request, first=True)

    return preempt


def _announce(scheduler: Any, request: Any, *, first: bool) -> None:  # noqa: ANN401
    """Tell the manager of a queue that is served in its order; nothing of one with priorities."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    from jenga.vllm_plugin.cache_manager import JengaKVCacheManager

    manager = scheduler.kv_cache_manager
    if isinstance(manager, JengaKVCacheManager) and scheduler.policy == SchedulingPolicy.FCFS:
        manager.announce(request, first=first)


def _create_chunked_local_attention_backend(original: _Function) -> _Function:
    @functools.wraps(original)
    def create(underlying_attn_backend: Any, attention_chunk_size: int) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.attention import JengaTritonBackend

        if issubclass(underlying_attn_backend, JengaTritonBackend):
            return underlying_attn_backend
        return original(underlying_attn_backend, attention_chunk_size)

    return create


def _forward_impl(original: _Function) -> _Function:
    @functools.wraps(original)
    def forward_impl(self: Any, hidden_states: Any, output: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.mamba import forward_mamba1, metadata_of

        metadata = metadata_of(self.prefix)
        if metadata is None:
            return original(self, hidden_states, output)
        return forward_mamba1(self, hidden_states, output, metadata)

    return forward_impl


def _conv_ssm_forward(original: _Function) -> _Function:
    @functools.wraps(original)
    def conv_ssm_forward(self: Any, projected_states: Any, output: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.mamba import forward_mamba2, metadata_of

        metadata = metadata_of(self.prefix)
        if metadata is None:
            return original(self, projected_states, output)
        return forward_mamba2(self, projected_states, output, metadata)

    return conv_ssm_forward


def _forward_core(original: _Function) -> _Function:
    @functools.wraps(original)
    def forward_core(self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.gated_delta import forward_gated_delta
        from jenga.vllm_plugin.mamba import metadata_of

        metadata = metadata_of(self.prefix)
        if metadata is None:
            return original(self, mixed_qkv, b, a, core_attn_out)
        return forward_gated_delta(self, mixed_qkv, b, a, core_attn_out, metadata)

    return forward_core


def _fused_gdn_decode_unsupported_reason(original: _Function) -> _Function:
    @functools.wraps(original)
    def unsupported_reason(self: Any, vllm_config: Any) -> str | None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        if is_selected(vllm_config):
            return "JENGA_TRITON runs these layers on kernels of its own"
        return original(self, vllm_config)

    return unsupported_reason


def _skip_warm_up(mark: str) -> Callable[[_Function], _Function]:
    """Set the mark that a layer is warmed up, and the original returns at once."""

    def make(original: _Function) -> _Function:
        @functools.wraps(original)
        def warm_up(self: Any, *args: Any) -> None:  # noqa: ANN401
            from vllm.config import get_current_vllm_config_or_none

            from jenga.vllm_plugin.config import is_selected

            config = get_current_vllm_config_or_none()
            if config is not None and is_selected(config):
                setattr(self, mark, True)
            original(self, *args)

        return warm_up

    return make


def _warmup_kernels(original: _Function) -> _Function:
    @functools.wraps(original)
    def warmup_kernels(model_runner: Any, *steps: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        original(model_runner, *steps)
        if is_selected(model_runner.vllm_config):
            from jenga.vllm_plugin.warm_up import warm_up

            warm_up(model_runner, *steps)

    return warmup_kernels


def _cpu_gdn_attention_core(original: _Function) -> _Function:
    @functools.wraps(original)
    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:  # noqa: ANN401
        from vllm.forward_context import get_forward_context
        from vllm.utils.torch_utils import _resolve_layer_name

        from jenga.vllm_plugin.gated_delta import forward_gated_delta
        from jenga.vllm_plugin.mamba import metadata_of

        name = _resolve_layer_name(layer_name)
        metadata = metadata_of(name)
        if metadata is None:
            original(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            layer = get_forward_context().no_compile_layers[name]
            forward_gated_delta(layer, mixed_qkv, b, a, core_attn_out, metadata)

    # The schema of the operation is read from these types, which are words in vLLM's module.
    core.__signature__ = inspect.signature(original, eval_str=True)  # pyright: ignore[reportAttributeAccessIssue]
    return core


def _kimi_forward(original: _Function) -> _Function:
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    @functools.wraps(original)
    def forward(
        self: Any,  # noqa: ANN401
        mixed_qkv: Any,  # noqa: ANN401
        g1: Any,  # noqa: ANN401
        g2: Any,  # noqa: ANN401
        beta: Any,  # noqa: ANN401
        core_attn_out: Any,  # noqa: ANN401
    ) -> None:
        from jenga.vllm_plugin.gated_delta import forward_kimi_delta
        from jenga.vllm_plugin.mamba import metadata_of

        metadata = metadata_of(self.prefix)
        if metadata is None:
            original(self, mixed_qkv, g1, g2, beta, core_attn_out)
        else:
            forward_kimi_delta(self, mixed_qkv, g1[0], beta[0], core_attn_out[0], metadata)
            core_attn_out.copy_(self.o_norm(core_attn_out, g2))

    return eager_break_during_capture(forward)


def _resolve_kv_cache_block_sizes(original: _Function) -> _Function:
    @functools.wraps(original)
    def resolve(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:  # noqa: ANN401
        from jenga.vllm_plugin.layout import JengaKVCacheConfig, groups_of_tokens

        if isinstance(kv_cache_config, JengaKVCacheConfig):
            kv_cache_config = groups_of_tokens(kv_cache_config)
        return original(kv_cache_config, vllm_config)

    return resolve


def _copy_kv_cache_blocks_inplace(original: _Function) -> _Function:
    @functools.wraps(original)
    def copy(kv_caches: Any, num_blocks: int, kv_cache_block_copies: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.state_orders import StateOrders
        from jenga.vllm_plugin.state_worker import deliver_orders

        if any(isinstance(orders, StateOrders) for orders in kv_cache_block_copies):
            for orders in kv_cache_block_copies:
                deliver_orders(kv_caches, orders)
        else:
            original(kv_caches, num_blocks, kv_cache_block_copies)

    return copy


def _init_device(original: _Function) -> _Function:
    @functools.wraps(original)
    def init_device(self: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        original(self)
        if is_selected(self.vllm_config):
            apply_worker_replacements()

    return init_device


def _batch_mm_inputs_from_scheduler(original: _Function) -> _Function:
    @functools.wraps(original)
    def batch(self: Any, scheduler_output: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        inputs = scheduler_output.scheduled_encoder_inputs
        if inputs and self.model_config.is_encoder_decoder and is_selected(self.vllm_config):
            rows = sorted(inputs, key=self.input_batch.req_id_to_index.__getitem__)
            ordered = {request_id: inputs[request_id] for request_id in rows}
            scheduler_output = replace(scheduler_output, scheduled_encoder_inputs=ordered)
        return original(self, scheduler_output)

    return batch


_CONFIG_WATCH = Replacement(
    module="vllm.platforms",
    name="current_platform.check_and_update_config",
    reason=(
        "the one place every configuration passes; the official way to it is a platform of one's "
        "own, which would replace the platform also where the backend is not selected"
    ),
    parameters=("vllm_config",),
    make=_check_and_update_config,
)

_WHEN_SELECTED = (
    Replacement(
        module="vllm.platforms",
        name="current_platform.get_attn_backend_cls",
        reason="the CPU platform ignores a selected backend, and none says why it cannot serve",
        parameters=("selected_backend", "attn_selector_config", "num_heads"),
        make=_get_attn_backend_cls,
    ),
    Replacement(
        module="vllm.platforms",
        name="current_platform.update_block_size_for_backend",
        reason="raises the attention block size of Mamba hybrids and pads their states to it",
        parameters=("vllm_config",),
        make=_update_block_size_for_backend,
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_kv_cache_groups",
        reason="unifies page sizes; ours keeps one page table per layer type. 0.33 has a hook",
        parameters=("vllm_config", "kv_cache_spec"),
        make=_when_selected("get_kv_cache_groups"),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_kv_cache_config_from_groups",
        reason="one block size and one number of blocks for all groups. 0.33 has a hook",
        parameters=("vllm_config", "kv_cache_groups", "available_memory"),
        make=_when_selected("get_kv_cache_config_from_groups"),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="_pool_bytes_per_block",
        reason="vLLM's unit of the whole pool is our large page",
        parameters=("vllm_config", "kv_cache_groups"),
        make=_when_selected("pool_bytes_per_block"),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="_max_memory_usage_bytes_from_groups",
        reason="counts a small page of any group as a whole block, and so refuses what fits",
        parameters=("vllm_config", "kv_cache_groups"),
        make=_when_selected("max_memory_usage_bytes_from_groups"),
    ),
    Replacement(
        module="vllm.v1.core.kv_cache_utils",
        name="get_max_concurrency_for_kv_cache_config",
        reason="the same count, in the capacity that vLLM reports",
        parameters=("vllm_config", "kv_cache_config"),
        make=_when_selected("max_concurrency"),
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="KVCacheManager",
        reason="vLLM has no hook for another manager; the scheduler looks this name up",
        parameters=(
            "kv_cache_config",
            "max_model_len",
            "scheduler_block_size",
            "hash_block_size",
            "max_in_flight_tokens",
            "enable_caching",
            "use_eagle",
            "num_prefill_lookahead",
            "log_stats",
            "enable_kv_cache_events",
            "dcp_world_size",
            "pcp_world_size",
            "metrics_collector",
            "watermark",
            "enable_mamba_shared_prefix_checkpoint",
        ),
        make=_kv_cache_manager,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._enqueue_waiting_request",
        reason="the manager keeps what waiting requests will read; vLLM tells it of none",
        parameters=("self", "request"),
        make=_enqueue_waiting_request,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._preempt_request",
        reason="the same for requests that wait again",
        parameters=("self", "request", "timestamp", "drop_stale_output"),
        make=_preempt_request,
    ),
    Replacement(
        module="vllm.v1.engine.core",
        name="resolve_kv_cache_block_sizes",
        reason="hashes prefixes as coarsely as states were kept if steps had to end there",
        parameters=("kv_cache_config", "vllm_config"),
        make=_resolve_kv_cache_block_sizes,
    ),
    Replacement(
        module="vllm.v1.worker.worker_base",
        name="WorkerWrapperBase.init_device",
        reason="every worker passes it, with a device and before a model: now the names below",
        parameters=("self",),
        make=_init_device,
    ),
)

_IN_WORKERS = (
    Replacement(
        module="vllm.v1.worker.gpu_worker",
        name="warmup_kernels",
        reason="its prompts are so short that layers decode them: the first long one would compile",
        parameters=("model_runner", "worker_execute_model", "worker_sample_tokens"),
        make=_warmup_kernels,
    ),
    Replacement(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner._batch_mm_inputs_from_scheduler",
        reason=(
            "encodes in the order of the schedule, but cross attention stores in that of the "
            "batch: a request resumed beside a new one gets its audio. Its other runner sorts"
        ),
        parameters=("self", "scheduler_output"),
        make=_batch_mm_inputs_from_scheduler,
    ),
    Replacement(
        module="vllm.model_executor.layers.attention.chunked_local_attention",
        name="create_chunked_local_attention_backend",
        reason="cuts a request into one per chunk on the host; our kernels mask chunks themselves",
        parameters=("underlying_attn_backend", "attention_chunk_size"),
        make=_create_chunked_local_attention_backend,
    ),
    *(
        Replacement(
            module=module,
            name="copy_kv_cache_blocks_inplace",
            reason="copies a block id in every group; ours name a page table, and states to keep",
            parameters=("kv_caches", "num_blocks", "kv_cache_block_copies"),
            make=_copy_kv_cache_blocks_inplace,
        )
        for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.mamba_mixer",
        name="MambaMixer.forward_impl",
        reason="runs on our kernels: states in place, kept on the way; vLLM has no hook for either",
        parameters=("self", "hidden_states", "output"),
        make=_forward_impl,
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.mamba_mixer2",
        name="MambaMixer2.conv_ssm_forward",
        reason="the same for Mamba-2",
        parameters=("self", "projected_states", "output"),
        make=_conv_ssm_forward,
    ),
    *(
        Replacement(
            module=f"vllm.model_executor.layers.mamba.gdn.{module}",
            name=f"{layer}._forward_core",
            reason="the same for gated delta nets",
            parameters=("self", "mixed_qkv", "b", "a", "core_attn_out"),
            make=_forward_core,
        )
        for module, layer in (
            ("qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
            ("olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"),
        )
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        name="QwenGatedDeltaNetAttention._fused_gdn_decode_unsupported_reason",
        reason="where tokens are drafted, a GPU's layer has an operation that passes the above by",
        parameters=("self", "vllm_config"),
        make=_fused_gdn_decode_unsupported_reason,
    ),
    *(
        Replacement(
            module=f"vllm.model_executor.layers.mamba.{module}",
            name=name,
            reason="compiles, on some GPUs for minutes, operations that never run",
            parameters=("self", *inputs),
            make=_skip_warm_up(mark),
        )
        for module, name, inputs, mark in (
            (
                "gdn.qwen_gdn_linear_attn",
                "QwenGatedDeltaNetAttention._warmup_prefill_kernels",
                ("qkv_or_qkvz", "v_dim"),
                "_prefill_kernels_warmed_up",
            ),
            (
                "mamba_mixer2",
                "MambaMixer2._warmup_ssd_kernels",
                ("projected_states",),
                "_ssd_kernels_warmed_up",
            ),
        )
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        name="cpu_gdn_attention_core",
        reason="the same on the CPU, where the layers of Qwen have another operation",
        parameters=("mixed_qkv", "b", "a", "core_attn_out", "layer_name"),
        make=_cpu_gdn_attention_core,
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
        name="KimiGatedDeltaNetAttention._forward",
        reason="the same for Kimi delta attention",
        parameters=("self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out"),
        make=_kimi_forward,
    ),
)

REPLACEMENTS = (_CONFIG_WATCH, *_WHEN_SELECTED, *_IN_WORKERS)
"""All of them, for the documentation and the tests."""


def check_version(version: str) -> None:
    """Check that a version of vLLM is one whose names are known.

    Raises:
        ValueError: It is not; the message names it and the supported ones.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        supported = ", ".join(f"{series}.*" for series in SUPPORTED_VERSIONS)
        msg = f"JENGA_TRITON supports vLLM {supported}; vLLM {version} is installed"
        raise ValueError(msg)


def _owner(replacement: Replacement) -> tuple[Any, str]:
    """Find the object that holds the name, and the attribute's name in it."""
    owner: Any = importlib.import_module(replacement.module)
    *path, attribute = replacement.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    if path == ["current_platform"]:
        owner = type(owner)  # the platform's methods are class methods
    return owner, attribute


def _check_signature(replacement: Replacement, original: _Function) -> None:
    parameters = tuple(inspect.signature(original).parameters)
    if parameters != replacement.parameters:
        msg = (
            f"{replacement.module}.{replacement.name} takes {parameters}, but this plugin was "
            f"written for {replacement.parameters}; vLLM {', '.join(SUPPORTED_VERSIONS)} supported"
        )
        raise ValueError(msg)


def _is_applied(replacement: Replacement) -> bool:
    owner, attribute = _owner(replacement)
    return getattr(getattr(owner, attribute, None), "replaced_by_jenga", False)


def _apply(replacement: Replacement) -> None:
    owner, attribute = _owner(replacement)
    original = getattr(owner, attribute)
    function = replacement.make(original)
    function.replaced_by_jenga = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(owner, attribute, staticmethod(function) if inspect.ismethod(original) else function)


def check_names(replacements: tuple[Replacement, ...]) -> None:
    """Check that vLLM has every name not yet replaced, with the signature this was written for.

    Raises:
        ValueError: It has not; the message names the function and both signatures.
    """
    for replacement in replacements:
        if _is_applied(replacement):
            continue
        owner, attribute = _owner(replacement)
        original = getattr(owner, attribute, None)
        if original is None:
            msg = f"vLLM has no {replacement.module}.{replacement.name}"
            raise ValueError(msg)
        _check_signature(replacement, original)


def watch_configurations() -> None:
    """Put the one replacement in place that is needed to see a configuration select the backend."""
    if not _is_applied(_CONFIG_WATCH):
        _apply(_CONFIG_WATCH)


def _put_in_place(replacements: tuple[Replacement, ...]) -> None:
    """Check names, then replace them, each once; where a check fails nothing is replaced."""
    check_names(replacements)
    for replacement in replacements:
        if not _is_applied(replacement):
            _apply(replacement)


def apply_replacements() -> None:
    """Check vLLM's version and names, then replace all but those of workers, once.

    Raises:
        ValueError: This vLLM is not one the plugin was written for; nothing was replaced.
    """
    import vllm

    from jenga.vllm_plugin.switch import register_state_backends

    check_version(vllm.__version__)
    _put_in_place((_CONFIG_WATCH, *_WHEN_SELECTED))
    register_state_backends()


def apply_worker_replacements() -> None:
    """Check and replace the names of workers' modules, once; for a process that has its device.

    Raises:
        ValueError: A name is not as the plugin was written for; nothing was replaced.
    """
    _put_in_place(_IN_WORKERS)

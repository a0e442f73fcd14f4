"""Replaced names of vLLM's recurrent layers, in a process that has its device.

Each is the part between a layer's projections, or the whole layer, because vLLM has no hook there.
A layer whose step has no metadata of ours runs the original. This happens before memory is
profiled, and for classes of layers that share the name and are not served.
"""

import functools
import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from jenga.vllm_plugin.patches.patch import Function, Replacement


def _served_by(path: str) -> Callable[[Function], Function]:
    """Let a layer call one of our functions in steps with our metadata.

    Args:
        path: Path of the function, module:function. It is called with the layer, the original's
            arguments in their order, and the step's metadata.
    """

    def make(original: Function) -> Function:
        from jenga.vllm_plugin.layers.recurrent.recurrence import metadata_of

        serve = resolve_name(path)
        _, *names = inspect.signature(original).parameters

        @functools.wraps(original)
        def forward(self: Any, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401
            metadata = metadata_of(self.prefix)
            if metadata is None:
                return original(self, *inputs, **named)
            return serve(self, *inputs, *(named[name] for name in names[len(inputs) :]), metadata)

        return forward

    return make


def _fused_gdn_decode_unsupported_reason(original: Function) -> Function:
    @functools.wraps(original)
    def unsupported_reason(self: Any, vllm_config: Any) -> str | None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        if is_selected(vllm_config):
            return "JENGA_TRITON runs these layers on kernels of its own"
        return original(self, vllm_config)

    return unsupported_reason


def _skip_warm_up(mark: str) -> Callable[[Function], Function]:
    """Set a layer's attribute that says it is warmed up, so that the original returns at once."""

    def make(original: Function) -> Function:
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


def _cpu_gdn_attention_core(original: Function) -> Function:
    @functools.wraps(original)
    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:  # noqa: ANN401
        from vllm.forward_context import get_forward_context
        from vllm.utils.torch_utils import _resolve_layer_name

        from jenga.vllm_plugin.layers.recurrent.gated_delta import forward_gated_delta
        from jenga.vllm_plugin.layers.recurrent.recurrence import metadata_of

        name = _resolve_layer_name(layer_name)
        metadata = metadata_of(name)
        if metadata is None:
            original(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            layer = get_forward_context().no_compile_layers[name]
            forward_gated_delta(layer, mixed_qkv, b, a, core_attn_out, metadata)

    # torch reads the operation's schema from these types. In vLLM's module they are strings.
    core.__signature__ = inspect.signature(original, eval_str=True)  # pyright: ignore[reportAttributeAccessIssue]
    return core


def _kimi_forward(original: Function) -> Function:
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
        from jenga.vllm_plugin.layers.recurrent.gated_delta import forward_kimi_delta
        from jenga.vllm_plugin.layers.recurrent.recurrence import metadata_of

        metadata = metadata_of(self.prefix)
        if metadata is None:
            original(self, mixed_qkv, g1, g2, beta, core_attn_out)
        else:
            forward_kimi_delta(self, mixed_qkv, g1[0], beta[0], core_attn_out[0], metadata)
            core_attn_out.copy_(self.o_norm(core_attn_out, g2))

    return eager_break_during_capture(forward)


def _get_attn_backend(original: Function) -> Function:
    @functools.wraps(original)
    def get_attn_backend(self: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.layers.recurrent.linear_attention import (
            JengaLinearAttentionBackend,
            keep_rates,
        )

        keep_rates(self)
        return JengaLinearAttentionBackend

    return get_attn_backend


RECURRENT_LAYERS = (
    Replacement(
        module="vllm.model_executor.layers.mamba.mamba_mixer",
        name="MambaMixer.forward_impl",
        reason=(
            "runs on our kernels, which update states in place and keep copies of them on the way; "
            "vLLM has no hook for either"
        ),
        parameters=("self", "hidden_states", "output"),
        make=_served_by("jenga.vllm_plugin.layers.recurrent.mamba:forward_mamba1"),
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.mamba_mixer2",
        name="MambaMixer2.conv_ssm_forward",
        reason="the same for Mamba-2",
        parameters=("self", "projected_states", "output"),
        make=_served_by("jenga.vllm_plugin.layers.recurrent.mamba:forward_mamba2"),
    ),
    *(
        Replacement(
            module=f"vllm.model_executor.layers.mamba.gdn.{module}",
            name=f"{layer}._forward_core",
            reason="the same for gated delta nets",
            parameters=("self", "mixed_qkv", "b", "a", "core_attn_out"),
            make=_served_by("jenga.vllm_plugin.layers.recurrent.gated_delta:forward_gated_delta"),
        )
        for module, layer in (
            ("qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
            ("olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"),
        )
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        name="QwenGatedDeltaNetAttention._fused_gdn_decode_unsupported_reason",
        reason="with drafts on a GPU, a fused operation would bypass the replaced function above",
        parameters=("self", "vllm_config"),
        make=_fused_gdn_decode_unsupported_reason,
    ),
    *(
        Replacement(
            module=f"vllm.model_executor.layers.mamba.{module}",
            name=name,
            reason="compiles operations that never run, for minutes on some GPUs",
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
        reason="gated delta nets of Qwen use this operation on the CPU",
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
    Replacement(
        module="vllm.model_executor.models.bailing_moe_v3",
        name="BailingMoeV3KimiDeltaAttention._forward",
        reason="the same for Bailing's own class of Kimi delta attention",
        parameters=(
            "self",
            "q_proj_states",
            "k_proj_states",
            "v_proj_states",
            "g1",
            "beta",
            "core_attn_out",
        ),
        make=_served_by("jenga.vllm_plugin.layers.recurrent.gated_delta:forward_bailing_delta"),
    ),
    *(
        Replacement(
            module="vllm.model_executor.layers.mamba.short_conv",
            name=f"ShortConv.{name}",
            reason="the same for short convolutions",
            parameters=("self", "hidden_states", "output"),
            make=_served_by("jenga.vllm_plugin.layers.recurrent.short_conv:forward_short_conv"),
        )
        for name in ("forward_native", "forward_cuda")
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.linear.bailing_linear_attn",
        name="BailingMoELinearAttention._forward",
        reason="the same for linear attention",
        parameters=("self", "hidden_states", "output", "positions"),
        make=_served_by(
            "jenga.vllm_plugin.layers.recurrent.linear_attention:forward_linear_attention"
        ),
    ),
    Replacement(
        module="vllm.model_executor.layers.mamba.linear.bailing_linear_attn",
        name="BailingMoELinearAttention.get_attn_backend",
        reason="names a backend itself; other recurrent layers ask vLLM's registry",
        parameters=("self",),
        make=_get_attn_backend,
    ),
)
"""Replacements in vLLM's recurrent layers."""

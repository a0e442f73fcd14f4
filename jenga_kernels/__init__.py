"""Paged kernels for serving language models: attention caches and recurrent states in one arena.

The public functions are imported from here, for example `from jenga_kernels import kv_store`. Each
operation is one module with one public function of the same name, in a folder for its family. Its
Triton kernels are in `jenga_kernels.triton`, and `jenga_kernels.reference` holds a PyTorch version
with the same signature, which defines what the operation does. The package stands alone: it needs
torch and Triton and knows no engine.

A cache is a strided view. Its pages need not be contiguous; only the last dimension must be. On
tensors of a GPU, an operation launches its kernels. On tensors of a CPU, it calls its reference
after the same checks. If `TRITON_INTERPRET=1` is set before the first import, Triton's interpreter
runs the kernels on the CPU instead.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jenga_kernels.attention.attention_merge import attention_merge
    from jenga_kernels.attention.dequantise_pages import dequantise_pages
    from jenga_kernels.attention.kv_store import kv_store
    from jenga_kernels.attention.paged_attention import paged_attention
    from jenga_kernels.attention.scratch_attention import scratch_attention
    from jenga_kernels.attention.token_choice import choose_tokens
    from jenga_kernels.attention.token_scores import token_scores
    from jenga_kernels.latent.latent_attention import latent_attention
    from jenga_kernels.latent.latent_store import latent_store
    from jenga_kernels.pages.pack_slots import pack_slots
    from jenga_kernels.pages.page_clear import page_clear
    from jenga_kernels.pages.page_copy import page_copy
    from jenga_kernels.plans.attention_plan import AttentionKind, AttentionPlan, plan_attention
    from jenga_kernels.plans.latent_plan import plan_latent_attention
    from jenga_kernels.plans.scratch_plan import ScratchPlan, plan_scratch
    from jenga_kernels.recurrent.causal_conv import causal_conv
    from jenga_kernels.recurrent.conv_update import conv_update
    from jenga_kernels.recurrent.delta_replay import delta_replay
    from jenga_kernels.recurrent.delta_scan import delta_scan
    from jenga_kernels.recurrent.delta_update import delta_update
    from jenga_kernels.recurrent.state_replay import state_replay
    from jenga_kernels.recurrent.state_scan import state_scan
    from jenga_kernels.recurrent.state_update import state_update

__all__ = [
    "AttentionKind",
    "AttentionPlan",
    "ScratchPlan",
    "attention_merge",
    "causal_conv",
    "choose_tokens",
    "conv_update",
    "delta_replay",
    "delta_scan",
    "delta_update",
    "dequantise_pages",
    "kv_store",
    "latent_attention",
    "latent_store",
    "pack_slots",
    "page_clear",
    "page_copy",
    "paged_attention",
    "plan_attention",
    "plan_latent_attention",
    "plan_scratch",
    "scratch_attention",
    "state_replay",
    "state_scan",
    "state_update",
    "token_scores",
]

_HOMES = {
    "AttentionKind": "plans.attention_plan",
    "AttentionPlan": "plans.attention_plan",
    "ScratchPlan": "plans.scratch_plan",
    "attention_merge": "attention.attention_merge",
    "causal_conv": "recurrent.causal_conv",
    "choose_tokens": "attention.token_choice",
    "conv_update": "recurrent.conv_update",
    "delta_replay": "recurrent.delta_replay",
    "delta_scan": "recurrent.delta_scan",
    "delta_update": "recurrent.delta_update",
    "dequantise_pages": "attention.dequantise_pages",
    "kv_store": "attention.kv_store",
    "latent_attention": "latent.latent_attention",
    "latent_store": "latent.latent_store",
    "pack_slots": "pages.pack_slots",
    "page_clear": "pages.page_clear",
    "page_copy": "pages.page_copy",
    "paged_attention": "attention.paged_attention",
    "plan_attention": "plans.attention_plan",
    "plan_latent_attention": "plans.latent_plan",
    "plan_scratch": "plans.scratch_plan",
    "scratch_attention": "attention.scratch_attention",
    "state_replay": "recurrent.state_replay",
    "state_scan": "recurrent.state_scan",
    "state_update": "recurrent.state_update",
    "token_scores": "attention.token_scores",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found = getattr(import_module(f"jenga_kernels.{_HOMES[name]}"), name)
    globals()[name] = found
    return found

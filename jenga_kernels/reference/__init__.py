"""References: each operation in plain PyTorch, with the same name and signature.

Tests and benchmarks compare the kernels with these. Nothing here is fast. As with the operations,
`from jenga_kernels.reference import paged_attention` gives the function.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jenga_kernels.reference.attention.attention_merge import attention_merge
    from jenga_kernels.reference.attention.dequantise_pages import dequantise_pages
    from jenga_kernels.reference.attention.kv_store import kv_store
    from jenga_kernels.reference.attention.paged_attention import paged_attention
    from jenga_kernels.reference.attention.scratch_attention import scratch_attention
    from jenga_kernels.reference.attention.token_scores import token_scores
    from jenga_kernels.reference.latent.latent_attention import latent_attention
    from jenga_kernels.reference.latent.latent_store import latent_store
    from jenga_kernels.reference.pages.pack_slots import pack_slots
    from jenga_kernels.reference.pages.page_clear import page_clear
    from jenga_kernels.reference.pages.page_copy import page_copy
    from jenga_kernels.reference.recurrent.causal_conv import causal_conv
    from jenga_kernels.reference.recurrent.conv_update import conv_update
    from jenga_kernels.reference.recurrent.delta_replay import delta_replay
    from jenga_kernels.reference.recurrent.delta_scan import delta_scan
    from jenga_kernels.reference.recurrent.delta_update import delta_update
    from jenga_kernels.reference.recurrent.state_replay import state_replay
    from jenga_kernels.reference.recurrent.state_scan import state_scan
    from jenga_kernels.reference.recurrent.state_update import state_update

__all__ = [
    "attention_merge",
    "causal_conv",
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
    "scratch_attention",
    "state_replay",
    "state_scan",
    "state_update",
    "token_scores",
]

_FAMILIES = {
    "attention_merge": "attention",
    "causal_conv": "recurrent",
    "conv_update": "recurrent",
    "delta_replay": "recurrent",
    "delta_scan": "recurrent",
    "delta_update": "recurrent",
    "dequantise_pages": "attention",
    "kv_store": "attention",
    "latent_attention": "latent",
    "latent_store": "latent",
    "pack_slots": "pages",
    "page_clear": "pages",
    "page_copy": "pages",
    "paged_attention": "attention",
    "scratch_attention": "attention",
    "state_replay": "recurrent",
    "state_scan": "recurrent",
    "state_update": "recurrent",
    "token_scores": "attention",
}


def __getattr__(name: str) -> object:
    """Import a reference when it is first asked for."""
    if name not in _FAMILIES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = import_module(f"jenga_kernels.reference.{_FAMILIES[name]}.{name}")
    found = getattr(module, name)
    globals()[name] = found
    return found

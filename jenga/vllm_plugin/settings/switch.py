"""The plugin's switch: add the backend's name to vLLM, and apply patches where it is selected.

The name is a member of vLLM's backend enumeration, added through vLLM's own `register`. Enumeration
members pickle by value, and a spawned engine process unpickles its configuration before it loads
plugins. So unpickling the member calls `restore_backend`, which adds the name in that process and
applies the replacements. Selecting the name is thus the only switch, and the configuration carries
it into every process.
"""

import os
from contextlib import suppress
from typing import Any

from jenga.vllm_plugin.settings.environment import BACKEND_NAME, BACKEND_VARIABLE

_BACKEND_PATH = "jenga.vllm_plugin.layers.attention.backend.JengaTritonBackend"
_MAMBA1_BACKEND_PATH = "jenga.vllm_plugin.layers.recurrent.mamba_builder.JengaMamba1Backend"
_MAMBA2_BACKEND_PATH = "jenga.vllm_plugin.layers.recurrent.mamba_builder.JengaMamba2Backend"
_GATED_DELTA_BACKEND_PATH = "jenga.vllm_plugin.layers.recurrent.gated_delta.JengaGatedDeltaBackend"
_SHORT_CONV_BACKEND_PATH = "jenga.vllm_plugin.layers.recurrent.short_conv.JengaShortConvBackend"


def backend_member() -> Any:  # noqa: ANN401 (a member of an enumeration that vLLM extends at run time)
    """Get the enumeration member of JENGA_TRITON. The first call adds it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        member = AttentionBackendEnum.register(BACKEND_NAME, _BACKEND_PATH)
        member.__reduce_ex__ = lambda proto: (restore_backend, ())  # noqa: ARG005 (pickle's)
    return AttentionBackendEnum[BACKEND_NAME]


def _forget_backend() -> None:
    """Remove the name that `backend_member` added, so that vLLM refuses it as unknown.

    There is no hook for this in vLLM. The function undoes what the enumeration's `register` does.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    member = Backends._member_map_.pop(BACKEND_NAME, None)
    if member is not None:
        Backends._value2member_map_.pop(member.value)
        Backends._member_names_.remove(BACKEND_NAME)
        delattr(Backends, BACKEND_NAME)


def restore_backend() -> Any:  # noqa: ANN401
    """Unpickle the member, and apply the replacements.

    It is called when a configuration that selects the backend reaches this process.
    """
    from jenga.vllm_plugin.patches.all_patches import apply_replacements

    member = backend_member()
    apply_replacements()
    return member


def register_state_backends() -> None:
    """Register our backends for recurrent layers in vLLM's registry."""
    from vllm.v1.attention.backends.registry import (
        MambaAttentionBackendEnum,
        register_backend,
    )

    register_backend(MambaAttentionBackendEnum.MAMBA1, _MAMBA1_BACKEND_PATH, is_mamba=True)
    register_backend(MambaAttentionBackendEnum.MAMBA2, _MAMBA2_BACKEND_PATH, is_mamba=True)
    register_backend(MambaAttentionBackendEnum.GDN_ATTN, _GATED_DELTA_BACKEND_PATH, is_mamba=True)
    register_backend(MambaAttentionBackendEnum.SHORT_CONV, _SHORT_CONV_BACKEND_PATH, is_mamba=True)


def register_backend() -> None:
    """Make the name selectable, and watch for a configuration that selects it.

    Some versions of vLLM lack names that this needs. There the plugin only warns, because an
    installed plugin that is not selected must not stop an engine. If `name_backend` has added the
    backend's name before, it is removed again.

    Raises:
        ValueError: This vLLM lacks such names, and `VLLM_ATTENTION_BACKEND` selects the backend.
    """
    import vllm.envs
    from vllm.logger import init_logger

    try:
        from jenga.vllm_plugin.patches.all_patches import watch_configurations

        watch_configurations()
        backend_member()
        # vLLM no longer has this variable, and warns about unknown ones. The plugin does read it.
        vllm.envs.environment_variables.setdefault(BACKEND_VARIABLE, lambda: None)
    except (AttributeError, ImportError, ValueError) as error:
        if os.environ.get(BACKEND_VARIABLE, "").strip().upper() == BACKEND_NAME:
            msg = f"{BACKEND_VARIABLE}={BACKEND_NAME} cannot be served on this vLLM: {error}"
            raise ValueError(msg) from error
        with suppress(ImportError):  # this vLLM may lack the enumeration, and so the name
            _forget_backend()
        logger = init_logger(f"vllm.{__name__}")
        logger.warning("%s cannot be selected on this vLLM: %s", BACKEND_NAME, error)

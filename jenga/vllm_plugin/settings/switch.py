"""Making the backend's name known to vLLM, and switching the plugin on when it is selected.

The name is a member of vLLM's backend enumeration, added through vLLM's own `register`. Enumeration
members pickle by value, and a spawned engine process unpickles its configuration before it loads
plugins, so the member carries its own way back: unpickling it calls `restore_backend`, which makes
the name known there and applies the replacements. Selecting the name is thus the only switch, and
it travels with the configuration into every process.
"""

import os
from contextlib import suppress
from typing import Any

from jenga.vllm_plugin.settings.environment import BACKEND_NAME, BACKEND_VARIABLE

_BACKEND_PATH = "jenga.vllm_plugin.layers.attention.JengaTritonBackend"
_MAMBA1_BACKEND_PATH = "jenga.vllm_plugin.layers.mamba_builder.JengaMamba1Backend"
_MAMBA2_BACKEND_PATH = "jenga.vllm_plugin.layers.mamba_builder.JengaMamba2Backend"
_GATED_DELTA_BACKEND_PATH = "jenga.vllm_plugin.layers.gated_delta.JengaGatedDeltaBackend"
_SHORT_CONV_BACKEND_PATH = "jenga.vllm_plugin.layers.short_conv.JengaShortConvBackend"


def backend_member() -> Any:  # noqa: ANN401 (a member of an enumeration that vLLM extends at run time)
    """Get the enumeration member of JENGA_TRITON, adding it the first time."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        member = AttentionBackendEnum.register(BACKEND_NAME, _BACKEND_PATH)
        member.__reduce_ex__ = lambda proto: (restore_backend, ())  # noqa: ARG005 (pickle's)
    return AttentionBackendEnum[BACKEND_NAME]


def _forget_backend() -> None:
    """Take the name back that `backend_member` made known, so that vLLM refuses it as unknown.

    VLLM has no hook for it: this undoes what `register` of its enumeration does.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    member = Backends._member_map_.pop(BACKEND_NAME, None)
    if member is not None:
        Backends._value2member_map_.pop(member.value)
        Backends._member_names_.remove(BACKEND_NAME)
        delattr(Backends, BACKEND_NAME)


def restore_backend() -> Any:  # noqa: ANN401
    """Unpickle the member: a configuration that selects the backend has reached this process."""
    from jenga.vllm_plugin.patches.all_patches import apply_replacements

    member = backend_member()
    apply_replacements()
    return member


def register_state_backends() -> None:
    """Register our backends of recurrent layers in vLLM's own registry."""
    from vllm.v1.attention.backends.registry import (
        MambaAttentionBackendEnum,
        register_backend,
    )

    register_backend(MambaAttentionBackendEnum.MAMBA1, _MAMBA1_BACKEND_PATH, is_mamba=True)
    register_backend(MambaAttentionBackendEnum.MAMBA2, _MAMBA2_BACKEND_PATH, is_mamba=True)
    register_backend(MambaAttentionBackendEnum.GDN_ATTN, _GATED_DELTA_BACKEND_PATH, is_mamba=True)
    register_backend(MambaAttentionBackendEnum.SHORT_CONV, _SHORT_CONV_BACKEND_PATH, is_mamba=True)


def register_backend() -> None:
    """Make the name selectable and watch for a configuration that selects it.

    A vLLM without the names that this takes is left as it is, unless the environment selects the
    backend: a plugin that is installed and not selected stops no engine. There the name is taken
    back if vLLM has asked for it already, by `name_backend`.

    Raises:
        ValueError: This vLLM has not these names, and `VLLM_ATTENTION_BACKEND` selects the backend.
    """
    import vllm.envs
    from vllm.logger import init_logger

    try:
        from jenga.vllm_plugin.patches.all_patches import watch_configurations

        watch_configurations()
        backend_member()
        # vLLM dropped this variable and warns of unknown ones; with the plugin it is known.
        vllm.envs.environment_variables.setdefault(BACKEND_VARIABLE, lambda: None)
    except (AttributeError, ImportError, ValueError) as error:
        if os.environ.get(BACKEND_VARIABLE, "").strip().upper() == BACKEND_NAME:
            msg = f"{BACKEND_VARIABLE}={BACKEND_NAME} cannot be served on this vLLM: {error}"
            raise ValueError(msg) from error
        with suppress(ImportError):  # where vLLM has no such enumeration, no name is in it
            _forget_backend()
        logger = init_logger(f"vllm.{__name__}")
        logger.warning("%s cannot be selected on this vLLM: %s", BACKEND_NAME, error)

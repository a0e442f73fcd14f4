"""The plugin that gives vLLM this package's memory manager and kernels.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every
process. It makes the attention backend JENGA_TRITON known by name, and the architectures of models
that vLLM does not have. Nothing else in vLLM changes until a configuration selects that name. vLLM
parses options that are mappings before it calls `register`. For these, `name_backend` of the group
`vllm.platform_plugins` makes the name known early enough.
"""


def register() -> None:
    """Make JENGA_TRITON selectable, and our models known, in this process.

    vLLM calls it. More than one call is safe.
    """
    from jenga.vllm_plugin.models.registered_models import register_models
    from jenga.vllm_plugin.settings.switch import register_backend

    register_backend()
    register_models()


def name_backend() -> None:
    """Make the name JENGA_TRITON known in this process, and offer vLLM no platform.

    vLLM calls it while it is imported, when it looks for a platform.
    """
    from jenga.vllm_plugin.settings.switch import backend_member

    backend_member()

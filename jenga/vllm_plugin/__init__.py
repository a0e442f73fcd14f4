"""The plugin that gives vLLM this package's memory manager and kernels.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every
process. It makes the attention backend JENGA_TRITON known by name; nothing else of vLLM changes
until a configuration selects that name. Options that are mappings are read before that:
`name_backend`, of the group `vllm.platform_plugins`, makes the name known early enough for these.
"""


def register() -> None:
    """Make JENGA_TRITON selectable in this process. Called by vLLM; safe to call again."""
    from jenga.vllm_plugin.settings.switch import register_backend

    register_backend()


def name_backend() -> None:
    """Make the name JENGA_TRITON known in this process, and offer vLLM no platform.

    vLLM calls it when it looks for a platform, which it does as it is imported.
    """
    from jenga.vllm_plugin.settings.switch import backend_member

    backend_member()

"""The plugin that gives vLLM this package's memory manager and kernels.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in every
process. It makes the attention backend JENGA_TRITON known by name; nothing else of vLLM changes
until a configuration selects that name.
"""


def register() -> None:
    """Make JENGA_TRITON selectable in this process. Called by vLLM; safe to call again."""
    from jenga.vllm_plugin.switch import register_backend

    register_backend()

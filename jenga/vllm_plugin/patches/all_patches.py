"""Every name of vLLM that this plugin replaces; the reason for each is with it.

Each replacement that is given a configuration calls the original unless that selects JENGA_TRITON.
All but the first are put in place only once a configuration selects it, so a process that never
does runs vLLM's own functions. Before that the installed version and the signature of each name are
checked, so that another vLLM is refused with a message instead of failing later. Names of the
worker's modules wait until its device is set: importing some of them initialises CUDA, after which
the process that made the configuration could not fork, and a worker would not yet have its GPU.

Official hooks are used where vLLM has them: the backend enumerations and their `register`, the
attention backend interface (layouts, supported features), `KVCacheConfig.num_blocks_of`, which is
overridden in a subclass, and the builder of cache configurations that 0.33 has.
"""

from jenga.vllm_plugin.patches.engine import CONFIG_WATCH, WHEN_SELECTED
from jenga.vllm_plugin.patches.layers import RECURRENT_LAYERS
from jenga.vllm_plugin.patches.metrics import METRICS, watch_metrics
from jenga.vllm_plugin.patches.patch import put_in_place
from jenga.vllm_plugin.patches.planner import PLANNER
from jenga.vllm_plugin.patches.workers import WORKERS

IN_WORKERS = (*WORKERS, *RECURRENT_LAYERS)
"""In place once a worker of a configuration that selects us has its device."""

REPLACEMENTS = (*CONFIG_WATCH, *WHEN_SELECTED, *PLANNER, *METRICS, *IN_WORKERS)
"""All of them, for the documentation and the tests."""


def watch_configurations() -> None:
    """Put the replacements in place that are needed to see a configuration select the backend.

    Raises:
        ValueError: vLLM has not one of the names, or with another signature; none was replaced.
    """
    check_watch()
    for watch in CONFIG_WATCH:
        if not watch.is_applied:
            watch.apply()


def check_watch() -> None:
    """Check that this vLLM lets the plugin see a configuration select the backend.

    Raises:
        ValueError: vLLM has not one of the names that this takes, or with another signature.
    """
    for watch in CONFIG_WATCH:
        if not watch.is_applied:
            watch.check()


def apply_replacements() -> None:
    """Check vLLM's version and names, then replace all but those of workers, once.

    Raises:
        ValueError: This vLLM is not one the plugin was written for; nothing was replaced.
    """
    from jenga.vllm_plugin.settings.switch import register_state_backends

    put_in_place((*CONFIG_WATCH, *WHEN_SELECTED, *PLANNER))
    register_state_backends()
    watch_metrics()


def apply_worker_replacements() -> None:
    """Check and replace the names of workers' modules, once; for a process that has its device.

    Raises:
        ValueError: A name is not as the plugin was written for; nothing was replaced.
    """
    put_in_place(IN_WORKERS)

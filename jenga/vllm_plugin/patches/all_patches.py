"""All names of vLLM that this plugin replaces. Each replacement has its reason.

A replacement that gets a configuration calls the original unless JENGA_TRITON is selected. They are
applied in three stages:

1. `CONFIG_WATCH` is applied when vLLM loads the plugin, to see a configuration select the backend.
2. The others are applied once a configuration selects it. So other processes run vLLM's own
   functions. The installed version and all signatures are checked first, so that another vLLM is
   refused with a message instead of failing later.
3. Names of worker modules are replaced once the worker's device is set. Importing some of these
   modules initialises CUDA. After that the process that made the configuration could not fork, and
   a worker would not have its GPU yet.

Official hooks are used where vLLM has them:

- the backend enumerations and their `register`,
- the attention backend interface (layouts, supported features),
- `KVCacheConfig.num_blocks_of`, which a subclass overrides,
- the builder of cache configurations in 0.33.
"""

from jenga.vllm_plugin.patches.encoder_cache import ENCODER_CACHE
from jenga.vllm_plugin.patches.engine import CONFIG_WATCH, WHEN_SELECTED
from jenga.vllm_plugin.patches.layers import RECURRENT_LAYERS
from jenga.vllm_plugin.patches.metrics import METRICS, watch_metrics
from jenga.vllm_plugin.patches.patch import put_in_place
from jenga.vllm_plugin.patches.planner import PLANNER
from jenga.vllm_plugin.patches.workers import WORKERS

IN_WORKERS = (*WORKERS, *ENCODER_CACHE, *RECURRENT_LAYERS)
"""Applied once a worker has its device, if its configuration selects the backend."""

REPLACEMENTS = (*CONFIG_WATCH, *WHEN_SELECTED, *PLANNER, *METRICS, *IN_WORKERS)
"""All replacements, for the documentation and the tests."""


def watch_configurations() -> None:
    """Apply the replacements that let the plugin see a configuration select the backend.

    Raises:
        ValueError: vLLM lacks one of the names, or has another signature. Nothing was replaced.
    """
    check_watch()
    for watch in CONFIG_WATCH:
        if not watch.is_applied:
            watch.apply()


def check_watch() -> None:
    """Check that the plugin can see a configuration select the backend in this vLLM.

    Raises:
        ValueError: vLLM lacks one of the names that this needs, or has another signature.
    """
    for watch in CONFIG_WATCH:
        if not watch.is_applied:
            watch.check()


def apply_replacements() -> None:
    """Check vLLM's version and names, then replace all names except those of workers.

    More than one call is safe.

    Raises:
        ValueError: The plugin was not written for this version of vLLM. Nothing was replaced.
    """
    from jenga.vllm_plugin.settings.switch import register_state_backends

    put_in_place((*CONFIG_WATCH, *WHEN_SELECTED, *PLANNER))
    register_state_backends()
    watch_metrics()


def apply_worker_replacements() -> None:
    """Check and replace the names of worker modules, in a process that has its device.

    More than one call is safe.

    Raises:
        ValueError: A name is missing or has another signature. Nothing was replaced.
    """
    put_in_place(IN_WORKERS)

"""Keys of vLLM's `additional_config` that the plugin reads. It carries them into every process.

The plugin adds these keys itself. Users set environment variables and options of vLLM instead.
"""

from jenga.models.readers.token_budgets import TOKEN_BUDGETS
from jenga.vllm_plugin.settings.environment import KNOWN_VARIABLES

HOST_BYTES = "jenga_host_bytes"
"""Key of --kv-offloading-size, in bytes."""

HISTORY_TOKENS = "jenga_history_tokens"
"""Key of the number of tokens in the histories beside recurrent states."""

HISTORY_IS_DEFAULT = "jenga_history_is_default"
"""Key that is there if that number is the default. Layers without a history are then no error."""

HISTORY_REQUESTS = "jenga_history_requests"
"""Key of the fewest requests of a step that does not write all of its states, if that is set."""

SHARED_ARENA = "jenga_shared_arena"
"""Key of the engine's share in a shared arena."""

_KEYS = (HISTORY_IS_DEFAULT, HISTORY_REQUESTS, HISTORY_TOKENS, HOST_BYTES, SHARED_ARENA)

_PREFIX = "jenga_"


def check_additional_config(options: object) -> None:
    """Refuse keys that are meant for the plugin and that it does not read.

    Keys of other plugins are left alone.

    Args:
        options: vLLM's `additional_config`, a mapping or an object of another plugin.

    Raises:
        ValueError: There is such a key. The message says what to set instead.
    """
    if not isinstance(options, dict):
        return
    if TOKEN_BUDGETS in options:
        msg = (
            f"--additional-config has {TOKEN_BUDGETS!r}, which is read from the configuration of "
            f"the model; add it to config.json, or give --hf-overrides "
            f"'{{\"{TOKEN_BUDGETS}\": ...}}'"
        )
        raise ValueError(msg)
    for key in map(str, options):
        if key.lower().startswith(_PREFIX) and key not in _KEYS:
            msg = (
                f"--additional-config has the unknown key {key!r}; expected one of "
                f"{', '.join(_KEYS)}, which the plugin adds itself, or for settings the "
                f"environment variables {', '.join(sorted(KNOWN_VARIABLES))}"
            )
            raise ValueError(msg)

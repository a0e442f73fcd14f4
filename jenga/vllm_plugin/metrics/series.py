"""The Prometheus series of an engine with this backend: names, labels and meanings.

`docs/metrics.md` explains them to users, and `docs/grafana/jenga.json` plots them. Tests compare
both with this list.
"""

from dataclasses import dataclass

ENGINE_LABELS = ("model_name", "engine")
"""Labels of every series. They have the same values as in vLLM's own series."""

EVICTION_CAUSES: tuple[str, ...] = ("own_page", "own_large_page", "other_table", "checkpoint")
HELD_BACK_REASONS: tuple[str, ...] = ("memory", "reserve", "state", "loading")
ARENA_STATES = ("needed", "padding", "cached", "empty", "free", "null")
HOST_STATES = ("loading", "cached", "empty", "free", "null")
LARGE_PAGE_STATES = ("free", "held", "cached", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One Prometheus metric.

    Attributes:
        name: Name as it is scraped. The name of a counter ends in `_total`.
        labels: Its labels in addition to `ENGINE_LABELS`.
        meaning: The help text.
    """

    name: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def is_counter(self) -> bool:
        """Whether the metric counts from the start of the engine. Otherwise it is a gauge."""
        return self.name.endswith("_total")


_TABLE = ("table", "layer_type")

ARENA_BYTES = Series(
    name="jenga_arena_bytes",
    labels=(*_TABLE, "state"),
    meaning=(
        "Bytes of the arena of one GPU, by page table and state. Their sum is the size of the "
        "arena. Free large pages and the null page have no page table."
    ),
)
ARENA_SIZE_BYTES = Series(
    name="jenga_arena_size_bytes", labels=(), meaning="Bytes of the whole arena of one GPU."
)
HELD_BYTES = Series(
    name="jenga_held_bytes",
    labels=_TABLE,
    meaning="Bytes of all large pages of a page table: needed, padding, cached and empty.",
)
LARGE_PAGES = Series(
    name="jenga_large_pages", labels=("state",), meaning="Large pages of the arena by state."
)
HOST_BYTES = Series(
    name="jenga_host_bytes",
    labels=(*_TABLE, "state"),
    meaning=(
        "Bytes of host memory of one GPU, by page table and state. Their sum is the size of host "
        "memory."
    ),
)
HOST_SIZE_BYTES = Series(
    name="jenga_host_size_bytes", labels=(), meaning="Bytes of the host memory of one GPU."
)
QUERIED_TOKENS = Series(
    name="jenga_prefix_queried_tokens_total",
    labels=(),
    meaning="Tokens that admitted requests looked for in the prefix cache.",
)
HIT_TOKENS = Series(
    name="jenga_prefix_hit_tokens_total",
    labels=(),
    meaning="Tokens that admitted requests found in the prefix cache.",
)
BOUNDED_TOKENS = Series(
    name="jenga_prefix_bounded_tokens_total",
    labels=_TABLE,
    meaning="Tokens not found because this page table allowed no longer prefix hit.",
)
EVICTED_BYTES = Series(
    name="jenga_evicted_bytes_total",
    labels=(*_TABLE, "cause"),
    meaning="Bytes of small pages that lost their cached content, by cause.",
)
STATES_KEPT = Series(
    name="jenga_states_kept_total",
    labels=(),
    meaning="Times that the recurrent states of a request were copied for other requests.",
)
STATES_READ = Series(
    name="jenga_states_read_total",
    labels=(),
    meaning="Times that a request started from a copy of recurrent states.",
)
HOST_STORED_BYTES = Series(
    name="jenga_host_stored_bytes_total",
    labels=(),
    meaning="Bytes copied from the arena to host memory.",
)
HOST_LOADED_BYTES = Series(
    name="jenga_host_loaded_bytes_total",
    labels=(),
    meaning="Bytes copied from host memory to the arena.",
)
HOST_AHEAD_BYTES = Series(
    name="jenga_host_ahead_bytes_total",
    labels=(),
    meaning="Bytes copied in either direction during a step, before it was necessary.",
)
HOST_LOST_BYTES = Series(
    name="jenga_host_lost_bytes_total",
    labels=(),
    meaning="Bytes of cached content evicted from host memory.",
)
HELD_BACK_REQUESTS = Series(
    name="jenga_held_back_requests_total",
    labels=("reason",),
    meaning="Requests whose admission was held back, counted once for each change of reason.",
)
HELD_BACK_SECONDS = Series(
    name="jenga_held_back_seconds_total",
    labels=("reason",),
    meaning="Seconds that requests waited after their admission was held back.",
)

SERIES = (
    ARENA_BYTES,
    ARENA_SIZE_BYTES,
    HELD_BYTES,
    LARGE_PAGES,
    HOST_BYTES,
    HOST_SIZE_BYTES,
    QUERIED_TOKENS,
    HIT_TOKENS,
    BOUNDED_TOKENS,
    EVICTED_BYTES,
    STATES_KEPT,
    STATES_READ,
    HOST_STORED_BYTES,
    HOST_LOADED_BYTES,
    HOST_AHEAD_BYTES,
    HOST_LOST_BYTES,
    HELD_BACK_REQUESTS,
    HELD_BACK_SECONDS,
)
"""All series."""

LABEL_VALUES = {
    ARENA_BYTES.name: {"state": ARENA_STATES},
    LARGE_PAGES.name: {"state": LARGE_PAGE_STATES},
    HOST_BYTES.name: {"state": HOST_STATES},
    EVICTED_BYTES.name: {"cause": EVICTION_CAUSES},
    HELD_BACK_REQUESTS.name: {"reason": HELD_BACK_REASONS},
    HELD_BACK_SECONDS.name: {"reason": HELD_BACK_REASONS},
}
"""Name of a series -> label -> values of the label, if they are the same in every engine."""

"""Replaced names that send readings from the engine core to `/metrics`.

vLLM sends the statistics of a step from the scheduler's process to one API server, in a message
with fixed fields. The readings use its field for KV connectors, which this backend refuses. They
are removed from it before vLLM's own loggers see it.
"""

import functools
from typing import Any

from vllm.logger import init_logger

from jenga.vllm_plugin.patches.patch import Function, Replacement, put_in_place
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

logger = init_logger(f"vllm.{__name__}")

_FIELD = "jenga"
"""Key of the readings in `SchedulerStats.kv_connector_stats`."""


def _make_stats(original: Function) -> Function:
    @functools.wraps(original)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

        stats = original(self, *args, **kwargs)
        manager = self.kv_cache_manager
        if stats is not None and isinstance(manager, JengaKVCacheManager) and _has_our_reader():
            reading = manager.metrics.read()
            if reading is not None:
                model = str(self.vllm_config.model_config.served_model_name)
                others = stats.kv_connector_stats or {}
                stats.kv_connector_stats = others | {_FIELD: reading | {"model": model}}
        return stats

    return make_stats


def _has_our_reader() -> bool:
    """Whether the API server is the one in Python, in which the readings are removed again."""
    import vllm.envs

    return not getattr(vllm.envs, "VLLM_USE_RUST_FRONTEND", False)


def _record(original: Function) -> Function:
    @functools.wraps(original)
    def record(
        self: Any,  # noqa: ANN401
        scheduler_stats: Any,  # noqa: ANN401
        iteration_stats: Any,  # noqa: ANN401
        mm_cache_stats: Any = None,  # noqa: ANN401
        engine_idx: int | None = None,
    ) -> None:
        reading = _take(scheduler_stats)
        if reading is not None:
            from jenga.vllm_plugin.metrics.export import EXPORTER

            EXPORTER.note(self, reading | {"engine": engine_idx or 0})
        original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return record


def _take(scheduler_stats: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Remove and return the reading in a step's statistics, or None if there is none."""
    carried = getattr(scheduler_stats, "kv_connector_stats", None)
    if not carried or _FIELD not in carried:
        return None
    others = {key: value for key, value in carried.items() if key != _FIELD}
    scheduler_stats.kv_connector_stats = others or None
    return carried[_FIELD]


def _collect(original: Function) -> Function:
    @functools.wraps(original)
    def collect(self: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.metrics.export import EXPORTER

        return [*original(self), *EXPORTER.collect_folder(self._path)]

    return collect


METRICS = (
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.make_stats",
        reason="vLLM's statistics of a step have no field for readings of another manager",
        parameters=(
            "self",
            "spec_decoding_stats",
            "kv_connector_stats",
            "cudagraph_stats",
            "perf_stats",
            "ec_connector_stats",
        ),
        make=_make_stats,
    ),
    Replacement(
        module="vllm.v1.metrics.loggers",
        name="StatLoggerManager.record",
        reason=(
            "takes these readings out of the statistics; a logger by entry point would switch "
            "statistics on in every engine where the package is installed, and offline engines do "
            "not use it"
        ),
        parameters=("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        make=_record,
    ),
    Replacement(
        module="prometheus_client.multiprocess",
        name="MultiProcessCollector.collect",
        reason="with several API servers, the scraped one shows only values of vLLM's own metrics",
        parameters=("self",),
        make=_collect,
    ),
)
"""Applied once a configuration selects the backend, either all or none."""


def watch_metrics() -> None:
    """Apply the replacements. If a name does not match, log it and serve without metrics."""
    try:
        put_in_place(METRICS)
    except (AttributeError, ImportError, ValueError) as error:
        logger.warning("%s: no metrics of its own on this vLLM: %s", BACKEND_NAME, error)

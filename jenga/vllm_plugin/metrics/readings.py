"""Values of the Prometheus series, read from a manager in the engine core's process.

Some of them need a loop over all running requests. So they are read only once every `INTERVAL_S`
while steps run, and at the step after which no request runs.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.logger import init_logger

from jenga.geometry import PageTable
from jenga.manager import Manager
from jenga.tables.stats import Evictions, MemoryReport
from jenga.vllm_plugin.metrics import series
from jenga.vllm_plugin.metrics.held_back import HeldBack
from jenga.vllm_plugin.metrics.series import Series
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

logger = init_logger(f"vllm.{__name__}")

INTERVAL_S = 1.0
"""Seconds between two readings while requests run. Prometheus scrapes every 5 to 60 seconds."""

Reading = list[Any]
"""Name of a series, values of its labels, and value, in types that MessagePack can send."""


def read_values(manager: Manager, held_back: HeldBack) -> list[Reading]:
    """Read all series of one engine at one moment.

    Args:
        manager: Manager of its arena.
        held_back: Counts of its refused admissions.
    """
    readings = [
        *_memory(manager),
        *_large_pages(manager),
        *_prefix_cache(manager),
        *_host(manager),
        *_held_back(held_back),
    ]
    return [[each.name, list(labels), value] for each, labels, value in readings]


_Values = Iterator[tuple[Series, tuple[str, ...], float]]


def _labels(table: PageTable) -> tuple[str, str]:
    return table.name, table.layer_type.name


def _memory(manager: Manager) -> _Values:
    report = manager.memory()
    for table, memory in zip(manager.geometry.page_tables, report.tables, strict=True):
        labels = _labels(table)
        for state, num_bytes in (
            ("needed", memory.used_bytes),
            ("padding", memory.useless_bytes),
            ("cached", memory.evictable_bytes),
            ("empty", memory.empty_bytes),
        ):
            yield series.ARENA_BYTES, (*labels, state), num_bytes
        yield series.HELD_BYTES, labels, memory.held_bytes
    yield from _without_table(series.ARENA_BYTES, report)
    arena_bytes = manager.num_large_pages * manager.geometry.large_page_bytes
    yield series.ARENA_SIZE_BYTES, (), arena_bytes


def _without_table(each: Series, report: MemoryReport) -> _Values:
    yield each, ("", "", "free"), report.empty_large_bytes
    yield each, ("", "", "null"), report.null_bytes


def _large_pages(manager: Manager) -> _Values:
    counts = manager.large_page_counts()
    for state, number in (
        ("free", counts.free),
        ("held", counts.held),
        ("cached", counts.cached),
        ("null", 1),
    ):
        yield series.LARGE_PAGES, (state,), number


def _prefix_cache(manager: Manager) -> _Values:
    report = manager.cache_report()
    yield series.QUERIED_TOKENS, (), report.asked_tokens
    yield series.HIT_TOKENS, (), report.hit_tokens
    yield series.STATES_KEPT, (), report.kept_states
    yield series.STATES_READ, (), report.read_states
    for table, evictions in zip(manager.geometry.page_tables, report.evictions, strict=True):
        labels = _labels(table)
        yield series.BOUNDED_TOKENS, labels, report.limited_tokens[table.name]
        for cause, num_pages in _causes(evictions):
            num_bytes = num_pages * table.small_page_bytes
            yield series.EVICTED_BYTES, (*labels, cause), num_bytes


def _causes(evictions: Evictions) -> tuple[tuple[str, int], ...]:
    return (
        ("own_page", evictions.alone),
        ("own_large_page", evictions.own_large),
        ("other_table", evictions.foreign_large),
        ("checkpoint", evictions.with_checkpoint),
    )


def _host(manager: Manager) -> _Values:
    report, memory = manager.host_report(), manager.host_memory()
    if report is None or memory is None:
        return
    for table, of_table in zip(manager.geometry.page_tables, memory.tables, strict=True):
        for state, num_bytes in (
            ("loading", of_table.used_bytes),
            ("cached", of_table.evictable_bytes),
            ("empty", of_table.empty_bytes),
        ):
            yield series.HOST_BYTES, (*_labels(table), state), num_bytes
    yield from _without_table(series.HOST_BYTES, memory)
    yield series.HOST_SIZE_BYTES, (), memory.arena_bytes
    yield series.HOST_STORED_BYTES, (), report.stored_bytes
    yield series.HOST_LOADED_BYTES, (), report.loaded_bytes
    yield series.HOST_AHEAD_BYTES, (), report.ahead_bytes
    yield series.HOST_LOST_BYTES, (), report.lost_bytes


def _held_back(held_back: HeldBack) -> _Values:
    for reason, num_requests in held_back.num_requests.items():
        yield series.HELD_BACK_REQUESTS, (reason,), num_requests
        yield series.HELD_BACK_SECONDS, (reason,), held_back.seconds[reason]


class MetricReader:
    """Reads the series of one engine at intervals.

    Attributes:
        held_back: Counts of refused admissions. The cache manager records each refusal and
            admission there.
    """

    __slots__ = (
        "_clock",
        "_due_s",
        "_has_failed",
        "_manager",
        "_number",
        "_start_s",
        "_was_idle",
        "held_back",
    )

    def __init__(self, manager: Manager, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a reading.

        Args:
            manager: Manager of the engine's arena.
            clock: Function that returns the time in seconds.
        """
        self._manager = manager
        self._clock = clock
        self._due_s = clock()
        self._was_idle = False  # whether no request ran at the last reading
        self._start_s = time.time()
        self._number = 0
        self._has_failed = False
        self.held_back = HeldBack(clock)

    def read(self) -> dict[str, Any] | None:
        """Read all series at the end of a step, if the interval is over.

        A failure does not stop the engine. It is logged once, and the last reading has no values.

        Returns:
            `values`, the readings, and `at`, which orders the readings of an engine by time. None
            if the interval is not over.
        """
        if self._has_failed:
            return None
        try:
            now_s = self._clock()
            is_idle = self._manager.is_idle
            if now_s < self._due_s and (self._was_idle or not is_idle):
                return None
            values = read_values(self._manager, self.held_back)
            self._due_s = now_s + INTERVAL_S
            self._was_idle = is_idle
        except Exception as error:  # on any error, requests are still served
            self._has_failed = True
            logger.warning("%s: metrics end here: %r", BACKEND_NAME, error)
            values = []
        self._number += 1
        return {"at": [self._start_s, self._number], "values": values}

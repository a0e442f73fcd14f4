"""The Prometheus series as an API server shows them beside vLLM's own.

The newest reading of an engine is kept whole and shown whole, so the bytes of a scrape are those of
one moment. Where several API servers answer for one engine, each gets some of its readings. They
write them into vLLM's folder for such servers, and whichever is scraped shows the newest of all.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.logger import init_logger

from jenga.vllm_plugin.metrics.series import ENGINE_LABELS, SERIES, Series
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

logger = init_logger(f"vllm.{__name__}")

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_FILE_PREFIX = "jenga_metrics_"

Payload = dict[str, Any]
"""`model` and `engine`, and what `MetricReader.read` gives."""


def families(payloads: Iterable[Payload]) -> list[Metric]:
    """Get the metrics of several engines, of each its newest reading.

    Args:
        payloads: Readings, in any order.
    """
    newest: dict[tuple[str, int], Payload] = {}
    for payload in payloads:
        key = payload["model"], payload["engine"]
        if key not in newest or newest[key]["at"] < payload["at"]:
            newest[key] = payload
    metrics = {each.name: _family(each) for each in SERIES}
    for (model, engine), payload in newest.items():
        for name, labels, value in payload["values"]:
            if name in metrics:  # else of an engine of another version
                metrics[name].add_metric([model, str(engine), *labels], value)
    return list(metrics.values())


def _family(each: Series) -> CounterMetricFamily | GaugeMetricFamily:
    labels = (*ENGINE_LABELS, *each.labels)
    if each.is_counter:
        return CounterMetricFamily(each.name, each.meaning, labels=labels)
    return GaugeMetricFamily(each.name, each.meaning, labels=labels)


class Exporter(Collector):
    """Shows the newest readings of the engines that this process hears of.

    A failure stops no engine and no scrape: it is said once, and no further reading is shown.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """No reading.

        Args:
            registry: What is scraped; the series are in it from the first reading on.
        """
        self._registry = registry
        # The series of an engine end with the object that hears of it.
        self._newest: WeakKeyDictionary[object, dict[int, Payload]] = WeakKeyDictionary()
        self._lock = Lock()  # a scrape may come on another thread
        self._is_registered = False
        self._has_failed = False

    def note(self, listener: object, payload: Payload) -> None:
        """Take a reading.

        Args:
            listener: What hears of the engine in this process.
            payload: The reading.
        """
        if self._has_failed:
            return
        try:
            with self._lock:
                self._newest.setdefault(listener, {})[payload["engine"]] = payload
            if not self._is_registered:
                self._registry.register(self)
                self._is_registered = True
            if folder := os.environ.get(FOLDER_VARIABLE):
                self._write(Path(folder))
        except Exception as error:  # whatever it is, requests are served
            self._fail(error)

    def _payloads(self) -> list[Payload]:
        with self._lock:
            return [each for engines in self._newest.values() for each in engines.values()]

    def _write(self, folder: Path) -> None:
        path = folder / f"{_FILE_PREFIX}{os.getpid()}.json"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._payloads()), encoding="utf-8")
        unfinished.replace(path)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._newest.clear()
        logger.warning("%s: metrics end here: %r", BACKEND_NAME, error)

    def describe(self) -> list[Metric]:
        """Get the metrics without values."""
        return families([])

    def collect(self) -> list[Metric]:
        """Get the metrics of this process, for its own registry."""
        return self._shown(self._payloads)

    def collect_folder(self, folder: str) -> list[Metric]:
        """Get the metrics of all API servers that write to a folder.

        Args:
            folder: vLLM's folder for several API servers.
        """
        return self._shown(lambda: list(_read(Path(folder))))

    def _shown(self, payloads: Callable[[], list[Payload]]) -> list[Metric]:
        if self._has_failed:
            return []
        try:
            return [metric for metric in families(payloads()) if metric.samples]
        except Exception as error:  # whatever it is, vLLM's own series are shown
            self._fail(error)
            return []


def _read(folder: Path) -> Iterator[Payload]:
    for path in folder.glob(f"{_FILE_PREFIX}*.json"):
        yield from json.loads(path.read_text(encoding="utf-8"))


EXPORTER = Exporter()
"""That of this process."""

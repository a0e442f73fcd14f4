"""Export of the Prometheus series by an API server, beside vLLM's own series.

The newest reading of an engine is stored and shown as a whole, so all bytes in a scrape are of one
moment. If several API servers serve one engine, each receives some of its readings. They write them
to vLLM's folder for such servers. The server that is scraped shows the newest reading in it.
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
"""A reading: `model`, `engine`, and the fields that `MetricReader.read` returns."""


def families(payloads: Iterable[Payload]) -> list[Metric]:
    """Get the metrics of several engines from the newest reading of each.

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
            if name in metrics:  # an engine of another version may have others
                metrics[name].add_metric([model, str(engine), *labels], value)
    return list(metrics.values())


def _family(each: Series) -> CounterMetricFamily | GaugeMetricFamily:
    labels = (*ENGINE_LABELS, *each.labels)
    if each.is_counter:
        return CounterMetricFamily(each.name, each.meaning, labels=labels)
    return GaugeMetricFamily(each.name, each.meaning, labels=labels)


class Exporter(Collector):
    """Shows the newest readings of the engines that this process receives.

    A failure stops neither the engine nor the scrape. It is logged once, and then no further
    reading is shown.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Start without a reading.

        Args:
            registry: Registry that is scraped. The series are registered at the first reading.
        """
        self._registry = registry
        # The series of an engine end with the object that receives its readings.
        self._newest: WeakKeyDictionary[object, dict[int, Payload]] = WeakKeyDictionary()
        self._lock = Lock()  # a scrape may come on another thread
        self._is_registered = False
        self._has_failed = False

    def note(self, listener: object, payload: Payload) -> None:
        """Store a reading as the newest one of its engine.

        Args:
            listener: Object that receives the engine's readings in this process.
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
        except Exception as error:  # on any error, requests are still served
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
        """Get the metrics that this process received, for its own registry."""
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
        except Exception as error:  # on any error, vLLM's own series are still shown
            self._fail(error)
            return []


def _read(folder: Path) -> Iterator[Payload]:
    for path in folder.glob(f"{_FILE_PREFIX}*.json"):
        yield from json.loads(path.read_text(encoding="utf-8"))


EXPORTER = Exporter()
"""The exporter of this process."""

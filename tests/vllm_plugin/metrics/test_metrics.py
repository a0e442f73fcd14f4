"""Prometheus series: what they say, that they add up, and that they stop no engine."""

import json
import os
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jenga.errors import NotLoadedError, OutOfPagesError, TooEarlyError
from jenga.geometry import exact_lcm
from jenga.manager import Manager
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow
from jenga.vllm_plugin.metrics.series import ENGINE_LABELS, LABEL_VALUES, SERIES
from tests.vllm_plugin.conftest import (
    NUM_WORKERS,
    PROGRAMS,
    engine_environment,
    gemma_3_directory,
    program,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "docs" / "grafana" / "jenga.json"
SERIES_OF = {each.name: each for each in SERIES}


class Clock:
    """A clock that is set."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def manager():
    layers = (
        FullAttention(name="full", layers=(Layer(name="a", slot_bytes=64),)),
        SlidingWindow(name="window", layers=(Layer(name="b", slot_bytes=64),), window_tokens=32),
    )
    geometry = exact_lcm(ModelSpec(name="model", layer_types=layers), tokens_per_page=16)
    return Manager(geometry, num_large_pages=24, prefix_caching=True, num_host_large_pages=6)


@pytest.fixture
def warned(monkeypatch):
    """Get what the modules of metrics warn of."""
    from jenga.vllm_plugin.metrics import export, readings
    from jenga.vllm_plugin.patches import metrics

    texts = []
    for module in (export, readings, metrics):
        monkeypatch.setattr(module.logger, "warning", lambda text, *args: texts.append(text % args))
    return texts


def refusal(needed, available, reserved=0):
    return OutOfPagesError(
        "r",
        needed_pages=(1,),
        available_pages=(0,),
        needed_large_pages=needed,
        available_large_pages=available,
        reserved_large_pages=reserved,
    )


def shown(exporter):
    """Get what a scrape of the exporter's registry shows."""
    return generate_latest(exporter._registry).decode()


# Values


def test_readings_name_all_series_with_their_labels_and_add_up(manager, clock):
    from jenga.vllm_plugin.metrics.readings import MetricReader

    reader = MetricReader(manager, clock)
    manager.new_step()
    hashes = [bytes([number]) * 16 for number in range(8)]
    manager.allocate("r", num_tokens=100)
    manager.commit("r", hashes, 96)

    values = reader.read()["values"]

    assert {name for name, _, _ in values} == set(SERIES_OF)
    for name, labels, value in values:
        names = SERIES_OF[name].labels
        assert len(labels) == len(names)
        assert value >= 0
        for label, allowed in LABEL_VALUES.get(name, {}).items():
            assert labels[names.index(label)] in allowed
    arena = [value for name, _, value in values if name == "jenga_arena_bytes"]
    assert sum(arena) == 24 * manager.geometry.large_page_bytes


def test_every_value_of_a_label_is_one_that_is_read(manager, clock):
    from jenga.vllm_plugin.metrics.readings import MetricReader

    values = MetricReader(manager, clock).read()["values"]

    for name, labels in LABEL_VALUES.items():
        for label, allowed in labels.items():
            index = SERIES_OF[name].labels.index(label)
            assert {each[index] for found, each, _ in values if found == name} == set(allowed)


def test_values_are_read_once_in_an_interval_and_when_the_last_request_ends(manager, clock):
    from jenga.vllm_plugin.metrics.readings import MetricReader

    reader = MetricReader(manager, clock)
    manager.allocate("r", num_tokens=20)
    first, second = reader.read(), reader.read()
    clock.now_s += 1.0
    third = reader.read()
    manager.free("r")
    clock.now_s += 0.1
    last, again = reader.read(), reader.read()

    assert [bool(each) for each in (first, second, third, last, again)] == [
        *(True, False, True, True, False)
    ]
    numbers = [each["at"][1] for each in (first, third, last)]
    assert numbers == [1, 2, 3]
    needed = [
        value
        for name, labels, value in last["values"]
        if name == "jenga_arena_bytes" and labels[-1] == "needed"
    ]
    assert needed == [0, 0]


def test_a_reading_that_fails_is_said_once_and_is_the_last(manager, clock, warned, monkeypatch):
    from jenga.vllm_plugin.metrics.readings import MetricReader

    reader = MetricReader(manager, clock)
    monkeypatch.setattr(manager, "memory", lambda: 1 / 0)

    last, *after = [reader.read() for _ in range(3)]

    assert last["values"] == []  # so that no old value is shown for ever
    assert after == [None, None]
    assert len(warned) == 1
    assert "metrics end here: ZeroDivisionError" in warned[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (refusal(3, 2), "memory"),
        (refusal(3, 2, reserved=1), "reserve"),
        (TooEarlyError("r", hit_tokens=0, other_id="o"), "state"),
        (NotLoadedError("r", host_bytes=1), "loading"),
    ],
    ids=["memory", "reserve", "state", "loading"],
)
def test_a_refused_admission_counts_once_and_waits_until_it_comes_in(error, reason, clock):
    from jenga.vllm_plugin.metrics.held_back import HeldBack

    held_back = HeldBack(clock)
    for _ in range(3):
        held_back.refuse("r", error)
        clock.now_s += 2.0
    held_back.end("r")
    clock.now_s += 5.0
    held_back.end("r")
    held_back.end("another")

    assert held_back.num_requests[reason] == sum(held_back.num_requests.values()) == 1
    assert held_back.seconds[reason] == sum(held_back.seconds.values()) == 6.0


def test_time_held_back_counts_for_the_reason_that_held_at_the_time(clock):
    from jenga.vllm_plugin.metrics.held_back import HeldBack

    held_back = HeldBack(clock)
    held_back.refuse("r", refusal(3, 2))
    clock.now_s += 2.0
    held_back.refuse("r", NotLoadedError("r", host_bytes=1))
    clock.now_s += 3.0
    held_back.end("r")

    assert held_back.seconds == {"memory": 2.0, "reserve": 0, "state": 0, "loading": 3.0}
    assert held_back.num_requests == {"memory": 1, "reserve": 0, "state": 0, "loading": 1}


# From the engine core to the registry


class Listener:
    """Stands for what hears of an engine."""


def payload(value, number, *, engine=0):
    values = [["jenga_arena_size_bytes", [], value]]
    return {"model": "m", "engine": engine, "at": [1.0, number], "values": values}


def test_the_newest_reading_of_each_engine_is_shown_with_vllms_labels():
    from jenga.vllm_plugin.metrics.export import Exporter

    exporter, listener = Exporter(CollectorRegistry()), Listener()
    for each in (payload(5, 1), payload(7, 2), payload(9, 1, engine=1)):
        exporter.note(listener, each)
    text = shown(exporter)

    assert 'jenga_arena_size_bytes{engine="0",model_name="m"} 7.0' in text
    assert 'jenga_arena_size_bytes{engine="1",model_name="m"} 9.0' in text
    assert "5.0" not in text


def test_series_end_with_what_hears_of_the_engine():
    from jenga.vllm_plugin.metrics.export import Exporter

    exporter, listener = Exporter(CollectorRegistry()), Listener()
    exporter.note(listener, payload(5, 1))
    assert "jenga_arena_size_bytes{" in shown(exporter)
    del listener

    assert "jenga_arena_size_bytes{" not in shown(exporter)


def test_any_of_several_servers_shows_the_newest_reading_of_all(tmp_path, monkeypatch):
    from jenga.vllm_plugin.metrics.export import Exporter

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    servers, listeners = (
        [Exporter(CollectorRegistry()), Exporter(CollectorRegistry())],
        [Listener(), Listener()],
    )
    pid = os.getpid
    for number, (server, listener) in enumerate(zip(servers, listeners, strict=True)):
        monkeypatch.setattr(os, "getpid", lambda number=number: pid() + number)
        server.note(listener, payload(5 + number, 2 - number))  # the first has the newest

    for server in servers:
        (metric,) = server.collect_folder(str(tmp_path))
        assert [sample.value for sample in metric.samples] == [5]


def test_an_exporter_that_cannot_write_is_heard_once_and_shows_nothing(
    tmp_path, monkeypatch, warned
):
    from jenga.vllm_plugin.metrics.export import Exporter

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    exporter, listener = Exporter(CollectorRegistry()), Listener()
    for number in range(3):
        exporter.note(listener, payload(5, number))

    assert len(warned) == 1
    assert "metrics end here: FileNotFoundError" in warned[0]
    assert "jenga_arena_size_bytes{" not in shown(exporter)


def test_a_broken_file_of_another_server_leaves_the_scrape_to_vllm(tmp_path, warned):
    from jenga.vllm_plugin.metrics.export import Exporter

    (tmp_path / "jenga_metrics_1.json").write_text("[")

    exporter = Exporter(CollectorRegistry())

    assert [exporter.collect_folder(str(tmp_path)) for _ in range(2)] == [[], []]
    assert len(warned) == 1


def test_a_vllm_with_other_statistics_serves_without_metrics(warned, monkeypatch):
    from jenga.vllm_plugin.patches import metrics

    def refuse(_replacements):
        msg = "vLLM has no Scheduler.make_stats"
        raise ValueError(msg)

    monkeypatch.setattr(metrics, "put_in_place", refuse)
    metrics.watch_metrics()

    assert warned == [
        "JENGA_TRITON: no metrics of its own on this vLLM: vLLM has no Scheduler.make_stats"
    ]


def test_a_reading_is_taken_out_before_vllms_own_loggers_look(monkeypatch):
    from vllm.v1.metrics.stats import SchedulerStats

    from jenga.vllm_plugin.metrics import export
    from jenga.vllm_plugin.patches.metrics import _record

    exporter, seen = export.Exporter(CollectorRegistry()), []
    monkeypatch.setattr(export, "EXPORTER", exporter)
    record = _record(lambda _self, stats, *_: seen.append(stats.kv_connector_stats))
    listener = Listener()
    reading = {"model": "m", "at": [1.0, 1], "values": [["jenga_arena_size_bytes", [], 3]]}

    record(listener, SchedulerStats(kv_connector_stats={"jenga": reading}), None)
    record(listener, SchedulerStats(kv_connector_stats={"jenga": reading, "x": 1}), None, None, 4)
    record(listener, SchedulerStats(), None)

    assert seen == [None, {"x": 1}, None]
    text = shown(exporter)
    assert 'engine="0"' in text
    assert 'engine="4"' in text


def test_a_reading_survives_the_way_between_processes(manager):
    import msgspec
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    from jenga.vllm_plugin.metrics.readings import MetricReader

    reading = MetricReader(manager).read()
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats={"jenga": reading}))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineCoreOutputs)

    assert received.scheduler_stats.kv_connector_stats == {"jenga": reading}


# The documents


def documented():
    """Get the rows of the table in docs/metrics.md: name -> labels."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `jenga_")]
    return {
        re.findall(r"`([a-z_]+)`", name)[0]: (tuple(re.findall(r"`([a-z_]+)`", labels)), todo)
        for name, labels, _, todo in rows
    }


def test_the_document_explains_every_series_and_what_to_do():
    rows = documented()

    assert {name: labels for name, (labels, _) in rows.items()} == {
        each.name: each.labels for each in SERIES
    }
    assert all(todo.strip() for _, todo in rows.values())


def test_the_document_explains_every_value_of_a_label():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    for labels in LABEL_VALUES.values():
        for label, values in labels.items():
            for value in values:
                assert re.search(rf"^\| `{label}` \| `{value}` \| .", text, re.MULTILINE), value


def queries():
    """Get the queries of the dashboard."""
    return [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", [])
    ]


def selectors(query):
    """Get the series of a query: (name, [(label, operator, value)])."""
    return [
        (name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', labels))
        for name, labels in re.findall(r"\b(jenga_\w+)\{([^}]*)\}", query)
    ]


def test_every_query_of_the_dashboard_names_series_and_labels_that_exist():
    assert queries()
    for query in queries():
        assert {name for name, _ in selectors(query)} == set(re.findall(r"jenga_\w+", query))
        used = set()
        for name, labels in selectors(query):
            series = SERIES_OF[name]
            known = {*ENGINE_LABELS, *series.labels}
            used |= known
            assert {label for label, _, _ in labels} <= known, query
            for label, operator, value in labels:
                if label in LABEL_VALUES.get(name, {}) and operator in {"=", "!="}:
                    assert value in LABEL_VALUES[name][label], query
            assert series.is_counter == bool(re.search(rf"(rate|increase)\({name}", query)), query
        grouped = re.findall(r"\bby \(([^)]*)\)", query)
        assert {each.strip() for group in grouped for each in group.split(",")} <= used, query


def test_every_series_is_on_the_dashboard():
    drawn = {name for query in queries() for name, _ in selectors(query)}

    assert drawn == set(SERIES_OF)


def check_dashboard(samples):
    """Check that every selector of the dashboard finds samples in a scrape with host memory."""
    for query in queries():
        for name, labels in selectors(query):
            fixed = {label: value for label, operator, value in labels if "$" not in value}
            operators = {label: operator for label, operator, _ in labels}
            found = [
                each
                for each, _ in samples[name]
                if all(
                    (each[label] == value) == (operators[label] == "=")
                    for label, value in fixed.items()
                )
            ]
            assert found, query


# Engines


@pytest.mark.parametrize(
    "name", [pytest.param("gpt_oss", marks=pytest.mark.slow), "granite_hybrid"]
)
def test_series_of_an_engine_add_up_to_its_arena_after_every_step(name, tiny_model, run_engine):
    from tests.vllm_plugin.metrics.scraped import check_sums, samples_of, total

    prompts = prompts_of_lengths([70, 90, 110, 60], seed=5, shared_tokens=50)
    result = run_engine(
        tiny_model(name),
        prompts,
        max_tokens=4,
        rounds=2,
        fails=True,
        script="metrics_process.py",
        by_references=True,
        options={"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True},
    )

    assert "error" not in result, result["error"][-4000:]
    assert len(result["scrapes"]) > 8
    scrapes = [samples_of(text) for text in result["scrapes"]]
    for samples in scrapes:
        assert check_sums(samples) == result["arena_bytes"]
    last = scrapes[-1]
    tables = [[labels["table"], labels["layer_type"]] for labels, _ in last["jenga_held_bytes"]]
    assert tables == result["tables"]
    assert max(total(each, "jenga_arena_bytes", state="needed") for each in scrapes) > 0
    assert total(last, "jenga_arena_bytes", state="needed") == 0
    assert total(last, "jenga_arena_bytes", state="cached") > 0
    assert total(last, "jenga_prefix_queried_tokens_total") == result["asked_tokens"]
    assert total(last, "jenga_prefix_hit_tokens_total") == result["hit_tokens"] > 0
    assert total(last, "jenga_evicted_bytes_total") == result["evicted_bytes"]
    has_states = name == "granite_hybrid"
    assert (total(last, "jenga_states_kept_total") > 0) == has_states
    assert (total(last, "jenga_states_read_total") > 0) == has_states
    # Then a reading failed.
    assert result["num_served"] == len(prompts)
    assert not samples_of(result["text_after_failure"])
    assert result["log"].count("metrics end here: ZeroDivisionError") == 1


def complete(address, prompt):
    """Have a server go on with token ids."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0.0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body | {"ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return response.read()


def scrape(address):
    """Get the text of a server's metrics."""
    with urllib.request.urlopen(f"{address}/metrics") as response:
        return response.read().decode()


def scraped_while_serving(model, prompts, log_path, *options):
    """Serve prompts, a few at a time, and get what is scraped meanwhile and after."""
    from tests.vllm_plugin.engine.test_serve import free_port
    from tests.vllm_plugin.metrics.scraped import samples_of

    port = free_port()
    command = [sys.executable, str(PROGRAMS / "serve_process.py"), "serve", str(model)]
    # The tiny model has no tokenizer of its own, and prompts are token ids.
    command += ["--tokenizer", str(gemma_3_directory())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    command += ["--attention-backend", "JENGA_TRITON", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", str(4 << 20), "--kv-offloading-size", "0.01"]
    command += ["--gpu-memory-utilization", "0.05", *options]
    environment = engine_environment(by_references=True, VLLM_LOGGING_LEVEL="INFO")
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    address, scrapes = f"http://127.0.0.1:{port}", []
    with log_path.open("w") as log, program(command, environment, stdout=log) as process:
        while True:
            assert process.poll() is None, log_path.read_text()[-4000:]
            try:
                scrape(address)
                break
            except OSError:
                time.sleep(1)
        with ThreadPoolExecutor(4) as threads:
            served = [threads.submit(complete, address, prompt) for prompt in prompts]
            while not all(each.done() for each in served):
                scrapes.append(samples_of(scrape(address)))
                time.sleep(0.2)
            for each in served:
                each.result()
        # Where there are several servers, each is likely to be asked.
        scrapes += [samples_of(scrape(address)) for _ in range(6)]
        process.terminate()
        process.wait()
    return scrapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_servers", "num_engines", "name"),
    [(1, 1, "gpt_oss"), (2, 1, "gpt_oss"), (1, 2, "gemma3")],
    ids=["a_server", "two_servers", "two_engines"],
)
def test_every_scrape_of_a_server_adds_up_and_answers_the_dashboard(
    num_servers, num_engines, name, tiny_model, tmp_path
):
    if num_engines > NUM_WORKERS:
        pytest.skip("needs a GPU or a core for each of two engines")
    from tests.vllm_plugin.metrics.scraped import check_sums, total

    log_path = tmp_path / "log.txt"
    prompts = prompts_of_lengths([100, 140, 120, 160, 90, 130, 150, 80], seed=6, shared_tokens=64)

    scrapes = scraped_while_serving(
        tiny_model(name),
        prompts * 2,
        log_path,
        *("--api-server-count", str(num_servers), "--data-parallel-size", str(num_engines)),
    )

    log_text = log_path.read_text()
    assert "metrics end here" not in log_text
    assert "no metrics of its own" not in log_text
    engines = [str(number) for number in range(num_engines)]
    arena_bytes = {
        engine: [
            check_sums(samples, engine=engine)
            for samples in scrapes
            if any(labels["engine"] == engine for labels, _ in samples["jenga_arena_size_bytes"])
        ]
        for engine in engines
    }
    for sizes in arena_bytes.values():
        assert len(sizes) > 3
        assert len(set(sizes)) == 1
    last = scrapes[-1]
    assert [labels for labels, _ in last["jenga_arena_size_bytes"]] == [
        {"engine": engine, "model_name": "tiny"} for engine in engines
    ]
    assert total(last, "jenga_prefix_queried_tokens_total") >= sum(map(len, prompts))
    assert total(last, "jenga_prefix_hit_tokens_total") > 0
    assert total(last, "jenga_arena_bytes", state="needed") == 0
    check_dashboard(last)

"""Spans of admissions: what they say, in which trace they are, and that they stop no engine."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jenga.errors import NotLoadedError
from jenga.manager import Manager
from jenga.planning.planner import plan
from jenga.prefix.miss_log import Loss, MissedTokens
from tests.prefix.test_eviction_log import MODELS, hashes, manager_of, serve
from tests.vllm_plugin.metrics.test_metrics import Clock, refusal
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.scheduler.test_cache_manager import (  # noqa: F401 - fixtures
    MIB,
    engine_config,
    make_scheduler,
    request,
    run_step,
)

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
URL = "http://127.0.0.1:9/v1/traces"


@pytest.fixture
def exported(monkeypatch):
    """Get the exporter that has the spans made in this process."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def warned(monkeypatch):
    """Get what the module warns of."""
    from jenga.vllm_plugin.metrics import spans

    texts = []
    monkeypatch.setattr(spans.logger, "warning", lambda text, *args: texts.append(text % args))
    return texts


@pytest.fixture
def traced_scheduler(engine_config, make_scheduler, exported, monkeypatch):  # noqa: ARG001, F811
    """Get a maker of schedulers with tracing over an arena of so many bytes."""
    monkeypatch.setattr(engine_config.observability_config, "otlp_traces_endpoint", URL)
    return make_scheduler


def asked(name, *, headers=None, num_preemptions=0):
    """Get the fields of a request that spans read."""
    return SimpleNamespace(request_id=name, trace_headers=headers, num_preemptions=num_preemptions)


def admit(manager, spans, name, prefix_hashes, **fields):
    """Admit a request to a manager of 16 tokens for each hash, and make its span."""
    num_tokens = 16 * len(prefix_hashes)
    hit = manager.lookup(prefix_hashes, max_tokens=num_tokens - 1)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    spans.admit(asked(name, **fields))
    return hit


# What a span says


def test_a_span_says_what_was_found_and_what_took_the_rest(exported):
    from jenga.vllm_plugin.metrics.spans import open_spans

    manager, misses = manager_of("full", 150), []
    spans = open_spans(manager, URL, pass_on=misses.extend)
    for name, num_tokens in (("book", 1600), ("text", 800), ("other text", 800)):
        serve(manager, name, name, num_tokens)

    hit = admit(manager, spans, "again", [*hashes("book", 1600), b"question"], num_preemptions=3)

    (span,) = exported.get_finished_spans()
    assert span.name == "jenga.admission"
    assert 0 < hit.num_tokens < 1600
    by_cut = [each.evicted_tokens for each in misses[-1].losses if each.loss.cause == "end"]
    assert sum(by_cut) >= 800 - 16
    assert span.attributes == {
        "jenga.request.id": "again",
        "jenga.request.preemptions": 3,
        "jenga.prefix.asked_tokens": 1600,
        "jenga.prefix.found_tokens": hit.num_tokens,
        "jenga.prefix.bounding_table": "full",
        "jenga.prefix.bounding_layer_type": "full",
        "jenga.prefix.never_tokens": 0,
        "jenga.prefix.evicted_tokens": 1600 - hit.num_tokens,
        "jenga.prefix.bare_tokens": 0,
        "jenga.prefix.loss_cause": "end",
        "jenga.prefix.loss_tokens": sum(by_cut),
    }


def test_the_cause_is_the_one_that_took_most_tokens_in_all_its_losses():
    from jenga.vllm_plugin.metrics.spans import lookup_attributes

    def lost(cause, left_by, evicted_tokens, bare_tokens):
        return MissedTokens(Loss(cause, 1, left_by, ""), evicted_tokens, bare_tokens)

    manager = manager_of("full", 20)
    manager.record_evictions()
    manager.allocate("r", num_tokens=64, hit=manager.lookup(hashes("a", 64), max_tokens=63))
    (miss,) = manager.take_misses()
    assert "jenga.prefix.loss_cause" not in lookup_attributes(miss)

    losses = (lost("moved", "a", 500, 0), lost("guess", "b", 300, 0), lost("guess", "c", 1, 200))
    attributes = lookup_attributes(replace(miss, losses=losses))

    assert attributes["jenga.prefix.loss_cause"] == "guess"
    assert attributes["jenga.prefix.loss_tokens"] == 501


def test_a_request_that_finds_everything_names_no_page_table_and_no_cause(exported):
    from jenga.vllm_plugin.metrics.spans import open_spans

    manager = manager_of("full", 150)
    spans = open_spans(manager, URL)
    serve(manager, "first", "book", 800)

    admit(manager, spans, "second", [*hashes("book", 800), b"question"])

    (span,) = exported.get_finished_spans()
    assert span.attributes["jenga.prefix.found_tokens"] == 800
    assert span.attributes["jenga.prefix.asked_tokens"] == 800
    assert not {name for name in span.attributes if "bounding" in name or "loss" in name}


def test_a_span_lasts_from_the_queue_to_the_admission_and_says_why_it_took_so_long(exported):
    from jenga.vllm_plugin.metrics.spans import AdmissionSpans

    clock = Clock()
    spans = AdmissionSpans(manager_of("full", 20), URL, clock=clock)
    spans.wait("r")
    for error in (refusal(5, 3), refusal(5, 3), NotLoadedError("r", host_bytes=1)):
        clock.now_s += 1.0
        spans.wait("r")  # has no effect
        spans.refuse("r", error)
    clock.now_s += 0.25
    spans.admit(asked("r"))

    (span,) = exported.get_finished_spans()
    assert span.end_time - span.start_time == 3_250_000_000
    assert span.attributes == {
        "jenga.request.id": "r",
        "jenga.request.preemptions": 0,
        "jenga.held_back.memory_seconds": 2.0,
        "jenga.held_back.loading_seconds": 0.25,
    }
    # It waits anew after a preemption. Who was not seen in the queue does not wait.
    spans.wait("r")
    clock.now_s += 0.5
    spans.admit(asked("r", num_preemptions=1))
    spans.admit(asked("other"))
    times = [each.end_time - each.start_time for each in exported.get_finished_spans()]
    assert times == [3_250_000_000, 500_000_000, 0]
    assert not spans._waiting


def test_an_admission_that_was_undone_leaves_the_look_up_of_the_next(exported):
    from jenga.vllm_plugin.metrics.spans import open_spans

    manager = manager_of("full", 150)
    spans = open_spans(manager, URL)
    text = hashes("book", 800)
    manager.allocate("r", num_tokens=800, hit=manager.lookup(text, max_tokens=799))
    manager.free("r")
    serve(manager, "first", "book", 400)

    admit(manager, spans, "r", text)

    (span,) = exported.get_finished_spans()
    assert span.attributes["jenga.prefix.found_tokens"] == 400


# Its trace


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "no context"}], ids=str)
def test_a_span_has_the_clients_parent_or_a_trace_of_its_own(headers, exported, monkeypatch):
    from jenga.vllm_plugin.metrics.spans import open_spans

    # vLLM's processes inherit the context in which they were started.
    monkeypatch.setenv("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")
    manager = manager_of("full", 150)
    spans = open_spans(manager, URL)

    admit(manager, spans, "with", hashes("book", 800), headers=HEADERS)
    admit(manager, spans, "without", hashes("book", 800), headers=headers)

    child, root = exported.get_finished_spans()
    assert (f"{child.context.trace_id:032x}", f"{child.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" not in {TRACE, "1" * 32}


def test_a_trace_that_is_not_sampled_has_no_span(exported):
    from jenga.vllm_plugin.metrics.spans import open_spans

    manager = manager_of("full", 150)
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}

    admit(manager, open_spans(manager, URL), "r", hashes("book", 800), headers=unsampled)

    assert not exported.get_finished_spans()


@pytest.mark.usefixtures("exported")
def test_a_tracer_is_opened_only_in_a_process_that_has_none(monkeypatch):
    from opentelemetry.trace import ProxyTracerProvider

    from jenga.vllm_plugin.metrics.spans import open_spans

    opened = []
    monkeypatch.setattr("vllm.tracing.init_tracer", lambda *args: opened.append(args))
    open_spans(manager_of("full", 20), URL)
    assert not opened

    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", ProxyTracerProvider)
    open_spans(manager_of("full", 20), URL)

    assert opened == [("vllm.engine_core", URL, {"vllm.process_kind": "engine_core"})]


# Off, and failures


def test_without_tracing_nothing_is_recorded(make_scheduler, exported):  # noqa: F811
    scheduler = make_scheduler(8 * MIB)
    scheduler.add_request(request("r", [*range(3, 103)]))
    run_step(scheduler)

    manager = scheduler.kv_cache_manager
    assert manager._spans is None
    assert manager.manager.prefix_cache.tree.log is None
    assert not exported.get_finished_spans()


def test_a_failure_ends_the_spans_with_one_warning_and_nothing_piles_up(
    exported, monkeypatch, warned
):
    from jenga.vllm_plugin.metrics.spans import open_spans

    monkeypatch.setattr("vllm.tracing.instrument_manual", lambda **_: 1 / 0)
    manager = manager_of("full", 150)
    spans = open_spans(manager, URL)
    for number in range(3):
        spans.wait(f"{number}")
        spans.refuse(f"{number}", refusal(5, 3))
        admit(manager, spans, f"{number}", hashes(f"{number}", 160))

    assert len(warned) == 1
    assert warned[0].endswith("spans of admissions end here: ZeroDivisionError('division by zero')")
    assert not spans._waiting
    assert manager.take_misses() == []
    assert not exported.get_finished_spans()


def test_a_tracer_that_cannot_be_opened_is_left_out_with_a_warning(monkeypatch, warned):
    from jenga.vllm_plugin.metrics.spans import open_spans

    def fail(*_):
        msg = "Unsupported OTLP protocol 'x' is configured"
        raise ValueError(msg)

    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", fail)
    manager = Manager(plan(MODELS["full"]), num_large_pages=20, prefix_caching=True)

    assert open_spans(manager, URL) is None

    assert len(warned) == 1
    assert "no spans of admissions: ValueError(\"Unsupported OTLP protocol 'x'" in warned[0]
    assert manager.prefix_cache.tree.log is None


# In vLLM's scheduler


def run_all(scheduler, *, clock=None, most_steps=400):
    """Run steps until no request is left. Each takes a second on a clock that is set."""
    for _ in range(most_steps):
        if not scheduler.has_unfinished_requests():
            return
        run_step(scheduler)
        if clock is not None:
            clock.now_s += 1.0
    pytest.fail(f"requests are left after {most_steps} steps")


def test_a_preempted_request_has_a_span_for_each_admission(traced_scheduler, exported, monkeypatch):
    # Room for about two of these at their full length.
    scheduler, clock = traced_scheduler(22 * 32 << 10), Clock()
    held_back = scheduler.kv_cache_manager.metrics.held_back
    for each in (held_back, scheduler.kv_cache_manager._spans):
        monkeypatch.setattr(each, "_clock", clock)
    for index in range(4):
        scheduler.add_request(request(f"r{index}", [*range(3, 90)], 150))
    requests = dict(scheduler.requests)

    run_all(scheduler, clock=clock)

    spans = [each.attributes for each in exported.get_finished_spans()]
    assert sum(each.num_preemptions for each in requests.values()) > 0
    for name, each in requests.items():
        of_request = [span for span in spans if span["jenga.request.id"] == name]
        preemptions = [span["jenga.request.preemptions"] for span in of_request]
        assert preemptions == [*range(each.num_preemptions + 1)]
        assert all("jenga.prefix.asked_tokens" in span for span in of_request)
    for reason, seconds in held_back.seconds.items():
        told = sum(span.get(f"jenga.held_back.{reason}_seconds", 0.0) for span in spans)
        assert told == seconds
    assert held_back.seconds["memory"] + held_back.seconds["reserve"] > 0


def test_the_memory_log_and_the_spans_get_the_same_look_ups(
    traced_scheduler, exported, tmp_path, monkeypatch
):
    monkeypatch.setenv("JENGA_MEMORY_LOG", str(tmp_path / "log.jsonl"))
    scheduler = traced_scheduler(22 * 32 << 10)
    for index in range(4):
        scheduler.add_request(request(f"r{index}", [*range(3, 90)], 150))
    run_all(scheduler)
    scheduler.schedule()  # writes the line that has the last look-ups

    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [
        (miss["request"], miss["asked_tokens"], miss["found_tokens"])
        for line in lines
        for miss in line.get("misses", [])
    ]
    told = [
        (each["jenga.request.id"], *(each[f"jenga.prefix.{x}_tokens"] for x in ("asked", "found")))
        for each in (span.attributes for span in exported.get_finished_spans())
    ]
    assert len(told) > 4
    assert logged == told
    assert any(line.get("evictions") for line in lines)


def test_evictions_do_not_pile_up_without_a_memory_log(traced_scheduler, monkeypatch):
    scheduler = traced_scheduler(22 * 32 << 10)
    manager = scheduler.kv_cache_manager.manager
    for index in range(12):
        scheduler.add_request(request(f"r{index}", list(range(3 + index, 103 + index)), 60))
    taken = []
    take = manager.take_evictions
    monkeypatch.setattr(manager, "take_evictions", lambda: taken.append(take()))

    run_all(scheduler)

    assert sum(map(len, taken)) > 4
    scheduler.schedule()
    assert take() == []
    assert manager.take_misses() == []


def test_a_request_that_ends_in_the_queue_has_no_span_and_is_forgotten(traced_scheduler, exported):
    from vllm.v1.request import RequestStatus

    scheduler = traced_scheduler(MIB)
    for index in range(4):
        scheduler.add_request(request(f"r{index}", list(range(3 + index, 203 + index))))
    run_step(scheduler)
    spans = scheduler.kv_cache_manager._spans
    waiting = set(spans._waiting)
    assert waiting

    scheduler.finish_requests(waiting, RequestStatus.FINISHED_ABORTED)
    run_all(scheduler)

    assert not spans._waiting
    names = {span.attributes["jenga.request.id"] for span in exported.get_finished_spans()}
    assert names == {"r0", "r1", "r2", "r3"} - waiting


def test_a_request_that_looks_nothing_up_says_nothing_about_prefixes(traced_scheduler, exported):
    scheduler = traced_scheduler(8 * MIB)
    unread = request("r", [*range(3, 103)])
    unread.skip_reading_prefix_cache = True
    scheduler.add_request(unread)
    run_all(scheduler)

    (span,) = exported.get_finished_spans()
    assert span.attributes == {"jenga.request.id": "r", "jenga.request.preemptions": 0}


def test_requests_with_priorities_wait_from_their_arrival(traced_scheduler, monkeypatch):
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    scheduler = traced_scheduler(8 * MIB)
    monkeypatch.setattr(scheduler, "policy", SchedulingPolicy.PRIORITY)

    scheduler.add_request(request("r", [*range(3, 103)]))

    assert set(scheduler.kv_cache_manager._spans._waiting) == {"r"}


def test_a_session_waits_from_its_next_turn_and_not_from_the_end_of_the_last(
    traced_scheduler, exported
):
    from vllm.v1.request import RequestStatus

    scheduler = traced_scheduler(8 * MIB)
    spans = scheduler.kv_cache_manager._spans

    def turn(tokens):
        each = request("session", tokens, 2)
        each.resumable = True
        return each

    scheduler.add_request(turn([*range(3, 53)]))
    session = scheduler.requests["session"]
    for _ in range(8):
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            break
        run_step(scheduler)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert not spans._waiting

    scheduler.add_request(turn([*range(60, 90)]))

    assert set(spans._waiting) == {"session"}
    run_step(scheduler)
    assert not spans._waiting
    assert len(exported.get_finished_spans()) == 2


# The document


def test_the_document_explains_every_attribute():
    from jenga.vllm_plugin.metrics.spans import ATTRIBUTES, SPAN_NAME

    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert f"`{SPAN_NAME}`" in text
    rows = re.findall(r"^\| `(jenga\.[a-z_.]+)` \| (.+) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(ATTRIBUTES)


# Engines


def check_engine(result, prompts):
    """Check the spans of an engine that served prompts one after another, some with a parent."""
    assert "error" not in result, result["error"][-4000:]
    answers, spans = result["answers"], result["spans"]
    ours, theirs = (
        sorted((each for each in spans if each["name"] == name), key=lambda each: each["start_ns"])
        for name in ("jenga.admission", "llm_request")
    )
    assert len(ours) == len(theirs) == len(answers) == len(prompts)
    for number, (our, their, answer) in enumerate(zip(ours, theirs, answers, strict=True)):
        attributes = our["attributes"]
        assert attributes["jenga.request.id"].startswith(f"request {number}")
        assert attributes["jenga.prefix.found_tokens"] == answer["cached_tokens"]
        assert attributes["jenga.prefix.asked_tokens"] == (answer["prompt_tokens"] - 1) // 16 * 16
        missed = sum(attributes[f"jenga.prefix.{x}_tokens"] for x in ("never", "evicted", "bare"))
        assert missed == attributes["jenga.prefix.asked_tokens"] - answer["cached_tokens"]
        # Both clocks are those of one machine. A reading of each is some microseconds apart.
        assert their["start_ns"] - 10_000_000 < our["start_ns"] <= our["end_ns"] < their["end_ns"]
    return ours, theirs


@pytest.mark.parametrize(
    "processes", ["0", pytest.param("1", marks=pytest.mark.slow)], ids=["in_process", "of_its_own"]
)
def test_spans_of_an_engine_are_in_the_trace_of_the_client(processes, tiny_model, run_engine):
    (prompt,) = prompts_of_lengths([100], seed=3)
    prompts = [prompt, prompt, prompt[:50]]
    result = run_engine(
        tiny_model("gpt_oss"),
        prompts,
        max_tokens=2,
        headers=[HEADERS, None, HEADERS],
        script="traces_process.py",
        by_references=True,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
        },
        options={"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True},
    )

    ours, theirs = check_engine(result, prompts)
    assert [each["attributes"]["jenga.prefix.found_tokens"] for each in ours] == [0, 96, 48]
    assert ours[0]["attributes"]["jenga.prefix.never_tokens"] == 96
    for our, their in zip(ours, theirs, strict=True):
        assert our["parent"] == their["parent"]
    assert [(each["trace"], each["parent"]) for each in ours][::2] == [(TRACE, PARENT)] * 2
    # Without a parent each of the two is the root of a trace of its own.
    others = {each["trace"] for each in result["spans"] if each["name"] != "jenga.admission"}
    assert ours[1]["trace"] not in others

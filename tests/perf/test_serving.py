"""The suite of workloads in time: its cells, its search, its rows and its table."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from jenga.sim.workload.sources import open_source
from perf.serving import __main__ as command
from perf.serving import cases
from perf.serving.cases import (
    BUDGETS,
    LIMITS,
    LOADS,
    MODELS,
    WORKLOADS,
    Cell,
    Trace,
    machine,
    room_of,
)
from perf.serving.results import Group, Results
from perf.serving.rows import append, read
from perf.serving.run import Runner
from perf.serving.search import highest, rate_at, step_of
from perf.serving.suite import Plan, measure, rate_of_load
from perf.serving.table import as_markdown, read_causes

SMALL = Cell("llama-3.1-8b", 0.25, "articles", 0)


@pytest.fixture
def small_workload(monkeypatch):
    """Articles of which a quarter of Llama's arena holds two thirds, in short."""
    trace = Trace("articles:n=21,questions=9,tokens=8000,output=4", 189)
    monkeypatch.setitem(WORKLOADS, "articles", lambda _draw, _room: trace)


def plan(path, **others):
    return Plan(
        **{
            "systems": ["jenga", "oracle"],
            "settings": ["default"],
            "loads": [75],
            "out": path,
            **others,
        }
    )


# The search


@pytest.mark.parametrize("limit", [-30, -7, 0, 1, 5, 29, 40])
@pytest.mark.parametrize("start", [-40, 0, 3, 40])
def test_the_search_finds_the_highest_step_that_passes(limit, start):
    asked = []

    def passes(step):
        asked.append(step)
        return step <= limit

    assert highest(passes, start=start, least=-40, most=40) == limit
    assert len(asked) == len(set(asked)) <= 12
    assert set(asked) <= set(range(-40, 41))


def test_the_search_says_where_nothing_passes():
    assert highest(lambda _step: False, start=0, least=-40, most=40) is None


def test_rates_of_the_grid_are_found_again():
    assert [step_of(rate_at(step)) for step in range(-200, 200)] == list(range(-200, 200))


# The cells


@pytest.mark.parametrize("model", MODELS)
def test_every_workload_fits_every_arena(model):
    for budget in BUDGETS:
        room = room_of(machine(model), budget)
        for workload in WORKLOADS:
            for seed in range(2):
                trace = Cell(model, budget, workload, seed).trace()
                requests = list(trace.requests(1.0))

                most = 2100 if workload == "agents" else 700
                assert 180 <= len(requests) <= most, trace.text
                longest = max(each.prompt_tokens + each.output_tokens for each in requests)
                held_bytes = longest * room.token_bytes + room.text_bytes
                assert held_bytes < 0.6 * room.arena_bytes, trace.text


@pytest.mark.parametrize("model", ["gemma-3-27b", "falcon-h1-7b", "llama-3.1-8b"])
def test_sessions_of_agents_arrive_for_minutes_at_three_times_the_rate_without_hits(model):
    room = room_of(machine(model), 1.0)
    trace = Cell(model, 1.0, "agents", 0).trace()
    rate_without_hits = 1 / (8 * room.prefill_s)

    requests = list(trace.requests(3 * rate_without_hits))

    last_s = max(each.arrival_s for each in requests if not each.after)
    assert 400 < last_s < 900


def test_the_same_cell_has_the_same_requests_and_another_seed_others():
    first, again, other = (Cell("gemma-3-27b", 1.0, "rag", seed).trace() for seed in (0, 0, 1))

    assert first == again != other
    assert list(first.requests(2.0)) == list(again.requests(2.0))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_higher_rate_brings_the_same_requests_sooner(workload):
    trace = Cell("gpt-oss-20b", 1.0, workload, 0).trace()
    slow, fast = (list(trace.requests(rate)) for rate in (1.0, 4.0))

    assert [each.prompt for each in slow] == [each.prompt for each in fast]
    last_s = max(each.arrival_s for each in slow if not each.after)
    assert max(each.arrival_s for each in fast if not each.after) == pytest.approx(last_s / 4)


def test_a_file_arrives_as_fast_as_it_is_asked_for(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 900, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text(
        "".join(json.dumps(row | {"timestamp": 500 * number}) + "\n" for number in range(9))
    )

    trace = Cell("gemma-3-27b", 1.0, "mooncake", 0).trace(path)

    assert trace.num_arrivals == 9
    assert [each.arrival_s for each in trace.requests(8.0)] == [number / 8 for number in range(9)]
    assert len(list(open_source(str(path)))) == 9


def test_a_workload_of_a_file_asks_for_the_file():
    with pytest.raises(ValueError, match="workload 'mooncake' must have its file"):
        Cell("gemma-3-27b", 1.0, "mooncake", 0).trace()


@pytest.mark.parametrize("model", MODELS)
def test_every_setting_of_stock_is_one_that_vllm_takes(model):
    pytest.importorskip("vllm", reason="vLLM's own manager is replayed")
    from jenga.sim.arenas.vllm_plan import plan_stock, read_stock_options

    one = machine(model)
    systems = cases.stock_systems(one.model)

    assert systems[0] == "vllm"
    for system in systems:
        options = read_stock_options(system.partition(" ")[2] or "default")
        plan_stock(one.model, one.arena_bytes, prefix_caching=True, options=options)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("lru", "system must be 'jenga'"),
        ("jenga fifo", "policy must be one of"),
        ("oracle lru", "system must be 'jenga'"),
        ("vllm retention=often", "options of vLLM must be"),
    ],
)
def test_an_unknown_system_is_refused_by_name(system, message):
    with pytest.raises(ValueError, match=message):
        cases.check_system(system)


# The rows


def test_a_row_that_was_cut_short_is_measured_again_and_the_last_of_a_name_counts(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"kind": "bounds", "model": "m", "budget": 1.0, "workload": "w", "seed": 0}
    row |= {"scheduling": "synchronous", "warm_up_share": 0.25}
    append(path, row | {"requests": 1})
    append(path, row | {"requests": 2})
    with path.open("a") as file:
        file.write('{"kind": "bou')

    assert read([path]) == [row | {"requests": 2}]


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kind": "capacity"}\n')

    with pytest.raises(ValueError, match=r"rows\.jsonl:1: must be a row of perf\.serving"):
        read([path])


@pytest.mark.usefixtures("small_workload")
def test_a_cell_is_measured_once_and_its_table_says_what_came_of_it(tmp_path):
    pytest.importorskip("vllm", reason="vLLM's own manager is replayed")
    path = tmp_path / "rows.jsonl"

    assert measure(SMALL, plan(path), []) == 0
    rows = read([path])
    assert measure(SMALL, plan(path), rows) == 0

    assert read([path]) == rows
    kinds = {row["kind"] for row in rows}
    assert kinds == {"bounds", "capacity", "probe", "load"}
    (stock,) = [
        row
        for row in rows
        if row["kind"] == "capacity" and row["system"] == "vllm" and row["limit"] == LIMITS[0]
    ]
    loads = [row for row in rows if row["kind"] == "load"]
    assert {row["rate"] for row in loads} == {rate_of_load(stock, 75)}
    assert {row["system"] for row in loads} == {"jenga", "oracle", "vllm"}
    assert all(row["vllm"].startswith("0.3") for row in loads)
    assert all(row["num_requests"] == 142 and not row["is_cut"] for row in loads)
    text = as_markdown(rows, causes={})
    assert "| llama-3.1-8b x0.25 |" in text
    assert "| articles | 75 % |" in text


@pytest.mark.usefixtures("small_workload")
def test_a_probe_is_cut_only_where_it_is_over_the_limit():
    runner = Runner(SMALL)
    limit_s = LIMITS[0] * runner.alone_s
    slow, fast = 0.2 * runner.nominal_rate, 20 * runner.nominal_rate

    whole, probe = runner.run("jenga", slow), runner.probe("jenga", slow)
    cut = runner.probe("jenga", fast)

    assert replace(probe, cpu_s=0.0, waste_percent=None) == replace(
        whole, cpu_s=0.0, waste_percent=None
    )
    assert cut.is_cut
    assert runner.run("jenga", fast).ttft_p99_s > limit_s


@pytest.mark.usefixtures("small_workload")
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("system", ["jenga", "vllm match=16"])
def test_vllms_own_scheduler_gives_the_same(system, is_asynchronous):
    pytest.importorskip("vllm", reason="its scheduler runs")
    own, engine = (
        Runner(SMALL, is_asynchronous=is_asynchronous, uses_engine=uses_engine)
        for uses_engine in (False, True)
    )
    rate = 2 * own.nominal_rate

    expected = own.run(system, rate)

    assert expected.hit_percent > 30
    assert replace(engine.run(system, rate), cpu_s=0.0) == replace(expected, cpu_s=0.0)


def test_vllms_own_scheduler_has_no_other_systems():
    runner = Runner(SMALL, uses_engine=True)
    with pytest.raises(ValueError, match="must be 'jenga' or 'vllm' under vLLM's scheduler"):
        runner.run("oracle", 1.0)


@pytest.mark.parametrize("workload", ["agents", "rag", "samples"])
def test_the_first_quarter_of_the_arrivals_comes_as_fast_as_a_gpu_keeps_up_without_hits(workload):
    runner = Runner(Cell("granite-4.0-h-small", 1.0, workload, 0))
    rate = 8 * runner.nominal_rate
    plain, arriving = list(runner.trace.requests(rate)), runner.requests(rate)

    first = [each for each in arriving.requests if not each.after]
    count = sum(each.name in arriving.warming for each in first)
    assert count == len(first) // 4
    assert arriving.begin_s == first[count].arrival_s
    slow_s = arriving.begin_s * 0.7 * runner.nominal_rate
    fast_s = next(each.arrival_s for each in plain if each.name == first[count].name) * rate
    assert slow_s == pytest.approx(fast_s)
    rest_s = first[-1].arrival_s - arriving.begin_s
    last_s = next(each.arrival_s for each in plain if each.name == first[-1].name)
    assert rest_s == pytest.approx(last_s - fast_s / rate)
    followers = [each for each in arriving.requests if each.after]
    assert all(
        (each.name in arriving.warming) == (each.after[0] in arriving.warming) for each in followers
    )
    cold = Runner(runner.cell, warm_up_share=0.0).requests(rate)
    assert cold.requests == plain
    assert not cold.warming


@pytest.mark.usefixtures("small_workload")
def test_a_replay_that_fails_is_a_row(tmp_path, monkeypatch):
    def fail(_self, system, _rate, **_others):
        msg = f"{system} is broken"
        raise RuntimeError(msg)

    monkeypatch.setattr(Runner, "run", fail)
    path = tmp_path / "rows.jsonl"

    assert measure(SMALL, plan(path), []) > 0

    rows = read([path])
    errors = [row["error"] for row in rows if "error" in row]
    assert any(error.endswith("jenga is broken") for error in errors)
    assert all(row["rate"] == 0 for row in rows if row["kind"] == "capacity")
    assert "jenga is broken" in as_markdown(rows, causes={})


# The table


def made_rows(*, ours, stock, rates=(1.0, 1.0), model="gemma-3-27b"):
    """Get the rows of a cell at one load, where stock has two settings."""
    cell = {"model": model, "budget": 1.0, "workload": "rag", "seed": 0}
    common = cell | {"scheduling": "synchronous", "warm_up_share": 0.25}
    common |= {"commit": "c", "vllm": "v"}
    numbers = {
        "num_requests": 100,
        "hit_percent": 50.0,
        "requests_per_s": 2.0,
        "ttft_p50_s": 1.0,
        "ttft_p99_s": 2.0,
        "tpot_p50_s": 0.1,
        "tpot_p99_s": 0.2,
        "longest_wait_s": 3.0,
        "waste_percent": None,
        "preemptions": 0,
        "cpu_s": 1.0,
    }
    rows = [common | {"kind": "bounds", "best_eviction_percent": 60.0}]
    for system, rate in zip(("jenga", "vllm"), rates, strict=True):
        rows += [
            common
            | {"kind": "capacity", "system": system, "limit": limit, "rate": rate}
            | {"best": system, "is_bounded": True, "settings": [system]}
            for limit in LIMITS
        ]
    rate = 0.75 * rates[1]
    load = common | numbers | {"kind": "load", "rate": rate}
    return [
        *rows,
        load | {"system": "jenga"} | ours,
        load | {"system": "vllm"} | stock[0],
        load | {"system": "vllm retention=8192"} | stock[1],
    ]


def losses(rows):
    return {(loss.load, loss.number): loss for loss in Results(rows).losses}


def test_what_is_as_good_as_stocks_best_setting_is_no_loss():
    assert losses(made_rows(ours={}, stock=({}, {"hit_percent": 40.0}))) == {}


@pytest.mark.parametrize(
    ("number", "ours", "stock"),
    [
        ("hit_percent", 48.0, 50.0),
        ("requests_per_s", 1.9, 2.0),
        ("ttft_p99_s", 2.2, 2.0),
        ("preemptions", 4, 1),
    ],
)
def test_a_number_is_compared_with_the_setting_of_stock_that_is_best_in_it(number, ours, stock):
    worse = 3 if number in ("ttft_p99_s", "preemptions") else 0.1
    rows = made_rows(ours={number: ours}, stock=({number: stock * worse + 3}, {number: stock}))
    if number in ("hit_percent", "requests_per_s"):
        rows = made_rows(ours={number: ours}, stock=({number: stock * worse}, {number: stock}))

    found = losses(rows)

    assert list(found) == [(75, number)]
    assert found[75, number].setting == "vllm retention=8192"
    assert found[75, number].stock == stock


def test_a_lower_capacity_is_a_loss_and_its_cause_is_named():
    rows = made_rows(ours={}, stock=({}, {}), rates=(0.9, 1.0))

    found = losses(rows)
    text = as_markdown(
        rows, causes={found[0, "rate within 4 times"].name: "the head loses its windows"}
    )

    assert set(found) == {(0, "rate within 4 times"), (0, "rate within 4 times")}
    assert found[0, "rate within 4 times"].ratio == pytest.approx(0.9)
    assert text.count("the head loses its windows") == 1


def test_models_of_full_attention_alone_are_no_hybrids():
    assert not Group("llama-3.1-8b", 1.0, "rag").is_hybrid
    assert Group("gpt-oss-20b", 1.0, "rag").is_hybrid


# The command


@pytest.mark.usefixtures("small_workload")
def test_the_command_measures_in_processes_and_writes_its_table(tmp_path, capsys):
    pytest.importorskip("vllm", reason="vLLM's own manager is replayed")
    rows, table = tmp_path / "rows.jsonl", tmp_path / "table.md"
    asked = ["--models", "llama-3.1-8b", "--budgets", "0.25", "--workloads", "articles"]
    asked += ["--seeds", "0", "--loads", "--systems", "jenga", "--out", str(rows)]

    assert command.main([*asked, "--markdown", str(table)]) == 0
    first = rows.read_text()
    assert command.main([*asked, "--markdown", str(table)]) == 0

    assert rows.read_text() == first
    assert "1/1 llama-3.1-8b x0.25 articles seed 0" in capsys.readouterr().err
    assert "## Capacity over stock's best" in table.read_text()


def test_several_processes_measure(tmp_path):
    pytest.importorskip("vllm", reason="vLLM's own manager is replayed")
    rows = tmp_path / "rows.jsonl"
    command_line = [sys.executable, "-m", "perf.serving", "--jobs", "2", "--out", str(rows)]
    command_line += ["--models", "llama-3.1-8b", "--budgets", "0.25", "--workloads", "samples"]
    command_line += ["--seeds", "0", "1", "--loads", "--systems", "--stock", "retention=4096"]

    ended = subprocess.run(command_line, capture_output=True, text=True, check=False)

    # A model of one layer type has no such setting, so nothing is searched.
    assert "2/2 llama-3.1-8b" in ended.stderr, ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--systems", "best"], "system must be"),
        (["--stock", "jenga"], "options of vLLM must be"),
        (["--workloads", "mooncake"], "needs the file, by --mooncake"),
        (["--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(asked, message, capsys):
    with pytest.raises(SystemExit):
        command.main(asked)

    assert message in capsys.readouterr().err


def test_the_quick_selection_is_part_of_the_whole():
    assert set(command.QUICK["models"]) <= set(MODELS)
    assert set(command.QUICK["workloads"]) <= set(WORKLOADS)
    assert set(command.QUICK["loads"]) <= set(LOADS)


@pytest.mark.parametrize("name", ["serving", "serving_engine"])
def test_every_loss_has_a_cause_and_a_page_of_cells_is_that_of_its_rows(name):
    out = command.OUT.with_name(f"{name}.jsonl")
    rows = read([out])
    causes = read_causes(out.with_name(f"{name}_causes.json"))

    assert {loss.name for loss in Results(rows).losses} == causes.keys()
    assert all(causes.values())
    assert out.with_suffix(".md").read_text(encoding="utf-8") == as_markdown(rows, causes=causes)


def test_three_models_are_measured_under_vllms_own_scheduler():
    rows = read([command.OUT.with_name("serving_engine.jsonl")])

    assert {row["scheduling"] for row in rows} == {"asynchronous, by vLLM"}
    assert len({row["model"] for row in rows}) >= 3

"""Replays count what happens, on every manager, and what they write says so."""

import gc
import json
import tracemalloc
from pathlib import Path

import pytest

from jenga.errors import InvariantError
from jenga.manager import Manager
from jenga.sim.arenas.by_name import MANAGER_NAMES, make_arena
from jenga.sim.replays.bounds import unlimited
from jenga.sim.replays.record import Recorder, Recording
from jenga.sim.replays.replay import MOST_WAITING, Replay, constant_clock
from jenga.sim.replays.row_file import RowFile
from jenga.sim.replays.session import (
    Machine,
    Running,
    Settings,
    Trace,
    outcome_of,
    replay_rows,
    run_row,
)
from jenga.sim.results.quantiles import EXACT_VALUES, Quantiles
from jenga.sim.results.rows import RequestRow, RunRow, StepRow, SummaryRow, read_rows
from jenga.sim.results.runs import read_runs
from jenga.sim.workload.generators import agentic, articles
from jenga.sim.workload.requests import Piece, Request
from jenga.sim.workload.sources import open_source
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State

MODEL = ModelSpec(
    name="three-types",
    layer_types=(
        FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),
        SlidingWindow(
            name="sliding",
            layers=(Layer(name="1", slot_bytes=64), Layer(name="2", slot_bytes=64)),
            window_tokens=64,
        ),
        State(name="state", layers=(Layer(name="3", slot_bytes=3000),)),
    ),
)
OUR_MANAGERS = tuple(name for name in MANAGER_NAMES if name != "vllm")
CACHING_MANAGERS = tuple(name for name in OUR_MANAGERS if name != "gcd")


def requests_of(count=12):
    return list(
        articles(num_articles=3, num_questions=count // 3, article_tokens=320, output_tokens=20)
    )


def replay_of(requests, arena_bytes=1 << 20, manager="jenga", *, prefix_caching=True, **options):
    prefix_caching &= manager != "gcd"
    arena = make_arena(manager, MODEL, arena_bytes, prefix_caching=prefix_caching)
    return Replay(requests, arena, clock=constant_clock(0.5), **options)


@pytest.mark.parametrize("manager", OUR_MANAGERS)
def test_every_manager_finishes_every_request_and_gives_every_page_back(manager):
    requests = requests_of()
    run = replay_of(requests, arena_bytes=1 << 23, manager=manager, chunk_tokens=256)

    for step in run:
        memory = run.memory()
        assert memory.used_bytes > 0
        assert 0 <= memory.waste < 1
        assert step.num_running <= 12
        run.arena.check()

    assert (run.num_finished, run.num_refused) == (12, 0)
    assert run.prompt_tokens == sum(request.prompt_tokens for request in requests)
    assert run.output_tokens == 12 * 20
    assert run.hit_tokens <= unlimited(requests).hit_tokens
    assert (run.hit_tokens > 0) == (manager in CACHING_MANAGERS)
    assert run.memory().used_bytes == 0
    assert (run.memory().cached_bytes > 0) == (manager in CACHING_MANAGERS)


@pytest.mark.parametrize("manager", CACHING_MANAGERS)
def test_one_after_another_what_two_have_shared_is_hit_by_all_others_where_there_is_room(manager):
    requests = requests_of()
    hits = {}

    def on_end(active):
        hits.setdefault(active.request.prompt[0].content, []).append(active.hit_tokens)

    run = replay_of(requests, arena_bytes=1 << 26, manager=manager, max_requests=1, on_end=on_end)

    for _ in run:
        pass

    # The second request on an article shows where states are wanted; the queue may have before.
    assert len(hits) == 3
    assert all(each[0] == 0 and each[2:] == [320, 320] for each in hits.values())
    assert run.hit_tokens == sum(map(sum, hits.values())) <= unlimited(requests).hit_tokens


def test_scattered_pieces_add_up_and_hold_no_fewer_requests_than_large_pages():
    requests = requests_of(30)
    arena_bytes = 1 << 17

    batches = {}
    for manager in ("gcd", "jenga"):
        run = replay_of(
            requests,
            arena_bytes=arena_bytes,
            manager=manager,
            prefix_caching=False,
            chunk_tokens=128,
        )
        batch = batches[manager] = []
        for step in run:
            if step.num_decoding:
                batch.append(step.num_decoding)
            memory = run.memory()
            held_bytes = memory.used_bytes + memory.useless_bytes + memory.unallocated_bytes
            if manager == "gcd":
                assert arena_bytes - 16 * 64 < held_bytes <= arena_bytes
            run.arena.check()
        assert run.num_finished == 30

    assert sum(batches["gcd"]) / len(batches["gcd"]) >= sum(batches["jenga"]) / len(
        batches["jenga"]
    )


def test_a_prefix_that_a_window_left_behind_within_one_step_is_hit():
    # The article's end is out of the window before the second step begins.
    requests = list(
        articles(num_articles=1, num_questions=2, article_tokens=320, question_tokens=200)
    )
    model = ModelSpec(name="windows", layer_types=MODEL.layer_types[:2])
    arena = make_arena("jenga", model, 1 << 22)
    run = Replay(requests, arena, clock=constant_clock(0.5), max_requests=1)

    for _ in run:
        pass

    assert run.hit_tokens == 320


def test_turns_of_a_session_hit_what_the_one_before_generated():
    requests = list(agentic(num_sessions=1, num_turns=4, system_tokens=64, think_s=1000.0))
    model = ModelSpec(name="full", layer_types=MODEL.layer_types[:1])
    run = Replay(requests, make_arena("jenga", model, 1 << 21), clock=constant_clock(0.01))

    for _ in run:
        pass

    # The last token generated is never computed.
    bound = unlimited(requests).hit_tokens
    assert bound - 3 * 16 <= run.hit_tokens <= bound


def test_time_passes_by_the_clock_and_waits_for_arrivals():
    requests = [
        Request(name="a", arrival_s=2.0, prompt=(Piece("a", 100),), output_tokens=3),
        Request(name="b", arrival_s=100.0, prompt=(Piece("b", 100),), output_tokens=1),
    ]
    ended = []
    run = replay_of(requests, on_end=ended.append)

    steps = list(run)

    assert [step.time_s for step in steps] == [2.0, 2.5, 3.0, 100.0]
    assert [step.num_decoding for step in steps] == [0, 1, 1, 0]
    assert [step.prefill_tokens for step in steps] == [100, 0, 0, 100]
    assert [(each.first_token_s, each.finished_s) for each in ended] == [
        (2.5, 3.5),
        (100.5, 100.5),
    ]


def test_a_request_that_no_arena_could_hold_is_refused_and_the_others_run():
    requests = [
        Request(name="huge", prompt=(Piece("huge", 100_000),), output_tokens=1),
        Request(name="small", prompt=(Piece("small", 10),), output_tokens=1),
    ]
    ended = []
    run = replay_of(requests, on_end=ended.append)

    for _ in run:
        pass

    assert (run.num_finished, run.num_refused) == (1, 1)
    assert [(each.name, each.finished_s >= 0) for each in ended] == [
        ("huge", False),
        ("small", True),
    ]


def test_a_request_that_outgrows_the_arena_is_preempted_and_then_refused():
    model = ModelSpec(name="full", layer_types=MODEL.layer_types[:1])
    arena = make_arena("jenga", model, 64 * 16 * 8)
    requests = [Request(name="a", prompt=(Piece("a", 100),), output_tokens=200)]
    run = Replay(requests, arena, clock=constant_clock(1.0))

    for _ in run:
        pass

    assert (run.num_finished, run.num_refused, run.scheduler.num_preemptions) == (0, 1, 1)


def test_a_preempted_request_comes_in_again_where_the_others_have_room_to_grow(monkeypatch):
    # The pages of the second type, ten in a large page, fill holes that others have left.
    large = Layer(name="0", slot_bytes=640)
    small = Layer(name="1", slot_bytes=64)
    layer_types = (
        FullAttention(name="target", layers=(large,)),
        FullAttention(name="draft", layers=(small,)),
    )
    model = ModelSpec(name="two", layer_types=layer_types)
    source = "mmlu-pro:n=60,output=100-500"

    def preemptions():
        arena = make_arena("jenga", model, 1000 * 16 * 640, prefix_caching=False)
        run = Replay(open_source(source), arena, clock=constant_clock(1.0))
        for _ in run:
            pass
        assert run.num_finished == 60
        return run.scheduler.num_preemptions

    with_room = preemptions()
    monkeypatch.setattr(Manager, "growth_large_pages", 0)
    assert 0 < 1.5 * with_room < preemptions()


def test_requests_are_taken_from_a_trace_only_as_they_are_needed():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield Request(name=str(taken), prompt=(Piece(taken, 10),), output_tokens=2)

    run = replay_of(endless(), max_requests=4)
    for step in run:
        if step.number == 50:
            break

    assert taken <= MOST_WAITING + 200


def most_bytes_of(num_requests):
    """Most memory that a replay of so many short requests had, and the pages it evicted."""
    recorder = Recorder(Recording(run="x", every=64))
    name = f"static-lengths:n={num_requests},tokens=20-60,output=2-4"
    # What other tests left behind would have the collector wait for a quarter as much again.
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        run = replay_of(
            open_source(name), arena_bytes=1 << 17, on_end=recorder.on_end, chunk_tokens=256
        )
        for row in recorder.rows(run):
            summary = row
        return tracemalloc.get_traced_memory()[1], summary
    finally:
        tracemalloc.stop()
        gc.unfreeze()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_requests(monkeypatch):
    # What a trace may grow to in a long run must be reached in the shorter of these two.
    monkeypatch.setattr("jenga.sim.replays.replay.MOST_WAITING", 16)
    monkeypatch.setattr("jenga.sim.results.quantiles.EXACT_VALUES", 64)
    monkeypatch.setattr("jenga.sim.results.quantiles._BIN_WIDTH", 0.1)
    monkeypatch.setattr("jenga.eviction.points.REMEMBERED_ARENAS", 1)
    # What is kept for all replays of a process belongs to none of them.
    most_bytes_of(50)

    few_bytes, few = most_bytes_of(1200)
    many_bytes, many = most_bytes_of(3800)

    assert (few.num_requests, many.num_requests) == (1200, 3800)
    assert many.evicted_pages > 3 * few.evicted_pages > 0
    assert many_bytes < 1.05 * few_bytes


def rows_of(requests, **recording):
    recorder = Recorder(Recording(run="x", **recording))
    run = replay_of(requests, on_end=recorder.on_end, chunk_tokens=256)
    return list(recorder.rows(run)), run


def test_rows_say_what_the_replay_counted():
    requests = requests_of()

    rows, run = rows_of(requests, every=2, keep_requests=True)

    steps = [row for row in rows if isinstance(row, StepRow)]
    told = [row for row in rows if isinstance(row, RequestRow)]
    summary = rows[-1]
    assert [row.step for row in steps] == list(range(2, run.num_steps + 1, 2))
    assert len(told) == summary.num_requests == 12
    assert summary.hit_tokens == run.hit_tokens == sum(row.hit_tokens for row in told)
    assert summary.hit_rate == run.hit_tokens / run.prompt_tokens
    assert summary.seconds == run.num_steps * 0.5
    assert summary.tokens_per_s == 240 / summary.seconds
    assert summary.e2e_s.mean == pytest.approx(sum(row.finished_s for row in told) / 12)
    decoding = [row for row in steps if row.num_decoding]
    wastes = [
        1 - row.used_bytes / (row.used_bytes + row.useless_bytes + row.empty_bytes)
        for row in decoding
    ]
    assert summary.waste == pytest.approx(sum(wastes) / len(wastes))
    for row in steps:
        for name in ("used_bytes", "useless_bytes", "cached_bytes", "empty_bytes"):
            assert getattr(row, name) == sum(getattr(t, name) for t in row.tables.values())


def test_a_replay_is_checked_as_often_as_asked(monkeypatch):
    recorder = Recorder(Recording(run="x", check_every=10))
    run = replay_of(requests_of(), on_end=recorder.on_end)
    checked = []
    monkeypatch.setattr(run.arena, "check", lambda: checked.append(run.num_steps + 1))

    list(recorder.rows(run))

    assert checked == [*range(10, run.num_steps + 1, 10), run.num_steps + 1]


def test_quantiles_are_values_that_occur():
    values = Quantiles()
    for value in (3.0, 1.0, 2.0):
        values.add(value)

    found = values.spread()

    assert (found.p50, found.p90, found.p99, found.mean) == (2.0, 3.0, 3.0, 2.0)
    assert Quantiles().spread().p99 == 0.0


def test_quantiles_of_many_values_are_within_a_thousandth_of_one():
    values = Quantiles()
    many = [(1 + number % 1000) * 10.0 ** (number % 5 - 3) for number in range(2 * EXACT_VALUES)]
    for value in many:
        values.add(value)

    found = values.spread()

    ordered = sorted(many)
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == pytest.approx(ordered[round(share * (len(many) - 1))], rel=1e-3)
    assert found.mean == pytest.approx(sum(many) / len(many))


def test_waste_counts_steps_or_bytes_and_leaves_out_the_end_where_it_says_so():
    rows, _ = rows_of(requests_of(), every=1)

    held = [
        (row.num_decoding, row.used_bytes, row.used_bytes + row.useless_bytes + row.empty_bytes)
        for row in rows
        if isinstance(row, StepRow) and row.num_decoding
    ]
    most = max(num for num, _, _ in held)
    busy = [1 - used / all_bytes for num, used, all_bytes in held if 2 * num >= most]
    summary = rows[-1]
    assert 0 < len(busy) < len(held)
    assert summary.busy_waste == pytest.approx(sum(busy) / len(busy))
    assert summary.waste_of_bytes == pytest.approx(
        1 - sum(used for _, used, _ in held) / sum(all_bytes for _, _, all_bytes in held)
    )


def test_no_waste_is_told_where_no_step_was_looked_at():
    rows, run = rows_of(requests_of(), every=1000)

    assert run.num_steps < 1000
    assert (rows[-1].waste, rows[-1].busy_waste, rows[-1].waste_of_bytes) == (None, None, None)


def machine_of(arena_bytes=1 << 20):
    return Machine(model=MODEL, arena_bytes=arena_bytes, clock=constant_clock(0.5))


def trace_of(requests):
    return Trace("made", lambda: iter(requests))


def written(path, settings, machine=None):
    trace, machine = trace_of(requests_of()), machine or machine_of()
    row = run_row(machine, "jenga", trace, settings)
    out = RowFile(path)
    return row, outcome_of(out.written(Running(row, machine, trace, settings)))


def test_a_file_knows_the_replays_that_it_has_whole(tmp_path):
    path = tmp_path / "rows.jsonl"

    row, outcome = written(path, Settings(with_bounds=True))

    assert RowFile(path).outcome_of(row.run) == outcome
    assert outcome.row.options["unlimited_hit_rate"] == unlimited(requests_of()).hit_rate
    other = run_row(machine_of(), "jenga", trace_of(requests_of()), Settings(chunk_tokens=64))
    assert other.run != row.run
    assert RowFile(path).outcome_of(other.run) is None


def test_a_replay_that_was_cut_short_is_run_again_and_its_rows_go(tmp_path):
    path, settings = tmp_path / "rows.jsonl", Settings(every=1)
    other, _ = written(path, Settings(chunk_tokens=64))
    kept = list(read_rows(path))
    row, outcome = written(path, settings)
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[: len(kept) + 3]), encoding="utf-8")
    assert RowFile(path).outcome_of(row.run) is None
    assert RowFile(path).outcome_of(other.run) is not None

    _, again = written(path, settings)

    assert again == outcome
    assert path.read_text(encoding="utf-8") == whole


def test_a_last_line_that_was_cut_short_does_not_keep_a_file_from_going_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    _, outcome = written(path, Settings(every=1))
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")

    _, again = written(path, Settings(every=1))

    assert again == outcome
    assert path.read_text(encoding="utf-8") == whole


def test_two_replays_do_not_write_into_one_file_at_once(tmp_path):
    path, settings = tmp_path / "rows.jsonl", Settings(every=1)
    machine, trace = machine_of(), trace_of(requests_of())
    first = Running(run_row(machine, "jenga", trace, settings), machine, trace, settings)
    second = Running(run_row(machine, "max", trace, settings), machine, trace, settings)
    rows = RowFile(path).written(first)
    next(rows)

    with pytest.raises(ValueError, match=r"rows.jsonl: another replay is writing to it"):
        next(RowFile(path).written(second))

    outcome_of([first.row, *rows])
    outcome_of(RowFile(path).written(second))
    assert [run.row.manager for run in read_runs([path])] == ["jenga", "max"]


@pytest.mark.parametrize("path", ["/dev/full", "/"])
def test_rows_go_to_files_alone(path):
    with pytest.raises(ValueError, match=f"{path} must be a file of rows or not exist yet"):
        RowFile(Path(path))


def test_a_replay_that_is_refused_leaves_no_rows(tmp_path):
    path, settings = tmp_path / "rows.jsonl", Settings()
    written(path, settings)
    kept = path.read_text(encoding="utf-8")

    with pytest.raises(ValueError, match="arena_bytes must hold a request"):
        written(path, settings, machine_of(1 << 16))

    assert path.read_text(encoding="utf-8") == kept


def test_a_file_knows_the_replays_that_it_was_given(tmp_path):
    out, settings = RowFile(tmp_path / "rows.jsonl"), Settings()
    machine, trace = machine_of(), trace_of(requests_of())
    row = run_row(machine, "jenga", trace, settings)

    outcome = outcome_of(out.written(Running(row, machine, trace, settings)))

    assert out.outcome_of(row.run) == outcome


class CutError(Exception):
    """The power failed."""


def cut_after(num_steps):
    def on_step(_replay, step):
        if step.number == num_steps:
            raise CutError

    return on_step


def cut_and_gone_on(path, manager, settings, *, arena_bytes=1 << 17, cut_step=20):
    """Rows of a replay that was cut, and the step after which it went on."""
    machine, trace = machine_of(arena_bytes), trace_of(requests_of(30))
    row = run_row(machine, manager, trace, settings)
    out = RowFile(path, snapshot_every_s=0)
    with pytest.raises(CutError):
        list(out.written(Running(row, machine, trace, settings), cut_after(cut_step)))
    again = RowFile(path)
    snapshot = again.snapshot_of(row.run)
    num_steps = snapshot.replay.num_steps
    list(again.written(Running(row, machine, trace, settings, snapshot=snapshot)))
    again.close()
    return list(read_rows(path)), num_steps


@pytest.mark.parametrize("manager", OUR_MANAGERS)
def test_a_replay_that_was_cut_goes_on_to_the_same_rows(tmp_path, manager):
    settings = Settings(
        every=3, keep_requests=True, chunk_tokens=128, prefix_caching=manager != "gcd"
    )
    # Large pages of the exact LCM, and parts of a divided arena, need a larger one to start.
    arena_bytes = {"lcm": 1 << 19, "static": 1 << 23}.get(manager, 1 << 17)
    machine, trace = machine_of(arena_bytes), trace_of(requests_of(30))
    row = run_row(machine, manager, trace, settings)
    whole = list(replay_rows(row, machine, trace, settings))

    rows, num_steps = cut_and_gone_on(
        tmp_path / "rows.jsonl", manager, settings, arena_bytes=arena_bytes
    )

    assert num_steps == 18
    assert rows == whole
    assert whole[-1].evicted_pages > 0 or manager in ("gcd", "lcm", "static")
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]


@pytest.mark.parametrize("cut_step", [7, 20, 28])  # in the first and the last, pages are moved
def test_a_replay_with_host_memory_that_was_cut_goes_on_to_the_same_rows(tmp_path, cut_step):
    settings = Settings(every=3, chunk_tokens=128, host_bytes=1 << 18, host_bytes_per_s=1e6)
    machine, trace = machine_of(1 << 17), trace_of(requests_of(30))
    whole = list(replay_rows(run_row(machine, "jenga", trace, settings), machine, trace, settings))

    rows, num_steps = cut_and_gone_on(tmp_path / "rows.jsonl", "jenga", settings, cut_step=cut_step)

    assert num_steps == cut_step - 2
    assert rows == whole
    assert whole[-1].loaded_bytes > 0


def test_a_snapshot_of_other_code_or_of_another_run_is_left_alone(tmp_path, monkeypatch):
    path, settings = tmp_path / "rows.jsonl", Settings(every=1)
    machine, trace = machine_of(), trace_of(requests_of())
    row = run_row(machine, "jenga", trace, settings)
    running = Running(row, machine, trace, settings)
    with pytest.raises(CutError):
        list(RowFile(path, snapshot_every_s=0).written(running, cut_after(9)))

    assert RowFile(path).snapshot_of("another") is None
    assert RowFile(path).snapshot_of(row.run).replay.num_steps == 7
    monkeypatch.setattr("jenga.sim.replays.snapshot._code", lambda: "changed")
    assert RowFile(path).snapshot_of(row.run) is None
    # Rows of another run came after: they must not be cut off.
    monkeypatch.undo()
    written(path, Settings(chunk_tokens=64))
    assert RowFile(path).snapshot_of(row.run) is None


def test_a_replay_does_not_go_on_with_other_requests(tmp_path):
    path, settings = tmp_path / "rows.jsonl", Settings()
    machine, trace = machine_of(), trace_of(requests_of(30))
    row = run_row(machine, "jenga", trace, settings)
    running = Running(row, machine, trace, Settings(max_requests=2))
    with pytest.raises(CutError):
        list(RowFile(path, snapshot_every_s=0).written(running, cut_after(9)))
    snapshot = RowFile(path).snapshot_of(row.run)

    other = Running(row, machine, trace_of(requests_of(6)), settings, snapshot=snapshot)

    with pytest.raises(ValueError, match="requests must be those that the replay began with"):
        list(other.rows())


def test_parquet_holds_the_rows_that_lines_do(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    settings = Settings(every=3, keep_requests=True, chunk_tokens=128)
    machine, trace = machine_of(1 << 17), trace_of(requests_of(30))
    row = run_row(machine, "jenga", trace, settings)
    whole = list(replay_rows(row, machine, trace, settings))
    path = tmp_path / "rows.parquet"

    rows, num_steps = cut_and_gone_on(path, "jenga", settings)

    assert num_steps == 18
    assert rows == whole
    assert list(tmp_path.iterdir()) == [path]
    # A further replay comes after those that are there.
    file = RowFile(path)
    assert file.outcome_of(row.run).summary == whole[-1]
    other = run_row(machine, "max", trace, settings)
    list(file.written(Running(other, machine, trace, settings)))
    file.close()
    assert list(read_rows(path))[: len(whole)] == whole
    assert [run.row.manager for run in read_runs([path])] == ["jenga", "max"]


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    path = tmp_path / "rows.parquet"
    path.write_text("kind", encoding="utf-8")

    with pytest.raises(ValueError, match=r"rows.parquet: must be a Parquet file"):
        list(read_rows(path))


def test_an_arena_that_holds_no_request_is_named_with_the_shortest_prompt():
    machine, trace, settings = machine_of(1 << 16), trace_of(requests_of()), Settings()
    row = run_row(machine, "jenga", trace, settings)

    with pytest.raises(ValueError, match=r"arena_bytes must hold a request, got 65536: .* 352"):
        list(replay_rows(row, machine, trace, settings))


def test_an_arena_too_small_for_a_manager_to_start_is_named():
    machine, trace, settings = machine_of(100), trace_of(requests_of()), Settings()
    row = run_row(machine, "max", trace, settings)

    with pytest.raises(ValueError, match=r"manager 'max' does not start .* of 100 bytes"):
        list(replay_rows(row, machine, trace, settings))


def test_a_trace_out_of_order_or_without_requests_is_refused():
    late = Request(name="a", arrival_s=2.0, prompt=(Piece("a", 1),), output_tokens=1)
    early = Request(name="b", arrival_s=1.0, prompt=(Piece("b", 1),), output_tokens=1)

    with pytest.raises(
        ValueError, match=r"order of their arrival, got 'b' at 1 s after one at 2 s"
    ):
        trace_of([late, early])
    with pytest.raises(ValueError, match="trace must have a request, got none in 'made'"):
        trace_of([])


def test_rows_without_a_summary_are_no_outcome():
    row = run_row(machine_of(), "jenga", trace_of(requests_of()), Settings())

    with pytest.raises(InvariantError, match="must begin with a row of its run and end with a"):
        outcome_of([row])
    assert isinstance(row, RunRow)
    assert json.dumps(row.options)
    assert not isinstance(row, SummaryRow)


def test_managers_are_named_where_there_is_no_such_one():
    with pytest.raises(ValueError, match=r"manager must be one of jenga, .* got 'slab'"):
        make_arena("slab", MODEL, 1 << 20)

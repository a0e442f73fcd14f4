"""Requests arrive at their own time, or when those that they follow have ended."""

import pickle
from dataclasses import replace

import pytest

from jenga.errors import InvariantError
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.record import Recorder, Recording
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.replays.session import Trace
from jenga.sim.results.rows import RequestRow
from jenga.sim.workload.arrivals import Arrivals
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import FullAttention, Layer, ModelSpec

MODEL = ModelSpec(
    name="full", layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),)
)


def request_of(name, arrival_s=0.0, *, after=(), think_s=0.0, prompt_tokens=32, output_tokens=2):
    return Request(
        name=name,
        arrival_s=arrival_s,
        after=tuple(after),
        think_s=think_s,
        prompt=(Piece(name, prompt_tokens),),
        output_tokens=output_tokens,
    )


def taken(arrivals):
    """Take what arrives before another request ends."""
    found = []
    while arrivals.next_s is not None:
        request, arrival_s = arrivals.take()
        found.append((request.name, arrival_s))
    return found


def replay_of(requests, **options):
    arena = make_arena("jenga", MODEL, options.pop("arena_bytes", 1 << 20))
    return Replay(requests, arena, clock=constant_clock(1.0), **options)


def arrivals_of(requests, **options):
    ended = []
    for _ in replay_of(requests, on_end=ended.append, **options):
        pass
    return {active.name: active.arrival_s for active in ended}


def test_requests_that_follow_none_arrive_at_their_own_time():
    assert taken(Arrivals([request_of("a"), request_of("b", 2.0)])) == [("a", 0.0), ("b", 2.0)]


def test_a_request_arrives_its_think_time_after_the_one_that_it_follows():
    arrivals = Arrivals([request_of("a"), request_of("b", after="a", think_s=3.0)])
    assert taken(arrivals) == [("a", 0.0)]

    arrivals.end("a", 10.0)

    assert taken(arrivals) == [("b", 13.0)]


def test_a_request_that_follows_several_waits_for_the_last_of_them():
    group = [request_of("a"), request_of("b", after="a"), request_of("c", after="a")]
    arrivals = Arrivals([*group, request_of("d", after="bc", think_s=1.0)])
    taken(arrivals)
    arrivals.end("a", 1.0)
    assert taken(arrivals) == [("b", 1.0), ("c", 1.0)]

    arrivals.end("c", 2.0)
    assert taken(arrivals) == []
    arrivals.end("b", 5.0)

    assert taken(arrivals) == [("d", 6.0)]


def test_requests_of_both_kinds_arrive_in_the_order_of_time():
    group = [request_of("a"), request_of("b", after="a", think_s=4.0)]
    arrivals = Arrivals([*group, request_of("c", 3.0), request_of("d", 9.0)])
    arrivals.take()
    arrivals.end("a", 1.0)

    assert taken(arrivals) == [("c", 3.0), ("b", 5.0), ("d", 9.0)]


def test_a_trace_is_read_no_further_than_the_next_group():
    def requests():
        for number in range(10):
            read.append(number)
            yield request_of(f"{number}", number)
            yield request_of(f"{number}+", number, after=[f"{number}"])

    read = []
    arrivals = Arrivals(requests())
    assert read == [0]

    arrivals.take()

    assert read == [0, 1]


@pytest.mark.parametrize(
    "requests",
    [
        [request_of("b", after="a"), request_of("a")],
        [request_of("a"), request_of("b", after="c")],
        [request_of("a"), request_of("b", after="b")],
    ],
    ids=["before_it", "of_no_trace", "itself"],
)
def test_a_request_must_stand_behind_those_that_it_follows(requests):
    with pytest.raises(ValueError, match="must stand behind those that it follows"):
        taken(Arrivals(requests))


def test_a_follower_behind_the_next_group_is_refused_where_what_it_follows_has_ended():
    arrivals = Arrivals([request_of("a"), request_of("b", 5.0), request_of("c", after="a")])
    arrivals.take()
    arrivals.end("a", 1.0)

    with pytest.raises(ValueError, match="got 'c' after 'a'"):
        arrivals.take()


def test_two_requests_of_one_name_are_refused():
    with pytest.raises(ValueError, match="names of requests must be unique in a trace, got 'a'"):
        taken(Arrivals([request_of("a"), request_of("a", 1.0)]))


def test_taking_what_has_not_arrived_is_an_error():
    with pytest.raises(InvariantError, match="no request is there to arrive"):
        Arrivals([]).take()


@pytest.mark.parametrize("field", ["arrival_s", "think_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_times_of_a_request_are_finite_and_not_negative(field, seconds):
    with pytest.raises(ValueError, match=f"{field} of request 'a' must be finite and not negative"):
        replace(request_of("a"), **{field: seconds})


def test_a_slow_answer_moves_the_turns_behind_it():
    turns = [request_of("0", output_tokens=3), request_of("1", after="0", think_s=10.0)]

    alone = arrivals_of(turns)
    # One after another: the other request is computed first.
    behind = arrivals_of([request_of("other", output_tokens=50), *turns], max_requests=1)

    assert (alone["0"], alone["1"]) == (0.0, 13.0)
    assert (behind["0"], behind["1"]) == (0.0, 63.0)


def test_time_goes_on_where_only_think_times_are_left():
    turns = [request_of("0"), request_of("1", after="0", think_s=100.0)]
    ended = []

    steps = list(replay_of(turns, on_end=ended.append))

    assert [step.time_s for step in steps] == [0.0, 1.0, 102.0, 103.0]
    assert [active.name for active in ended] == ["0", "1"]


def test_turns_behind_a_refused_request_still_arrive():
    huge = request_of("huge", prompt_tokens=1_000_000)

    times = arrivals_of([huge, request_of("next", after=["huge"], think_s=2.0)])

    assert times == {"huge": 0.0, "next": 2.0}


def test_seconds_of_a_request_count_from_its_own_arrival():
    turns = [request_of("0"), request_of("1", 7.0, after="0", think_s=10.0)]
    recorder = Recorder(Recording(run="", keep_requests=True))

    rows = list(recorder.rows(replay_of(turns, on_end=recorder.on_end)))

    found = [row for row in rows if isinstance(row, RequestRow)]
    assert [(row.arrival_s, row.first_token_s, row.finished_s) for row in found] == [
        (0.0, 1.0, 2.0),
        (12.0, 13.0, 14.0),
    ]
    assert rows[-1].ttft_s.mean == pytest.approx(1.0)


def test_a_replay_that_was_cut_goes_on_with_those_that_wait_for_others():
    def requests():
        for session in range(3):
            yield request_of(f"{session}.0", float(session), output_tokens=4)
            for turn in range(1, 4):
                before = [f"{session}.{turn - 1}"]
                yield request_of(f"{session}.{turn}", after=before, think_s=2.5, output_tokens=3)

    whole = arrivals_of(requests())
    ended = []
    run = replay_of(requests(), on_end=ended.append)
    for step in run:
        if step.number == 6:
            break
    again = pickle.loads(pickle.dumps(run))
    again.go_on(requests(), clock=constant_clock(1.0), on_end=ended.append)
    for _ in again:
        pass

    assert {active.name: active.arrival_s for active in ended} == whole


def test_a_trace_with_sessions_is_in_order_and_its_bounds_know_when_turns_come():
    def requests():
        for session in range(2):
            yield request_of(f"{session}.0", float(session))
            yield request_of(f"{session}.1", session + 0.5, after=[f"{session}.0"])

    trace = Trace("sessions", lambda: iter(requests()))

    assert trace.num_requests == 4
    assert [each.name for each in trace.by_arrival()] == ["0.0", "0.1", "1.0", "1.1"]

"""Made-up workloads share what they say they share, and come as often as they are asked to."""

import inspect
import statistics
from collections import Counter
from itertools import combinations, pairwise

import pytest

from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.bounds import unlimited
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.workload.arrivals import Arrivals
from jenga.sim.workload.generators import agentic, articles
from jenga.sim.workload.requests import Piece, prefix_hashes
from jenga.sim.workload.sessions import agents, mixed
from jenga.sim.workload.shared_texts import (
    alternate,
    documents,
    loop,
    rag,
    samples,
    shift,
    tools,
    zipf,
)
from jenga.sim.workload.sources import open_source
from jenga.spec import FullAttention, Layer, ModelSpec

IN_TIME = (
    articles,
    rag,
    samples,
    zipf,
    tools,
    documents,
    loop,
    shift,
    alternate,
    mixed,
    agents,
    agentic,
)
"""Workloads with a rate of arrivals."""

SMALL = {"num_articles": 40, "num_prompts": 300, "num_sessions": 300, "num_requests": 1500}
LONG = SMALL | {"num_questions": 40, "num_rounds": 40}


def made(workload, **arguments):
    """A workload with arguments, of those that it has."""
    parameters = inspect.signature(workload).parameters
    return list(workload(**{k: v for k, v in arguments.items() if k in parameters}))


def shared_tokens(first, second):
    """Tokens of the longest prefix that two prompts have in common."""
    hashes = [prefix_hashes(request.prompt, 1) for request in (first, second)]
    pairs = zip(*hashes, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, hashes)))


def contents(request):
    return [piece.content for piece in request.prompt]


@pytest.mark.parametrize("workload", IN_TIME)
def test_a_workload_is_its_seeds_alone(workload):
    first = made(workload, **SMALL, seed=1, arrivals_per_s=2.0)

    assert first == made(workload, **SMALL, seed=1, arrivals_per_s=2.0)
    assert first != made(workload, **SMALL, seed=2, arrivals_per_s=2.0)
    assert len({request.name for request in first}) == len(first)


@pytest.mark.parametrize("workload", IN_TIME)
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_arrivals_are_at_random_and_as_many_a_second_as_asked(workload, rate):
    requests = made(workload, **LONG, seed=3, arrivals_per_s=rate)

    times = [request.arrival_s for request in requests if not request.after]
    if workload is agentic:  # whose sessions go on in open loop
        times = [each.arrival_s for each in requests if each.name.endswith(".0")]
    assert times == sorted(times)
    if workload is samples:
        assert set(Counter(times).values()) == {8}
        times = sorted(set(times))
    num_gaps = len(times) - 1
    assert num_gaps / times[-1] == pytest.approx(rate, rel=0.2)
    gaps = [b - a for a, b in pairwise(times) if b > a]
    # Exponential waits deviate by as much as they are on average.
    assert statistics.pstdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.2)


@pytest.mark.parametrize("workload", IN_TIME)
def test_all_requests_are_there_at_once_without_a_rate(workload):
    requests = made(workload, **SMALL, arrivals_per_s=0.0, think_s=0.0, pause_share=0.0)

    assert {request.arrival_s for request in requests} == {0.0}


@pytest.mark.parametrize("workload", IN_TIME)
def test_every_argument_is_said_what_it_is(workload):
    words = inspect.getdoc(workload).split("Args:")[1]

    for name in inspect.signature(workload).parameters:
        assert f"    {name}: " in words


@pytest.mark.parametrize("workload", IN_TIME)
def test_an_argument_that_is_out_of_range_is_refused_by_name(workload):
    for name, parameter in inspect.signature(workload).parameters.items():
        if name in ("seed", "order"):
            continue
        pair = isinstance(parameter.default, tuple)
        for value in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name} must be"):
                list(workload(**{name: (value, value) if pair else value}))
        if pair:
            with pytest.raises(ValueError, match=f"{name} must be"):
                list(workload(**{name: (9, 8)}))
        if name.startswith("num_") or name.endswith("_tokens"):
            with pytest.raises(ValueError, match=f"{name} must be"):
                list(workload(**{name: (0, 1) if pair else 0}))


@pytest.mark.parametrize("workload", IN_TIME)
def test_a_workload_can_be_asked_for_by_its_name(workload):
    found = list(open_source(f"{workload.__name__}:n=3,rate=2,seed=5"))

    assert found
    assert found == list(open_source(f"{workload.__name__}:n=3,arrivals_per_s=2.0,seed=5"))


def test_retrieval_shares_its_head_and_chunks_in_the_same_order():
    requests = list(rag(num_requests=300, num_chunks=4, num_read=2, chunk_tokens=100))

    for one, other in combinations(requests[:60], 2):
        first, second = contents(one), contents(other)
        assert first[0] == second[0] == "head"
        same = 0
        while same < 2 and first[1 + same] == second[1 + same]:
            same += 1
        assert shared_tokens(one, other) == 1024 + 100 * same
    orders = Counter(tuple(contents(each)[1:3]) for each in requests)
    # Twelve ways to choose two of four in order, all as likely.
    assert len(orders) == 12
    assert max(orders.values()) < 2.2 * 25
    assert len({contents(each)[-1] for each in requests}) == 300


def test_retrieval_reads_popular_chunks_more_often_where_asked():
    requests = list(rag(num_requests=500, num_chunks=50, num_read=5, exponent=1.2))

    read = Counter(name for each in requests for name in contents(each)[1:-1])
    assert all(len(set(contents(each))) == 7 for each in requests)
    assert read["chunk 0"] > 3 * read["chunk 9"] > 0
    # The order says nothing of popularity.
    first = Counter(
        contents(each)[1] == "chunk 0" for each in requests if "chunk 0" in contents(each)
    )
    assert first[True] / first.total() == pytest.approx(0.2, abs=0.06)


def test_retrieval_reads_no_more_chunks_than_there_are():
    with pytest.raises(ValueError, match="num_read must be at most the 3 chunks, got 4"):
        list(rag(num_chunks=3, num_read=4))


def test_samples_have_one_prompt_and_answers_of_their_own():
    requests = list(samples(num_prompts=3, num_samples=4, arrivals_per_s=1.0))

    assert len(requests) == 12
    for one, other in combinations(requests, 2):
        is_same = one.name.split(".")[0] == other.name.split(".")[0]
        assert (one.prompt == other.prompt) == is_same
        assert (shared_tokens(one, other) > 0) == is_same
        assert one.pieces[-1].content != other.pieces[-1].content


def test_whole_prompts_are_asked_for_by_their_popularity():
    requests = list(zipf(num_requests=4000, num_prompts=200, exponent=1.0))

    asked = Counter(each.prompt for each in requests)
    counts = [count for _, count in asked.most_common()]
    # A hundredth of the sum of 1 / i up to 200 is 0.0588.
    assert counts[0] == pytest.approx(4000 / 5.878, rel=0.15)
    assert counts[9] == pytest.approx(counts[0] / 10, rel=0.35)
    assert all(1000 <= prompt[1].num_tokens <= 8000 for prompt in asked)
    assert {prompt[0] for prompt in asked} == {Piece("head", 800)}
    alike = Counter(each.prompt for each in zipf(num_requests=4000, num_prompts=20, exponent=0.0))
    assert max(alike.values()) < 1.5 * min(alike.values())


def test_inputs_share_the_head_of_their_tool_and_documents_nothing():
    requests = list(tools(num_requests=2000, num_heads=5))

    documents = [each for each in requests if len(each.prompt) == 1]
    others = [each for each in requests if len(each.prompt) == 2]
    assert len(documents) / 2000 == pytest.approx(0.25, abs=0.03)
    for one, other in combinations(others[:50], 2):
        is_same = one.prompt[0] == other.prompt[0]
        assert shared_tokens(one, other) == (one.prompt[0].num_tokens if is_same else 0)
    names = [each.prompt[0].content for each in documents]
    assert len(set(names)) == len(names)
    heads = Counter(each.prompt[0].content for each in others)
    assert heads["head 0"] > 2 * heads["head 4"] > 0


def test_questions_on_a_document_come_soon_one_after_the_other():
    requests = list(documents(num_requests=400, num_between=10, document_questions=(2, 3)))

    places = {}
    for place, each in enumerate(requests):
        assert 700 <= each.prompt[1].num_tokens <= 2500
        places.setdefault(contents(each)[0], []).append(place)
    assert len({contents(each)[1] for each in requests}) == 400
    assert {len(each) for each in places.values()} <= {1, 2, 3}
    between = [later - first for first, *others in places.values() for later in others]
    assert sum(between) / len(between) == pytest.approx(10, rel=0.3)
    # Documents come all the time: the last ones are not those of the beginning.
    assert sum(first >= 200 for first, *_ in places.values()) > 50


def test_a_loop_reads_its_articles_in_the_same_order_each_round():
    requests = list(loop(num_articles=5, num_rounds=3, article_tokens=100))

    assert [contents(each)[0] for each in requests] == [f"article {n}" for n in range(5)] * 3
    assert len({contents(each)[1] for each in requests}) == 15


def test_articles_of_the_second_half_are_others():
    requests = list(shift(num_requests=200, num_articles=6))

    halves = [{contents(each)[0] for each in half} for half in (requests[:100], requests[100:])]
    assert [len(half) for half in halves] == [6, 6]
    assert not halves[0] & halves[1]


def test_two_sets_of_articles_take_turns():
    requests = list(alternate(num_requests=200, num_in_turn=40, num_articles=6))

    turns = [{contents(each)[0] for each in requests[n : n + 40]} for n in range(0, 200, 40)]
    assert all(len(turn) == 6 for turn in turns)
    assert turns[0] == turns[2] == turns[4]
    assert turns[1] == turns[3]
    assert not turns[0] & turns[1]


def test_chats_read_their_answers_and_documents_nothing():
    requests = list(mixed(num_requests=1000, num_chats=10, burst_share=0.1, arrivals_per_s=1.0))

    documents = [each for each in requests if len(each.prompt) == 1]
    turns = [each for each in requests if len(each.prompt) > 1]
    assert len(requests) == 1000
    # Of 100 arrivals 10 are bursts of 4 on average.
    assert len(documents) / 1000 == pytest.approx(40 / 130, abs=0.06)
    assert all(10_000 <= each.prompt_tokens <= 30_000 for each in documents)
    answers = {each.output: each for each in turns}
    for each in turns:
        assert contents(each)[0] == "head"
        assert contents(each)[-1] == f"message {each.name}"
        if len(each.prompt) > 2:
            before = answers[contents(each)[-2]]
            assert each.prompt[:-1] == before.pieces
    assert max(each.prompt_tokens + each.output_tokens for each in turns) < 32_000 + 1600
    assert sum(len(each.prompt) == 2 for each in turns) > 10


def test_a_burst_arrives_together_and_the_rate_counts_it():
    requests = list(mixed(num_requests=2000, burst_share=0.2, arrivals_per_s=4.0))

    together = Counter(each.arrival_s for each in requests)
    bursts = [count for count in together.values() if count > 1]
    assert set(bursts) <= set(range(2, 7))
    assert requests[-1].arrival_s == pytest.approx(2000 / 4.0, rel=0.15)


@pytest.fixture(params=[0.0, 1.0], ids=["fresh", "forked"])
def coding(request):
    """Sessions of agents that often launch others: requests by name, and whether these fork."""
    found = agents(
        num_sessions=20, subagent_share=0.3, fork_share=request.param, arrivals_per_s=0.1, seed=4
    )
    return {each.name: each for each in found}, bool(request.param)


def test_a_turn_of_an_agent_reads_all_turns_before_it(coding):
    requests, _ = coding
    for name, each in requests.items():
        own, _, number = name.rpartition(".")
        if int(number):
            before = requests[f"{own}.{int(number) - 1}"]
            assert each.prompt[: len(before.pieces)] == before.pieces
            assert len(each.prompt) > len(before.pieces)
        assert contents(each)[0] == "head"


def test_sub_agents_start_together_from_a_turn_and_the_next_one_waits_for_all(coding):
    requests, is_forked = coding
    launches = {name.partition("/")[0] for name in requests if "/" in name}
    assert len(launches) > 20
    for name in launches:
        launched = [each for each in requests if each.startswith(f"{name}/")]
        firsts = [requests[each] for each in launched if each.endswith(".0")]
        assert 1 <= len(firsts) <= 3
        for first in firsts:
            assert first.after == (name,)
            assert first.think_s == 0.0
            parent = requests[name]
            begin = parent.pieces if is_forked else parent.prompt[:1]
            assert first.prompt[:-1] == begin
        own, _, number = name.rpartition(".")
        following = requests.get(f"{own}.{int(number) + 1}")
        if following is None:
            continue
        followed = {name for each in launched for name in requests[each].after}
        lasts = set(launched) - followed
        assert set(following.after) == lasts
        assert len(lasts) == len(firsts)
        reports = contents(following)[len(requests[name].pieces) : -1]
        assert reports == [f"answer of {each}" for each in following.after]


def test_turns_of_agents_follow_after_thinking_and_at_times_a_pause():
    requests = list(agents(num_sessions=60, think_s=4.0, pause_share=0.2, pause_s=(100.0, 200.0)))

    thinks = [each.think_s for each in requests if each.after and "/" not in each.name]
    pauses = [each for each in thinks if each >= 100]
    short = [each for each in thinks if each < 100]
    assert len(pauses) / len(thinks) == pytest.approx(0.2, abs=0.04)
    assert statistics.fmean(pauses) == pytest.approx(154, rel=0.05)
    assert statistics.fmean(short) == pytest.approx(4.0, rel=0.15)


def test_sessions_of_agents_end_before_they_read_too_much():
    requests = list(agents(num_sessions=40, num_turns=(200, 200), context_tokens=100_000))

    lengths = [each.prompt_tokens for each in requests]
    assert 90_000 < max(lengths) <= 100_000
    assert len(requests) < 40 * 200


def test_agents_stand_behind_those_that_they_follow(coding):
    requests, _ = coding
    arrivals = Arrivals(requests.values())
    running = []
    time_s, num_ended = 0.0, 0
    while arrivals.next_s is not None or running:
        while arrivals.next_s is not None:
            request, arrival_s = arrivals.take()
            time_s = max(time_s, arrival_s)
            running.append(request.name)
        arrivals.end(running.pop(), time_s)
        num_ended += 1

    assert num_ended == len(requests)


MODEL = ModelSpec(
    name="full", layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),)
)


@pytest.mark.parametrize("workload", [mixed, agents])
def test_answers_are_found_cached_by_the_next_turns(workload):
    requests = made(
        workload,
        num_requests=60,
        num_chats=3,
        num_sessions=3,
        num_turns=(5, 8),
        task_tokens=(100, 500),
        head_tokens=200,
        arrivals_per_s=0.001,
    )
    by_arrival = sorted(requests, key=lambda request: request.arrival_s)
    arena = make_arena("jenga", MODEL, 1 << 26)
    run = Replay(requests, arena, clock=constant_clock(0.01), chunk_tokens=1 << 16)
    for _ in run:
        pass

    bound = unlimited(by_arrival).hit_tokens
    # The last token of each answer is never computed, and some hash may end with it.
    assert bound - 16 * len(requests) <= run.hit_tokens <= bound

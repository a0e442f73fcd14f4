"""Replays of several engines at once: one time, one GPU, one arena whose memory moves."""

from itertools import pairwise

import pytest

from jenga.arena.borrowed_pages import News
from jenga.broker.books import Books
from jenga.broker.broker import Broker
from jenga.broker.direct import DirectBroker
from jenga.planning.planner import plan
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.arenas.lent_in_units import LentInUnits
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.replays.shared import SharedGpu, run_together
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import FullAttention, Layer, ModelSpec

MODEL = ModelSpec(
    name="small",
    layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),),
)
LARGE_PAGE_BYTES, NUM_PAGES = 4096, 61  # 4 small pages, so 64 tokens


def questions(name, start_s, documents):
    """Requests, one a second, about documents of 640 tokens."""
    return [
        Request(
            name=f"{name} {number}",
            arrival_s=start_s + number,
            prompt=(Piece(f"document {document}", 640), Piece(f"question {number}", 16)),
            output_tokens=4,
        )
        for number, document in enumerate(documents)
    ]


def replays_of(direct, gpu, wrap):
    made = []
    for name, start_s in (("a", 0.0), ("b", 100.0)):
        lender = None
        if direct is not None:
            lender = direct.join(name, guarantee_pages=12, limit_pages=NUM_PAGES - 1)
            lender = wrap(lender)
        num_pages = NUM_PAGES if direct is not None else 1 + (NUM_PAGES - 1) // 2
        arena = ManagedArena(
            plan(MODEL, large_page_bytes=LARGE_PAGE_BYTES),
            num_pages * LARGE_PAGE_BYTES,
            lender=lender,
            left_share=0.0,
        )
        requests = questions(name, start_s, [0, 1, 2] * 6)
        made.append(Replay(requests, arena, clock=gpu.clock(constant_clock(0.01))))
    return made


@pytest.fixture
def direct_of(tmp_path):
    def make(gpu):
        books = Books.create(
            tmp_path / "books", large_page_bytes=LARGE_PAGE_BYTES, num_pages=NUM_PAGES
        )
        return DirectBroker(Broker(books), lambda: gpu.now_s)

    return make


@pytest.mark.parametrize("unit_pages", [1, 10])
def test_an_engine_has_more_than_half_of_a_shared_arena_while_it_is_alone(direct_of, unit_pages):
    hits, most = {}, [0, 0]
    for is_shared in (False, True):
        gpu = SharedGpu()
        direct = direct_of(gpu) if is_shared else None
        replays = replays_of(direct, gpu, lambda lender: LentInUnits(lender, unit_pages))

        def rest(replays=replays, direct=direct):
            for index, replay in enumerate(replays):
                replay.arena.check()
                if replay.is_idle and replay.arena.manager.borrowed is not None:
                    replay.arena.manager.borrowed.rest()

                if direct is not None:
                    most[index] = max(most[index], replay.arena.manager.num_large_pages - 1)

        run_together(replays, gpu, rest)
        if direct is not None:
            direct.broker.check()
        assert [replay.num_finished for replay in replays] == [18, 18]
        hits[is_shared] = [replay.hit_tokens for replay in replays]

    # Half an arena does not hold three documents; the first engine has more while it is alone.
    assert hits[True][0] > hits[False][0]
    assert most[0] > (NUM_PAGES - 1) // 2
    assert min(most) >= 12
    assert hits[True][1] > 0


def test_turns_are_in_the_order_of_time_and_steps_of_one_gpu_do_not_overlap():
    gpu = SharedGpu()
    turns, steps = [], []
    alone = constant_clock(0.25)

    def recorded(chunks):
        begin = max(gpu._free_s, gpu.now_s)
        seconds = shared(chunks)
        steps.append((begin, gpu.now_s + seconds))
        return seconds

    shared = gpu.clock(alone)
    replays = []
    for name in "ab":
        arena = ManagedArena(plan(MODEL, large_page_bytes=LARGE_PAGE_BYTES), 1 << 20)
        replays.append(Replay(questions(name, 0.0, range(4)), arena, clock=recorded))
    run_together(replays, gpu, lambda: turns.append(gpu.now_s))

    assert turns == sorted(turns)
    assert len(steps) > 16
    for (_, end_s), (begin_s, _) in pairwise(steps):
        assert begin_s >= end_s
    assert all(end_s - begin_s == pytest.approx(0.25) for begin_s, end_s in steps)


class _Lender:
    num_pages, guarantee_pages, limit_pages = 101, 10, 100
    has_free = True

    def __init__(self):
        self.returned, self.asked, self.called = [], [], None

    def take_free(self, num_pages):
        self.asked.append(num_pages)
        return list(range(50, 50 + num_pages))

    def ask(self, num_pages, older_than_s, *, is_needed):
        self.asked.append((num_pages, older_than_s, is_needed))

    def give_back(self, pages):
        self.returned.append(len(pages))

    def news(self):
        return News(granted=[], called=self.called)


def test_units_are_asked_for_and_returned_whole_and_parts_serve_the_next_need():
    lender = _Lender()
    units = LentInUnits(lender, 10)

    units.give_back([1, 2, 3])
    assert lender.returned == []
    lender.called = 11
    assert units.news().called == 17  # two units, less what is parked
    units.give_back(list(range(4, 26)))
    assert lender.returned == [20]
    assert len(units.take_free(4)) == 5  # what was parked
    assert lender.asked == []
    assert len(units.take_free(4)) == 10
    units.ask(11, 3.0, is_needed=True)
    assert lender.asked == [10, (20, 3.0, True)]

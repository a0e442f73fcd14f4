"""Copies between the arena and host memory: their order, and what they move."""

import gc
from types import SimpleNamespace

import pytest
import torch

from jenga.tables.request import CopyPath, PageCopy
from jenga.vllm_plugin.orders.copy_rounds import CopyRound, copy_rounds, runs_of_copies
from tests.machines.geometries import STATES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def move(path, source, target, table=0):
    return PageCopy(table_index=table, source=source, target=target, path=path)


def rounds_of(*copies):
    return [(r.path, r.source_pages, r.target_pages) for r in copy_rounds(copies, STATES)]


OUT, BACK, WITHIN = CopyPath.TO_HOST, CopyPath.FROM_HOST, CopyPath.IN_ARENA


def test_pages_of_one_number_in_both_memories_are_not_the_same():
    assert rounds_of(move(OUT, 5, 9), move(OUT, 6, 5), move(OUT, 9, 6)) == [
        (OUT, (5, 6, 9), (9, 5, 6))
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(move(OUT, 5, 9), move(BACK, 8, 5), id="a_page_is_saved_then_loaded"),
        pytest.param(move(BACK, 9, 5), move(OUT, 6, 9), id="a_page_there_is_read_then_written"),
        pytest.param(move(BACK, 9, 5), move(OUT, 5, 8), id="what_was_loaded_is_saved"),
        pytest.param(move(OUT, 5, 9), move(BACK, 9, 6), id="what_was_saved_is_loaded"),
        pytest.param(move(OUT, 5, 9), move(WITHIN, 6, 5), id="a_page_is_saved_then_copied_to"),
        pytest.param(move(BACK, 9, 5), move(WITHIN, 5, 6), id="what_was_loaded_is_copied"),
        pytest.param(move(OUT, 5, 9), move(OUT, 6, 9), id="a_page_there_is_written_twice"),
    ],
)
def test_copies_between_memories_that_touch_keep_their_order(first, second):
    rounds = rounds_of(first, second)

    assert [path for path, _, _ in rounds] == [first.path, second.path]


def test_large_pages_that_change_hands_in_either_memory_keep_the_order():
    k, other = [STATES.page_tables[index].small_pages_per_large_page for index in (0, 1)]
    # The same large page of host memory, then of the arena, as one table's and the other's.
    there = (move(OUT, 7 * k, 3 * k), move(OUT, 8 * other, 3 * other, table=1))
    here = (move(BACK, 7 * k, 3 * k), move(BACK, 8 * other, 3 * other, table=1))

    for copies in (there, here):
        assert [r.small_pages_per_large_page for r in copy_rounds(copies, STATES)] == [k, other]
        assert rounds_of(*copies) == rounds_of(copies[0]) + rounds_of(copies[1])
    # Large pages of the same number in both memories have nothing to do with each other.
    assert len({r.path for r in copy_rounds((there[0], here[1]), STATES)}) == 2


def test_neighbours_that_become_neighbours_are_one_copy():
    runs = runs_of_copies((4, 5, 6, 8, 9, 2), (1, 2, 4, 5, 6, 7))

    assert list(runs) == [(4, 1, 2), (6, 4, 1), (8, 5, 2), (2, 7, 1)]
    assert list(runs_of_copies((), ())) == []


@pytest.fixture
def arena():
    """An arena of 4 large pages of 24 bytes."""
    return torch.randint(-100, 100, (4 * 24,), dtype=torch.int8, device=DEVICE)


def test_pages_go_to_host_memory_and_come_back_elsewhere(arena):
    from jenga.vllm_plugin.worker.host_memory import HostMemory

    before = arena.clone().view(12, 8)
    host = HostMemory(arena.device, 6 * 24)
    out = CopyRound(
        small_pages_per_large_page=3, source_pages=(4, 5, 9), target_pages=(7, 8, 16), path=OUT
    )
    back = CopyRound(
        small_pages_per_large_page=3, source_pages=(8, 16), target_pages=(3, 4), path=BACK
    )

    host.copy(arena, 4, out)
    arena.view(12, 8)[9] = 0
    host.copy(arena, 4, back)

    expected = before.clone()
    expected[9] = 0
    expected[3], expected[4] = before[5], before[9]
    assert torch.equal(arena.view(12, 8), expected)


@pytest.mark.parametrize("num_bytes", [24, 64 << 20], ids=["small", "large"])
def test_what_is_copied_ahead_is_what_the_step_left_and_the_next_one_waits(num_bytes):
    from jenga.vllm_plugin.worker.host_memory import HostMemory

    arena = torch.zeros(4, num_bytes, dtype=torch.int8, device=DEVICE)
    host = HostMemory(arena.device, 4 * num_bytes)
    rounds = [
        CopyRound(small_pages_per_large_page=1, source_pages=(1, 2), target_pages=(3, 1), path=OUT)
    ]
    back = CopyRound(
        small_pages_per_large_page=1, source_pages=(1, 3), target_pages=(2, 3), path=BACK
    )

    for number in range(1, 9):
        arena[1], arena[2] = number, -number
        host.copy_ahead(arena.view(-1), 4, rounds)
        arena[3] = 99  # what a step writes beside
        host.finish_ahead()
        arena[1:] = 0
        host.copy(arena.view(-1), 4, back)
        assert arena[2].eq(-number).all()
        assert arena[3].eq(number).all()
    assert host.memory.view(4, -1)[1].eq(-number).all()


@pytest.mark.parametrize("when", ["copies", "ahead"])
def test_pages_ordered_to_host_memory_that_is_not_there_are_an_error(when, arena):
    from jenga.errors import InvariantError
    from jenga.vllm_plugin.orders.step_orders import StepOrders
    from jenga.vllm_plugin.worker.step_mailbox import StepMailbox

    out = CopyRound(small_pages_per_large_page=3, source_pages=(4,), target_pages=(7,), path=OUT)

    with pytest.raises(InvariantError, match="to host memory or from there, and there is none"):
        StepMailbox().deliver([arena.view(4, 24)[:, :8]], 4, StepOrders(**{when: (out,)}))


def test_host_memory_that_cannot_be_had_is_refused_by_the_option():
    from jenga.vllm_plugin.worker.host_memory import HostMemory

    with pytest.raises(MemoryError, match=r"--kv-offloading-size: \d+ bytes of host memory cannot"):
        HostMemory(torch.device("cpu"), 1 << 60)


def test_host_memory_of_one_engine_does_not_wait_for_copies_of_another(arena, monkeypatch):
    from jenga.vllm_plugin.orders.step_orders import StepOrders
    from jenga.vllm_plugin.worker.host_memory import HostMemory
    from jenga.vllm_plugin.worker.step_mailbox import StepMailbox

    first, second = StepMailbox(), StepMailbox()
    finished = []
    original = HostMemory.finish_ahead
    monkeypatch.setattr(
        HostMemory, "finish_ahead", lambda self: (finished.append(self), original(self))
    )
    for mailbox in (first, second):
        mailbox.host_memory = HostMemory(arena.device, 4 * 24)
    out = CopyRound(small_pages_per_large_page=3, source_pages=(4,), target_pages=(7,), path=OUT)
    first.deliver([arena], 4, StepOrders(ahead=(out,)))

    second.deliver([arena], 4, StepOrders())

    assert finished == [first.host_memory, second.host_memory]
    assert first.host_memory._is_copying
    first.deliver([arena], 4, StepOrders())
    assert not first.host_memory._is_copying


def test_host_memory_is_unlocked_when_its_engine_is_gone(monkeypatch):
    from jenga.vllm_plugin.worker.host_memory import HostMemory

    locked = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, _num_bytes, _flags: locked.append(address) or 0,
        cudaHostUnregister=locked.remove,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: error)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)

    host = HostMemory(torch.device("cuda"), 6 * 24)
    assert len(locked) == 1
    del host
    gc.collect()

    assert locked == []

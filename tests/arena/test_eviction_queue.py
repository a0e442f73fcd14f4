"""The queue of victims against a dictionary of ranks, whatever is done to it."""

from hypothesis import given
from hypothesis import strategies as st

from jenga.arena.eviction_queue import NOT_QUEUED, SLACK_ENTRIES, EvictionQueue

NUM_ITEMS = 12

ITEMS = st.sets(st.integers(0, NUM_ITEMS - 1), min_size=1)
RANKS = st.integers(0, 100)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, NUM_ITEMS - 1), RANKS),
        st.tuples(st.just("extend"), ITEMS, st.lists(RANKS, min_size=NUM_ITEMS)),
        st.tuples(st.just("extend by a range"), ITEMS, RANKS),
        st.tuples(st.just("drop"), st.integers(0, NUM_ITEMS - 1), RANKS),
        st.tuples(st.just("drop many"), ITEMS, RANKS),
        st.tuples(st.just("clear"), ITEMS, RANKS),
    ),
    max_size=60,
)


def apply(queue, ranks, name, what, how):
    """Do one thing to a queue and to what it should hold."""
    match name:
        case "push":
            queue.push(what, how)
            ranks[what] = how
        case "extend":
            items = [item for item in what if item not in ranks]
            queue.extend(items, how[: len(items)])
            ranks.update(zip(items, how, strict=False))
        case "extend by a range":
            items = [item for item in what if item not in ranks]
            how = range(how + NUM_ITEMS, how + NUM_ITEMS - len(items), -1)
            queue.extend(items, how)
            ranks.update(zip(items, how, strict=True))
        case "drop":
            queue.drop(what)
            ranks.pop(what, None)
        case "drop many":
            items = [item for item in what if item in ranks]
            queue.drop_many(items)
            for item in items:
                del ranks[item]
        case _:
            queue.clear()
            ranks.clear()


@given(OPERATIONS)
def test_queue_gives_the_lowest_rank_whatever_is_done_to_it(operations):
    queue = EvictionQueue(NUM_ITEMS)
    ranks: dict[int, int] = {}
    for operation in operations:
        apply(queue, ranks, *operation)
        queue.check()
        assert queue.num_queued == len(ranks)
        first = min(((rank, item) for item, rank in ranks.items()), default=None)
        assert queue.peek() == (NOT_QUEUED if first is None else first[1])
        assert queue.peek_rank() == (NOT_QUEUED if first is None else first[0])
        assert all(queue.rank(item) == rank for item, rank in ranks.items())


def test_a_queue_forgets_entries_of_items_that_come_in_again_with_their_rank():
    queue = EvictionQueue(4)
    queue.push(0, 5)
    queue.push(1, 7)

    for _ in range(1000):
        queue.drop(1)
        queue.push(1, 7)

    assert queue._num_entries <= 2 * queue.num_queued + SLACK_ENTRIES
    queue.check()
    assert queue.peek() == 0


@given(OPERATIONS)
def test_queue_gives_all_its_items_in_order_and_keeps_them(operations):
    queue = EvictionQueue(NUM_ITEMS)
    ranks: dict[int, int] = {}
    for operation in operations:
        apply(queue, ranks, *operation)

        assert list(queue.in_order()) == sorted(ranks, key=lambda item: (ranks[item], item))
        queue.check()


def test_a_queue_whose_items_are_in_no_order_gives_them_in_order():
    # More falling ranks than there are lanes, so that most come from the heap.
    queue = EvictionQueue(100)
    for item in range(100):
        queue.push(item, 7 * item % 100 if item % 2 else 200 - item)
    queue.drop(14)

    items = list(queue.in_order())

    assert sorted(items) == [item for item in range(100) if item != 14]
    assert [queue.rank(item) for item in items] == sorted(map(queue.rank, items))

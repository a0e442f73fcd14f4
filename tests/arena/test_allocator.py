"""The allocator alone: exact feasibility, placement, eviction order."""

import itertools
import random

import pytest

from jenga.arena.allocator import Allocator
from jenga.arena.ranks import LOADED_RANK, PINNED_RANK


def taken(allocator, table, num_pages, *, expected=None, owner=1):
    """Pages of one table, as the manager takes them."""
    needs = [0] * len(allocator.tables)
    needs[table] = num_pages
    certain = list(needs)
    certain[table] = num_pages if expected is None else expected
    assert allocator.room(needs).suffices
    pages = allocator.take(needs, certain, owner=owner)[table]
    allocator.check()
    return pages


def release_cached(allocator, table, pages, first_rank):
    allocator.tables[table].release_cached(pages, range(first_rank, first_rank + len(pages)))
    allocator.check()


def larges(allocator, table, pages):
    k = allocator.tables[table].pages_per_large
    return [page // k for page in pages]


def test_allocator_hands_out_every_page_but_the_null_page_once():
    allocator = Allocator([3], 5)

    pages = taken(allocator, 0, 12)

    assert sorted(pages) == list(range(3, 15))
    assert not allocator.room([1]).suffices


def test_allocator_packs_small_needs_into_the_fullest_large_page():
    allocator = Allocator([4], 6)
    first = taken(allocator, 0, 3)
    second = taken(allocator, 0, 2)
    allocator.tables[0].release(second)

    third = taken(allocator, 0, 1)

    assert larges(allocator, 0, third) == larges(allocator, 0, first[:1])


def test_allocator_gives_a_request_that_fills_a_large_page_one_of_its_own():
    allocator = Allocator([4], 6)
    other = taken(allocator, 0, 1, owner=1)

    pages = taken(allocator, 0, 2, expected=8, owner=2)
    stranger = taken(allocator, 0, 3, owner=3)
    more = taken(allocator, 0, 6, expected=6, owner=2)

    assert larges(allocator, 0, stranger) == larges(allocator, 0, other) * 3
    assert len(set(larges(allocator, 0, pages + more))) == 2
    assert not set(larges(allocator, 0, pages + more)) & set(larges(allocator, 0, other))


def test_allocator_takes_claimed_pages_of_others_when_nothing_else_is_empty():
    allocator = Allocator([4], 2)
    mine = taken(allocator, 0, 1, expected=4, owner=1)

    stolen = taken(allocator, 0, 3, owner=2)

    assert set(larges(allocator, 0, stolen)) == set(larges(allocator, 0, mine))


def test_allocator_opens_no_large_page_for_affinity_that_another_table_needs():
    allocator = Allocator([4, 1], 4)
    taken(allocator, 0, 1, owner=1)

    # Two empty large pages are left and table 1 wants both; table 0 must do with its spare pages.
    assert allocator.room([3, 2]).suffices
    pages = allocator.take([3, 2], [4, 2], owner=2)

    allocator.check()
    assert len(pages[0]) == 3
    assert len(pages[1]) == 2


def test_one_state_and_many_short_requests_do_not_take_every_large_page():
    # 100 attention pages or one state per large page: 20 requests of 5 pages each.
    allocator = Allocator([100, 1], 40)
    for owner in range(1, 21):
        allocator.take([5, 1], [5, 1], owner=owner)
    allocator.check()

    assert allocator.tables[0].num_large == 1
    assert allocator.large_pages.num_empty == 39 - 1 - 20


def test_released_pages_make_their_large_page_empty_for_every_table():
    allocator = Allocator([3, 2], 3)
    pages = taken(allocator, 0, 6)
    assert not allocator.room([0, 1]).suffices

    allocator.tables[0].release(pages[:3])

    assert len(taken(allocator, 1, 2)) == 2


def test_eviction_takes_the_large_page_whose_youngest_small_page_is_oldest():
    allocator = Allocator([2, 2], 3)
    first = taken(allocator, 0, 2)
    second = taken(allocator, 0, 2)
    release_cached(allocator, 0, [first[0]], 1)
    release_cached(allocator, 0, second, 2)
    release_cached(allocator, 0, [first[1]], 9)

    pages = taken(allocator, 1, 1)

    assert larges(allocator, 1, pages) == [second[0] // 2]
    assert sorted(allocator.tables[0].evicted) == sorted(second)


def test_eviction_takes_an_older_small_page_before_a_younger_large_page():
    allocator = Allocator([2, 2], 3)
    shared_large = taken(allocator, 0, 2)
    whole = taken(allocator, 0, 2)
    release_cached(allocator, 0, shared_large[:1], 1)
    release_cached(allocator, 0, whole, 2)

    pages = taken(allocator, 0, 1)

    assert pages == shared_large[:1]
    assert allocator.tables[0].evicted == pages


def test_pages_that_no_checkpoint_needs_go_before_an_older_one_that_one_needs():
    allocator = Allocator([2, 2], 4)
    pages = [taken(allocator, 0, 2) for _ in range(3)]
    release_cached(allocator, 0, pages[0], PINNED_RANK + 1)
    release_cached(allocator, 0, pages[1], 2)
    release_cached(allocator, 0, pages[2], 3)

    for _ in range(2):
        taken(allocator, 1, 2)

    assert sorted(allocator.tables[0].evicted) == sorted(pages[1] + pages[2])


@pytest.mark.parametrize("ks", [(1, 1), (2, 2)], ids=["whole", "split"])
def test_where_only_kept_pages_are_left_checkpoints_are_evicted_until_there_is_room(ks):
    allocator = Allocator(ks, 4)
    table = allocator.tables[0]
    pages = [taken(allocator, 0, ks[0]) for _ in range(3)]
    for number, some in enumerate(pages):
        release_cached(allocator, 0, some, PINNED_RANK + number)
    checkpoints = pages[::-1]

    def evict_one():
        if not checkpoints:
            return False
        table.discard(checkpoints.pop())
        return True

    allocator.large_pages.evictor = evict_one

    # Two for one large page each, though the ranks of their pages say nothing of their order.
    checkpoints[:] = [pages[0], pages[2], pages[1]]
    taken(allocator, 1, 2 * ks[1])

    assert checkpoints == [pages[0]]
    assert table.num_evictable == ks[0]
    assert table.evicted == []
    allocator.check()


def test_without_a_checkpoint_to_evict_pages_that_were_to_be_read_go_all_the_same():
    allocator = Allocator([2, 2], 2)
    pages = taken(allocator, 0, 2)
    release_cached(allocator, 0, pages, LOADED_RANK)
    allocator.large_pages.evictor = lambda: False

    taken(allocator, 1, 1)

    assert sorted(allocator.tables[0].evicted) == sorted(pages)


def test_a_small_page_of_a_checkpoint_in_a_large_page_in_use_waits_for_its_checkpoint():
    allocator = Allocator([4], 2)
    table = allocator.tables[0]
    pages = taken(allocator, 0, 4)
    release_cached(allocator, 0, pages[:1], PINNED_RANK + 5)
    release_cached(allocator, 0, pages[1:2], PINNED_RANK + 6)

    def evict_one():
        table.discard(pages[1:2])
        return True

    allocator.large_pages.evictor = evict_one

    assert taken(allocator, 0, 1) == pages[1:2]
    assert table.evicted == []
    allocator.check()


@pytest.mark.parametrize("ks", [(1,), (3,)], ids=["whole", "split"])
def test_discarded_pages_are_empty_and_their_large_page_is_given_to_anybody(ks):
    allocator = Allocator((*ks, 1), 4)
    table = allocator.tables[0]
    pages = taken(allocator, 0, 3)
    release_cached(allocator, 0, pages, 7)

    table.discard(pages[1:2])
    allocator.check()
    table.discard([pages[0], pages[2]])

    assert allocator.large_pages.num_empty == 3
    assert (table.num_evictable, table.num_large) == (0, 0)
    allocator.check()


@pytest.mark.parametrize("ks", [(1,), (3,)], ids=["whole", "split"])
def test_pages_of_another_rank_go_in_its_place(ks):
    allocator = Allocator((*ks, 1), 3)
    table = allocator.tables[0]
    first, second = (taken(allocator, 0, ks[0]) for _ in range(2))
    release_cached(allocator, 0, first, 1)
    release_cached(allocator, 0, second, 2)

    table.rerank(first, [9] * len(first))
    allocator.check()
    taken(allocator, 1, 1)

    assert sorted(table.evicted) == sorted(second)


def test_eviction_leaves_the_rest_of_an_own_large_page_cached():
    allocator = Allocator([4], 2)
    pages = taken(allocator, 0, 4)
    release_cached(allocator, 0, pages, 1)

    again = taken(allocator, 0, 1)

    assert again == pages[:1]
    assert allocator.tables[0].num_evictable == 3


def test_a_shared_page_is_used_until_its_last_user_leaves():
    allocator = Allocator([2], 4)
    table = allocator.tables[0]
    pages = taken(allocator, 0, 2)
    table.share_pages(pages)

    release_cached(allocator, 0, pages, 1)
    assert table.num_used == 2
    release_cached(allocator, 0, pages, 5)

    assert (table.num_used, table.num_evictable) == (0, 2)


def test_take_takes_nothing_where_room_denies():
    allocator = Allocator([2, 1], 3)

    assert allocator.take([3, 1], [3, 1], owner=1) is None

    allocator.check()
    assert allocator.large_pages.num_empty == 2


def _fits_by_trying_everything(allocator, needs):
    """Whether large pages can be dealt out so that every need is met, tried one way after another.

    A large page that holds a used small page stays with its table; any other may go to any table.
    """
    spare = [0] * len(allocator.tables)
    free_larges = 0
    for large in range(1, allocator.large_pages.num_pages):
        holder = allocator.large_pages.holders[large]
        if holder < 0:
            free_larges += 1
            continue
        table = allocator.tables[holder]
        k = table.pages_per_large
        pages = range(large * k, (large + 1) * k)
        used = [page for page in pages if page in _used_pages[holder]]
        if used:
            spare[holder] += k - len(used)
        else:
            free_larges += 1
    for deal in itertools.product(range(free_larges + 1), repeat=len(needs)):
        if sum(deal) <= free_larges and all(
            need <= spare_pages + given * table.pages_per_large
            for need, spare_pages, given, table in zip(
                needs, spare, deal, allocator.tables, strict=True
            )
        ):
            return True
    return False


_used_pages: list[set[int]] = []


def _evictable_pages(allocator, index):
    """All cached pages of a page table that nobody uses."""
    table = allocator.tables[index]
    return [
        page
        for large, holder in enumerate(allocator.large_pages.holders)
        if holder == index
        for page in table.evictable_pages(large)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_room_says_exactly_what_can_be_had(seed):
    random_ = random.Random(seed)
    ks = random_.choice([(1, 3), (2, 3), (4, 1, 2), (5, 1)])
    allocator = Allocator(ks, random_.randint(4, 8))
    _used_pages[:] = [set() for _ in ks]
    rank = 0
    for _ in range(60):
        table = random_.randrange(len(ks))
        used = sorted(_used_pages[table])
        action = random_.random()
        if action < 0.5 or not used:
            needs = [random_.randint(0, 2 * k) for k in ks]
            room = allocator.room(needs)
            assert room.suffices == _fits_by_trying_everything(allocator, needs)
            if room.suffices:
                expected = [need * random_.randint(1, 4) for need in needs]
                pages = allocator.take(needs, expected, owner=random_.randint(1, 4))
                for index, need in enumerate(needs):
                    assert len(pages[index]) == need
                    assert not set(pages[index]) & _used_pages[index]
                    _used_pages[index] |= set(pages[index])
        elif action < 0.6 and (evictable := _evictable_pages(allocator, table)):
            some = random_.sample(evictable, random_.randint(1, len(evictable)))
            if action < 0.55:
                allocator.tables[table].discard(some)
            else:
                allocator.tables[table].rerank(some, [random_.randint(0, rank) for _ in some])
        else:
            some = random_.sample(used, random_.randint(1, len(used)))
            _used_pages[table] -= set(some)
            if action < 0.7:
                allocator.tables[table].release(some)
            else:
                ranks = [rank + random_.randint(0, 5) for _ in some]
                rank += 3
                allocator.tables[table].release_cached(some, ranks)
        allocator.check()


@pytest.mark.parametrize("seed", range(10))
def test_room_accounts_for_hits_as_if_they_were_shared_already(seed):
    random_ = random.Random(seed)
    ks = (3, 1, 2)
    allocator = Allocator(ks, 9)
    cached = [[], [], []]
    for index, k in enumerate(ks):
        pages = taken(allocator, index, 2 * k)
        cached[index] = random_.sample(pages, k + 1)
        release_cached(allocator, index, cached[index], 10)
    hits = [random_.sample(pages, random_.randint(0, len(pages))) for pages in cached]
    needs = [random_.randint(0, 6) for _ in ks]

    sharings = [
        table.prepare_sharing(pages) if pages else None
        for table, pages in zip(allocator.tables, hits, strict=True)
    ]
    before = allocator.room(needs, hits=sharings)
    for table, sharing in zip(allocator.tables, sharings, strict=True):
        if sharing is not None:
            table.share_prepared(sharing)

    allocator.check()
    assert before == allocator.room(needs)

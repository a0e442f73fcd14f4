"""The tree of checkpoints: whole or not at all, whatever is kept, split, evicted and waited for."""

import random

import pytest

from jenga.arena.eviction_queue import NOT_QUEUED
from jenga.arena.ranks import PINNED_RANK
from jenga.errors import InvariantError
from jenga.eviction.known import EVICTION_POLICIES
from jenga.eviction.points import Kind, Past
from jenga.prefix import checkpoint_tree, eviction_pool, question_length
from jenga.prefix.new_points import NewPoints
from jenga.tables.content_index import ContentIndex
from tests.eviction.arena import FACTS, Arena, hashes
from tests.machines.geometries import cross, full, geometry, sliding, state

FULL = geometry("full", full(tokens=4))
TWO_SIZES = geometry(
    "two sizes", full("a", tokens=4, per_large=2), full("b", tokens=8, per_large=1)
)
WINDOWED = geometry("windowed", full(tokens=4), sliding(tokens=4, window=10))
STATES = geometry(
    "states",
    full(tokens=4, slot_bytes=8, per_large=4),
    state("one", slot_bytes=64, per_large=2),
    state("other", slot_bytes=128),
)
STATES_ALONE = geometry("states alone", state("one", slot_bytes=64, per_large=2))
MIXED = geometry(
    "mixed",
    full("a", tokens=4, slot_bytes=8, per_large=4),
    full("b", tokens=8, slot_bytes=8, per_large=2),
    sliding(tokens=2, slot_bytes=16, per_large=4, window=7),
    state(slot_bytes=64, per_large=2),
)
IMAGES = geometry("images", full(tokens=4), cross(slot_bytes=4, per_large=4))
CUTS = (FULL, TWO_SIZES, WINDOWED, STATES, STATES_ALONE, MIXED, IMAGES)
CUT_IDS = [cut.name for cut in CUTS]

TEXT = "the quick brown fox jumps over the lazy dog and runs away"


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(checkpoint_tree, "CUT_TOKENS", 8)
    monkeypatch.setattr(question_length, "QUESTION_TOKENS", 8)


def num_cached(arena):
    """Pages that can be found, by page table."""
    return [sum(key is not None for key in table.cache.keys) for table in arena.tables]


def evict_all(arena):
    while arena.tree.evict_one():
        arena.check()


# Whole or not at all


@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
def test_what_a_checkpoint_needs_stays_when_all_else_goes(cut):
    arena = Arena(cut, 40)
    arena.written(TEXT[:32], 16)

    # All that is loose goes, but not one page more.
    large_pages = arena.allocator.large_pages
    arena.allocator.large_pages.evictor = None
    while 0 <= large_pages.reclaimable.peek_rank() < PINNED_RANK:
        large_pages.make_empty(large_pages.num_empty + 1, 0)
        arena.eviction_notices.deliver()
        arena.check()

    assert arena.is_kept(TEXT, 16)


@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
def test_a_point_of_which_a_part_is_missing_is_not_kept_and_changes_nothing(cut):
    arena = Arena(cut, 40)
    assert arena.write(TEXT[:32])
    for table in arena.of_text:
        page = table.page_of(arena.keys(table, TEXT[:16])[-1])
        table.cache.forget([page])
        table.pages.discard([page])
        before = num_cached(arena)

        assert arena.keep(TEXT[:32], 16) is None

        assert num_cached(arena) == before
        arena.check()
        assert arena.write(TEXT[:32])
    assert arena.keep(TEXT[:32], 16) is not None
    arena.check()


def test_a_point_without_its_states_is_not_kept():
    arena = Arena(STATES)
    assert arena.write(TEXT[:32])

    node = arena.tree.keep(
        arena.tree.last_node(hashes(TEXT), FACTS, 0),
        hashes(TEXT[:32]),
        FACTS,
        16,
        Kind.PROMPT_END,
        Past.NEW_TEXT,
    )

    assert node is None
    arena.check()


@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
def test_an_evicted_checkpoint_leaves_nothing_that_no_other_one_needs(cut):
    arena = Arena(cut)
    node = arena.written(TEXT[:32], 32)
    others = num_cached(arena)

    arena.tree.evict(node)

    arena.check()
    assert not arena.is_kept(TEXT, 32)
    for table, num_before in zip(arena.tables, others, strict=True):
        if table in arena.tree._prefix_tables or table.policy.is_overwritten:
            assert all(key is None for key in table.cache.keys)
        elif table in arena.of_text:
            # What the window had passed is loose as before.
            num_window = len(table.policy.reused_pages(FACTS, (), table.grain, 32))
            found = sum(key is not None for key in table.cache.keys)
            assert found == num_before - num_window
    assert arena.tree.num_evicted == 1


def test_pages_in_use_outlive_their_checkpoint_and_are_loose_then():
    arena = Arena(FULL)
    node = arena.written(TEXT[:16], 16)
    (table,) = arena.tables
    pages = [table.page_of(key) for key in arena.keys(table, TEXT[:16])]
    table.pages.share_pages(pages[:3])

    arena.tree.evict(node)

    assert num_cached(arena) == [3]
    assert arena.tree.num_lost_bytes == 64
    table.release_pages(pages[:3])
    arena.check()
    assert num_cached(arena) == [3]


# Texts that part


@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
def test_texts_that_part_share_what_they_have_in_common(cut):
    arena = Arena(cut, 80)
    first = arena.written(TEXT[:32], 32)
    before = num_cached(arena)
    other_text = TEXT[:16] + "x" * 16
    second = arena.written(other_text, 32)

    lasting = arena.tree._prefix_tables
    for table in lasting:
        num_new = 16 // table.grain.page_slots
        assert num_cached(arena)[table.index] == before[table.index] + num_new
    if lasting:
        assert first.parent is second.parent
        assert (first.parent.num_tokens, first.parent.is_kept) == (16, False)

    arena.tree.evict(first)
    arena.check()
    assert arena.is_kept(other_text, 32)
    arena.tree.evict(second)
    arena.check()
    for table in lasting:
        assert all(key is None for key in table.cache.keys)


@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
def test_a_point_before_one_that_is_kept_is_kept_beside_it(cut):
    arena = Arena(cut)
    later = arena.written(TEXT[:40], 40)
    earlier = arena.written(TEXT[:40], 16)

    assert earlier.is_kept
    assert later.is_kept
    assert later.kept_before is (earlier if arena.tree._prefix_tables else None)
    arena.tree.evict(later)
    arena.check()
    assert arena.is_kept(TEXT, 16)


def test_a_point_is_found_from_any_node_before_it_even_one_that_is_gone():
    arena = Arena(FULL)
    first = arena.written(TEXT[:16], 16)
    other = arena.written(TEXT[:16] + "x" * 8, 24)
    arena.tree.evict(other)
    arena.tree.evict(first)
    assert first.is_removed
    assert first.still_there is arena.tree._root

    assert arena.write(TEXT)
    node = arena.keep(TEXT, 40, stand=first)

    assert node is not None
    arena.check()
    assert arena.is_kept(TEXT, 40)
    assert arena.keep(TEXT, 48, stand=node).parent is node
    arena.check()


def test_the_last_node_of_a_text_is_found_within_any_of_its_tokens():
    arena = Arena(FULL, 80)
    for text, num_tokens in ((TEXT, 16), (TEXT, 40), (TEXT[:24] + "x" * 12, 36)):
        arena.written(text[: len(text) // 4 * 4], num_tokens)

    stands = {
        num_tokens: arena.tree.last_node(hashes(TEXT), FACTS, num_tokens).num_tokens
        for num_tokens in (0, 12, 16, 20, 24, 36, 40, 56)
    }

    # Where the other text parts, after 24 tokens, there is a node that is not kept.
    assert stands == {0: 0, 12: 0, 16: 16, 20: 16, 24: 24, 36: 24, 40: 40, 56: 40}
    unknown = "an unknown text"
    assert arena.tree.last_node(hashes(unknown), FACTS, 12).num_tokens == 0


@pytest.mark.parametrize("cut", [FULL, TWO_SIZES, STATES, MIXED], ids=lambda cut: cut.name)
def test_texts_that_part_within_what_is_read_ahead_are_kept_apart(cut):
    arena = Arena(cut, 120, ahead_tokens=1)
    assert arena.tree.ahead_tokens == arena.tree.align_tokens
    texts = [TEXT[:16] + name * 24 for name in "xyz"]
    nodes = [arena.written(text, 16) for text in texts]
    assert len({id(node) for node in nodes}) == 3

    for text in texts:
        arena.written(text, 24)
        assert arena.is_kept(text, 16)

    # They have one state between them, which goes with the last of them.
    for table in arena.states:
        assert table.pins[table.page_of(TEXT[:16].encode())] == 3
    for node, text in zip(nodes, texts, strict=True):
        assert arena.is_kept(text, 16)
        arena.tree.evict(node)
        arena.check()
    for table in arena.states:
        assert table.page_of(TEXT[:16].encode()) is None


def test_without_the_tokens_that_are_read_ahead_a_point_is_not_kept():
    arena = Arena(FULL, ahead_tokens=1)
    assert arena.write(TEXT[:16])

    assert arena.keep(TEXT[:16], 16) is None
    assert arena.keep(TEXT[:16], 12) is not None
    arena.check()


# Branches and guesses


@pytest.mark.parametrize(
    ("branch_tokens", "is_dropped"), [(24, True), (32, False)], ids=["near", "far"]
)
def test_a_known_branch_takes_the_place_of_a_guess_right_before_it(branch_tokens, is_dropped):
    arena = Arena(WINDOWED)
    arena.written(TEXT[:40], 16, Kind.BEFORE_END)
    arena.written(TEXT[:40], 40, Kind.PROMPT_END)

    arena.written(TEXT[:40], branch_tokens, Kind.BRANCH)

    assert arena.is_kept(TEXT, 16) is not is_dropped
    assert (arena.tree.points.get(TEXT[:16].encode()) is None) is is_dropped


@pytest.mark.parametrize("is_used", [False, True])
def test_readers_of_a_guess_count_as_readers_of_the_branch(is_used):
    arena = Arena(WINDOWED)
    guess = arena.written(TEXT[:40], 16, Kind.BEFORE_END)
    for _ in range(3):
        arena.tree.points.record_read(guess.point)
    if is_used:
        arena.tree.pool.await_point(TEXT[:16].encode(), 1)

    branch = arena.written(TEXT[:40], 24, Kind.BRANCH)

    assert (branch.point.num_reads, branch.point.past) == (3, Past.READ)
    assert arena.is_kept(TEXT, 16) is is_used


def test_an_awaited_guess_stays():
    arena = Arena(WINDOWED)
    arena.written(TEXT[:40], 16, Kind.BEFORE_END)
    arena.tree.pool.await_point(TEXT[:16].encode(), 1)

    arena.written(TEXT[:40], 24, Kind.BRANCH)

    assert arena.is_kept(TEXT, 16)


# Eviction


def test_without_windows_and_states_a_checkpoint_is_cut_from_its_end():
    arena = Arena(FULL)
    node = arena.written(TEXT[:40], 40)
    kept = []
    while arena.tree.evict_one():
        arena.check()
        kept.append(dict(arena.kept_points()))

    assert [list(points.values()) for points in kept] == [[32], [24], [16], [8], []]
    assert all(TEXT.startswith(text) for points in kept for text in points)
    assert node.is_removed
    assert num_cached(arena) == [0]


def test_a_cut_stops_where_another_text_parts_or_is_kept():
    arena = Arena(FULL)
    arena.written(TEXT[:32], 32)
    arena.written(TEXT[:20] + "x" * 12, 32)
    branch = arena.tree._by_key[TEXT[:20].encode()]

    evict_all(arena)

    assert branch.is_removed
    assert num_cached(arena) == [0]


def test_a_cut_takes_no_less_than_a_large_page():
    arena = Arena(geometry("split", full(tokens=4, per_large=8)))
    arena.written(TEXT[:56], 56)

    arena.tree.evict_one()

    assert list(arena.kept_points().values()) == [24]
    arena.check()


@pytest.mark.parametrize(("num_large_pages", "num_left"), [(16, 36), (96, 28), (10_000, 8)])
def test_a_cut_takes_no_more_than_a_small_share_of_the_arena(
    num_large_pages, num_left, monkeypatch
):
    monkeypatch.setattr(checkpoint_tree, "CUT_TOKENS", 32)
    arena = Arena(FULL, num_large_pages)
    arena.written(TEXT[:40], 40)

    arena.tree.evict_one()

    assert list(arena.kept_points().values()) == [num_left]
    arena.check()


@pytest.mark.parametrize("num_pages", [1, 6])
def test_an_image_goes_whole_even_where_texts_are_cut(num_pages):
    arena = Arena(IMAGES)
    assert arena.write_image(b"cat", num_pages)
    arena.keep_image(b"cat", num_pages)
    arena.check()

    assert arena.tree.evict_one()

    arena.check()
    assert arena.image_nodes(b"cat") == [None]
    assert num_cached(arena) == [0, 0]


def test_an_image_kept_twice_or_shown_twice_is_one_checkpoint():
    arena = Arena(IMAGES)
    assert arena.write_image(b"cat", 2)
    assert arena.write_image(b"dog", 1)
    table = arena.tables[1]
    cat, dog = arena.image_pages(table, b"cat", 2), arena.image_pages(table, b"dog", 1)

    arena.tree.keep_images(table, [*cat, *dog, *cat], Past.NEW_TEXT)
    arena.check()
    arena.tree.keep_images(table, cat, Past.TURN)

    (node,) = arena.image_nodes(b"cat")
    assert node.num_tokens == 8
    assert node.point.past == Past.NEW_TEXT
    arena.tree.read_images(table, [*cat, *dog])
    assert node.point.past == Past.READ
    evict_all(arena)
    assert num_cached(arena) == [0, 0]


def test_what_is_worth_least_goes_first():
    arena = Arena(WINDOWED, policy="lru")
    texts = [name * 16 for name in "abc"]
    for text in texts:
        arena.written(text, 16)
        arena.tree.points.record_admission(100)
    arena.tree.admit(hashes("a" * 20), FACTS, hit_tokens=16, asked_tokens=16, computed_bytes=100)

    order = []
    while arena.tree.evict_one():
        arena.check()
        order.append([text[0] for text in texts if not arena.is_kept(text, 16)])

    assert order == [["b"], ["b", "c"], ["a", "b", "c"]]


def test_what_goes_next_is_what_was_said_to():
    arena = Arena(WINDOWED, policy="lru")
    texts = [name * 16 for name in "abcdef"]
    for text in texts:
        arena.written(text, 16)
        arena.tree.points.record_admission(100)
    node_bytes = (4 + 3) * 64

    chosen = [node for node, _ in arena.tree.pool.upcoming(3 * node_bytes)]

    assert [node.key[:1] for node in chosen] == [b"a", b"b", b"c"]
    assert [node for node, _ in arena.tree.pool.upcoming(node_bytes)] == chosen
    # One is read, and another waited for: those do not go next any more.
    arena.tree.admit(hashes("a" * 20), FACTS, hit_tokens=16, asked_tokens=16, computed_bytes=1)
    arena.tree.pool.await_point(b"b" * 16, 7)
    gone = []
    for _ in range(3):
        before = set(arena.kept_points())
        arena.tree.evict_one()
        gone += sorted(before - set(arena.kept_points()))
        arena.check()
    assert [text[0] for text in gone] == ["c", "d", "e"]


def test_the_checkpoint_whose_last_use_was_told_is_evicted_next():
    arena = Arena(WINDOWED, policy="lru")
    assert arena.tree.pool.next_rank() == NOT_QUEUED
    for text in ("a" * 16, "b" * 16):
        arena.written(text, 16)
        arena.tree.points.record_admission(100)

    first = arena.tree.pool.next_rank()
    assert arena.tree.pool.next_rank() == first
    assert len(arena.kept_points()) == 2
    # One is read, so the other is next, whose pages were left later.
    arena.tree.admit(hashes("a" * 20), FACTS, hit_tokens=16, asked_tokens=16, computed_bytes=1)
    assert arena.tree.pool.next_rank() > first
    arena.tree.evict_one()
    assert [key[:1] for key in arena.kept_points()] == ["a"]
    arena.tree.pool.await_point(b"a" * 16, 7)
    assert arena.tree.pool.next_rank() == NOT_QUEUED
    arena.check()


def test_of_a_checkpoint_that_is_cut_only_the_end_is_said_to_go_next():
    arena = Arena(FULL)
    node = arena.written(TEXT[:40], 40)

    ((chosen, num_bytes),) = arena.tree.pool.upcoming(3 * 64 + 10)

    assert chosen is node
    assert num_bytes == 3 * 64 + 10
    ((table, pages),) = arena.tree.pool.pages_of(node, num_bytes)
    assert table.keys_of(pages) == hashes(TEXT[:40])[-3:]


def test_of_a_checkpoint_that_goes_whole_all_is_said_to_go_or_nothing():
    arena = Arena(STATES)
    node = arena.written(TEXT[:32], 32)
    own_bytes = 8 * 32 + 64 + 128

    assert arena.tree.pool.upcoming(own_bytes // 2) == []
    assert arena.tree.pool.upcoming(own_bytes * 9 // 10) == [(node, own_bytes)]
    pages = {table.spec.name: pages for table, pages in arena.tree.pool.pages_of(node, own_bytes)}
    assert {name: len(some) for name, some in pages.items()} == {"full": 8, "one": 1, "other": 1}


def turned_down(arena, text, num_tokens, kind=Kind.PROMPT_END):
    stand = arena.tree.last_node(hashes(text), FACTS, 0)
    is_turned_down = NewPoints(arena.tree).turns_down(
        stand, hashes(text), num_tokens, kind, Past.NEW_TEXT
    )
    arena.check()
    return is_turned_down


def by_saved_tokens(monkeypatch, cut):
    """An arena that evicted a checkpoint worth 32, by a policy that goes by tokens saved."""

    class BySavedTokens(EVICTION_POLICIES["lru"]):
        weighs_guesses = True

        def worth(self, candidate, _time):
            return candidate.saved_tokens

    monkeypatch.setitem(EVICTION_POLICIES, "saved", BySavedTokens)
    arena = Arena(cut, policy="saved")
    arena.written(TEXT[:32], 32)
    assert arena.tree.evict_one()
    return arena


def test_a_guess_worth_less_than_what_was_evicted_last_is_remembered_alone(monkeypatch):
    arena = by_saved_tokens(monkeypatch, WINDOWED)
    other = TEXT[::-1]

    assert turned_down(arena, other, 16)
    assert arena.tree.points.get(hashes(other)[3]) is not None
    assert arena.tree.node_at(hashes(other), 16) is None
    assert not turned_down(arena, other, 16, Kind.BRANCH)
    assert not turned_down(arena, other, 32)


def test_what_was_evicted_long_ago_is_no_measure_of_a_guess(monkeypatch):
    arena = by_saved_tokens(monkeypatch, WINDOWED)
    arena.tree.points.time += WINDOWED.large_page_bytes * 60

    assert not turned_down(arena, TEXT[::-1], 16)


@pytest.mark.parametrize("cut", [STATES, FULL], ids=["states", "full"])
def test_a_guess_that_cannot_wait_or_takes_no_memory_of_its_own_is_kept(monkeypatch, cut):
    arena = by_saved_tokens(monkeypatch, cut)

    assert not turned_down(arena, TEXT[::-1], 16)


def test_what_readers_of_an_evicted_point_fall_back_on_is_told_of_it():
    class Heirs(EVICTION_POLICIES["lru"]):
        def heir_of(self, candidate, _heir, _time):
            return candidate.point

    arena = Arena(WINDOWED)
    arena.tree._policy = Heirs()
    before = arena.written(TEXT[:40], 16)
    after = arena.written(TEXT[:40], 40)
    point = after.point

    arena.tree.evict(after)

    assert before.heir_of is point
    arena.tree.admit(hashes(TEXT), FACTS, hit_tokens=16, asked_tokens=16, computed_bytes=1)
    assert before.heir_of is None


def test_bytes_that_come_free_and_tokens_saved_are_those_of_one_checkpoint():
    arena = Arena(WINDOWED)
    first = arena.written(TEXT[:40], 16)
    second = arena.written(TEXT[:40], 40)
    for node in (first, second):
        arena.tree.pool.measure(node)

    # A window of 10 tokens is three pages; keys and values of the first are the second's too.
    assert (first.saved_tokens, first.own_bytes) == (16, 3 * 64)
    assert (second.saved_tokens, second.own_bytes) == (24, (6 + 3) * 64)
    lost = arena.tree.num_lost_bytes
    arena.tree.evict(second)
    assert arena.tree.num_lost_bytes - lost == second.own_bytes
    arena.tree.pool.measure(first)
    assert first.own_bytes == (4 + 3) * 64


# Those that wait, and that which is about to be read


def test_awaited_checkpoints_go_last_and_of_them_what_is_read_last_goes_first():
    arena = Arena(WINDOWED)
    for number, name in enumerate("abcd"):
        arena.written(name * 16, 16)
        if name != "b":
            arena.tree.pool.await_point((name * 16).encode(), (5, 0, 3, 9)[number])
        arena.check()
    arena.tree.pool.await_point(b"d" * 16, 1)

    gone = []
    while arena.tree.evict_one():
        arena.check()
        gone += [name for name in "abcd" if name not in gone and not arena.is_kept(name * 16, 16)]

    assert gone == ["b", "a", "c", "d"]


def test_a_checkpoint_made_while_it_is_waited_for_is_awaited():
    arena = Arena(WINDOWED)
    assert arena.tree.pool.await_point(b"a" * 16, 4)
    assert not arena.tree.pool.await_point(b"a" * 16, 2)
    arena.written("a" * 16, 16)
    arena.written("b" * 16, 16)

    arena.tree.evict_one()
    assert arena.is_kept("a" * 16, 16)
    assert not arena.tree.pool.await_no_more(b"a" * 16, 4)
    arena.check()
    assert arena.tree.pool.await_no_more(b"a" * 16, 2)
    arena.check()
    assert arena.tree.evict_one()
    assert not arena.is_kept("a" * 16, 16)


@pytest.mark.parametrize("num_others", [0, 2])
@pytest.mark.parametrize("is_upcoming", [False, True])
def test_a_protected_checkpoint_is_the_last_to_go(num_others, is_upcoming):
    arena = Arena(STATES)
    node = arena.written(TEXT[:16], 16)
    for number in range(num_others):
        arena.written(f"{number}" * 16, 16)
    arena.tree.pool.await_point(b"1" * 16, 1)
    if is_upcoming:
        assert arena.tree.pool.upcoming(1 << 20)[0][0] is node

    arena.tree.pool.protect(node)
    for _ in range(num_others):
        assert arena.tree.evict_one()
        assert arena.is_kept(TEXT, 16)
        arena.check()
    assert arena.tree.evict_one()
    assert not arena.is_kept(TEXT, 16)
    assert not arena.tree.evict_one()


# States of answers


def test_states_of_an_unread_answer_are_taken_and_its_checkpoint_is_forgotten():
    arena = Arena(STATES)
    node = arena.written(TEXT[:32], 32, Kind.ANSWER_END)
    pages = {table.index: table.page_of(TEXT[:32].encode()) for table in arena.states}

    taken = arena.tree.take_states(node)

    assert dict(taken) == pages
    arena.check()
    assert not arena.is_kept(TEXT, 32)
    assert arena.tree.points.get(TEXT[:32].encode()) is None
    for table in arena.states:
        assert table.pages.num_used == 1
        assert table.page_of(TEXT[:32].encode()) is None
    arena.release(taken)
    assert arena.tree.take_states(node) == []


def used(arena, text):
    """Give all pages of a text a user."""
    for table in arena.of_text:
        table.pages.share_pages([table.page_of(key) for key in arena.keys(table, text)])


def test_an_answer_that_grows_is_looked_up_from_its_last_checkpoint_on(monkeypatch):
    arena = Arena(STATES)
    assert arena.write(TEXT[:48])
    used(arena, TEXT[:48])
    node = arena.keep(TEXT, 32, Kind.ANSWER_END)
    taken = arena.tree.take_states(node, next_tokens=48)
    looked_up, get = [], ContentIndex.get
    monkeypatch.setattr(ContentIndex, "get", lambda *args: looked_up.append(args[1]) or get(*args))

    longer = arena.tree.keep(
        node, hashes(TEXT), FACTS, 48, Kind.ANSWER_END, Past.NEW_TEXT, state_pages=taken
    )
    arena.tree.prune(node)
    monkeypatch.undo()

    arena.check()
    assert looked_up
    assert not set(looked_up) & set(hashes(TEXT[:32]))
    assert node.is_removed
    assert not longer.is_removed
    for table in arena.of_text:
        pages = [table.page_of(key) for key in arena.keys(table, TEXT[:48])]
        assert all(table.pins[page] == 1 for page in pages)
        assert all(table.checkpoint_of[page] in (None, longer) for page in pages)
    assert arena.is_kept(TEXT, 48)
    assert not arena.is_kept(TEXT, 32)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_checkpoint_whose_states_were_taken_is_gone_if_no_later_one_is_kept(is_used):
    arena = Arena(STATES)
    assert arena.write(TEXT[:48])
    if is_used:
        used(arena, TEXT[:48])
    node = arena.keep(TEXT, 32, Kind.ANSWER_END)

    arena.release(arena.tree.take_states(node, next_tokens=48))
    arena.tree.prune(node)
    arena.tree.prune(node)

    arena.check()
    assert node.is_removed
    assert arena.tree.node_at(hashes(TEXT), 32) is None


def test_states_that_another_has_read_are_not_taken():
    arena = Arena(STATES)
    node = arena.written(TEXT[:32], 32, Kind.ANSWER_END)
    arena.tree.admit(hashes(TEXT), FACTS, hit_tokens=32, asked_tokens=56, computed_bytes=1)

    assert arena.tree.take_states(node) == []
    assert arena.is_kept(TEXT, 32)


def test_states_that_are_read_just_now_or_that_another_checkpoint_needs_are_not_taken():
    arena = Arena(STATES, ahead_tokens=1)
    node = arena.written(TEXT[:16] + "x" * 8, 16, Kind.ANSWER_END)
    table = arena.states[0]
    page = table.page_of(TEXT[:16].encode())
    table.pages.share_pages([page])
    assert arena.tree.take_states(node) == []
    table.release_pages([page])
    arena.written(TEXT[:16] + "y" * 8, 16)

    assert arena.tree.take_states(node) == []
    arena.check()
    assert arena.is_kept(TEXT[:16] + "x" * 8, 16)


# What is known of points


def test_a_request_reads_the_deepest_point_that_it_could_have_and_not_what_stands_in():
    arena = Arena(STATES)
    for num_tokens, kind in ((16, Kind.BRANCH), (32, Kind.PROMPT_END)):
        arena.written(TEXT[:40], num_tokens, kind)
    remembered = arena.tree.points
    points = {tokens: remembered.get(TEXT[:tokens].encode()) for tokens in (16, 32)}
    arena.tree.evict(arena.tree.node_at(hashes(TEXT), 32))

    admitted = arena.tree.admit(
        hashes(TEXT), FACTS, hit_tokens=16, asked_tokens=56, computed_bytes=1000
    )

    assert admitted.past == Past.TURN
    assert admitted.branches == []
    assert {tokens: point.past for tokens, point in points.items()} == {
        16: Past.NEW_TEXT,
        32: Past.READ,
    }
    assert remembered.time == 1000


def test_a_hit_beyond_every_known_point_reads_none_of_them():
    # As where a request that still runs has the rest of the text.
    arena = Arena(STATES)
    arena.written(TEXT[:40], 16, Kind.PROMPT_END)
    arena.tree.admit(hashes(TEXT), FACTS, hit_tokens=32, asked_tokens=56, computed_bytes=1000)

    assert arena.tree.points.get(TEXT[:16].encode()).past == Past.NEW_TEXT


def test_branches_beyond_a_hit_are_told_to_whoever_passes_them_again():
    arena = Arena(STATES)
    for num_tokens, kind in ((16, Kind.BRANCH), (24, Kind.BRANCH), (32, Kind.PROMPT_END)):
        arena.written(TEXT[:40], num_tokens, kind)
    evict_all(arena)

    admitted = arena.tree.admit(
        hashes(TEXT[:28]), FACTS, hit_tokens=0, asked_tokens=28, computed_bytes=1
    )

    assert admitted.past == Past.KNOWN_TEXT
    assert admitted.branches == [16, 24]
    new = arena.tree.admit(hashes("z" * 16), FACTS, hit_tokens=0, asked_tokens=16, computed_bytes=1)
    assert (new.past, new.branches) == (Past.NEW_TEXT, [])


@pytest.mark.parametrize("cut", [FULL, TWO_SIZES, MIXED], ids=lambda cut: cut.name)
def test_clear_forgets_all_checkpoints_and_what_comes_after_stands_at_the_root(cut):
    arena = Arena(cut, 80)
    node = arena.written(TEXT[:32], 16)
    arena.written(TEXT[:32], 32)
    for table in arena.tables:
        table.cache.clear()
    arena.tree.clear()
    arena.allocator.large_pages.close_reclaimable()
    arena.check()

    assert not arena.tree.evict_one()
    assert arena.write(TEXT[:32])
    assert arena.keep(TEXT[:32], 32, stand=node) is not None
    arena.check()


# The check itself


def spoil_pins(arena, node):
    arena.tables[0].pins[node.segment[0][0]] += 1


def spoil_pool(arena, node):
    arena.tree.pool._nodes.remove(node)


def spoil_children(_arena, node):
    node.parent.num_children += 1


def spoil_rank(arena, node):
    table = arena.tables[0]
    table.pages.rerank([node.segment[0][0]], [3])


def spoil_segment(arena, node):
    table, page = arena.tables[0], node.segment[0].pop()
    table.pins[page] = 0
    table.pages.rerank([page], [3])


def spoil_name(_arena, node):
    node.key = b"another"


@pytest.mark.parametrize(
    "spoil",
    [spoil_pins, spoil_pool, spoil_children, spoil_rank, spoil_segment, spoil_name],
    ids=lambda spoil: spoil.__name__,
)
def test_the_check_finds_what_is_wrong(spoil):
    arena = Arena(FULL)
    arena.written("a" * 16, 16)
    node = arena.written(TEXT[:16], 16)

    spoil(arena, node)

    with pytest.raises(InvariantError):
        arena.tree.check()


# Random sequences


class Random:
    """Texts over few letters, so that they share prefixes everywhere; all that can be done."""

    def __init__(self, cut, seed, *, ahead_tokens, policy, num_host_large_pages):
        self.random = random.Random(seed)
        self.arena = Arena(
            cut,
            self.random.choice([12, 25, 60]),
            ahead_tokens=ahead_tokens,
            policy=policy,
            num_host_large_pages=num_host_large_pages,
        )
        self.align = self.arena.tree.align_tokens
        self.stands = {}  # text -> a node of it, which may be gone
        self.awaited = []
        self.has_images = any(table.policy.names_images for table in self.arena.tables)

    def text(self):
        choice = self.random.choice
        parts = ["aaaa", "bbbb", "aaab"]
        return "".join(choice(parts) for _ in range(self.random.randint(1, 12)))

    def keep(self):
        text = self.text()
        if not self.arena.write(text):
            return
        most = len(text) - self.arena.tree.ahead_tokens
        places = range(self.align, most + 1, self.align)
        if not places:
            return
        num_tokens = self.random.choice(places)
        kind = self.random.choice(list(Kind)[:4])
        stand = self.stands.get(text[: num_tokens // 2])
        node = self.arena.keep(text, num_tokens, kind, self.random.choice(list(Past)), stand=stand)
        if node is not None:
            assert node.num_tokens == num_tokens
            for end in range(num_tokens + self.arena.tree.ahead_tokens, len(text) + 1):
                self.stands[text[:end]] = node
            assert self.arena.is_kept(text, num_tokens)

    def read(self):
        text = self.text()
        found = [
            tokens
            for tokens in range(self.align, len(text) + 1, self.align)
            if self.arena.is_kept(text, tokens)
        ]
        self.arena.tree.admit(
            hashes(text),
            FACTS,
            hit_tokens=max(found, default=0),
            asked_tokens=len(text),
            computed_bytes=self.random.choice([0, 64, 4096]),
        )

    def evict(self):
        num_before = len(self.arena.tree.pool._nodes)
        assert self.arena.tree.evict_one() or not num_before

    def evict_any(self):
        kept = [node for node in self.arena.tree._by_key.values() if node.is_kept]
        if kept:
            self.arena.tree.evict(self.random.choice(kept))

    def take_room(self):
        table, tree = self.random.choice(self.arena.tables), self.arena.tree
        num_pages = self.random.choice([1, 1, self.random.randint(2, 12)])
        opens_each = table.spec.small_pages_per_large_page == 1
        costs_checkpoint = any(
            table.pages.costs_checkpoint(num_taken)
            for num_taken in range(num_pages if opens_each else 1)
        )
        before = tree.num_evicted, tree.num_lost_bytes
        pages = self.arena.take(table.index, num_pages)
        self.arena.check()
        if pages is not None:
            evicts = (tree.num_evicted, tree.num_lost_bytes) != before
            # A page that no checkpoint needs is counted once, though only one page finds it.
            assert evicts or not costs_checkpoint
            assert evicts == costs_checkpoint or num_pages > 1
        if pages is not None:
            table.pages.release(pages)

    def wait(self):
        key = self.random.choice([*self.arena.tree._by_key, self.text().encode()])
        self.awaited.append((key, self.random.randint(0, 9)))
        self.arena.tree.pool.await_point(*self.awaited[-1])

    def wait_no_more(self):
        if self.awaited:
            index = self.random.randrange(len(self.awaited))
            self.arena.tree.pool.await_no_more(*self.awaited.pop(index))

    def protect(self):
        kept = [node for node in self.arena.tree._by_key.values() if node.is_kept]
        self.arena.tree.pool.protect(self.random.choice([*kept, None]))

    def take_answer(self):
        nodes = [node for node in self.arena.tree._by_key.values() if isinstance(node.key, bytes)]
        if nodes and self.arena.states:
            self.arena.release(self.arena.tree.take_states(self.random.choice(nodes)))

    def look_ahead(self):
        for node, num_bytes in self.arena.tree.pool.upcoming(self.random.choice([0, 100, 1000])):
            assert node.is_kept
            for table, pages in self.arena.tree.pool.pages_of(node, num_bytes):
                assert all(table.pins[page] for page in pages)

    def image(self):
        content, num_pages = self.random.choice([(b"cat", 3), (b"dog", 1)])
        if self.has_images and self.arena.write_image(content, num_pages):
            self.arena.keep_image(content, num_pages)

    def step(self):
        actions = [self.keep] * 6 + [self.read] * 2 + [self.evict, self.evict_any, self.take_room]
        actions += [self.wait, self.wait_no_more, self.protect, self.take_answer, self.look_ahead]
        self.random.choice([*actions, self.image])()
        self.arena.check()


@pytest.mark.parametrize(
    ("cut", "hit_tokens", "most_tokens"),
    [
        pytest.param(FULL, 128, 16, id="attention alone"),
        # Windows also get each new token.
        pytest.param(WINDOWED, 128, 8, id="windows"),
        # 8 bytes a token, and states of 192 bytes.
        pytest.param(STATES, 256, 8, id="states"),
        pytest.param(STATES, 128, -1, id="few tokens before a state"),
        pytest.param(STATES_ALONE, 128, -1, id="states alone"),
    ],
)
def test_a_prompt_takes_little_up_to_an_eighth_of_what_it_finds(cut, hit_tokens, most_tokens):
    parts = Arena(cut).tree.parts
    takes_little = [
        parts.takes_little(hit_tokens=hit_tokens, asked_tokens=hit_tokens + more)
        for more in range(20)
    ]
    assert takes_little == [more <= most_tokens for more in range(20)]


def skips(arena, text, num_tokens, *, hit_tokens=0, kind=Kind.ANSWER_END):
    stand = arena.tree.last_node(hashes(text), FACTS, hit_tokens)
    key = text[:num_tokens].encode()
    point = NewPoints(arena.tree).skips_states(stand, key, num_tokens, kind, Past.NEW_TEXT)
    arena.check()
    assert point is None or arena.tree.points.get(key) is point
    return point is not None


def test_states_worth_less_than_what_goes_next_are_skipped_and_their_point_is_known(monkeypatch):
    arena = by_saved_tokens(monkeypatch, STATES)
    arena.written(TEXT[:32], 32)

    assert not skips(arena, TEXT[::-1], 32)
    assert skips(arena, TEXT[::-1], 16)
    assert arena.tree.points.get(TEXT[::-1][:16].encode()).kind == Kind.ANSWER_END
    # Of a text that is kept up to 32 tokens, another state saves what comes after these.
    assert skips(arena, TEXT, 48, hit_tokens=32)
    assert not skips(arena, TEXT, 48)
    assert arena.is_kept(TEXT, 32)


def test_states_are_not_skipped_if_a_request_waits_for_them_or_the_policy_cannot_weigh(
    monkeypatch,
):
    arena = by_saved_tokens(monkeypatch, STATES)
    arena.written(TEXT[:32], 32)
    key = TEXT[::-1][:16].encode()
    arena.tree.pool.await_point(key, 3)

    assert not skips(arena, TEXT[::-1], 16)
    arena.tree.pool.await_no_more(key, 3)
    assert skips(arena, TEXT[::-1], 16)

    arena = Arena(STATES, policy="lru")
    arena.written(TEXT[:32], 32)
    assert not skips(arena, TEXT[::-1], 16)


def test_states_are_skipped_if_only_what_others_wait_for_could_make_room(monkeypatch):
    arena = by_saved_tokens(monkeypatch, STATES)
    arena.written(TEXT[:32], 32)
    arena.tree.pool.await_point(TEXT[:32].encode(), 3)

    assert skips(arena, TEXT[::-1], 48)


@pytest.mark.parametrize("ahead_tokens", [0, 1, 9])
@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
@pytest.mark.parametrize("num_drawn", [3, 64])
def test_checkpoints_are_whole_whatever_is_done(cut, ahead_tokens, num_drawn, monkeypatch):
    monkeypatch.setattr(eviction_pool, "NUM_DRAWN", num_drawn)
    for seed in range(6):
        machine = Random(
            cut,
            seed,
            ahead_tokens=ahead_tokens,
            policy=sorted(EVICTION_POLICIES)[seed % 2],
            num_host_large_pages=(0, 6, 40)[seed % 3],
        )
        for _ in range(80):
            machine.step()
        for key, position in machine.awaited:
            machine.arena.tree.pool.await_no_more(key, position)
        machine.arena.tree.pool.protect(None)
        evict_all(machine.arena)
        assert not machine.arena.tree._by_key
        assert all(not any(table.pins) for table in machine.arena.tables)

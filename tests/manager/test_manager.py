"""The manager: admission, hits, states, reports, refusals."""

import pytest

from jenga.errors import InvariantError, OutOfPagesError
from jenga.eviction.learned import LearnedReuse
from jenga.eviction.policy import LeastRecentlyUsed
from jenga.manager import Manager
from jenga.policies import Image, RequestFacts
from jenga.tables.request import MISSING
from tests.machines.geometries import (
    HYBRID,
    STATES,
    WINDOWED,
    cross,
    embedding,
    full,
    geometry,
    sliding,
    state,
)

TWO_TYPES = geometry("two types", full(tokens=16, per_large=1), sliding(tokens=16, window=32))


def hashes(num_tokens, *, name="p", hash_tokens=16):
    return [f"{name}{end}".encode() for end in range(num_tokens // hash_tokens)]


def manager_of(cut, num_large_pages, **options):
    return Manager(cut, num_large_pages=num_large_pages, **options)


def compute(manager, name, num_tokens, *, prefix="p", chunk=None, free=True):
    """Run a prompt in chunks, from what is cached, and return what was hit."""
    keys = hashes(num_tokens, name=prefix)
    hit = manager.lookup(keys, max_tokens=num_tokens - 1)
    processed, first = hit.num_tokens, True
    while processed < num_tokens:
        manager.new_step()
        end = min(num_tokens, processed + (chunk or num_tokens))
        manager.allocate(
            name, num_tokens=end, num_processed_tokens=processed, hit=hit if first else None
        )
        manager.commit(name, keys, end)
        processed, first = end, False
    if free:
        manager.free(name)
    manager.check()
    return hit


@pytest.mark.parametrize("num_host_large_pages", [0, 60])
@pytest.mark.parametrize("per_large", [1, 4])
def test_an_image_shown_twice_is_found_twice(per_large, num_host_large_pages):
    cut = geometry("images", full(tokens=4, slot_bytes=24 * per_large), cross(per_large=per_large))
    manager = manager_of(
        cut,
        20,
        prefix_caching=True,
        hash_tokens=4,
        num_host_large_pages=num_host_large_pages,
    )
    images = tuple(Image(start_token=start, num_tokens=6, content=b"cat") for start in (0, 7))
    facts = RequestFacts(prompt_tokens=16, images=images)

    def run(name):
        hit = manager.lookup(hashes(16, hash_tokens=4), max_tokens=15, facts=facts)
        manager.allocate(name, num_tokens=16, hit=hit)
        manager.commit(name, hashes(16, hash_tokens=4), 16)
        manager.check()
        return list(hit.pages[1])

    assert run("a") == []
    manager.free("a")
    if num_host_large_pages:
        compute(manager, "taker", 4 * 19, prefix="q")  # with hashes that none has
        hit = manager.lookup([], max_tokens=15, facts=facts)
        assert list(hit.host_pages[1]) == list(range(len(hit.pages[1])))
        assert set(hit.pages[1]) == {MISSING}
    first, second = run("b"), run("c")
    for found in (first, second):
        assert len(found) == 4
        assert found[:2] == found[2:]
    manager.free("b")
    manager.check()
    manager.free("c")
    manager.check()


def cats(*starts):
    """Facts of a prompt that shows one image of 6 tokens at several places."""
    images = tuple(Image(start_token=start, num_tokens=6, content=b"cat") for start in starts)
    return RequestFacts(prompt_tokens=32, images=images)


def with_images(image_table, num_large_pages=40):
    """A manager of a text table and one of images, which records what can be found."""
    large_bytes = image_table.small_page_bytes * image_table.small_pages_per_large_page
    return manager_of(
        geometry("images", full(tokens=4, slot_bytes=large_bytes // 4), image_table),
        num_large_pages,
        prefix_caching=True,
        hash_tokens=4,
        records_changes=True,
    )


def show(manager, name, facts, *, free=True, looks_up=True):
    """Run a prompt with images in one step, under hashes that no other request has."""
    keys = hashes(32, name=name, hash_tokens=4)
    hit = manager.lookup(keys, max_tokens=31, facts=facts) if looks_up else None
    manager.allocate(name, num_tokens=32, facts=facts, hit=hit)
    manager.commit(name, keys, 32)
    manager.new_step()
    if free:
        manager.release_passed(name, 32)
        manager.free(name)
    manager.check()


IMAGE_TABLES = [
    cross(per_large=1),
    cross(per_large=4),
    embedding(per_large=1),
    embedding(per_large=4),
]


@pytest.mark.parametrize(
    "table", IMAGE_TABLES, ids=lambda t: f"{t.name}_{t.small_pages_per_large_page}"
)
def test_of_an_image_that_a_request_computed_twice_others_find_one_unused_copy(table):
    manager = with_images(table)
    manager.allocate("twice", num_tokens=32, facts=cats(0, 8))
    show(manager, "once", cats(0))

    manager.commit("twice", hashes(32, name="twice", hash_tokens=4), 32)
    manager.check()

    found = manager.lookup([], max_tokens=31, facts=cats(0)).pages[1]
    assert len(set(found)) == 2
    show(manager, "others", cats(0, 8, 16), looks_up=False, free=False)
    used = {*found, *manager.page_table("twice", 1)}
    assert used.isdisjoint(manager.page_table("others", 1))


@pytest.mark.parametrize(
    "table", IMAGE_TABLES, ids=lambda t: f"{t.name}_{t.small_pages_per_large_page}"
)
def test_a_waiting_request_may_show_a_cached_image_twice(table):
    manager = with_images(table)
    show(manager, "once", cats(0))

    manager.announce("twice", [], num_tokens=32, facts=cats(0, 8))
    for _ in range(3):
        manager.new_step()
        manager.check()

    manager.withdraw("twice")
    manager.check()
    assert manager.lookup([], max_tokens=31, facts=cats(0)).has_missing == (False, False)


@pytest.mark.parametrize(
    "table", IMAGE_TABLES, ids=lambda t: f"{t.name}_{t.small_pages_per_large_page}"
)
def test_a_request_may_pass_an_image_that_it_found_twice_in_one_step(table):
    manager = with_images(table)
    show(manager, "once", cats(0))

    show(manager, "twice", cats(0, 8))

    assert len(manager.lookup([], max_tokens=31, facts=cats(0)).pages[1]) == 2


def test_an_image_shown_twice_is_said_to_be_found_once():
    manager = with_images(cross())

    show(manager, "twice", cats(0, 8))

    keys = [key for change in manager.take_changes() if change.table_index for key in change.keys]
    assert keys == [(b"cat", 0), (b"cat", 1)]


def test_the_gate_counts_an_image_found_twice_as_held_once():
    manager = with_images(embedding(per_large=1), num_large_pages=1 + 12)
    show(manager, "once", cats(0))
    images = (*cats(0, 6).images, Image(start_token=12, num_tokens=16, content=b"dog"))
    facts = RequestFacts(prompt_tokens=28, images=images)
    hit = manager.lookup([], max_tokens=27, facts=facts)

    # 7 pages of text, the 2 of the image that it shows twice, and 4 of the other one.
    with pytest.raises(OutOfPagesError):
        manager.allocate("both", num_tokens=7, hit=hit, full_tokens=28)


# Bad input


def test_manager_refuses_an_arena_without_a_large_page_per_table():
    with pytest.raises(ValueError, match=r"num_large_pages must be at least 4.* got 3"):
        manager_of(HYBRID, 3)


@pytest.mark.parametrize("hash_tokens", [0, -16])
def test_manager_refuses_hashes_of_no_tokens(hash_tokens):
    with pytest.raises(ValueError, match="hash_tokens must be a positive integer"):
        manager_of(HYBRID, 8, hash_tokens=hash_tokens)


def test_manager_refuses_hashes_that_do_not_divide_pages():
    with pytest.raises(ValueError, match=r"hash_tokens must divide.*16 tokens per page.*got 24"):
        manager_of(TWO_TYPES, 8, prefix_caching=True, hash_tokens=24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be a positive integer"),
        ({"num_tokens": -3}, "num_tokens must be a positive integer"),
        ({"num_tokens": 4, "num_processed_tokens": 5}, "no less than num_processed_tokens"),
        ({"num_tokens": 4, "num_processed_tokens": -1}, "num_processed_tokens must be at least 0"),
        ({"num_tokens": 4, "reserve_large_pages": -1}, "reserve_large_pages must be at least 0"),
    ],
)
def test_allocate_refuses_token_counts_that_contradict_each_other(arguments, message):
    manager = manager_of(WINDOWED, 8)

    with pytest.raises(ValueError, match=message):
        manager.allocate("r", **arguments)

    manager.check()
    assert manager.request_tokens() == {}


def test_allocate_refuses_a_hit_for_a_running_request():
    manager = manager_of(TWO_TYPES, 20, prefix_caching=True)
    compute(manager, "a", 64)
    hit = manager.lookup(hashes(64), max_tokens=63)
    manager.allocate("b", num_tokens=64, hit=hit)

    with pytest.raises(ValueError, match="hit must be None for request 'b'"):
        manager.allocate("b", num_tokens=80, hit=hit)
    with pytest.raises(ValueError, match="hit must be None for request 'b'"):
        manager.allocate("b", num_tokens=64, hit=hit)


@pytest.mark.parametrize("num_processed_tokens", [-1, 5])
def test_allocate_refuses_processed_tokens_where_no_page_is_needed(num_processed_tokens):
    manager = manager_of(TWO_TYPES, 8)
    manager.allocate("r", num_tokens=4)

    with pytest.raises(ValueError, match=f"got .*{num_processed_tokens}"):
        manager.allocate("r", num_tokens=4, num_processed_tokens=num_processed_tokens)


def test_commit_refuses_tokens_without_slots_before_any_page_is_found():
    manager = manager_of(TWO_TYPES, 20, prefix_caching=True)
    manager.allocate("r", num_tokens=40)

    for keys in (hashes(64), hashes(32), []):
        with pytest.raises(
            ValueError, match="at most the 40 that request 'r' has slots for, got 64"
        ):
            manager.commit("r", keys, 64)

    manager.commit("r", hashes(32), 40)
    assert manager.committed_tokens("r") == 32
    manager.check()


def test_allocate_refuses_processed_tokens_without_slots():
    manager = manager_of(WINDOWED, 8)
    manager.allocate("r", num_tokens=4)

    with pytest.raises(ValueError, match="within the 4 tokens"):
        manager.allocate("r", num_tokens=9, num_processed_tokens=5)
    with pytest.raises(ValueError, match="within the 4 tokens"):
        manager.release_passed("r", 5)


@pytest.mark.parametrize("question", ["free", "page_tables", "committed_tokens"])
def test_a_request_that_does_not_run_is_refused_by_name(question):
    with pytest.raises(ValueError, match="request_id must name a running request, got 'x'"):
        getattr(manager_of(WINDOWED, 8), question)("x")


def test_allocate_refuses_a_hit_whose_pages_were_evicted():
    manager = manager_of(TWO_TYPES, 9, prefix_caching=True)
    compute(manager, "a", 64)
    hit = manager.lookup(hashes(64), max_tokens=63)
    compute(manager, "b", 64, prefix="q")

    with pytest.raises(ValueError, match="hit must be looked up again"):
        manager.allocate("c", num_tokens=64, hit=hit)
    manager.check()


# Capacity


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    manager = manager_of(TWO_TYPES, 11)

    assert manager.can_ever_fit(96, chunk_tokens=16)
    assert not manager.can_ever_fit(128, chunk_tokens=16)
    with pytest.raises(ValueError, match=r"fits in 10 large pages.*got 128.*full 8, sliding 4"):
        manager.capacity.require_fit(128, chunk_tokens=16)


def test_the_longest_request_fits_and_one_token_more_does_not():
    manager = manager_of(TWO_TYPES, 11)

    longest = manager.capacity.max_tokens(chunk_tokens=16, limit_tokens=10_000)

    assert manager.can_ever_fit(longest, chunk_tokens=16)
    assert not manager.can_ever_fit(longest + 1, chunk_tokens=16)
    processed = 0
    while processed < longest:
        num_tokens = min(longest, processed + 16)
        manager.allocate("r", num_tokens=num_tokens, num_processed_tokens=processed)
        processed = num_tokens
    manager.check()


def test_the_gate_refuses_what_would_not_fit_in_full_and_counts_windows_as_windows():
    manager = manager_of(TWO_TYPES, 11)

    with pytest.raises(OutOfPagesError) as refusal:
        manager.allocate("r", num_tokens=16, full_tokens=128)
    assert refusal.value.needed_pages == (8, 4)
    assert refusal.value.needed_large_pages == 12
    assert refusal.value.available_large_pages == 10
    assert manager.request_tokens() == {}

    manager.allocate("r", num_tokens=16, full_tokens=96)
    manager.check()


def test_the_gate_counts_the_windows_of_all_steps_in_flight():
    # The first step has room for 16 tokens, later ones for 32, and two are in flight at a time.
    needed = {}
    for in_flight_tokens in (0, 32, 64, 10_000):
        manager = manager_of(TWO_TYPES, 3, in_flight_tokens=in_flight_tokens)
        with pytest.raises(OutOfPagesError) as refusal:
            manager.allocate("r", num_tokens=16, full_tokens=128)
        needed[in_flight_tokens] = refusal.value.needed_pages

    # A window of 32 tokens, of which the last is a step's first one, lies in so many pages.
    assert needed == {0: (8, 4), 32: (8, 5), 64: (8, 7), 10_000: (8, 8)}


def test_a_prompt_that_fits_in_no_step_but_the_last_is_held_to_its_end():
    longest = {}
    for in_flight_tokens in (0, 64):
        manager = manager_of(TWO_TYPES, 1 + 8 + 7, in_flight_tokens=in_flight_tokens)
        manager.allocate("r", num_tokens=16, full_tokens=128)
        manager.allocate("r", num_tokens=16 + 32, num_processed_tokens=0)
        for end in range(80, 129, 32):
            # The step before the last one is still to be processed.
            manager.allocate("r", num_tokens=end, num_processed_tokens=end - 64)
        manager.check()
        longest[in_flight_tokens] = manager.request_tokens()["r"]

    assert longest == {0: 112, 64: 112}


def test_an_admission_leaves_what_others_will_take_for_their_prompts():
    cut = geometry("full", full(tokens=16, per_large=1))
    manager = manager_of(cut, 1 + 14)
    manager.allocate("first", num_tokens=64, full_tokens=160)

    # 10 of 14 pages are free, but the first will take 6 of them.
    with pytest.raises(OutOfPagesError) as refusal:
        manager.allocate("second", num_tokens=80, full_tokens=80)
    assert refusal.value.needed_large_pages == 6 + 5
    assert manager.request_tokens() == {"first": 64}
    manager.allocate("second", num_tokens=64, full_tokens=64)

    manager.allocate("first", num_tokens=160, num_processed_tokens=64)
    manager.free("second")
    manager.allocate("third", num_tokens=64, full_tokens=64)
    manager.check()


def test_nothing_is_left_to_a_request_that_has_ended():
    cut = geometry("full", full(tokens=16, per_large=1))
    manager = manager_of(cut, 1 + 14)
    manager.allocate("first", num_tokens=64, full_tokens=160)
    manager.free("first")

    manager.allocate("second", num_tokens=224, full_tokens=224)

    manager.check()


@pytest.mark.parametrize("last_tokens", [16, 32])
def test_nothing_is_left_to_a_request_that_has_all_pages_of_its_prompt(last_tokens):
    cut = geometry("full", full(tokens=16, per_large=1))
    manager = manager_of(cut, 1 + 14)
    start = 160 - last_tokens
    manager.allocate("first", num_tokens=start, full_tokens=160)
    manager.allocate("first", num_tokens=160, num_processed_tokens=start)

    # It holds 10 of 14 pages and will take no more for its prompt.
    manager.allocate("second", num_tokens=64, full_tokens=64)

    manager.check()


def test_the_check_finds_pages_promised_to_a_request_that_does_not_run():
    cut = geometry("full", full(tokens=16, per_large=1))
    manager = manager_of(cut, 1 + 14)
    manager.allocate("first", num_tokens=64, full_tokens=160)
    manager.check()
    promises = dict(manager._allocation._promises)
    manager.free("first")
    manager._allocation._promises.update(promises)

    with pytest.raises(InvariantError, match="promised to request 'first'"):
        manager.check()


def test_a_prompt_of_several_steps_leaves_room_for_those_that_run_to_grow():
    cut = geometry("full", full(tokens=16, per_large=1))
    manager = manager_of(cut, 1 + 14)
    for name in ("a", "b"):
        manager.allocate(name, num_tokens=16)

    # 12 pages are free; each of the two may need one before the prompt is read.
    with pytest.raises(OutOfPagesError):
        manager.allocate("long", num_tokens=16, full_tokens=176)
    manager.allocate("short", num_tokens=160, full_tokens=160)
    manager.free("short")
    manager.allocate("long", num_tokens=16, full_tokens=160)

    manager.check()


def test_the_gate_counts_a_hit_as_held():
    manager = manager_of(TWO_TYPES, 12, prefix_caching=True)
    compute(manager, "a", 112, chunk=16)
    hit = manager.lookup(hashes(112), max_tokens=111)
    assert hit.num_tokens == 96

    manager.allocate("b", num_tokens=112, hit=hit, full_tokens=112)

    manager.check()


def test_the_reserve_is_left_alone():
    manager = manager_of(TWO_TYPES, 11)

    with pytest.raises(OutOfPagesError):
        manager.allocate("r", num_tokens=64, reserve_large_pages=3)
    manager.allocate("r", num_tokens=64, reserve_large_pages=2)


# Hits


def test_hits_end_at_any_16_tokens_though_states_are_large_and_windows_are_cut():
    manager = manager_of(TWO_TYPES, 60, prefix_caching=True)
    compute(manager, "a", 112, chunk=16)

    for shared_tokens in range(16, 112, 16):
        keys = hashes(shared_tokens) + hashes(64, name="other")
        hit = manager.lookup(keys, max_tokens=shared_tokens + 63)
        assert hit.num_tokens == shared_tokens


def test_a_hit_reuses_only_the_window_of_a_sliding_type():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    compute(manager, "a", 128)

    hit = manager.lookup(hashes(128), max_tokens=127)

    full_pages, window_pages = hit.pages
    assert all(full_pages)
    assert [bool(page) for page in window_pages] == [False] * 5 + [True] * 2


def test_a_hit_is_limited_by_the_type_that_lost_pages():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    compute(manager, "a", 128, chunk=16)
    for table_pages in (manager._tables[1],):
        lost = table_pages.cache.get(hashes(128)[-2])
        table_pages.cache.forget([lost])

    hit = manager.lookup(hashes(128), max_tokens=127)

    assert (hit.num_tokens, hit.limit) == (96, 1)


def test_the_last_token_is_never_hit_and_short_prompts_hit_nothing():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    compute(manager, "a", 64)

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 48
    assert manager.lookup(hashes(16), max_tokens=15).num_tokens == 0
    assert manager.lookup([], max_tokens=100).num_tokens == 0


def test_two_requests_share_pages_while_both_run():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    compute(manager, "a", 64, free=False)
    compute(manager, "b", 64, free=False)

    shared = [
        set(a) & set(b) - {0}
        for a, b in zip(manager.page_tables("a"), manager.page_tables("b"), strict=True)
    ]

    # 48 tokens are hit; of the sliding type only the pages that token 48 reads.
    assert [len(pages) for pages in shared] == [3, 2]
    manager.free("a")
    manager.check()


def test_without_prefix_caching_nothing_is_hit_or_kept():
    manager = manager_of(TWO_TYPES, 40)
    compute(manager, "a", 64)

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 0
    assert manager.memory().empty_large_bytes == 39 * TWO_TYPES.large_page_bytes


def test_reset_forgets_everything_unless_requests_run():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    compute(manager, "a", 64, free=False)
    assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 48

    assert manager.reset_prefix_cache()

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 0
    manager.check()


def test_eviction_takes_what_windows_passed_and_then_whole_checkpoints_of_the_older_text():
    manager = manager_of(TWO_TYPES, 17, prefix_caching=True)
    compute(manager, "old", 64, prefix="old")
    compute(manager, "new", 64, prefix="new")

    kept = []
    for number, num_tokens in enumerate((16, 16, 32)):
        manager.new_step()
        manager.allocate(f"filler {number}", num_tokens=num_tokens)
        manager.check()
        kept.append(
            tuple(
                manager.lookup(hashes(64, name=name), max_tokens=64).num_tokens
                for name in ("old", "new")
            )
        )

    # Two pages that the windows of both had passed; then two that only the end of the older text
    # needs; then the five of where that could be asked again.
    assert kept == [(64, 64), (48, 64), (0, 64)]


@pytest.mark.parametrize("policy", [LearnedReuse, LeastRecentlyUsed])
def test_what_windows_pass_goes_before_an_older_whole_prefix(policy):
    manager = manager_of(TWO_TYPES, 220, prefix_caching=True, eviction_policy=policy())
    compute(manager, "old", 512, prefix="old")

    # Of both types it has 256 pages in all, and holds 146 at most.
    compute(manager, "long", 2048, prefix="long", chunk=256)

    assert manager.lookup(hashes(512, name="old"), max_tokens=512).num_tokens == 512


def test_another_question_hits_where_the_text_before_it_ends():
    manager = manager_of(TWO_TYPES, 180, prefix_caching=True)
    text = hashes(1984)
    compute(manager, "a", 2048, chunk=256)
    compute(manager, "other", 256, prefix="other")

    hit = manager.lookup([*text, *hashes(64, name="question")], max_tokens=2047)

    assert hit.num_tokens == 1984


def test_a_branch_is_known_where_its_windows_are_gone_and_kept_from_then_on():
    manager = manager_of(TWO_TYPES, 330, prefix_caching=True)
    compute(manager, "a", 2048, chunk=256)
    compute(manager, "b", 2048, prefix="b", chunk=256)
    forked = [[*hashes(512), *hashes(512, name=name)] for name in ("c", "d")]

    hit = manager.lookup(forked[0], max_tokens=1023)
    manager.allocate("c", num_tokens=1024, hit=hit)
    manager.commit("c", forked[0], 1024)
    manager.new_step()
    manager.free("c")

    assert (hit.num_tokens, hit.branch_tokens) == (0, 512)
    assert manager.lookup(forked[1], max_tokens=1023).num_tokens == 512
    manager.check()


# Images


def test_an_image_is_found_again_behind_another_text():
    cut = geometry("cross", full(tokens=16, slot_bytes=16), cross(tokens=16, slot_bytes=16))
    manager = manager_of(cut, 30, prefix_caching=True)
    image = Image(start_token=0, num_tokens=40, content=b"cat")
    first = RequestFacts(prompt_tokens=20, images=(image,))
    manager.allocate("a", num_tokens=20, facts=first)
    manager.commit("a", hashes(20), 20)
    pages = manager.page_table("a", 1)
    manager.free("a")

    second = RequestFacts(
        prompt_tokens=30,
        images=(Image(start_token=0, num_tokens=9, content=b"dog"), image),
    )
    hit = manager.lookup(hashes(30, name="other"), max_tokens=29, facts=second)
    manager.allocate("b", num_tokens=30, hit=hit)

    assert hit.num_tokens == 0
    assert list(hit.pages[1]) == [MISSING, *pages]
    assert manager.page_table("b", 1)[1:] == pages
    manager.check()


def test_an_image_is_found_behind_fewer_tokens_than_a_hash_covers():
    cut = geometry("cross", full(tokens=16, slot_bytes=16), cross(tokens=16, slot_bytes=16))
    manager = manager_of(cut, 30, prefix_caching=True)
    facts = RequestFacts(
        prompt_tokens=4, images=(Image(start_token=0, num_tokens=40, content=b"cat"),)
    )
    manager.allocate("a", num_tokens=4, facts=facts)

    manager.commit("a", [], 0)
    assert list(manager.lookup([], max_tokens=3, facts=facts).pages[1]) == []
    manager.commit("a", [], 4)
    hit = manager.lookup([], max_tokens=3, facts=facts)
    manager.allocate("b", num_tokens=4, hit=hit)

    assert manager.page_table("a", 1) == manager.page_table("b", 1)
    assert (hit.num_tokens, len(hit.pages[1])) == (0, 3)
    manager.check()


def test_pages_wait_for_the_hashes_that_name_them():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    manager.allocate("a", num_tokens=64)

    manager.commit("a", hashes(16), 64)
    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 16
    manager.commit("a", hashes(64), 64)

    assert manager.lookup(hashes(64), max_tokens=63).num_tokens == 48
    manager.check()


# States


def hybrid(num_large_pages=60, **options):
    cut = geometry("hybrid", full(tokens=16, slot_bytes=16, per_large=2), state(slot_bytes=512))
    return manager_of(cut, num_large_pages, prefix_caching=True, **options)


def test_without_a_kept_state_a_hybrid_hits_nothing():
    manager = hybrid()
    compute(manager, "a", 64)

    hit = manager.lookup(hashes(64), max_tokens=63)

    assert (hit.num_tokens, hit.branch_tokens, hit.limit) == (0, 48, 1)


def test_a_kept_state_is_hit_and_copied():
    manager = hybrid()
    compute(manager, "a", 48, free=False)
    running = manager.page_table("a", 1)[0]

    assert manager.keep_state("a", hashes(48)[-1], 48)
    (kept,) = manager.take_copies()
    manager.free("a")
    hit = manager.lookup(hashes(64), max_tokens=63)
    manager.allocate("b", num_tokens=64, hit=hit)
    (copied,) = manager.take_copies()

    assert kept.source == running
    assert hit.num_tokens == 48
    assert copied.source == kept.target
    assert copied.target == manager.page_table("b", 1)[0] != kept.target
    manager.check()


def test_what_running_requests_may_take_next_is_counted_in_large_pages():
    cut = geometry(
        "hybrid",
        full("a", tokens=16, slot_bytes=16, per_large=2),
        full("b", 16, 16, 2),
        state(slot_bytes=512),
    )
    manager = Manager(cut, num_large_pages=30)
    assert manager.growth_large_pages == 0
    for number in range(3):
        manager.allocate(f"{number}", num_tokens=20)

    # Of each of two page tables three pages, two in a large page; states do not grow.
    assert manager.growth_large_pages == 4
    with pytest.raises(OutOfPagesError) as refused:
        manager.allocate("again", num_tokens=320, reserve_large_pages=manager.growth_large_pages)
    assert refused.value.reserved_large_pages == 4
    manager.check()


def test_with_drafts_the_state_after_so_many_tokens_is_in_the_slot_of_their_number():
    cut = geometry(
        "drafting",
        full(tokens=16, slot_bytes=16, per_large=2),
        state(slot_bytes=128, per_large=4, draft_tokens=2),
    )
    manager = Manager(cut, num_large_pages=9, prefix_caching=True)
    manager.allocate("a", num_tokens=48)
    slots = manager.page_table("a", 1)
    assert len(set(slots)) == 3
    manager.commit("a", hashes(48), 48)

    # Two tokens later the state after 48 is still there.
    manager.allocate("a", num_tokens=50, num_processed_tokens=48)
    assert manager.keep_state("a", hashes(48)[-1], 48)
    (kept,) = manager.take_copies()
    assert kept.source == slots[48 % 3]

    hit = manager.lookup(hashes(64), max_tokens=63)
    assert hit.num_tokens == 48
    manager.allocate("b", num_tokens=60, hit=hit)
    (started,) = manager.take_copies()
    assert (started.source, started.target) == (kept.target, manager.page_table("b", 1)[48 % 3])
    manager.check()


def test_what_depends_on_the_next_token_is_hit_where_that_is_cached_too():
    manager = hybrid(20, ahead_tokens=1)
    compute(manager, "a", 65, free=False)
    # One page before the end of the prompt: from there it can be asked again.
    assert manager.checkpoint_tokens("a") == (48,)
    for num_tokens in (32, 48):
        assert manager.keep_state("a", hashes(65)[num_tokens // 16 - 1], num_tokens)
    manager.free("a")

    again = manager.lookup(hashes(65), max_tokens=64)
    assert (again.num_tokens, again.branch_tokens) == (48, 64)
    shorter = manager.lookup(hashes(65), max_tokens=48)
    assert (shorter.num_tokens, shorter.branch_tokens) == (32, 48)
    assert manager.lookup(hashes(65), max_tokens=16).num_tokens == 0

    # Who parts from it goes on a page before, and has a state kept there.
    parted = [*hashes(64), *hashes(128, name="x")]
    hit = manager.lookup(parted[:3] + parted[4:], max_tokens=159)
    assert (hit.num_tokens, hit.branch_tokens) == (32, 48)
    farther = manager.lookup(parted, max_tokens=191)
    assert (farther.num_tokens, farther.branch_tokens) == (48, 64)


def test_states_are_kept_before_the_question_at_the_end_of_the_prompt_and_at_branches():
    manager = hybrid()
    compute(manager, "a", 64)
    keys = hashes(48) + hashes(720, name="q")
    hit = manager.lookup(keys, max_tokens=719, facts=RequestFacts(prompt_tokens=720))
    manager.allocate("b", num_tokens=16, hit=hit)

    # 512 tokens before the last one that is to be computed, in whole hashes.
    assert manager.checkpoint_tokens("b") == (48, 192, 704)


def test_a_state_that_loses_a_part_is_dropped_whole():
    cut = geometry(
        "two states",
        full(tokens=16, slot_bytes=16, per_large=2),
        state("a", slot_bytes=512),
        state("b", slot_bytes=256, per_large=2),
    )
    manager = Manager(cut, num_large_pages=1 + 9, prefix_caching=True)
    for number, prefix in enumerate("xyz"):
        compute(manager, f"{number}", 32, prefix=prefix, free=False)
        assert manager.keep_state(f"{number}", hashes(32, name=prefix)[-1], 32)
        manager.take_copies()
        manager.free(f"{number}")
        manager.check()

    def cached():
        report = manager.memory()
        return [
            table.evictable_bytes // spec.small_page_bytes
            for table, spec in zip(report.tables, cut.page_tables, strict=True)
        ]

    assert cached()[1] == cached()[2] == 3
    manager.allocate("long", num_tokens=128)
    manager.check()

    assert cached()[1] == cached()[2] < 3


def generate(manager, request_id, num_tokens, *, prompt_tokens, name="p", after=None):
    """Run a request to its end, keeping its states as an engine does; the tokens that it hit."""
    facts = RequestFacts(prompt_tokens=prompt_tokens)
    keys = [*(after or ()), *hashes(num_tokens, name=name)][: num_tokens // 16]
    hit = manager.lookup(keys, max_tokens=prompt_tokens - 1, facts=facts)
    manager.allocate(request_id, num_tokens=prompt_tokens, hit=hit, facts=facts)
    for end in manager.checkpoint_tokens(request_id):
        assert manager.keep_state(request_id, keys[end // 16 - 1], end)
    for end in range(prompt_tokens + 1, num_tokens + 1):
        manager.new_step()
        processed = end - 1
        manager.commit(request_id, keys, processed)
        if processed % manager.answer_interval_tokens == 0:
            assert manager.keep_state(request_id, keys[processed // 16 - 1], processed)
        manager.allocate(request_id, num_tokens=end, num_processed_tokens=processed)
        manager.check()
    manager.commit(request_id, keys, num_tokens)
    manager.free(request_id)
    manager.new_step()
    manager.take_copies()
    return hit.num_tokens


def compute_and_keep(manager, prefix, num_tokens):
    """Run a prompt and keep its states; what was in their pages is copied at once."""
    keys = hashes(num_tokens, name=prefix)
    manager.new_step()
    hit = manager.lookup(keys, max_tokens=num_tokens - 1)
    manager.allocate("one", num_tokens=num_tokens, hit=hit)
    manager.commit("one", keys, num_tokens)
    for end in manager.checkpoint_tokens("one"):
        manager.keep_state("one", keys[end // 16 - 1], end)
    manager.take_copies()
    manager.free("one")
    manager.check()


def states_kept(manager):
    """Tokens after which states are kept of the requests that `generate` names alike."""
    cached = {key for key in manager._tables[1].cache.keys if key is not None}
    return [n for n in range(16, 400, 16) if hashes(n)[-1] in cached]


def test_a_state_of_an_answer_takes_the_place_of_the_one_before():
    manager = hybrid()
    assert manager.answer_interval_tokens == 64

    assert generate(manager, "a", 300, prompt_tokens=40) == 0

    # The end of the prompt, and the last of 64, 128, 192 and 256 tokens.
    assert states_kept(manager) == [32, 256]
    assert manager.lookup(hashes(320), max_tokens=320).num_tokens == 256
    state_bytes = manager.memory().tables[1].evictable_bytes
    assert state_bytes == 2 * manager.geometry.page_tables[1].small_page_bytes


def test_a_state_of_an_answer_kept_twice_stays_the_one_that_makes_room():
    manager = hybrid()
    manager.allocate("a", num_tokens=129, facts=RequestFacts(prompt_tokens=20))
    manager.commit("a", hashes(128), 128)
    for num_tokens in (64, 64, 128, 128):
        assert manager.keep_state("a", hashes(num_tokens)[-1], num_tokens)
        manager.check()

    assert states_kept(manager) == [128]
    assert len(manager.take_copies()) == 2


def test_a_state_another_request_has_kept_is_left_to_it():
    manager = hybrid()
    generate(manager, "a", 80, prompt_tokens=40)
    assert states_kept(manager) == [32, 64]

    # The same prompt, answered alike at first, and at greater length.
    assert generate(manager, "b", 150, prompt_tokens=40) == 32

    assert states_kept(manager) == [32, 64, 128]


def test_a_hit_on_a_state_that_made_room_is_looked_up_again():
    manager = hybrid()
    manager.allocate("a", num_tokens=65, facts=RequestFacts(prompt_tokens=20))
    manager.commit("a", hashes(64), 64)
    assert manager.keep_state("a", hashes(64)[-1], 64)
    hit = manager.lookup(hashes(100), max_tokens=99)
    assert hit.num_tokens == 64
    manager.allocate("a", num_tokens=129, num_processed_tokens=65)
    manager.commit("a", hashes(128), 128)
    assert manager.keep_state("a", hashes(128)[-1], 128)

    with pytest.raises(ValueError, match="must be looked up again: of its 64 tokens 0 are"):
        manager.allocate("b", num_tokens=100, hit=hit)


@pytest.mark.parametrize(
    ("leaves_at", "kept_at"), [(208, (320,)), (224, (224, 320))], ids=["near", "far"]
)
def test_right_after_a_state_no_other_is_kept_for_a_branch(leaves_at, kept_at):
    manager = hybrid()
    generate(manager, "a", 260, prompt_tokens=150)
    keys = [*hashes(leaves_at), *hashes(336, name="x")][:21]
    facts = RequestFacts(prompt_tokens=336)

    hit = manager.lookup(keys, max_tokens=335, facts=facts)
    manager.allocate("b", num_tokens=336, hit=hit, facts=facts)

    assert (hit.num_tokens, hit.branch_tokens) == (144, leaves_at)
    assert manager.checkpoint_tokens("b") == kept_at


@pytest.mark.parametrize("interval", [-16, 40])
def test_an_interval_of_answers_that_is_no_number_of_hashes_is_refused(interval):
    unit = "hash_tokens and of whole pages, 16"
    message = f"answer_interval_tokens must be 0 or a multiple of {unit}, got {interval}"
    with pytest.raises(ValueError, match=message):
        hybrid(answer_interval_tokens=interval)


def test_answers_are_kept_where_states_are_cached_and_nobody_says_otherwise():
    assert hybrid(answer_interval_tokens=0).answer_interval_tokens == 0
    cut = geometry("full", full(tokens=16, slot_bytes=16, per_large=2))
    assert manager_of(cut, 9, prefix_caching=True).answer_interval_tokens == 0
    assert Manager(hybrid().geometry, num_large_pages=9).answer_interval_tokens == 0
    wide = Manager(
        geometry("wide", full(tokens=48, slot_bytes=16, per_large=2), state(slot_bytes=1536)),
        num_large_pages=9,
        prefix_caching=True,
        hash_tokens=48,
    )
    assert wide.answer_interval_tokens == 96


def test_a_state_is_not_kept_where_there_is_no_page_for_it():
    manager = hybrid(4)
    compute(manager, "a", 64, free=False)

    assert not manager.keep_state("a", hashes(64)[-1], 64)
    manager.check()


@pytest.mark.parametrize("num_tokens", [0, 17])
def test_a_state_between_hashes_is_refused(num_tokens):
    manager = hybrid()
    compute(manager, "a", 64, free=False)

    with pytest.raises(ValueError, match="positive multiple of 16"):
        manager.keep_state("a", b"x", num_tokens)


def test_a_state_within_a_page_of_several_hashes_is_refused():
    cut = geometry("wide", full(tokens=32, slot_bytes=16, per_large=2), state(slot_bytes=1024))
    manager = manager_of(cut, 60, prefix_caching=True, hash_tokens=8)
    assert manager.answer_interval_tokens == 64
    keys = hashes(64, hash_tokens=8)
    manager.allocate("a", num_tokens=64)
    manager.commit("a", keys, 64)

    with pytest.raises(ValueError, match="positive multiple of 32"):
        manager.keep_state("a", keys[0], 8)
    manager.check()
    assert manager.keep_state("a", keys[-1], 64)
    manager.check()
    with pytest.raises(ValueError, match="multiple of hash_tokens and of whole pages, 32, got 40"):
        manager_of(cut, 60, prefix_caching=True, hash_tokens=8, answer_interval_tokens=40)


def test_a_request_alone_in_the_arena_fits_though_its_hit_is_a_state():
    manager = hybrid(4)
    compute(manager, "a", 48, free=False)
    manager.free("a")
    compute(manager, "a", 16, prefix="q", free=False)
    assert manager.keep_state("a", hashes(16, name="q")[-1], 16)
    manager.free("a")

    hit = manager.lookup(hashes(64, name="q"), max_tokens=63)
    assert hit.num_tokens == 16
    manager.allocate("b", num_tokens=64, hit=hit)

    manager.check()


def test_parts_of_a_state_that_stand_in_each_other_s_place_change_it():
    cut = geometry("two states", state("one", slot_bytes=768), state("other", slot_bytes=768))
    manager = manager_of(cut, 5, prefix_caching=True)
    for name in ("x", "y"):
        manager.allocate(name, num_tokens=16)
    for name in ("x", "y"):
        manager.free(name)
    manager.allocate("a", num_tokens=16)
    manager.commit("a", hashes(16), 16)
    manager.new_step()
    assert manager.keep_state("a", hashes(16)[0], 16)
    manager.free("a")
    manager.allocate("z", num_tokens=16)
    manager.take_copies()
    hit = manager.lookup(hashes(32), max_tokens=31)
    manager.allocate("b", num_tokens=32, hit=hit)
    content = {page: table for table, (page,) in enumerate(hit.pages)}

    for copy in manager.take_copies():
        content[copy.target] = content[copy.source]

    pages = manager.page_tables("b")
    assert [pages[0], pages[1]] == [hit.pages[1], hit.pages[0]]
    assert [content[page] for (page,) in pages] == [0, 1]


# Reports


def test_memory_adds_up_and_names_what_is_useless():
    manager = manager_of(TWO_TYPES, 20, prefix_caching=True)
    manager.allocate("r", num_tokens=40)

    memory = manager.memory()

    table = memory.tables[0]
    assert table.used_bytes == 40 * 16
    assert table.useless_bytes == 8 * 16
    assert memory.arena_bytes == 20 * TWO_TYPES.large_page_bytes

    manager.allocate("r", num_tokens=41, num_processed_tokens=40)
    assert manager.memory().tables[1].used_bytes == 32 * 16


def test_the_rest_of_an_image_s_last_page_is_useless():
    cut = geometry("cross", full(tokens=16, slot_bytes=16), cross(tokens=16, slot_bytes=16))
    manager = manager_of(cut, 30, prefix_caching=True)
    image = Image(start_token=0, num_tokens=17, content=b"cat")
    facts = RequestFacts(prompt_tokens=20, images=(image,))

    manager.allocate("a", num_tokens=20, facts=facts)

    assert manager.memory().tables[1].used_bytes == 17 * 16
    assert manager.memory().tables[1].useless_bytes == 15 * 16


def test_padding_is_useless():
    cut = geometry("padded", full(tokens=4, slot_bytes=15, padding=4), sliding(tokens=4))
    manager = manager_of(cut, 5)
    manager.allocate("r", num_tokens=4)

    assert manager.memory().tables[0].used_bytes == 60
    assert manager.memory().tables[0].useless_bytes == 4


def test_the_cache_report_counts_tokens_and_the_limiting_type():
    manager = manager_of(TWO_TYPES, 40, prefix_caching=True)
    compute(manager, "a", 64)
    compute(manager, "b", 64)

    report = manager.cache_report()

    assert (report.asked_tokens, report.hit_tokens) == (48 + 48, 48)
    assert report.limited_tokens == {"full": 48, "sliding": 0}


def test_evictions_are_counted_by_cause():
    manager = manager_of(STATES, 8, prefix_caching=True, hash_tokens=4)
    for number in range(6):
        keys = hashes(24, name=str(number), hash_tokens=4)
        manager.new_step()
        manager.allocate("r", num_tokens=24)
        manager.commit("r", keys, 24)
        manager.free("r")
        manager.check()

    evictions = manager.cache_report().evictions
    lost = sum(each.num_pages for each in evictions)
    entered = 6 * (6 + 6)
    cached = sum(table.pages.num_evictable for table in manager._tables)
    assert lost == entered - cached > 0


# Memory.md section 4: what goes wrong where the five steps are followed blindly


def test_short_requests_beside_large_states_leave_large_pages_to_states():
    # 97 attention pages or one state in a large page.
    cut = geometry("granite", full(tokens=16, slot_bytes=1, per_large=97), state(slot_bytes=1552))
    manager = manager_of(cut, 33)

    for number in range(31):
        manager.allocate(f"r{number}", num_tokens=48, full_tokens=48)

    manager.check()
    with pytest.raises(OutOfPagesError):
        manager.allocate("one more", num_tokens=48)


def test_a_type_that_filled_the_cache_gives_way_to_another():
    cut = geometry("granite", full(tokens=16, slot_bytes=1, per_large=97), state(slot_bytes=1552))
    manager = manager_of(cut, 9, prefix_caching=True)
    for number in range(8):
        compute(manager, f"r{number}", 16 * 90, prefix=str(number))

    for number in range(7):
        manager.allocate(f"s{number}", num_tokens=16)

    manager.check()


def test_a_request_whose_tokens_were_rejected_keeps_their_slots():
    manager = manager_of(TWO_TYPES, 40)
    manager.allocate("a", num_tokens=60)
    manager.allocate("a", num_tokens=66, num_processed_tokens=60)
    full_pages, sliding_pages = manager.page_tables("a")

    for processed in (61, 62, 63):
        taken = manager.allocate("a", num_tokens=processed + 1, num_processed_tokens=processed)
        assert not any(taken)

    assert not any(manager.allocate("a", num_tokens=66, num_processed_tokens=63))
    assert manager.page_table("a", 0) == full_pages
    assert manager.page_table("a", 1) == [0, 0, *sliding_pages[2:]]
    manager.check()


def test_growing_requests_reuse_the_pages_their_windows_gave_up():
    manager = manager_of(WINDOWED, 40)
    manager.allocate("r", num_tokens=8)
    held = []
    for num_tokens in range(9, 160):
        manager.allocate("r", num_tokens=num_tokens, num_processed_tokens=num_tokens - 1)
        held.append(manager._tables[1].pages.num_large)

    assert max(held) <= 2
    manager.check()

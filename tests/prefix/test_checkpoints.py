"""Where requests leave checkpoints for others: in which order, of which kind, and at what cost."""

import pytest

from jenga.admission.wait_queue import WAITED_STEPS
from jenga.errors import OutOfPagesError
from jenga.eviction.points import Kind, Past
from jenga.eviction.policy import LeastRecentlyUsed
from jenga.manager import Manager
from jenga.policies import Image, RequestFacts
from jenga.prefix.checkpoints import ANSWER_TOKENS
from jenga.prefix.question_length import QUESTION_TOKENS
from jenga.tables.request import CopyPath
from tests.machines.geometries import cross, embedding, full, geometry, sliding, state
from tests.manager.test_manager import compute, hashes

FULL = geometry("full", full(tokens=16, per_large=1))
WINDOWED = geometry("windowed", full(tokens=16), sliding(tokens=16, window=32))
HYBRID = geometry("hybrid", full(tokens=16, slot_bytes=16, per_large=2), state(slot_bytes=512))
TWO_SIZES = geometry(
    "two sizes", full("a", tokens=16, per_large=2), full("b", tokens=32, per_large=1)
)
WITH_IMAGES = geometry("images", full(tokens=16), cross(tokens=16, slot_bytes=16))


def manager_of(cut, num_large_pages=200, **options):
    return Manager(cut, num_large_pages=num_large_pages, prefix_caching=True, **options)


def come(manager, name, num_tokens, *, keys=None, prompt_tokens=None):
    """Let a request come in with what is cached, and compute so many tokens in a step."""
    keys = keys or hashes(num_tokens)
    facts = RequestFacts(prompt_tokens=prompt_tokens or num_tokens)
    manager.new_step()
    hit = manager.lookup(keys, max_tokens=facts.prompt_tokens - 1, facts=facts)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    manager.check()
    return hit.num_tokens


def keep_states(manager, name, keys):
    """Keep all states that a request's prompt is to leave, as an engine does at a step's end."""
    for num_tokens in manager.checkpoint_tokens(name):
        assert manager.keep_state(name, keys[num_tokens // 16 - 1], num_tokens)
    manager.take_copies()
    manager.check()


def ask(manager, num_tokens, *, keys=None, name="r"):
    """Run a prompt whole, with its states, and end it; what it hit."""
    keys = keys or hashes(num_tokens)
    hit_tokens = come(manager, name, num_tokens, keys=keys)
    keep_states(manager, name, keys)
    manager.commit(name, keys, num_tokens)
    manager.check()
    manager.free(name)
    manager.check()
    return hit_tokens


def kept(manager, keys):
    """Tokens of a text's checkpoints -> of which kind they are."""
    tree = manager.prefix_cache.tree
    nodes = ((tokens, tree.node_at(keys, tokens)) for tokens in range(16, 16 * len(keys) + 1, 16))
    return {tokens: node.point.kind for tokens, node in nodes if node is not None and node.is_kept}


# Where


def test_states_are_kept_though_the_tokens_were_committed_before_they_were_asked_for():
    # As where a second request of the same step looks for what the first one computes.
    manager = manager_of(HYBRID)
    keys = hashes(640)
    come(manager, "a", 640)

    manager.commit("a", keys, 640)
    keep_states(manager, "a", keys)

    assert kept(manager, keys) == {112: Kind.BEFORE_END, 624: Kind.PROMPT_END}
    manager.free("a")
    assert manager.lookup(keys, max_tokens=639).num_tokens == 624
    manager.check()


@pytest.mark.parametrize(
    ("cut", "places"),
    [
        pytest.param(FULL, {1200: Kind.PROMPT_END, 1216: Kind.ANSWER_END}, id="attention_alone"),
        pytest.param(
            WINDOWED,
            {688: Kind.BEFORE_END, 1200: Kind.PROMPT_END, 1216: Kind.ANSWER_END},
            id="windows",
        ),
        pytest.param(HYBRID, {688: Kind.BEFORE_END, 1200: Kind.PROMPT_END}, id="states"),
    ],
)
def test_a_prompt_leaves_checkpoints_at_its_end_and_before_its_question(cut, places):
    manager = manager_of(cut)

    assert ask(manager, 1216) == 0

    # The last token is always computed, so that a prompt is asked again from before it.
    assert kept(manager, hashes(1216)) == places
    assert QUESTION_TOKENS == 512 == 1200 - 688


@pytest.mark.parametrize("cut", [FULL, WINDOWED, HYBRID], ids=lambda cut: cut.name)
def test_places_are_multiples_of_all_pages(cut):
    manager = manager_of(cut, hash_tokens=32)
    keys = hashes(640, hash_tokens=32)
    hit = manager.lookup(keys, max_tokens=639)
    manager.allocate("a", num_tokens=640, hit=hit)

    assert all(place % 32 == 0 for place in manager.checkpoint_tokens("a"))
    manager.commit("a", keys, 640)
    manager.free("a")
    manager.check()


def test_with_pages_of_two_sizes_checkpoints_are_at_multiples_of_the_larger():
    manager = manager_of(TWO_SIZES)
    assert manager.prefix_cache.tree.align_tokens == 32

    assert ask(manager, 112) == 0

    # Whole pages of 32 tokens within the 111 that can be asked for again.
    assert kept(manager, hashes(112)) == {96: Kind.PROMPT_END}
    assert ask(manager, 112) == 96


@pytest.mark.parametrize("cut", [WINDOWED, HYBRID], ids=lambda cut: cut.name)
def test_the_second_reader_of_a_text_hits_it_though_questions_differ(cut):
    manager = manager_of(cut, 700)
    text = hashes(2048)
    first, second = ([*text, *hashes(160, name=name)] for name in "xy")

    assert ask(manager, 2208, keys=first) == 0
    hit_tokens = ask(manager, 2208, keys=second)

    # Within 512 tokens before the end of the first prompt, which is before the question.
    assert 2048 - QUESTION_TOKENS < hit_tokens <= 2048
    # The second one has left the text, so that it is known for a branch; the guess has gone.
    assert kept(manager, second)[2048] == Kind.BRANCH
    assert hit_tokens == 2048 or hit_tokens not in kept(manager, second)
    assert ask(manager, 2208, keys=[*text, *hashes(160, name="z")]) == 2048


def test_after_long_questions_the_second_reader_of_a_text_hits_it_too():
    manager = manager_of(HYBRID, 1500)
    hits = []
    for text in "abc":
        for name in "xy":
            keys = [*hashes(4096, name=text), *hashes(1600, name=text + name)]
            hits.append(ask(manager, 5696, keys=keys))

    # Only the second reader of the first text shows how long the questions are.
    assert hits[:3] == [0, 0, 0] == [*hits[:2], hits[4]]
    assert 4096 - 2048 < hits[3] == hits[5] <= 4096


def test_a_known_branch_is_left_again_by_whoever_passes_it():
    manager = manager_of(HYBRID, 400)
    text = hashes(512)
    for name in "xy":
        ask(manager, 1184, keys=[*text, *hashes(672, name=name)])
    assert kept(manager, text)[512] == Kind.BRANCH
    assert manager.reset_prefix_cache()

    keys = [*text, *hashes(672, name="z")]
    come(manager, "z", 1184, keys=keys)

    assert manager.checkpoint_tokens("z") == (512, 656, 1168)


def test_a_branch_right_after_a_kept_state_gets_no_state_of_its_own():
    manager = manager_of(HYBRID, 400)
    text = hashes(512)
    ask(manager, 1024, keys=[*text, *hashes(512, name="x")])
    assert kept(manager, text) == {496: Kind.BEFORE_END}

    keys = [*text, *hashes(512, name="y")]
    assert come(manager, "y", 1024, keys=keys) == 496

    # To compute 16 tokens again is cheaper than another state.
    assert manager.checkpoint_tokens("y") == (1008,)


@pytest.mark.parametrize("policy_waits", [False, True])
def test_what_a_waiting_request_will_read_is_left_for_it(policy_waits):
    manager = manager_of(WINDOWED, 400)
    keys, other = hashes(1024), [*hashes(304), *hashes(160, name="x")]
    manager.announce("runs", keys, num_tokens=1024)
    if policy_waits:
        manager.announce("waits", other, num_tokens=464)
    hit = manager.lookup(keys, max_tokens=1023)
    processed = 0
    for end in range(128, 1025, 128):
        for _ in range(WAITED_STEPS):
            manager.new_step()
        manager.allocate(
            "runs", num_tokens=end, num_processed_tokens=processed, hit=None if processed else hit
        )
        manager.commit("runs", keys, end)
        manager.check()
        processed = end

    assert (304 in kept(manager, keys)) is policy_waits


def test_a_hit_without_a_checkpoint_becomes_one():
    manager = manager_of(WINDOWED, 400)
    ask(manager, 1024)
    assert 304 not in kept(manager, hashes(1024))

    # Windows were not passed in one step, so that this one is still cached.
    keys = [*hashes(304), *hashes(160, name="x")]
    assert ask(manager, 464, keys=keys) == 304

    assert kept(manager, keys)[304] == Kind.BRANCH


# Of which kind


def past_of(manager, keys, num_tokens):
    return manager.prefix_cache.tree.node_at(keys, num_tokens).point.past


def test_points_tell_what_their_request_did():
    manager = manager_of(HYBRID, 700)
    text, new = hashes(1024), [*hashes(1024), *hashes(1024, name="x")]
    ask(manager, 1024)
    assert past_of(manager, text, 1008) == Past.NEW_TEXT

    # One that goes on from the end of a prompt is a turn, and the end was read by it.
    assert ask(manager, 2048, keys=new) == 1008
    assert past_of(manager, new, 2032) == Past.TURN
    assert past_of(manager, text, 1008) == Past.READ

    # One that leaves a text before its end only knows it.
    other = [*hashes(1024), *hashes(64, name="x"), *hashes(1024, name="y")]
    assert 0 < ask(manager, 2112, keys=other) <= 1088
    branched = [*hashes(1024), *hashes(64, name="x"), *hashes(1024, name="z")]
    assert ask(manager, 2112, keys=branched) == 1088
    assert past_of(manager, branched, 2096) == Past.KNOWN_TEXT


def test_time_is_what_is_computed_of_prompts_and_answers():
    manager = manager_of(FULL)
    token_bytes = FULL.page_tables[0].small_page_bytes // 16
    ask(manager, 64)
    assert manager.prefix_cache.tree.points.time == 64 * token_bytes
    come(manager, "b", 64)
    assert manager.prefix_cache.tree.points.time == (64 + 16) * token_bytes
    manager.allocate("b", num_tokens=97, num_processed_tokens=64)
    manager.commit("b", hashes(96), 96)

    manager.free("b")

    assert manager.prefix_cache.tree.points.time == (64 + 16 + 32) * token_bytes


# States that are not final yet


def state_pages(manager):
    table = manager._tables[1]
    return table.pages.num_used, sum(key is not None for key in table.cache.keys)


def test_a_state_kept_before_its_tokens_are_final_waits_for_them():
    manager = manager_of(HYBRID)
    keys = hashes(640)
    come(manager, "a", 640)
    keep_states(manager, "a", keys)
    assert state_pages(manager) == (3, 0)

    manager.commit("a", keys, 320)
    manager.check()
    assert kept(manager, keys) == {112: Kind.BEFORE_END}
    assert state_pages(manager) == (2, 1)
    manager.commit("a", keys, 640)

    assert kept(manager, keys) == {112: Kind.BEFORE_END, 624: Kind.PROMPT_END}
    assert state_pages(manager) == (1, 2)
    manager.check()


def test_a_request_that_is_preempted_before_its_tokens_are_final_keeps_no_page():
    manager = manager_of(HYBRID)
    keys = hashes(640)
    come(manager, "a", 640)
    keep_states(manager, "a", keys)
    manager.commit("a", keys, 320)

    manager.free("a")

    manager.check()
    assert kept(manager, keys) == {112: Kind.BEFORE_END}
    assert state_pages(manager) == (0, 1)
    assert ask(manager, 640) == 112
    # Keys and values are cached up to 320 tokens, as where another text parts from a known one.
    assert kept(manager, keys) == {320: Kind.BRANCH, 624: Kind.PROMPT_END}
    assert state_pages(manager) == (0, 2)


def test_a_state_that_is_still_to_be_written_is_found_from_the_next_step_on():
    manager = manager_of(HYBRID)
    keys = hashes(64)
    come(manager, "a", 64)
    manager.commit("a", keys, 64)
    assert manager.keep_state("a", keys[2], 48, in_passing=True)
    (copy,) = manager.take_copies()
    assert manager.lookup(keys, max_tokens=63).num_tokens == 0
    assert manager.keeps_state(1, keys[2], copy.target)
    manager.check()

    manager.new_step()

    assert manager.lookup(keys, max_tokens=63).num_tokens == 48
    assert manager.keeps_state(1, keys[2], copy.target)
    manager.check()


def test_states_written_on_the_way_are_found_one_request_at_a_time_if_asked_for():
    manager = manager_of(HYBRID, records_changes=True)
    keys = {"a": hashes(64), "b": hashes(64, name="q")}
    for name, own in keys.items():
        come(manager, name, 64, keys=own)
        manager.commit(name, own, 64)
    for name, own in keys.items():
        assert manager.keep_state(name, own[2], 48, in_passing=True)
    manager.take_changes()

    for name, own in keys.items():
        manager.keep_written(name)
        (change,) = manager.take_changes()
        assert (change.table_index, change.is_found) == (1, True)
        assert list(change.keys) == [own[2]]
        manager.keep_written(name)
        assert manager.take_changes() == []
    manager.new_step()
    assert manager.take_changes() == []
    manager.check()


def test_a_request_that_did_not_look_at_the_cache_plans_with_its_first_commit():
    manager = manager_of(HYBRID)
    keys = hashes(64)
    manager.allocate("a", num_tokens=64)
    assert manager.checkpoint_tokens("a") == ()

    manager.commit("a", keys, 0)

    assert manager.checkpoint_tokens("a") == (48,)
    assert manager.keep_state("a", keys[2], 48)
    manager.commit("a", keys, 64)
    assert manager.lookup(keys, max_tokens=63).num_tokens == 48
    manager.check()


def test_a_request_that_ends_in_the_step_that_writes_its_state_leaves_it():
    manager = manager_of(HYBRID)
    keys = hashes(64)
    come(manager, "a", 64)
    manager.commit("a", keys, 64)
    assert manager.keep_state("a", keys[2], 48, in_passing=True)

    manager.free("a")
    manager.new_step()

    assert manager.lookup(keys, max_tokens=63).num_tokens == 48
    manager.check()


def test_a_state_that_was_kept_by_another_and_evicted_meanwhile_makes_no_checkpoint():
    manager = manager_of(HYBRID, 1 + 16)
    keys = hashes(64)
    ask(manager, 64)
    come(manager, "b", 64, keys=[*keys[:3], b"x"])
    # It is there, so that it is not copied; the tokens of "c" are not final yet.
    hit = manager.lookup([], max_tokens=63, facts=RequestFacts(prompt_tokens=64))
    manager.allocate("c", num_tokens=64, hit=hit)
    assert manager.keep_state("c", keys[2], 48)
    manager.free("b")
    manager.prefix_cache.tree.evict(manager.prefix_cache.tree.node_at(keys, 48))
    manager.check()

    manager.commit("c", keys, 64)

    manager.check()
    assert kept(manager, keys) == {}
    manager.free("c")
    manager.check()


def test_states_are_not_kept_where_there_is_no_room_and_nothing_is_lost():
    # Three large pages and a state's for "a", one and a state's for "b".
    manager = manager_of(HYBRID, 1 + 6)
    keys = hashes(96)
    come(manager, "a", 96)
    come(manager, "b", 16, keys=[b"x"])
    before = state_pages(manager)

    assert not manager.keep_state("a", keys[4], 80)

    assert state_pages(manager) == before
    manager.commit("a", keys, 96)
    manager.free("a")
    manager.check()


# Answers


def answer(manager, name, keys, *, prompt_tokens, num_tokens, start=0):
    """Generate token after token, keeping states as an engine does."""
    for end in range(prompt_tokens + 1 + start, num_tokens + 1):
        manager.new_step()
        manager.allocate(name, num_tokens=end, num_processed_tokens=end - 1)
        manager.commit(name, keys, end - 1)
        interval = manager.answer_interval_tokens
        if interval and (end - 1) % interval == 0:
            assert manager.keep_state(name, keys[(end - 1) // 16 - 1], end - 1)
        manager.check()


def test_an_answer_s_states_are_written_in_one_place_however_long_it_is():
    manager = manager_of(HYBRID)
    keys = hashes(800)
    come(manager, "a", 100, keys=keys, prompt_tokens=100)
    keep_states(manager, "a", keys)
    places = set()
    answer(manager, "a", keys, prompt_tokens=100, num_tokens=800)
    places = {copy.target for copy in manager.take_copies() if copy.path == CopyPath.IN_ARENA}

    assert len(places) == 1
    assert kept(manager, keys) == {
        96: Kind.PROMPT_END,
        799 // ANSWER_TOKENS * ANSWER_TOKENS: Kind.ANSWER_END,
    }
    manager.free("a")
    assert manager.lookup(keys, max_tokens=799).num_tokens == 768
    manager.check()


def test_the_state_after_the_last_token_of_a_prompt_is_the_answer_s():
    manager = manager_of(HYBRID)
    keys, prompt_tokens = hashes(400), 2 * ANSWER_TOKENS
    come(manager, "a", prompt_tokens, keys=keys)
    keep_states(manager, "a", keys)
    answer(manager, "a", keys, prompt_tokens=prompt_tokens, num_tokens=prompt_tokens + 10)
    assert kept(manager, keys)[prompt_tokens] == Kind.ANSWER_END

    answer(manager, "a", keys, prompt_tokens=prompt_tokens, num_tokens=300, start=10)

    # Later states of the answer have taken its place.
    assert kept(manager, keys) == {112: Kind.PROMPT_END, 256: Kind.ANSWER_END}


class BySavedTokens(LeastRecentlyUsed):
    weighs_guesses = True

    def worth(self, candidate, _time):
        return candidate.saved_tokens


def test_an_answer_s_states_do_not_cost_a_checkpoint_that_is_worth_more():
    cut = geometry("wide", full(tokens=16, slot_bytes=16, per_large=8), state(slot_bytes=2048))
    manager = manager_of(cut, 7, eviction_policy=BySavedTokens())
    article, keys = hashes(320, name="x"), hashes(800)
    ask(manager, 320, keys=article)
    assert kept(manager, article) == {304: Kind.PROMPT_END}
    come(manager, "a", 100, keys=keys, prompt_tokens=100)
    tree, skipped = manager.prefix_cache.tree, []
    for end in range(101, 200):
        manager.new_step()
        manager.allocate("a", num_tokens=end, num_processed_tokens=end - 1)
        manager.commit("a", keys, end - 1)
        if (end - 1) % ANSWER_TOKENS == 0:
            assert not manager.keep_state("a", keys[(end - 1) // 16 - 1], end - 1)
            skipped.append(end - 1)
            # Where the answer really ended, a request may still show that it was worth it.
            known = [n for n in range(112, 200, 16) if tree.points.get(keys[n // 16 - 1])]
            assert known == skipped[-1:]
        manager.check()

    assert skipped == [128, 192]
    assert kept(manager, article) == {304: Kind.PROMPT_END}
    manager.free("a")
    manager.check()


@pytest.mark.parametrize("num_empty", [0, 1, 2])
def test_states_of_several_tables_are_weighed_even_if_some_of_them_find_empty_pages(num_empty):
    cut = geometry(
        "two states",
        full(tokens=16, slot_bytes=16, per_large=8),
        state("s1", slot_bytes=2048),
        state("s2", slot_bytes=2048),
    )
    # The article takes three large pages and two for its states, the request one and two.
    manager = manager_of(cut, 1 + 8 + num_empty, eviction_policy=BySavedTokens())
    article, keys = hashes(320, name="x"), hashes(800)
    ask(manager, 320, keys=article)
    come(manager, "a", 100, keys=keys, prompt_tokens=100)
    empty_bytes = manager.memory().empty_large_bytes
    assert empty_bytes == num_empty * cut.large_page_bytes

    assert manager.keep_state("a", keys[5], 96) == (num_empty == 2)

    assert kept(manager, article) == {304: Kind.PROMPT_END}
    manager.free("a")
    manager.check()


def test_an_answer_that_another_request_has_gone_on_from_stays():
    manager = manager_of(HYBRID)
    keys = hashes(400)
    come(manager, "a", 100, keys=keys, prompt_tokens=100)
    answer(manager, "a", keys, prompt_tokens=100, num_tokens=140)
    assert 128 in kept(manager, keys)
    assert come(manager, "b", 160, keys=[*keys[:8], *hashes(32, name="x")]) == 128
    answer(manager, "a", keys, prompt_tokens=100, num_tokens=270, start=40)

    assert {128, 256} <= kept(manager, keys).keys()
    assert 192 not in kept(manager, keys)


@pytest.mark.parametrize("cut", [FULL, WINDOWED], ids=lambda cut: cut.name)
def test_without_states_a_checkpoint_is_left_at_the_end_of_an_answer(cut):
    manager = manager_of(cut)
    keys = hashes(400)
    come(manager, "a", 100, keys=keys, prompt_tokens=100)
    answer(manager, "a", keys, prompt_tokens=100, num_tokens=310)
    manager.commit("a", keys, 310)

    manager.free("a")

    assert kept(manager, keys) == {96: Kind.PROMPT_END, 304: Kind.ANSWER_END}
    assert manager.lookup(keys, max_tokens=399).num_tokens == 304
    manager.check()


@pytest.mark.parametrize("cut", [FULL, WINDOWED], ids=lambda cut: cut.name)
def test_a_request_that_is_preempted_within_its_prompt_finds_what_it_computed(cut):
    manager = manager_of(cut)
    keys = hashes(1024)
    come(manager, "a", 320, keys=keys, prompt_tokens=1024)
    manager.commit("a", keys, 320)

    manager.free("a")

    assert kept(manager, keys) == {320: Kind.PROMPT_END}
    assert come(manager, "a", 1024, keys=keys) == 320


# Tokens read ahead


@pytest.mark.parametrize("cut", [FULL, WINDOWED, HYBRID], ids=lambda cut: cut.name)
def test_with_tokens_read_ahead_checkpoints_are_a_page_before(cut):
    manager = manager_of(cut, ahead_tokens=1)
    keys = hashes(1216)

    ask(manager, 1216)

    places = kept(manager, keys)
    assert places[1184] == Kind.PROMPT_END
    if cut is not FULL:
        assert places[672] == Kind.BEFORE_END
    assert ask(manager, 1216) == 1184


@pytest.mark.parametrize("cut", [FULL, WINDOWED, HYBRID], ids=lambda cut: cut.name)
def test_prompts_that_part_within_what_is_read_ahead_are_both_asked_again(cut):
    manager = manager_of(cut, 60, ahead_tokens=1)
    prompts = [[*hashes(96), *hashes(32, name=name)] for name in "xyz"]
    for keys in prompts:
        ask(manager, 113, keys=keys)

    # All that no checkpoint needs goes.
    manager.new_step()
    evictor = manager._allocator.large_pages.evictor
    manager._allocator.large_pages.evictor = None
    num_loose = sum(
        not table.pins[page]
        for table in manager._tables
        for page, key in enumerate(table.cache.keys)
        if key is not None
    )
    manager._allocator.large_pages.evictor = evictor
    assert num_loose <= 3 * 6
    for keys in prompts:
        assert manager.lookup(keys, max_tokens=112).num_tokens == 96
    manager.check()


# Pages of the same content


@pytest.mark.parametrize("cut", [FULL, WINDOWED, TWO_SIZES], ids=lambda cut: cut.name)
def test_of_two_pages_with_the_same_content_the_older_goes_and_its_checkpoint_has_the_other(cut):
    manager = manager_of(cut, 80)
    keys = hashes(128)
    ask(manager, 128)
    old = manager.lookup(keys, max_tokens=128).pages[0]
    # One that came in without a look at the cache computes all of it again.
    manager.allocate("b", num_tokens=128)

    manager.commit("b", keys, 128)

    manager.check()
    new = manager.page_table("b", 0)
    assert manager.lookup(keys, max_tokens=128).pages[0] == new
    assert not set(old) & set(new)
    assert all(manager._tables[0].pins[page] for page in new[:6])
    manager.free("b")
    manager.check()
    assert manager.lookup(keys, max_tokens=127).num_tokens >= 96


def test_pages_that_two_checkpoints_need_are_not_replaced():
    manager = manager_of(WINDOWED, 80)
    keys = hashes(128)
    ask(manager, 128)
    windows = manager._tables[1]
    before = {key: windows.page_of(key) for key in keys if windows.page_of(key) is not None}
    pinned = {key for key, page in before.items() if windows.pins[page]}
    manager.allocate("b", num_tokens=128)

    manager.commit("b", keys, 128)

    assert pinned
    assert all(windows.page_of(key) == before[key] for key in pinned)
    manager.check()
    manager.free("b")
    manager.check()


def test_a_request_whose_page_was_not_entered_leaves_a_checkpoint_once_the_other_is_gone():
    manager = manager_of(WINDOWED, 80)
    keys = hashes(128)
    ask(manager, 128)
    manager.allocate("b", num_tokens=128)
    manager.commit("b", keys, 128)
    while manager.prefix_cache.tree.evict_one():
        manager.check()

    manager.free("b")

    manager.check()
    assert manager.lookup(keys, max_tokens=127).num_tokens == 112


# Images


def with_images(manager, name, *, prefix="p", contents=(b"cat",), num_tokens=40):
    """Run a prompt with images to its end; the pages of them that it found."""
    images = tuple(
        Image(start_token=17 * number, num_tokens=17, content=content)
        for number, content in enumerate(contents)
    )
    facts = RequestFacts(prompt_tokens=num_tokens, images=images)
    keys = hashes(num_tokens, name=prefix)
    manager.new_step()
    hit = manager.lookup(keys, max_tokens=num_tokens - 1, facts=facts)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    manager.commit(name, keys, num_tokens)
    manager.check()
    manager.free(name)
    manager.check()
    return list(hit.pages[1])


def image(manager, content):
    return manager.prefix_cache.tree.image(manager._tables[1], content)


def test_an_image_is_a_checkpoint_of_its_own_and_read_by_whoever_shows_it_again():
    manager = manager_of(WITH_IMAGES)
    with_images(manager, "a")
    assert image(manager, b"cat").point.past == Past.NEW_TEXT

    found = with_images(manager, "b", prefix="q")

    assert len(found) == 2
    assert image(manager, b"cat").point.past == Past.READ
    assert image(manager, b"cat").num_tokens == 32


@pytest.mark.parametrize("prefix", ["p", "q"])
def test_an_image_shown_twice_in_one_request_is_one_checkpoint(prefix):
    manager = manager_of(WITH_IMAGES)
    with_images(manager, "a", contents=(b"cat", b"cat", b"dog", b"cat"), num_tokens=80)

    found = with_images(manager, "b", prefix=prefix, contents=(b"cat", b"cat"))

    assert found[:2] == found[2:4]
    assert image(manager, b"cat").num_tokens == 32
    while manager.prefix_cache.tree.evict_one():
        manager.check()
    assert image(manager, b"cat") is None


def test_an_image_that_lost_its_checkpoint_in_use_has_one_again_when_it_is_shown_again():
    manager = manager_of(WITH_IMAGES)
    facts = RequestFacts(
        prompt_tokens=20, images=(Image(start_token=0, num_tokens=17, content=b"cat"),)
    )
    manager.allocate("a", num_tokens=20, facts=facts)
    manager.commit("a", hashes(20), 20)
    manager.prefix_cache.tree.evict(image(manager, b"cat"))
    assert image(manager, b"cat") is None

    assert len(with_images(manager, "b", prefix="q")) == 2

    assert image(manager, b"cat").point.past == Past.READ
    manager.free("a")
    manager.check()


def test_an_image_that_lost_its_checkpoint_is_kept_once_where_it_is_shown_twice():
    manager = manager_of(WITH_IMAGES)
    facts = RequestFacts(
        prompt_tokens=20, images=(Image(start_token=0, num_tokens=17, content=b"cat"),)
    )
    manager.allocate("a", num_tokens=20, facts=facts)
    manager.commit("a", hashes(20), 20)
    manager.prefix_cache.tree.evict(image(manager, b"cat"))

    assert len(with_images(manager, "b", prefix="q", contents=(b"cat", b"cat"))) == 4

    assert image(manager, b"cat").num_tokens == 32
    manager.free("a")
    manager.check()


def test_the_end_of_an_image_alone_makes_no_checkpoint():
    manager = manager_of(geometry("embedded", full(tokens=16), embedding(slot_bytes=64)))
    facts = RequestFacts(
        prompt_tokens=64, images=(Image(start_token=10, num_tokens=16, content=b"cat"),)
    )
    keys = hashes(64)
    manager.allocate("a", num_tokens=64, facts=facts)
    manager.commit("a", keys, 64)
    manager.prefix_cache.tree.evict(image(manager, b"cat"))

    # The second of four pages is half read after 16 tokens.
    hit = manager.lookup(keys[:1], max_tokens=63, facts=facts)
    manager.allocate("b", num_tokens=20, hit=hit)

    assert hit.num_tokens == 16
    assert [page > 0 for page in hit.pages[1]] == [False, True, True, True]
    assert image(manager, b"cat") is None
    manager.check()


# Sessions and requests that come in without a look at the cache


@pytest.mark.parametrize("cut", [FULL, WINDOWED, HYBRID], ids=lambda cut: cut.name)
def test_a_request_that_never_committed_leaves_nothing(cut):
    manager = manager_of(cut)
    manager.allocate("a", num_tokens=100)

    manager.free("a")

    manager.check()
    assert manager.prefix_cache.tree._by_key == {}


@pytest.mark.parametrize("cut", [FULL, WINDOWED], ids=lambda cut: cut.name)
def test_a_request_that_came_in_without_a_look_at_the_cache_leaves_checkpoints_too(cut):
    manager = manager_of(cut)
    keys = hashes(640)
    manager.allocate("a", num_tokens=640)
    manager.commit("a", keys, 640)
    manager.free("a")

    assert Kind.PROMPT_END in kept(manager, keys).values()
    assert manager.lookup(keys, max_tokens=639).num_tokens == 624
    manager.check()


def test_what_a_request_reads_is_the_last_to_go_until_it_is_copied():
    # Nothing but the state that it starts from could make room for its own.
    manager = manager_of(HYBRID, 1 + 4)
    ask(manager, 33)
    keys = [*hashes(32), *hashes(32, name="x")]

    hit = manager.lookup(keys, max_tokens=63)
    assert hit.num_tokens == 32
    manager.allocate("b", num_tokens=64, hit=hit)

    (copy,) = [each for each in manager.take_copies() if each.path == CopyPath.IN_ARENA]
    assert copy.source == hit.pages[1][0]
    manager.check()
    with pytest.raises(OutOfPagesError):
        compute(manager, "c", 64, prefix="c")

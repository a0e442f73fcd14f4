"""What callers get wrong: refused by name, before anything is changed."""

import math

import pytest

from jenga.arena.allocator import Allocator
from jenga.errors import InvariantError
from jenga.eviction.known import EVICTION_POLICIES
from jenga.geometry import exact_lcm
from jenga.manager import Manager
from jenga.planning.demand import expected_waste
from jenga.planning.planner import plan
from jenga.policies import Grain, Image, RequestFacts
from jenga.policies.chunked_local import ChunkedLocalPolicy
from jenga.policies.cross_attention import CrossAttentionPolicy
from jenga.policies.image_embedding import ImageEmbeddingPolicy
from jenga.policies.sliding_window import SlidingWindowPolicy
from jenga.policies.state import StatePolicy
from jenga.spec import FullAttention, Layer, ModelSpec, State, TokenBudget
from jenga.tables.stats import MemoryReport, TableMemory, check_memory
from tests.machines.geometries import (
    STATES,
    WINDOWED,
    cross,
    embedding,
    full,
    geometry,
    sliding,
    state,
)
from tests.machines.test_manager_machine import dump

NO_COUNTS = [-1, 3.0, math.nan, math.inf, True, "3", None]
LAYERS = (Layer(name="layer", slot_bytes=64),)
MODEL = ModelSpec(name="model", layer_types=(FullAttention(name="full", layers=LAYERS),))
HASHES = [b"%d" % number for number in range(40)]

HYBRID = geometry("hybrid", full(tokens=4, slot_bytes=192), state(slot_bytes=768))


def manager_of(cut=HYBRID, num_large_pages=40, **options):
    options = {"prefix_caching": True, "hash_tokens": 4} | options
    return Manager(cut, num_large_pages=num_large_pages, **options)


def unchanged(manager, message, question, *arguments, **named):
    """Ask what is to be refused; the manager must be what it was."""
    before = dump(manager)
    with pytest.raises(ValueError, match=message):
        getattr(manager, question)(*arguments, **named)
    assert dump(manager) == before
    manager.check()


def running(**options):
    """A manager with one request of 40 tokens, 20 of them processed and 20 committed."""
    manager = manager_of(**options)
    manager.allocate("r", num_tokens=20)
    manager.commit("r", HASHES, 20)
    manager.allocate("r", num_tokens=40, num_processed_tokens=20)
    return manager


# Counts


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize(
    ("question", "arguments", "name"),
    [
        ("allocate", {"request_id": "new"}, "num_tokens"),
        ("allocate", {"request_id": "r", "num_processed_tokens": 20}, "num_tokens"),
        ("allocate", {"request_id": "new", "num_tokens": 4}, "num_processed_tokens"),
        ("allocate", {"request_id": "r", "num_tokens": 40}, "num_processed_tokens"),
        ("allocate", {"request_id": "new", "num_tokens": 4}, "full_tokens"),
        ("allocate", {"request_id": "new", "num_tokens": 4}, "reserve_large_pages"),
        ("release_passed", {"request_id": "r"}, "num_processed_tokens"),
        ("commit", {"request_id": "r", "prefix_hashes": HASHES}, "num_tokens"),
        ("keep_state", {"request_id": "r", "prefix_hash": b"hash"}, "num_tokens"),
        ("announce", {"request_id": "new", "prefix_hashes": HASHES}, "num_tokens"),
        ("lookup", {"prefix_hashes": HASHES}, "max_tokens"),
        ("prefetch_pages", {}, "num_tokens"),
        ("can_ever_fit", {"chunk_tokens": 16}, "num_tokens"),
        ("can_ever_fit", {"num_tokens": 16}, "chunk_tokens"),
        ("page_table", {"request_id": "r"}, "table_index"),
        ("keeps_state", {"prefix_hash": b"hash", "page": 1}, "table_index"),
    ],
)
def test_what_counts_nothing_is_no_count(question, arguments, name, value):
    unchanged(
        running(), rf"{name} must be .*, got {value!r}", question, **arguments, **{name: value}
    )


@pytest.mark.parametrize("value", [-1, 3.0, True])
def test_a_running_request_is_asked_for_counts_where_it_needs_no_page(value):
    manager = manager_of(WINDOWED, prefix_caching=False)
    manager.allocate("r", num_tokens=2)

    for name in ("num_tokens", "num_processed_tokens", "full_tokens", "reserve_large_pages"):
        arguments = {"num_tokens": 2} | {name: value}
        unchanged(manager, rf"{name} must be .*got {value!r}", "allocate", "r", **arguments)


def test_an_empty_lookup_and_a_commit_of_nothing_are_no_mistakes():
    manager = running()

    assert manager.lookup([], max_tokens=0).num_tokens == 0
    manager.commit("r", HASHES, 0)
    manager.allocate("r", num_tokens=20, num_processed_tokens=20)
    assert manager.request_tokens() == {"r": 40}


@pytest.mark.parametrize("question", ["page_table", "keeps_state"])
def test_a_page_table_that_is_not_there_is_refused(question):
    arguments = ("r", 2) if question == "page_table" else (2, b"hash", 1)

    unchanged(running(), "table_index must be less than 2, got 2", question, *arguments)


# Processed tokens


@pytest.mark.parametrize("processed", [0, 19])
@pytest.mark.parametrize("num_tokens", [40, 60])
def test_processed_tokens_do_not_become_fewer(processed, num_tokens):
    message = f"not fall below the 20 given before, got {processed}"
    arguments = {"num_tokens": num_tokens, "num_processed_tokens": processed}

    unchanged(running(), message, "allocate", "r", **arguments)
    unchanged(running(), message, "release_passed", "r", processed)


def test_nothing_is_processed_of_a_request_that_comes_in_without_a_hit():
    message = "num_processed_tokens must be 0 or the 0 tokens of the hit"

    unchanged(manager_of(), message, "allocate", "r", num_tokens=40, num_processed_tokens=20)


def test_slots_are_for_no_fewer_tokens_than_are_processed():
    message = "num_tokens must be no less than num_processed_tokens, got 20 and 21"

    unchanged(running(), message, "allocate", "r", num_tokens=20, num_processed_tokens=21)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_processed_tokens", 0), ("num_processed_tokens", 41), ("hit_tokens", 24)],
)
def test_check_finds_counts_of_a_request_that_contradict_its_pages(field, value):
    manager = manager_of(geometry("windowed", full(), sliding(window=6)))
    manager.allocate("r", num_tokens=40)
    manager.release_passed("r", 23)
    manager.check()

    setattr(manager._requests["r"], field, value)

    with pytest.raises(InvariantError):
        manager.check()


def test_check_finds_cached_content_of_more_tokens_than_a_request_has():
    manager = running()

    manager._requests["r"].committed_tokens = 44

    with pytest.raises(InvariantError, match="slots for 40 tokens, and cached content of 44"):
        manager.check()


def test_check_finds_bytes_below_nothing():
    table = TableMemory(
        name="full", used_bytes=400, useless_bytes=-100, evictable_bytes=0, empty_bytes=0
    )
    report = MemoryReport(tables=(table,), empty_large_bytes=600, null_bytes=100)
    assert report.arena_bytes == 1000

    with pytest.raises(InvariantError, match="does not divide the 1000 bytes"):
        check_memory(report, 1000)


# States


@pytest.mark.parametrize("num_tokens", [44, 400])
def test_a_state_is_not_kept_of_more_tokens_than_a_request_has(num_tokens):
    message = f"at most the 40 that request 'r' has slots for, got {num_tokens}"

    unchanged(running(), message, "keep_state", "r", b"hash", num_tokens)


def test_a_state_is_not_kept_under_the_hash_of_other_tokens():
    message = r"prefix_hash must be b'4', that of the first 20 tokens of request 'r', got b'5'"

    unchanged(running(), message, "keep_state", "r", HASHES[5], 20)


@pytest.mark.parametrize("prefix_hash", [None, "hash", 3])
def test_a_state_is_kept_under_bytes(prefix_hash):
    unchanged(running(), "prefix_hash must be bytes, got", "keep_state", "r", prefix_hash, 20)


# Hits


def with_prefix(cut=HYBRID, **options):
    """A manager in which 40 tokens are cached, and their hit."""
    manager = manager_of(cut, **options)
    manager.allocate("first", num_tokens=41)
    manager.commit("first", HASHES, 40)
    manager.keep_state("first", HASHES[9], 40)
    manager.new_step()
    manager.free("first")
    hit = manager.lookup(HASHES, max_tokens=40)
    assert hit.num_tokens == 40
    return manager, hit


@pytest.mark.parametrize("cut", [HYBRID, STATES], ids=["as_large", "of_other_page_tables"])
def test_a_hit_of_another_manager_is_refused(cut):
    _, hit = with_prefix(cut)
    manager, own = with_prefix()
    message = "hit must have been looked up in this manager"

    unchanged(manager, message, "allocate", "r", num_tokens=41, hit=hit)

    manager.allocate("r", num_tokens=41, hit=own)
    manager.check()


def test_a_hit_of_what_was_forgotten_is_refused():
    manager, hit = with_prefix()
    assert manager.reset_prefix_cache()

    unchanged(manager, "hit must be looked up again", "allocate", "r", num_tokens=41, hit=hit)


def test_a_hit_of_what_was_computed_once_more_is_refused():
    manager = manager_of(geometry("windowed", full(), sliding(window=6)), 60)
    for name in "ab":
        manager.allocate(name, num_tokens=40)
    manager.commit("a", HASHES, 40)
    manager.free("a")
    hit = manager.lookup(HASHES, max_tokens=39)
    manager.commit("b", HASHES, 40)  # in whose pages it lies from now on

    unchanged(manager, "hit must be looked up again", "allocate", "r", num_tokens=40, hit=hit)


def test_a_hit_may_be_older_than_what_is_cached_since():
    manager, hit = with_prefix()
    manager.allocate("other", num_tokens=20)
    manager.commit("other", HASHES[20:], 20)

    manager.allocate("r", num_tokens=41, hit=hit)
    manager.check()


# Requests that wait


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_a_request_is_announced_once_whatever_is_evicted_first(policy, prefix_caching):
    manager = manager_of(eviction_policy=EVICTION_POLICIES[policy](), prefix_caching=prefix_caching)
    manager.announce("r", HASHES, num_tokens=20)

    message = "request_id must name a request that was not announced, got 'r'"
    unchanged(manager, message, "announce", "r", HASHES, num_tokens=20)

    manager.withdraw("r")
    manager.announce("r", HASHES, num_tokens=20)
    manager.allocate("r", num_tokens=20)
    message = "request_id must not name a running request, got 'r'"
    unchanged(manager, message, "announce", "r", HASHES, num_tokens=20)
    manager.free("r")
    manager.announce("r", HASHES, num_tokens=20)
    manager.check()


# Images


def image(start, num_tokens=6, content=None):
    return Image(start_token=start, num_tokens=num_tokens, content=content)


@pytest.mark.parametrize("value", [*NO_COUNTS, 0])
def test_an_image_has_a_place_and_tokens(value):
    with pytest.raises(ValueError, match=rf"num_tokens of an image must be .*, got {value!r}"):
        image(3, value)
    if value == 0:
        return
    with pytest.raises(ValueError, match=rf"start_token of an image must be .*, got {value!r}"):
        image(value)
    with pytest.raises(ValueError, match=rf"prompt_tokens must be .*, got {value!r}"):
        RequestFacts(prompt_tokens=value)


def test_the_content_of_an_image_is_bytes():
    with pytest.raises(ValueError, match="content of an image must be bytes, got 'cat'"):
        image(0, content="cat")


def test_images_out_of_order_are_refused():
    with pytest.raises(ValueError, match="one that begins at 3 after one at 20"):
        RequestFacts(prompt_tokens=40, images=(image(20), image(3)))


def test_an_image_has_a_place_in_its_request():
    with pytest.raises(ValueError, match="placeholder_tokens of an image must be a positive"):
        Image(start_token=0, num_tokens=4, placeholder_tokens=0)


def test_images_of_one_content_have_one_size():
    with pytest.raises(ValueError, match="as many tokens, got 6 and 8 of b'cat'"):
        RequestFacts(prompt_tokens=40, images=(image(3, 6, b"cat"), image(20, 8, b"cat")))

    RequestFacts(prompt_tokens=40, images=(image(3, 6), image(20, 8)))


OVERLAPPING = RequestFacts(prompt_tokens=40, images=(image(3), image(8)))


@pytest.mark.parametrize("kind", [cross, embedding])
def test_images_may_begin_at_any_token(kind):
    manager = manager_of(geometry("images", full(slot_bytes=24 if kind is cross else 96), kind()))

    manager.allocate("r", num_tokens=40, facts=OVERLAPPING)
    manager.check()


# Options


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize(
    "option",
    [
        "num_large_pages",
        "hash_tokens",
        "answer_interval_tokens",
        "ahead_tokens",
        "num_host_large_pages",
        "load_at_once_bytes",
    ],
)
def test_options_of_the_manager_that_count_are_counts(option, value):
    if value is None and option.endswith("interval_tokens"):
        return
    with pytest.raises(ValueError, match=rf"{option} must be .*, got {value!r}"):
        manager_of(**{option: value})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, "0.5"])
@pytest.mark.parametrize("option", ["left_share", "step_tokens"])
def test_options_of_the_manager_that_are_numbers_are_in_their_range(option, value):
    with pytest.raises(ValueError, match=rf"{option} must be .*, got {value!r}"):
        manager_of(**{option: value})


def test_states_are_kept_where_there_are_hashes():
    with pytest.raises(ValueError, match="answer_interval_tokens must be 0 or a multiple of"):
        manager_of(answer_interval_tokens=6)


@pytest.mark.parametrize("num_host_large_pages", [1, 2])
def test_host_memory_has_a_large_page_for_each_page_table(num_host_large_pages):
    with pytest.raises(ValueError, match="num_host_large_pages must be 0, or at least 3"):
        manager_of(num_host_large_pages=num_host_large_pages)


@pytest.mark.parametrize("value", [-1, 0, 1.5, math.nan, "0.1", True])
@pytest.mark.parametrize(
    "option", ["max_padding", "arena_bytes", "tokens_per_page", "typical_tokens"]
)
def test_options_of_the_planner_are_in_their_range(option, value):
    if (option, value) == ("tokens_per_page", True):
        value = False
    given = [512, value] if option == "typical_tokens" else value
    with pytest.raises(ValueError, match=rf"{option} must .*"):
        plan(MODEL, **{option: given})


@pytest.mark.parametrize("typical_tokens", [(), (0,), (512.0,)])
def test_waste_is_expected_over_lengths(typical_tokens):
    with pytest.raises(ValueError, match="typical_tokens must"):
        expected_waste(exact_lcm(MODEL), typical_tokens)


@pytest.mark.parametrize("value", [True, 1.0])
@pytest.mark.parametrize("option", ["tokens_per_page", "alignment_bytes"])
def test_a_page_of_one_token_is_of_the_integer_one(option, value):
    with pytest.raises(ValueError, match=f"{option} must be a positive integer, got {value}"):
        exact_lcm(MODEL, **{option: value})


@pytest.mark.parametrize("value", [*NO_COUNTS, 0])
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (SlidingWindowPolicy, "window_tokens"),
        (ChunkedLocalPolicy, "chunk_tokens"),
        (StatePolicy, "num_slots"),
        (CrossAttentionPolicy, "page_slots"),
        (ImageEmbeddingPolicy, "page_slots"),
        (lambda value: Grain(page_slots=value, hash_tokens=4), "page_slots"),
        (lambda value: Grain(page_slots=4, hash_tokens=value), "hash_tokens"),
    ],
)
def test_a_policy_counts_from_one(policy, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be a positive integer, got {value!r}"):
        policy(value)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_counts_of_layer_types_that_may_be_none_are_counts(value):
    budget = {
        "name": "budget",
        "layers": LAYERS,
        "mean_budget_tokens": 20,
        "recent_tokens": 4,
        "steepness": 4,
        "num_layers": 3,
    }
    with pytest.raises(ValueError, match=rf"'state': draft_tokens must be .*, got {value!r}"):
        State(name="state", layers=LAYERS, draft_tokens=value)
    with pytest.raises(ValueError, match=rf"'budget': layer_index must be .*, got {value!r}"):
        TokenBudget(**budget, layer_index=value)


@pytest.mark.parametrize("value", [*NO_COUNTS, 0])
def test_an_allocator_counts_large_pages_and_small_ones(value):
    with pytest.raises(ValueError, match="num_large_pages must be a positive integer"):
        Allocator([2], value)
    with pytest.raises(ValueError, match="small_pages_per_large_page must be a positive integer"):
        Allocator([2, value], 8)


@pytest.mark.parametrize(
    ("needs", "reserve"), [([-1, 2], 0), ([1], 0), ([1, 1, 1], 0), ([1, 1], -1)]
)
def test_an_allocator_is_asked_for_pages_of_every_page_table(needs, reserve):
    allocator = Allocator([2, 1], 8)

    with pytest.raises(ValueError, match=r"needs, and expected, must have|zip"):
        allocator.room(needs, reserve_large_pages=reserve)
    with pytest.raises(ValueError, match="needs, and expected, must have one number"):
        allocator.take(needs, needs, owner=1, reserve_large_pages=reserve)
    allocator.check()


@pytest.mark.parametrize("owner", [0, -1])
def test_an_allocator_knows_for_whom_it_takes_pages(owner):
    allocator = Allocator([2, 1], 8)

    with pytest.raises(ValueError, match="owner must be a positive integer"):
        allocator.take([1, 1], [1, 1], owner=owner)
    with pytest.raises(ValueError, match="needs, and expected, must have one number"):
        allocator.take([1, 1], [1], owner=1)
    allocator.check()

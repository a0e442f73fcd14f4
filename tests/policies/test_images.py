"""Cross attention and image embeddings: slots of images, found again by their content."""

import pytest

from jenga.policies import ALL_PAGES, NEVER, Grain, Image, RequestFacts
from jenga.policies.cross_attention import CrossAttentionPolicy
from jenga.policies.full_attention import ImageHostPolicy
from jenga.policies.image_embedding import ImageEmbeddingPolicy
from jenga.policies.policy_check import check_policy

CAT = Image(start_token=3, num_tokens=6, content=b"cat")
DOG = Image(start_token=20, num_tokens=4, content=b"dog")
FACTS = RequestFacts(prompt_tokens=40, images=(CAT, DOG))
GRAIN = Grain(page_slots=4, hash_tokens=16)


def test_an_image_begins_on_a_page_of_its_own():
    keys = CrossAttentionPolicy(4).content_keys(FACTS, [], GRAIN, ALL_PAGES)

    assert keys == [(b"cat", 0), (b"cat", 1), (b"dog", 0)]


def test_an_image_without_a_name_has_no_key():
    facts = RequestFacts(images=(Image(start_token=0, num_tokens=5),))

    assert CrossAttentionPolicy(4).content_keys(facts, [], GRAIN, ALL_PAGES) == [None, None]


def test_cross_attention_wants_slots_when_the_image_begins():
    policy = CrossAttentionPolicy(4)

    assert policy.update_last_access(FACTS, 0, 3) == range(0)
    assert policy.update_last_access(FACTS, 0, 4) == range(8)
    assert policy.update_last_access(FACTS, 30, 31) == range(12)
    assert policy.max_tokens(FACTS, 0, 0) == 3
    assert policy.max_tokens(FACTS, 0, 8) == 20
    assert policy.max_tokens(FACTS, 0, 12) == NEVER


def test_all_pages_of_an_image_are_reused_or_none():
    policy = CrossAttentionPolicy(4)

    assert list(policy.reused_pages(FACTS, [5, None, 6], GRAIN, 0)) == [2]
    assert list(policy.reused_pages(FACTS, [5, 4, None], GRAIN, 0)) == [0, 1]
    assert policy.get_possible_prefix(FACTS, [None] * 3, GRAIN, 32) == 32


def test_pages_of_an_image_share_a_random_length_within_the_prompt():
    policy = CrossAttentionPolicy(4)

    lengths = policy.set_prefix_length(FACTS, range(3), GRAIN)

    assert lengths[0] == lengths[1] != lengths[2]
    assert all(1 <= length <= 40 for length in lengths)
    assert lengths == policy.set_prefix_length(FACTS, range(3), GRAIN)


def test_embeddings_are_given_up_as_they_are_consumed():
    policy = ImageEmbeddingPolicy(4)

    assert policy.update_last_access(FACTS, 0, 4) == range(8)
    assert policy.update_last_access(FACTS, 7, 8) == range(4, 8)
    assert policy.update_last_access(FACTS, 9, 20) == range(8, 8)
    assert policy.update_last_access(FACTS, 9, 21) == range(8, 12)
    assert policy.update_last_access(FACTS, 24, 30) == range(12, 12)


# One line break before its rows, and one between them.
RAGGED = Image(start_token=5, num_tokens=6, placeholder_tokens=8, content=b"cat")
OVERLAPPING = Image(start_token=9, num_tokens=7, content=b"meow")
WITH_BREAKS = RequestFacts(prompt_tokens=40, images=(RAGGED, DOG))
WITH_SOUND = RequestFacts(prompt_tokens=40, images=(RAGGED, OVERLAPPING, DOG))


def test_line_breaks_of_an_image_take_no_slot():
    policy = ImageEmbeddingPolicy(4)

    assert RAGGED.end_token == 13
    assert [RAGGED.consumed_tokens(at) for at in (5, 7, 8, 12, 13)] == [0, 0, 1, 5, 6]
    assert policy.update_last_access(WITH_BREAKS, 10, 11) == range(3, 8)
    assert policy.update_last_access(WITH_BREAKS, 13, 21) == range(8, 12)


def test_embeddings_of_an_image_are_kept_until_the_one_before_it_ends():
    policy = ImageEmbeddingPolicy(4)

    assert policy.update_last_access(WITH_SOUND, 12, 13) == range(5, 16)
    assert policy.update_last_access(WITH_SOUND, 13, 14) == range(12, 16)


@pytest.mark.parametrize("facts", [FACTS, WITH_BREAKS, WITH_SOUND])
@pytest.mark.parametrize("processed", range(30))
def test_embeddings_are_released_no_sooner_and_no_later_than_said(processed, facts):
    policy = ImageEmbeddingPolicy(4)

    def first_page(at):
        return policy._first_slot(facts, at) // 4

    expected = next(
        (at for at in range(processed + 1, 60) if first_page(at) > first_page(processed)), NEVER
    )
    assert policy.next_release(facts, processed, 4) == expected


@pytest.mark.parametrize("facts", [FACTS, WITH_BREAKS, WITH_SOUND])
@pytest.mark.parametrize("chunk", [1, 3, 8, 18, 40])
def test_the_peak_of_embeddings_is_the_most_that_any_chunk_finds(chunk, facts):
    policy = ImageEmbeddingPolicy(4)

    most = max(
        len(policy.update_last_access(facts, start, min(40, start + chunk))) for start in range(40)
    )

    assert policy.peak_slots(facts, 40, chunk) == most


def test_only_embeddings_not_yet_consumed_must_be_cached():
    policy = ImageEmbeddingPolicy(4)

    assert list(policy.reused_pages(FACTS, [None, 4, 5], GRAIN, 8)) == [1, 2]
    assert list(policy.reused_pages(FACTS, [None, 4, 5], GRAIN, 3)) == [2]


def test_full_attention_that_holds_images_takes_all_slots_of_an_image_when_it_begins():
    policy = ImageHostPolicy()

    assert policy.update_last_access(FACTS, 0, 3) == range(3)
    assert policy.update_last_access(FACTS, 0, 4) == range(9)
    assert policy.update_last_access(FACTS, 4, 9) == range(9)
    assert policy.update_last_access(FACTS, 9, 20) == range(20)
    assert policy.update_last_access(FACTS, 20, 22) == range(24)
    assert [policy.max_tokens(FACTS, 0, slots) for slots in (3, 8, 9, 23, 24)] == [3, 3, 9, 20, 24]
    assert [policy.peak_slots(FACTS, end, 1) for end in (3, 5, 30)] == [3, 9, 30]


def test_slots_are_taken_up_to_the_end_of_the_longer_of_two_images_that_overlap():
    policy = ImageHostPolicy()

    assert policy.update_last_access(WITH_SOUND, 0, 6) == range(13)
    assert policy.update_last_access(WITH_SOUND, 0, 10) == range(16)
    assert policy.max_tokens(WITH_SOUND, 0, 15) == 9


def test_a_page_of_embeddings_is_final_once_keys_and_values_replace_them():
    policy = ImageHostPolicy()

    assert policy.final_pages(FACTS, 4, GRAIN) == 1
    assert policy.final_pages(FACTS, 9, GRAIN) == 2


@pytest.mark.parametrize("page_slots", [1, 4, 16])
def test_answers_of_full_attention_that_holds_images_do_not_contradict_each_other(page_slots):
    check_policy("full", ImageHostPolicy(), page_slots)

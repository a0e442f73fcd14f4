from jenga.eviction_order import Prospect
from jenga.landmarks import NEAR_TOKENS, QUESTION_TOKENS, landmarks, parts, prospect_of
from jenga.policies import FullAttentionPolicy, Grain, RequestFacts, SlidingWindowPolicy

GRAIN = Grain(page_slots=16, hash_tokens=16)
WINDOW = SlidingWindowPolicy(64)
FACTS = RequestFacts(prompt_tokens=4096)


def test_landmarks_of_a_first_request_are_near_the_end_of_its_prompt():
    marks = landmarks(WINDOW, FACTS, GRAIN, branches=())

    ended, near = marks
    assert (ended.prospect, near.prospect) == (Prospect.ENDED, Prospect.NEAR)
    assert ended.pages == range((4096 - QUESTION_TOKENS - 63) // 16, 256)
    assert near.pages == range((4096 - NEAR_TOKENS - 63) // 16, 256)


def test_where_a_turn_is_expected_the_end_of_a_prompt_is_less_likely_to_be_asked_again():
    marks = landmarks(WINDOW, FACTS, GRAIN, branches=(), expects_turn=True)

    assert [mark.prospect for mark in marks] == [Prospect.NEAR, Prospect.NEAR]


def test_landmark_of_a_branch_is_the_window_before_it():
    branched, *_ = landmarks(WINDOW, FACTS, GRAIN, branches=(0, 1024))

    assert branched.prospect is Prospect.BRANCHED
    assert branched.pages == range((1024 - 63) // 16, 64)


def test_no_end_of_a_prompt_is_guessed_where_its_branch_is_known():
    near_end = landmarks(WINDOW, FACTS, GRAIN, branches=(4096 - QUESTION_TOKENS,))
    far_from_it = landmarks(WINDOW, FACTS, GRAIN, branches=(64,))

    assert [mark.prospect for mark in near_end] == [Prospect.BRANCHED]
    assert len(far_from_it) == 3


def test_landmarks_of_full_attention_are_whole_prefixes():
    branched, ended, _ = landmarks(FullAttentionPolicy(), FACTS, GRAIN, branches=(1024,))

    assert (branched.pages, ended.pages) == (range(64), range(256))


def test_parts_agree_with_every_page_by_itself():
    marks = landmarks(WINDOW, FACTS, GRAIN, branches=(1024, 2048))

    divided = parts(marks, range(3, 256))

    assert [number for part, _ in divided for number in part] == list(range(3, 256))
    assert all(
        prospect_of(marks, number) == prospect for part, prospect in divided for number in part
    )
    assert {prospect for _, prospect in divided} == {
        Prospect.PASSED,
        Prospect.NEAR,
        Prospect.ENDED,
        Prospect.BRANCHED,
    }

"""How long questions at the ends of prompts are, learnt from prompts that part from known texts."""

import pytest

from jenga.prefix.question_length import (
    FACTORS,
    QUESTION_TOKENS,
    REMEMBERED_PROMPTS,
    QuestionLength,
)

TEXT = 30_000
LONGEST = int(FACTORS[-1] * QUESTION_TOKENS)


def observed(*question_lengths, text_tokens=TEXT):
    questions = QuestionLength()
    for tokens in question_lengths:
        questions.observe(text_tokens + tokens, text_tokens)
    return questions


@pytest.mark.parametrize(
    ("question_lengths", "distance"),
    [
        pytest.param([], 512, id="nothing known"),
        pytest.param([40], 512, id="short"),
        pytest.param([512], 512, id="as long as the least"),
        pytest.param([513], 768, id="longer"),
        pytest.param([700, 2500], 3072, id="the longer of two"),
        # Nine short ones lose more by the long distance than the long one gains.
        pytest.param([*[40] * 9, 8000], 512, id="few are long"),
        pytest.param([40, 40, 2000], 2048, id="some are long"),
        pytest.param([20_000], 512, id="no question, but another text"),
    ],
)
def test_the_distance_is_the_one_that_finds_most(question_lengths, distance):
    assert observed(*question_lengths).distance(TEXT) == distance


def test_at_most_half_of_a_prompt_is_a_question():
    questions = observed(LONGEST)

    assert questions.distance(2 * LONGEST) == LONGEST
    assert questions.distance(2 * LONGEST - 1) == QUESTION_TOKENS
    assert questions.distance(600) == QUESTION_TOKENS


def test_former_prompts_are_forgotten():
    assert observed(*[2000] * 20, *[40] * 20).distance(TEXT) == 2048
    assert observed(*[2000] * 20, *[40] * (8 * REMEMBERED_PROMPTS)).distance(TEXT) == 512

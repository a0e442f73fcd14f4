"""What tests take for the same generation of two engines."""

import pytest

from tests.vllm_plugin.conftest import assert_same_generation


def result(*answers):
    return {"outputs": [dict(answer) for answer in answers]}


def answer(tokens, *, likelier=1e-4, prompt=(1, 2)):
    """An answer that takes `tokens`; 7 and 8 differ by so much in the second place."""
    taken = 8 if tokens[1] == 8 else 7
    other = 15 - taken
    logprobs = [
        {"5": -1.0},
        {str(taken): -2.0, str(other): -2.0 - likelier},
        {str(tokens[2]): -3.0},
    ]
    return {"prompt": list(prompt), "tokens": list(tokens), "logprobs": logprobs}


OURS = answer([5, 7, 9])


def test_answers_may_part_at_a_tie_where_that_is_allowed():
    theirs = answer([5, 8, 4])

    assert_same_generation(result(OURS), result(theirs), may_part=True)
    with pytest.raises(AssertionError, match="prompt 0, token 1"):
        assert_same_generation(result(OURS), result(theirs), may_part=False)


def test_answers_may_not_part_where_one_token_is_likelier():
    theirs = answer([5, 8, 4], likelier=0.1)

    with pytest.raises(AssertionError, match="prompt 0, token 1"):
        assert_same_generation(result(OURS), result(theirs), may_part=True)


def test_turns_behind_answers_that_parted_are_not_compared_and_others_are():
    behind = answer([5, 7, 9], prompt=(1, 2, 5, 7, 9)), answer([6, 8, 4], prompt=(1, 2, 5, 8, 4))
    theirs = answer([5, 8, 4])

    assert_same_generation(result(OURS, behind[0]), result(theirs, behind[1]), may_part=True)
    wrong = OURS | {"tokens": [6, 7, 9]}
    with pytest.raises(AssertionError, match="prompt 1, token 0"):
        assert_same_generation(result(OURS, OURS), result(theirs, wrong), may_part=True)

"""Turns of conversations told from prompts that are asked again."""

import pytest

from jenga.ends import LEAST_TURNS, REMEMBERED_KEYS, Ends
from jenga.policies import RequestFacts
from jenga.request import Request


def keys_of(name, num_tokens):
    return [f"{name}{end}".encode() for end in range(16, num_tokens + 1, 16)]


def run(ends, keys, *, prompt_tokens, num_tokens, shared_tokens=0):
    """Let a request come in, compute its prompt and end; whether a turn is expected of it."""
    shared = keys[shared_tokens // 16 - 1] if shared_tokens else None
    expects_turn = ends.expects_turn(shared)
    ends.admit(shared)
    one = Request(RequestFacts(prompt_tokens=prompt_tokens), 1)
    one.branch_tokens, one.committed_tokens = shared_tokens, num_tokens
    one.end_key = keys[num_tokens // 16 - 1]
    ends.note_prompt(one, keys)
    ends.note_end(one)
    return expects_turn


def converse(ends, name, num_turns):
    """Turns of 100 tokens each, with answers of 60; of which turns one more was expected."""
    keys, expected = keys_of(name, 16 * (10 * num_turns + 40)), []
    tokens = 0
    for _ in range(num_turns):
        shared, prompt, end = tokens, tokens + 100, tokens + 160
        expected.append(run(ends, keys, prompt_tokens=prompt, num_tokens=end, shared_tokens=shared))
        tokens = end
    return expected


def test_who_goes_on_from_an_end_is_a_turn():
    assert converse(Ends(16), "a", 4) == [False, True, True, True]


def test_an_end_has_one_next_turn():
    ends = Ends(16)
    converse(ends, "a", 2)
    first = keys_of("a", 160)
    assert not ends.expects_turn(first[-1])


def test_a_request_that_generated_nothing_kept_has_no_end():
    ends = Ends(16)
    keys = keys_of("a", 160)
    run(ends, keys, prompt_tokens=100, num_tokens=96)
    assert not ends.expects_turn(keys[5])


def test_where_requests_are_turns_they_are_expected_of_everybody():
    ends = Ends(16)
    converse(ends, "a", LEAST_TURNS + 3)
    assert ends.expects_turn(None)


def test_where_prompts_are_asked_again_turns_are_expected_of_turns_alone():
    ends = Ends(16)
    converse(ends, "a", LEAST_TURNS + 3)
    keys = keys_of("q", 320)
    run(ends, keys, prompt_tokens=300, num_tokens=320)
    # The same prompt, with its last tokens put otherwise.
    again = [*keys[:12], *keys_of("r", 320)[12:]]
    run(ends, again, prompt_tokens=300, num_tokens=320, shared_tokens=192)
    assert not ends.expects_turn(None)
    assert ends.expects_turn(again[-1])


def test_a_common_beginning_right_before_the_end_of_short_prompts_is_no_question():
    ends = Ends(16)
    converse(ends, "a", LEAST_TURNS + 3)
    system = keys_of("s", 160)
    for number in range(20):
        keys = [*system, *keys_of(f"{number} ", 160)]
        shared = 160 if number else 0
        run(ends, keys, prompt_tokens=200, num_tokens=256, shared_tokens=shared)
    assert ends._num_questions < 1.01
    converse(ends, "b", 12)
    assert ends.expects_turn(None)


@pytest.mark.parametrize("num_requests", [REMEMBERED_KEYS // 4])
def test_what_is_remembered_is_bounded(num_requests):
    ends = Ends(16)
    for number in range(num_requests):
        run(ends, keys_of(f"{number} ", 320), prompt_tokens=300, num_tokens=320)
    assert len(ends._places) == REMEMBERED_KEYS
    ends.clear()
    assert not ends._places

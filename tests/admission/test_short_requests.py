"""Room that a prompt leaves in a step: whole short requests, the first of the queue, not much."""

import pytest

from jenga.admission.short_requests import SHORT_SHARE, tokens_to_leave


@pytest.mark.parametrize(
    ("rests", "left"),
    [
        ([], 0),
        ([20], 20),
        ([20, 30, 40], 90),
        ([20, 100, 1], 20),  # nobody passes one who waits longer
        ([101, 1], 0),
        ([100], 100),
        ([60, 41], 60),  # a part of a request is of no use
        ([20, None, 1], 20),
        ([None, 1], 0),
    ],
)
def test_room_is_left_for_the_first_of_the_queue_if_they_are_short(rests, left):
    assert tokens_to_leave(rests, int(100 / SHORT_SHARE)) == left


def test_each_request_takes_what_its_drafts_take_in_addition():
    assert tokens_to_leave([20, 30], int(100 / SHORT_SHARE), further_tokens=3) == 56
    assert tokens_to_leave([20, 75], int(100 / SHORT_SHARE), further_tokens=3) == 23


def test_requests_behind_the_first_long_one_are_not_looked_up():
    rests = iter([5, 1000, 7])

    assert tokens_to_leave(rests, int(100 / SHORT_SHARE)) == 5
    assert next(rests) == 7

"""The walk of a request through the files of the manager stays as short as it is."""

import pytest

from jenga.models.known import known_model
from jenga.planning.planner import plan
from tests.walk import arrows_of, main, walks

MOST_FILES = 34
"""Files of an admission that finds a part of its prompt.

The tree of checkpoints, the choice of what is evicted and the length of questions are three of
them.
"""


def test_a_decode_step_of_a_model_with_states_goes_down_and_comes_back_once():
    arrows = walks(plan(known_model("jamba-1.5-mini").spec()))["allocate (a page more)"]

    assert len({callee for _, callee in arrows}) == len(arrows)


@pytest.mark.parametrize("model", ["jamba-1.5-mini", "gemma-3-27b"])
def test_an_admission_goes_through_few_files(model):
    arrows = walks(plan(known_model(model).spec()))["allocate (admission)"]

    assert len({callee for _, callee in arrows}) <= MOST_FILES


def test_arrows_name_callers_and_leave_other_packages_out():
    spec = known_model("jamba-1.5-mini").spec()

    arrows = arrows_of(lambda: sorted([1], key=lambda _: plan(spec)))

    assert ("", "planning/planner.py") in arrows
    assert all(name.endswith(".py") for pair in arrows for name in pair if name)


def test_the_command_counts_files_and_arrows(capsys):
    assert main(["jamba-1.5-mini", "--follow"]) == 0
    out = capsys.readouterr().out

    assert "allocate (admission)" in out
    assert "caller -> manager.py: Manager.lookup" in out

"""What weights leave of a GPU."""

import pytest

from jenga.models import known_model
from jenga.sim.hardware.budget import memory_budget
from jenga.sim.hardware.gpus import find_gpu


def test_arena_is_what_weights_and_reserve_leave():
    budget = memory_budget(
        [known_model("llama-3.1-8b")], find_gpu("100GB"), utilization=0.9, reserved_bytes=10**9
    )

    assert budget.require_arena() == 90 * 10**9 - 16 * 10**9 - 10**9


def test_weights_of_target_and_draft_are_divided_over_ranks():
    models = [known_model("llama-3.1-70b"), known_model("llama-3.2-1b")]
    budget = memory_budget(models, find_gpu("H100-80G"), ranks=4)

    assert budget.weight_bytes == (141_200_000_000 + 2_400_000_000) // 4
    assert budget.arena_bytes == budget.usable_bytes - budget.weight_bytes - budget.reserved_bytes


def test_weights_that_do_not_fit_are_named_with_the_ranks_that_would():
    budget = memory_budget([known_model("llama-3.1-70b")], find_gpu("H100-80G"))

    with pytest.raises(ValueError, match=r"141\.2 GB and 1\.6 GB .* 0\.92 of its 85\.5 GB = 78\.7"):
        budget.require_arena()
    with pytest.raises(ValueError, match=r"; 2 ranks would fit$"):
        budget.require_arena()


def test_weights_that_fit_on_no_number_of_ranks_are_refused_without_a_way_out():
    budget = memory_budget([known_model("llama-3.1-70b")], find_gpu("1GiB"), ranks=2)

    with pytest.raises(ValueError, match=r"1/2 of 141.2 GB = 70.6 GB and .* GB$"):
        budget.require_arena()


def test_unknown_weights_are_asked_for_by_name():
    model = known_model("deepseek-v4-flash")

    with pytest.raises(
        ValueError, match=r"'deepseek-v4-flash' are not known .*--weights BYTES.*total"
    ):
        memory_budget([model], find_gpu("H200"), ranks=4)
    assert memory_budget([model], find_gpu("H200"), ranks=4, weight_bytes=160 * 10**9).arena_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"utilization": 0.0}, "utilization must be"), ({"ranks": 0}, "ranks must be")],
)
def test_budget_refuses_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        memory_budget([known_model("llama-3.1-8b")], find_gpu("H200"), **arguments)

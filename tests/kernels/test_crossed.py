"""All combinations of values are tests, and each value is in a fast one."""

from tests.kernels.crossed import crossed, halved

VALUES = {"one": {"a": 1, "b": 2, "c": 3}, "two, three": [(4, 5), (6, 7)], "four": [8]}


def cases_of(mark):
    names, cases = mark.args
    fast = [dict(zip(names, case.values, strict=True)) for case in cases if not case.marks]
    return cases, fast


def test_combinations_are_complete_and_each_value_is_fast():
    cases, fast = cases_of(crossed(VALUES))

    assert [case.id for case in cases] == [
        f"{one}-{two}-8" for one in "abc" for two in ("(4, 5)", "(6, 7)")
    ]
    assert fast == [
        {"one": 1, "two": 4, "three": 5, "four": 8},
        {"one": 2, "two": 6, "three": 7, "four": 8},
        {"one": 3, "two": 4, "three": 5, "four": 8},
    ]


def test_two_halves_have_every_value_in_a_fast_test():
    halves = [halved("one", VALUES["one"], first=first).args[1] for first in (0, 1)]

    assert [[case.id for case in cases if not case.marks] for cases in halves] == [
        ["a", "c"],
        ["b"],
    ]
    assert [len(cases) for cases in halves] == [3, 3]

"""Tests with all combinations of some values, of which few are fast."""

from collections.abc import Iterable, Mapping
from itertools import product

import pytest


def crossed(values: Mapping[str, Mapping[str, object] | Iterable[object]]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations. Each value is in a fast one; the rest are slow.

    Args:
        values: Names of arguments, separated by commas -> values, with their ids if it is a
            mapping. A value for several arguments is a tuple.
    """
    lists = [
        list(each.items() if isinstance(each, Mapping) else ((str(one), one) for one in each))
        for each in values.values()
    ]
    longest = max(map(len, lists))
    fast = {tuple(index % len(each) for each in lists) for index in range(longest)}
    names = [[name.strip() for name in each.split(",")] for each in values]
    cases = []
    for indices in product(*(range(len(each)) for each in lists)):
        chosen = [each[index] for each, index in zip(lists, indices, strict=True)]
        arguments = [
            argument
            for (_, value), of_value in zip(chosen, names, strict=True)
            for argument in (value if len(of_value) > 1 else (value,))
        ]
        marks = [] if indices in fast else [pytest.mark.slow]
        cases.append(pytest.param(*arguments, marks=marks, id="-".join(key for key, _ in chosen)))
    return pytest.mark.parametrize([name for each in names for name in each], cases)


def halved(name: str, values: Mapping[str, object], *, first: int) -> pytest.MarkDecorator:
    """Parametrise a test by values of which every second is slow.

    Two tests of the same values have all of them in fast tests, if they differ in `first`.

    Args:
        name: Name of the argument.
        values: Ids -> values.
        first: Index of the first fast value, 0 or 1.
    """
    cases = [
        pytest.param(value, marks=[] if index % 2 == first else [pytest.mark.slow], id=key)
        for index, (key, value) in enumerate(values.items())
    ]
    return pytest.mark.parametrize(name, cases)

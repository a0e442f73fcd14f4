"""Every known model starts on every GPU its weights fit, with little padding and few tables."""

import functools
import gc
import importlib.util
import re
import time
from pathlib import Path

import pytest

from jenga.geometry import check_arena, check_geometry
from jenga.models import KvFormat, known_names
from jenga.planning.demand import TYPICAL_TOKENS, expected_waste
from jenga.planning.planner import plan
from jenga.spec import State

TABLE_PATH = Path(__file__).parents[2] / "perf" / "sweeps" / "table_geometry.py"


def load_table():
    specification = importlib.util.spec_from_file_location("table_geometry", TABLE_PATH)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


table = load_table()
NAMES = known_names()


def read_or_none(name, num_ranks, kv_format, *, refused_for):
    """The model and its parameters; None where it cannot be run so, for the reason expected."""
    try:
        return table.read(name, num_ranks, kv_format)
    except ValueError as error:
        if not re.search(refused_for, str(error)):
            raise
        return None


def timed_plan(model, arena_bytes):
    """A geometry and its seconds of CPU, without a collection of the whole suite's garbage."""
    gc.disable()
    try:
        start_s = time.process_time()
        geometry = plan(model, arena_bytes=arena_bytes)
        return geometry, time.process_time() - start_s
    finally:
        gc.enable()


@functools.cache
def plans(name):
    """Every way to run a model on every GPU it fits: (model, arena, geometry, seconds)."""
    planned = []
    for num_ranks in table.RANKS:
        for kv_format in table.FORMATS:
            found = read_or_none(name, num_ranks, kv_format, refused_for="tensor_parallel")
            if found is None:
                continue
            model, parameters_billion = found
            for _, arena_bytes in table.arenas(parameters_billion, num_ranks):
                geometry, seconds = timed_plan(model, arena_bytes)
                planned.append((model, arena_bytes, geometry, seconds))
    return planned


@pytest.mark.parametrize("name", NAMES)
def test_model_starts_on_every_gpu_that_its_weights_fit(name):
    assert plans(name)
    for _, arena_bytes, geometry, _ in plans(name):
        check_geometry(geometry)
        assert check_arena(geometry, arena_bytes) >= 64


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_bounded_at_every_typical_length(name):
    for _, _, geometry, _ in plans(name):
        for num_tokens in TYPICAL_TOKENS:
            assert expected_waste(geometry, [num_tokens]).padding <= 0.01


@pytest.mark.parametrize("name", NAMES)
def test_state_types_are_cut_into_few_runs(name):
    for model, _, geometry, _ in plans(name):
        has_states = any(isinstance(each, State) for each in model.layer_types)
        assert len(geometry.page_tables) <= len(model.layer_types) + (9 if has_states else 0)


@pytest.mark.parametrize("name", NAMES)
def test_plan_takes_milliseconds(name):
    assert min(seconds for *_, seconds in plans(name)) < 0.05
    assert max(seconds for *_, seconds in plans(name)) < 0.5


@pytest.mark.parametrize("kv_format", list(KvFormat), ids=lambda kv_format: kv_format.value)
def test_padding_is_bounded_in_every_kv_format(kv_format):
    num_plans = 0
    for name in NAMES:
        found = read_or_none(name, 1, kv_format, refused_for="kv_format")
        if found is None:
            continue
        geometry = plan(found[0])
        num_plans += 1
        for num_tokens in TYPICAL_TOKENS:
            assert expected_waste(geometry, [num_tokens]).padding <= 0.01, name
    assert num_plans


def test_table_has_a_row_for_every_model_and_is_the_same_every_time():
    names = [*NAMES[:3], "zamba2-7b"]
    first, second = ([text(row) for row in table.rows(names)] for _ in range(2))

    assert first == second
    assert len(first) == len(names) * len(table.RANKS) * len(table.FORMATS)


def text(row):
    return row if isinstance(row, str) else table.line(row)

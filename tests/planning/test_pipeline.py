"""One geometry for the ranks of a pipeline."""

import pytest

from jenga.geometry import check_geometry, exact_lcm
from jenga.models import known_model
from jenga.planning.pipeline import plan_pipeline
from jenga.planning.planner import plan
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State


def layers(name, *slot_bytes):
    return tuple(
        Layer(name=f"{name}.{index}", slot_bytes=each) for index, each in enumerate(slot_bytes)
    )


def model_of(*layer_types):
    return ModelSpec(name="model", layer_types=layer_types)


WINDOWS = model_of(
    FullAttention(name="full", layers=layers("full", *[1024] * 2)),
    SlidingWindow(name="sliding", layers=layers("sliding", *[1024] * 5), window_tokens=40),
)
HYBRID = model_of(
    FullAttention(name="full", layers=layers("full", *[256] * 4)),
    State(name="state", layers=layers("state", *[77_056] * 28)),
)


def names(model, **numbers):
    """Get the layers with these numbers, by their types' names."""
    return {
        f"{layer_type.name}.{index}"
        for layer_type in model.layer_types
        for index in numbers.get(layer_type.name, ())
    }


def check_stages(pipeline, stages):
    """Check that pages mean the same on all ranks, and that each rank's share of them fits."""
    geometry = pipeline.geometry
    check_geometry(geometry)
    assert geometry.large_page_bytes == sum(each.large_page_bytes for each in pipeline.stages)
    for stage, layer_names in zip(pipeline.stages, stages, strict=True):
        assert stage.layer_names == set(layer_names)
        for table, share in zip(geometry.page_tables, stage.shares, strict=True):
            assert share.small_page_bytes * table.small_pages_per_large_page == (
                stage.large_page_bytes
            )
            assert share.small_page_bytes % 64 == 0
            assert share.padding_bytes >= 0
            end_bytes = 0
            for layer, offset in zip(share.layers, share.layer_offset_bytes, strict=True):
                assert offset >= end_bytes
                assert offset % 64 == 0
                end_bytes = offset + layer.slot_bytes * table.slots_per_page
            assert end_bytes <= share.small_page_bytes
    for index, table in enumerate(geometry.page_tables):
        shares = [stage.shares[index] for stage in pipeline.stages]
        assert table.small_page_bytes == sum(share.small_page_bytes for share in shares)
        assert table.payload_bytes == sum(share.payload_bytes for share in shares)
        assert table.layers == tuple(layer for share in shares for layer in share.layers)


def test_one_rank_has_the_geometry_of_the_model():
    stages = [names(WINDOWS, full=range(2), sliding=range(5))]

    pipeline = plan_pipeline(WINDOWS, stages, plan)

    assert pipeline.geometry == plan(WINDOWS)
    check_stages(pipeline, stages)


@pytest.mark.parametrize("make", [plan, exact_lcm])
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([{"full": [0], "sliding": [0, 1, 2]}, {"full": [1], "sliding": [3, 4]}]),
        pytest.param([{"sliding": [0, 1]}, {"full": [0, 1], "sliding": [2, 3, 4]}]),
        pytest.param([{"sliding": range(5)}, {"full": [0]}, {"full": [1]}]),
    ],
    ids=["uneven", "no_full_layer_first", "a_type_on_each"],
)
def test_pages_mean_the_same_on_all_ranks(stages, make):
    stages = [names(WINDOWS, **stage) for stage in stages]

    pipeline = plan_pipeline(WINDOWS, stages, make)

    check_stages(pipeline, stages)


def test_an_even_split_wastes_no_more_than_one_rank():
    halves = [
        names(HYBRID, full=[0, 1], state=range(14)),
        names(HYBRID, full=[2, 3], state=range(14, 28)),
    ]

    pipeline = plan_pipeline(HYBRID, halves, plan)

    check_stages(pipeline, halves)
    first, second = pipeline.stages
    assert first.large_page_bytes == second.large_page_bytes
    for table in pipeline.geometry.page_tables:
        assert table.padding_bytes < 0.01 * table.small_page_bytes


def test_a_rank_of_fewer_layers_has_smaller_pages_and_as_many():
    stages = [
        names(HYBRID, full=[0, 1, 2], state=range(20)),
        names(HYBRID, full=[3], state=range(20, 28)),
    ]

    pipeline = plan_pipeline(HYBRID, stages, plan)

    check_stages(pipeline, stages)
    first, second = pipeline.stages
    assert second.large_page_bytes < first.large_page_bytes


def test_wide_layers_of_one_rank_meet_the_wide_ones_of_another():
    mixed = model_of(FullAttention(name="full", layers=layers("full", 512, 1024, 1024, 512)))
    stages = [names(mixed, full=[0, 1]), names(mixed, full=[2, 3])]

    pipeline = plan_pipeline(mixed, stages, plan)

    check_stages(pipeline, stages)
    (table,) = pipeline.geometry.page_tables
    assert table.padding_bytes == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "name", ["gemma-3-27b", "granite-4.0-h-small", "nemotron-h-8b", "jamba-1.5-mini", "gpt-oss-20b"]
)
def test_known_models_are_spread_over_ranks(name, num_ranks):
    model = known_model(name).spec()
    stages = [set() for _ in range(num_ranks)]
    for layer_type in model.layer_types:
        for index, layer in enumerate(layer_type.layers):
            stages[index * num_ranks // len(layer_type.layers)].add(layer.name)

    pipeline = plan_pipeline(model, stages, plan)

    check_stages(pipeline, stages)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"full": [0]}, {"sliding": range(5)}], r"'full\.1' must be on one rank .* none"),
        (
            [{"full": [0, 1]}, {"full": [1], "sliding": range(5)}],
            r"'full\.1' must be on one rank .* \[0, 1\]",
        ),
        ([{"full": [0, 1], "sliding": range(5)}, {}], "rank 1 of 2 has none"),
    ],
    ids=["on_none", "on_two", "of_nothing"],
)
def test_layers_that_are_not_on_one_rank_each_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        plan_pipeline(WINDOWS, [names(WINDOWS, **stage) for stage in stages], plan)

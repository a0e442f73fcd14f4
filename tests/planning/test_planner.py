"""The planned geometry: alignment, bounds on padding, few page tables, small large pages."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jenga.geometry import check_arena, check_geometry, exact_lcm
from jenga.planning.demand import TYPICAL_TOKENS, expected_waste
from jenga.planning.planner import MAX_PAGE_PADDING, plan
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow, State, StatePart, combine


def layers(count, slot_bytes):
    return tuple(Layer(name=f"layer{index}", slot_bytes=slot_bytes) for index in range(count))


def hybrid(
    name="hybrid", *, attention_layers, slot_bytes=4096, state_layers, state_bytes=2_147_840
):
    return ModelSpec(
        name=name,
        layer_types=(
            FullAttention(name="attention", layers=layers(attention_layers, slot_bytes)),
            State(name="mamba", layers=layers(state_layers, state_bytes)),
        ),
    )


BAMBA = hybrid(attention_layers=3, state_layers=29)
GRANITE = hybrid(attention_layers=4, state_layers=36)
BAMBA_NAMED = hybrid("bamba", attention_layers=3, state_layers=29)
NEMOTRON_56B = hybrid(attention_layers=10, state_layers=54, state_bytes=16_900_096)
ZAMBA2 = hybrid(attention_layers=13, slot_bytes=28_672, state_layers=81, state_bytes=962_048)
GEMMA_3_27B = ModelSpec(
    name="gemma-3-27b",
    layer_types=(
        FullAttention(name="full", layers=layers(10, 8192)),
        SlidingWindow(name="sliding", layers=layers(52, 8192), window_tokens=1024),
    ),
)
DRAFT_AND_TARGET = combine(
    "pair",
    (
        GRANITE,
        ModelSpec(name="draft", layer_types=(FullAttention(name="full", layers=layers(16, 2048)),)),
    ),
)
MODELS = {
    "prime_state_layers": BAMBA,
    "round_state_layers": GRANITE,
    "states_of_900_mb": NEMOTRON_56B,
    "lcm_of_908_gb": ZAMBA2,
    "two_attention_types": GEMMA_3_27B,
    "draft_and_target": DRAFT_AND_TARGET,
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request):
    return request.param


def test_plan_tiles_large_pages_with_aligned_small_pages(model):
    geometry = plan(model)

    check_geometry(geometry)
    for table in geometry.page_tables:
        assert table.small_page_bytes % 64 == 0
        assert all(offset % 64 == 0 for offset in table.layer_offset_bytes)


def test_plan_stores_every_layer_once(model):
    geometry = plan(model)

    stored = [
        (table.layer_type.name, layer.name)
        for table in geometry.page_tables
        for layer in table.layers
    ]
    assert sorted(stored) == sorted(
        (layer_type.name, layer.name)
        for layer_type in model.layer_types
        for layer in layer_type.layers
    )


@pytest.mark.parametrize("max_padding", [0.01, 0.002])
def test_plan_pads_within_the_bound_at_every_typical_length(model, max_padding):
    geometry = plan(model, max_padding=max_padding)

    for num_tokens in TYPICAL_TOKENS:
        assert expected_waste(geometry, [num_tokens]).padding <= max_padding
    for table in geometry.page_tables:
        assert table.padding_bytes <= MAX_PAGE_PADDING * table.payload_bytes


def test_plan_keeps_sixteen_tokens_in_every_attention_page(model):
    for table in plan(model).page_tables:
        assert table.tokens_per_page == (1 if table.is_state else 16)


def test_plan_makes_a_large_page_a_small_part_of_the_arena(model):
    arena_bytes = 8 << 30

    geometry = plan(model, arena_bytes=arena_bytes)

    assert geometry.large_page_bytes <= arena_bytes / 64


def test_plan_wastes_little_at_every_length(model):
    for num_tokens in (512, 1024, 4096, 32768):
        waste = expected_waste(plan(model), [num_tokens])

        assert waste.padding + waste.tail <= 0.015


def test_plan_is_the_same_every_time(model):
    assert plan(model) == plan(model)


def test_plan_takes_milliseconds(model):
    plan(model)

    best_s = float("inf")
    for _ in range(3):
        start_s = time.process_time()
        plan(model)
        best_s = min(best_s, time.process_time() - start_s)
    assert best_s < 0.1


def test_plan_of_many_hybrids_in_one_arena_stays_bounded():
    many = combine(
        "many",
        (
            BAMBA_NAMED,
            hybrid("jamba", attention_layers=4, state_layers=28, state_bytes=311_296),
            hybrid("zamba", attention_layers=13, slot_bytes=28_672, state_layers=81),
            hybrid("qwen", attention_layers=12, slot_bytes=2048, state_layers=36),
        ),
    )

    start_s = time.process_time()
    geometry = plan(many, arena_bytes=80 << 30)
    elapsed_s = time.process_time() - start_s

    check_geometry(geometry)
    assert elapsed_s < 2
    assert max(expected_waste(geometry, [n]).padding for n in TYPICAL_TOKENS) <= 0.02


def test_plan_is_the_exact_lcm_where_that_wastes_least():
    model = ModelSpec(
        name="ministral",
        layer_types=(
            FullAttention(name="full", layers=layers(9, 4096)),
            SlidingWindow(name="sliding", layers=layers(27, 4096), window_tokens=32768),
        ),
    )

    planned, exact = plan(model), exact_lcm(model)

    assert planned.large_page_bytes == exact.large_page_bytes == 1_769_472
    assert planned.page_tables == exact.page_tables


def test_plan_keeps_few_page_tables_where_layers_are_prime():
    geometry = plan(BAMBA)

    assert len(geometry.page_tables) <= 8
    assert geometry.large_page_bytes < 20e6


def test_plan_takes_fewer_page_tables_in_a_larger_arena():
    small = plan(GRANITE, arena_bytes=2 << 30)
    large = plan(GRANITE, arena_bytes=200 << 30)

    assert len(large.page_tables) < len(small.page_tables)
    assert large.large_page_bytes > small.large_page_bytes


def test_plan_aligns_the_parts_of_a_state():
    odd = StatePart(name="conv", shape=(3, 11), dtype="bfloat16")
    ssm = StatePart(name="ssm", shape=(8, 16), dtype="float32")
    layer_bytes = odd.num_bytes + ssm.num_bytes
    state = State(
        name="mamba",
        layers=tuple(
            Layer(name=f"layer{index}", slot_bytes=layer_bytes, parts=(odd, ssm))
            for index in range(2)
        ),
    )
    model = ModelSpec(name="odd", layer_types=(state,))

    (table,) = plan(model).page_tables

    assert table.part_offset_bytes == ((0, 128), (640, 768))
    assert table.small_page_bytes == 1280


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens_per_page": 24}, "tokens_per_page"),
        ({"tokens_per_page": 1}, "tokens_per_page"),
        ({"tokens_per_page": 0}, "tokens_per_page"),
        ({"typical_tokens": ()}, "typical_tokens"),
        ({"typical_tokens": (512, -1)}, "typical_tokens"),
        ({"max_padding": 0.0}, "max_padding"),
        ({"max_padding": 2.0}, "max_padding"),
        ({"arena_bytes": 0}, "arena_bytes"),
        ({"arena_bytes": -5}, "arena_bytes"),
        ({"alignment_bytes": 48}, "alignment_bytes"),
        ({"alignment_bytes": 8}, "alignment_bytes"),
        ({"alignment_bytes": 1}, "alignment_bytes"),
    ],
)
def test_plan_refuses_arguments_out_of_range_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        plan(GRANITE, **arguments)


def test_plan_refuses_an_arena_without_a_large_page_per_page_table():
    with pytest.raises(ValueError, match=r"arena_bytes must hold \d+ large pages of \d+ bytes"):
        plan(GRANITE, arena_bytes=1 << 20)


def test_plan_fits_the_least_arena_that_it_names():
    geometry = plan(GRANITE, arena_bytes=120_000_000)

    assert check_arena(geometry, 120_000_000) > len(geometry.page_tables)


@st.composite
def models(draw):
    """Odd numbers of layers of odd sizes, up to three types with layers of their own sizes."""
    layer_types = []
    for index in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=9))
        stored = tuple(Layer(name=f"layer{i}", slot_bytes=size) for i, size in enumerate(sizes))
        kind = draw(st.sampled_from(["full", "sliding", "state"]))
        name = f"{kind}{index}"
        if kind == "full":
            layer_types.append(FullAttention(name=name, layers=stored))
        elif kind == "sliding":
            window_tokens = draw(st.integers(1, 4096))
            layer_types.append(SlidingWindow(name=name, layers=stored, window_tokens=window_tokens))
        else:
            layer_types.append(State(name=name, layers=stored))
    return ModelSpec(name="drawn", layer_types=tuple(layer_types))


@given(model=models(), alignment_bytes=st.sampled_from([16, 64, 128]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_plan_of_any_model_tiles_and_stores_every_layer_once(model, alignment_bytes):
    geometry = plan(model, alignment_bytes=alignment_bytes)

    check_geometry(geometry)
    stored = [
        (table.layer_type.name, layer.name)
        for table in geometry.page_tables
        for layer in table.layers
    ]
    assert stored == [
        (layer_type.name, layer.name)
        for layer_type in model.layer_types
        for layer in layer_type.layers
    ]
    for table in geometry.page_tables:
        assert table.small_page_bytes % alignment_bytes == 0
        assert all(offset % alignment_bytes == 0 for offset in table.layer_offset_bytes)


@pytest.mark.parametrize("large_page_bytes", [9 << 20, 16 << 20, 17_182_720, 128 * 149_993])
def test_a_given_large_page_is_cut_whole_with_as_little_padding_as_its_divisors_allow(
    large_page_bytes,
):
    for model in (BAMBA, GEMMA_3_27B):
        made = plan(model, large_page_bytes=large_page_bytes)

        check_geometry(made)
        assert made.large_page_bytes == large_page_bytes
        for table in made.page_tables:
            counts = range(table.small_pages_per_large_page + 1, large_page_bytes)
            better = (
                count
                for count in counts[: large_page_bytes // table.payload_bytes]
                if large_page_bytes % (count * 128) == 0
                and large_page_bytes // count >= table.payload_bytes
            )
            assert next(better, None) is None


def test_the_large_page_of_the_plan_is_planned_as_the_plan_if_it_is_given():
    for model in (GRANITE, GEMMA_3_27B, DRAFT_AND_TARGET):
        free = plan(model)
        made = plan(model, large_page_bytes=free.large_page_bytes)
        assert expected_waste(made).total <= expected_waste(free).total + 0.01


@pytest.mark.parametrize(
    ("large_page_bytes", "complaint"),
    [(1 << 20, "must be at least 2147840, a small page of 'mamba'"), (4_000_001, "multiple of")],
    ids=["small", "odd"],
)
def test_a_given_large_page_in_which_a_small_page_does_not_fit_is_refused(
    large_page_bytes, complaint
):
    with pytest.raises(ValueError, match=complaint):
        plan(BAMBA, large_page_bytes=large_page_bytes)

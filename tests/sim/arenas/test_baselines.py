"""The layouts compared with, and the paper's figures about them."""

import pytest

from jenga.geometry import check_geometry
from jenga.models.known import known_model
from jenga.planning.planner import plan
from jenga.policies import RequestFacts
from jenga.policies.base import Image
from jenga.sim.arenas.baseline_geometries import (
    GEOMETRY_NAMES,
    gcd_pages,
    geometry_by_name,
    homogeneous,
    max_page,
    needed_bytes,
    static_partition,
)
from jenga.spec import (
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    Layer,
    ModelSpec,
    SlidingWindow,
    State,
)
from jenga.tables.capacity import Capacity


def layers(count, slot_bytes):
    return tuple(Layer(name=f"layer{index}", slot_bytes=slot_bytes) for index in range(count))


def model_of(*layer_types):
    return ModelSpec(name="model", layer_types=layer_types)


def full_and_sliding(num_full, num_sliding, *, slot_bytes, window_tokens):
    return model_of(
        FullAttention(name="full", layers=layers(num_full, slot_bytes)),
        SlidingWindow(
            name="sliding", layers=layers(num_sliding, slot_bytes), window_tokens=window_tokens
        ),
    )


JAMBA = model_of(
    FullAttention(name="attention", layers=layers(4, 4096)),
    State(name="mamba", layers=layers(28, 311_296)),
)
BAMBA = model_of(
    FullAttention(name="attention", layers=layers(3, 4096)),
    State(name="mamba", layers=layers(29, 2_147_840)),
)


def paged_attention_waste(model, *, needed_tokens, stored_tokens):
    (table,) = homogeneous(model).page_tables
    return 1 - needed_bytes(model, needed_tokens) / (table.slot_bytes * stored_tokens)


def test_paged_attention_wastes_what_the_paper_says_on_llama_vision():
    mllama = model_of(
        FullAttention(name="self", layers=layers(32, 4096)),
        CrossAttention(name="cross", layers=layers(8, 4096), typical_tokens=6193),
    )

    waste = paged_attention_waste(mllama, needed_tokens=43, stored_tokens=43 + 6193)

    assert waste == pytest.approx(0.796, abs=5e-4)


def test_pages_of_each_layer_type_waste_little_on_llama_vision():
    model = known_model("llama-3.2-11b-vision").spec()
    geometry = plan(model)
    policies = [table.policy() for table in geometry.page_tables]
    facts = RequestFacts(prompt_tokens=43, images=(Image(start_token=0, num_tokens=6193),))
    capacity = Capacity(geometry, policies, 0)

    pages = capacity.peak_pages(43, chunk_tokens=43, facts=facts)

    held_bytes = capacity.large_pages(pages) * geometry.large_page_bytes
    assert held_bytes == 209_715_200
    waste = 1 - (43 * 32 + 6193 * 8) * 4096 / held_bytes
    assert waste == pytest.approx(0.0055, abs=5e-5)
    (table,) = homogeneous(model).page_tables
    assert table.slot_bytes * (43 + 6193) == 1_021_706_240


def test_paged_attention_wastes_what_the_paper_says_on_gemma_2():
    gemma = full_and_sliding(21, 21, slot_bytes=8192, window_tokens=4096)

    assert paged_attention_waste(gemma, needed_tokens=8192, stored_tokens=8192) == 0.25


def test_paged_attention_wastes_what_the_paper_says_on_ministral():
    ministral = full_and_sliding(9, 27, slot_bytes=4096, window_tokens=32768)

    waste = paged_attention_waste(ministral, needed_tokens=131_072, stored_tokens=131_072)

    assert waste == 0.5625


def test_paged_attention_gives_readers_and_states_slots_of_their_own():
    model = model_of(
        FullAttention(
            name="full",
            layers=(Layer(name="layer0", slot_bytes=512, readers=("layer1", "layer2")),),
        ),
        State(name="mamba", layers=layers(3, 100_000)),
    )

    (table,) = homogeneous(model).page_tables

    assert table.slot_bytes == (1 + 2 + 3) * 512


def test_paged_attention_refuses_a_model_without_tokens():
    with pytest.raises(ValueError, match="layer type that keeps tokens"):
        homogeneous(model_of(State(name="mamba", layers=layers(2, 64))))


def test_max_page_holds_as_many_tokens_as_the_state_fills():
    geometry = max_page(JAMBA)

    check_geometry(geometry)
    attention, mamba = geometry.page_tables
    assert geometry.large_page_bytes == mamba.small_page_bytes == 28 * 311_296
    assert attention.tokens_per_page == 528
    assert attention.small_pages_per_large_page == 1


def test_max_page_keeps_page_lengths_that_a_kernel_asks_for():
    model = model_of(
        FullAttention(name="full", layers=layers(8, 4096)),
        SlidingWindow(name="tiny", layers=layers(1, 64), window_tokens=8, tokens_per_page=4),
    )

    assert [table.tokens_per_page for table in max_page(model).page_tables] == [16, 4]


@pytest.mark.parametrize(
    ("model", "piece_bytes"), [(JAMBA, 65_536), (BAMBA, 512)], ids=["jamba", "bamba"]
)
def test_gcd_pages_divide_every_small_page(model, piece_bytes):
    layout = gcd_pages(model)

    assert layout.piece_bytes == piece_bytes
    for content, pieces in zip(layout.contents, layout.pieces_per_small_page, strict=True):
        assert pieces * piece_bytes == content.content_bytes


def test_static_partition_divides_by_what_requests_hold():
    model = full_and_sliding(8, 8, slot_bytes=4096, window_tokens=1024)

    full, sliding = static_partition(model, arena_bytes=1 << 30, typical_tokens=[16 * 1024]).regions

    assert full.num_pages == pytest.approx(16 * sliding.num_pages, rel=0.01)
    assert sliding.offset_bytes == full.num_pages * full.content.content_bytes
    last_byte = sliding.offset_bytes + sliding.num_pages * sliding.content.content_bytes
    assert last_byte <= 1 << 30


def test_static_partition_refuses_an_arena_too_small_for_a_type():
    with pytest.raises(ValueError, match="must leave a small page of 62287360 bytes"):
        static_partition(BAMBA, arena_bytes=1 << 20)


def test_needed_bytes_of_a_hosted_embedding_are_none():
    full = FullAttention(name="full", layers=layers(2, 4096))
    embedding = ImageEmbedding(name="image", layers=layers(1, 512))
    hosted = model_of(full, embedding).with_images_in("full")

    assert needed_bytes(hosted, 100) == needed_bytes(model_of(full), 100)


@pytest.mark.parametrize("name", GEOMETRY_NAMES)
def test_geometry_by_name_makes_the_geometry_of_that_name(name):
    geometry = geometry_by_name(name, JAMBA, arena_bytes=8 << 30)

    check_geometry(geometry)
    assert geometry.name == name


def test_geometry_by_name_refuses_an_unknown_name():
    with pytest.raises(ValueError, match=r"geometry must be one of planned, .*got 'best'"):
        geometry_by_name("best", JAMBA)


@pytest.mark.parametrize("name", GEOMETRY_NAMES)
def test_geometry_by_name_checks_the_arena(name):
    with pytest.raises(ValueError, match="arena_bytes must hold"):
        geometry_by_name(name, JAMBA, arena_bytes=1000)

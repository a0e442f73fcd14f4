"""Page tables, the paper's exact LCM and the checks before an arena is cut."""

import dataclasses

import pytest

from jenga.geometry import (
    Geometry,
    check_arena,
    check_geometry,
    exact_lcm,
    place_layers,
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


def layers(count, slot_bytes):
    return tuple(Layer(name=f"layer{index}", slot_bytes=slot_bytes) for index in range(count))


def model_of(*layer_types):
    return ModelSpec(name="model", layer_types=layer_types)


PAPER_VISION = model_of(
    CrossAttention(name="cross", layers=layers(2, 128)),
    FullAttention(name="self", layers=layers(3, 128)),
)


def test_lcm_of_the_papers_vision_example_is_768():
    geometry = exact_lcm(PAPER_VISION, tokens_per_page=1)

    cross, full = geometry.page_tables
    assert (cross.small_page_bytes, full.small_page_bytes) == (256, 384)
    assert geometry.large_page_bytes == 768
    assert (cross.small_pages_per_large_page, full.small_pages_per_large_page) == (3, 2)
    assert cross.layer_offset_bytes == (0, 128)
    assert full.layer_offset_bytes == (0, 128, 256)


def test_lcm_of_jamba_is_84_small_pages_with_separate_conv_and_ssm():
    # Jamba-v0.1 in bfloat16: 3 convolution taps of 8192 channels, 16 recurrent elements for each.
    jamba = model_of(
        FullAttention(name="attention", layers=layers(4, 2 * 8 * 128 * 2)),
        State(name="conv", layers=layers(28, 8192 * 3 * 2)),
        State(name="ssm", layers=layers(28, 8192 * 16 * 2)),
    )

    geometry = exact_lcm(jamba)

    attention = geometry.page_tables[0]
    assert geometry.large_page_bytes == 84 * attention.small_page_bytes
    assert attention.small_pages_per_large_page * attention.tokens_per_page == 1344


def test_lcm_of_jamba_is_133_small_pages_with_joint_states():
    jamba = model_of(
        FullAttention(name="attention", layers=layers(4, 4096)),
        State(name="mamba", layers=layers(28, 8192 * (3 + 16) * 2)),
    )

    assert exact_lcm(jamba).page_tables[0].small_pages_per_large_page == 133


def test_lcm_pads_nothing_in_real_sizes():
    model = model_of(
        FullAttention(name="full", layers=layers(10, 8192)),
        SlidingWindow(name="sliding", layers=layers(52, 8192), window_tokens=1024),
    )

    geometry = exact_lcm(model)

    assert geometry.large_page_bytes == 34_078_720
    assert [table.padding_bytes for table in geometry.page_tables] == [0, 0]


def test_layers_of_different_sizes_lie_side_by_side():
    layer_type = FullAttention(
        name="mla",
        layers=(Layer(name="latent", slot_bytes=1152), Layer(name="indexer", slot_bytes=132)),
    )

    content = place_layers(layer_type)

    assert content.layer_offset_bytes == (0, 1152 * 16)
    assert content.content_bytes == (1152 + 132) * 16


def test_layers_begin_on_aligned_bytes_where_sizes_are_odd():
    layer_type = State(name="state", layers=layers(3, 100))

    content = place_layers(layer_type, alignment_bytes=64)

    assert content.layer_offset_bytes == (0, 128, 256)
    assert content.content_bytes == 384


def test_tokens_that_share_a_slot_are_not_parted():
    layer_type = FullAttention(name="c128", layers=layers(20, 584), tokens_per_slot=128)

    (table,) = exact_lcm(model_of(layer_type)).page_tables

    assert (table.tokens_per_page, table.slots_per_page) == (128, 1)
    assert table.payload_bytes == 20 * 584


def test_window_with_its_own_page_length_keeps_it():
    layer_type = SlidingWindow(
        name="compressor", layers=layers(2, 8192), window_tokens=8, tokens_per_page=4
    )

    (table,) = exact_lcm(model_of(layer_type)).page_tables

    assert table.tokens_per_page == 4
    assert table.small_page_bytes == 2 * 8192 * 4


def test_embedding_hosted_in_kv_pages_has_no_page_table():
    model = model_of(
        FullAttention(name="full", layers=layers(4, 2048), holds_images=True),
        ImageEmbedding(name="embedding", layers=layers(1, 4096), host="full"),
    )

    assert [table.name for table in exact_lcm(model).page_tables] == ["full"]


def test_page_table_is_named_with_its_layers_where_the_type_is_cut():
    layer_type = State(name="mamba", layers=layers(6, 64))

    table = place_layers(layer_type, layer_start=2, layer_end=5).page_table(
        large_page_bytes=384, small_pages_per_large_page=2
    )

    assert table.name == "mamba[2:5]"
    assert [layer.name for layer in table.layers] == ["layer2", "layer3", "layer4"]


@pytest.mark.parametrize("tokens_per_page", [0, -16, 8, 17])
def test_lcm_refuses_pages_of_other_lengths(tokens_per_page):
    with pytest.raises(ValueError, match="tokens_per_page"):
        exact_lcm(PAPER_VISION, tokens_per_page=tokens_per_page)


@pytest.mark.parametrize("alignment_bytes", [0, -64, 8, 96])
def test_lcm_refuses_other_alignments(alignment_bytes):
    with pytest.raises(ValueError, match="alignment_bytes"):
        exact_lcm(PAPER_VISION, alignment_bytes=alignment_bytes)


@pytest.mark.parametrize("count", [5, 8, 0, -1, 1.0])
def test_page_table_refuses_counts_that_do_not_fit(count):
    content = place_layers(FullAttention(name="full", layers=layers(1, 8)))

    with pytest.raises(ValueError, match="small_pages_per_large_page"):
        content.page_table(large_page_bytes=768, small_pages_per_large_page=count)


def test_check_arena_wants_a_large_page_per_page_table_and_the_null_page():
    geometry = exact_lcm(PAPER_VISION, tokens_per_page=1)

    assert check_arena(geometry, 3 * 768) == 3
    with pytest.raises(ValueError, match=r"arena_bytes must hold 3 large pages of 768 bytes"):
        check_arena(geometry, 3 * 768 - 1)


@pytest.mark.parametrize("arena_bytes", [0, -1])
def test_check_arena_refuses_what_is_not_positive(arena_bytes):
    with pytest.raises(ValueError, match="arena_bytes must be a positive integer"):
        check_arena(exact_lcm(PAPER_VISION), arena_bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"small_pages_per_large_page": 3}, "must fill a large page"),
        ({"layer_offset_bytes": (0, 64, 256)}, "overlaps"),
        ({"layer_offset_bytes": (0, 128, 320)}, "layers end at byte 448"),
        ({"layer_offset_bytes": (0, 128)}, "one offset for each of 3 layers"),
        ({"layer_offset_bytes": (0, 128, -256)}, "at least 0 and an integer, got -256"),
        ({"layer_start": 2, "layer_end": 2}, "a range of its 3 layers"),
        ({"layer_end": 4}, "a range of its 3 layers"),
        ({"tokens_per_page": 0}, "tokens_per_page must be a positive integer"),
        ({"tokens_per_page": 1.0}, "tokens_per_page must be a positive integer"),
        ({"small_page_bytes": float("nan")}, "small_page_bytes must be a positive integer"),
        ({"small_pages_per_large_page": True}, "small_pages_per_large_page must be a positive"),
    ],
)
def test_a_geometry_that_does_not_tile_is_refused(changes, message):
    geometry = exact_lcm(PAPER_VISION, tokens_per_page=1)
    cross, full = geometry.page_tables

    with pytest.raises(ValueError, match=message):
        check_geometry(
            dataclasses.replace(geometry, page_tables=(cross, dataclasses.replace(full, **changes)))
        )


@pytest.mark.parametrize("large_page_bytes", [0, -64, 64.0])
def test_a_geometry_without_page_tables_or_bytes_is_refused(large_page_bytes):
    with pytest.raises(ValueError, match="distinct names"):
        Geometry(name="empty", large_page_bytes=64, page_tables=())
    with pytest.raises(ValueError, match="large_page_bytes must be a positive integer"):
        dataclasses.replace(exact_lcm(PAPER_VISION), large_page_bytes=large_page_bytes)


def test_a_state_takes_one_token_of_a_page():
    table = place_layers(State(name="mamba", layers=layers(1, 64))).page_table(
        large_page_bytes=64, small_pages_per_large_page=1
    )

    with pytest.raises(ValueError, match="tokens_per_page must be 1, got 16"):
        dataclasses.replace(table, tokens_per_page=16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_per_page": -16}, "tokens_per_page must be a positive integer"),
        ({"tokens_per_page": 16.0}, "tokens_per_page must be a positive integer"),
        ({"alignment_bytes": 0}, "alignment_bytes must be a positive integer"),
        ({"layer_start": -1}, "layer_start must be at least 0"),
        ({"layer_start": 3}, "a range of its 3 layers, got 3 and 3"),
        ({"layer_end": 4}, "a range of its 3 layers, got 0 and 4"),
    ],
)
def test_layers_that_are_none_are_not_placed(arguments, message):
    with pytest.raises(ValueError, match=message):
        place_layers(FullAttention(name="full", layers=layers(3, 64)), **arguments)


@pytest.mark.parametrize("arena_bytes", [-1, 1e9, float("nan"), True])
def test_bytes_of_an_arena_are_counted(arena_bytes):
    with pytest.raises(ValueError, match="arena_bytes must be at least 0 and an integer"):
        exact_lcm(PAPER_VISION).num_large_pages(arena_bytes)

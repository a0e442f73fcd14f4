"""What layer types refuse, and what combining models renames."""

import re

import pytest

from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    Layer,
    ModelSpec,
    SlidingWindow,
    State,
    StatePart,
    TokenBudget,
    combine,
)

LAYERS = (Layer(name="layer0", slot_bytes=4096), Layer(name="layer1", slot_bytes=4096))


def budget(**changes):
    fields = {
        "name": "budget",
        "layers": LAYERS,
        "mean_budget_tokens": 2048,
        "recent_tokens": 8,
        "steepness": 20,
        "layer_index": 0,
        "num_layers": 32,
    }
    return TokenBudget(**(fields | changes))


@pytest.mark.parametrize("slot_bytes", [0, -4096, True, 2.5, None])
def test_layer_refuses_slot_bytes_that_are_not_positive_integers(slot_bytes):
    with pytest.raises(ValueError, match=r"layer 'x': slot_bytes must be a positive integer"):
        Layer(name="x", slot_bytes=slot_bytes)


def test_layer_refuses_parts_of_other_bytes():
    part = StatePart(name="ssm", shape=(8, 16), dtype="float32")

    with pytest.raises(ValueError, match=r"slot_bytes must be the 512 of its parts"):
        Layer(name="x", slot_bytes=500, parts=(part,))


def test_state_part_counts_bytes_of_its_dtype():
    assert StatePart(name="conv", shape=(8448, 3), dtype="bfloat16").num_bytes == 50_688
    assert StatePart(name="ssm", shape=(128, 64, 128), dtype="float32").num_bytes == 4_194_304


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((), "float32", "at least one dimension"),
        ((4, 0), "float32", "every dimension of shape"),
        ((4,), "float64", "dtype must be one of"),
    ],
)
def test_state_part_refuses(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        StatePart(name="ssm", shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttention(name="", layers=LAYERS), "must have a name"),
        (lambda: State(name="s", layers=()), "at least one layer"),
        (
            lambda: State(name="s", layers=LAYERS, draft_tokens=-1),
            "draft_tokens must be at least 0",
        ),
        (lambda: State(name="s", layers=LAYERS[:1] * 2), "two layers named 'layer0'"),
        (
            lambda: FullAttention(
                name="f", layers=(LAYERS[0], Layer(name="l", slot_bytes=1, readers=("layer0",)))
            ),
            "two layers named 'layer0'",
        ),
        (lambda: SlidingWindow(name="w", layers=LAYERS, window_tokens=0), "window_tokens"),
        (
            lambda: SlidingWindow(name="w", layers=LAYERS, window_tokens=8, tokens_per_page=0),
            "tokens_per_page",
        ),
        (lambda: FullAttention(name="f", layers=LAYERS, tokens_per_slot=0), "tokens_per_slot"),
        (
            lambda: FullAttention(name="f", layers=LAYERS, tokens_per_slot=4, tokens_per_page=6),
            "multiple of tokens_per_slot",
        ),
        (lambda: ChunkedLocal(name="c", layers=LAYERS, chunk_tokens=-1), "chunk_tokens"),
        (lambda: CrossAttention(name="x", layers=LAYERS, typical_tokens=0), "typical_tokens"),
        (lambda: ImageEmbedding(name="e", layers=LAYERS), "one layer"),
        (lambda: budget(recent_tokens=2048), "recent_tokens must be below"),
        (lambda: budget(layer_index=32), r"layer_index must be in \[0, 32\)"),
        (lambda: budget(steepness=0), "steepness"),
        (lambda: budget(steepness=1, output_tokens=0), "output_tokens"),
        (lambda: budget(steepness=1, output_tokens=7), "at least the 8 recent_tokens, got 7"),
        (lambda: budget(output_tokens=64), "output_tokens must be None unless steepness is 1"),
        (lambda: ModelSpec(name="m", layer_types=()), "at least one layer type"),
        (
            lambda: ModelSpec(name="m", layer_types=(State(name="s", layers=LAYERS),) * 2),
            "two layer types named 's'",
        ),
        (lambda: combine("all", ()), "at least one model"),
    ],
)
def test_specs_refuse_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Budgets of PyramidKV's reference code for 32 layers, capacity 2048, window 8, beta 20.
@pytest.mark.parametrize(
    ("prompt_tokens", "first", "second", "last"),
    [
        (1024, 1024, 1024, 1024),
        (2048, 2048, 2048, 2048),
        (3076, 3076, 3010, 1030),
        (8192, 3986, 3861, 111),
        (32768, 3986, 3861, 111),
    ],
)
def test_token_budget_falls_from_layer_to_layer(prompt_tokens, first, second, last):
    budgets = [budget(layer_index=index).budget_tokens(prompt_tokens) for index in range(32)]

    assert (budgets[0], budgets[1], budgets[-1]) == (first, second, last)


def test_token_budget_of_one_layer_is_its_mean():
    assert budget(num_layers=1).budget_tokens(100_000) <= 2 * 2048


def embedding_model(*, host, host_slot_bytes=4096, embedding_bytes=8192, holds_images=True):
    return ModelSpec(
        name="vlm",
        layer_types=(
            FullAttention(
                name="full",
                layers=tuple(Layer(name=f"l{i}", slot_bytes=host_slot_bytes) for i in range(2)),
                holds_images=holds_images,
            ),
            SlidingWindow(name="sliding", layers=LAYERS, window_tokens=64),
            ImageEmbedding(
                name="embedding",
                layers=(Layer(name="encoder", slot_bytes=embedding_bytes),),
                host=host,
            ),
        ),
    )


def test_embedding_may_live_in_kv_pages_that_hold_it():
    model = embedding_model(host="full")

    assert model.layer_types[2].host == "full"


def test_a_model_tells_both_types_that_embeddings_live_in_kv_pages():
    model = embedding_model(host=None, holds_images=False)

    assert model.with_images_in("full") == embedding_model(host="full")


def test_embedding_refuses_a_host_that_takes_no_slots_for_whole_images():
    with pytest.raises(
        ValueError, match=r"full-attention layer type with holds_images, got 'full'"
    ):
        embedding_model(host="full", holds_images=False)


def test_a_slot_of_several_tokens_holds_no_image():
    with pytest.raises(ValueError, match=r"tokens_per_slot must be 1 where images live .* got 4"):
        FullAttention(name="full", layers=LAYERS, tokens_per_slot=4, holds_images=True)


@pytest.mark.parametrize("host", ["sliding", "missing", "embedding"])
def test_embedding_refuses_a_host_that_forgets_tokens(host):
    with pytest.raises(ValueError, match=re.escape("host must name a full-attention layer type")):
        embedding_model(host=host)


def test_embedding_refuses_a_host_with_smaller_slots():
    with pytest.raises(ValueError, match=r"must hold the 8193 bytes of an embedding, it has 8192"):
        embedding_model(host="full", embedding_bytes=8193)


def test_combine_names_everything_after_its_model():
    target = embedding_model(host="full")
    shared = Layer(name="layer0", slot_bytes=64, readers=("layer1",))
    draft = ModelSpec(name="draft", layer_types=(FullAttention(name="full", layers=(shared,)),))

    both = combine("pair", (target, draft))

    assert [each.name for each in both.layer_types] == [
        "vlm/full",
        "vlm/sliding",
        "vlm/embedding",
        "draft/full",
    ]
    assert both.layer_types[2].host == "vlm/full"
    assert both.layer_types[3].layers[0].readers == ("draft/layer1",)


def test_combine_refuses_two_models_of_one_name():
    model = embedding_model(host=None)

    with pytest.raises(ValueError, match="two models named 'vlm'"):
        combine("pair", (model, model))

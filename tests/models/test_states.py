"""What recurrent layers keep: which layers, in what shapes and dtypes, and beside what."""

import pytest

from jenga.models.config import Config
from jenga.models.reader import read_config
from jenga.models.readers.layers import MAX_DELTA_HISTORY_TOKENS
from jenga.spec import FullAttention
from jenga_kernels.checks.histories import MAX_DELTA_HISTORY
from tests.models.test_reader import changed, facts, read, slot_bytes, summary


def test_mamba_state_has_its_parts_in_order():
    _, state = read("nemotron-h-8b").layer_types

    conv, recurrent = state.layers[0].parts
    assert (conv.shape, conv.dtype) == ((10240, 3), "bfloat16")
    assert (recurrent.shape, recurrent.dtype) == ((128, 64, 128), "float32")


def test_ranks_have_whole_groups_of_the_norm_behind_lightning_attention():
    with pytest.raises(ValueError, match=r"tensor_parallel must divide the 4 groups of .* got 8"):
        read("ling-2.6-flash", tensor_parallel=8)


def test_state_dtype_overrides_the_architectures():
    half = read("nemotron-h-8b", state_dtype="bfloat16")
    full = read("jamba-v0.1", state_dtype="float32")

    assert slot_bytes(half, "state") == {61_440 + 4_194_304 // 2}
    assert slot_bytes(full, "state") == {49_152 + 2 * 262_144}


def test_lfm2_lists_its_attention_layers_or_all_layers():
    config = facts("lfm2-1.2b")["config"]
    attention = config.pop("full_attn_idxs")
    config["layer_types"] = ["full_attention" if i in attention else "conv" for i in range(16)]

    listed = read_config(Config(config, source="config.json"), name="lfm2-1.2b")
    del config["layer_types"]
    unlisted = read_config(Config(config, source="config.json"), name="lfm2-1.2b")

    assert listed == read("lfm2-1.2b")
    assert summary(unlisted) == {("full", None, 1): {"layers": 16, "slot_bytes": 16 * 2048}}


def test_short_convolution_keeps_the_models_dtype_and_two_tokens():
    _, state = read("lfm2-1.2b", model_dtype="float32", state_dtype="bfloat16").layer_types

    (conv,) = state.layers[0].parts
    assert (conv.name, conv.shape, conv.dtype) == ("conv", (2048, 2), "float32")


def test_short_convolution_has_columns_for_drafts_in_every_state():
    _, state = read("lfm2-1.2b", draft_tokens=3).layer_types

    assert (state.slots_per_request, state.layers[0].slot_bytes) == (4, 2048 * (2 + 3) * 2)


@pytest.mark.parametrize(
    ("name", "num_layers", "group_layers", "latent_layers"),
    [
        ("ling-2.6-flash", 14, 6, {5, 11}),
        ("ling-3.0-flash", 14, 6, {5, 11, 12, 13}),
        ("ling-2.6-flash", 4, 6, set()),
        ("ling-3.0-flash", 4, 6, {0, 1, 2, 3}),
        ("ling-2.6-flash", 4, 1, {0, 1, 2, 3}),
    ],
    ids=["rest_has_states", "rest_has_latents", "states_only", "latents_only", "groups_of_one"],
)
def test_bailing_layers_behind_the_last_whole_group_have_latents_from_3_on(
    name, num_layers, group_layers, latent_layers
):
    config = changed(name, num_hidden_layers=num_layers, layer_group_size=group_layers)

    model = read_config(Config(config, source="config.json"), name=name)

    kinds = {
        int(layer.name.removeprefix("layers.")): type(each)
        for each in model.layer_types
        for layer in each.layers
    }
    assert len(kinds) == num_layers
    assert {index for index, kind in kinds.items() if kind is FullAttention} == latent_layers


def test_states_of_lightning_attention_are_in_the_models_dtype_and_of_delta_attention_in_float32():
    lightning, delta = (read(name).layer_types[1] for name in ("ling-2.6-flash", "ling-3.0-flash"))

    assert [(part.shape, part.dtype) for part in lightning.layers[0].parts] == [
        ((32, 128, 128), "bfloat16")
    ]
    assert [(part.shape, part.dtype) for part in delta.layers[0].parts] == [
        ((3 * 32 * 128, 3), "bfloat16"),
        ((32, 128, 128), "float32"),
    ]


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "kimi-linear-48b", "ling-3.0-flash"])
def test_histories_of_the_delta_rule_are_as_long_as_the_kernels_take(name):
    assert MAX_DELTA_HISTORY_TOKENS == MAX_DELTA_HISTORY
    assert read(name, history_tokens=MAX_DELTA_HISTORY)

    with pytest.raises(ValueError, match=r"history_tokens must be at most 64 .* got 65"):
        read(name, history_tokens=MAX_DELTA_HISTORY + 1)


def test_histories_of_mamba_2_may_be_longer():
    state = read("nemotron-h-8b", history_tokens=128).layer_types[1]

    assert state.layers[0].parts[2].shape == (128, 128, 64)

"""Which layer does what in a model whose layers share keys and values."""

import json

import pytest

from jenga.cli import main
from jenga.models import known_model
from jenga.models.config import Config
from jenga.models.reader import known_type, read_config
from jenga.models.readers.designs import shared_layers

KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
FIELDS = {
    "architectures": ["CharacterLlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "layer_types": KINDS,
    "sliding_window": 40,
    "kv_sharing": {"1": 0, "4": 0, "5": 2},
}


def config_of(**changes):
    return Config(FIELDS | changes, source="config.json")


def test_layers_have_windows_and_sources_as_the_configuration_says():
    layers = shared_layers(config_of())

    assert layers.window_tokens == (40, 40, None) * 2
    assert layers.sources == {1: 0, 4: 0, 5: 2}
    assert shared_layers(config_of(kv_sharing=None)).sources == {}


def test_layers_that_read_others_take_no_bytes():
    full, sliding = read_config(config_of(), name="tiny").layer_types

    slot_bytes = 2 * 64 * 2  # a key and a value of one head in bfloat16
    assert [(each.name, each.slot_bytes, each.readers) for each in full.layers] == [
        ("layers.2", slot_bytes, ("layers.5",))
    ]
    assert [(each.name, each.slot_bytes, each.readers) for each in sliding.layers] == [
        ("layers.0", slot_bytes, ("layers.1", "layers.4")),
        ("layers.3", slot_bytes, ()),
    ]
    assert sliding.window_tokens == 40


def test_the_class_decides_although_the_type_is_that_of_llama():
    assert known_type(config_of()) == "character_llama"
    assert known_type(config_of(architectures=["LlamaForCausalLM"])) == "llama"


def test_the_design_as_a_configuration_is_the_design_by_its_name():
    model = known_model("characterai-llama-8b")
    fields = model.config.as_dict()
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    kinds = [kinds[index % 6] for index in range(32)]
    sharing = {}
    for kind in set(kinds):
        alike = [index for index in range(32) if kinds[index] == kind]
        sharing |= {
            str(reader): source for source, reader in zip(alike[::2], alike[1::2], strict=False)
        }
    config = Config(
        fields
        | {
            "architectures": ["CharacterLlamaForCausalLM"],
            "num_attention_heads": 32,
            "layer_types": kinds,
            "kv_sharing": sharing,
        },
        source="config.json",
    )

    assert read_config(config, name="it").layer_types == model.spec().layer_types


@pytest.mark.parametrize(
    ("sharing", "words"),
    [
        ({"1": 6}, r"kv_sharing\[1\]' must be a layer below 6, got 6"),
        ({"1": "0"}, r"kv_sharing\[1\]' must be a layer below 6, got 0"),
        ({"1": True}, r"kv_sharing\[1\]' must be a layer below 6, got True"),
        ({"1": 1}, r"kv_sharing\[1\]' must be an earlier layer than 1, got 1"),
        ({"1": 3}, r"kv_sharing\[1\]' must be an earlier layer than 1, got 3"),
        (
            {"3": 2},
            (
                r"kv_sharing\[3\]' must be a layer with a window of 40 tokens as 3, "
                "got 2 with full attention"
            ),
        ),
        (
            {"5": 4},
            r"kv_sharing\[5\]' must be a layer with full attention as 5, got 4 with a window of 40",
        ),
        (
            {"1": 0, "3": 1},
            (
                r"kv_sharing\[3\]' must be a layer with its own keys and values, "
                "as 1 reads those of 0, got 1"
            ),
        ),
        ({"6": 0}, "'kv_sharing' must be an object whose names are layers below 6"),
        ({"one": 0}, "'kv_sharing' must be an object whose names are layers below 6"),
        ({"-1": 0}, "'kv_sharing' must be an object whose names are layers below 6"),
        ([1, 0], "'kv_sharing' must be an object"),
    ],
    ids=[
        "no_such_layer",
        "a_text",
        "a_flag",
        "itself",
        "a_later_layer",
        "a_full_layer",
        "a_window",
        "a_reader",
        "no_such_reader",
        "a_reader_by_name",
        "a_negative_reader",
        "a_list",
    ],
)
def test_a_layer_that_cannot_read_another_is_refused_by_name(sharing, words):
    with pytest.raises(ValueError, match=words):
        shared_layers(config_of(kv_sharing=sharing))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": None}, "'layer_types' must be a list"),
        ({"layer_types": KINDS[:5]}, "'layer_types' must be a list of 6 strings, one per layer"),
        ({"layer_types": [*KINDS[:5], "mamba"]}, r"'layer_types\[5\]' must be one of"),
        ({"sliding_window": None}, "'sliding_window' must be a positive integer"),
        ({"sliding_window": 0}, "'sliding_window' must be a positive integer"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "'per_layer_config' must be absent"),
    ],
    ids=["no_kinds", "too_few_kinds", "another_kind", "no_window", "empty_window", "other_heads"],
)
def test_a_field_that_is_missing_or_wrong_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        shared_layers(config_of(**changes))


def test_jenga_plan_refuses_a_map_that_the_engine_refuses(tmp_path, capsys):
    fields = FIELDS | {"kv_sharing": {"3": 2}}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    code = main(["plan", str(tmp_path), "--weights", "0", "--without-vllm"])

    assert code != 0
    assert "kv_sharing[3]" in capsys.readouterr().err


def test_jenga_plan_says_that_hymba_is_planned_and_what_an_engine_lacks(capsys):
    assert main(["plan", "hymba-1.5b", "--without-vllm"]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "hymba-1.5b is planned, but the vLLM plugin refuses it: Hymba (two pieces" in text
    assert "1,152 tokens" in text  # what can be planned still is

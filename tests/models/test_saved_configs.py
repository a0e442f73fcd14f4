"""Configurations as transformers saves them say the same as those that were published."""

import json

import pytest

from jenga.models import known_model, known_names, read_model
from jenga.spec import FullAttention, SlidingWindow
from tests.models.test_reader import facts

transformers = pytest.importorskip("transformers")

KNOWN_TO_TRANSFORMERS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
SAVED = [
    name
    for name in known_names()
    if facts(name)["config"]["model_type"] in KNOWN_TO_TRANSFORMERS
    and name != "zamba2-7b"  # of which transformers wants to be told every layer's kind
]

PLAIN = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "glm",
    "glm4",
    "granite",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
)
"""Models of attention alone whose heads are all alike, in fields of the usual names."""


@pytest.mark.parametrize("name", SAVED)
def test_a_configuration_saved_again_is_read_as_before(name, tmp_path):
    published, saved = tmp_path / "published", tmp_path / "saved"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(facts(name)["config"]))
    transformers.AutoConfig.from_pretrained(published).save_pretrained(saved)

    known = known_model(name)
    assert read_model(saved, name=name) == known.spec()


@pytest.mark.parametrize("model_type", PLAIN)
def test_layers_of_attention_are_those_that_transformers_makes(model_type, tmp_path):
    config = transformers.AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)

    types = read_model(tmp_path).layer_types

    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    read = {type(each): len(each.layers) for each in types}
    expected = {FullAttention: kinds.count("full_attention")}
    if model_type == "mixtral":
        assert config.sliding_window is None
    if "sliding_attention" in kinds:
        expected[SlidingWindow] = kinds.count("sliding_attention")
        assert types[1].window_tokens == config.sliding_window
    assert read == expected
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    slot_bytes = 2 * config.num_key_value_heads * head_dim * 2
    assert {layer.slot_bytes for each in types for layer in each.layers} == {slot_bytes}


def test_zamba_is_read_as_transformers_saves_it(tmp_path):
    config = transformers.AutoConfig.for_model("zamba2")
    config.save_pretrained(tmp_path)

    attention, states = read_model(tmp_path).layer_types

    kinds = config.layers_block_type
    assert [layer.name for layer in attention.layers] == [
        f"layers.{index}" for index, kind in enumerate(kinds) if kind == "hybrid"
    ]
    assert len(states.layers) == len(kinds)


@pytest.mark.parametrize(
    ("model_type", "conv", "recurrent"),
    # From the shapes of `MambaStateShapeCalculator` of vLLM 0.32.
    [("mamba2", (8192 + 2 * 8 * 128, 3), (128, 64, 128)), ("falcon_mamba", (1536, 3), (1536, 16))],
)
def test_models_of_states_alone(model_type, conv, recurrent, tmp_path):
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path)

    (states,) = read_model(tmp_path).layer_types

    shapes = [part.shape for part in states.layers[0].parts]
    assert shapes == [conv, recurrent]
    assert {part.dtype for part in states.layers[0].parts} == {"bfloat16"}

"""Configurations as transformers saves them say the same as those that were published."""

import dataclasses
import json

import pytest

from jenga.models import known_model, known_names, read_model
from jenga.models.defaults import CLASS_DEFAULTS
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
    "afmoe",
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "jais2",
    "laguna",
    "mellum",
    "minimax_m2",
    "ministral3",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "vaultgemma",
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
        # Of Command R7B's windows a token is no part.
        own_token = model_type.startswith("cohere2")
        assert types[1].window_tokens == config.sliding_window + own_token
    assert read == expected
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    slot_bytes = 2 * num_kv_heads * head_dim * 2
    assert {layer.slot_bytes for each in types for layer in each.layers} == {slot_bytes}


@pytest.mark.parametrize(
    ("model_type", "layers", "embedding_bytes", "image_tokens"),
    [
        ("cohere2_vision", {"full": 10, "sliding": 30}, 2 * 8192, 7 * 16**2),
        ("ernie4_5_vl_moe", {"full": 28}, 2 * 2560, 1024),
        ("exaone4_5", {"full": 8, "sliding": 24}, 2 * 4096, 1024),
        ("gemma4_unified", {"full": 5, "sliding": 25}, 2 * 2304, 280),
        ("glm4v", {"full": 40}, 2 * 4096, 1024),
        ("idefics3", {"full": 32}, 2 * 4096, 7 * 12),
        ("internvl", {"full": 32}, 2 * 4096, 7 * 256),
        ("kimi_k25", {"full": 61}, 2 * 7168, 1024),
        ("llava", {"full": 32}, 2 * 4096, 24**2),
        ("llava_next", {"full": 32}, 2 * 4096, 5 * 24**2),
        ("mistral3", {"full": 40}, 2 * 5120, 1024),
        ("qwen2_vl", {"full": 80}, 2 * 8192, 1024),
        # Beside what the first layer reads, what three layers of the encoder give to later ones.
        ("qwen3_vl", {"full": 32}, 2 * 4 * 4096, 1024),
        ("qwen3_vl_moe", {"full": 24}, 2 * 4 * 2048, 1024),
        ("smolvlm", {"full": 32}, 2 * 4096, 7 * 12),
    ],
)
def test_vision_models_that_transformers_makes(
    model_type, layers, embedding_bytes, image_tokens, tmp_path
):
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path)

    *text, image = read_model(tmp_path).layer_types

    assert {each.name: len(each.layers) for each in text} == layers
    assert image.layers[0].slot_bytes == embedding_bytes
    assert image.typical_tokens == image_tokens


def test_a_vision_model_whose_language_model_has_heads_as_it_says(tmp_path):
    text = {"num_hidden_layers": 46, "hidden_size": 4096, "num_attention_heads": 96}
    text |= {"num_key_value_heads": 8, "head_dim": 128, "model_type": "glm4v_moe_text"}
    fields = {"model_type": "glm4v_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    full, image = read_model(tmp_path).layer_types

    assert [layer.slot_bytes for layer in full.layers] == [2 * 8 * 128 * 2] * 46
    assert image.layers[0].slot_bytes == 2 * 4096


def test_a_vision_model_with_latent_attention(tmp_path):
    text = {"num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16}
    text |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v3"}
    fields = {"model_type": "kimi_vl", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    full, image = read_model(tmp_path).layer_types

    assert [layer.slot_bytes for layer in full.layers] == [2 * (512 + 64)] * 27
    assert image.layers[0].slot_bytes == 2 * 2048


INDEXED = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, "'indexer_types' must be a pattern"),
        ({"index_topk_pattern": "SFFFFF"}, "'indexer_types' must be a pattern whose first layer"),
        ({"index_topk_pattern": "FSS"}, "'index_topk_pattern' must be 6 letters F or S"),
        ({"index_topk_pattern": "FSSXSS"}, "'index_topk_pattern' must be 6 letters F or S"),
        ({"indexer_types": ["full"] * 5}, "'indexer_types' must be a list of 6 strings"),
        ({"indexer_types": ["own"] * 6}, r"'indexer_types\[0\]' must be one of full, shared"),
    ],
)
def test_patterns_of_indexers_that_make_no_sense_are_refused(fields, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(INDEXED | fields))

    with pytest.raises(ValueError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "indexed"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"index_topk_freq": 2}, [0, 1, 3, 5]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [0, 3]),
        ({"index_topk_pattern": "FSSFSS"}, [0, 3]),
    ],
)
def test_layers_that_take_the_choice_of_anothers_indexer_have_no_keys_of_one(
    fields, indexed, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(INDEXED | fields))

    (full,) = read_model(tmp_path, name="glm").layer_types

    assert len(full.layers) == 6 + len(indexed)
    names = [layer.name for layer in full.layers if layer.name.endswith(".indexer")]
    assert names == [f"layers.{index}.indexer" for index in indexed]
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert read_model(tmp_path / "saved", name="glm").layer_types == (full,)


def test_longcat_has_two_attentions_in_a_layer(tmp_path):
    config = transformers.AutoConfig.for_model("longcat_flash")
    config.save_pretrained(tmp_path)

    (full,) = read_model(tmp_path).layer_types

    assert len(full.layers) == 2 * config.num_layers
    assert [layer.name for layer in full.layers[:3]] == ["layers.0.0", "layers.0.1", "layers.1.0"]


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


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_heads_that_a_configuration_leaves_out_are_those_of_its_class(model_type):
    if model_type not in KNOWN_TO_TRANSFORMERS:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    fields = {
        each.name: each.default for each in dataclasses.fields(KNOWN_TO_TRANSFORMERS[model_type])
    }

    for name, value in CLASS_DEFAULTS[model_type].items():
        assert fields[name] == value

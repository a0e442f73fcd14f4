"""Configurations as people have them: what is optional, and what is written in other ways."""

import json

import pytest

from jenga.models import KvFormat, ReadOptions, find_model, known_type, read_model
from jenga.models.config import Config
from jenga.models.reader import read_config
from jenga.spec import ChunkedLocal, FullAttention, SlidingWindow

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LATENT = {
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
}


def read(fields, **options):
    return read_config(
        Config(fields, source="config.json"), name="model", options=ReadOptions(**options)
    )


def layers(fields):
    """Of each layer type: its class, its window or chunk, and the numbers of its layers."""
    return {
        (
            type(each),
            getattr(each, "window_tokens", None) or getattr(each, "chunk_tokens", None),
        ): [int(layer.name.split(".")[1]) for layer in each.layers]
        for each in read(fields).layer_types
    }


def slot_bytes(fields):
    (layer_type,) = read(fields).layer_types
    return {layer.slot_bytes for layer in layer_type.layers}


@pytest.mark.parametrize("model_type", ["llama", "phi3", "mistral", "mixtral", "starcoder2"])
def test_a_window_of_the_whole_model_is_one_of_every_layer(model_type):
    fields = LLAMA | {"model_type": model_type, "sliding_window": 2047}

    assert layers(fields) == {(SlidingWindow, 2047): [0, 1, 2, 3]}


@pytest.mark.parametrize("sliding_window", [0, None, 4096, 8192])
@pytest.mark.parametrize("model_type", ["llama", "phi3", "mistral", "mixtral", "starcoder2"])
def test_a_window_of_nothing_or_of_all_that_is_read_is_none(model_type, sliding_window):
    fields = LLAMA | {"model_type": model_type, "sliding_window": sliding_window}

    assert layers(fields) == {(FullAttention, None): [0, 1, 2, 3]}


def test_a_mistral_that_names_no_window_has_the_one_of_its_class():
    longer = LLAMA | {"model_type": "mistral", "max_position_embeddings": 32_768}

    assert layers(longer) == {(SlidingWindow, 4096): [0, 1, 2, 3]}
    assert layers(LLAMA | {"model_type": "mistral"}) == {(FullAttention, None): [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("rotation", "num_tokens"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16_384),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "yarn", "factor": 8.0}, 4096),
        ({"rope_type": "linear", "factor": None}, 4096),
    ],
)
def test_a_stretched_rotation_lets_a_model_read_more(rotation, num_tokens):
    for name in ("rope_scaling", "rope_parameters"):
        config = Config(LLAMA | {name: rotation}, source="config.json")

        assert config.context_tokens() == num_tokens


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({}, None),
        ({"n_positions": 1024}, 1024),
        ({"seq_length": 131_072}, 131_072),
        ({"max_position_embeddings": 8192, "max_seq_len": 4096}, 4096),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),
        ({"max_target_positions": 448}, 448),
    ],
)
def test_the_longest_text_has_many_names(fields, num_tokens):
    assert Config(fields, source="config.json").context_tokens() == num_tokens


@pytest.mark.parametrize("no_rope_layers", [[], None, "absent"])
def test_an_empty_list_is_the_rule(no_rope_layers):
    fields = LLAMA | {"model_type": "llama4_text", "no_rope_layers": no_rope_layers}
    if no_rope_layers == "absent":
        del fields["no_rope_layers"]

    assert layers(fields) == {(FullAttention, None): [3], (ChunkedLocal, 8192): [0, 1, 2]}


@pytest.mark.parametrize("attention_chunk_size", [None, 0])
def test_a_llama_4_without_chunks_attends_to_everything(attention_chunk_size):
    fields = LLAMA | {"model_type": "llama4_text", "attention_chunk_size": attention_chunk_size}

    assert layers(fields) == {(FullAttention, None): [0, 1, 2, 3]}


def test_an_empty_list_of_layer_types_is_as_none():
    assert layers(LLAMA | {"layer_types": []}) == layers(LLAMA)


def test_a_list_may_go_on_with_the_layers_that_draft():
    longer = read(V4 | {"num_nextn_predict_layers": 1})

    assert longer == read(V4 | {"compress_ratios": V4["compress_ratios"][:5]})
    for ratios in ([*V4["compress_ratios"], 0], V4["compress_ratios"][:4]):
        with pytest.raises(ValueError, match="'compress_ratios' must be a list of 5 numbers"):
            read(V4 | {"num_nextn_predict_layers": 1, "compress_ratios": ratios})
    with pytest.raises(ValueError, match="'compress_ratios' must be a list of 5 numbers"):
        read(V4)


def test_kinds_of_layers_may_go_on_with_those_that_draft():
    kinds = ["sliding_attention", "full_attention"] * 2
    fields = LLAMA | {"sliding_window": 64, "num_nextn_predict_layers": 2}

    assert layers(fields | {"layer_types": [*kinds, "full_attention", "full_attention"]}) == {
        (FullAttention, None): [1, 3],
        (SlidingWindow, 64): [0, 2],
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1, 4]}, "layers below 4"),
        ({"model_type": "bamba", "attn_layer_indices": [4]}, "layers below 4"),
        ({"model_type": "zamba2", "hybrid_layer_ids": [9]}, "layers below 4"),
    ],
)
def test_layers_out_of_range_are_refused_by_name(fields, words):
    (name,) = fields.keys() - {"model_type"}

    with pytest.raises(ValueError, match=f"field '{name}' must be {words}"):
        read(LLAMA | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
        {"model_type": "kimi_k2"},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "house_model"},
        {"architectures": ["DeepseekV3ForCausalLM"]},
    ],
    ids=["published", "type_alone", "own_type", "class_alone"],
)
def test_a_published_name_is_read_as_the_one_that_transformers_saves(fields):
    named = LATENT | {"num_hidden_layers": 3}

    assert read(named | fields) == read(named | {"model_type": "deepseek_v3"})


def test_longcat_is_known_by_its_class():
    fields = LATENT | {"architectures": ["LongcatFlashForCausalLM"], "num_layers": 28}

    (full,) = read(fields).layer_types

    assert len(full.layers) == 56
    assert {layer.slot_bytes for layer in full.layers} == {2 * (512 + 64)}
    assert known_type(Config(fields, source="config.json")) == "longcat_flash"


def test_a_section_may_have_a_published_name_too():
    text = LATENT | {"model_type": "kimi_k2", "num_hidden_layers": 3}

    full, image = read({"model_type": "kimi_k25", "text_config": text}).layer_types

    assert len(full.layers) == 3
    assert image.layers[0].slot_bytes == 2 * 6144


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [7]])
def test_a_class_is_optional(architectures):
    assert read(LLAMA | {"architectures": architectures}) == read(LLAMA)


def test_a_model_that_nothing_names_is_refused_with_the_names_that_are_known():
    for named in ({"model_type": "house_model"}, {"model_type": None}, {"model_type": ""}):
        fields = LLAMA | named | {"architectures": ["HouseForCausalLM"]}

        assert known_type(Config(fields, source="config.json")) is None
        with pytest.raises(ValueError, match=r"'model_type' must be one of .*llama"):
            read(fields)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected_bytes"),
    [
        ("llama", {"head_dim": 0}, 2 * 2 * 64 * 2),
        ("llama", {"head_dim": None}, 2 * 2 * 64 * 2),
        ("llama", {"num_key_value_heads": None}, 2 * 8 * 64 * 2),
        ("llama", {"num_key_value_heads": "absent"}, 2 * 8 * 64 * 2),
        # Of other models the class has a number for a field that is not there.
        ("mistral", {"num_key_value_heads": "absent"}, 2 * 8 * 64 * 2),
        ("qwen3", {}, 2 * 2 * 128 * 2),
        ("qwen3", {"head_dim": 32}, 2 * 2 * 32 * 2),
        # Values are narrower than keys in MiMo-V2 alone.
        ("llama", {"v_head_dim": 16}, 2 * 2 * 64 * 2),
    ],
)
def test_heads_that_are_not_written_are_those_of_the_class(model_type, fields, expected_bytes):
    fields = LLAMA | {"model_type": model_type} | fields

    assert slot_bytes({k: v for k, v in fields.items() if v != "absent"}) == {expected_bytes}


@pytest.mark.parametrize(
    "section", ["text_config", "llm_config", "language_config"], ids=lambda name: name
)
def test_facts_are_those_of_the_language_model(tmp_path, section):
    fields = {"model_type": "house_model", section: LLAMA, "num_hidden_layers": 99}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    facts = find_model(str(tmp_path))

    assert (facts.context_tokens, facts.num_layers) == (4096, 4)


def test_a_vision_model_without_numbers_of_its_encoder_has_images_of_a_usual_length(tmp_path):
    for vision in ({}, {"vision_config": {"model_type": "clip"}}):
        fields = {"model_type": "llava", "text_config": LLAMA, **vision}
        (tmp_path / "config.json").write_text(json.dumps(fields))

        assert read_model(tmp_path).layer_types[-1].typical_tokens == 1024


def test_a_side_of_an_image_may_be_written_as_two():
    vision = {"image_size": [448, 448], "patch_size": [14, 14]}
    fields = {"model_type": "llava", "text_config": LLAMA, "vision_config": vision}

    assert read(fields).layer_types[-1].typical_tokens == 32 * 32


KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize(
    ("quantization", "kv_format"),
    [
        (None, KvFormat.MODEL),
        ({"quant_method": "fp8"}, KvFormat.MODEL),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, KvFormat.MODEL),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": KV_FP8}, KvFormat.FP8),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, KvFormat.FP8),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, KvFormat.FP8),
        ({"quant_method": "modelopt", "kv_cache_scheme": KV_FP8}, KvFormat.FP8),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, KvFormat.NVFP4),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT3"}, KvFormat.MODEL),
    ],
)
def test_a_checkpoint_says_how_keys_and_values_are_stored(tmp_path, quantization, kv_format):
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(LLAMA))
    if quantization is not None:
        (beside / "hf_quant_config.json").write_text(json.dumps(quantization))

    assert find_model(str(folder)).kv_format is kv_format
    assert find_model(str(beside)).kv_format is kv_format

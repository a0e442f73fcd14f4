"""Readers against the bytes that each architecture is known to keep."""

import json
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from jenga.models import MODEL_TYPES, KvFormat, ReadOptions, known_model, known_names, read_model
from jenga.models.config import Config
from jenga.models.reader import TEXT_READERS, read_config
from jenga.models.readers.vision import VISION_MODELS
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    SlidingWindow,
    State,
    TokenBudget,
)
from tests.models.engine_configs import PUBLISHED

DATA = resources.files("jenga.models") / "data"
EXPECTED = json.loads((Path(__file__).parent / "expected_layers.json").read_text())
NAMES = known_names()
KIND = {
    FullAttention: "full",
    SlidingWindow: "sliding",
    ChunkedLocal: "chunked",
    CrossAttention: "cross",
    State: "state",
    TokenBudget: "budget",
    ImageEmbedding: "image",
}


def facts(name):
    return json.loads((DATA / f"{name}.json").read_text())


def read(name, **options):
    return known_model(name).spec(ReadOptions(**options))


def slot_bytes(model, name):
    (layer_type,) = [each for each in model.layer_types if each.name == name]
    return {layer.slot_bytes for layer in layer_type.layers}


def summary(model):
    """Layers and bytes per kind, window and compression: a plain value to compare."""
    found = {}
    for layer_type in model.layer_types:
        window_tokens = getattr(layer_type, "window_tokens", None) or getattr(
            layer_type, "chunk_tokens", None
        )
        tokens_per_slot = getattr(layer_type, "tokens_per_slot", 1)
        key = (KIND[type(layer_type)], window_tokens, tokens_per_slot)
        counter = found.setdefault(key, Counter())
        counter["layers"] += len(layer_type.layers)
        counter["slot_bytes"] += sum(layer.slot_bytes for layer in layer_type.layers)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_reader_finds_the_bytes_of_every_layer(name):
    expected = {
        (each["kind"], each.get("window_tokens"), each.get("tokens_per_slot", 1)): {
            "layers": each["layers"],
            "slot_bytes": each["slot_bytes"],
        }
        for each in EXPECTED[name]["types"]
    }

    assert summary(read(name)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_reader_accounts_for_every_layer_that_reads_anothers(name):
    model = read(name)

    num_readers = sum(len(layer.readers) for each in model.layer_types for layer in each.layers)
    assert num_readers == EXPECTED[name].get("shared_layers", 0)


SAVED_VISION_MODELS = (
    "cohere2_vision",
    "ernie4_5_vl_moe",
    "exaone4_5",
    "gemma4_unified",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "internvl",
    "kimi_k25",
    "kimi_vl",
    "llava",
    "llava_next",
    "mistral3",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)


def test_every_reader_is_exercised_by_a_known_model():
    # In test_saved_configs.py, as transformers makes them, in test_engine_layers.py and in
    # test_shared_layers.py.
    used = {"cohere2", "dbrx", "exaone4", "longcat_flash", "mamba2", "olmo3", *SAVED_VISION_MODELS}
    used.add("character_llama")
    used |= {config["model_type"] for config in PUBLISHED.values()}
    for name in NAMES:
        config = facts(name)["config"]
        used.add(config["model_type"])
        for section in ("text_config", "llm_config"):
            used.add(config.get(section, {}).get("model_type"))
    readers = {TEXT_READERS[each] for each in used & set(TEXT_READERS)}

    assert readers == set(TEXT_READERS.values())
    assert set(VISION_MODELS) <= used


def test_gemma_3n_layers_read_the_last_of_their_kind():
    full, sliding, _ = read("gemma-3n-e4b").layer_types

    readers = {layer.name: layer.readers for layer in (*full.layers, *sliding.layers)}
    assert readers["layers.19"] == ("layers.24", "layers.29", "layers.34")
    assert len(readers["layers.18"]) == 12


def test_layers_with_heads_of_their_own_are_read_from_per_layer_config():
    def saved(fields):
        return read_config(Config(config | {"text_config": fields}, source="saved"), name="saved")

    config = facts("gemma-4-31b")["config"]
    text = dict(config["text_config"])
    wide = {"head_dim": text.pop("global_head_dim")}
    wide["num_key_value_heads"] = text.pop("num_global_key_value_heads")
    text["per_layer_config"] = {str(index): wide for index in range(5, 60, 6)}

    assert saved(text).layer_types == read("gemma-4-31b").layer_types
    text["per_layer_config"]["11"] = {"head_dim": "wide"}
    with pytest.raises(ValueError, match=r"per_layer_config: 11: field 'head_dim' must be"):
        saved(text)


def test_values_and_windows_of_mimo_v2_have_widths_and_heads_of_their_own():
    full, sliding = read("mimo-v2-flash").layer_types

    assert [len(full.layers), len(sliding.layers)] == [9, 39]
    assert sliding.window_tokens == 128
    assert {layer.slot_bytes for layer in full.layers} == {4 * (192 + 128) * 2}
    assert {layer.slot_bytes for layer in sliding.layers} == {8 * (192 + 128) * 2}
    assert slot_bytes(read("mimo-v2-flash", tensor_parallel=8), "full") == {(192 + 128) * 2}


def test_mimo_v2_is_read_as_transformers_saves_it_too():
    config = dict(facts("mimo-v2-flash")["config"])
    kinds = [
        "sliding_attention" if windowed else "full_attention"
        for windowed in config.pop("hybrid_layer_pattern")
    ]
    config["sliding_window"] = config.pop("sliding_window_size")
    saved = {name: value for name, value in config.items() if not name.startswith("swa_")}

    model = read_config(Config(saved | {"layer_types": kinds}, source="saved"), name="saved")

    assert model.layer_types == read("mimo-v2-flash").layer_types


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "attention_bytes", "state_bytes"),
    [
        ("bamba-9b", 1, 4096, 2_147_840),
        ("bamba-9b", 8, 512, 2 * (8192 // 8 + 2 * 128) * 3 + 2_097_152 // 8),
        ("jamba-v0.1", 4, 1024, 311_296 // 4),
        ("nemotron-h-8b", 8, 512, 4_255_744 // 8),
        ("qwen3-next-80b-a3b", 4, 1024, 1_097_728 // 4),
        ("kimi-linear-48b", 8, 1152, 2_170_880 // 8),
        ("lfm2-2.6b", 4, 512, 2048 // 4 * 2 * 2),
        ("ling-2.6-flash", 4, 1152, 32 // 4 * 128 * 128 * 2),
        ("ling-3.0-flash", 8, 1152, (3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4) // 8),
        ("minimax-text-01", 8, 512, 2_097_152 // 8),
    ],
)
def test_ranks_divide_heads_and_copy_what_they_cannot(
    name, tensor_parallel, attention_bytes, state_bytes
):
    model = read(name, tensor_parallel=tensor_parallel)

    assert slot_bytes(model, "full") == {attention_bytes}
    assert slot_bytes(model, "state") == {state_bytes}


@pytest.mark.parametrize("name", ["falcon-h1-7b", "hymba-1.5b"])
def test_ranks_that_do_not_divide_the_heads_are_refused(name):
    with pytest.raises(ValueError, match=r"tensor_parallel must divide the \d+ attention heads"):
        read(name, tensor_parallel=8)


@pytest.mark.parametrize(
    ("kv_format", "expected_bytes"),
    [
        (KvFormat.MODEL, 4096),
        (KvFormat.FP8, 2048),
        (KvFormat.FP8_PER_TOKEN_HEAD, 2 * 8 * (128 + 4)),
        (KvFormat.INT8_PER_TOKEN_HEAD, 2 * 8 * (128 + 4)),
        (KvFormat.INT4_PER_TOKEN_HEAD, 2 * 8 * (64 + 4)),
        (KvFormat.NVFP4, 2 * 8 * (64 + 8)),
    ],
)
def test_scales_stored_inline_count(kv_format, expected_bytes):
    assert slot_bytes(read("llama-3.1-8b", kv_format=kv_format), "full") == {expected_bytes}


@pytest.mark.parametrize(
    ("kv_format", "expected_bytes"),
    [(KvFormat.MODEL, 1152), (KvFormat.FP8, 576), (KvFormat.DS_MLA, 656)],
)
def test_latents_are_whole_on_every_rank(kv_format, expected_bytes):
    model = read("deepseek-v3", kv_format=kv_format, tensor_parallel=8)

    assert slot_bytes(model, "full") == {expected_bytes}


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [("deepseek-v3", KvFormat.NVFP4), ("llama-3.1-8b", KvFormat.DS_MLA)],
)
def test_formats_that_do_not_fit_the_model_are_refused(name, kv_format):
    with pytest.raises(ValueError, match="kv_format"):
        read(name, kv_format=kv_format)


def test_four_bits_take_heads_of_a_multiple_of_32_elements():
    config = changed("llama-3.1-8b", head_dim=80)

    with pytest.raises(ValueError, match="'int4_per_token_head' needs heads of a multiple of 32"):
        read_config(
            Config(config, source="config.json"),
            name="narrow",
            options=ReadOptions(kv_format=KvFormat.INT4_PER_TOKEN_HEAD),
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "whisper-large-v3"])
def test_embeddings_live_in_kv_pages_where_asked(name):
    model = read(name, embeddings_in_kv_pages=True)

    hosts = [each.host for each in model.layer_types if isinstance(each, ImageEmbedding)]
    assert set(hosts) <= {"full"}


def changed(name, **changes):
    config = facts(name)["config"]
    for field, value in changes.items():
        config[field] = value
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("llama-3.1-8b", model_type="lama"), "field 'model_type' must be one of"),
        (changed("llama-3.1-8b", model_type=None), "field 'model_type' must be one of"),
        (changed("llama-3.1-8b", num_hidden_layers=0), "'num_hidden_layers' must be a positive"),
        (changed("llama-3.1-8b", num_hidden_layers="32"), "'num_hidden_layers' must be"),
        (changed("llama-3.1-8b", num_hidden_layers=10**30), "'num_hidden_layers' must be at most"),
        (changed("llama-3.1-8b", head_dim=True), "'head_dim' must be a positive integer"),
        (
            changed("llama-3.1-8b", head_dim=None, hidden_size=4097),
            "'hidden_size' must be a multiple of num_attention_heads",
        ),
        (
            changed("gpt-oss-20b", layer_types=["full_attention"]),
            "'layer_types' must be a list of 24",
        ),
        (
            changed("gpt-oss-20b", layer_types=["full_attention"] * 23 + ["ring_attention"]),
            r"field 'layer_types\[23\]' must be one of .*got 'ring_attention'",
        ),
        (changed("gpt-oss-20b", sliding_window=None), "'sliding_window' must be a positive"),
        (changed("gemma-3-4b", text_config=[]), "'text_config' must be an object"),
        (changed("nemotron-h-8b", hybrid_override_pattern="M?"), "'hybrid_override_pattern'"),
        (changed("bamba-9b", mamba_n_heads=100), "'mamba_n_heads' must be a divisor"),
        (changed("bamba-9b", attn_layer_indices=[-1]), "'attn_layer_indices' must be a list of"),
        (changed("zamba2-7b", n_mamba_heads=100), "'n_mamba_heads' must be a divisor"),
        (changed("minimax-text-01", attn_type_list=[1]), "'attn_type_list' must be a list of 80"),
        (changed("lfm2-1.2b", full_attn_idxs=[2, 16]), "'full_attn_idxs' must be layers below 16"),
        (
            changed("mimo-v2-flash", hybrid_layer_pattern=[0, 2]),
            r"'hybrid_layer_pattern' must be a list of 48 numbers, one per layer",
        ),
        (
            changed("mimo-v2-flash", hybrid_layer_pattern=[0, 2] * 24),
            r"'hybrid_layer_pattern' must be a list of 48 of 0 and 1",
        ),
        (changed("mimo-v2-flash", swa_head_dim="wide"), "'swa_head_dim' must be a positive"),
        (changed("lfm2-1.2b", conv_L_cache=1), "'conv_L_cache' must be at least 2, got 1"),
        (changed("lfm2-1.2b", conv_dim="2048"), "'conv_dim' must be a positive integer"),
        (
            changed("lfm2-2.6b", layer_types=["conv"] * 29 + ["mamba"]),
            r"'layer_types\[29\]' must be one of conv, full_attention, got 'mamba'",
        ),
        (changed("lfm2-8b-a1b", layer_types=None), "'layer_types' must be a list, got None"),
        (changed("lfm2-vl-1.6b", max_image_tokens=0), "'max_image_tokens' must be a positive"),
        (
            changed("ling-2.6-flash", architectures=["BailingMoeV2ForCausalLM"]),
            "'architectures' must be a list of one of BailingMoeV2_5.*, BailingMoeV3.*, got",
        ),
        (changed("ling-2.6-flash", architectures=None), "'architectures' must be a list, got None"),
        (changed("ling-2.6-flash", layer_group_size=0), "'layer_group_size' must be a positive"),
        (changed("ling-2.6-flash", kv_lora_rank=None), "'kv_lora_rank' must be a positive integer"),
        (changed("ling-3.0-flash", head_dim=None), "'head_dim' must be a positive integer"),
        (changed("ling-3.0-flash", short_conv_kernel_size="4"), "'short_conv_kernel_size' must be"),
        (changed("deepseek-v4-flash", compress_ratios=[4]), "'compress_ratios' must be a list"),
        (changed("deepseek-v3", kv_lora_rank=None), "'kv_lora_rank' must be a positive integer"),
        (changed("hymba-1.5b", kv_reuse_group=[1, 2]), "'kv_reuse_group' must be a list of lists"),
        (changed("whisper-large-v3", d_model=1281), "'d_model' must be a multiple"),
        (
            changed("qwen2.5-vl-7b", use_sliding_window="no"),
            "'use_sliding_window' must be true or false",
        ),
        (
            changed("granite-4.0-h-tiny", layer_types=["sliding_attention"] * 40),
            "'layer_types' must be free of layers with a window",
        ),
    ],
)
def test_fields_that_are_not_understood_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        read_config(Config(config, source="config.json"), name="model")


def test_nemotron_pattern_may_be_a_list():
    config = facts("nemotron-h-8b")["config"]
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    config["layers_block_type"] = [
        names[letter] for letter in config.pop("hybrid_override_pattern")
    ]

    model = read_config(Config(config, source="config.json"), name="nemotron-h-8b")

    assert model == read("nemotron-h-8b")


@pytest.mark.parametrize(("is_split", "num_tokens"), [(True, 7 * 256), (False, 256)])
def test_lfm2_image_is_cut_into_tiles_unless_that_is_switched_off(is_split, num_tokens):
    config = changed("lfm2-vl-1.6b", do_image_splitting=is_split)

    model = read_config(Config(config, source="config.json"), name="lfm2-vl-1.6b")

    assert model.layer_types[-1].typical_tokens == num_tokens


def test_fields_of_a_section_are_named_with_it():
    config = facts("gemma-3-12b")["config"]
    config["text_config"]["num_hidden_layers"] = -1

    with pytest.raises(ValueError, match=r"^config.json: text_config: field 'num_hidden_layers'"):
        read_config(Config(config, source="config.json"), name="model")


def test_shared_layers_of_every_layer_are_refused():
    config = facts("gemma-3n-e4b")["config"]
    config["text_config"]["num_kv_shared_layers"] = 35

    with pytest.raises(ValueError, match="'num_kv_shared_layers' must be so few"):
        read_config(Config(config, source="config.json"), name="model")


def test_read_model_takes_a_directory_or_a_file(tmp_path):
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    file = directory / "config.json"
    file.write_text(json.dumps(facts("llama-3.2-1b")["config"]))

    assert read_model(directory).name == "tiny-llama"
    assert read_model(file).layer_types == read_model(directory).layer_types
    assert read_model(file, name="other").name == "other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config must be a readable file"),
        ("{", "must be JSON"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_read_model_refuses_what_is_no_configuration(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ValueError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel": 0}, {"model_dtype": "float64"}, {"state_dtype": "half"}],
    ids=["no_rank", "unknown_model_dtype", "unknown_state_dtype"],
)
def test_options_out_of_range_are_refused_by_name(options):
    (name,) = options

    with pytest.raises(ValueError, match=name):
        ReadOptions(**options)


def test_model_types_are_listed_once():
    assert len(set(MODEL_TYPES)) == len(MODEL_TYPES)

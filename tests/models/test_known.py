"""Models by name and from directories."""

import json
import re
import struct

import pytest

from jenga.models import find_model, known_model, known_names
from jenga.spec import ModelSpec

GIB = 1 << 30


def write_model(folder, name, **fields):
    folder = folder / name
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("name", known_names())
def test_known_model_is_complete(name):
    facts = known_model(name)

    assert isinstance(facts.spec(), ModelSpec)
    assert 0 < facts.active_parameters <= facts.total_parameters
    assert facts.parameters_source
    assert facts.weight_bytes is None or facts.weight_bytes <= 2 * facts.total_parameters


def test_there_are_more_than_fifty_known_models():
    assert len(known_names()) == 58


def test_model_is_found_by_its_name_or_its_hugging_face_name_in_any_case():
    facts = find_model("Gemma-3-27B")

    assert facts.name == "gemma-3-27b"
    assert find_model("google/gemma-3-27b-it").name == "gemma-3-27b"
    assert facts.context_tokens is None or facts.context_tokens > 8192


def test_experts_are_counted_apart():
    facts = known_model("gpt-oss-20b")

    assert facts.active_parameters < facts.total_parameters / 5
    assert facts.weight_bytes == int(12.8 * GIB)
    assert known_model("deepseek-v4-flash").weight_bytes is None


def test_unknown_model_is_refused_with_close_names():
    with pytest.raises(ValueError, match=r"got 'gemma-3-72b'; did you mean .*gemma-3-27b"):
        find_model("gemma-3-72b")
    with pytest.raises(ValueError, match=r"one of the 58 known names .*got 'xyzzy'$"):
        find_model("xyzzy")
    with pytest.raises(ValueError, match=r"`hf download Qwen/Qwen3-32B config.json --local-dir"):
        find_model("Qwen/Qwen3-32B")
    with pytest.raises(ValueError, match=r"got './models/none'$"):
        find_model("./models/none")


def test_directory_has_its_weights_counted_by_the_index(tmp_path):
    folder = write_model(tmp_path, "tiny", torch_dtype="bfloat16", max_position_embeddings=4096)
    index = {"metadata": {"total_size": 123_456}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    facts = find_model(str(folder))

    assert (facts.name, facts.weight_bytes, facts.total_parameters) == ("tiny", 123_456, 61_728)
    assert facts.context_tokens == 4096
    assert find_model(str(folder / "config.json")).weight_bytes == 123_456
    assert len(facts.spec().layer_types[0].layers) == 3


def test_directory_without_an_index_has_its_files_counted(tmp_path):
    folder = write_model(tmp_path, "single", torch_dtype="float32")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(1014))

    facts = find_model(str(folder))

    assert (facts.weight_bytes, facts.total_parameters) == (1024, 256)


def test_directory_without_weights_leaves_them_unknown(tmp_path):
    facts = find_model(str(write_model(tmp_path, "bare")))

    assert facts.weight_bytes is facts.total_parameters is facts.active_parameters is None


def test_parameters_of_a_quantised_model_are_unknown(tmp_path):
    folder = write_model(
        tmp_path, "packed", torch_dtype="bfloat16", quantization_config={"bits": 4}
    )
    (folder / "model.safetensors").write_bytes(bytes(512))

    facts = find_model(str(folder))

    assert (facts.weight_bytes, facts.total_parameters) == (512, None)


def test_index_that_is_none_is_refused_by_name(tmp_path):
    folder = write_model(tmp_path, "broken")
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": "big"}}')

    with pytest.raises(ValueError, match=re.escape("field 'total_size' must be a positive")):
        find_model(str(folder))

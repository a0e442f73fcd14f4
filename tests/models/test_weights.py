"""Weights of a directory are those of the files that an engine loads."""

import json

import pytest

from jenga.models import find_model
from tests.models.test_known import write_model

MIB = 1 << 20
INDEX = "model.safetensors.index.json"


def write_files(folder, **sizes):
    for name, num_bytes in sizes.items():
        (folder / name).write_bytes(bytes(num_bytes))


def write_index(folder, *files, name=INDEX, **metadata):
    weight_map = {f"layer.{index}": file for index, file in enumerate(files)}
    (folder / name).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path, "tiny", torch_dtype="bfloat16")


def weight_bytes(folder):
    return find_model(str(folder)).weight_bytes


def test_an_index_needs_no_total_where_its_files_are_there(folder):
    write_files(folder, **{"model-1.safetensors": MIB, "model-2.safetensors": 2 * MIB})
    write_index(folder, "model-1.safetensors", "model-2.safetensors", "model-1.safetensors")

    facts = find_model(str(folder))

    assert (facts.weight_bytes, facts.total_parameters) == (3 * MIB, 3 * MIB // 2)
    assert facts.parameters_source == f"the files that {INDEX} names"


def test_an_index_needs_no_metadata(folder):
    write_files(folder, **{"model-1.safetensors": MIB})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))

    assert weight_bytes(folder) == MIB


def test_files_that_are_there_count_more_than_a_total_that_is_stale(folder):
    write_files(folder, **{"model-1.safetensors": MIB})
    write_index(folder, "model-1.safetensors", total_size=4 * MIB)

    assert weight_bytes(folder) == MIB


@pytest.mark.parametrize("total_size", [4 * MIB, float(4 * MIB)])
def test_a_total_counts_where_files_are_elsewhere(folder, total_size):
    write_files(folder, **{"model-1.safetensors": MIB})
    write_index(folder, "model-1.safetensors", "model-2.safetensors", total_size=total_size)

    assert weight_bytes(folder) == 4 * MIB


@pytest.mark.parametrize("total_size", [0, None])
def test_files_that_are_missing_leave_the_weights_unknown_and_say_so(folder, total_size):
    write_files(folder, **{"model-1.safetensors": MIB})
    write_index(folder, "model-1.safetensors", "model-2.safetensors", total_size=total_size)

    facts = find_model(str(folder))

    assert facts.weight_bytes is None
    assert facts.parameters_source == (
        f"{INDEX} has no metadata.total_size, and 1 of its files are missing"
    )


@pytest.mark.parametrize("total_size", ["big", -1, True, 1.5])
def test_a_total_that_is_none_is_refused_by_name(folder, total_size):
    write_index(folder, "model-1.safetensors", total_size=total_size)

    with pytest.raises(ValueError, match="field 'total_size' must be a positive integer"):
        find_model(str(folder))


def test_files_that_no_index_names_are_not_loaded(folder):
    write_files(folder, **{"model-1.safetensors": MIB, "adapter.safetensors": 5 * MIB})
    write_index(folder, "model-1.safetensors")

    assert weight_bytes(folder) == MIB


def test_weights_in_mistrals_format_stand_for_all(folder):
    write_files(folder, **{"consolidated.safetensors": MIB, "model.safetensors": MIB})
    assert weight_bytes(folder) == MIB

    write_files(folder, **{"model-1.safetensors": 2 * MIB})
    write_index(folder, "model-1.safetensors", total_size=2 * MIB)
    assert weight_bytes(folder) == MIB


def test_parts_in_mistrals_format_are_chosen_by_their_index(folder):
    write_files(
        folder,
        **{"consolidated-1.safetensors": MIB, "consolidated-2.safetensors": MIB, "x.bin": MIB},
    )
    write_index(folder, "consolidated-1.safetensors", name="consolidated.safetensors.index.json")

    assert weight_bytes(folder) == MIB


def test_older_formats_are_passed_over_where_there_are_safetensors(folder):
    write_files(
        folder,
        **{"model.safetensors": MIB, "pytorch_model.bin": 3 * MIB, "weights.pt": 5 * MIB},
    )
    (folder / "original").mkdir()
    write_files(folder / "original", **{"consolidated.00.pth": 7 * MIB})

    assert weight_bytes(folder) == MIB


def test_older_formats_are_loaded_where_there_is_nothing_else(folder):
    write_files(folder, **{"optimizer.pt": 9 * MIB, "training_args.bin": MIB})
    assert weight_bytes(folder) is None

    write_files(folder, **{"weights.pt": 5 * MIB})
    assert weight_bytes(folder) == 5 * MIB

    write_files(folder, **{"pytorch_model.bin": 3 * MIB})
    assert find_model(str(folder)).parameters_source == "the bin files"
    assert weight_bytes(folder) == 3 * MIB


def test_files_that_git_has_not_fetched_count_as_long_as_they_are(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
    (folder / "model.safetensors").write_text(pointer.format("0" * 64, 7 * MIB))

    assert weight_bytes(folder) == 7 * MIB


def test_a_link_to_nowhere_is_a_file_that_is_missing(folder):
    (folder / "model.safetensors").symlink_to(folder / "nowhere")

    assert weight_bytes(folder) is None


@pytest.mark.parametrize(
    ("fields", "num_parameters"),
    [
        ({"torch_dtype": None, "dtype": "float32"}, MIB // 4),
        ({"torch_dtype": "torch.float16"}, MIB // 2),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "mixed"}, None),
        ({"quantization_config": {"bits": 4}}, None),
    ],
)
def test_parameters_are_known_where_a_dtype_is(tmp_path, fields, num_parameters):
    folder = write_model(tmp_path, "dtypes", **{"torch_dtype": "bfloat16"} | fields)
    write_files(folder, **{"model.safetensors": MIB})

    assert find_model(str(folder)).total_parameters == num_parameters

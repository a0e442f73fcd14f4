import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jenga.demo import weights

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JENGA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """Replace the minute-long conversion by one that writes a file; get the dtypes converted."""
    dtypes = []

    def convert(directory, dtype, _progress):
        dtypes.append(dtype)
        (directory / "model.safetensors").write_text(dtype)

    monkeypatch.setattr(weights, "_convert", convert)
    return dtypes


@pytest.mark.usefixtures("cache")
def test_directory_is_made_once_per_dtype(conversions):
    first = weights.gemma3_270m_directory("float32")
    second = weights.gemma3_270m_directory("float32")
    other = weights.gemma3_270m_directory("bfloat16")

    assert first == second != other
    assert conversions == ["float32", "bfloat16"]
    assert (other / "model.safetensors").read_text() == "bfloat16"


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "model.safetensors").write_text("flo"),
        lambda directory: (directory / "model.safetensors").unlink(),
        lambda directory: (directory / "manifest.json").unlink(),
        lambda directory: (directory / "manifest.json").write_text("{"),
    ],
    ids=["file_cut_short", "file_lost", "manifest_lost", "manifest_cut_short"],
)
@pytest.mark.usefixtures("cache")
def test_damaged_directory_is_made_again(conversions, damage):
    directory = weights.gemma3_270m_directory("float32")
    damage(directory)

    again = weights.gemma3_270m_directory("float32")

    assert again == directory
    assert conversions == ["float32", "float32"]
    assert (again / "model.safetensors").read_text() == "float32"


def test_failed_conversion_leaves_nothing_to_be_mistaken_for_a_model(
    cache, conversions, monkeypatch
):
    def fail(directory, _dtype, _progress):
        (directory / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_convert", fail)
        with pytest.raises(OSError, match="No space"):
            weights.gemma3_270m_directory("float32")
    left = [path.name for path in cache.iterdir() if path.is_dir()]
    weights.gemma3_270m_directory("float32")

    assert left == []
    assert conversions == ["float32"]


@pytest.mark.usefixtures("cache")
def test_leftover_of_a_killed_process_is_not_used(conversions):
    directory = weights.gemma3_270m_directory("float32")
    partial = directory.with_suffix(".partial")
    directory.rename(partial)
    (partial / "stray").write_text("stray")

    again = weights.gemma3_270m_directory("float32")

    assert conversions == ["float32", "float32"]
    assert not (again / "stray").exists()
    assert not partial.exists()


@pytest.mark.usefixtures("cache")
def test_processes_that_ask_together_convert_once(conversions, monkeypatch):
    convert = weights._convert
    is_converting, may_finish = threading.Event(), threading.Event()

    def slow(directory, dtype, progress):
        is_converting.set()
        may_finish.wait()
        convert(directory, dtype, progress)

    monkeypatch.setattr(weights, "_convert", slow)
    threads = [
        threading.Thread(target=weights.gemma3_270m_directory, args=("float32",), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    is_converting.wait()
    may_finish.set()
    for thread in threads:
        thread.join()

    assert conversions == ["float32"]


@pytest.mark.usefixtures("conversions")
def test_directory_refuses_another_dtype(cache):
    with pytest.raises(ValueError, match="'float32' or 'bfloat16', got 'float64'"):
        weights.gemma3_270m_directory("float64")

    assert not cache.exists()


def test_cache_directory_is_found_in_the_order_documented(monkeypatch):
    monkeypatch.setenv("JENGA_CACHE", "/here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert weights.cache_directory() == Path("/here")

    monkeypatch.delenv("JENGA_CACHE")
    assert weights.cache_directory() == Path("/there/jenga")

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.cache_directory() == Path.home() / ".cache" / "jenga"


_GENERATE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from jenga.demo.weights import gemma3_270m_directory
directory = gemma3_270m_directory("float32")
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
inputs = tokenizer("Here is a list of the planets of the solar system:\\n1.", return_tensors="pt")
print(model.dtype, inputs["input_ids"][0, 0].item())
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=14, do_sample=False)[0]))
"""


@pytest.mark.slow
def test_real_weights_speak_sense():
    process = subprocess.run(
        [sys.executable, "-c", _GENERATE],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 0, process.stderr[-2000:]
    first_line, text = process.stdout.split("\n", 1)
    assert first_line == "torch.float32 2"
    expected = "system:\n1. Mercury\n2. Venus\n3. Earth\n4."
    assert text.startswith(f"<bos>Here is a list of the planets of the solar {expected}")

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from jenga.cli import main
from jenga.demo import ending, modelled
from jenga.demo.documents import Answer, turns
from jenga.demo.ending import bytes_of_all, ending_of
from jenga.demo.modelled import ASSUMED_GPU, prompt_seconds, readers_gpu
from jenga.demo.picture import Bar, bars_text
from jenga.models import ReadOptions, find_model

README = Path(__file__).parents[2] / "README.md"
BIN = Path(sys.executable).parent

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 2048,
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def answers(found, texts="abcdef"):
    return [
        Answer(document=doc, question=question, prompt_tokens=1000, found_tokens=each, text=text)
        for (doc, question), each, text in zip(turns(), found, texts, strict=True)
    ]


def make_ending(model, picture, **changes):
    arguments = {
        "model": model,
        "document_tokens": 980,
        "arena_bytes": 3 << 20,
        "all_bytes": 4 << 20,
        "setting": "retention interval 512",
        "found_by_setting": {"its default settings": 10, "retention interval 512": 1800},
        "answers": (answers([0, 0, 900, 900, 0, 0]), answers([0, 0, 960, 960, 960, 960])),
        "gpu": readers_gpu(),
        "picture": picture,
    }
    return ending_of(**(arguments | changes))


def test_ending_counts_tokens_of_both_engines(model, tmp_path):
    result = make_ending(model, tmp_path / "picture.svg")

    assert (result.stock.found_tokens, result.stock.computed_tokens) == (1800, 4200)
    assert (result.ours.found_tokens, result.ours.computed_tokens) == (3840, 2160)
    assert result.has_equal_texts
    picture = (tmp_path / "picture.svg").read_text()
    for number in ("1,800", "4,200", "3,840", "2,160"):
        assert f">{number}</text>" in picture


def test_ending_says_where_texts_differ(model, tmp_path):
    others = answers([0] * 6, texts="abcdeX")

    result = make_ending(model, tmp_path / "picture.svg", answers=(answers([0] * 6), others))

    assert not result.has_equal_texts


def test_a_picture_that_cannot_be_written_is_no_failure(model, tmp_path):
    result = make_ending(model, tmp_path / "nowhere" / "picture.svg")

    assert result.picture is None
    assert "nowhere" in result.picture_refusal


def test_seconds_are_those_of_computed_tokens():
    none_found, all_found = answers([0] * 6), answers([990] * 6)

    slow = prompt_seconds("gemma-3-27b", "H100-80G", none_found)
    fast = prompt_seconds("gemma-3-27b", "H100-80G", all_found)

    # 27.4e9 parameters, two operations each, at no more than the peak of 989.4e12 a second.
    assert slow > 6 * 1000 * 2 * 27e9 / 989.4e12
    assert fast < slow / 3


def test_bytes_of_all_are_those_of_every_layer(model):
    spec = find_model(str(model)).spec(ReadOptions(model_dtype="float32"))

    # A key and a value of 64 float32 elements, 6 layers, two documents.
    assert bytes_of_all(spec, 100) == 2 * 100 * 6 * 2 * 64 * 4


def test_plan_is_the_commands(model, tmp_path):
    (model / "model.safetensors").write_bytes(b"")

    result = make_ending(model, tmp_path / "picture.svg")

    assert (result.plan is None) == bool(result.plan_refusal)


def test_printed_command_prints_the_plan(model, capsys):
    (model / "model.safetensors").write_bytes(b"weights")

    shown = modelled.planned(str(model), readers_gpu(""))

    program, *arguments = shlex.split(shown.command)
    assert program == "jenga"
    assert main([*arguments, "--without-vllm"]) == 0
    assert shown.text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "timed", "planned"),
    [
        ("", ASSUMED_GPU, ASSUMED_GPU),
        ("NVIDIA H100 80GB HBM3", "H100-80G", "H100-80G"),
        ("NVIDIA H200", "H200", "H200"),
        ("NVIDIA L4", "L4", "L4"),
        ("NVIDIA GeForce RTX 3060", ASSUMED_GPU, "12288MiB"),
    ],
    ids=["none", "folder", "name", "short_name", "unknown"],
)
def test_readers_gpu_is_found_by_what_torch_calls_it(name, timed, planned):
    gpu = readers_gpu(name, 12 << 30)

    assert (gpu.name, gpu.timed, gpu.planned) == (name, timed, planned)


def test_an_engine_that_fails_is_named_with_its_cause_and_its_output(model, tmp_path):
    options = {"model": str(model), "no_such_option": 1}

    with pytest.raises(RuntimeError) as caught:
        ending._answers("stock vLLM", options, 500, tmp_path, lambda _: nullcontext())

    message = str(caught.value)
    assert message.startswith("stock vLLM failed: TypeError: ")
    assert "no_such_option" in message
    assert message.endswith(f"(its output is in {tmp_path}/stock-vllm.log)")


LEFT_OUT = ("JENGA_MEMORY_LOG", "TRITON_INTERPRET")
"""Variables that the tests set and a user does not."""


def bar_of(side):
    found = sum(answer["found_tokens"] for answer in side["answers"])
    prompts = sum(answer["prompt_tokens"] for answer in side["answers"])
    return Bar(name=side["name"], found_tokens=found, computed_tokens=prompts - found)


@pytest.mark.slow
@pytest.mark.vllm
def test_demos_ending_finds_more_with_the_same_bytes(tmp_path):
    picture = tmp_path / "picture.svg"

    process = subprocess.run(
        [BIN / "jenga", "demo", "--json", "--prompt=Hello", "--max-tokens=1", "--picture", picture],
        # As users run it: PyTorch references serve where there is no GPU.
        env={k: v for k, v in os.environ.items() if k not in LEFT_OUT},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout)["ending"]
    found = {
        side: [answer["found_tokens"] for answer in result[side]["answers"]]
        for side in ("stock", "ours")
    }
    assert sum(found["stock"]) == max(result["found_by_setting"].values())
    assert sum(found["ours"]) > sum(found["stock"])
    assert found["ours"][:2] == [0, 0]
    assert result["has_equal_texts"]
    assert result["gpu"]["timed"] == result["plan"]["command"].split()[-1]
    assert picture.read_text().startswith("<svg")
    bars = [bar_of(result[side]) for side in ("stock", "ours")]
    # README shows them, under the command of the demo.
    assert "\n".join(bars_text(bars)) in README.read_text(encoding="utf-8")
    # Nothing but the demo's own signs of life.
    own = ("starting vLLM", "generating for", "choosing vLLM", "asking ", "    ")
    assert [line for line in process.stderr.splitlines() if not line.startswith(own)] == []


def test_ending_is_a_value_that_json_takes(model, tmp_path):
    result = make_ending(model, tmp_path / "picture.svg")

    document = json.loads(json.dumps(dataclasses.asdict(result)))

    assert document["ours"]["answers"][2]["found_tokens"] == 960

"""vLLM is asked for the layers of a model that no reader is for, and compared where one is."""

import json
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from jenga.models import ReadOptions, find_model
from jenga.sim.planning import engine_layers
from jenga.sim.planning.engine_layers import Question, comparison, find_served_model
from jenga.spec import ChunkedLocal, CrossAttention, FullAttention, Layer, SlidingWindow, State
from tests.test_cli import run

HAS_VLLM = find_spec("vllm") is not None
HOUSE = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "house_model",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "use_bias": False,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}
LLAMA = HOUSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "house"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HOUSE))
    return folder


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Let another program answer in vLLM's place."""

    def answer_with(source):
        (tmp_path / "answering.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(engine_layers, "_MODULE", "answering")
        monkeypatch.setattr(engine_layers, "is_installed", lambda: True)
        engine_layers._answer.cache_clear()

    yield answer_with
    engine_layers._answer.cache_clear()


def replying(answer):
    return (
        "import json, pathlib, sys\n"
        f"path = pathlib.Path(sys.argv[1]) / 'declared_layers.json'\n"
        f"path.write_text(json.dumps({answer!r}))\n"
    )


@pytest.mark.skipif(not HAS_VLLM, reason="the engine is not installed")
def test_a_model_that_no_reader_is_for_is_planned_by_vllms_own_classes(house, capsys):
    code, output, errors = run(
        capsys, "plan", str(house), "--arena", "1GiB", "--without-vllm", "--json"
    )

    assert code == 0, errors
    plan = json.loads(output)
    assert [
        (each["name"], each["num_layers"], each["slot_bytes"]) for each in plan["layer_types"]
    ] == [("full", 3, 3 * 2 * 2 * 64 * 2)]
    (note,) = plan["notes"]
    assert note.startswith("The layers of house are those that vLLM's own classes declare.")


@pytest.mark.skipif(not HAS_VLLM, reason="the engine is not installed")
def test_vllms_refusal_is_told_in_one_line_before_weights_are_asked_for(house, capsys):
    (house / "config.json").write_text(json.dumps(HOUSE | {"architectures": ["HouseForCausalLM"]}))

    code, _, errors = run(capsys, "plan", str(house))

    assert code == 2
    (line,) = errors.splitlines()
    assert "no reader is for model_type 'house_model', and vLLM's classes say: " in line
    assert "HouseForCausalLM" in line
    assert len(line) < 800


def test_without_vllm_a_model_that_no_reader_is_for_is_refused(house, capsys, monkeypatch):
    monkeypatch.setattr(engine_layers, "is_installed", lambda: False)

    code, _, errors = run(capsys, "plan", str(house))

    assert code == 2
    assert errors.endswith(
        "config.json: no reader is for model_type 'house_model', and vLLM, whose classes would be "
        "asked, is not installed\n"
    )


def test_known_models_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(engine_layers, "Question", None)

    assert find_served_model("gemma-2-2b").spec().layer_types


def test_a_class_that_runs_for_ever_is_ended_with_what_it_began(house, answering, monkeypatch):
    answering(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])\n"
        f"pathlib.Path({str(house)!r}, 'made').write_text(str(child.pid))\n"
        f"pathlib.Path({str(house)!r}, 'made').rename(pathlib.Path({str(house)!r}, 'pid'))\n"
        "time.sleep(900)\n"
    )
    monkeypatch.setattr(engine_layers, "TIMEOUT_S", 0.1)

    with Question(HOUSE, ReadOptions()) as question:
        wait_for((house / "pid").exists)
        assert question.answer() == "no answer within 0.1 s"

    child = Path("/proc", (house / "pid").read_text())
    wait_for(lambda: not child.exists() or "State:\tZ" in (child / "status").read_text())


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("waited for five minutes")


def test_a_class_that_ends_its_process_is_told_by_its_last_line(house, answering):
    answering("import sys\nprint('out of luck', file=sys.stderr)\nsys.exit(3)\n")

    with pytest.raises(ValueError, match="process ended with status 3: out of luck"):
        find_served_model(str(house)).spec()


def test_a_model_is_asked_for_once_for_the_same_options(house, answering):
    answer = {"layer_types": [fields("FullAttention", "full", slot_bytes=7)]}
    answering(
        replying(answer) + f"pathlib.Path({str(house)!r}, 'asked').open('a').write('once\\n')\n"
    )

    facts = find_served_model(str(house))
    for _ in range(2):
        assert facts.spec().layer_types[0].layers[0].slot_bytes == 7
    facts.spec(ReadOptions(tensor_parallel=2))

    assert (house / "asked").read_text() == "once\nonce\n"


def test_modules_of_the_folder_that_the_user_is_in_are_not_run(house, answering, monkeypatch):
    answering(replying({"layer_types": [fields("FullAttention", "full")]}))
    (house / "json.py").write_text("raise SystemExit('foreign code')")
    monkeypatch.chdir(house)

    assert find_served_model(str(house)).spec().layer_types


def fields(kind, name, *, slot_bytes=64, num_layers=1, **others):
    """A layer type as it travels."""
    layers = [
        {"name": f"layers.{index}", "slot_bytes": slot_bytes, "readers": [], "parts": []}
        for index in range(num_layers)
    ]
    own = {}
    if kind == "FullAttention":
        own = {"tokens_per_slot": 1, "tokens_per_page": None, "holds_images": False}
    own |= {"tokens_per_page": None} if kind == "SlidingWindow" else {}
    return {"type": kind, "name": name, "layers": layers} | own | others


def one_layer(slot_bytes=64):
    return (Layer(name="0", slot_bytes=slot_bytes),)


FULL = FullAttention(name="full", layers=one_layer())
SLIDING = SlidingWindow(name="sliding", layers=one_layer(), window_tokens=4096)


@pytest.mark.parametrize(
    ("planned", "declared", "words"),
    [
        ([FULL, SLIDING], [SLIDING, FULL], None),
        # No text is longer than the window.
        ([FULL], [SlidingWindow(name="s", layers=one_layer(), window_tokens=8192)], None),
        ([FULL], [SLIDING], "full attention: 1 layers of 64 bytes a slot planned, none declared"),
        (
            [FULL],
            [FullAttention(name="latent", layers=one_layer(32))],
            "1 layers of 64 bytes a slot planned, 1 layers of 32 bytes a slot declared",
        ),
        (
            [State(name="state", layers=one_layer())],
            [State(name="state", layers=one_layer(), draft_tokens=2)],
            "state (3 states, for drafted tokens): none planned",
        ),
        (
            [ChunkedLocal(name="c", layers=one_layer(), chunk_tokens=8192)],
            [CrossAttention(name="x", layers=one_layer())],
            "1 layers of 64 bytes a slot planned, none declared; cross attention: none planned",
        ),
    ],
)
def test_what_is_planned_otherwise_than_it_is_declared_is_told(planned, declared, words):
    facts = SimpleNamespace(name="tiny", context_tokens=8192)
    question = SimpleNamespace(answer=lambda: tuple(declared))

    told = comparison(facts, planned, question)

    if words is None:
        assert told == "vLLM's own classes declare the same layers of tiny."
    else:
        assert "vLLM's own classes declare other layers of tiny" in told
        assert words in told


def test_a_type_that_is_registered_only_in_vllms_process_is_named(answering):
    answering(replying({"layer_types": [fields("PaperWindow", "own", window_tokens=64)]}))

    with Question(LLAMA, ReadOptions()) as question:
        answer = question.answer()

    assert "layer type 'PaperWindow' must be registered in this process" in answer


def test_a_folder_is_compared_with_what_vllm_declares(tmp_path, answering, capsys, monkeypatch):
    monkeypatch.setattr("jenga.sim.commands.plan_command.is_installed", lambda: True)
    monkeypatch.setattr("jenga.sim.commands.plan_command._stock_system", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    declared = fields("SlidingWindow", "sliding_64", num_layers=3, slot_bytes=512, window_tokens=64)
    answering(replying({"layer_types": [declared]}))

    code, output, errors = run(capsys, "plan", str(tmp_path), "--arena", "1GiB")

    assert code == 0, errors
    text = " ".join(output.split())
    assert "vLLM's own classes declare other layers of " in text
    words = "sliding window (a window of 64 tokens): none planned, 3 layers of 1,536 bytes a slot"
    assert f"{words} declared" in text


def test_a_question_that_is_not_waited_for_leaves_nothing_behind(answering):
    answering("import time\ntime.sleep(600)\n")

    with Question(LLAMA, ReadOptions()) as question:
        process, folder = question._process, Path(question._folder.name)

    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()


def test_a_folder_is_planned_without_vllm_where_that_is_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine_layers, "Question", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    code, output, _ = run(capsys, "plan", str(tmp_path), "--arena", "1GiB", "--without-vllm")

    assert code == 0
    assert "vLLM's own classes" not in output
    assert find_model(str(tmp_path)).spec().layer_types

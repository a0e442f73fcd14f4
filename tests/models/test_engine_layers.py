"""A plan counts the layers that the engine's own model classes declare, for every architecture."""

import json
import re

import pytest

from jenga.models import MODEL_TYPES, KvFormat, ReadOptions
from jenga.models.config import Config
from jenga.models.exchange import layer_type_from, options_fields
from jenga.models.reader import read_config
from jenga.spec import FullAttention, ImageEmbedding, State
from tests import warm
from tests.models.engine_configs import IN_SECTIONS, NO_CLASS, NOT_BUILT, PUBLISHED, all_configs
from tests.once import made_once
from tests.vllm_plugin.conftest import engine_environment

pytest.importorskip("vllm", reason="the engine is not installed")
CONFIGS = all_configs()

WAYS = {
    "alone": ReadOptions(),
    "four_ranks_in_float8": ReadOptions(tensor_parallel=4, kv_format=KvFormat.FP8),
    "drafting": ReadOptions(draft_tokens=2),
    "drafting_with_histories": ReadOptions(draft_tokens=2, history_tokens=16),
}


def planned(name, way):
    """The layer types that this package reads."""
    config = Config(CONFIGS[name], source=name)
    return read_config(config, name=name, options=WAYS[way]).layer_types


def is_asked(name, way):
    """Whether a way is one for a model: only recurrent layers have drafts and histories."""
    if not way.startswith("drafting"):
        return True
    has_states = any(isinstance(each, State) for each in planned(name, "alone"))
    return has_states and (way == "drafting" or has_histories(name, way))


def has_histories(name, way):
    """Whether the recurrent layers of a model can keep histories."""
    try:
        planned(name, way)
    except ValueError as error:
        if "history_tokens is for models of" not in str(error):
            raise
        return False
    return True


ASKED = [(name, way) for name in CONFIGS for way in WAYS if is_asked(name, way)]

USUAL = {
    *("llama", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "jamba", "nemotron_h"),
    *("falcon_h1", "qwen3_next", "qwen3_5_text", "kimi_linear", "lfm2", "bailing_hybrid"),
}
"""Models that are compared in all ways. The others are compared alone, and slowly in other ways."""

COUNTED_OTHERWISE = {"falcon_h1", "zamba2"}
"""Models whose attention and states vLLM numbers one behind the other."""


def compared(name, way):
    """The arguments of a test, which is slow if it compares a less usual model another way."""
    is_slow = way != "alone" and name not in USUAL
    return pytest.param(name, way, marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(scope="module")
def declared(request, tmp_path_factory):
    """What vLLM's classes say of the configurations and ways that are asked for, in one process."""
    tests = [each for each in request.session.items if each.path == request.path]
    asked = [each.callspec.params for each in tests if hasattr(each, "callspec")]
    wanted = {(each.get("name"), each.get("way", "alone")) for each in asked}

    def make(folder):
        folders = []
        for name, way in [each for each in ASKED if each in wanted]:
            one = folder / way / name
            one.mkdir(parents=True)
            (one / "config.json").write_text(json.dumps(CONFIGS[name]))
            (one / "read_options.json").write_text(json.dumps(options_fields(WAYS[way])))
            folders.append(one)
        declaring = warm.run(
            ["-m", "jenga.vllm_plugin.without_engine.declared_layers", *folders],
            engine_environment(reads_images=True, VLLM_USE_V2_MODEL_RUNNER="1"),
        )
        assert declaring.returncode == 0, declaring.stderr[-4000:]

    folder = made_once("declared-layers", make, tmp_path_factory)
    return lambda way, name: json.loads((folder / way / name / "declared_layers.json").read_text())


def counted(layer_types, *, with_names, context_tokens):
    """Layers as plain values, in no order: what they remember of a request and what it takes.

    A window that all layers have and no text fills is full attention. The engine keeps no image
    embeddings in its pages.
    """
    kept = [each for each in layer_types if not isinstance(each, ImageEmbedding)]
    found = []
    for each in kept:
        window_tokens = getattr(each, "window_tokens", None)
        kind = type(each)
        if len(kept) == 1 and window_tokens is not None and window_tokens >= context_tokens:
            kind, window_tokens = FullAttention, None
        key = (
            kind.__name__,
            window_tokens,
            getattr(each, "chunk_tokens", None),
            getattr(each, "draft_tokens", 0),
        )
        for layer in each.layers:
            # vLLM may have taps before channels, and has histories of parts of its own.
            parts = sorted((sorted(part.shape), part.dtype) for part in layer.parts[:2])
            parts = parts if len(layer.parts) <= 2 else []
            names = (layer.name, sorted(layer.readers)) if with_names else len(layer.readers)
            found.append((key, names, layer.slot_bytes, parts))
    return sorted(found, key=repr)


@pytest.mark.parametrize(("name", "way"), [compared(*each) for each in ASKED])
def test_plan_and_engine_count_the_same_layers(name, way, declared):
    answer = declared(way, name)
    if name in NOT_BUILT:
        assert re.search(NOT_BUILT[name], answer.get("error", "")), answer
        return

    if "error" in answer and way == "four_ranks_in_float8":
        with pytest.raises(ValueError, match="tensor_parallel must divide"):
            planned(name, way)
        return
    assert "error" not in answer, answer["error"]
    engines = [layer_type_from(each) for each in answer["layer_types"]]
    form = {
        "with_names": name not in COUNTED_OTHERWISE,
        "context_tokens": answer["context_tokens"],
    }
    assert counted(planned(name, way), **form) == counted(engines, **form)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NOT_BUILT])
def test_plan_and_engine_read_texts_of_the_same_length(name, declared):
    context_tokens = Config(CONFIGS[name], source=name).language().context_tokens()

    # vLLM has 2,048 tokens where nothing says.
    assert declared("alone", name)["context_tokens"] == (context_tokens or 2048)


def test_every_architecture_is_compared_or_known_not_to_be_built():
    compared = {fields.get("model_type") for fields in CONFIGS.values()} | set(CONFIGS)

    assert set(MODEL_TYPES) - compared == NO_CLASS | IN_SECTIONS
    assert set(NOT_BUILT) <= compared
    assert not set(PUBLISHED) - set(CONFIGS)

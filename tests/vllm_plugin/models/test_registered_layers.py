"""A layer type from outside the package, in a real engine with a model from outside vLLM."""

import json
import shutil

import pytest

from tests.vllm_plugin.conftest import assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOW = 24
SCRIPT = "paper_window_process.py"


@pytest.fixture(scope="module")
def windowed(tiny_model, tmp_path_factory):
    """Get the directory of a Llama with windows in two of three layers, for an architecture."""

    def get(architecture):
        folder = tmp_path_factory.mktemp("windowed") / architecture
        shutil.copytree(tiny_model("llama"), folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "architectures": [architecture],
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return get


def test_the_engine_serves_a_registered_layer_type_with_the_tokens_of_vllm(
    windowed, run_engine, tmp_path
):
    # Four prompts at a time, of which each continues the same 100 tokens; then the same again. The
    # arena is so small that neither the requests of a round nor their prefixes fit together.
    prompts = prompts_of_lengths([120, 133, 150, 171] * 2, seed=5, shared_tokens=100)
    stock = run_engine(windowed("LlamaForCausalLM"), prompts, max_tokens=24, by_references=True)
    tables = tmp_path / "tables.json"

    ours = run_engine(
        windowed("PaperWindowLlama"),
        prompts,
        max_tokens=24,
        script=SCRIPT,
        environment={"TABLES_FILE": str(tables)},
        by_references=True,
        report_manager=True,
        rounds=2,
        options={
            "attention_backend": "JENGA_TRITON",
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 640 << 10,
        },
    )

    assert_same_generation(ours, stock)
    assert json.loads(tables.read_text()) == [
        [f"paper_window_{WINDOW}", "PaperWindow", 2],
        ["full", "FullAttention", 1],
    ]
    assert sum(output["cached_tokens"] for output in ours["outputs"]) > 0
    evicted = {table.pop("name"): sum(table.values()) for table in ours["cache"]["evictions"]}
    assert min(evicted.values()) > 0, evicted


def test_an_engine_names_a_spec_for_which_no_layer_type_is_registered(windowed, run_engine):
    refused = run_engine(
        windowed("PaperWindowLlama"),
        prompts_of_lengths([20], seed=1),
        script=SCRIPT,
        by_references=True,
        options={"attention_backend": "JENGA_TRITON"},
    )

    assert "with a PaperWindowSpec" in refused["error"]
    assert "specs that jenga.register_layer_type was given" in refused["error"]

"""character.ai's design in the real engine, against a dense model."""

import pytest
from safetensors.torch import load_file, save_file

from tests.vllm_plugin.caching.test_prefix_caching import check_hits, prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import NUM_WORKERS, V2_RUNNER, assert_same_generation
from tests.vllm_plugin.models.dense_character import dense_answers
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
# Shorter than a page, longer than the windows of 40 tokens, longer than a step of 64.
PROMPTS = prompts_of_lengths((5, 33, 70, 150), seed=31)
# A budget that cuts prompts anywhere, the fewer tokens the more others decode.
CUTS = {"max_num_batched_tokens": 37, "max_num_seqs": 3}
SMALL_ARENA_BYTES = 1 << 19
"""Room for one request of the greatest length, and for little more."""


@pytest.fixture(scope="session")
def model(tiny_model):
    return tiny_model("character_llama")


def hits_of(result):
    return [output["cached_tokens"] for output in result["outputs"]]


def test_engine_generates_what_a_dense_model_generates_and_finds_its_prefixes(model, run_engine):
    ours = run_engine(
        model,
        PROMPTS * 2,
        rounds=2,
        max_tokens=24,
        options=JENGA | CUTS,
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, dense_answers(model, ours))
    assert ours["request_tokens"] == {}
    assert hits_of(ours) == [0] * 4 + [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.slow
def test_layers_that_read_the_keys_and_values_of_others_take_no_bytes(model, run_engine):
    result = run_engine(model, [], script="arena_process.py", options=JENGA, by_references=True)

    assert "error" not in result, result["error"][-4000:]
    # Of 8 layers 4 store: all tokens of two prompts, and 3 of 4 generated ones.
    assert result["layers"] == 4
    assert result["stores"] == (19 + 70 + 2 * 3) * 4
    assert result["differing_bytes"] == 0


def test_a_layer_that_cannot_read_another_is_refused_when_the_engine_starts(model, run_engine):
    sharing = {"kv_sharing": {"5": 3}}

    result = run_engine(model, [], options=JENGA | {"hf_overrides": sharing}, by_references=True)

    expected = "a layer with a window of 40 tokens as 5, got 3 with full attention"
    assert f"field 'kv_sharing[5]' must be {expected}" in result["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "layers.4.self_attn.k_proj.weight",
            "no keys and values for layer 4, which reads those of",
        ),
        ("layers.4.self_attn.v_proj.bias", "no keys and values for layer 4, which reads those of"),
        ("layers.4.self_attn.attn.k_scale", "no keys and values for layer 4, which reads those of"),
        ("layers.2.self_attn.k_scale", "no scales for the keys and values of layer 2"),
        ("layers.2.self_attn.k_proj.k_scale", "no scales for the keys and values of layer 2"),
        ("layers.2.self_attn.v_proj.output_scale", "no scales for the keys and values of layer 2"),
    ],
)
def test_weights_that_no_layer_would_use_are_refused_by_name(name, words):
    from jenga.vllm_plugin.models.character_llama import checked_weights

    with pytest.raises(ValueError, match=f"{words}.*got {name}"):
        list(checked_weights([(name, None)], {4: 2}))


def test_weights_that_layers_use_are_kept():
    from jenga.vllm_plugin.models.character_llama import checked_weights

    names = [
        "embed_tokens.weight",
        "layers.4.self_attn.q_proj.weight",
        "layers.4.self_attn.o_proj.weight",
        "layers.2.self_attn.k_proj.weight",
        "layers.2.self_attn.k_proj.weight_scale",
        "layers.2.self_attn.k_proj.input_scale",
        "layers.3.self_attn.k_scale",
        "layers.14.self_attn.v_proj.weight",
    ]
    weights = [(name, None) for name in names]

    assert list(checked_weights(weights, {4: 2})) == weights


@pytest.mark.slow
def test_a_checkpoint_with_keys_that_no_layer_would_read_does_not_start(
    model, run_engine, tmp_path
):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.{}.self_attn.v_proj.weight"
    tensors[name.format(4)] = tensors[name.format(2)].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    result = run_engine(folder, [], options=JENGA, by_references=True)

    assert "no keys and values for layer 4, which reads those of layer 2" in result["error"]


@pytest.mark.slow
def test_an_arena_that_always_evicts_and_preempts_loses_nothing(model, run_engine):
    prompts = prompts_over_shared_prefixes(24, seed=32)

    ours = run_engine(
        model,
        prompts,
        max_tokens=40,
        options=JENGA | CUTS | {"max_num_seqs": 4, "kv_cache_memory_bytes": SMALL_ARENA_BYTES},
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, dense_answers(model, ours))
    assert check_hits(ours) > 24
    assert ours["preemptions"] > 0


@pytest.mark.slow
def test_stock_vllm_serves_our_class_too(model, run_engine):
    stock = run_engine(model, PROMPTS, max_tokens=12)

    assert_same_generation(stock, dense_answers(model, stock))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
def test_kernels_generate_what_a_dense_model_generates(runner, model, run_engine):
    prompts = PROMPTS[1:3]

    ours = run_engine(
        model,
        prompts * 2,
        rounds=2,
        max_tokens=6,
        options=JENGA | CUTS,
        environment={V2_RUNNER: runner, "VLLM_LOGGING_LEVEL": "INFO"},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, dense_answers(model, ours))
    assert ("Using V2 Model Runner" in ours["log"]) == (runner == "1")
    assert hits_of(ours) == [0, 0, 32, 64]


@pytest.mark.slow
def test_the_second_runner_in_an_arena_that_evicts_and_preempts(model, run_engine):
    prompts = prompts_over_shared_prefixes(6, seed=33)

    ours = run_engine(
        model,
        prompts,
        max_tokens=60,
        options=JENGA | {"max_num_seqs": 6, "kv_cache_memory_bytes": SMALL_ARENA_BYTES},
        environment={V2_RUNNER: "1"},
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(ours, dense_answers(model, ours))
    counts = [count for table in ours["cache"]["evictions"] for count in table.values()]
    assert sum(count for count in counts if isinstance(count, int)) > 0
    assert ours["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two workers")
def test_two_tensor_parallel_workers_generate_what_a_dense_model_generates(model, run_engine):
    two = run_engine(
        model,
        PROMPTS,
        max_tokens=12,
        options=JENGA | CUTS | {"tensor_parallel_size": 2},
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        by_references=True,
    )

    assert_same_generation(two, dense_answers(model, two))

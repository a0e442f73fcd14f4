"""Prefix caching in the real engine: what is hit must be what would have been computed."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from tests.vllm_plugin.conftest import assert_same_generation, gemma_3_directory

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}


def prompts_over_shared_prefixes(number, *, seed, vocab_size=500, prefix_tokens=(48, 90, 130)):
    """Make prompts that begin with one of a few prefixes and go on each in its own way."""
    source = random.Random(seed)

    def tokens(count):
        return [source.randrange(3, vocab_size) for _ in range(count)]

    prefixes = [[2, *tokens(count - 1)] for count in prefix_tokens]
    return [[*source.choice(prefixes), *tokens(source.randrange(1, 40))] for _ in range(number)]


def check_hits(result):
    """Check that the tokens hit are those the manager says, at 16 tokens' granularity.

    Returns:
        The pages that were evicted.
    """
    hits = [output["cached_tokens"] for output in result["outputs"]]
    assert sum(hits) > 0
    assert all(hit % 16 == 0 for hit in hits)
    assert any(hit % 32 for hit in hits)
    assert result["preemptions"] > 0 or sum(hits) == result["cache"]["hit_tokens"]
    counts = [count for table in result["cache"]["evictions"] for count in table.values()]
    return sum(count for count in counts if isinstance(count, int))


@pytest.mark.slow
def test_forty_requests_over_shared_prefixes_in_an_arena_that_always_evicts(tiny_model, run_engine):
    prompts = prompts_over_shared_prefixes(40, seed=11)
    options = {"max_num_seqs": 4}

    stock = run_engine(tiny_model("gpt_oss"), prompts, max_tokens=4, options=options)
    ours = run_engine(
        tiny_model("gpt_oss"),
        prompts,
        max_tokens=4,
        options=options | JENGA | {"kv_cache_memory_bytes": 5 << 18},
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, stock)
    assert check_hits(ours) > 40  # eviction never rests


@pytest.mark.slow
def test_forty_requests_to_gemma_3_with_its_real_weights_in_an_arena_that_always_evicts(run_engine):
    model = gemma_3_directory()
    prompts = prompts_over_shared_prefixes(40, seed=13, vocab_size=9000)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256}

    stock = run_engine(model, prompts, max_tokens=2, options=options)
    ours = run_engine(
        model,
        prompts,
        max_tokens=2,
        # Two requests of the greatest length: three prefixes and what runs do not fit together.
        options=options | JENGA | {"kv_cache_memory_bytes": 24 << 20},
        fill_arena=True,
        report_manager=True,
        by_references=True,
    )

    assert_same_generation(ours, stock)
    assert check_hits(ours) > 40


def test_a_hit_gives_the_tokens_and_logprobs_of_a_computation_without(tiny_model, run_engine):
    model = tiny_model("gemma2")
    prompts = prompts_over_shared_prefixes(6, seed=12)
    again = prompts + prompts

    stock = run_engine(model, again)
    ours = run_engine(
        model, again, rounds=2, options=JENGA, report_manager=True, by_references=True
    )

    assert_same_generation(ours, stock)
    # The second round finds all of every prompt but the page its last token is in.
    hits = [output["cached_tokens"] for output in ours["outputs"][len(prompts) :]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def save_adapter(folder, *, layers, hidden, heads, rank=8):
    """Save a low-rank adapter of random weights for the query projections of a model."""
    generator = torch.Generator().manual_seed(int(folder.name))
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(heads, rank, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.slow
def test_adapters_hit_what_was_computed_with_them_alone(tiny_model, run_engine, tmp_path):
    model = tiny_model("llama")
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    adapters = [
        save_adapter(
            tmp_path / str(number), layers=config["num_hidden_layers"], hidden=hidden, heads=heads
        )
        for number in range(2)
    ]
    prompts = prompts_over_shared_prefixes(1, seed=17) * 6
    job = {"adapters": [None, *adapters] * 2, "rounds": 2, "max_tokens": 6}

    def run(*, by_references=False, **options):
        options = {"enable_lora": True, "max_loras": 2, **options}
        return run_engine(model, prompts, options=options, by_references=by_references, **job)

    ours, stock = run(by_references=True, **JENGA), run()

    assert_same_generation(ours, stock)
    outputs = ours["outputs"]
    first, again = ([tuple(each["tokens"]) for each in some] for some in (outputs[:3], outputs[3:]))
    assert len(set(first)) == 3
    # Without an adapter stock, too, goes on in another way in its second round.
    assert first[1:] == again[1:]
    most = (len(prompts[0]) - 1) // 16 * 16
    assert [output["cached_tokens"] for output in outputs] == [0] * 3 + [most] * 3

"""Prefix caching in the real engine: what is hit must be what would have been computed."""

import random

import pytest

from tests.vllm_plugin.conftest import assert_same_generation

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
@pytest.mark.timeout(1800)
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
    )

    assert_same_generation(ours, stock)
    assert check_hits(ours) > 40  # eviction never rests


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forty_requests_to_gemma_3_with_its_real_weights_in_an_arena_that_always_evicts(run_engine):
    from jenga.demo.weights import gemma3_270m_directory

    model = gemma3_270m_directory("float32")
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
    )

    assert_same_generation(ours, stock)
    assert check_hits(ours) > 40


def test_a_hit_gives_the_tokens_and_logprobs_of_a_computation_without(tiny_model, run_engine):
    model = tiny_model("gemma2")
    prompts = prompts_over_shared_prefixes(6, seed=12)
    again = prompts + prompts

    stock = run_engine(model, again)
    ours = run_engine(model, again, rounds=2, options=JENGA, report_manager=True)

    assert_same_generation(ours, stock)
    # The second round finds all of every prompt but the page its last token is in.
    hits = [output["cached_tokens"] for output in ours["outputs"][len(prompts) :]]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]

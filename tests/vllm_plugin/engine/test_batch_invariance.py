"""VLLM_BATCH_INVARIANT: to the last bit what is generated is the same, whatever else is computed.

The kernels' part is in `tests/kernels/attention/test_invariant_attention.py`.
"""

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.latent.latent_attention import latent_attention
from tests.vllm_plugin.attention import test_attention_builder as layers
from tests.vllm_plugin.attention import test_latent_builder as latents
from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.states.test_hybrid_engine import CUTS

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON"}
ALONE = JENGA | {"max_num_batched_tokens": 256, "max_num_seqs": 1}
"""Each request by itself, its prompt in one piece, nothing found."""

TOGETHER = JENGA | CUTS | {"enable_prefix_caching": True}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


def are_equal(ours, theirs):
    """Whether two engines generated the same with the same log-probabilities, to the last bit."""
    return all(
        our["tokens"] == their["tokens"] and our["logprobs"] == their["logprobs"]
        for our, their in zip(ours["outputs"], theirs["outputs"], strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arena_bytes", "runner", "options"),
    [
        pytest.param("gemma2", 5 << 19, "0", {}, id="windows"),
        pytest.param("llama4", 5 << 19, "1", graphs_of(1, 2, 4), id="chunks_in_graphs"),
    ],
)
def test_requests_generate_to_the_last_bit_what_each_does_alone(
    name, arena_bytes, runner, options, tiny_model, run_engine
):
    model, prompts = tiny_model(name), prompts_over_shared_prefixes(5, seed=61)
    script = {"script": "invariant_process.py"}
    environment = INVARIANT | {V2_RUNNER: runner}
    together = TOGETHER | {"kv_cache_memory_bytes": arena_bytes} | options
    job = script | {"rounds": 2, "report_manager": True, "captures": bool(options)}

    stock = run_engine(model, prompts * 2, options={"block_size": 32})
    # On the same runner: vLLM's two compute log-probabilities differently.
    alone = run_engine(model, prompts, options=ALONE, environment=environment, **script)
    ours = run_engine(model, prompts * 2, options=together, environment=environment, **job)
    variant = run_engine(
        model, prompts * 2, options=together, environment={V2_RUNNER: runner}, **job
    )

    assert_same_generation(ours, stock)
    assert_same_generation(variant, stock)
    twice = alone | {"outputs": alone["outputs"] * 2}
    assert are_equal(ours, twice)
    assert not are_equal(variant, twice)  # it can be seen here
    assert ours["cache"]["hit_tokens"] > 0
    assert bool(ours["replays"]) == bool(options)


@pytest.fixture
def batches_must_not_matter(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@pytest.mark.usefixtures("batches_must_not_matter")
@pytest.mark.parametrize("name", ["full", "sliding", "chunked"])
def test_tokens_are_decoded_as_they_are_read_in_a_prompt(name):
    builder, batches = layers.make_builder(layers.SPECS[name]), layers.Batches()
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn(2, 48, 16, layers.NUM_KV_HEADS, layers.HEAD_DIM, generator=generator)
    q = torch.randn(60, layers.NUM_HEADS, layers.HEAD_DIM, generator=generator)

    def attend(common, rows):
        metadata = builder.build(0, common)
        assert metadata.plan.is_batch_invariant
        assert metadata.plan.decode_query_tokens == 0
        return layers.attend(paged_attention, metadata, rows, pages, plan=metadata.plan)

    prompt = attend(batches.prefill([60]), q)
    decoded = attend(batches.decode([60, 31], num_padded=2), q[[59, 30]])

    assert torch.equal(decoded[0], prompt[59])


@pytest.mark.usefixtures("batches_must_not_matter")
def test_graphs_hold_steps_of_decoded_tokens_that_are_read_as_in_a_prompt():
    spec, batches = layers.SPECS["sliding"], layers.Batches()
    builder = layers.make_builder(spec)
    generator = torch.Generator().manual_seed(5)
    pages = torch.randn(2, 48, 16, layers.NUM_KV_HEADS, layers.HEAD_DIM, generator=generator)
    captured = builder.build_for_cudagraph_capture(batches.decode([96] * 8, num_padded=8))
    places = layers.addresses(captured)

    for seq_lens in ([1, 96, 40, 80, 63], [33, 7, 64, 90, 2, 48, 55, 71]):
        q = torch.randn(8, layers.NUM_HEADS, layers.HEAD_DIM, generator=generator)
        metadata = builder.build(0, batches.decode(seq_lens, num_padded=8))
        again = layers.make_builder(spec).build(0, batches.decode(seq_lens, num_padded=8))
        assert metadata.plan is captured.plan
        assert layers.addresses(metadata) == places
        replayed, alone = (
            layers.attend(paged_attention, each, q, pages, plan=each.plan)
            for each in (captured, again)
        )
        assert torch.equal(replayed, alone)
    assert layers.announced(num_drafted=63) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.usefixtures("batches_must_not_matter")
def test_latents_are_read_as_they_are_by_all_tokens():
    builder, batches = latents.make_builder(), layers.Batches()
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn(48, 16, latents.WIDTH, generator=generator)
    q = torch.randn(90, latents.NUM_HEADS, latents.WIDTH, generator=generator)

    def attend(common, rows):
        metadata = builder.build(0, common)
        assert metadata.num_prefills == 0
        decode = metadata.decode
        return latents.attend(latent_attention, decode, rows, pages, plan=decode.plan)

    prompt = attend(latents.prompts(batches, [90]), q)
    decoded = attend(batches.decode([90, 31], num_padded=2), q[[89, 30]])

    assert torch.equal(decoded[0], prompt[89])
    latents.make_builder().build_for_cudagraph_capture(batches.decode([96] * 4, num_padded=4))

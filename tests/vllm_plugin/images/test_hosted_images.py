"""Image embeddings in slots of keys and values, in the real engine.

Tokens are compared with the stock engine's or those of transformers, and the runs of the encoder
are counted.
"""

import pytest

from jenga.vllm_plugin.settings.refusals import Refusal
from tests.vllm_plugin.conftest import LOGPROB_TOLERANCE, NUM_WORKERS, V2_RUNNER
from tests.vllm_plugin.images.test_image_pages import (
    HOST,
    IMAGES,
    NUM_IMAGES,
    SMALL,
    SMALL_BESIDE_WINDOWS,
    evicted,
    images_of,
    options_of,
    prompts_of,
    run_beside_transformers,
    run_both,
    run_phi_3_in_a_small_arena,
    run_phi_3_on_the_second_runner,
    tables_of,
)
from tests.vllm_plugin.images.test_images import OPTIONS, prompts_about_images
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny.tiny_vision_models import FIRST_SPECIAL_TOKEN, TOKEN_IDS

pytestmark = pytest.mark.vllm

IN_KV_PAGES = {"JENGA_EMBEDDINGS_IN_KV_PAGES": "1"}


TABLES = ("full", "sliding_40")
INTERNVL_CONTEXT = FIRST_SPECIAL_TOKEN + 3
PHI_3_CONTEXT = 32044
"""vLLM's, whatever the tokenizer's."""


def image_ends(prompt, placeholder):
    """Get the end of each image in a prompt whose placeholders are as many as its embeddings."""
    after = [*prompt[1:], None]
    places = zip(prompt, after, strict=True)
    return [
        end for end, (token, follower) in enumerate(places, 1) if placeholder == token != follower
    ]


def check_encoded(name, ours):
    """Check that each request encoded once what its hit did not have, of requests that all ran on.

    Args:
        name: Name of the model.
        ours: Result of the engine.
    """
    contexts = {"internvl_chat": INTERNVL_CONTEXT, "phi3_v": PHI_3_CONTEXT}
    token = contexts.get(name, TOKEN_IDS["<image>"])
    assert ours["preemptions"] == 0
    expected = [
        sum(end > output["cached_tokens"] for end in image_ends(output["prompt"], token))
        for output in ours["outputs"]
    ]
    assert 0 < sum(expected) < 2 * sum(expected[: len(expected) // 2])
    assert sum(ours["encoded"]) == sum(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_onevision", "internvl_chat", "phi3_v", "qwen2_5_vl"])
def test_embeddings_live_in_kv_pages_and_are_encoded_once_for_a_request(
    tiny_vision_model, run_engine, name
):
    ours, _ = run_both(
        run_engine,
        tiny_vision_model(name),
        prompts_of(name),
        images_of(name),
        options=options_of(name),
        environment=IN_KV_PAGES,
    )

    assert tables_of(ours) == ["full"]
    check_encoded(name, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_onevision", "internvl_chat", "qwen2_5_vl"])
def test_requests_whose_images_live_in_kv_pages_are_preempted_in_a_small_arena(
    tiny_vision_model, run_engine, name
):
    model, prompts, images = tiny_vision_model(name), prompts_about_images(name), images_of(name)

    ours, _ = run_both(
        run_engine,
        model,
        prompts * 2,
        images * 2,
        options=SMALL,
        environment=IN_KV_PAGES,
        max_tokens=40,
    )

    assert tables_of(ours) == ["full"]
    assert ours["preemptions"] > 0
    assert evicted(ours)["full"] > 0


@pytest.mark.slow
def test_phi_3_vision_is_preempted_in_a_small_arena_with_images_in_kv_pages(
    tiny_vision_model, run_engine
):
    ours = run_phi_3_in_a_small_arena(
        run_engine, tiny_vision_model("phi3_v"), environment=IN_KV_PAGES
    )

    assert tables_of(ours) == ["full"]
    assert evicted(ours)["full"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"enable_prefix_caching": False}, HOST], ids=["uncached", "host"])
def test_images_live_in_kv_pages_without_prefix_caching_and_with_host_memory(
    tiny_vision_model, run_engine, own
):
    name = "llava_onevision"
    model, prompts = tiny_vision_model(name), prompts_about_images(name)

    ours, _ = run_both(
        run_engine,
        model,
        prompts * 2,
        IMAGES * 2,
        options=SMALL,
        own=own,
        environment=IN_KV_PAGES,
        max_tokens=40,
    )

    assert tables_of(ours) == ["full"]
    assert ours["preemptions"] > 0
    if own is HOST:
        assert ours["host"]["loaded_bytes"] > 0


@pytest.mark.slow
def test_an_image_larger_than_a_step_lives_in_kv_pages_until_its_last_chunk(
    tiny_vision_model, run_engine
):
    name = "internvl_chat"

    ours, _ = run_both(
        run_engine,
        tiny_vision_model(name),
        prompts_about_images(name),
        images_of(name),
        options={"max_num_batched_tokens": 24},
        environment=IN_KV_PAGES,
    )

    check_encoded(name, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_vision", "paligemma"])
def test_images_that_one_step_reads_whole_live_in_kv_pages(tiny_vision_model, run_engine, name):
    ours, _ = run_beside_transformers(
        run_engine, name, tiny_vision_model(name), tables=TABLES, environment=IN_KV_PAGES
    )

    check_encoded(name, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_vision", "paligemma"])
def test_requests_are_preempted_in_the_least_arena_with_images_beside_windows(
    tiny_vision_model, run_engine, name
):
    ours, num_images = run_beside_transformers(
        run_engine,
        name,
        tiny_vision_model(name),
        texts=prompts_of_lengths((14, 15, 16), seed=8),
        options=SMALL_BESIDE_WINDOWS,
        tables=TABLES,
        environment=IN_KV_PAGES,
        max_tokens=48,
    )

    assert ours["preemptions"] > 1
    assert min(evicted(ours).values()) > 0
    assert sum(ours["encoded"]) > num_images


TWO_RANKS = {
    "tensor_parallel_size": 2,
    "worker_extension_cls": "tests.vllm_plugin.parallel.pipeline_worker.RankOfPipeline",
}


@pytest.mark.slow
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two ranks")
@pytest.mark.parametrize(
    ("name", "variables"),
    [
        pytest.param("llava_onevision", {}, id="llava_onevision-own_pages"),
        pytest.param("llava_onevision", IN_KV_PAGES, id="llava_onevision-kv_pages"),
        pytest.param("internvl_chat", IN_KV_PAGES, id="internvl_chat-kv_pages"),
    ],
)
def test_two_tensor_parallel_ranks_have_all_embeddings_each(
    tiny_vision_model, run_engine, name, variables
):
    ours, _ = run_both(
        run_engine,
        tiny_vision_model(name),
        prompts_of(name),
        images_of(name),
        own=TWO_RANKS,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | variables,
    )

    assert len(ours["arena_bytes"]) == 2
    assert tables_of(ours) == (["full"] if variables else ["full", "images"])
    if variables:
        check_encoded(name, ours)
    else:
        assert sum(ours["encoded"]) == NUM_IMAGES


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_behind_images_in_kv_pages_change_no_token(
    tiny_vision_model, tiny_model, run_engine, method
):
    name = "llava_onevision"
    drafts = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    if method == "draft_model":
        drafts = {"model": str(tiny_model("llama_draft"))}
    drafts |= {"method": method, "num_speculative_tokens": 3}

    ours, _ = run_both(
        run_engine,
        tiny_vision_model(name),
        prompts_of(name),
        images_of(name),
        own={"speculative_config": drafts},
        environment=IN_KV_PAGES,
        max_tokens=24,
    )

    assert sum(drafted for drafted, _ in ours["drafts"]) > 0
    assert tables_of(ours)[-1] == "full"
    check_encoded(name, ours)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, IN_KV_PAGES], ids=["own_pages", "kv_pages"])
def test_prompts_about_images_are_scored_as_by_stock_vllm(tiny_vision_model, run_engine, variables):
    name = "llava_onevision"

    ours, theirs = run_both(
        run_engine,
        tiny_vision_model(name),
        prompts_of(name),
        images_of(name),
        environment=variables,
        prompt_logprobs=1,
        max_tokens=3,
    )

    for our, their in zip(ours["outputs"], theirs["outputs"], strict=True):
        assert len(our["prompt_logprobs"]) == len(our["prompt"]) - 1
        assert our["prompt_logprobs"] == pytest.approx(
            their["prompt_logprobs"], abs=LOGPROB_TOLERANCE
        )


@pytest.mark.slow
def test_a_draft_head_that_reads_ahead_of_images_in_kv_pages_is_refused(
    tiny_vision_model, tiny_model, run_engine
):
    head = {"method": "eagle", "model": str(tiny_model("eagle_head")), "num_speculative_tokens": 3}

    ours = run_engine(
        tiny_vision_model("llava_onevision"),
        [[1]],
        options=OPTIONS | {"speculative_config": head},
        environment=IN_KV_PAGES,
        reads_images=True,
    )

    met = Refusal.EMBEDDINGS_IN_KV_PAGES.text("a draft head reads tokens ahead")
    assert met in ours["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_onevision", "internvl_chat", "qwen2_5_vl"])
def test_the_second_runner_reads_images_in_kv_pages(tiny_vision_model, run_engine, name):
    model, prompts = tiny_vision_model(name), prompts_about_images(name)[:2]

    ours, _ = run_both(
        run_engine,
        model,
        prompts,
        images_of(name)[:2],
        environment={V2_RUNNER: "1", **IN_KV_PAGES},
        max_tokens=4,
    )

    assert tables_of(ours) == ["full"]
    check_encoded(name, ours)


@pytest.mark.slow
def test_the_second_runner_reads_an_image_of_phi_3_vision_in_kv_pages(
    tiny_vision_model, run_engine
):
    name = "phi3_v"

    ours = run_phi_3_on_the_second_runner(run_engine, tiny_vision_model(name), IN_KV_PAGES)

    assert tables_of(ours) == ["full"]
    check_encoded(name, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_vision", "paligemma"])
def test_the_second_runner_reads_whole_images_in_kv_pages(tiny_vision_model, run_engine, name):
    ours, _ = run_beside_transformers(
        run_engine,
        name,
        tiny_vision_model(name),
        tables=TABLES,
        environment={V2_RUNNER: "1", **IN_KV_PAGES},
        max_tokens=3,
    )

    check_encoded(name, ours)

"""Models that read images in the real engine: tokens of an image read each other.

Every prompt comes twice, so that images are read from pages hit as well.
"""

import os

import pytest
import vllm

from tests.conftest import HAS_GPU
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny.tiny_vision_models import PLACEHOLDERS, TOKEN_IDS

pytestmark = pytest.mark.vllm

OPTIONS = {
    "attention_backend": "JENGA_TRITON",
    "enable_prefix_caching": True,
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 96,
    "limit_mm_per_prompt": {"image": 2, "video": 0, "audio": 0},
}
# Of each prompt. One has two images and takes two steps, one has none, one begins with text alone.
IMAGES = [[0], [1, 2], [], [0], [3]]


def prompts_about_images(model_name):
    """Make prompts with a placeholder for each of their images."""
    placeholder = TOKEN_IDS[PLACEHOLDERS[model_name]]
    parts = [((9, 20), 0), ((40, 12, 6), 1), ((35,), 2), ((9, 45), 3), ((100, 7), 4)]
    prompts = []
    for lengths, seed in parts:
        first, *others = prompts_of_lengths(lengths, seed=seed)
        prompts.append(first + [token for part in others for token in [placeholder, *part[1:]]])
    return prompts


def hits_of(prompt, placeholder, image_tokens):
    """Get how much of a prompt is hit later: whole pages, and never a part of an image."""
    num_tokens, images = 0, []
    for token in prompt:
        if token == placeholder:
            images.append((num_tokens, num_tokens + image_tokens))
        num_tokens += image_tokens if token == placeholder else 1
    hit_tokens = (num_tokens - 1) // 16 * 16
    for start, end in images:
        if start < hit_tokens < end:
            return start // 16 * 16
    return hit_tokens


def second_runner_drops_long_images():
    runner = os.environ.get(V2_RUNNER, "1" if HAS_GPU else "0")
    return runner == "1" and vllm.__version__.startswith("0.32.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "image_tokens"),
    # With the tokens around an image that come with it.
    [
        pytest.param("gemma3_vision", 25 + 4, id="whole", marks=pytest.mark.slow),
        pytest.param("gemma4_vision", 64 + 2, id="as_far_as_windows_reach"),
    ],
)
def test_images_that_are_read_before_and_after_give_what_transformers_gives(
    tiny_vision_model, run_engine, name, image_tokens
):
    if name == "gemma4_vision" and second_runner_drops_long_images():
        pytest.skip("vLLM 0.32's second runner tells layers of no image longer than their window")
    model, prompts = tiny_vision_model(name), prompts_about_images(name)
    job = {"reads_images": True}

    theirs = run_engine(model, prompts, image_seeds=IMAGES, script="reference_process.py", **job)
    ours = run_engine(
        model,
        prompts + prompts,
        image_seeds=IMAGES + IMAGES,
        rounds=2,
        options=OPTIONS,
        fill_arena=True,
        report_manager=True,
        **job,
    )

    assert "error" not in theirs, theirs["error"][-4000:]
    assert_same_generation(ours, {"outputs": theirs["outputs"] * 2})
    assert ours["request_tokens"] == {}
    placeholder = TOKEN_IDS[PLACEHOLDERS[name]]
    expected = [hits_of(prompt, placeholder, image_tokens) for prompt in prompts]
    assert [output["cached_tokens"] for output in ours["outputs"]] == [0] * len(prompts) + expected
    # One image is in two prompts, and none is looked at again that is hit whole.
    assert sum(ours["encoded"]) < 2 * sum(map(len, IMAGES))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_about_images_change_no_token(tiny_vision_model, tiny_model, run_engine, method):
    name = "gemma3_vision"
    model, prompts = tiny_vision_model(name), prompts_about_images(name)
    job = {"reads_images": True, "max_tokens": 24, "image_seeds": IMAGES}
    drafts = {"model": str(tiny_model("llama_draft"))}
    if method == "ngram":
        drafts = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    drafts |= {"method": method, "num_speculative_tokens": 3}

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_engine(
        model,
        prompts,
        options=OPTIONS | {"speculative_config": drafts},
        fill_arena=True,
        report_manager=True,
        **job,
    )

    assert "error" not in theirs, theirs["error"][-4000:]
    assert_same_generation(ours, theirs)
    assert sum(drafted for drafted, _ in ours["drafts"]) > 0


@pytest.mark.slow
def test_images_that_come_at_once_are_each_read_in_one_step(tiny_vision_model, run_engine):
    """The fifth is left 24 tokens of a step in which its image, of 29, would begin."""
    name = "gemma3_vision"
    model, placeholder = tiny_vision_model(name), TOKEN_IDS[PLACEHOLDERS[name]]
    job = {"reads_images": True, "image_seeds": [[seed] for seed in range(5)]}
    prompts = [
        [*before, placeholder, *after[1:]]
        for before, after in (prompts_of_lengths((5, 7), seed=seed) for seed in range(5))
    ]

    theirs = run_engine(model, prompts, script="reference_process.py", **job)
    ours = run_engine(model, prompts, options=OPTIONS, fill_arena=True, **job)

    assert "error" not in theirs, theirs["error"][-4000:]
    assert_same_generation(ours, theirs)

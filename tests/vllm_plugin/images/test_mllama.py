"""Llama 3.2 Vision in the real engine: text attends to images in pages of their own."""

import json

import pytest

from jenga.models.config import Config
from jenga.models.exchange import layer_type_from, options_fields
from jenga.models.options import ReadOptions
from jenga.models.reader import read_config
from tests import warm
from tests.vllm_plugin.conftest import (
    LOGPROB_TOLERANCE,
    NUM_WORKERS,
    V2_RUNNER,
    assert_same_generation,
    engine_environment,
)
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny.tiny_vision_models import MLLAMA_IMAGE

pytestmark = pytest.mark.vllm

OPTIONS = {
    "attention_backend": "JENGA_TRITON",
    "enable_prefix_caching": False,
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 96,
    "limit_mm_per_prompt": {"image": 4},
}
SMALL, WIDE, LARGE = [40, 40], [100, 40], [100, 100]
"""Sizes of images in pixels. They take 1, 2 and 4 tiles."""

LARGE_PAGE_BYTES = 98_304
"""Two pages of the three layers that attend to text, or three of the two that attend to images.

A page has 16 slots, and a slot has keys and values of two heads of 64 elements in float32.
"""


def prompt(*parts, seed):
    """Make a prompt of random text, of so many tokens each, and of images where a part is None."""
    tokens = []
    for index, part in enumerate(parts):
        text = prompts_of_lengths([part + 1], seed=97 * seed + index)[0][1:] if part else []
        tokens += [MLLAMA_IMAGE] if part is None else text
    return tokens


@pytest.fixture
def compare(tiny_vision_model, run_engine):
    """Run ours against transformers; get both results. Both generate the same."""

    def run(
        asked,
        *,
        options=(),
        max_tokens=8,
        by_references=True,
        forget=(),
        environment=None,
        **job,
    ):
        prompts, seeds = [list(each) for each in zip(*asked, strict=True)]
        model = tiny_vision_model("mllama")
        job |= {"reads_images": True, "max_tokens": max_tokens, "image_seeds": seeds}
        theirs = run_engine(model, prompts, script="mllama_reference.py", **job)
        ours = run_engine(
            model,
            prompts,
            options=OPTIONS | dict(options),
            by_references=by_references,
            forget=list(forget),
            environment=environment,
            fill_arena=True,
            report_manager=True,
            **job,
        )
        assert "error" not in theirs, theirs["error"][-4000:]
        assert_same_generation(ours, theirs)
        assert ours["request_tokens"] == {}
        return ours | {"expected": theirs["outputs"]}

    return run


MIXED = [
    (prompt(None, 20, seed=0), [[0, *SMALL]]),
    (prompt(7, None, 30, seed=1), [[1, *LARGE]]),
    (prompt(25, seed=2), []),
    (prompt(5, None, seed=3), [[2, *WIDE]]),
]
"""Prompts that begin with an image, have text around one, have none, and end with one."""


@pytest.mark.slow
def test_text_attends_to_the_images_before_it(compare):
    ours = compare(MIXED)

    assert sum(ours["encoded"]) == 3


CACHING = {"enable_prefix_caching": True}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"], ids=["first_runner", "second_runner"])
@pytest.mark.parametrize("num_logprobs", [2, -1], ids=["two", "all"])
def test_the_token_of_an_image_is_impossible_where_prompts_are_scored(
    compare, runner, num_logprobs
):
    longer_than_a_step = (prompt(40, None, None, 70, seed=4), [[0, *SMALL], [1, *WIDE]])

    ours = compare(
        [*MIXED, longer_than_a_step],
        options=CACHING | {"max_logprobs": -1},
        max_tokens=3,
        environment={V2_RUNNER: runner},
        prompt_logprobs=num_logprobs,
    )

    for output, theirs in zip(ours["outputs"], ours["expected"], strict=True):
        assert output["prompt_logprobs"] == pytest.approx(
            theirs["prompt_logprobs"], abs=LOGPROB_TOLERANCE
        )
    scores = [each for output in ours["outputs"] for each in output["prompt_logprobs"]]
    assert scores.count(float("-inf")) == 4  # without the image that is its prompt's first token


def test_an_image_is_found_again_behind_other_text(compare):
    first, second = [0, *SMALL], [1, *LARGE]
    group = (40, None, None, 30)
    asked = [
        (prompt(9, None, 20, seed=0), [first]),
        (prompt(*group, seed=1), [first, second]),
        (prompt(30, seed=2), []),
        # In the second round: the image behind other text, the text behind other images, a group
        # whose images were seen apart, and an image that a later step of its prompt finds.
        (prompt(50, None, 12, seed=3), [second]),
        (prompt(*group, seed=1), [first, [2, *WIDE]]),
        (prompt(*group, seed=1), [first, second]),
        (prompt(8, None, 100, None, 5, seed=4), [second, first]),
    ]
    asked.insert(3, (prompt(20, seed=5), []))

    ours = compare(asked, options=CACHING, rounds=2)

    # The two images of the first round, and a new one.
    assert sum(ours["encoded"]) == 3
    assert [output["cached_tokens"] for output in ours["outputs"]][4:] == [0, 32, 64, 0]


@pytest.mark.slow
def test_an_image_that_was_evicted_is_encoded_again_behind_text_that_was_not(compare):
    images = [[0, *SMALL], [1, *LARGE]]
    asked = [
        (prompt(40, None, None, 30, seed=1), images),
        (prompt(20, None, 40, seed=2), images[:1]),
    ]

    ours = compare(asked * 2, options=CACHING, rounds=2, forget=["cross"])

    assert sum(ours["encoded"]) == 2 * 2
    assert [output["cached_tokens"] for output in ours["outputs"]] == [0, 0, 64, 48]


@pytest.mark.slow
def test_kernels_read_images_as_the_references_do(compare):
    group = (prompt(40, None, None, 30, seed=1), [[0, *SMALL], [1, *LARGE]])

    compare([*MIXED[1:3], group], by_references=False, max_tokens=4)


ON_V2 = {V2_RUNNER: "1", "VLLM_LOGGING_LEVEL": "INFO"}


@pytest.mark.slow
def test_the_second_model_runner_stores_images_and_finds_them_again(compare):
    images = [[0, *SMALL], [1, *WIDE]]
    asked = [
        (prompt(40, None, None, 30, seed=1), images),
        (prompt(30, seed=2), []),
        # In the second round: an image behind other text, and no image.
        (prompt(9, None, 20, seed=3), images[1:]),
        (prompt(30, seed=2), []),
    ]

    ours = compare(asked, options=CACHING, rounds=2, max_tokens=4, environment=ON_V2)

    assert "Using V2 Model Runner" in ours["log"]
    assert sum(ours["encoded"]) == len(images)
    assert [output["cached_tokens"] for output in ours["outputs"]] == [0, 0, 0, 16]


@pytest.mark.slow
def test_the_second_model_runner_preempts_and_evicts_images(compare):
    sizes = (SMALL, LARGE, WIDE)
    images = [[seed, *size] for seed, size in enumerate(sizes)]
    asked = [
        (prompt(20 + 7 * number, None, 30, None, 11, seed=number), [image, images[1]])
        for number, image in enumerate(images)
    ]
    asked += [(prompt(60, seed=20), [])]

    ours = compare(
        asked + asked[::-1],
        options=CACHING | {"kv_cache_memory_bytes": 15 * LARGE_PAGE_BYTES + 5000},
        max_tokens=40,
        rounds=2,
        environment=ON_V2,
    )

    assert "Using V2 Model Runner" in ours["log"]
    assert ours["preemptions"] > 0
    (cross,) = [table for table in ours["cache"]["evictions"] if table["name"] == "cross"]
    assert cross["with_checkpoint"] > 0
    assert sum(ours["encoded"]) > len(images)
    assert ours["arena_bytes"] == [15 * LARGE_PAGE_BYTES]


@pytest.mark.slow
@pytest.mark.skipif(NUM_WORKERS < 2, reason="needs a GPU or a core for each of two workers")
def test_two_tensor_parallel_workers_read_images_and_find_them_again(
    tiny_vision_model, run_engine, compare
):
    ours = compare(MIXED, options=CACHING)
    prompts, seeds = [list(each) for each in zip(*MIXED, strict=True)]

    two = run_engine(
        tiny_vision_model("mllama"),
        prompts * 2,
        reads_images=True,
        image_seeds=seeds * 2,
        max_tokens=8,
        rounds=2,
        options=OPTIONS | CACHING | {"tensor_parallel_size": 2},
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        by_references=True,
    )

    answers = [output["tokens"] for output in two["outputs"]]
    assert answers[: len(MIXED)] == answers[len(MIXED) :]
    assert_same_generation(two | {"outputs": two["outputs"][: len(MIXED)]}, ours)
    found = [output["cached_tokens"] for output in two["outputs"]]
    assert found[: len(MIXED)] == [0] * len(MIXED)
    assert any(found[len(MIXED) :])


@pytest.mark.slow
@pytest.mark.parametrize("host", [{}, {"kv_offloading_size": 1 / 32}], ids=["alone", "on_host"])
def test_requests_are_preempted_and_images_evicted_in_a_small_arena(host, compare):
    """Images that were evicted are encoded again, but with host memory none is."""
    sizes = (SMALL, LARGE, WIDE, LARGE)
    images = [[seed, *size] for seed, size in enumerate(sizes)]
    asked = [
        (prompt(20 + 7 * number, None, 30, None, 11, seed=number), [image, images[-1]])
        for number, image in enumerate(images)
    ]
    asked += [(prompt(60, seed=20), [])]

    # Of 15 large pages but the null page, a request of the longest takes 7 to 9 at its end.
    ours = compare(
        asked + asked[::-1],
        options=CACHING | {"kv_cache_memory_bytes": 15 * LARGE_PAGE_BYTES + 5000} | host,
        max_tokens=40,
        rounds=2,
    )

    assert ours["preemptions"] > 0
    (cross,) = [table for table in ours["cache"]["evictions"] if table["name"] == "cross"]
    assert cross["with_checkpoint"] > 0
    if host:
        assert ours["host"]["loaded_bytes"] > 0
        assert sum(ours["encoded"]) == len(images)
    else:
        assert sum(ours["encoded"]) > len(images)
    assert ours["arena_bytes"] == [15 * LARGE_PAGE_BYTES]


@pytest.mark.slow
def test_a_request_whose_images_never_fit_ends_with_an_error_and_others_go_on(
    tiny_vision_model, run_engine, compare
):
    images = [[seed, *LARGE] for seed in range(4)]
    # Its four images take 7 large pages, and its 250 tokens take 8. The arena has 14 of them.
    never = (prompt(50, None, 50, None, 50, None, 50, None, seed=9), images)
    prompts, seeds = [list(each) for each in zip(*MIXED[:2], never, *MIXED[2:], strict=True)]
    expected = compare(MIXED, options=CACHING, max_tokens=42)

    ours = run_engine(
        tiny_vision_model("mllama"),
        prompts,
        reads_images=True,
        image_seeds=seeds,
        max_tokens=42,
        options=OPTIONS | CACHING | {"kv_cache_memory_bytes": 15 * LARGE_PAGE_BYTES + 5000},
        by_references=True,
        fill_arena=True,
        report_manager=True,
    )

    assert "error" not in ours, ours["error"][-4000:]
    refused = ours["outputs"].pop(2)
    assert (refused["finish_reason"], refused["tokens"]) == ("error", [])
    assert_same_generation(ours, expected)
    assert "the arena cannot hold its 204 tokens and 4 images at once" in ours["log"]
    assert ours["request_tokens"] == {}


def test_plan_and_engine_count_the_same_layers(tmp_path):
    from transformers import MllamaConfig

    options = ReadOptions(tensor_parallel=2)
    MllamaConfig(architectures=["MllamaForConditionalGeneration"]).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "read_options.json").write_text(json.dumps(options_fields(options)))

    asked = warm.run(
        ["-m", "jenga.vllm_plugin.without_engine.declared_layers", tmp_path],
        engine_environment(reads_images=True, **{V2_RUNNER: "0"}),
    )

    assert asked.returncode == 0, asked.stderr[-4000:]
    answer = json.loads((tmp_path / "declared_layers.json").read_text())
    assert "error" not in answer, answer["error"]
    planned = read_config(Config(fields, source="config.json"), name="mllama", options=options)
    counted = [
        {type(each): [(layer.name, layer.slot_bytes) for layer in each.layers] for each in types}
        for types in (map(layer_type_from, answer["layer_types"]), planned.layer_types)
    ]
    assert counted[0] == counted[1]

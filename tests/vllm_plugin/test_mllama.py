"""Llama 3.2 Vision in the real engine: text attends to images in pages of their own."""

import pytest

from tests.vllm_plugin.conftest import assert_same_generation
from tests.vllm_plugin.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny_vision_models import MLLAMA_IMAGE, MLLAMA_TILE_TOKENS

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


def prompt(*parts, seed):
    """Make a prompt of random text, of so many tokens each, and of images where a part is None."""
    tokens = []
    for index, part in enumerate(parts):
        text = prompts_of_lengths([part + 1], seed=97 * seed + index)[0][1:] if part else []
        tokens += [MLLAMA_IMAGE] if part is None else text
    return tokens


@pytest.fixture
def compare(tiny_vision_model, run_engine):
    """Run ours against transformers; get our result. Both generate the same."""

    def run(asked, *, options=(), again=False, max_tokens=8, **job):
        prompts, seeds = [list(each) for each in zip(*asked, strict=True)]
        model = tiny_vision_model("mllama")
        job |= {"reads_images": True, "max_tokens": max_tokens}
        theirs = run_engine(model, prompts, script="mllama_reference.py", image_seeds=seeds, **job)
        times = 2 if again else 1
        ours = run_engine(
            model,
            prompts * times,
            image_seeds=seeds * times,
            rounds=times,
            options=OPTIONS | dict(options),
            by_references=True,
            fill_arena=True,
            report_manager=True,
            **job,
        )
        assert "error" not in theirs, theirs["error"][-4000:]
        assert_same_generation(ours, {"outputs": theirs["outputs"] * times})
        assert ours["request_tokens"] == {}
        return ours

    return run


def test_text_attends_to_the_image_before_it(compare):
    ours = compare(
        [
            (prompt(None, 20, seed=0), [[0, *SMALL]]),
            (prompt(7, None, 30, seed=1), [[1, *LARGE]]),
            (prompt(25, seed=2), []),
            (prompt(5, None, seed=3), [[2, *WIDE]]),
        ]
    )

    assert sum(ours["encoded"]) == 3

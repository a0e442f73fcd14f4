"""Audio that takes the place of tokens in the real engine, with its embeddings in the arena.

Tokens are compared with the stock engine's, and the runs of the encoder are counted.
"""

import pytest

from tests.vllm_plugin.conftest import assert_same_generation
from tests.vllm_plugin.images.test_image_pages import HOST, SMALL, check_host
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny.tiny_audio_model import PLACEHOLDER, TOKENS_PER_SECOND, save

pytestmark = pytest.mark.vllm

STOCK = {
    "enable_prefix_caching": True,
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 48,
    "limit_mm_per_prompt": {"audio": 2},
}
OURS = STOCK | {"attention_backend": "JENGA_TRITON"}
AUDIO = [[[0, 1]], [[1, 1], [2, 2]], [], [[0, 1]], [[3, 3]], [[4, 1]]]
"""Seeds and seconds of each prompt's audio. Two hear the same, and two differ in that alone."""
LENGTHS = ((9, 20), (40, 12, 6), (35,), (9, 45), (100, 7), (9, 20))
"""Tokens of text before, between and after the audio of each prompt."""
NUM_AUDIO = 5


@pytest.fixture(scope="module")
def audio_model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "qwen2_audio")


def prompts_about_audio():
    """Make prompts with a placeholder for each audio. The last one has the text of the first."""
    prompts = []
    for seed, lengths in enumerate(LENGTHS):
        first, *others = prompts_of_lengths(lengths, seed=seed % (len(LENGTHS) - 1))
        prompts.append(first + [token for part in others for token in [PLACEHOLDER, *part[1:]]])
    return prompts


@pytest.mark.slow
def test_audio_is_encoded_once_and_read_from_pages_of_the_arena(audio_model, run_engine):
    prompts = prompts_about_audio() * 2
    job = {"by_references": True, "audio_seeds": AUDIO * 2, "rounds": 2}

    theirs = run_engine(audio_model, prompts, options=STOCK, **job)
    ours = run_engine(
        audio_model, prompts, options=OURS, fill_arena=True, report_manager=True, **job
    )

    assert_same_generation(ours, theirs)
    assert ours["request_tokens"] == {}
    tables = [table["name"] for table in ours["cache"]["evictions"]]
    assert tables == ["full", "images"]
    assert sum(ours["encoded"]) == NUM_AUDIO
    answers = [output["tokens"] for output in ours["outputs"]]
    assert answers[0] != answers[len(AUDIO) - 1]  # which differ in their audio alone
    lengths = [
        sum(texts) - (len(texts) - 1) + TOKENS_PER_SECOND * sum(seconds for _, seconds in heard)
        for texts, heard in zip(LENGTHS, AUDIO, strict=True)
    ]
    assert [len(output["prompt"]) for output in ours["outputs"]] == lengths * 2
    hits = [output["cached_tokens"] for output in ours["outputs"][len(AUDIO) :]]
    assert hits == [(length - 1) // 16 * 16 for length in lengths]


@pytest.mark.slow
def test_audio_that_a_small_arena_lost_comes_back_from_host_memory(audio_model, run_engine):
    prompts = prompts_about_audio() * 4
    job = {"by_references": True, "audio_seeds": AUDIO * 4, "rounds": 2, "max_tokens": 40}

    theirs = run_engine(audio_model, prompts, options=STOCK, **job)
    alone, ours = (
        run_engine(
            audio_model,
            prompts,
            options=OURS | SMALL | host,
            fill_arena=True,
            report_manager=True,
            **job,
        )
        for host in ({}, HOST)
    )

    assert_same_generation(alone, theirs)
    assert_same_generation(ours, theirs)
    check_host(alone, ours, NUM_AUDIO)

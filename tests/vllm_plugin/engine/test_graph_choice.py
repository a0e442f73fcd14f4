"""vLLM's first runner replays a graph of decoding requests for no step that reads a prompt."""

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.vllm

STEPS = {
    # of each request: its prompt's tokens, tokens computed, tokens of the step; whether all decode
    "two_decode": ([(7, 9, 1), (5, 30, 1)], True),
    "two_decode_drafts": ([(7, 9, 3), (5, 30, 3)], True),
    "the_last_token_of_a_prompt": ([(7, 9, 1), (5, 4, 1)], True),
    "a_prompt_of_one_token": ([(7, 9, 1), (1, 0, 1)], False),
    "a_prompt_begins_with_as_many_as_drafts": ([(7, 9, 3), (8, 0, 3)], False),
    "a_prompt_ends_with_as_many_as_drafts": ([(7, 9, 3), (8, 5, 3)], False),
    "an_answer_read_again": ([(7, 9, 3), (8, 10, 3)], True),
}


def chosen(monkeypatch, requests, *, is_selected=True, **named):
    """What the runner's method is asked of a step, and what vLLM's own answers to that."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    import jenga.vllm_plugin.config
    from jenga.vllm_plugin.patches.workers import WORKERS

    monkeypatch.setattr(jenga.vllm_plugin.config, "is_selected", lambda _: is_selected)
    name = "GPUModelRunner._determine_batch_execution_and_padding"
    (replacement,) = (each for each in WORKERS if each.name == name)
    prompts, computed, scheduled = np.array(requests).T
    batch = SimpleNamespace(
        # Rows past the batch are of requests that have gone.
        num_computed_tokens_cpu=np.append(computed, 0),
        num_prompt_tokens=np.append(prompts, 9),
    )
    runner = SimpleNamespace(vllm_config=None, input_batch=batch)
    most, total = int(scheduled.max()), int(scheduled.sum())

    def original(self, num_tokens, num_reqs, counts, most, force_uniform_decode=None):
        assert self is runner
        assert counts is scheduled
        return GPUModelRunner._is_uniform_decode(
            most, most, num_tokens, num_reqs, force_uniform_decode
        )

    return replacement.make(original)(runner, total, len(requests), scheduled, most, **named)


@pytest.mark.parametrize("step", STEPS)
def test_only_steps_in_which_all_requests_decode_are_taken_for_such(monkeypatch, step):
    requests, all_decode = STEPS[step]

    assert chosen(monkeypatch, requests) is all_decode


def test_a_capture_and_another_backend_choose_for_themselves(monkeypatch):
    requests, _ = STEPS["a_prompt_of_one_token"]

    assert chosen(monkeypatch, requests, force_uniform_decode=True)
    assert chosen(monkeypatch, requests, is_selected=False)

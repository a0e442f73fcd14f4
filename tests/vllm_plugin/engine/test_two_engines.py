"""Two engines in one process, whose layers have the same names."""

import pytest

from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "runner",
    [
        pytest.param("0", id="first_runner"),
        pytest.param("1", id="second_runner", marks=pytest.mark.slow),
    ],
)
def test_engines_of_one_process_do_not_see_each_other(runner, tiny_model, run_engine):
    models = [str(tiny_model(name)) for name in ("granite_hybrid", "granite_hybrid_64")]
    prompts = prompts_of_lengths((40, 100, 150, 70), seed=1, shared_tokens=33)
    options = {
        "attention_backend": "JENGA_TRITON",
        "enable_prefix_caching": True,
        "kv_offloading_size": 0.01,
    }

    result = run_engine(
        models[0],
        prompts,
        models=models,
        options=options,
        max_tokens=6,
        script="two_engines_process.py",
        by_references=True,
        environment={"VLLM_USE_V2_MODEL_RUNNER": runner},
    )

    assert "error" not in result, result["error"][-4000:]
    assert result["have_equal_names"]
    of_first, of_second = result["together"]
    assert of_first == result["alone"]
    assert of_second != of_first
    assert result["again"] == [of_second, of_first]
    # The first one fails with states that its layers were to keep, and nobody else is to.
    assert result["has_failed"]
    assert result["second"] == [of_second, of_second]
    assert result["hits"] > 0
    assert result["mailboxes"] == [[2, 2], [0, 0], [1, 1]]

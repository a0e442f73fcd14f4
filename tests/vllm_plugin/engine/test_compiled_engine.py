"""Models that torch compiles, as vLLM has them by default: what was compiled calls our layers."""

import pytest

from tests.vllm_plugin.conftest import COMPILED, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

JENGA = {"attention_backend": "JENGA_TRITON"}


@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma4", "granite_hybrid", "qwen3_next", "lfm2", "deepseek_v2"]
)
def test_a_compiled_model_generates_what_it_does_step_by_step(name, tiny_model, run_engine):
    model = tiny_model(name)
    prompts = prompts_of_lengths((5, 33, 70, 150), seed=0)

    eager = run_engine(model, prompts, options=JENGA)
    compiled = run_engine(
        model,
        prompts,
        options=JENGA | {"enforce_eager": False},
        environment=COMPILED,
        fill_arena=True,
        report_manager=True,
    )

    assert_same_generation(compiled, eager)

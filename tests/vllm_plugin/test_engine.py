"""The real vLLM engine on JENGA_TRITON against stock vLLM on the same machine."""

import pytest

from tests.vllm_plugin.conftest import assert_same_generation
from tests.vllm_plugin.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON"}
# Short, page-crossing, longer than the windows (32 and 40), longer than one chunk of 64 tokens.
PROMPTS = prompts_of_lengths((5, 33, 70, 150), seed=0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "granite_hybrid"])
def test_engine_generates_what_stock_vllm_generates(name, tiny_model, run_engine):
    model = tiny_model(name)

    stock = run_engine(model, PROMPTS)
    ours = run_engine(model, PROMPTS, options=JENGA, fill_arena=True, report_manager=True)

    assert_same_generation(ours, stock)
    assert ours["request_tokens"] == {}

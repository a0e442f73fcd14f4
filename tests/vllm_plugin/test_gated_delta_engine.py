"""Models with layers of the gated delta rule in the real engine: states in pages, and kept."""

import pytest

from tests.vllm_plugin.conftest import assert_same_generation
from tests.vllm_plugin.test_hybrid_engine import CUTS, JENGA, NUM_PROMPTS, TURN, check_turns
from tests.vllm_plugin.test_prefix_caching import check_hits, prompts_over_shared_prefixes

pytestmark = pytest.mark.vllm


def test_gated_delta_hybrid_generates_what_transformers_generates_and_finds_its_prefixes(
    tiny_model, run_engine
):
    # vLLM's CPU build runs these layers in bfloat16 only.
    model = tiny_model("qwen3_next")
    prompts = prompts_over_shared_prefixes(NUM_PROMPTS, seed=31)

    theirs = run_engine(model, prompts, turns=[TURN], script="reference_process.py")
    ours = run_engine(
        model, prompts, turns=[TURN], options=CUTS | JENGA, fill_arena=True, report_manager=True
    )

    assert_same_generation(ours, theirs)
    assert ours["request_tokens"] == {}
    check_hits(ours)
    check_turns(ours, prompts)

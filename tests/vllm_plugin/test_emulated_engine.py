"""The real engine on kernels as Triton compiles them for Hopper, in an emulated GPU."""

import pytest

from tests.emulation import only_where_interpreted, run_emulated

pytestmark = [only_where_interpreted, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]


TESTS = {
    "windows_and_sinks": "test_engine.py::test_engine_generates_what_stock_vllm_generates[gpt_oss]",
    "specialized_prefill": "test_specialized_engine.py",
    "states": "test_hybrid_engine.py"
    "::test_mamba2_hybrid_generates_what_stock_vllm_generates_and_finds_its_prefixes",
    "states_seldom_written": "test_replayed_states.py"
    "::test_with_drafts_another_turn_starts_near_the_end_of_a_long_answer",
    "gated_deltas_seldom_written": "test_replayed_gated_delta_engine.py"
    "::test_with_ngrams_another_turn_starts_near_the_end_of_a_long_answer",
}


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_compiled_kernels_generate_what_stock_vllm_generates(test):
    run_emulated(90, f"tests/vllm_plugin/{test}")

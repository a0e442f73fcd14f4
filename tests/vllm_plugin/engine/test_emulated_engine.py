"""The real engine on kernels as Triton compiles them for Hopper, in an emulated GPU."""

import subprocess
import sys

import pytest

from tests.emulation import ROOT, only_where_interpreted, run_emulated

pytestmark = pytest.mark.vllm

TESTS = {
    "windows_and_sinks": "engine/test_engine.py"
    "::test_engine_generates_what_stock_vllm_generates[gpt_oss]",
    "values_narrower_than_keys": "attention/test_value_widths.py"
    "::test_values_narrower_than_keys_generate_what_transformers_generates",
    "specialized_prefill": "engine/test_specialized_engine.py"
    "::test_engine_with_the_specialized_prefill_generates_what_it_does_without",
    "specialized_latents": "engine/test_specialized_engine.py"
    "::test_engine_with_specialized_latents_generates_what_it_does_without",
    "specialized_states": "engine/test_specialized_engine.py"
    "::test_engine_with_scans_for_hopper_generates_what_it_does_in_float32[granite_hybrid_64"
    "-state_scan_specialized]",
    "gated_deltas_ahead": "engine/test_specialized_engine.py"
    "::test_engine_with_scans_for_hopper_generates_what_it_does_in_float32[qwen3_next_64"
    "-delta_scan_hopper]",
    "trials_of_attention": "engine/test_specialized_engine.py"
    "::test_engine_launches_what_it_has_tried_with_the_same_strides_and_tiles[gemma3_256]",
    "trials_of_states": "engine/test_specialized_engine.py"
    "::test_engine_launches_what_it_has_tried_with_the_same_strides_and_tiles[granite_hybrid_64]",
    "states": "states/test_hybrid_engine.py"
    "::test_hybrids_generate_what_stock_vllm_generates_and_find_their_prefixes[granite_hybrid]",
    "convolutions": "states/test_hybrid_engine.py"
    "::test_hybrids_generate_what_stock_vllm_generates_and_find_their_prefixes[lfm2]",
    "states_seldom_written": "states/test_replayed_states.py"
    "::test_with_drafts_another_turn_starts_near_the_end_of_a_long_answer",
    "gated_deltas_seldom_written": "states/test_replayed_gated_delta_engine.py"
    "::test_with_ngrams_another_turn_starts_near_the_end_of_a_long_answer",
}


def path_of(test):
    return f"tests/vllm_plugin/{test}"


def test_tests_to_run_emulated_exist():
    """Where one is renamed, this says so at once, and not the slow tests an hour later."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *map(path_of, TESTS.values())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@only_where_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_compiled_kernels_generate_what_stock_vllm_generates(test):
    run_emulated(90, path_of(test))

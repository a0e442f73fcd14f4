"""Run small tests of every operation under NVIDIA's compute-sanitizer: bounds, races, barriers.

python -m perf.gpu.sanitize memcheck|racecheck|synccheck|initcheck [--workers 14]

With several workers each test has a process of its own, and that many run at a time. This is
faster, because most of the time is Python's start. If compute-sanitizer is missing, or does not
support the machine, the program says so and returns 5, like pytest when it finds no tests.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from perf.harness.machine import ROOT, path_of_test

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

FOUND_ERRORS = 9
"""Exit status of compute-sanitizer when it found errors."""

NOTHING_DONE = 5

UNSUPPORTED = "Device not supported"

USUAL_PATH = "/usr/local/cuda/bin"

SMALL_TESTS = {
    "kv_store": (
        "writes_its_slots_and_nothing_else[one_token-torch.bfloat16-head_major]",
        "rounds_and_saturates_to_fp8[torch.bfloat16-per_head-torch.float8_e4m3fn]",
        "rounds_and_saturates_to_fp8[torch.bfloat16-per_head-torch.float8_e5m2]",
    ),
    "paged_attention": (
        "has_option[causal-torch.bfloat16]",
        "has_option[soft_cap-torch.bfloat16]",
        "reads_fp8[per_head-torch.bfloat16-torch.float8_e4m3fn]",
        "reads_fp8[per_head-torch.bfloat16-torch.float8_e5m2]",
    ),
    "specialized_prefill": (
        "goes_round_its_ring_of_tiles[128]",
        "agrees_with_the_reference[mixed_batch]",
    ),
    "specialized_latents": (
        "agree_with_their_reference[tiles_that_end_in_a_box]",
        "do_one_run_after_another[True-3]",
        "agree_with_their_reference[fp8]",
    ),
    "attention_merge": ("may_write_onto_a_log_sum_exp",),
    "token_scores": ("agree_with_their_reference[last_chunks-plain]",),
    "pack_slots": ("moves_what_is_kept_and_touches_no_other_slot[two_requests-torch.bfloat16]",),
    "dequantise_pages": ("restores_its_runs_and_writes_nothing_else[mixed-torch.bfloat16-e4m3]",),
    "scratch_attention": ("agrees_with_the_reference[mixed-torch.bfloat16-e4m3_slots]",),
    "latent_store": ("writes_its_slots_and_nothing_else[one_token-torch.bfloat16]",),
    "latent_attention": ("agrees_with_its_reference[fp8]",),
    "conv_update": ("matches_its_reference[speculative-torch.bfloat16-2-dim_last]",),
    "causal_conv": ("matches_its_reference[past_a_tile-torch.bfloat16-2-dim_last]",),
    "gated_conv": (
        "matches_its_reference[drafts-torch.bfloat16-3]",
        "matches_its_reference[prompts-torch.bfloat16-3]",
    ),
    "state_update": ("matches_the_recurrence[mamba2-bf16]",),
    "state_replay": (
        "matches_the_recurrence[early_and_late-bf16_state_f32]",
        "matches_the_recurrence[drafts-bf16]",
    ),
    "state_scan": (
        "matches_the_recurrence[mamba1-torch.bfloat16]",
        "gives_the_same_wherever_a_prompt_is_cut[heads-2]",
        "without_gates_keeps_what_it_would_end_with[shared-two_groups]",
        "without_gates_keeps_what_it_would_end_with[lone-two_groups]",
        "without_gates_reads_no_token_of_another_request[shared-wide_state_and_heads]",
        "without_gates_reads_no_token_of_another_request[lone-wide_state_and_heads]",
        "without_gates_and_without_a_bias_takes_step_sizes_as_they_are[shared-two_groups]",
        "in_segments_is_as_exact[lone-two_groups]",
    ),
    "delta_update": ("matches_the_rule[qwen3_next-heads-bf16]",),
    "delta_replay": (
        "matches_the_rule[early_and_late-heads-bf16_state_f32]",
        "matches_the_rule[drafts-channels-bf16]",
    ),
    "delta_scan": (
        "gives_the_same_wherever_a_prompt_is_cut[2-True]",
        "in_16_bits_keeps_what_it_would_end_with[heads]",
        "in_16_bits_keeps_what_it_would_end_with[channels]",
    ),
    "delta_plan": (
        "keeps_states_wherever_they_lie[fused]",
        "keeps_states_wherever_they_lie[heads_cut]",
        "keeps_states_wherever_they_lie[channels_cut]",
    ),
}
"""Operation -> a few tests of it, in bfloat16 and, if it supports them, in float8."""

OTHER_TESTS = (
    "slot_scales.py::test_kv_store_scales_each_head_of_each_slot[torch.bfloat16-torch.int8-head_major]",
    "slot_scales.py::test_paged_attention_reads_slots_with_scales[mixed-torch.bfloat16-torch.int8]",
    "slot_scales.py::test_kv_store_scales_each_head_of_each_slot[torch.bfloat16-torch.uint8-head_major]",
    "slot_scales.py::test_paged_attention_reads_slots_with_scales[mixed-torch.bfloat16-torch.uint8]",
    "pages.py::test_page_copy_copies_whole_pages_and_nothing_else",
)
"""Tests in files that are not named after their operation."""


def small_tests() -> list[str]:
    """Return the names of these tests for pytest."""
    tests = [
        f"{name}.py::test_{name}_{test}" for name, some in SMALL_TESTS.items() for test in some
    ]
    named = [test.partition(".py") for test in (*tests, *OTHER_TESTS)]
    return [path_of_test("tests/kernels", f"test_{file}") + test for file, _, test in named]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.gpu.sanitize", description=__doc__)
    parser.add_argument("tool", choices=TOOLS, help="tool of compute-sanitizer")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of processes that run at once"
    )
    options = parser.parse_args(arguments)
    tool = options.tool
    path = os.pathsep.join([os.environ.get("PATH", ""), USUAL_PATH])
    program = shutil.which("compute-sanitizer", path=path)
    if program is None:
        print(f"no compute-sanitizer in {path}: {tool} is not done")
        return NOTHING_DONE
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND_ERRORS)]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]

    def run(tests: list[str]) -> tuple[int, str]:
        # Each tensor gets an allocation of its own, so that accesses past its end are found.
        done = subprocess.run(
            [*command, *tests],
            cwd=ROOT,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"{' '.join(tests)} under {tool}: {done.returncode}\n{done.stdout}", flush=True)
        return done.returncode, done.stdout

    tests = small_tests()
    with ThreadPoolExecutor(options.workers) as workers:
        results = list(
            workers.map(run, [[test] for test in tests] if options.workers > 1 else [tests])
        )
    if any(UNSUPPORTED in text for _, text in results):
        print(f"compute-sanitizer does not support this machine: {tool} is not done")
        return NOTHING_DONE
    return max(code for code, _ in results)


if __name__ == "__main__":
    sys.exit(main())

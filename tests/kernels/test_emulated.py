"""Kernels as Triton compiles them, in an emulated GPU."""

import pytest

from tests.emulation import only_where_interpreted, run_emulated

pytestmark = only_where_interpreted

SOME = {
    "kv_store": (
        "writes_its_slots_and_nothing_else[one_token-torch.bfloat16-head_major]",
        "rounds_and_saturates_to_fp8[torch.bfloat16-per_head]",
    ),
    "paged_attention": (
        "has_option[causal-torch.bfloat16]",
        "has_option[soft_cap-torch.bfloat16]",
        "reads_fp8[per_head]",
    ),
    "specialized_prefill": ("goes_round_its_ring_of_tiles[128]",),
    "attention_merge": ("may_write_onto_a_log_sum_exp",),
    "latent_store": ("writes_its_slots_and_nothing_else[one_token-torch.bfloat16]",),
    "latent_attention": ("agrees_with_its_reference[fp8]",),
    "conv_update": ("matches_its_reference[speculative-torch.bfloat16-2-dim_last]",),
    "causal_conv": ("matches_its_reference[past_a_tile-torch.bfloat16-2-dim_last]",),
    "state_update": ("matches_the_recurrence[mamba2-bf16]",),
    "state_scan": (
        "matches_the_recurrence[mamba1-torch.bfloat16]",
        "gives_the_same_wherever_a_prompt_is_cut[heads-2]",
    ),
    "delta_update": ("matches_the_rule[qwen3_next-heads-bf16]",),
    "delta_scan": ("gives_the_same_wherever_a_prompt_is_cut[2-True]",),
}
"""Operation -> a test or two of it, in bfloat16 and float8 where it has them."""


def test_operations_give_as_compiled_for_hopper_what_their_references_give():
    tests = [
        f"tests/kernels/test_{name}.py::test_{name}_{test}"
        for name, some in SOME.items()
        for test in some
    ]
    pages = "tests/kernels/test_pages.py::test_page_copy_copies_whole_pages_and_nothing_else"
    run_emulated(90, *tests, pages)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [90, 80])
def test_every_test_of_a_kernel_passes_on_what_is_compiled(capability):
    run_emulated(capability, "tests/kernels", "-k", "not compile and not emulated")

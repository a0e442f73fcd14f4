"""Prompts that restore quantised keys and values to a scratch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import KVQuantMode

from jenga.vllm_plugin.config import _unserved_with_scratch
from jenga.vllm_plugin.layers.attention import backend as attention
from jenga.vllm_plugin.layers.attention.backend import JengaTritonImpl
from jenga.vllm_plugin.layers.attention.prompt_scratch import scratch_on
from jenga.vllm_plugin.settings.environment import SCRATCH_VARIABLE, read_settings
from jenga_kernels.plans.scratch_plan import SCRATCH_PAGE_TOKENS, page_bytes
from jenga_kernels.reference.attention.paged_attention import paged_attention as attend_plainly
from jenga_kernels.trial_calls import View
from tests.kernels.support import check_close
from tests.vllm_plugin.attention.test_attention_builder import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAGE_TOKENS,
    SPECS,
    Batches,
    make_builder,
)
from tests.vllm_plugin.attention.test_attention_features import most_apart
from tests.vllm_plugin.conftest import ROUNDED_TOLERANCE, assert_same_generation
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

CPU = torch.device("cpu")
QUANTISED = {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR, "dtype": torch.uint8}
LONG, MAX_PAGES = 600, 48
"""Tokens of a prompt whose two heads of a group are enough rows, and pages of a request."""


def builder_with(monkeypatch, num_bytes, *, name="full", changes=QUANTISED, **options):
    monkeypatch.setenv(SCRATCH_VARIABLE, str(num_bytes) if num_bytes else "")
    return make_builder(replace(SPECS[name], **changes), **options)


def prompts(*query_lens, seq_lens=None):
    """Get a step's metadata as a model runner makes it."""
    common = Batches(max_pages=MAX_PAGES).prefill(list(query_lens))
    if seq_lens is not None:
        common.seq_lens.copy_(torch.tensor(seq_lens))
    return common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone())


def test_the_environment_gives_the_bytes_of_a_scratch_and_none_by_default():
    assert read_settings({}).prompt_scratch_bytes == 0
    assert read_settings({SCRATCH_VARIABLE: "1000"}).prompt_scratch_bytes == 1000
    with pytest.raises(ValueError, match=f"{SCRATCH_VARIABLE}='1e9': expected a number of bytes"):
        read_settings({SCRATCH_VARIABLE: "1e9"})


def test_layers_of_a_process_share_a_scratch():
    assert scratch_on(CPU, 1000) is scratch_on(CPU, 1000)
    assert scratch_on(CPU, 1000).numel() == 1000


def test_long_prompts_are_planned_through_the_scratch(monkeypatch):
    builder = builder_with(monkeypatch, 16 << 20)

    metadata = builder.build(0, prompts(LONG, 1, seq_lens=[LONG, 90]))

    assert metadata.scratch is scratch_on(CPU, 16 << 20)
    assert metadata.scratch_plan.whole is metadata.plan
    assert metadata.scratch_plan.seq_lens.tolist() == [LONG, 0]
    held = [end - start for _, start, end in metadata.scratch_plan.page_runs.tolist()]
    assert sum(held) == LONG


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (prompts(40, 1), {}),
        (prompts(1, 1), {}),
        (prompts(LONG, LONG), {"num_bytes": 1 << 20}),
        (prompts(LONG), {"num_bytes": 0}),
        (prompts(LONG), {"changes": {}}),
        (prompts(LONG).replace(causal=False), {"name": "cross"}),
        (prompts(LONG).replace(seq_lens_cpu_upper_bound=None), {}),
        (prompts(LONG).replace(mm_req_doc_ranges={0: [(5, 90)]}), {}),
    ],
    ids=["short", "decoded", "no_room", "off", "16_bits", "cross", "no_bounds", "images"],
)
def test_other_steps_read_the_pages_of_the_arena(step, options, monkeypatch):
    builder = builder_with(monkeypatch, **{"num_bytes": 16 << 20} | options)

    metadata = builder.build(0, step)

    assert metadata.scratch is None
    assert metadata.scratch_plan is None


def test_a_draft_model_reads_the_pages_of_the_arena(monkeypatch):
    builder = builder_with(monkeypatch, 16 << 20, num_drafted=3)
    step = prompts(LONG)

    assert builder.build(0, step).scratch_plan is not None
    assert builder.build(0, step, fast_build=True).scratch_plan is None


def test_a_scratch_without_room_for_a_page_is_refused_by_name(monkeypatch):
    # Keys and values of 64 elements of four bytes, of two heads.
    num_bytes = SCRATCH_PAGE_TOKENS * 2 * 2 * 64 * 4

    assert builder_with(monkeypatch, num_bytes)
    with pytest.raises(
        ValueError, match=f"{SCRATCH_VARIABLE}={num_bytes - 1}: expected .*{num_bytes}"
    ):
        builder_with(monkeypatch, num_bytes - 1)


def make_layer(cache_dtype="fp8"):
    """Make a layer of two KV heads and its cache of random numbers."""
    impl = JengaTritonImpl(
        NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_KV_HEADS, kv_cache_dtype=cache_dtype
    )
    shape = (8 * MAX_PAGES, NUM_KV_HEADS, PAGE_TOKENS, 2 * HEAD_DIM)
    rng = torch.Generator().manual_seed(0)
    cache = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn).view(torch.uint8)
    return SimpleNamespace(
        _k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0), kv_cache=cache, impl=impl
    )


def test_a_layer_restores_to_the_scratch_what_its_prompts_read(monkeypatch):
    builder = builder_with(monkeypatch, 16 << 20)
    layer, rng = make_layer(), torch.Generator().manual_seed(1)
    metadata = builder.build(0, prompts(LONG, 1, seq_lens=[LONG, 90]))
    q = torch.randn(LONG + 1, NUM_HEADS, HEAD_DIM, generator=rng)
    metadata.scratch.zero_()
    out = torch.empty_like(q)

    layer.impl.forward(layer, q, q, q, layer.kv_cache, metadata, out)

    def plainly(query):
        return attend_plainly(
            query,
            page_table=metadata.page_table,
            query_starts=metadata.query_starts,
            seq_lens=metadata.seq_lens,
            scale=HEAD_DIM**-0.5,
            **layer.impl._views(layer, layer.kv_cache),
        )

    exact = plainly(q.double())
    # As in `check_batch` of the kernels' tests.
    slack = torch.finfo(torch.float32).eps * HEAD_DIM**0.5 * exact.abs().max().item()
    check_close(out, exact, plainly(q), slack=slack)
    assert metadata.scratch.view(torch.float32).abs().max() > 0.0


def test_the_scratch_is_allocated_while_memory_is_profiled(monkeypatch):
    monkeypatch.setenv(SCRATCH_VARIABLE, "4096")
    asked = []
    monkeypatch.setattr(attention, "scratch_on", lambda *given: asked.append(given))
    q = torch.zeros(4, NUM_HEADS, HEAD_DIM)

    for cache_dtype in ("fp8", "int4_per_token_head", "auto"):
        layer = make_layer(cache_dtype)
        layer.impl.forward(layer, q, q, q, layer.kv_cache, None, torch.empty_like(q))

    assert asked == [(CPU, 4096)] * 2


def test_the_calls_to_be_tried_are_those_over_the_scratch(monkeypatch):
    assert builder_with(monkeypatch, 0).calls() == []
    builder = builder_with(monkeypatch, 16 << 20)
    layer = make_layer()
    builder.layer_names, builder._layers = ["layer"], {"layer": layer}

    (call,) = builder.calls()

    pages = call.view("k_pages")
    num_pages = (16 << 20) // page_bytes(builder._kind, torch.float32)
    assert isinstance(pages, View)
    assert pages.shape == (num_pages, SCRATCH_PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    assert pages.dtype == call.view("q").dtype == "float32"
    assert call.arguments["k_scale"] is call.arguments["v_slot_scales"] is None


@pytest.mark.parametrize(
    ("cache_dtype", "uses_latents", "is_invariant", "met"),
    [
        ("fp8", False, False, []),
        ("auto", False, False, []),
        ("bfloat16", True, False, ["--kv-cache-dtype bfloat16", "latent attention"]),
        ("int8_per_token_head", False, True, ["VLLM_BATCH_INVARIANT"]),
    ],
)
def test_options_that_leave_a_scratch_unused_are_named(
    cache_dtype, uses_latents, is_invariant, met, monkeypatch
):
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=uses_latents),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(is_invariant)))

    assert _unserved_with_scratch(config) == []
    monkeypatch.setenv(SCRATCH_VARIABLE, "1000")
    assert _unserved_with_scratch(config) == met


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_generates_the_same_through_a_scratch(tiny_model, run_engine):
    model, given = tiny_model("llama_fp8_cache"), prompts_of_lengths((520,), seed=0)
    job = {
        "max_tokens": 2,
        "options": {
            "attention_backend": "JENGA_TRITON",
            "hf_overrides": {"max_position_embeddings": 1024},
            "max_model_len": 640,
            "max_num_batched_tokens": 640,
        },
        "fill_arena": True,
    }

    without = run_engine(model, given, **job)
    through = run_engine(model, given, environment={SCRATCH_VARIABLE: str(4 << 20)}, **job)

    assert_same_generation(through, without, tolerance=ROUNDED_TOLERANCE)
    assert most_apart(through, without) > 0.0  # sums have another order

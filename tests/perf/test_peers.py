"""Calls of other implementations fit what is installed of them, without a GPU to run them on."""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from perf.kernels import (
    bench_conv_update,
    bench_delta,
    bench_delta_replay,
    bench_kv_store,
    bench_state_replay,
    bench_state_scan,
    bench_state_update,
)
from perf.peers import attention_peers, latent_peers
from perf.shapes import (
    attention_shapes,
    delta_replay_shapes,
    delta_shapes,
    latent_shapes,
    state_replay_shapes,
    state_shapes,
)
from perf.shapes.cache_layouts import Stored

pytest.importorskip("vllm", reason="vLLM is not installed")

CPU = torch.device("cpu")
VLLM_MODES = {
    Stored.BF16: "NONE",
    Stored.FP8: "FP8_PER_TENSOR",
    Stored.E5M2: "FP8_PER_TENSOR",
    Stored.FP8_SLOTS: "FP8_PER_TOKEN_HEAD",
    Stored.INT8_SLOTS: "INT8_PER_TOKEN_HEAD",
    Stored.INT4_SLOTS: "INT4_PER_TOKEN_HEAD",
}
LENGTHS = {"steps": [1, 1], "prompts": [5, 40]}


@pytest.fixture
def bound(monkeypatch):
    """Put functions in place of others that bind what they are called with; list the calls."""
    calls = []

    def bind(module, *names, result=None):
        for name in names:
            signature = inspect.signature(getattr(module, name))

            def call(*args, _name=name, _signature=signature, **kwargs):
                calls.append((_name, _signature.bind(*args, **kwargs).arguments))
                return result() if callable(result) else result

            monkeypatch.setattr(module, name, call)
        return calls

    return bind


def attention_batches():
    shapes = (
        *attention_shapes.DRY_SHAPES,
        *(
            attention_shapes.AttentionShape(
                name=name, requests=((1, 40),), num_heads=4, num_kv_heads=2, head_dim=64, **changes
            )
            for name, changes in {
                "window": {"window_tokens": 8},
                "cap": {"soft_cap": 50.0},
                "sinks": {"has_sinks": True},
                **{stored.value: {"stored": stored} for stored in Stored},
            }.items()
        ),
    )
    return [
        pytest.param(attention_shapes.make_batch(shape, CPU), id=shape.name) for shape in shapes
    ]


def lies_as_vllms_backend_has_it(shape, call):
    """Check that vLLM's backend would find these pages and scales in the same places."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    pages, scales = call["k"], call["k_scale_cache"]
    row_bytes = 2 * shape.stored.row_bytes(shape.head_dim)
    rows = (pages.shape[0], shape.num_kv_heads, shape.page_tokens, row_bytes)
    page_bytes, slot_bytes, head_bytes, _ = pages.stride()
    kv_cache = torch.empty(0, dtype=torch.uint8).set_(
        pages.untyped_storage(),
        pages.storage_offset(),
        rows,
        (page_bytes, head_bytes, slot_bytes, 1),
    )
    backend = TritonAttentionImpl.__new__(TritonAttentionImpl)
    backend._k_scale_cache = None
    before = scales.clone()
    backend._ensure_scale_caches(kv_cache)

    assert not torch.equal(before, scales)
    for side, own in (("k", backend._k_scale_cache), ("v", backend._v_scale_cache)):
        called = call[f"{side}_scale_cache"]
        assert own.data_ptr() == called.data_ptr()
        assert own.stride() == called.stride()
        assert own.shape == called.shape
        assert (called == 1).all()
    assert call["v"].data_ptr() - pages.data_ptr() == row_bytes // 2


@pytest.mark.parametrize("batch", attention_batches())
def test_calls_of_vllms_triton_attention_fit_it(batch, bound):
    from vllm.v1.attention.ops import triton_unified_attention as module

    calls = bound(module, "unified_attention")

    attention_peers.vllm_triton(batch, torch.empty_like(batch.q))()

    assert [name for name, _ in calls] == ["unified_attention"]
    call, stored = calls[0][1], batch.shape.stored
    # Scales are applied in one mode only.
    assert call["kv_quant_mode"].name == VLLM_MODES[stored]
    assert (call["k_descale"] is not None) == (VLLM_MODES[stored] == "FP8_PER_TENSOR")
    if stored.has_slot_scales:
        lies_as_vllms_backend_has_it(batch.shape, call)


@pytest.fixture
def flash_attention(monkeypatch):
    """Get the Python part of FlashAttention; its package wants the compiled part when imported."""
    import vllm

    name = "vllm.vllm_flash_attn"
    package = ModuleType(name)
    package.__path__ = [str(Path(vllm.__file__).parent / "vllm_flash_attn")]
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delitem(sys.modules, f"{name}.flash_attn_interface", raising=False)
    module = importlib.import_module(f"{name}.flash_attn_interface")
    monkeypatch.setitem(sys.modules, f"{name}.flash_attn_interface", module)
    monkeypatch.setattr(module, "is_fa_version_supported", lambda version: version == 3)
    return module


@pytest.mark.parametrize("batch", attention_batches())
def test_calls_of_flash_attention_3_fit_it(batch, bound, flash_attention):
    calls = bound(flash_attention, "get_scheduler_metadata", "flash_attn_varlen_func")
    if batch.shape.stored.is_quantised:
        with pytest.raises(attention_peers.UnsupportedError, match=r"float8|scale for each slot"):
            attention_peers.flash_attention_3(batch, torch.empty_like(batch.q))
        return
    if batch.shape.head_dim > 256:
        with pytest.raises(attention_peers.UnsupportedError, match="at most 256 elements"):
            attention_peers.flash_attention_3(batch, torch.empty_like(batch.q))
        return

    attention_peers.flash_attention_3(batch, torch.empty_like(batch.q))()

    assert [name for name, _ in calls] == ["get_scheduler_metadata", "flash_attn_varlen_func"]
    (_, schedule), (_, call) = calls
    assert schedule["has_softcap"] == bool(call["softcap"])
    assert schedule["page_size"] == batch.cache.k_pages.shape[1]
    assert schedule["window_size"] == call["window_size"]


@pytest.mark.parametrize("shape", latent_shapes.DRY_SHAPES[:2], ids=lambda shape: shape.name)
def test_calls_of_vllms_latent_attention_fit_it(shape, bound):
    from vllm.v1.attention.ops import triton_decode_attention as module

    batch = latent_shapes.make_batch(shape, CPU)
    calls = bound(module, "decode_attention_fwd")

    out = batch.q.new_empty(shape.num_tokens, shape.num_heads, latent_shapes.LATENT_DIM)
    latent_peers.vllm_triton(batch, out)()

    assert len(calls[0][1]["b_seq_len"]) == shape.num_tokens


@pytest.mark.parametrize(
    "make",
    [state_shapes.make_conv_batch, state_shapes.make_gated_conv_batch],
    ids=["plain", "gated"],
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_calls_of_vllms_convolutions_fit_them(lengths, make, bound):
    from vllm.model_executor.layers.mamba.ops import causal_conv1d as module

    rows = torch.zeros(sum(lengths), 64)
    calls = bound(module, "causal_conv1d_update", result=rows)
    bound(module, "causal_conv1d_fn", result=rows.T)

    bench_conv_update.vllm(make(64, lengths, CPU))()

    assert len(calls) == 1


@pytest.fixture
def _mamba_ssm_without_binaries(monkeypatch):
    pytest.importorskip("einops")
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", ModuleType("selective_scan_cuda"))
    pytest.importorskip("mamba_ssm", reason="mamba-ssm is not installed (pure Python is enough)")


@pytest.mark.usefixtures("_mamba_ssm_without_binaries")
@pytest.mark.parametrize("model", state_shapes.DRY_MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("library", ["vllm", "mamba_ssm"])
def test_calls_of_other_state_updates_fit_them(model, library, bound):
    module = importlib.import_module(
        {
            "vllm": "vllm.model_executor.layers.mamba.ops.mamba_ssm",
            "mamba_ssm": "mamba_ssm.ops.triton.selective_state_update",
        }[library]
    )
    batch = state_shapes.make_state_batch(model, [1, 1], torch.float32, CPU)
    calls = bound(module, "selective_state_update")

    getattr(bench_state_update, library)(batch)()

    assert len(calls) == 1


PER_HEAD = state_shapes.DRY_MODELS[1]


def test_calls_of_vllms_replay_of_states_fit_it(bound):
    module = importlib.import_module(
        "vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only"
    )
    batch = state_replay_shapes.make_replay_batch(PER_HEAD, 2, torch.float32, CPU)
    calls = bound(module, "selective_state_update_replayssm_output_only")

    bench_state_replay.vllm(batch)()

    assert len(calls) == 1
    drafts = state_replay_shapes.FOUR_DRAFTS
    batch = state_replay_shapes.make_replay_batch(PER_HEAD, 2, torch.float32, CPU, drafts=drafts)
    with pytest.raises(attention_peers.UnsupportedError, match="one token"):
        bench_state_replay.vllm(batch)


@pytest.mark.parametrize(
    "drafts", [state_replay_shapes.NO_DRAFTS, state_replay_shapes.FOUR_DRAFTS], ids=["one", "five"]
)
def test_calls_of_vllms_state_updates_beside_replays_fit_them(drafts, bound):
    from vllm.model_executor.layers.mamba.ops import mamba_ssm as module

    batch = state_replay_shapes.make_replay_batch(PER_HEAD, 2, torch.float32, CPU, drafts=drafts)
    calls = bound(module, "selective_state_update")

    bench_state_replay.vllm_update(batch)()

    assert len(calls) == 1


def scanned(bound, result):
    """Take the vLLM and mamba-ssm functions that scan a model's prompts for ones that bind."""
    from mamba_ssm.ops.triton import ssd_combined as theirs
    from vllm.model_executor.layers.mamba.ops import mamba_ssm, ssd_combined

    bound(mamba_ssm, "selective_scan_fn")
    bound(theirs, "mamba_chunk_scan_combined", result=(None, result))
    return bound(ssd_combined, "mamba_chunk_scan_combined_varlen", result=result)


@pytest.mark.usefixtures("_mamba_ssm_without_binaries")
@pytest.mark.parametrize("model", state_shapes.DRY_MODELS, ids=lambda model: model.name)
def test_calls_of_other_state_scans_fit_them(model, bound):
    batch = state_shapes.make_state_batch(model, LENGTHS["prompts"], torch.float32, CPU)
    calls = scanned(bound, batch.states[batch.slots.long()])

    bench_state_scan.vllm(batch)()

    if model.is_per_channel:
        with pytest.raises(attention_peers.UnsupportedError, match="over channels"):
            bench_state_scan.mamba_ssm(batch)
        assert [name for name, _ in calls] == ["selective_scan_fn"]
        return
    bench_state_scan.mamba_ssm(batch)()
    names = ["mamba_chunk_scan_combined_varlen", "mamba_chunk_scan_combined"]
    assert [name for name, _ in calls] == names


DELTA_CALLS = {
    (False, 1, False): "fused_recurrent_gated_delta_rule_packed_decode",
    (False, 2, False): "fused_sigmoid_gating_delta_rule_update",
    (False, 1, True): "fused_post_conv_prep chunk_gated_delta_rule",
    (True, 1, False): "fused_recurrent_kda",
    (True, 2, False): "fused_recurrent_kda",
    (True, 1, True): "chunk_kda_with_fused_gate",
}
"""(decays per channel, tokens a step, is a prompt) -> what of vLLM is called."""


@pytest.mark.parametrize(("case", "names"), DELTA_CALLS.items(), ids=map(str, DELTA_CALLS))
def test_calls_of_vllms_delta_rule_fit_it(case, names, bound):
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.third_party.flash_linear_attention import ops

    is_per_channel, num_steps, is_prompt = case
    model = delta_shapes.DRY_DELTA_MODELS[is_per_channel]
    lengths = LENGTHS["prompts"] if is_prompt else [num_steps] * 2
    batch = delta_shapes.make_delta_batch(model, lengths, torch.float32, CPU, num_steps=num_steps)
    module = kda if is_per_channel else ops
    final = (None, batch.states[batch.slots[:, 0].long()])
    prepared = (*batch.qkv, batch.gates, batch.betas)
    for name in names.split():
        calls = bound(module, name, result=prepared if name.endswith("prep") else final)

    (bench_delta.vllm_scan if is_prompt else bench_delta.vllm_update)(batch)()

    assert " ".join(name for name, _ in calls) == names


@pytest.mark.parametrize(
    "drafts", [state_replay_shapes.NO_DRAFTS, state_replay_shapes.FOUR_DRAFTS], ids=["one", "five"]
)
@pytest.mark.parametrize("model", delta_shapes.DRY_DELTA_MODELS, ids=lambda model: model.name)
def test_calls_of_vllms_delta_rule_beside_replays_fit_it(model, drafts, bound):
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.third_party.flash_linear_attention import ops

    make = delta_replay_shapes.make_delta_replay_batch
    batch = make(model, 2, torch.float32, CPU, drafts=drafts)
    name = DELTA_CALLS[model.is_per_channel, min(drafts.query_tokens, 2), False]
    calls = bound(kda if model.is_per_channel else ops, name)

    bench_delta_replay.vllm_update(batch)()

    assert [called for called, _ in calls] == [name]


VLLM_STORES = [stored for stored in Stored if stored is not Stored.E5M2]


@pytest.mark.parametrize("stored", VLLM_STORES, ids=lambda stored: stored.value)
def test_calls_of_vllms_stores_fit_them(stored, bound):
    import vllm._custom_ops as custom
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as module

    shape = bench_kv_store.StoreShape(
        name="", num_tokens=4, num_kv_heads=2, head_dim=64, stored=stored
    )
    names = ["triton_reshape_and_cache_flash"]
    names.append(f"{names[0]}_per_token_head_quant")
    calls = bound(module, *names)

    bench_kv_store.vllm_triton(bench_kv_store.make_batch(shape, CPU))()

    assert [name for name, _ in calls] == [names[stored.has_slot_scales]]
    if stored.has_slot_scales:
        call = calls[0][1]
        assert call["kv_quant_mode"].name == VLLM_MODES[stored]
        assert call["k_scale_cache"].shape == call["key_cache"].shape[:3]
    latents = list(inspect.signature(custom.concat_and_cache_mla).parameters)
    assert latents[:2] == ["kv_c", "k_pe"]
    assert len(latents) == 6


def test_of_vllms_stores_none_is_asked_for_e5m2_which_it_stores_as_e4m3():
    import vllm.v1.attention.ops.triton_reshape_and_cache_flash as module

    shape = bench_kv_store.StoreShape(
        name="", num_tokens=4, num_kv_heads=2, head_dim=64, stored=Stored.E5M2
    )

    with pytest.raises(attention_peers.UnsupportedError, match="float8_e4m3fn under that name"):
        bench_kv_store.vllm_triton(bench_kv_store.make_batch(shape, CPU))
    assert "float8_e5m2" not in inspect.getsource(module.triton_reshape_and_cache_flash)

"""Peers that benchmarks call give what we give: what is timed side by side does the same work.

Runs where kernels are compiled: on a GPU, or in an emulated one (`EMULATED_GPU=90`).
"""

import dataclasses
import os

import pytest
import torch
import triton

from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.reference.attention.paged_attention import from_int4
from perf.kernels import (
    bench_conv_update,
    bench_delta,
    bench_delta_replay,
    bench_kv_store,
    bench_latent_attention,
    bench_linear_attention,
    bench_paged_attention,
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
from perf.shapes.cache_layouts import Stored, vllm_gain
from tests.kernels.support import DEVICE, max_error

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.skipif(
        triton.knobs.runtime.interpret, reason="vLLM's kernels are not made for the interpreter"
    ),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True, scope="module")
def vllm_sees_a_gpu():
    """Have vLLM define its Triton kernels; those that tune themselves take their first tiles."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.autotuner import Autotuner

    from perf.harness.compiled_launches import show_vllm_a_gpu

    show_vllm_a_gpu()
    patch = pytest.MonkeyPatch()

    def take_first(self, *_args, config, **_kwargs):
        return [float(self.configs.index(config))]

    def forget(_self, _key, _configs, bench):
        bench()
        return False

    patch.setattr(Autotuner, "_bench", take_first)
    patch.setattr(Autotuner, "check_disk_cache", forget)
    yield
    patch.undo()


def agree(one, other, *, share=2.0**-6):
    """Two roundings of the same numbers: of the largest a few units in bfloat16's last place."""
    assert max_error(one, other) <= share * max(one.abs().max().item(), 1e-6)


def of_small_batches(shapes):
    """Shapes that differ in what kernels do, cut to few tokens."""
    kept = {}
    for shape in shapes:
        if shape.name[0] in "DPW":
            kept.setdefault(shape.name.split()[0], shape)
    return [
        pytest.param(
            dataclasses.replace(
                shape,
                requests=tuple((min(q, 40), min(stored, 90)) for q, stored in shape.requests[:3]),
                arena_bytes=0,
                num_layers=2,
            ),
            id=name,
        )
        for name, shape in kept.items()
        if name in {"D1", "D9", "D10", "D13", "D15", "D16", "D17", "D21", "D22", "D23"}
        or name in {"D24", "D25", "D26", "P1", "P3", "P10", "P11", "W1"}
    ]


@pytest.mark.parametrize("shape", of_small_batches(attention_shapes.SHAPES))
def test_attention_of_vllm_gives_what_ours_gives(shape):
    batch = attention_shapes.make_batch(shape, DEVICE)
    ours, theirs = torch.empty_like(batch.q), torch.empty_like(batch.q)
    bench_paged_attention.jenga(batch, ours)()
    attention_peers.vllm_triton(batch, theirs)()
    shares = {Stored.FP8: 2.0**-4, Stored.INT4_SLOTS: 2.0**-5}
    agree(ours.float(), theirs.float(), share=shares.get(shape.stored, 2.0**-6))
    if shape.stored.is_rotated:
        # Theirs shortens weights to tf32 for elements and not for zero points, so all rotated
        # elements err alike: rotated back, that is the first one's error.
        agree(ours[..., 1:].float(), theirs[..., 1:].float())


@pytest.mark.parametrize(
    "stored",
    [stored for stored in Stored if not stored.is_rotated and stored is not Stored.E5M2],
    ids=lambda stored: stored.value,
)
def test_stores_of_vllm_write_what_ours_write(stored):
    shape = bench_kv_store.StoreShape(
        name="", num_tokens=20, num_kv_heads=2, head_dim=64, stored=stored
    )
    batches = [bench_kv_store.make_batch(shape, DEVICE) for _ in range(2)]
    for batch, implementation in zip(
        batches, (bench_kv_store.jenga, bench_kv_store.vllm_triton), strict=True
    ):
        implementation(batch)()
    ours, theirs = batches[0].cache, batches[1].vllm_cache
    assert ours.k_pages.float().abs().sum() > 0
    for side in ("k", "v"):
        pages = [getattr(cache, f"{side}_pages").float() for cache in (ours, theirs)]
        if stored is Stored.BF16:
            assert torch.equal(*pages)
            continue
        # Where ours rounds down theirs may round up: a step of int8, of float8 an eighth.
        steps = 1.0 if stored is Stored.INT8_SLOTS else pages[0].abs().clamp(min=2.0**-6) / 8
        apart = (pages[0] - pages[1]).abs()
        assert (apart <= steps).all()
        assert (apart > 0).float().mean() < 2.0**-6
        if not stored.has_slot_scales:
            continue
        scales = [getattr(cache, f"{side}_slot_scales") for cache in (ours, theirs)]
        is_written = scales[0] > 0
        assert torch.equal(is_written, scales[1] > 0)
        assert int(is_written.sum()) == shape.num_tokens * shape.num_kv_heads
        # Theirs divides to two units in the last place.
        agree(*scales, share=2.0**-21)


def test_rotated_rows_of_vllms_stores_stand_for_what_ours_stand_for():
    shape = bench_kv_store.StoreShape(
        name="", num_tokens=20, num_kv_heads=2, head_dim=128, stored=Stored.INT4_SLOTS
    )
    batch = bench_kv_store.make_batch(shape, DEVICE)
    bench_kv_store.jenga(batch)()
    bench_kv_store.vllm_triton(batch)()
    pages, places = batch.slots // shape.page_tokens, batch.slots % shape.page_tokens
    rotation = hadamard_rotation(128, torch.float32, DEVICE).forward
    for side in ("k", "v"):
        exact = getattr(batch, side).float() @ rotation
        steps = (exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)) / 15
        items, scales = (getattr(batch.cache, f"{side}_{of}") for of in ("pages", "slot_scales"))
        ours = from_int4(items[pages, places], scales[pages, places], torch.float32)
        assert int((scales[..., 0] > 0).sum()) == shape.num_tokens * shape.num_kv_heads

        items, scales = (
            getattr(batch.vllm_cache, f"{side}_{of}")[pages, places]
            for of in ("pages", "slot_scales")
        )
        words = scales.view(torch.int32)
        pairs = torch.stack([scales, -scales * (words & 15)], -1) / vllm_gain(128)
        theirs = from_int4(items, pairs, torch.float32)

        # Half a step, and what bfloat16 rounds off: rows before, with ours step and least element.
        allowed = steps / 2 + (15 * steps + exact.abs().amax(-1, keepdim=True)) * 2.0**-8
        for read in (ours, theirs):
            assert ((read - exact).abs() <= allowed).all()


def compare(make, ours, theirs, *, share=2.0**-6, compares_out=True):
    """Run two implementations on equal batches and compare results and states."""
    batches = [make(), make()]
    for batch, implementation in zip(batches, (ours, theirs), strict=True):
        before = batch.states.clone()
        implementation(batch)()
        assert not torch.equal(batch.states, before)
    first, second = batches
    agree(first.states.float(), second.states.float(), share=share)
    if compares_out:
        agree(first.out.float(), second.out.float(), share=share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("model", state_shapes.DRY_MODELS, ids=lambda model: model.name)
def test_steps_of_states_of_vllm_give_what_ours_give(model, dtype):
    compare(
        lambda: state_shapes.make_state_batch(model, [1] * 3, dtype, DEVICE),
        bench_state_update.jenga,
        bench_state_update.vllm,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        state_shapes.DRY_MODELS[1],
        dataclasses.replace(state_shapes.NEMOTRON, num_heads=8, num_groups=2),
    ],
    ids=lambda model: model.name,
)
def test_replays_of_states_of_vllm_give_what_ours_give(model, dtype):
    batches = [state_replay_shapes.make_replay_batch(model, 16, dtype, DEVICE) for _ in range(2)]
    before = batches[0].tokens.states.clone()
    for batch, implementation in zip(
        batches, (bench_state_replay.jenga, bench_state_replay.vllm), strict=True
    ):
        implementation(batch)()
    ours, theirs = batches
    agree(ours.tokens.out.float(), theirs.tokens.out.float())
    changed = (ours.tokens.states != before).flatten(1).any(1)
    assert int(changed.sum()) == ours.num_written == 1
    agree(ours.tokens.states[changed].float(), theirs.tokens.states[changed].float())
    assert torch.equal(ours.tokens.states[~changed], theirs.tokens.states[~changed])
    # Theirs keeps no rows that the state has, as ours.
    assert torch.equal(ours.history.x, theirs.history.x)
    assert torch.equal(ours.history.B, theirs.history.B)
    agree(ours.history.dt, theirs.history.dt)


@pytest.mark.parametrize("implementation", ["jenga_update", "vllm_update"])
@pytest.mark.parametrize(
    "drafts", [state_replay_shapes.NO_DRAFTS, state_replay_shapes.FOUR_DRAFTS], ids=["one", "five"]
)
def test_updates_beside_replays_do_the_same_for_tokens_whose_states_are_theirs(
    drafts, implementation
):
    model = state_shapes.DRY_MODELS[1]
    make = state_replay_shapes.make_replay_batch
    batches = [make(model, 4, torch.float32, DEVICE, drafts=drafts) for _ in range(2)]
    for batch in batches:
        batch.computed_tokens.copy_(batch.state_tokens)
        batch.next_state_tokens.copy_(batch.state_tokens)
    bench_state_replay.jenga(batches[0])()
    getattr(bench_state_replay, implementation)(batches[1])()
    agree(batches[0].tokens.out.float(), batches[1].tokens.out.float())


@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 70]], ids=["steps", "prompts"])
def test_linear_attention_of_vllm_gives_what_ours_gives(lengths):
    if max(lengths) > 1 and os.environ.get("EMULATED_GPU") == "90":
        pytest.skip("an emulated Hopper finds theirs reading a product it has not waited for")
    ours, theirs = (
        bench_linear_attention.make_batch(2, lengths, torch.float32, DEVICE, head_dim=64)
        for _ in range(2)
    )
    if ours.is_step:
        ours.states.copy_(torch.randn(ours.states.shape))
        theirs.states.copy_(ours.states.mT)  # theirs have a row for each element of a key
    bench_linear_attention.jenga(ours)()
    bench_linear_attention.vllm(theirs)()
    agree(ours.out.float(), theirs.out.float())
    agree(ours.states.float(), theirs.states.mT.float())
    assert ours.states.float().abs().sum() > 0


@pytest.mark.parametrize("lengths", [[1, 1], [5, 40]], ids=["steps", "prompts"])
def test_convolutions_of_vllm_give_what_ours_give(lengths):
    compare(
        lambda: state_shapes.make_conv_batch(64, lengths, DEVICE),
        bench_conv_update.jenga,
        bench_conv_update.vllm,
        compares_out=max(lengths) == 1,  # of prompts theirs returns it, and the benchmark drops it
    )


@pytest.mark.parametrize("lengths", [[1, 1], [5, 40]], ids=["steps", "prompts"])
def test_gated_convolutions_apart_and_of_vllm_give_what_ours_give(lengths):
    batches = [state_shapes.make_gated_conv_batch(64, lengths, DEVICE) for _ in range(3)]
    ours, apart, theirs = batches
    bench_conv_update.jenga(ours)()
    bench_conv_update.jenga_apart(apart)()
    out = bench_conv_update.vllm(theirs)()
    assert isinstance(out, torch.Tensor)
    for batch, rows in ((apart, apart.out), (theirs, out)):
        agree(ours.out.float(), rows.float())
        agree(ours.states.float(), batch.states.float())
    assert ours.states.float().abs().sum() > 0


@pytest.mark.parametrize("model", delta_shapes.DRY_DELTA_MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("ours", "theirs", "lengths"),
    [
        (bench_delta.jenga_update, bench_delta.vllm_update, [1, 1]),
        (bench_delta.jenga_scan, bench_delta.vllm_scan, [5, 70]),
    ],
    ids=["steps", "prompts"],
)
def test_the_delta_rule_of_vllm_gives_what_ours_gives(model, ours, theirs, lengths):
    compare(
        lambda: delta_shapes.make_delta_batch(model, lengths, torch.float32, DEVICE),
        ours,
        theirs,
        share=2.0**-5,
        compares_out=max(lengths) == 1,
    )


@pytest.mark.parametrize(
    "drafts", [state_replay_shapes.NO_DRAFTS, state_replay_shapes.FOUR_DRAFTS], ids=["one", "five"]
)
@pytest.mark.parametrize("model", delta_shapes.DRY_DELTA_MODELS, ids=lambda model: model.name)
def test_delta_rules_beside_replays_do_the_same_for_tokens_whose_states_are_theirs(model, drafts):
    make = delta_replay_shapes.make_delta_replay_batch
    batches = [make(model, 4, torch.float32, DEVICE, drafts=drafts) for _ in range(3)]
    for batch in batches:
        batch.computed_tokens.copy_(batch.state_tokens)
        batch.next_state_tokens.copy_(batch.state_tokens)
    replayed, ours, theirs = batches
    bench_delta_replay.jenga(replayed)()
    bench_delta_replay.jenga_update(ours)()
    bench_delta_replay.vllm_update(theirs)()
    agree(replayed.tokens.out.float(), ours.tokens.out.float())
    agree(ours.tokens.states, theirs.tokens.states, share=2.0**-5)
    if drafts.query_tokens == 1 or model.is_per_channel:  # else theirs returns its output
        agree(ours.tokens.out.float(), theirs.tokens.out.float(), share=2.0**-5)


def test_prompts_of_states_of_vllm_give_what_ours_give():
    model = next(each for each in state_shapes.DRY_MODELS if not each.is_per_channel)
    compare(
        lambda: state_shapes.make_state_batch(model, [5, 40], torch.float32, DEVICE),
        bench_state_scan.jenga,
        bench_state_scan.vllm,
    )


@pytest.mark.parametrize(
    "shape",
    [shape for shape in latent_shapes.DRY_SHAPES if max(shape.requests)[0] <= 2],
    ids=lambda shape: shape.name,
)
def test_latents_of_vllm_give_what_ours_give(shape):
    batch = latent_shapes.make_batch(shape, DEVICE)
    ours, theirs = (
        torch.zeros(
            *batch.q.shape[:2], latent_shapes.LATENT_DIM, dtype=batch.q.dtype, device=DEVICE
        )
        for _ in range(2)
    )
    bench_latent_attention.jenga(batch, ours)()
    latent_peers.vllm_triton(batch, theirs)()
    agree(ours.float(), theirs.float())

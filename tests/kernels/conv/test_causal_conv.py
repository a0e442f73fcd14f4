import pytest
import torch

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.recurrent.causal_conv import causal_conv
from jenga_kernels.reference.recurrent import causal_conv as reference
from jenga_kernels.triton.recurrent.tiles import ScanTiles
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.conv.conv_cases import conv_states, conv_tensors
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    prompt_slots,
    same_elsewhere,
    widened,
)
from tests.kernels.support import check_close, generator, randn

NUM_SLOTS = 32
LENGTHS = {
    "short": [1, 2, 0, PADDING, 3],
    "past_a_tile": [130, 64, 1, 65],
}


def arguments(lengths, dim, width, dtype, is_dim_last):
    rng = generator(0)
    slots, read, written = prompt_slots(lengths, NUM_SLOTS, rng)
    tensors = conv_tensors(int(slots["query_starts"][-1]), dim, width, dtype, rng)
    pages = conv_states(NUM_SLOTS, dim, width, dtype, is_dim_last=is_dim_last)
    for slot in read:
        pages.states[slot] = randn((dim, width - 1), dtype, rng)
    return tensors, slots, pages, written


def by_reference(tensors, slots, states):
    """Output and states of the reference in the precision of its arguments."""
    states = states.clone()
    out = torch.full_like(tensors["x"], float("nan"))
    reference.causal_conv(out, states, **tensors, **slots)
    return out, states


@pytest.mark.parametrize("is_dim_last", [True, False], ids=["dim_last", "dim_first"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_causal_conv_matches_its_reference(lengths, dtype, width, is_dim_last):
    tensors, slots, pages, written = arguments(lengths, 72, width, dtype, is_dim_last)
    before = pages.arena.clone()
    naive, want_states = by_reference(tensors, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    causal_conv(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    assert torch.equal(pages.states[written], want_states[written])
    assert same_elsewhere(pages.arena, before, written)


@pytest.mark.parametrize("seed", range(4))
def test_causal_conv_gives_the_same_wherever_a_prompt_is_cut(seed):
    rng = generator(seed)
    # Rows of 16 elements, as any model's: of others Triton knows less, and for one token, whose
    # stride is not used, it finds layouts in which other products and sums are fused.
    length, dim, width = 80, 32, 4
    tensors = conv_tensors(length, dim, width, torch.float32, rng)
    cuts = sorted((1 + torch.randperm(length - 1, generator=rng)[:4]).tolist())
    whole, pieces = (conv_states(8, dim, width, torch.float32) for _ in range(2))
    out, cut_out = (torch.empty_like(tensors["x"]) for _ in range(2))

    causal_conv(
        out,
        whole.states,
        **tensors,
        query_starts=i32([0, length]),
        initial_slots=i32([0]),
        state_slots=i32([5]),
        checkpoints=Checkpoints(
            starts=i32([0, 4]), after_tokens=i32(cuts), slots=i32([1, 2, 3, 4])
        ),
    )
    for slot, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        causal_conv(
            cut_out[start:end],
            pieces.states,
            **(tensors | {"x": tensors["x"][start:end]}),
            query_starts=i32([0, end - start]),
            initial_slots=i32([slot]),
            state_slots=i32([slot + 1]),
        )

    assert torch.equal(out, cut_out)
    assert torch.equal(whole.states[1:6], pieces.states[1:6])


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("is_dim_last", [True, False], ids=["dim_last", "dim_first"])
def test_causal_conv_gives_the_same_by_runs_of_tokens(monkeypatch, is_dim_last, width):
    # The interpreter's own tiles have no runs; these are a GPU's.
    by_runs = ScanTiles(block_tokens=32, block_dims=128, num_warps=2, run_tokens=8)
    lengths = [130, 1, 0, PADDING, 65, 3, 31, 8]
    tensors, slots, pages, written = arguments(lengths, 136, width, torch.float32, is_dim_last)
    before = pages.arena.clone()
    naive, want_states = by_reference(tensors, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))
    monkeypatch.setattr("jenga_kernels.recurrent.causal_conv.conv_tiles", lambda *_: by_runs)

    causal_conv(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    assert torch.equal(pages.states[written], want_states[written])
    assert same_elsewhere(pages.arena, before, written)


def test_causal_conv_without_bias_and_activation():
    tensors, slots, pages, _ = arguments([7, 2], 16, 4, torch.float32, True)
    tensors |= {"bias": None, "silu": False}
    naive, _ = by_reference(tensors, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.empty_like(tensors["x"])

    causal_conv(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)


BAD_ARGUMENTS = {
    "a_width_of_five": ("weight", lambda a: {"weight": a["weight"].repeat(1, 2)[:, :5]}),
    "weight_of_other_channels": ("weight", lambda a: {"weight": a["weight"][:3]}),
    "states_of_other_channels": ("states", lambda a: {"states": a["states"][:, :3]}),
    "states_of_too_few_columns": ("states", lambda a: {"states": a["states"][..., :2]}),
    "bias_of_other_channels": ("bias", lambda a: {"bias": a["bias"][:3]}),
    "out_of_another_shape": ("out", lambda a: {"out": a["out"][:3]}),
    "scattered_x": ("x", lambda a: {"x": a["x"].T.contiguous().T}),
    "x_of_integers": ("x", lambda a: {"x": a["x"].int()}),
    "a_slot_past_the_states": ("state_slots", lambda _: {"state_slots": i32([1, NUM_SLOTS])}),
    "query_starts_past_the_tokens": ("query_starts", lambda _: {"query_starts": i32([0, 3, 99])}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_causal_conv_refuses(name, change):
    tensors, slots, pages, _ = arguments([4, 5], 16, 4, torch.float32, True)
    out = torch.full_like(tensors["x"], float("nan"))
    args = on_cpu({"out": out, "states": pages.states, **tensors, **slots})
    before = args["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        causal_conv(**on_cpu(args | change(args)))

    assert args["out"].isnan().all()
    assert torch.equal(args["states"].nan_to_num(7), before.nan_to_num(7))


def compile_odd_rows():
    # As Falcon-H1 projects it: rows of a multiple of 16 bytes, but not of 16 elements.
    x = torch.zeros(40, 6680, dtype=torch.bfloat16)[:, 3072:6656]
    states, weight = torch.zeros(2, 3584, 3), torch.zeros(3584, 4)
    out = torch.empty(x.shape, dtype=x.dtype)
    causal_conv(out, states, x, weight, i32([0, 40]), i32([1]), i32([1]))


def compile_convolutions():
    kept = Checkpoints(starts=i32([0, 1]), after_tokens=i32([3]), slots=i32([2]))
    for is_dim_last in (True, False):
        for dtype in (torch.bfloat16, torch.float32):
            tensors = conv_tensors(40, 10240, 4, dtype, generator(0))
            pages = conv_states(3, 10240, 4, dtype, is_dim_last=is_dim_last)
            causal_conv(
                torch.empty(40, 10240, dtype=dtype),
                pages.states,
                **tensors,
                query_starts=i32([0, 40]),
                initial_slots=i32([1]),
                state_slots=i32([1]),
                checkpoints=None if is_dim_last else kept,
            )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("job", [compile_convolutions, compile_odd_rows])
def test_causal_conv_compiles_to_wide_loads_without_spills(job, capability):
    kernels = compile_job(job, capability)

    assert len(kernels) >= 1
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 192, kernel
        # Each input of a run of 8 tokens, and of 3 before it, is read once, in rows of 16 bytes.
        assert kernel.counts["load_128"] >= 11, kernel
        assert kernel.counts["store_128"] >= 8, kernel
    # bfloat16 in pages with channels innermost: 16 warps a processor, and no address per channel.
    if job is compile_convolutions:
        assert kernels[0].registers <= 128, kernels[0]
        assert kernels[0].counts["load_global"] <= 24, kernels[0]

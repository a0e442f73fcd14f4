"""Convolutions whose states are rings: the input of a token is in the column of its number."""

import pytest
import torch

from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.recurrent.causal_conv import causal_conv
from jenga_kernels.recurrent.conv_update import conv_update
from jenga_kernels.reference.recurrent import causal_conv as reference_scan
from jenga_kernels.reference.recurrent import conv_update as reference
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.conv.conv_cases import conv_states, conv_tensors
from tests.kernels.recurrent.state_cases import i32, on_cpu, same_elsewhere, widened
from tests.kernels.support import check_close, generator, randn

NUM_SLOTS, DIM = 12, 72
SLOTS = [5, NULL_SLOT, 2, 9, 7]
COMPUTED = [0, 3, 1, 2, 50]


def rings(width, num_columns, dtype, is_dim_last):
    """Rings in which no element that may be read is NaN."""
    rng = generator(1)
    pages = conv_states(NUM_SLOTS, DIM, num_columns + 1, dtype, is_dim_last=is_dim_last)
    for slot, computed in zip(SLOTS, COMPUTED, strict=True):
        for token in range(max(0, computed - width + 1), computed):
            pages.states[slot, :, token % num_columns] = randn((DIM,), dtype, rng)
    return pages


def bounds_of(lengths):
    return i32([0, *torch.tensor(lengths).cumsum(0).tolist()])


def in_float64(operation, pages, arguments):
    """Outputs of an operation of the reference."""
    out = torch.empty_like(arguments["x"]).double()
    operation(out, pages.states.double(), **widened(arguments))
    return out


@pytest.mark.parametrize("is_dim_last", [True, False], ids=["dim_last", "dim_first"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1], [4, 1, 0, 3, 2]], ids=str)
def test_steps_over_rings_match_their_reference(lengths, dtype, width, is_dim_last):
    num_columns = width - 2 + max(lengths)
    pages = rings(width, num_columns, dtype, is_dim_last)
    before = pages.arena.clone()
    arguments = {
        **conv_tensors(sum(lengths), DIM, width, dtype, generator(0)),
        "initial_slots": i32(SLOTS),
        "state_slots": i32(SLOTS),
        "computed_tokens": i32(COMPUTED),
        "query_starts": None if max(lengths) == 1 else bounds_of(lengths),
    }
    want_states, naive = pages.states.clone(), torch.empty_like(arguments["x"])
    reference.conv_update(naive, want_states, **arguments)
    (exact,), (lost,) = exactly(lambda: (in_float64(reference.conv_update, pages, arguments),))
    out = torch.full_like(arguments["x"], float("nan"))

    conv_update(out, pages.states, **arguments)

    check_close(out, exact, naive, slack=lost)
    live = [slot for slot in SLOTS if slot != NULL_SLOT]
    assert same_elsewhere(pages.arena, before, live)
    torch.testing.assert_close(pages.states, want_states, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("is_dim_last", [True, False], ids=["dim_last", "dim_first"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_more_columns", [0, 4])
def test_prompts_over_rings_match_their_reference(num_more_columns, dtype, width, is_dim_last):
    lengths = [70, 1, 2, 0, 35]
    num_columns = width - 1 + num_more_columns
    pages = rings(width, num_columns, dtype, is_dim_last)
    before = pages.arena.clone()
    final = [5, NULL_SLOT, 2, 3, 7]  # one goes on in another slot
    arguments = {
        **conv_tensors(sum(lengths), DIM, width, dtype, generator(0)),
        "query_starts": bounds_of(lengths),
        "initial_slots": i32(SLOTS),
        "state_slots": i32(final),
        "computed_tokens": i32(COMPUTED),
        "checkpoints": Checkpoints(
            starts=i32([0, 2, 2, 3, 3, 4]), after_tokens=i32([1, 64, 1, 2]), slots=i32([1, 4, 6, 8])
        ),
    }
    want_states, naive = pages.states.clone(), torch.empty_like(arguments["x"])
    reference_scan.causal_conv(naive, want_states, **arguments)
    (exact,), (lost,) = exactly(lambda: (in_float64(reference_scan.causal_conv, pages, arguments),))
    out = torch.full_like(arguments["x"], float("nan"))

    causal_conv(out, pages.states, **arguments)

    check_close(out, exact, naive, slack=lost)
    assert same_elsewhere(pages.arena, before, [5, 2, 3, 7, 1, 4, 6, 8])
    torch.testing.assert_close(pages.states, want_states, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_prompts_and_steps_with_rejected_tokens_give_what_the_accepted_ones_give(width, max_tokens):
    num_tokens, rng = 40, generator(width)
    tensors = conv_tensors(num_tokens, DIM, width, torch.float32, rng)
    plain = conv_states(2, DIM, width, torch.float32).states
    want, one = torch.empty_like(tensors["x"]), i32([1])
    causal_conv(
        want,
        plain,
        **tensors,
        query_starts=bounds_of([40]),
        initial_slots=i32([0]),
        state_slots=one,
    )
    ring = conv_states(2, DIM, width - 1 + max_tokens, torch.float32).states
    got, computed = torch.empty_like(want), 0
    weights = {"weight": tensors["weight"], "bias": tensors["bias"]}
    is_prompt = True
    while computed < num_tokens:
        count = int(torch.randint(1, 9, (), generator=rng)) if is_prompt else max_tokens
        accepted = min(num_tokens - computed, count)
        if not is_prompt:
            accepted = min(accepted, 1 + int(torch.randint(max_tokens, (), generator=rng)))
        x = torch.cat(
            [
                tensors["x"][computed : computed + accepted],
                randn((count - accepted, DIM), torch.float32, rng)
                if not is_prompt
                else tensors["x"][:0],
            ]
        )
        out, counts = torch.empty_like(x), i32([computed])
        bounds = bounds_of([len(x)])
        if is_prompt:
            causal_conv(
                out,
                ring,
                x,
                **weights,
                query_starts=bounds,
                initial_slots=one,
                state_slots=one,
                computed_tokens=counts,
            )
        else:
            conv_update(
                out,
                ring,
                x,
                **weights,
                query_starts=bounds,
                initial_slots=one,
                state_slots=one,
                computed_tokens=counts,
            )
        got[computed : computed + accepted] = out[:accepted]
        computed += accepted
        is_prompt = int(torch.randint(3, (), generator=rng)) == 0

    check_close(got, want, want)


BAD_ARGUMENTS = {
    "a_ring_shorter_than_a_call": ("states", lambda a: {"states": a["states"][..., :4]}),
    "another_slot_to_begin_at": (
        "initial_slots",
        lambda a: {"initial_slots": a["state_slots"] + 1},
    ),
    "counts_of_64_bits": (
        "computed_tokens",
        lambda a: {"computed_tokens": a["computed_tokens"].long()},
    ),
    "counts_of_another_number_of_requests": (
        "computed_tokens",
        lambda a: {"computed_tokens": a["computed_tokens"][:1]},
    ),
    "counts_below_zero": (
        "computed_tokens",
        lambda a: {"computed_tokens": a["computed_tokens"] - 9},
    ),
    "a_slot_for_each_token": (
        "state_slots",
        lambda a: {"state_slots": a["state_slots"][:, None].repeat(1, 4)},
    ),
    "bounds_of_no_request": ("state_slots", lambda a: {"query_starts": a["query_starts"][:1]}),
    "no_bounds_at_all": (
        "the length of query_starts",
        lambda a: {"query_starts": a["query_starts"][:0]},
    ),
    "slots_on_another_device": (
        "initial_slots",
        lambda a: {"initial_slots": a["initial_slots"].to("meta")},
    ),
    "bounds_on_another_device": (
        "query_starts",
        lambda a: {"query_starts": a["query_starts"].to("meta")},
    ),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_steps_over_rings_refuse(name, change):
    tensors = conv_tensors(5, DIM, 4, torch.float32, generator(0))
    args = on_cpu(
        {
            "out": torch.full_like(tensors["x"], float("nan")),
            "states": conv_states(NUM_SLOTS, DIM, 6, torch.float32).states,
            **tensors,
            "initial_slots": i32([3, 4]),
            "state_slots": i32([3, 4]),
            "computed_tokens": i32([7, 8]),
            "query_starts": i32([0, 3, 5]),
        }
    )

    with pytest.raises(ValueError, match=f"^{name} "):
        conv_update(**args | change(args))

    assert args["out"].isnan().all()
    assert args["states"].isnan().all()


def compile_rings():
    x = torch.zeros(12, 10240, dtype=torch.bfloat16)
    weight, slots = x[:4].T.contiguous(), i32([1, 2, 3])
    for is_dim_last in (True, False):
        states = conv_states(13, 10240, 7, torch.bfloat16, is_dim_last=is_dim_last).states
        counts = {"computed_tokens": i32([9, 9, 9])}
        conv_update(x[:3].clone(), states, x[:3], weight, slots, slots, **counts)
        bounds = i32([0, 4, 8, 12])
        conv_update(
            torch.empty_like(x), states, x, weight, slots, slots, query_starts=bounds, **counts
        )
        causal_conv(torch.empty_like(x), states, x, weight, bounds, slots, slots, **counts)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_rings_compile_without_spills(capability):
    kernels = compile_job(compile_rings, capability)

    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        if kernel.name == "conv_update_kernel":
            assert kernel.registers <= 80, kernel
            # Of a ring a step writes a token's own input alone.
            assert kernel.counts["store_global"] <= 5, kernel

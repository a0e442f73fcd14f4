import pytest
import torch

from jenga_kernels.recurrent.conv_update import conv_update
from jenga_kernels.reference.recurrent import conv_update as reference
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.conv.conv_cases import conv_states, conv_tensors
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    same_elsewhere,
    step_slots,
    widened,
)
from tests.kernels.support import check_close, generator, randn

NUM_SLOTS = 24
LENGTHS = {"one_token_each": [1, PADDING, 1, 1], "speculative": [8, 0, 2, PADDING, 3]}


def arguments(lengths, dim, width, dtype, is_dim_last):
    rng = generator(0)
    slots, read, written = step_slots(lengths, NUM_SLOTS, rng)
    tensors = conv_tensors(int(slots["query_starts"][-1]), dim, width, dtype, rng)
    pages = conv_states(NUM_SLOTS, dim, width, dtype, is_dim_last=is_dim_last)
    for slot in read:
        pages.states[slot] = randn((dim, width - 1), dtype, rng)
    return tensors, slots, pages, written


def by_reference(tensors, slots, states):
    """Output and states of the reference in the precision of its arguments."""
    states = states.clone()
    out = torch.full_like(tensors["x"], float("nan"))
    reference.conv_update(out, states, **tensors, **slots)
    return out, states


@pytest.mark.parametrize("is_dim_last", [True, False], ids=["dim_last", "dim_first"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_conv_update_matches_its_reference(lengths, dtype, width, is_dim_last):
    tensors, slots, pages, written = arguments(lengths, 72, width, dtype, is_dim_last)
    before = pages.arena.clone()
    naive, want_states = by_reference(tensors, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    conv_update(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    assert torch.equal(pages.states[written], want_states[written])
    assert same_elsewhere(pages.arena, before, written)


def test_conv_update_may_write_over_its_input():
    tensors, slots, pages, _ = arguments([3, 1], 40, 4, torch.float32, True)
    naive, _ = by_reference(tensors, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )

    conv_update(tensors["x"], pages.states, **tensors, **slots)

    check_close(tensors["x"], exact, naive, slack=lost)


def test_conv_update_of_one_token_each_needs_no_query_starts():
    tensors, _, pages, _ = arguments([1, 1], 40, 4, torch.float32, True)
    tensors |= {"bias": None, "silu": False}
    pages.states[4] = randn((40, 3), torch.float32, generator(5))
    slots = {"initial_slots": i32([4, 0]), "state_slots": i32([4, 7])}
    want, want_states = by_reference(tensors, slots, pages.states)
    out = torch.empty_like(tensors["x"])

    conv_update(out, pages.states, **tensors, **slots)

    check_close(out, want, want)
    assert torch.equal(pages.states[[4, 7]], want_states[[4, 7]])


BAD_ARGUMENTS = {
    "a_width_of_five": ("weight", lambda a: {"weight": a["weight"].repeat(1, 2)[:, :5]}),
    "states_of_too_few_columns": ("states", lambda a: {"states": a["states"][..., :2]}),
    "fewer_slots_than_tokens": ("state_slots", lambda a: {"state_slots": a["state_slots"][:, :1]}),
    "slots_of_64_bits": ("initial_slots", lambda a: {"initial_slots": a["initial_slots"].long()}),
    "a_slot_past_the_states": ("state_slots", lambda a: {"state_slots": a["state_slots"] + 99}),
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].half()}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_conv_update_refuses(name, change):
    tensors, slots, pages, _ = arguments([2, 1], 16, 4, torch.float32, True)
    out = torch.full_like(tensors["x"], float("nan"))
    args = on_cpu({"out": out, "states": pages.states, **tensors, **slots})
    before = args["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        conv_update(**on_cpu(args | change(args)))

    assert args["out"].isnan().all()
    assert torch.equal(args["states"].nan_to_num(7), before.nan_to_num(7))


def compile_updates():
    for is_dim_last in (True, False):
        tensors = conv_tensors(3, 10240, 4, torch.bfloat16, generator(0))
        # Rows of a multiple of 16 bytes, but not of 16 elements, as Falcon-H1 projects them.
        tensors["x"] = torch.zeros(3, 18568, dtype=torch.bfloat16)[:, 8192:18432]
        pages = conv_states(4, 10240, 4, torch.bfloat16, is_dim_last=is_dim_last)
        conv_update(
            torch.empty(3, 10240, dtype=torch.bfloat16),
            pages.states,
            **tensors,
            initial_slots=i32([1, 2, 3]),
            state_slots=i32([1, 2, 3]),
        )


@pytest.mark.parametrize("capability", [80, 90])
def test_conv_update_compiles_to_loads_of_neighbouring_channels_without_spills(capability):
    dim_last, dim_first = compile_job(compile_updates, capability)

    for kernel in (dim_last, dim_first):
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 64, kernel
    # Four channels a thread: their token, bias and taps, and each column where they lie together.
    assert dim_last.counts["load_64"] == 9, dim_last
    assert dim_last.counts["load_global"] == 12, dim_last
    assert dim_last.counts["store_global"] == 4, dim_last
    assert dim_first.counts["load_64"] == 6, dim_first


def compile_steps():
    x = torch.zeros(12, 10240, dtype=torch.bfloat16)
    slots = i32(range(1, 13)).view(3, 4)
    for is_dim_last in (True, False):
        pages = conv_states(13, 10240, 4, torch.bfloat16, is_dim_last=is_dim_last)
        conv_update(
            torch.empty_like(x),
            pages.states,
            x,
            x[:4].T.contiguous(),
            slots[:, -1],
            slots,
            query_starts=i32([0, 4, 8, 12]),
        )


@pytest.mark.parametrize("capability", [80, 90])
def test_conv_update_of_several_tokens_compiles_without_spills(capability):
    kernels = compile_job(compile_steps, capability)

    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 80, kernel

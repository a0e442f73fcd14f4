import numpy as np
import pytest
import torch

from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.recurrent.state_update import state_update
from jenga_kernels.reference.recurrent import state_update as reference
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    recurrence_tensors,
    same_elsewhere,
    state_pages,
    step_slots,
    widened,
)
from tests.kernels.support import check_close, generator, randn

NUM_SLOTS = 24
CASES = {
    # kind; heads, channels of a head, state elements, groups; tokens of each request
    "mamba1": ("channels", (1, 200, 16, 1), [1, 1, PADDING, 1]),
    "mamba1_speculative": ("channels", (2, 24, 12, 2), [3, 0, 1, PADDING, 2]),
    "mamba2": ("heads", (4, 64, 128, 2), [1, PADDING, 1, 1]),
    "mamba2_wide_state": ("heads", (2, 32, 256, 1), [1, 1]),
    "mamba2_short_state": ("heads", (2, 80, 8, 1), [1, PADDING, 1, 1]),
    "mamba2_speculative_odd_sizes": ("heads", (3, 24, 40, 1), [8, 2, PADDING, 1]),
}


def arguments(kind, shape, lengths, dtype, state_dtype):
    rng = generator(0)
    slots, read, written = step_slots(lengths, NUM_SLOTS, rng)
    tensors = recurrence_tensors(int(slots["query_starts"][-1]), kind, shape, dtype, rng)
    pages = state_pages(NUM_SLOTS, shape[:3], state_dtype)
    for slot in read:
        pages.states[slot] = randn(shape[:3], state_dtype, rng)
    return tensors, slots, pages, written


def by_reference(tensors, slots, states):
    """Output and states of the reference in the precision of its arguments."""
    states = states.clone()
    out = torch.full_like(tensors["x"], float("nan"))
    reference.state_update(out, states, **tensors, **slots)
    return out, states


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=["f32", "bf16_state_f32", "bf16", "f16"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_state_update_matches_the_recurrence(case, dtype, state_dtype):
    kind, shape, lengths = case
    if state_dtype != torch.float32 and shape[2] % 8:
        shape = (*shape[:2], 24, shape[3])
    tensors, slots, pages, written = arguments(kind, shape, lengths, dtype, state_dtype)
    before = pages.arena.clone()
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_update(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


@pytest.mark.parametrize("kind", ["channels", "heads"])
def test_state_update_of_one_token_each_needs_no_query_starts(kind):
    shape = (1, 32, 16, 1) if kind == "channels" else (2, 32, 16, 1)
    rng = generator(1)
    tensors = recurrence_tensors(3, kind, shape, torch.float32, rng)
    pages = state_pages(8, shape[:3], torch.float32)
    pages.states[5] = randn(shape[:3], torch.float32, rng)
    # Slots as an engine passes them: a column of a wider table.
    table = i32([[5, 9], [NULL_SLOT, 9], [2, 9]])[:, 0]
    slots = {"initial_slots": i32([5, NULL_SLOT, NULL_SLOT]), "state_slots": table}
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_update(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(pages.states[[5, 2]], exact_states[[5, 2]], naive_states[[5, 2]], slack=states_lost)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize("kind", ["channels", "heads"])
@pytest.mark.parametrize(
    "left_out", [["D"], ["z"], ["dt_bias"], ["D", "z", "dt_bias"]], ids="_".join
)
def test_state_update_without_optional_tensors(kind, left_out):
    shape = (1, 24, 16, 1) if kind == "channels" else (2, 16, 16, 1)
    tensors, slots, pages, _ = arguments(kind, shape, [1, 2], torch.float32, torch.float32)
    tensors |= dict.fromkeys(left_out)
    tensors["dt"] = tensors["dt"].abs()
    options = {"dt_softplus": "z" in left_out, "dt_limits": (0.25, 0.75)}
    naive, _ = by_reference(tensors | options, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors) | options, slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_update(out, pages.states, **tensors, **slots, **options)

    check_close(out, exact, naive, slack=lost)


@pytest.mark.parametrize("num_accepted", [1, 2, 4])
def test_state_update_goes_on_from_the_last_token_accepted(num_accepted):
    shape = (2, 16, 32, 1)
    rng = generator(3)
    tensors = recurrence_tensors(8, "heads", shape, torch.float32, rng)
    pages, straight = (state_pages(12, shape[:3], torch.float32) for _ in range(2))
    drafted = {name: value[:4] if len(value) == 8 else value for name, value in tensors.items()}
    order = [*range(num_accepted), *range(4, 8)]
    wanted = {name: value[order] if len(value) == 8 else value for name, value in tensors.items()}
    out, want = torch.empty_like(tensors["x"]), torch.empty_like(wanted["x"])
    slots = i32([[3, 7, 1, 9]])

    state_update(
        out[:4],
        pages.states,
        **drafted,
        initial_slots=i32([NULL_SLOT]),
        state_slots=slots,
        query_starts=i32([0, 4]),
    )
    rest = {name: value[4:] if len(value) == 8 else value for name, value in tensors.items()}
    state_update(
        out[4:],
        pages.states,
        **rest,
        initial_slots=slots[:, num_accepted - 1],
        state_slots=slots,
        query_starts=i32([0, 4]),
    )
    state_update(
        want,
        straight.states,
        **wanted,
        initial_slots=i32([NULL_SLOT]),
        state_slots=i32([[NULL_SLOT + 1] * len(order)]),
        query_starts=i32([0, len(order)]),
    )

    assert torch.equal(out[order], want)
    assert torch.equal(pages.states[9], straight.states[1])


def good_call():
    tensors, slots, pages, _ = arguments(
        "heads", (2, 16, 16, 1), [2, 1], torch.float32, torch.float32
    )
    out = torch.full_like(tensors["x"], float("nan"))
    return {"out": out, "states": pages.states, **tensors, **slots}


BAD_ARGUMENTS = {
    "states_off_alignment": (
        "states",
        lambda _: {
            "states": torch.zeros(NUM_SLOTS * 514)
            .unflatten(0, (NUM_SLOTS, 514))[:, 1:513]
            .unflatten(1, (2, 16, 16))
        },
    ),
    "groups_that_do_not_divide_the_heads": (
        "B",
        lambda a: {"B": a["B"].repeat(1, 3, 1), "C": a["C"].repeat(1, 3, 1)},
    ),
    "fewer_slots_than_tokens": ("state_slots", lambda a: {"state_slots": a["state_slots"][:, :1]}),
    "slots_of_64_bits": ("state_slots", lambda a: {"state_slots": a["state_slots"].long()}),
    "slots_for_another_number_of_requests": (
        "initial_slots",
        lambda a: {"initial_slots": a["initial_slots"][:1]},
    ),
    "a_slot_past_the_states": ("state_slots", lambda a: {"state_slots": a["state_slots"] + 99}),
    "x_of_integers": ("x", lambda a: {"x": a["x"].int()}),
    "limits_of_step_sizes_that_fall": ("dt_limits", lambda _: {"dt_limits": (0.5, 0.1)}),
    "limits_of_step_sizes_in_numpy": (
        "dt_limits",
        lambda _: {"dt_limits": (np.float32(0.1), np.float32(0.5))},
    ),
    "several_tokens_without_query_starts": ("initial_slots", lambda _: {"query_starts": None}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_state_update_refuses(name, change):
    args = on_cpu(good_call())
    changed = on_cpu(args | change(args))
    states = changed["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        state_update(**changed)

    assert changed["out"].isnan().all()
    assert torch.equal(changed["states"].nan_to_num(7), states.nan_to_num(7))


SHAPES = (
    (128, 64, 128, 8),
    (24, 128, 256, 1),
    (48, 64, 64, 1),
    (1, 8192, 16, 1),
    # Rows of no more than 16 bytes' alignment: with one product of a row's sum each, threads would
    # add those of others to it before it is rounded, each to its own.
    (48, 80, 24, 1),
)
"""Heads, channels of a head, state elements, groups."""


def compile_updates():
    for state_dtype in (torch.float32, torch.bfloat16):
        for num_heads, head_dim, d_state, num_groups in SHAPES:
            per_channel = num_heads == 1
            x = torch.zeros(3, num_heads, head_dim, dtype=torch.bfloat16)
            B = torch.zeros(3, num_groups, d_state, dtype=torch.bfloat16)
            shape = (num_heads, head_dim, d_state)
            state_update(
                x,
                torch.zeros(4, *shape, dtype=state_dtype),
                x,
                x if per_channel else x[:, :, 0].contiguous(),
                torch.zeros(shape if per_channel else shape[:1]),
                B,
                B,
                i32([1, 2, 3]),
                i32([1, 2, 3]),
                # One token each, and several.
                query_starts=None if state_dtype == torch.float32 else i32([0, 1, 2, 3]),
                D=torch.zeros(num_heads),
                z=x if per_channel else None,
                dt_bias=torch.zeros(shape[:2] if per_channel else shape[:1]),
            )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_state_update_compiles_to_wide_loads_of_a_row_in_one_warp(capability):
    kernels = compile_job(compile_updates, capability)

    assert len(kernels) == 2 * len(SHAPES)
    for index, kernel in enumerate(kernels):
        assert kernel.stack_bytes == 0, kernel
        # 64 bytes of state a thread in float32, 128 of narrower elements, and no load or store of
        # less than 16.
        num_loads = 4 if index < len(SHAPES) else 8
        assert kernel.counts["load_128"] >= num_loads, kernel
        assert kernel.counts["store_128"] == num_loads, kernel
        assert kernel.counts["load_global"] <= 44, kernel
        assert kernel.num_warps == 1, kernel


def compile_one_update():
    x, B = (
        torch.zeros(1, 1, 8192, dtype=torch.bfloat16),
        torch.zeros(1, 1, 16, dtype=torch.bfloat16),
    )
    states = torch.zeros(2, 1, 8192, 16, dtype=torch.bfloat16)
    state_update(x, states, x, x, torch.zeros(1, 8192, 16), B, B, i32([1]), i32([1]))


@pytest.mark.parametrize("capability", [80, 90])
def test_state_update_of_few_states_leaves_no_processor_idle(capability):
    (kernel,) = compile_job(compile_one_update, capability)

    assert kernel.grid[0] == 256
    assert kernel.stack_bytes == 0, kernel
    assert kernel.counts["store_128"] == 2, kernel

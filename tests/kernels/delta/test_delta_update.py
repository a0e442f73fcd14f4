import pytest
import torch

from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.recurrent.delta_update import delta_update
from jenga_kernels.reference.recurrent import delta_update as reference
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.delta.delta_cases import delta_states, delta_tensors, fill, tokens_of
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    same_elsewhere,
    step_slots,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator

NUM_SLOTS = 24
GATES = {"heads": False, "channels": True}
CASES = {
    # heads of queries and of values, elements of keys and of values; tokens of each request
    "qwen3_next": ((1, 2, 128, 128), [1, PADDING]),
    "more_values_than_keys": ((1, 1, 96, 192), [1, 1]),
    "speculative": ((2, 2, 32, 48), [3, 0, 1, PADDING, 2]),
    "odd_sizes_and_three_values_a_query": ((1, 3, 40, 24), [8, 2, PADDING, 1]),
}


def arguments(shape, lengths, dtype, state_dtype, *, channels=False):
    rng = generator(0)
    slots, read, written = step_slots(lengths, NUM_SLOTS, rng)
    tensors = delta_tensors(int(slots["query_starts"][-1]), shape, dtype, rng, channels=channels)
    pages = delta_states(NUM_SLOTS, shape, state_dtype)
    fill(pages, read, rng)
    return tensors, slots, pages, written


def by_reference(tensors, slots, states):
    """Output and states of the reference in the precision of its arguments."""
    states = states.clone()
    out = torch.full_like(tensors["v"], float("nan"))
    reference.delta_update(out, states, **tensors, **slots)
    return out, states


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=["f32", "bf16", "f16_state_f32"],
)
@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_delta_update_matches_the_rule(case, channels, dtype, state_dtype):
    shape, lengths = case
    tensors, slots, pages, written = arguments(
        shape, lengths, dtype, state_dtype, channels=channels
    )
    before = pages.arena.clone()
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["v"], float("nan"))

    delta_update(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


OPTIONS = {
    "without_bias": lambda _: {"dt_bias": None},
    "gates_and_betas_ready": lambda a: {
        "A_log": None,
        "dt_bias": None,
        "gates": -a["gates"].abs(),
        "betas": a["betas"].sigmoid(),
    },
    "a_scale": lambda _: {"scale": 0.25},
    "lengths_as_they_are": lambda a: {"qk_l2norm": False, "q": a["q"] / 8, "k": a["k"] / 8},
}


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("change", OPTIONS.values(), ids=OPTIONS.keys())
def test_delta_update_with_options(change, channels):
    tensors, slots, pages, written = arguments(
        (1, 2, 32, 16), [1, 2], torch.float32, torch.float32, channels=channels
    )
    tensors |= change(tensors)
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["v"], float("nan"))

    delta_update(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )


def test_delta_update_of_one_token_each_needs_no_query_starts():
    shape = (2, 2, 16, 32)
    rng = generator(1)
    tensors = delta_tensors(3, shape, torch.float32, rng)
    pages = delta_states(8, shape, torch.float32)
    fill(pages, [5], rng)
    # Slots as an engine passes them: a column of a wider table.
    table = i32([[5, 9], [NULL_SLOT, 9], [2, 9]])[:, 0]
    slots = {"initial_slots": i32([5, NULL_SLOT, NULL_SLOT]), "state_slots": table}
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["v"], float("nan"))

    delta_update(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(pages.states[[5, 2]], exact_states[[5, 2]], naive_states[[5, 2]], slack=states_lost)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize("num_accepted", [1, 2, 4])
def test_delta_update_goes_on_from_the_last_token_accepted(num_accepted):
    shape = (1, 2, 32, 16)
    tensors = delta_tensors(8, shape, torch.float32, generator(3))
    pages, straight = (delta_states(12, shape, torch.float32) for _ in range(2))
    order = [*range(num_accepted), *range(4, 8)]
    wanted = tokens_of(tensors, order)
    out, want = torch.empty_like(tensors["v"]), torch.empty_like(wanted["v"])
    slots = i32([[3, 7, 1, 9]])

    delta_update(
        out[:4],
        pages.states,
        **tokens_of(tensors, slice(4)),
        initial_slots=i32([NULL_SLOT]),
        state_slots=slots,
        query_starts=i32([0, 4]),
    )
    delta_update(
        out[4:],
        pages.states,
        **tokens_of(tensors, slice(4, 8)),
        initial_slots=slots[:, num_accepted - 1],
        state_slots=slots,
        query_starts=i32([0, 4]),
    )
    delta_update(
        want,
        straight.states,
        **wanted,
        initial_slots=i32([NULL_SLOT]),
        state_slots=i32([[NULL_SLOT + 1] * len(order)]),
        query_starts=i32([0, len(order)]),
    )

    assert torch.equal(out[order], want)
    assert torch.equal(pages.states[9], straight.states[1])


def test_delta_update_of_rows_far_apart_reaches_past_2_to_the_31_elements():
    shape = (1, 1, 16, 16)
    # Elements nobody touches cost no memory, so this arena is mostly not there.
    row_elements = 2**31 // 15 // 16 * 16 + 64
    arena = torch.empty(16 * row_elements, dtype=torch.bfloat16, device=DEVICE)
    states = arena.as_strided((3, 1, 16, 16), (16, 16, row_elements, 1))
    pages = delta_states(3, shape, torch.bfloat16)
    rng = generator(4)
    fill(pages, [1], rng)
    states[1] = pages.states[1]
    tensors = delta_tensors(1, shape, torch.bfloat16, rng)
    out, want = (torch.empty_like(tensors["v"]) for _ in range(2))
    slots = {"initial_slots": i32([1]), "state_slots": i32([2])}

    delta_update(out, states, **tensors, **slots)
    delta_update(want, pages.states, **tensors, **slots)

    assert 15 * row_elements > 2**31
    assert torch.equal(out, want)
    assert torch.equal(states[2], pages.states[2])


def good_call():
    tensors, slots, pages, _ = arguments((1, 2, 16, 16), [2, 1], torch.float32, torch.float32)
    out = torch.full_like(tensors["v"], float("nan"))
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
    "states_with_keys_and_values_swapped": (
        "states",
        lambda a: {"states": a["states"].transpose(2, 3)},
    ),
    "heads_that_do_not_divide_those_of_values": (
        "q",
        lambda a: {"q": a["q"].repeat(1, 3, 1), "k": a["k"].repeat(1, 3, 1)},
    ),
    "keys_wider_than_a_program_holds": (
        "q",
        lambda a: {"q": a["q"].repeat(1, 1, 17), "k": a["k"].repeat(1, 1, 17)},
    ),
    "k_of_other_tokens": ("k", lambda a: {"k": a["k"][:1]}),
    "q_of_another_dtype": ("q", lambda a: {"q": a["q"].half()}),
    "v_of_integers": ("v", lambda a: {"v": a["v"].int()}),
    "gates_of_other_heads": ("gates", lambda a: {"gates": a["gates"][:, :1]}),
    "gates_of_other_channels": ("gates", lambda a: {"gates": a["q"][:, :, :8].repeat(1, 2, 1)}),
    "betas_per_channel": ("betas", lambda a: {"betas": a["v"]}),
    "A_log_of_other_heads": ("A_log", lambda a: {"A_log": a["A_log"][:1]}),
    "dt_bias_of_other_heads": ("dt_bias", lambda a: {"dt_bias": a["dt_bias"][:1]}),
    "dt_bias_of_ready_gates": ("dt_bias", lambda _: {"A_log": None}),
    "a_scale_of_zero": ("scale", lambda _: {"scale": 0.0}),
    "fewer_slots_than_tokens": ("state_slots", lambda a: {"state_slots": a["state_slots"][:, :1]}),
    "slots_of_64_bits": ("state_slots", lambda a: {"state_slots": a["state_slots"].long()}),
    "a_slot_past_the_states": ("state_slots", lambda a: {"state_slots": a["state_slots"] + 99}),
    "several_tokens_without_query_starts": ("initial_slots", lambda _: {"query_starts": None}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_delta_update_refuses(name, change):
    args = on_cpu(good_call())
    changed = on_cpu(args | change(args))
    states = changed["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        delta_update(**changed)

    assert changed["out"].isnan().all()
    assert torch.equal(changed["states"].nan_to_num(7), states.nan_to_num(7))


def compile_updates():
    for state_dtype in (torch.float32, torch.bfloat16):
        for channels in GATES.values():
            tensors = delta_tensors(
                3, (16, 32, 128, 128), torch.bfloat16, generator(0), channels=channels
            )
            states = torch.zeros(4, 32, 128, 128, dtype=state_dtype)
            slots = i32([1, 2, 3])
            delta_update(tensors["v"], states, **tensors, initial_slots=slots, state_slots=slots)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_delta_update_compiles_to_wide_loads_of_a_row_in_one_warp(capability):
    kernels = compile_job(compile_updates, capability)

    assert len(kernels) == 2 * len(GATES)
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        # 64 elements of state a thread: 16-byte loads and stores, and nothing of it narrower.
        assert kernel.counts["store_128"] in (8, 16), kernel
        assert kernel.counts["load_128"] >= kernel.counts["store_128"], kernel
        # State that the programs of a processor have in flight, by their registers.
        programs = 65536 // (32 * 8 * -(-kernel.registers // 8))
        least_kib = 104 if kernel.counts["store_128"] == 16 else 60
        assert programs * kernel.counts["store_128"] / 2 >= least_kib, kernel
        assert kernel.counts["load_global"] <= 44, kernel
        assert kernel.num_warps == 1, kernel

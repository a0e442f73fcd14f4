"""What all operations of recurrent layers promise of slots, of requests and of their tensors."""

from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch

import jenga_kernels
from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from tests.kernels.conv.conv_cases import conv_tensors
from tests.kernels.delta.delta_cases import delta_tensors
from tests.kernels.recurrent.state_cases import i32, on_cpu, recurrence_tensors
from tests.kernels.support import DEVICE, generator, max_error, randn

NUM_SLOTS, NUM_TOKENS = 12, 80
SCANS = ("causal_conv", "state_scan", "delta_scan")
STEPS = ("conv_update", "state_update", "delta_update")


@dataclass(frozen=True)
class Call:
    """An operation, its tensors but for out and states, and states that no slot is without."""

    name: str
    tensors: dict
    states: torch.Tensor

    @property
    def values(self):
        return self.tensors["x" if "x" in self.tensors else "v"]

    def arguments(self, slots):
        out = torch.full(self.values.shape, 7.0, device=DEVICE)
        return {"out": out, "states": self.states.clone(), **self.tensors, **slots}

    def run(self, slots):
        arguments = self.arguments(slots)
        getattr(jenga_kernels, self.name)(**arguments)
        return arguments["out"], arguments["states"]

    def run_reference(self, slots):
        arguments = self.arguments(slots)
        reference = import_module(f"jenga_kernels.reference.recurrent.{self.name}")
        getattr(reference, self.name)(**arguments)
        return arguments["out"], arguments["states"]


def call_of(name, num_tokens=NUM_TOKENS):
    rng = generator(0)
    if "conv" in name:
        tensors, shape = conv_tensors(num_tokens, 16, 4, torch.float32, rng), (16, 3)
    elif "delta" in name:
        tensors = delta_tensors(num_tokens, (1, 2, 16, 16), torch.float32, rng)
        shape = (2, 16, 16)
    else:
        tensors = recurrence_tensors(num_tokens, "heads", (2, 16, 16, 1), torch.float32, rng)
        shape = (2, 16, 16)
    return Call(name, tensors, randn((NUM_SLOTS, *shape), torch.float32, rng))


def slots_of(name, query_starts, initial_slots, state_slots):
    """Arguments that say which slots requests have; in steps each takes one for all its tokens."""
    slots = {"query_starts": i32(query_starts), "initial_slots": i32(initial_slots)}
    if name in STEPS:
        most = max([1, *slots["query_starts"].diff().tolist()])
        state_slots = [[slot] * most for slot in state_slots]
    return slots | {"state_slots": i32(state_slots)}


def check_same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert max_error(mine, theirs) < 1e-4


@pytest.mark.parametrize("state_slots", [(3, 4), (NULL_SLOT, 4), (3, NULL_SLOT)], ids=str)
@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_tokens_outside_of_requests_are_left_alone(name, state_slots):
    call = call_of(name)
    # More tokens before the first request than a block of the interpreter has.
    slots = slots_of(name, [66, 69, 75], [5, NULL_SLOT], state_slots)

    out, states = call.run(slots)

    check_same((out, states), call.run_reference(slots))
    assert (out[:66] == 7).all()
    assert (out[75:] == 7).all()


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_requests_without_tokens_keep_their_states(name, num_tokens):
    # A scan hands each state on to its slot, that of a beginning too; a step has no state to write.
    call = call_of(name, num_tokens)
    slots = slots_of(name, [0, 0, num_tokens, num_tokens], [5, 1, NULL_SLOT], [3, 1, 4])

    out, states = call.run(slots)

    check_same((out, states), call.run_reference(slots))
    handed_on = (call.states[5], 0 * call.states[4]) if name in SCANS else call.states[[3, 4]]
    assert torch.equal(states[3], handed_on[0])
    assert torch.equal(states[4], handed_on[1])


@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_no_requests_write_nothing(name):
    call = call_of(name, 3)

    out, states = call.run(slots_of(name, [0], [], []) | {"state_slots": i32([])})

    assert (out == 7).all()
    assert torch.equal(states, call.states)


LIMITS = [(0.0, float("inf")), (0.25, float("inf")), (0.0, 0.75), (0.25, 0.75)]


@pytest.mark.parametrize("dt_limits", LIMITS, ids=str)
@pytest.mark.parametrize("kind", ["channels", "heads"])
@pytest.mark.parametrize("name", ["state_scan", "state_update"])
def test_step_sizes_are_within_limits_without_softplus_too(name, kind, dt_limits):
    call = call_of(name, 6)
    # Of both signs: those below zero would let states grow.
    tensors = recurrence_tensors(6, kind, (2, 16, 16, 1), torch.float32, generator(1))
    call = replace(call, tensors=tensors | {"dt_softplus": False, "dt_limits": dt_limits})
    slots = slots_of(name, [0, 6], [5], [3])

    check_same(call.run(slots), call.run_reference(slots))


@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_slots_below_the_null_slot_are_taken_for_it(name):
    call = call_of(name, 9)
    bounds = [0, 3, 6, 9]

    got = call.run(slots_of(name, bounds, [-1, 5, -(2**31)], [3, -1, -7]))

    want = call.run(slots_of(name, bounds, [0, 5, 0], [3, 0, 0]))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(got[1][4:], call.states[4:])


SHARED_SLOTS = {
    # initial slots, state slots; how the message begins
    "written_by_two": ((5, 6), (3, 3), "state_slots and checkpoints must not"),
    "read_before_another_writes_it": ((4, 6), (3, 4), "initial_slots must not"),
    "read_after_another_wrote_it": ((5, 3), (3, 4), "initial_slots must not"),
}


def refused(name, arguments, message):
    """Call an operation, which must refuse it and write nothing."""
    want = {name: arguments[name].clone() for name in ("out", "states")}

    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(jenga_kernels, name)(**arguments)

    assert torch.equal(arguments["out"], want["out"])
    assert torch.equal(arguments["states"], want["states"])


def slots_refused(name, slots, message):
    """The same on the CPU, where slots are looked at."""
    refused(name, on_cpu(call_of(name, 9).arguments(slots)), message)


@pytest.mark.parametrize(("initial", "state", "message"), SHARED_SLOTS.values(), ids=SHARED_SLOTS)
@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_a_slot_that_two_requests_would_race_for_is_refused(name, initial, state, message):
    slots_refused(name, slots_of(name, [0, 4, 9], initial, state), message)


@pytest.mark.parametrize("slot", [4, 6], ids=["another_writes", "another_reads"])
@pytest.mark.parametrize("name", SCANS)
def test_a_checkpoint_in_a_slot_of_another_request_is_refused(name, slot):
    kept = Checkpoints(starts=i32([0, 1, 1]), after_tokens=i32([2]), slots=i32([slot]))
    slots = slots_of(name, [0, 4, 9], [5, 6], [3, 4]) | {"checkpoints": kept}

    slots_refused(name, slots, "(state_slots and checkpoints|initial_slots) must not")


@pytest.mark.parametrize("name", STEPS)
def test_a_slot_of_a_later_token_that_another_request_reads_is_refused(name):
    slots = slots_of(name, [0, 2, 3], [5, 7], [3, 4])
    slots["state_slots"] = i32([[3, 7], [4, 3]])  # the second request has no second token

    slots_refused(name, slots, "initial_slots must not")


@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_requests_may_go_on_from_one_state_and_padding_from_any(name):
    call = call_of(name, 9)
    slots = slots_of(name, [0, 3, 6, 9], [5, 5, 3], [3, 4, NULL_SLOT])

    check_same(call.run(slots), call.run_reference(slots))


@pytest.mark.parametrize("argument", ["out", "states"])
@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_tensors_whose_rows_are_one_and_the_same_are_not_written(name, argument):
    arguments = call_of(name, 9).arguments(slots_of(name, [0, 9], [5], [3]))
    rows = arguments[argument]
    arguments[argument] = rows[:1].expand_as(rows)

    refused(name, arguments, f"{argument} must have elements of its own")


OVERLAPS = {
    # rows and columns of x and of out in a buffer
    "the_same": ((0, 0), (0, 0)),
    "a_row_later": ((0, 0), (1, 0)),
    "a_row_earlier": ((1, 0), (0, 0)),
    "some_columns": ((0, 0), (0, 15)),
    "the_end_of_the_row_before": ((1, 0), (0, 25)),
}


def views_in_a_buffer(x, x_place, out_place):
    """Copies of x, and room for its results, at places in one buffer of 40 columns."""
    buffer = torch.zeros(len(x) + 2, 40, device=DEVICE)
    flat = buffer.flatten()
    views = [
        flat.as_strided(x.shape, (40, 1), 40 * row + column) for row, column in (x_place, out_place)
    ]
    views[0].copy_(x)
    return dict(zip(("x", "out"), views, strict=True))


@pytest.mark.parametrize("places", OVERLAPS.values(), ids=OVERLAPS)
def test_a_convolution_of_prompts_does_not_write_over_its_input(places):
    call = call_of("causal_conv", 9)
    arguments = call.arguments(slots_of(call.name, [0, 9], [5], [3]))

    refused(call.name, arguments | views_in_a_buffer(call.values, *places), "out must not overlap")


@pytest.mark.parametrize(
    "places", [((0, 0), (0, 16)), ((1, 24), (0, 8)), ((1, 0), (1, 24))], ids=str
)
def test_a_convolution_of_prompts_may_write_beside_its_input(places):
    call = call_of("causal_conv", 9)
    slots = slots_of(call.name, [0, 9], [5], [3])
    views = views_in_a_buffer(call.values, *places)
    arguments = call.arguments(slots) | views

    jenga_kernels.causal_conv(**arguments)

    check_same((arguments["out"], arguments["states"]), call.run_reference(slots))


MIXED = {
    # what replaces a layer's tensors, given the per-channel shape and a generator
    "D_of_heads": lambda _, rng: {"D": randn((2,), torch.float32, rng)},
    "D_of_channels": lambda _, rng: {"D": randn((2, 16), torch.float16, rng)},
    "weights_in_half_precision": lambda shape, rng: {
        "dt": randn((9, *shape), torch.float16, rng),
        "dt_bias": randn(shape, torch.float16, rng),
    },
    "states_in_half_precision": lambda _, rng: {
        "states": randn((NUM_SLOTS, 2, 16, 16), torch.float16, rng)
    },
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("kind", ["channels", "heads"])
@pytest.mark.parametrize("name", ["state_scan", "state_update"])
def test_recurrences_take_weights_of_either_shape_and_any_float_dtype(name, kind, mixed):
    rng = generator(2)
    call = call_of(name, 9)
    shape = (2, 16) if kind == "channels" else (2,)
    tensors = recurrence_tensors(9, kind, (2, 16, 16, 1), torch.float32, rng)
    slots = slots_of(name, [0, 4, 9], [5, NULL_SLOT], [3, 4])
    new = mixed(shape, rng)
    call = replace(call, tensors=tensors | new, states=new.pop("states", call.states))
    call.tensors.pop("states", None)

    got, want = call.run(slots), call.run_reference(slots)

    check_same(got[:1], want[:1])
    # Half precision may round what differs in float32 the other way.
    unit = torch.finfo(call.states.dtype).eps
    assert max_error(got[1], want[1]) <= 1e-4 + unit * want[1].abs().max().item()


@pytest.mark.parametrize("name", SCANS)
def test_checkpoints_without_a_slot_and_those_of_padding_are_dropped(name):
    call = call_of(name, 12)
    kept = Checkpoints(
        starts=i32([0, 3, 4]), after_tokens=i32([1, 2, 6, 3]), slots=i32([NULL_SLOT, -1, 7, 8])
    )
    slots = slots_of(name, [0, 6, 12], [5, 5], [3, NULL_SLOT]) | {"checkpoints": kept}

    out, states = call.run(slots)

    check_same((out, states), call.run_reference(slots))
    # A checkpoint after the last token is the last state.
    assert torch.equal(states[7], states[3])
    others = [slot for slot in range(NUM_SLOTS) if slot not in (3, 7)]
    assert torch.equal(states[others], call.states[others])


@pytest.mark.parametrize("name", [*SCANS, *STEPS])
def test_tensors_that_require_gradients_are_refused_but_within_no_grad(name):
    call = call_of(name, 3)
    slots = slots_of(name, [0, 3], [5], [3])
    want = call.run(slots)
    changed = "weight" if "conv" in name else "q" if "delta" in name else "C"
    tensor = call.tensors[changed].clone().requires_grad_()
    call = replace(call, tensors=call.tensors | {changed: tensor})

    with pytest.raises(ValueError, match=f"^{changed} must not require a gradient"):
        call.run(slots)
    with torch.no_grad():
        got = call.run(slots)

    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)

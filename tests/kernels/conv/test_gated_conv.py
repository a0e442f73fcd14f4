"""Convolutions whose inputs and outputs are gated, as in LFM2: by both operations."""

import pytest
import torch

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.recurrent.causal_conv import causal_conv
from jenga_kernels.recurrent.conv_update import conv_update
from jenga_kernels.reference.recurrent import causal_conv as reference_causal_conv
from jenga_kernels.reference.recurrent import conv_update as reference_conv_update
from jenga_kernels.triton.recurrent.tiles import ScanTiles
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.conv.conv_cases import conv_states
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    prompt_slots,
    same_elsewhere,
    step_slots,
    widened,
)
from tests.kernels.support import check_close, generator, randn

NUM_SLOTS, DIM = 32, 72
OPERATIONS = {
    "steps": (conv_update, reference_conv_update.conv_update, step_slots, [1, PADDING, 1, 1]),
    "drafts": (conv_update, reference_conv_update.conv_update, step_slots, [8, 0, 2, PADDING, 3]),
    "prompts": (
        causal_conv,
        reference_causal_conv.causal_conv,
        prompt_slots,
        [130, PADDING, 1, 65],
    ),
}
GATES = {
    "both": ("input_gates", "output_gates"),
    "inputs": ("input_gates",),
    "outputs": ("output_gates",),
}


def gated_tensors(num_tokens, dim, width, dtype, rng, gates=GATES["both"]):
    """x, its gates, weight and bias; the rows are parts of a projection, as in LFM2."""
    parts = randn((num_tokens, 3 * dim), dtype, rng).chunk(3, dim=-1)
    rows = dict(zip(("input_gates", "output_gates", "x"), parts, strict=True))
    return {name: rows[name] for name in ("x", *gates)} | {
        "weight": randn((dim, width), dtype, rng),
        "bias": randn((dim,), dtype, rng),
    }


def arguments(make_slots, lengths, width, dtype, gates=GATES["both"], dim=DIM):
    rng = generator(0)
    slots, read, written = make_slots(lengths, NUM_SLOTS, rng)
    tensors = gated_tensors(int(slots["query_starts"][-1]), dim, width, dtype, rng, gates)
    pages = conv_states(NUM_SLOTS, dim, width, dtype)
    for slot in read:
        pages.states[slot] = randn((dim, width - 1), dtype, rng)
    return tensors, slots, pages, written


def check_against(reference, operation, tensors, slots, pages, written, **options):
    """Check outputs and states against the reference, and that nothing else is written."""
    before = pages.arena.clone()

    def by_reference(tensors, states):
        out = torch.full_like(tensors["x"], float("nan"))
        reference(out, states, **tensors, **slots, **options)
        return out

    states = pages.states.clone()
    naive = by_reference(tensors, states)
    (exact,), (lost,) = exactly(lambda: (by_reference(widened(tensors), pages.states.double()),))
    out = torch.full_like(tensors["x"], float("nan"))

    operation(out, pages.states, **tensors, **slots, **options)

    check_close(out, exact, naive, slack=lost)
    assert torch.equal(pages.states[written], states[written])
    assert same_elsewhere(pages.arena, before, written)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gated_conv_matches_its_reference(name, dtype, width):
    operation, reference, make_slots, lengths = OPERATIONS[name]
    case = arguments(make_slots, lengths, width, dtype)
    check_against(reference, operation, *case, silu=False)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gates_of_inputs_and_of_outputs_go_alone(name, gates, silu):
    operation, reference, make_slots, lengths = OPERATIONS[name]
    case = arguments(make_slots, lengths, 3, torch.float32, gates)
    check_against(reference, operation, *case, silu=silu)


def test_gated_prompts_by_runs_of_tokens(monkeypatch):
    # The interpreter's own tiles have no runs; these are a GPU's.
    by_runs = ScanTiles(block_tokens=32, block_dims=128, num_warps=2, run_tokens=8)
    monkeypatch.setattr("jenga_kernels.recurrent.causal_conv.conv_tiles", lambda *_: by_runs)
    lengths = [130, 1, 0, PADDING, 65, 3, 31, 8]
    case = arguments(prompt_slots, lengths, 3, torch.float32, dim=136)
    check_against(reference_causal_conv.causal_conv, causal_conv, *case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_gated_prompt_cut_anywhere_gives_the_same(dtype):
    rng, length, dim, cuts = generator(3), 80, 32, [5, 6, 41, 79]
    tensors = gated_tensors(length, dim, 3, dtype, rng)
    whole, pieces = (conv_states(8, dim, 3, dtype) for _ in range(2))
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
    rows = ("x", "input_gates", "output_gates")
    for slot, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        part = tensors | {name: tensors[name][start:end] for name in rows}
        causal_conv(
            cut_out[start:end],
            pieces.states,
            **part,
            query_starts=i32([0, end - start]),
            initial_slots=i32([slot]),
            state_slots=i32([slot + 1]),
        )

    assert torch.equal(out, cut_out)
    assert torch.equal(whole.states[1:6], pieces.states[1:6])


def test_rings_keep_gated_inputs():
    rng, dim, width = generator(4), 40, 3
    rings, plain = (conv_states(4, dim, width + 2, torch.float32).states for _ in range(2))
    tensors = gated_tensors(9, dim, width, torch.float32, rng)
    products = tensors["x"] * tensors.pop("input_gates")
    gates = tensors.pop("output_gates")
    for first, end in ((0, 4), (4, 7), (7, 9)):
        call = {
            "initial_slots": i32([2]),
            "state_slots": i32([2]),
            "query_starts": i32([0, end - first]),
            "computed_tokens": i32([first]),
            "weight": tensors["weight"],
        }
        operation = causal_conv if first == 0 else conv_update
        ours, wanted = torch.empty(2, end - first, dim).to(rings.device)
        operation(
            ours,
            rings,
            x=tensors["x"][first:end],
            input_gates=(products / tensors["x"])[first:end],
            output_gates=gates[first:end],
            **call,
        )
        operation(wanted, plain, x=products[first:end], **call)
        check_close(ours, (wanted * gates[first:end]).double(), wanted * gates[first:end])
    check_close(rings[2], plain[2].double(), plain[2])


BAD_GATES = {
    "of_another_shape": lambda gates: gates[:, :8],
    "of_another_dtype": lambda gates: gates.half(),
    "scattered": lambda gates: gates.T.contiguous().T,
}


@pytest.mark.parametrize("name", ["input_gates", "output_gates"])
@pytest.mark.parametrize("change", BAD_GATES.values(), ids=BAD_GATES)
@pytest.mark.parametrize("operation", ["steps", "prompts"])
def test_bad_gates_are_refused(operation, change, name):
    operation, _, make_slots, _ = OPERATIONS[operation]
    tensors, slots, pages, _ = arguments(make_slots, [2, 1], 3, torch.float32)
    out = torch.full_like(tensors["x"], float("nan"))
    args = on_cpu({"out": out, "states": pages.states, **tensors, **slots})
    before = args["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        operation(**args | {name: change(args[name])})

    assert args["out"].isnan().all()
    assert torch.equal(args["states"].nan_to_num(7), before.nan_to_num(7))


def test_prompts_do_not_write_over_their_gates():
    tensors, slots, pages, _ = arguments(prompt_slots, [40, 3], 3, torch.float32)

    for name in ("input_gates", "output_gates"):
        with pytest.raises(ValueError, match=f"^out must not overlap {name}"):
            causal_conv(tensors[name], pages.states, **tensors, **slots)


def compile_gated():
    dim = 2048  # LFM2-1.2B
    for num_tokens in (3, 300):
        tensors = gated_tensors(num_tokens, dim, 3, torch.bfloat16, generator(0)) | {"bias": None}
        states = conv_states(4, dim, 3, torch.bfloat16).states
        out = torch.empty(num_tokens, dim, dtype=torch.bfloat16)
        slots = {"initial_slots": i32([1, 2, 3]), "state_slots": i32([1, 2, 3]), "silu": False}
        if num_tokens == 3:
            conv_update(out, states, **tensors, **slots)
        else:
            causal_conv(out, states, **tensors, **slots, query_starts=i32([0, 100, 200, 300]))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_gated_convolutions_compile_without_spills(capability):
    steps, prompts = compile_job(compile_gated, capability)

    assert steps.stack_bytes == prompts.stack_bytes == 0
    assert steps.registers <= 64, steps
    # Four channels a thread: their token, its gates and each column of the state.
    assert steps.counts["load_64"] == 5, steps
    # Eight channels: ten tokens and their gates, eight more gates.
    assert prompts.counts["load_128"] >= 28, prompts
    assert prompts.registers <= 168, prompts

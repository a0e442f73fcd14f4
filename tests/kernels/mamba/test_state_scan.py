import itertools
from functools import partial

import pytest
import torch
import triton

from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.recurrent import state_scan as module
from jenga_kernels.recurrent.state_scan import state_scan
from jenga_kernels.reference.recurrent import state_scan as reference
from jenga_kernels.triton.lib.tiles import Machine
from jenga_kernels.triton.recurrent.tiles import (
    head_scan_tiles,
    hopper_scan_tiles,
    scan_segment_tokens,
)
from perf.harness.machine_code import SHARED_BYTES
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.crossed import crossed, halved
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    prompt_slots,
    recurrence_tensors,
    same_elsewhere,
    state_pages,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator, max_error, randn

NUM_SLOTS = 40
MANY_PROCESSORS = Machine(capability=90, num_processors=132)
CASES = {
    # kind; heads, channels of a head, state elements, groups; tokens of each prompt
    "mamba1": ("channels", (1, 96, 16, 1), [1, 17, 40]),
    "mamba1_odd_state_and_two_groups": ("channels", (2, 24, 24, 2), [3, 0, 19, PADDING, 2]),
    "mamba2": ("heads", (4, 64, 128, 2), [1, 64, 130]),
    "mamba2_wide_state": ("heads", (2, 16, 200, 1), [33, 1, 70]),
    "mamba2_odd_head_and_state": ("heads", (3, 24, 40, 1), [5, 0, 70, PADDING, 2, 129]),
}


def arguments(kind, shape, lengths, dtype, state_dtype, *, seed=0, checkpoints=True):
    rng = generator(seed)
    num_heads, head_dim, d_state, _ = shape
    slots, read, written = prompt_slots(lengths, NUM_SLOTS, rng, checkpoints=checkpoints)
    tensors = recurrence_tensors(int(slots["query_starts"][-1]), kind, shape, dtype, rng)
    pages = state_pages(NUM_SLOTS, (num_heads, head_dim, d_state), state_dtype)
    for slot in read:
        pages.states[slot] = randn((num_heads, head_dim, d_state), state_dtype, rng)
    return tensors, slots, pages, written


def by_reference(tensors, slots, states):
    """Output and states of the reference in the precision of its arguments."""
    states = states.clone()
    out = torch.full_like(tensors["x"], float("nan"))
    reference.state_scan(out, states, **tensors, **slots)
    return out, states


def naive_by_heads(tensors, slots, states, dt=None):
    """The same by PyTorch's matrix products over a whole prompt, in the dtype of x.

    Step sizes are the softplus of those projected, if no others are given.
    """
    x, B, C, dtype = tensors["x"], tensors["B"], tensors["C"], tensors["x"].dtype
    states = states.clone()
    out = torch.zeros_like(x)
    starts = slots["query_starts"].tolist()
    heads_per_group = x.shape[1] // B.shape[1]
    if dt is None:
        dt = torch.nn.functional.softplus(tensors["dt"].float() + tensors["dt_bias"])
    for request, slot in enumerate(slots["state_slots"].tolist()):
        rows = slice(starts[request], starts[request + 1])
        initial_slot = int(slots["initial_slots"][request])
        h = torch.zeros_like(states[0]) if initial_slot == NULL_SLOT else states[initial_slot]
        if slot == NULL_SLOT:
            continue
        total = (dt[rows] * tensors["A"]).cumsum(0)  # [T, H]
        between = (total[:, None] - total[None, :]).movedim(2, 0)  # [H, T, T]
        is_past = torch.ones_like(between, dtype=torch.bool).tril()
        decay = torch.exp(between.masked_fill(~is_past, float("-inf")))
        b = B[rows].repeat_interleave(heads_per_group, 1).movedim(1, 0)  # [H, T, N]
        c = C[rows].repeat_interleave(heads_per_group, 1).movedim(1, 0)
        weights = (c @ b.mT).float() * decay * dt[rows].T[:, None]
        x_heads = x[rows].movedim(1, 0)  # [H, T, P]
        y = (weights.to(dtype) @ x_heads).float()
        y += (c @ h.to(dtype).mT).float() * total.exp().T[..., None]
        y = y.movedim(0, 1)
        if tensors["D"] is not None:
            y = y + tensors["D"][:, None] * x[rows].float()
        if tensors["z"] is not None:
            y = y * torch.nn.functional.silu(tensors["z"][rows].float())
        out[rows] = y.to(dtype)
        scale = (torch.exp(total[-1:] - total) * dt[rows]).T[..., None] if len(total) else 0
        if len(total):
            h = h * total[-1].exp()[:, None, None]
            h = h + ((x_heads.float() * scale).to(dtype).mT @ b).float()
        states[slot] = h.to(states.dtype)
    return out, states


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_state_scan_matches_the_recurrence(case, state_dtype):
    kind, shape, lengths = case
    tensors, slots, pages, written = arguments(kind, shape, lengths, torch.float32, state_dtype)
    before = pages.arena.clone()
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_scan(out, pages.states, **tensors, **slots)

    # Over the state of a head products are summed one after another, by plain PyTorch on a CPU in
    # blocks: each of d_state roundings adds a step of a random walk.
    steps = shape[2] ** 0.5 if kind == "heads" else 0.0
    largest = exact.abs().max().item()
    slack = steps * torch.finfo(torch.float32).eps * largest
    check_close(out, exact, naive, slack=slack + lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_scan_of_channels_rounds_its_output_only(dtype):
    kind, shape, lengths = CASES["mamba1"]
    tensors, slots, pages, written = arguments(kind, shape, lengths, dtype, torch.float32)
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_scan(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )


def check_exactness(shape, lengths, dtype):
    """Check that prompts of heads have the rounding of matrix products in their dtype."""
    tensors, slots, pages, written = arguments(
        "heads", shape, lengths, dtype, torch.float32, checkpoints=False
    )
    naive, naive_states = naive_by_heads(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_scan(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_scan_of_heads_is_as_exact_as_matrix_products_in_its_dtype(dtype):
    _, shape, lengths = CASES["mamba2"]
    check_exactness(shape, lengths, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "d_state", "tile"),
    [
        (64, 64, (64, 64, 1)),
        (64, 128, (64, 32, 2)),
        (64, 100, (64, 32, 2)),  # with masks
        (128, 256, (32, 32, 4)),
        (128, 200, (32, 64, 4)),  # with masks, which would spill with fewer warps
    ],
)
def test_state_scan_of_heads_is_as_exact_with_tiles_of_hopper(
    head_dim, d_state, tile, dtype, monkeypatch
):
    # The interpreter's own tiles always have 64 tokens and all channels of a head.
    chosen = []

    def tiles_of_hopper(machine, *args, **options):
        chosen.append(
            head_scan_tiles(
                MANY_PROCESSORS if machine.is_interpreter else machine, *args, **options
            )
        )
        return chosen[-1]

    monkeypatch.setattr(module, "head_scan_tiles", tiles_of_hopper)
    monkeypatch.setattr(module, "_calls", {})

    check_exactness((1, head_dim, d_state, 1), [70, 1, 32], dtype)

    if module.machine_of(DEVICE).is_interpreter:
        assert [(each.block_tokens, each.block_dims, each.state_parts) for each in chosen] == [tile]


# Two are of Hopper alone.
SCANS = {
    "lone": {"is_warp_specialized": True},
    "shared": {"is_warp_specialized": False},
    "portable": {"is_portable": True},
}
if triton.knobs.runtime.interpret:
    SCANS = {"chosen": {}}


@pytest.fixture(params=SCANS.values(), ids=SCANS.keys())
def each_scan(request):
    return partial(state_scan, **request.param)


UNGATED = {
    # Shapes that Hopper has a kernel of its own for where there are no gates.
    "narrow_state": (2, 64, 64, 1),
    "two_groups": (4, 64, 128, 2),
    "step_sizes_that_are_copied": (8, 64, 128, 1),
    "wide_state_and_heads": (2, 128, 256, 1),
}
COPIED_STEPS = "step_sizes_that_are_copied"
if triton.knobs.runtime.interpret:  # they are nothing special
    UNGATED.pop(COPIED_STEPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", UNGATED.values(), ids=UNGATED.keys())
def test_state_scan_of_heads_without_gates_is_as_exact(shape, dtype, each_scan):
    lengths = [1, 64, 0, PADDING, 130]
    tensors, slots, pages, written = arguments(
        "heads", shape, lengths, dtype, torch.float32, checkpoints=False
    )
    tensors["z"] = None
    if dtype == torch.float16:
        tensors["D"] = None
    before = pages.arena.clone()
    naive, naive_states = naive_by_heads(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    each_scan(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


@pytest.mark.parametrize("shape", UNGATED.values(), ids=UNGATED.keys())
def test_state_scan_without_gates_and_without_a_bias_takes_step_sizes_as_they_are(shape, each_scan):
    tensors, slots, pages, written = arguments(
        "heads", shape, [70, 3], torch.bfloat16, torch.bfloat16, checkpoints=False
    )
    tensors |= dict.fromkeys(["D", "z", "dt_bias"])
    tensors["dt"] = tensors["dt"].abs()
    options = {"dt_softplus": False, "dt_limits": (0.25, 0.75)}
    steps = tensors["dt"].float().clamp(0.25, 0.75)
    naive, naive_states = naive_by_heads(tensors, slots, pages.states.float(), steps)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors) | options, slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    each_scan(out, pages.states, **tensors, **slots, **options)

    check_close(out, exact, naive, slack=lost)
    naive_states = naive_states.to(torch.bfloat16)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )


@pytest.mark.parametrize("shape", UNGATED.values(), ids=UNGATED.keys())
def test_state_scan_without_gates_keeps_what_it_would_end_with(shape, each_scan):
    cuts = [7, 8, 71, 135, 150]
    length = cuts[-1]
    tensors = recurrence_tensors(length, "heads", shape, torch.bfloat16, generator(3))
    tensors["z"] = None
    whole, pieces = (state_pages(8, shape[:3], torch.float32) for _ in range(2))
    out, cut_out = (torch.full_like(tensors["x"], float("nan")) for _ in range(2))
    kept = Checkpoints(starts=i32([0, 5]), after_tokens=i32(cuts), slots=i32([2, 3, 0, 4, 5]))

    each_scan(
        out,
        whole.states,
        **tensors,
        query_starts=i32([0, length]),
        initial_slots=i32([0]),
        state_slots=i32([6]),
        checkpoints=kept,
    )

    slots = [2, 3, 1, 4, 5]
    for slot, initial, start, end in zip(slots, [0, *slots], [0, *cuts], cuts, strict=False):
        part = {
            name: value[start:end]
            for name, value in tensors.items()
            if value is not None and len(value) == length
        }
        each_scan(
            cut_out[start:end],
            pieces.states,
            **(tensors | part),
            query_starts=i32([0, end - start]),
            initial_slots=i32([initial]),
            state_slots=i32([slot]),
        )
    assert torch.equal(out, cut_out)
    kept_slots = [2, 3, 4, 5]
    assert torch.equal(whole.states[kept_slots], pieces.states[kept_slots])
    assert torch.equal(whole.states[6], pieces.states[5])
    assert whole.states[1].isnan().all(), "what is kept in no slot is written nowhere"


@pytest.mark.parametrize("shape", UNGATED.values(), ids=UNGATED.keys())
def test_state_scan_without_gates_reads_no_token_of_another_request(shape, each_scan):
    tensors = recurrence_tensors(90, "heads", shape, torch.bfloat16, generator(4))
    tensors["z"] = None
    first = {
        name: value[:40] if value is not None and len(value) == 90 else value
        for name, value in tensors.items()
    }
    for name in ("x", "dt", "B", "C"):
        tensors[name][40:] = float("nan")
    beside, alone = (state_pages(3, shape[:3], torch.float32) for _ in range(2))
    out, alone_out = (torch.empty_like(tensors["x"]) for _ in range(2))

    each_scan(
        out,
        beside.states,
        **tensors,
        query_starts=i32([0, 40, 90]),
        initial_slots=i32([0, 0]),
        state_slots=i32([1, 2]),
    )
    each_scan(
        alone_out[:40],
        alone.states,
        **first,
        query_starts=i32([0, 40]),
        initial_slots=i32([0]),
        state_slots=i32([1]),
    )

    assert torch.equal(out[:40], alone_out[:40])
    assert torch.equal(beside.states[1], alone.states[1])
    assert beside.states[1].isfinite().all()


@crossed({"case": ["mamba2", "mamba2_odd_head_and_state"], "segment_tokens": [64, 128]})
def test_state_scan_in_segments_matches_the_recurrence(case, segment_tokens):
    kind, shape, lengths = CASES[case]
    tensors, slots, pages, written = arguments(
        kind, shape, [*lengths, 330], torch.float32, torch.float32
    )
    before = pages.arena.clone()
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_scan(out, pages.states, **tensors, **slots, segment_tokens=segment_tokens)

    largest = exact.abs().max().item()
    slack = shape[2] ** 0.5 * torch.finfo(torch.float32).eps * largest
    check_close(out, exact, naive, slack=slack + lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


SEGMENTED = {
    "narrow_state": (UNGATED["narrow_state"], torch.float16),
    COPIED_STEPS: ((8, 64, 64, 1), torch.bfloat16),
    "two_groups": ((2, 64, 128, 2), torch.bfloat16),
    "wide_state_and_heads": (UNGATED["wide_state_and_heads"], torch.bfloat16),
    "gates": ((4, 32, 40, 2), torch.bfloat16),
}
if triton.knobs.runtime.interpret:
    SEGMENTED.pop(COPIED_STEPS)


@halved("name", {name: name for name in SEGMENTED}, first=0)
def test_state_scan_in_segments_is_as_exact(name, each_scan):
    shape, dtype = SEGMENTED[name]
    lengths = [1, 64, 0, PADDING, 270, 130]
    tensors, slots, pages, written = arguments(
        "heads", shape, lengths, dtype, torch.float32, checkpoints=False
    )
    if name != "gates":
        tensors["z"] = None
    steps = None
    if dtype == torch.float16:
        tensors["D"] = tensors["dt_bias"] = None
        steps = torch.nn.functional.softplus(tensors["dt"].float())
    before = pages.arena.clone()
    naive, naive_states = naive_by_heads(tensors, slots, pages.states, steps)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    each_scan(out, pages.states, **tensors, **slots, segment_tokens=64)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


@halved("name", {name: name for name in SEGMENTED}, first=1)
def test_state_scan_in_segments_keeps_states_wherever_they_lie(name, each_scan):
    shape, _ = SEGMENTED[name]
    # Behind it is a request with a checkpoint for each token, once more than are looked at at once.
    length, beside = 260, 131 if name == "narrow_state" else 5
    cuts, kept_slots = [1, 63, 64, 65, 128, 150, 256, 260], [2, 3, 0, 4, 5, 6, 7, 8]
    tensors = recurrence_tensors(length + beside, "heads", shape, torch.bfloat16, generator(5))
    if name != "gates":
        tensors["z"] = None
    pages = state_pages(12, shape[:3], torch.float32)
    pages.states[11] = randn(shape[:3], torch.float32, generator(6))
    slots = {
        "query_starts": i32([0, length, length + beside]),
        "initial_slots": i32([11, 0]),
        "state_slots": i32([1, 10]),
        "checkpoints": Checkpoints(
            starts=i32([0, len(cuts), len(cuts) + beside]),
            after_tokens=i32([*cuts, *range(1, beside + 1)]),
            slots=i32([*kept_slots, *[0] * (beside - 2), 9, 0]),
        ),
    }
    before = pages.states.clone()
    (_, exact), (_, lost) = exactly(lambda: by_reference(widened(tensors), slots, before.double()))
    out = torch.full_like(tensors["x"], float("nan"))

    each_scan(out, pages.states, **tensors, **slots, segment_tokens=64)

    ends = {slot: (0, cut) for slot, cut in zip(kept_slots, cuts, strict=True) if slot > 0}
    ends |= {1: (0, length), 9: (length, length + beside - 1), 10: (length, length + beside)}
    for slot, (first, end) in ends.items():
        part = {
            name: value[first:end] if value is not None and len(value) == length + beside else value
            for name, value in tensors.items()
        }
        alone = {
            "query_starts": i32([0, end - first]),
            "initial_slots": i32([11 if first == 0 else 0]),
            "state_slots": i32([slot]),
        }
        _, naive = naive_by_heads(part, alone, before)
        check_close(pages.states[slot], exact[slot], naive[slot], slack=lost)


def test_state_scan_cuts_requests_where_it_is_told_to(monkeypatch):
    cut = []

    def note(*args):
        cut.append(args[-1])
        return options_of(*args)

    options_of = module._cut
    monkeypatch.setattr(module, "_cut", note)
    monkeypatch.setattr(module, "_calls", {})
    tensors, slots, pages, _ = arguments(
        "heads", (1, 16, 16, 1), [130, 3], torch.float32, torch.float32
    )
    out = torch.empty_like(tensors["x"])

    for longest_tokens, segment_tokens in ((None, 64), (130, 128), (130, 192), (None, 192)):
        state_scan(
            out,
            pages.states,
            **tensors,
            **slots,
            longest_tokens=longest_tokens,
            segment_tokens=segment_tokens,
        )

    assert cut == [64, 128]


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="nothing is compiled")
@pytest.mark.parametrize("has_gates", [False, True])
def test_state_scan_compiles_at_once_what_later_calls_take(has_gates, monkeypatch):
    compiled = []
    hook = lambda fn, **_: compiled.append(fn.name)  # noqa: E731 - as long as its name
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    shape = (5, 64, 64, 5)  # of no other test
    tensors, slots, pages, _ = arguments(
        "heads", shape, [130, 3], torch.bfloat16, torch.float16, checkpoints=has_gates
    )
    if not has_gates:
        tensors["z"] = None
    out = torch.empty_like(tensors["x"])

    state_scan(out, pages.states, **tensors, **slots, compile_ahead=True)

    assert any("segment_states" in name for name in compiled)
    compiled.clear()
    for is_specialized, segment_tokens in ((True, None), (False, None), (True, 64)):
        state_scan(
            out,
            pages.states,
            **tensors,
            **slots,
            segment_tokens=segment_tokens,
            is_warp_specialized=is_specialized,
        )
    assert compiled == []


@pytest.mark.parametrize(
    ("d_state", "num_programs", "num_requests", "num_tokens", "longest_tokens", "expected"),
    [
        (256, 48, 1, 2048, None, 1024),  # one prompt of Falcon-H1 7B
        (128, 48, 1, 2048, None, None),  # states half as wide, which take half the time uncut
        (128, 16, 1, 2048, None, 256),  # Nemotron-H 8B's heads over eight GPUs
        (128, 32, 1, 2048, None, 512),  # over four
        (128, 64, 1, 8192, None, 4096),  # over two
        (128, 16, 4, 8030, 8000, 1664),  # beside three short ones, where lengths are known
        (128, 128, 1, 8192, None, None),  # heads that fill a GPU by themselves
        (256, 48, 2, 4096, None, None),  # and two prompts together
        (128, 16, 1, 512, None, None),  # nothing that pays
        (128, 16, 4, 8030, None, None),  # as long as each other, for all that is known
        (128, 1, 1, 0, 0, None),  # no token at all
    ],
)
def test_state_scan_cuts_what_leaves_processors_idle(
    d_state, num_programs, num_requests, num_tokens, longest_tokens, expected
):
    chosen = scan_segment_tokens(
        MANY_PROCESSORS,
        d_state=d_state,
        num_programs=num_programs,
        num_requests=num_requests,
        num_tokens=num_tokens,
        longest_tokens=longest_tokens,
    )

    assert chosen == expected
    if chosen is not None:
        assert chosen % 64 == 0
        assert num_requests + (num_tokens - 1) // chosen <= 132 // num_programs


@pytest.mark.parametrize("kind", ["channels", "heads"])
@pytest.mark.parametrize(
    "left_out", [["D"], ["z"], ["dt_bias"], ["D", "z", "dt_bias"]], ids="_".join
)
def test_state_scan_without_optional_tensors(kind, left_out):
    shape = (1, 24, 16, 1) if kind == "channels" else (2, 16, 16, 1)
    tensors, slots, pages, written = arguments(
        kind, shape, [9, 3], torch.float32, torch.float32, checkpoints=False
    )
    tensors |= dict.fromkeys(left_out)
    options = {"dt_softplus": "z" in left_out, "dt_limits": (0.25, 0.75)}
    tensors["dt"] = tensors["dt"].abs()
    naive, naive_states = by_reference(tensors | options, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors) | options, slots, pages.states.double())
    )
    out = torch.full_like(tensors["x"], float("nan"))

    state_scan(out, pages.states, **tensors, **slots, **options)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )


# By how many units in the last place an interpreted power of two is off on average: numpy's by a
# twenty-fifth on some CPUs. A power near one that errs to one side does so in every step.
DECAY_UNITS = 1 / 16


def lost_by_decays(kind, num_tokens):
    """Share of a result that interpreted powers of two lose, as far as errors do not cancel."""
    # Heads multiply by one power for a whole chunk, channels by one for every token.
    num_powers = num_tokens if kind == "channels" else num_tokens // 64
    return DECAY_UNITS * num_powers * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["channels", "heads"])
def test_state_scan_gives_the_same_wherever_a_prompt_is_cut(kind, seed):
    rng = generator(seed)
    shape = (1, 32, 16, 1) if kind == "channels" else (2, 32, 32, 1)
    length = 90
    tensors = recurrence_tensors(length, kind, shape, torch.float32, rng)
    cuts = sorted((1 + torch.randperm(length - 1, generator=rng)[:3]).tolist())
    whole, pieces = (state_pages(8, shape[:3], torch.float32) for _ in range(2))
    kept = Checkpoints(starts=i32([0, 3]), after_tokens=i32(cuts), slots=i32([2, 3, 4]))
    out, cut_out = (torch.empty_like(tensors["x"]) for _ in range(2))
    slots = {"query_starts": i32([0, length]), "initial_slots": i32([0]), "state_slots": i32([1])}
    slots["checkpoints"] = kept
    naive, naive_states = by_reference(tensors, slots, whole.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, whole.states.double())
    )

    state_scan(out, whole.states, **tensors, **slots)
    for slot, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        part = {name: value[start:end] for name, value in tensors.items() if len(value) == length}
        state_scan(
            cut_out[start:end],
            pieces.states,
            **(tensors | part),
            query_starts=i32([0, end - start]),
            initial_slots=i32([slot]),
            state_slots=i32([slot + 1]),
        )

    check_close(out, exact, naive, slack=lost)
    # A cut restarts the tiles, so that sums are taken in another order where heads decay as one.
    if kind == "channels":
        assert torch.equal(out, cut_out)
    else:
        check_close(cut_out, exact, naive, slack=lost)
    order = [2, 3, 4, 1]
    want = exact_states[order]
    slack = states_lost + lost_by_decays(kind, length) * want.abs().max().item()
    for states in (whole.states[order], pieces.states[1:5]):
        check_close(states, want, naive_states[order], slack=slack)


@pytest.mark.parametrize("kind", ["channels", "heads"])
def test_state_scan_stays_near_float64_over_long_prompts(kind):
    rng = generator(7)
    shape = (1, 64, 16, 1) if kind == "channels" else (1, 16, 16, 1)
    length = 512 if kind == "channels" else 4096
    tensors = recurrence_tensors(length, kind, shape, torch.float32, rng)
    # Slow decay, so that rounding of the first tokens would still show at the end.
    tensors["A"] = tensors["A"] * 1e-3
    slots = {
        "query_starts": i32([0, length]),
        "initial_slots": i32([0]),
        "state_slots": i32([1]),
    }
    pages = state_pages(2, shape[:3], torch.float32)
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.empty_like(tensors["x"])

    state_scan(out, pages.states, **tensors, **slots)

    share = lost_by_decays(kind, length)
    scale, state_scale = (each.abs().max().item() for each in (exact, exact_states[1]))
    slack = states_lost + share * state_scale
    check_close(out, exact, naive, slack=lost + share * scale)
    check_close(pages.states[1], exact_states[1], naive_states[1], slack=slack)
    assert max_error(pages.states[1], exact_states[1]) < max(2e-6 * state_scale, slack)


def test_state_scan_keeps_neighbours_apart_after_strong_decay():
    # One token forgets everything; what decays are after it must not depend on how much that was.
    rng = generator(8)
    shape = (1, 16, 16, 1)
    tensors = recurrence_tensors(64, "heads", shape, torch.float32, rng)
    tensors["dt"][:] = -4.0
    tensors["dt"][5] = 2000.0
    slots = {"query_starts": i32([0, 64]), "initial_slots": i32([0]), "state_slots": i32([1])}
    pages = state_pages(2, shape[:3], torch.float32)
    tensors["x"][5] = 0
    naive, _ = by_reference(tensors, slots, pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.empty_like(tensors["x"])

    state_scan(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)


def test_state_scan_reaches_past_2_to_the_31_elements():
    num_slots = 2**31 // (1 << 20) + 3
    # Slots nobody touches cost no memory, so this arena is mostly not there.
    arena = torch.empty(num_slots, 1 << 20, dtype=torch.float32, device=DEVICE)
    states = arena[:, -256:].unflatten(1, (1, 16, 16))
    tensors = recurrence_tensors(3, "heads", (1, 16, 16, 1), torch.float32, generator(2))
    few = state_pages(2, (1, 16, 16), torch.float32)
    out, want = (torch.empty_like(tensors["x"]) for _ in range(2))
    starts, none = i32([0, 3]), i32([0])

    state_scan(
        out,
        states,
        **tensors,
        query_starts=starts,
        initial_slots=none,
        state_slots=i32([num_slots - 1]),
    )
    state_scan(
        want, few.states, **tensors, query_starts=starts, initial_slots=none, state_slots=i32([1])
    )

    assert arena.numel() > 2**31
    assert torch.equal(states[-1], few.states[1])
    assert torch.equal(out, want)


def good_call(kind="heads"):
    shape = (2, 16, 16, 1)
    tensors, slots, pages, _ = arguments(kind, shape, [4, 5], torch.float32, torch.float32)
    return {
        "out": torch.full_like(tensors["x"], float("nan")),
        "states": pages.states,
        **tensors,
        **slots,
    }


BAD_ARGUMENTS = {
    "x_without_heads": ("x", lambda a: {"x": a["x"][:, 0]}),
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].half()}),
    "states_of_other_heads": ("states", lambda a: {"states": a["states"][:, :1]}),
    "states_of_integers": ("states", lambda a: {"states": a["states"].int()}),
    "scattered_states": ("states", lambda a: {"states": a["states"].transpose(2, 3)}),
    "groups_that_do_not_divide_the_heads": (
        "B",
        lambda a: {"B": a["B"].repeat(1, 3, 1), "C": a["C"].repeat(1, 3, 1)},
    ),
    "C_of_other_groups": ("C", lambda a: {"C": a["C"].repeat(1, 2, 1)}),
    "dt_per_channel_with_A_per_head": ("dt", lambda a: {"dt": a["x"]}),
    "A_of_other_heads": ("A", lambda a: {"A": a["A"][:1]}),
    "A_in_half_precision": ("A", lambda a: {"A": a["A"].half()}),
    "z_of_another_shape": ("z", lambda a: {"z": a["z"][:4]}),
    "D_of_other_heads": ("D", lambda a: {"D": a["D"][:1]}),
    "dt_bias_of_other_heads": ("dt_bias", lambda a: {"dt_bias": a["dt_bias"][:1]}),
    "dt_limits_that_fall": ("dt_limits", lambda _: {"dt_limits": (1.0, 0.5)}),
    "query_starts_past_the_tokens": ("query_starts", lambda _: {"query_starts": i32([0, 4, 10])}),
    "query_starts_that_fall": ("query_starts", lambda _: {"query_starts": i32([0, 5, 4])}),
    "query_starts_of_64_bits": (
        "query_starts",
        lambda a: {"query_starts": a["query_starts"].long()},
    ),
    "slots_for_another_number_of_requests": (
        "state_slots",
        lambda a: {"state_slots": a["state_slots"][:1]},
    ),
    "a_slot_past_the_states": ("state_slots", lambda _: {"state_slots": i32([1, NUM_SLOTS])}),
    "an_initial_slot_past_the_states": ("initial_slots", lambda _: {"initial_slots": i32([99, 1])}),
    "a_checkpoint_past_the_prompt": (
        r"checkpoints\.after_tokens",
        lambda _: {
            "checkpoints": Checkpoints(starts=i32([0, 1, 1]), after_tokens=i32([5]), slots=i32([1]))
        },
    ),
    "checkpoints_out_of_order": (
        r"checkpoints\.after_tokens",
        lambda _: {
            "checkpoints": Checkpoints(
                starts=i32([0, 2, 2]), after_tokens=i32([3, 2]), slots=i32([1, 2])
            )
        },
    ),
    "segments_that_are_no_chunks": ("segment_tokens", lambda _: {"segment_tokens": 32}),
    "segments_of_nothing": ("segment_tokens", lambda _: {"segment_tokens": 0}),
    "a_longest_request_below_none": ("longest_tokens", lambda _: {"longest_tokens": -1}),
    "checkpoints_of_other_requests": (
        r"checkpoints\.starts",
        lambda _: {
            "checkpoints": Checkpoints(starts=i32([0, 1]), after_tokens=i32([3]), slots=i32([1]))
        },
    ),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_state_scan_refuses(name, change):
    args = on_cpu(good_call())
    changed = on_cpu(args | change(args))
    out, states = changed["out"].clone(), changed["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        state_scan(**changed)

    assert torch.equal(changed["out"].isnan(), out.isnan())
    assert torch.equal(changed["states"].nan_to_num(7), states.nan_to_num(7))


def test_state_scan_of_channels_refuses_segments():
    with pytest.raises(ValueError, match=r"^segment_tokens must be None"):
        state_scan(**good_call("channels"), segment_tokens=64)


def compile_channels():
    for dtype in (torch.bfloat16, torch.float32):
        for state_dtype in (torch.float32, torch.bfloat16):
            launch("channels", (1, 8192, 16, 1), dtype, state_dtype)


# Of a wide state with heads that fill a GPU by half and with more.
COMPILED_HEADS = ((128, 64, 128, 8), (24, 128, 256, 1), (96, 128, 256, 1), (48, 64, 64, 1))
CUT_HEADS = ((16, 64, 128, 1), (24, 128, 256, 1))
NARROW_HEADS = ((4, 32, 40, 2), (4, 64, 32, 1), (2, 128, 16, 1))


def compile_heads(**choice):
    for shape in COMPILED_HEADS:
        for dtype in (torch.bfloat16, torch.float16):
            launch("heads", shape, dtype, torch.float32, **choice)
    launch("heads", (128, 64, 128, 8), torch.float32, torch.float32, **choice)


def compile_segments(**choice):
    for shape in CUT_HEADS:
        launch("heads", shape, torch.bfloat16, torch.float32, segment_tokens=64, **choice)


def compile_lone():
    compile_heads(is_warp_specialized=True)
    compile_segments(is_warp_specialized=True)


def compile_shared():
    compile_heads(is_warp_specialized=False)
    compile_segments(is_warp_specialized=False)


def compile_heads_as_anywhere():
    compile_heads(is_portable=True)


def compile_narrow_heads():
    for shape, dtype, segment_tokens in itertools.product(
        NARROW_HEADS, (torch.bfloat16, torch.float16), (None, 64)
    ):
        launch(
            "heads", shape, dtype, torch.float32, segment_tokens=segment_tokens, is_portable=True
        )


def compile_segments_as_anywhere():
    compile_segments(is_portable=True)
    shape = (128, 64, 128, 8)
    launch("heads", shape, torch.float32, torch.float32, segment_tokens=64, is_portable=True)


def launch(kind, shape, dtype, state_dtype, *, segment_tokens=None, **choice):
    """Call the operation with tensors of a shape, for what it compiles."""
    num_heads, head_dim, d_state, num_groups = shape
    num_tokens = 16 if segment_tokens is None else 2 * segment_tokens
    x = torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype)
    B = torch.zeros(num_tokens, num_groups, d_state, dtype=dtype)
    per_channel = kind == "channels"
    # With and without, as models are served with prefix caching and without.
    kept = Checkpoints(starts=i32([0, 1]), after_tokens=i32([3]), slots=i32([2]))
    state_scan(
        x,
        torch.zeros(3, num_heads, head_dim, d_state, dtype=state_dtype),
        x,
        x if per_channel else x[:, :, 0].contiguous(),
        torch.zeros(shape[:3] if per_channel else shape[:1]),
        B,
        B,
        i32([0, num_tokens]),
        i32([1]),
        i32([1]),
        D=torch.zeros(num_heads),
        z=x if per_channel else None,
        dt_bias=torch.zeros(shape[:2] if per_channel else shape[:1]),
        checkpoints=kept if dtype == torch.bfloat16 else None,
        segment_tokens=segment_tokens,
        **choice,
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_state_scan_of_channels_compiles_without_spills(capability):
    kernels = compile_job(compile_channels, capability)

    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        # What the tokens after the next ones bring is in registers too.
        assert kernel.registers <= 224, kernel
        assert kernel.counts["load_128"] + kernel.counts["load_64"] >= 2 + 3 * 8, kernel
        assert kernel.counts["store_128"] >= 1, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_state_scan_of_heads_compiles_to_matrix_instructions_without_spills(capability):
    kernels = compile_job(compile_heads_as_anywhere, capability)

    assert len(kernels) == 9
    for kernel in kernels:
        # Half a wide tile with checkpoints spills eight registers, and was the fastest even so.
        is_half = capability >= 90 and kernel.num_warps == 4 and kernel.counts["cp_async"] > 0
        assert kernel.stack_bytes <= (32 if is_half else 0), kernel
        assert kernel.counts["load_128"] >= 6, kernel
        assert kernel.counts["store_128"] >= 2, kernel
    in_half = [k for k in kernels if k.counts["mma"] + k.counts["wgmma"] > 0]
    assert len(in_half) == 8
    if capability >= 90:
        assert all(kernel.counts["wgmma"] > 0 for kernel in in_half)
        wide = [kernel for kernel in kernels if kernel.counts["cp_async"] > 0]
        assert len(wide) == 4
        for kernel in wide:
            # A chunk is in flight while the one before is worked on.
            assert kernel.counts["cp_async_ahead"] == 1, kernel
            # With loads in flight, products of registers could run on into the next turn.
            assert kernel.counts["wgmma_of_registers"] == 0, kernel
            assert kernel.loop_instructions <= (630 if kernel.num_warps > 4 else 800), kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_state_scan_of_narrow_states_compiles_with_all_its_descriptors(capability):
    kernels = compile_job(compile_narrow_heads, capability)

    assert all(kernel.stack_bytes <= 8 for kernel in kernels), kernels


@pytest.mark.slow
def test_state_scan_whose_loads_run_ahead_compiles_to_warpgroup_products():
    kernels = compile_job(compile_shared, 90)

    ahead = [kernel for kernel in kernels if kernel.name == "state_scan_hopper_kernel"]
    assert len(ahead) == 2 * len(COMPILED_HEADS) + len(CUT_HEADS)
    for kernel in ahead:
        is_wide = kernel.shared_bytes > 113 << 10
        # Of a wide state, whose 256 elements take half of the registers, some addresses spill.
        assert kernel.stack_bytes <= (112 if is_wide else 8), kernel
        # Of others two programs run on a processor.
        assert kernel.shared_bytes <= (227 << 10 if is_wide else 113 << 10), kernel
        assert kernel.counts["tma"] >= 4, kernel
        assert kernel.counts["wgmma"] >= 16, kernel
        assert kernel.loop_instructions <= (1250 if is_wide else 1120), kernel
        # A state and what it takes in are left operands as they are.
        assert kernel.counts["wgmma_of_registers"] >= 12, kernel
        assert kernel.counts["mma"] == 0, kernel
        assert kernel.num_lost_descriptors == 0, kernel


@pytest.mark.slow
def test_state_scan_whose_warps_specialise_compiles_without_spills():
    kernels = compile_job(compile_lone, 90)

    lone = [kernel for kernel in kernels if kernel.name == "state_scan_specialized_kernel"]
    assert len(lone) == 2 * len(COMPILED_HEADS) + len(CUT_HEADS)
    for kernel in lone:
        is_wide = kernel.counts["wgmma"] > 24
        assert kernel.stack_bytes == 0, kernel
        assert kernel.num_warps == 8, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[90], kernel
        assert kernel.counts["tma"] >= 9, kernel
        assert kernel.counts["wgmma_of_registers"] >= 12, kernel
        # Of the group with the state, which has the shorter loop.
        assert kernel.loop_instructions <= (640 if is_wide else 420), kernel
        assert kernel.num_lost_descriptors == 0, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_state_scan_in_segments_compiles_without_spills(capability):
    kernels = compile_job(compile_segments_as_anywhere, capability)

    begun = [kernel for kernel in kernels if kernel.name == "segment_states_kernel"]
    assert len(begun) == len(CUT_HEADS) + 1
    for kernel in begun:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 128, kernel
        assert kernel.counts["load_128"] >= 2, kernel
        assert kernel.num_lost_descriptors == 0, kernel
    passing = [kernel for kernel in kernels if kernel.name == "pass_states_kernel"]
    assert passing
    for kernel in passing:
        assert kernel.stack_bytes == 0, kernel
        # The states of four segments are asked for before one is stored.
        assert kernel.counts["load_128"] >= 8, kernel
        assert kernel.counts["store_128"] == 8, kernel
    for kernel in kernels:
        if kernel.name == "state_scan_heads_kernel":
            assert kernel.stack_bytes <= 32, kernel


@pytest.mark.slow
def test_state_scan_in_segments_compiles_to_warpgroup_products_on_hopper():
    kernels = compile_job(compile_shared, 90)

    begun = [kernel for kernel in kernels if kernel.name == "segment_states_hopper_kernel"]
    assert len(begun) == len(CUT_HEADS)
    for kernel in begun:
        is_wide = kernel.shared_bytes > 113 << 10
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= (224 if is_wide else 128), kernel
        assert kernel.counts["wgmma_of_registers"] == (8 if is_wide else 4), kernel
        assert kernel.loop_instructions <= (600 if is_wide else 460), kernel
        assert kernel.num_lost_descriptors == 0, kernel


@pytest.mark.parametrize("capability", [90, 100])
def test_only_hopper_has_tiles_for_loads_that_run_ahead(capability):
    machine = Machine(capability=capability, num_processors=132)
    x = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    B = torch.zeros(4, 1, 128, dtype=torch.bfloat16)

    def is_chosen(x=x, B=B, z=None):
        return hopper_scan_tiles(machine, x, B, B, z) is not None

    assert is_chosen() == (capability == 90)
    assert not is_chosen(z=x)
    assert not is_chosen(x=x.float())
    assert not is_chosen(x=torch.zeros(4, 2, 96, dtype=torch.bfloat16))
    assert not is_chosen(B=torch.zeros(4, 1, 96, dtype=torch.bfloat16))
    assert not is_chosen(B=torch.zeros(4, 1, 132, dtype=torch.bfloat16)[..., :128])
    assert not is_chosen(B=torch.zeros(1, 1, 128, dtype=torch.bfloat16).expand(4, 1, 128))
    assert not is_chosen(x=x[:0])

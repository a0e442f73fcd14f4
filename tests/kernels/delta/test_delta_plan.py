import pytest
import torch
import triton

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.plans.delta_plan import DeltaPlan, estimated_delta_plan
from jenga_kernels.recurrent import delta_scan as module
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.reference.recurrent import delta_scan as reference
from jenga_kernels.triton.lib.tiles import HOPPER, Machine
from perf.harness.machine_code import SHARED_BYTES
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.delta.delta_cases import by_products, delta_states, delta_tensors, fill
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    prompt_slots,
    same_elsewhere,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator

NUM_SLOTS = 30
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FUSED, CUT, CUT_128 = (
    DeltaPlan(is_fused=True),
    DeltaPlan(segment_tokens=64),
    DeltaPlan(segment_tokens=128),
)
CASES = {
    # heads of queries and of values, elements of keys and of values; tokens of each prompt
    "qwen3_next": ((1, 2, 128, 128), [130]),
    "odd_sizes_and_three_values_a_query": ((1, 3, 40, 24), [5, 0, 140, PADDING, 66]),
    "more_values_than_keys": ((1, 1, 32, 64), [PADDING, 200]),
    "many_requests": ((1, 2, 16, 16), [70, 0, PADDING, 64, 5, 193]),
}


def arguments(shape, lengths, dtype, state_dtype, *, seed=0, channels=False):
    rng = generator(seed)
    slots, read, written = prompt_slots(lengths, NUM_SLOTS, rng)
    tensors = delta_tensors(int(slots["query_starts"][-1]), shape, dtype, rng, channels=channels)
    pages = delta_states(NUM_SLOTS, shape, state_dtype)
    fill(pages, read, rng)
    return tensors, slots, pages, written


def by_reference(tensors, slots, states):
    """Output and states of the reference in the precision of its arguments."""
    states = states.clone()
    out = torch.full_like(tensors["v"], float("nan"))
    reference.delta_scan(out, states, **tensors, **slots)
    return out, states


def let_scratch_be_nan(monkeypatch):
    """Let a call's own tensors hold no number before its kernels write them."""

    def nan_first(make):
        def made(*args):
            tensors = make(*args)
            for tensor in tensors.values():
                if tensor is not None:
                    tensor.fill_(float("nan"))
            return tensors

        return made

    for name in ("_chunk_tensors", "_segment_tensors"):
        monkeypatch.setattr(module, name, nan_first(getattr(module, name)))


def one_prompt(length):
    """Slots of one prompt from zero to slot 1."""
    return {"query_starts": i32([0, length]), "initial_slots": i32([0]), "state_slots": i32([1])}


@pytest.mark.parametrize(
    ("plan", "case", "channels", "dtype", "state_dtype"),
    [
        pytest.param(FUSED, "qwen3_next", False, BF16, F32, marks=pytest.mark.slow),
        (FUSED, "odd_sizes_and_three_values_a_query", False, F16, F16),
        (FUSED, "more_values_than_keys", False, F32, BF16),
        (FUSED, "many_requests", False, BF16, F32),
        pytest.param(CUT, "qwen3_next", False, BF16, F32, marks=pytest.mark.slow),
        pytest.param(CUT, "qwen3_next", True, BF16, BF16, marks=pytest.mark.slow),
        (CUT, "odd_sizes_and_three_values_a_query", False, F16, F16),
        (CUT, "odd_sizes_and_three_values_a_query", True, F32, F32),
        (CUT, "more_values_than_keys", False, F32, BF16),
        (CUT, "many_requests", False, BF16, F32),
        pytest.param(CUT, "many_requests", True, BF16, F16, marks=pytest.mark.slow),
        (CUT_128, "many_requests", False, F32, F32),
    ],
)
def test_delta_plan_is_as_exact_as_matrix_products(
    plan, case, channels, dtype, state_dtype, monkeypatch
):
    shape, lengths = CASES[case]
    tensors, slots, pages, written = arguments(
        shape, lengths, dtype, state_dtype, channels=channels
    )
    before = pages.arena.clone()
    naive, naive_states = by_products(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["v"], float("nan"))
    let_scratch_be_nan(monkeypatch)

    delta_scan(out, pages.states, **tensors, **slots, plan=plan)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert same_elsewhere(pages.arena, before, written)


@pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="on a GPU, a fused kernel has shorter chunks"
)
@pytest.mark.parametrize(("dtype", "normalized"), [(F32, True), (BF16, True), (F16, False)])
def test_delta_plan_fused_gives_the_bits_of_two_kernels(dtype, normalized):
    tensors, slots, pages, written = arguments((1, 2, 32, 16), [70, 3], dtype, F32)
    if not normalized:
        tensors |= {"q": tensors["q"] / 8, "k": tensors["k"] / 8}
    two = pages.states.clone()
    out, two_out = (torch.full_like(tensors["v"], float("nan")) for _ in range(2))
    option = {"qk_l2norm": normalized}

    delta_scan(out, pages.states, **tensors, **slots, **option, plan=FUSED)
    delta_scan(two_out, two, **tensors, **slots, **option)

    assert torch.equal(out, two_out)
    assert torch.equal(pages.states[written], two[written])


PLANS = {"fused": (FUSED, False), "heads_cut": (CUT, False), "channels_cut": (CUT, True)}


@pytest.mark.parametrize(("plan", "channels"), PLANS.values(), ids=PLANS.keys())
def test_delta_plan_keeps_states_wherever_they_lie(plan, channels):
    # Checkpoints at the ends of segments, just before and after them, and at the end of the prompt.
    shape, cuts = (1, 1, 16, 16), [63, 64, 65, 127, 129, 192, 200]
    length = cuts[-1]
    tensors = delta_tensors(length, shape, BF16, generator(3), channels=channels)
    # Slow decay, so that a segment's state depends on what it begins with.
    tensors["A_log"] = tensors["A_log"] - 7
    pages = delta_states(10, shape, F32)
    kept = Checkpoints(
        starts=i32([0, len(cuts)]), after_tokens=i32(cuts), slots=i32([2, 0, 4, 5, 6, 7, 8])
    )
    slots = one_prompt(length) | {"checkpoints": kept}
    naive, naive_states = by_products(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["v"], float("nan"))

    delta_scan(out, pages.states, **tensors, **slots, plan=plan)

    written = [1, 2, 4, 5, 6, 7, 8]
    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )
    assert torch.equal(pages.states[1], pages.states[8])
    assert pages.states[[3, 9]].isnan().all(), "what is kept in no slot is written nowhere"


@pytest.mark.parametrize("plan", [FUSED, CUT], ids=["fused", "cut"])
def test_delta_plan_stays_near_float64_over_long_prompts(plan):
    rng = generator(7)
    shape, length = (1, 1, 32, 16), 1000
    tensors = delta_tensors(length, shape, F32, rng)
    # Slow decay, so that rounding of the first tokens would still show at the end.
    tensors["A_log"] = tensors["A_log"] - 7
    pages = delta_states(2, shape, F32)
    naive, naive_states = by_reference(tensors, one_prompt(length), pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), one_prompt(length), pages.states.double())
    )
    out = torch.empty_like(tensors["v"])

    delta_scan(out, pages.states, **tensors, **one_prompt(length), plan=plan)

    check_close(out, exact, naive, slack=lost)
    check_close(pages.states[1], exact_states[1], naive_states[1], slack=states_lost)


@pytest.mark.parametrize("plan", [FUSED, CUT], ids=["fused", "cut"])
def test_delta_plan_reaches_past_2_to_the_31_elements(plan):
    num_slots = 2**31 // (1 << 20) + 3
    # Slots nobody touches cost no memory, so this arena is mostly not there.
    arena = torch.empty(num_slots, 1 << 20, dtype=F32, device=DEVICE)
    states = arena[:, -256:].unflatten(1, (1, 16, 16))
    shape = (1, 1, 16, 16)
    tensors = delta_tensors(70, shape, F32, generator(2))
    few = delta_states(3, shape, F32)
    first, last = i32([num_slots - 2]), i32([num_slots - 1])
    states[-2] = few.states[2] = torch.randn(1, 16, 16, generator=generator(3)).to(DEVICE)
    out, want = (torch.empty_like(tensors["v"]) for _ in range(2))
    starts = i32([0, 70])

    delta_scan(
        out,
        states,
        **tensors,
        query_starts=starts,
        initial_slots=first,
        state_slots=last,
        plan=plan,
    )
    slots = one_prompt(70) | {"initial_slots": i32([2])}
    delta_scan(want, few.states, **tensors, **slots, plan=plan)

    assert arena.numel() > 2**31
    assert torch.equal(states[-1], few.states[1])
    assert torch.equal(out, want)


def test_delta_plan_counts_segments_of_any_lengths():
    rng = generator(0)
    for _ in range(200):
        num_requests = int(torch.randint(1, 6, (), generator=rng))
        lengths = torch.randint(0, 400, (num_requests,), generator=rng).tolist()
        plan = DeltaPlan(segment_tokens=64 * int(torch.randint(1, 5, (), generator=rng)))
        counted = sum(max(1, -(-length // plan.segment_tokens)) for length in lengths)
        most = plan.num_segments(num_requests, sum(lengths))

        if most is None:
            assert counted == num_requests, (plan, lengths)
        else:
            assert counted <= most, (plan, lengths)
    assert DeltaPlan().num_segments(2, 10000) is None
    assert DeltaPlan(segment_tokens=128).num_segments(1, 128) is None
    assert DeltaPlan(segment_tokens=128).num_segments(1, 129) == 2


def estimate(num_v_heads, num_requests, num_tokens, *, channels=False):
    return estimated_delta_plan(
        Machine(capability=HOPPER, num_processors=132),
        num_v_heads=num_v_heads,
        head_k_dim=128,
        head_v_dim=128,
        num_requests=num_requests,
        num_tokens=num_tokens,
        is_per_channel=channels,
    )


def test_delta_plan_is_estimated_from_heads_and_tokens():
    assert estimate(32, 5, 5 * 2048) == FUSED
    assert estimate(32, 5, 5 * 2048, channels=True) == DeltaPlan()
    assert estimate(32, 1, 2048) == DeltaPlan(), "the scan's programs fill the GPU"
    assert estimate(4, 1, 8192) == DeltaPlan(segment_tokens=1024)
    assert estimate(4, 1, 8192, channels=True) == DeltaPlan(segment_tokens=1024)
    assert estimate(4, 1, 512) == DeltaPlan(), "segments would cost more than they save"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_tokens": 0}, "^segment_tokens must be an integer and at least 1"),
        ({"segment_tokens": 96}, "^segment_tokens must be a multiple of 64, got 96"),
        ({"segment_tokens": 64, "is_fused": True}, "^segment_tokens must be None for a fused"),
    ],
)
def test_delta_plan_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        DeltaPlan(**fields)


def test_delta_plan_fused_refuses_channels_that_decay_on_their_own():
    tensors, slots, pages, _ = arguments((1, 2, 16, 16), [4, 5], F32, F32, channels=True)
    args = {"out": torch.zeros_like(tensors["v"]), "states": pages.states, **tensors, **slots}
    args = on_cpu(args)
    before = args["states"].clone()

    with pytest.raises(ValueError, match=r"^plan must not be fused if every channel"):
        delta_scan(**args, plan=FUSED)

    assert not args["out"].any()
    assert torch.equal(args["states"].nan_to_num(7), before.nan_to_num(7))


def compile_plan(plan, dtypes, *, channels=False):
    kept = Checkpoints(starts=i32([0, 1]), after_tokens=i32([3]), slots=i32([1]))
    for dtype in dtypes:
        sizes = (16, 32, 128, 128)
        tensors = delta_tensors(130, sizes, dtype, generator(0), channels=channels)
        states = torch.zeros(2, 32, 128, 128)
        slots = one_prompt(130) | {"checkpoints": kept}
        delta_scan(tensors["v"], states, **tensors, **slots, plan=plan)


def compile_fused():
    compile_plan(FUSED, (BF16, F32))


def compile_cut():
    compile_plan(CUT, (BF16, F32))
    compile_plan(CUT, (BF16,), channels=True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_delta_plan_fused_compiles_to_one_kernel_without_spills(capability):
    kernels = compile_job(compile_fused, capability)

    assert [kernel.name for kernel in kernels] == ["delta_fused_kernel"] * 2
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        assert kernel.num_lost_descriptors == 0, kernel
    in_half, exact = kernels
    matrix = sum(in_half.counts[name] for name in ("mma", "wgmma", "tcgen05"))
    assert matrix >= 80, in_half
    assert in_half.counts["load_128"] >= 6, in_half
    assert exact.counts["mma"] == 0, exact
    if capability in (90, 100):
        # A program has a whole head: 128 values.
        assert in_half.grid == (32, 1), in_half


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_delta_plan_in_segments_compiles_without_spills(capability):
    kernels = compile_job(compile_cut, capability)

    # Chunks are prepared as without a plan, by a kernel with tests of its own.
    kernels = [kernel for kernel in kernels if "chunks" not in kernel.name]
    names = [kernel.name.removeprefix("delta_") for kernel in kernels]
    assert names.count("segment_states_kernel") == names.count("scan_kernel") == 3
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        assert kernel.num_lost_descriptors == 0, kernel
        if kernel.name == "delta_segment_states_kernel":
            # A segment's own state, and what it does to another one.
            blocks = 2 * 128 // (16 if kernel.num_warps == 8 else 32)
            assert kernel.grid == (32 * blocks, 3), kernel
        if kernel.name == "delta_pass_states_kernel":
            assert kernel.counts["mma"] + kernel.counts["tcgen05"] >= 96, kernel

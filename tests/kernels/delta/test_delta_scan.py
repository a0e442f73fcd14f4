import pytest
import torch
import triton

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.recurrent import delta_scan as module
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.recurrent.delta_update import delta_update
from jenga_kernels.reference.recurrent import delta_scan as reference
from jenga_kernels.triton.lib.tiles import HOPPER
from perf.harness.machine_code import SHARED_BYTES
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.delta.delta_cases import (
    by_products,
    delta_states,
    delta_tensors,
    fill,
    tokens_of,
)
from tests.kernels.recurrent.state_cases import (
    PADDING,
    i32,
    on_cpu,
    prompt_slots,
    same_elsewhere,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator, max_error

NUM_SLOTS = 40
GATES = {"heads": False, "channels": True}
CASES = {
    # heads of queries and of values, elements of keys and of values; tokens of each prompt
    "qwen3_next": ((1, 2, 128, 128), [1, 66]),
    "odd_sizes_and_three_values_a_query": ((1, 3, 40, 24), [5, 0, 70, PADDING, 2]),
    "values_of_several_programs": ((1, 1, 96, 192), [65]),
    "short_keys_of_many_requests": ((1, 2, 64, 64), [70, 0, PADDING, 64, 5, 129]),
}


def arguments(shape, lengths, dtype, state_dtype, *, seed=0, checkpoints=True, channels=False):
    rng = generator(seed)
    slots, read, written = prompt_slots(lengths, NUM_SLOTS, rng, checkpoints=checkpoints)
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


def one_prompt(length):
    """Slots of one prompt from zero to slot 1."""
    return {"query_starts": i32([0, length]), "initial_slots": i32([0]), "state_slots": i32([1])}


def chunks_of_nan(*args, make=module._chunk_tensors, **kwargs):
    """What the first kernel leaves for the second, before it has: nothing that is a number."""
    chunks = make(*args, **kwargs)
    for tensor in chunks.values():
        if tensor is not None:
            tensor.fill_(float("nan"))
    return chunks


# Hopper has a kernel of its own.
CHOICES = {"ahead": {"is_portable": False}, "portable": {"is_portable": True}}
if triton.knobs.runtime.interpret:
    CHOICES.pop("portable")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
@pytest.mark.parametrize(
    ("case", "channels", "dtype", "state_dtype"),
    [
        pytest.param("qwen3_next", False, F32, F32, marks=pytest.mark.slow),
        pytest.param("qwen3_next", False, BF16, F32, marks=pytest.mark.slow),
        ("qwen3_next", True, BF16, F32),
        pytest.param(
            "odd_sizes_and_three_values_a_query", False, F32, BF16, marks=pytest.mark.slow
        ),
        ("odd_sizes_and_three_values_a_query", False, F16, F16),
        ("odd_sizes_and_three_values_a_query", True, F32, F32),
        ("values_of_several_programs", False, BF16, BF16),
        pytest.param("values_of_several_programs", True, F32, F32, marks=pytest.mark.slow),
        pytest.param("short_keys_of_many_requests", False, F16, F32, marks=pytest.mark.slow),
        ("short_keys_of_many_requests", True, BF16, F16),
    ],
)
def test_delta_scan_is_as_exact_as_matrix_products_in_its_dtype(
    case, channels, dtype, state_dtype, choice, monkeypatch
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
    monkeypatch.setattr(module, "_chunk_tensors", chunks_of_nan)

    delta_scan(out, pages.states, **tensors, **slots, **choice)

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
def test_delta_scan_with_options(change, channels):
    tensors, slots, pages, written = arguments(
        (1, 2, 32, 16), [33], torch.float32, torch.float32, channels=channels
    )
    tensors |= change(tensors)
    naive, naive_states = by_reference(tensors, slots, pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots, pages.states.double())
    )
    out = torch.full_like(tensors["v"], float("nan"))

    delta_scan(out, pages.states, **tensors, **slots)

    check_close(out, exact, naive, slack=lost)
    check_close(
        pages.states[written], exact_states[written], naive_states[written], slack=states_lost
    )


@pytest.mark.parametrize(("seed", "channels"), [(0, False), (1, False), (2, True)])
def test_delta_scan_gives_the_same_wherever_a_prompt_is_cut(seed, channels):
    rng = generator(seed)
    shape, length = (1, 2, 32, 32), 140
    tensors = delta_tensors(length, shape, torch.float32, rng, channels=channels)
    cuts = sorted((1 + torch.randperm(length - 1, generator=rng)[:3]).tolist())
    whole, pieces, plain = (delta_states(8, shape, torch.float32) for _ in range(3))
    kept = Checkpoints(starts=i32([0, 3]), after_tokens=i32(cuts), slots=i32([2, 3, 4]))
    slots = one_prompt(length)
    naive, naive_states = by_reference(tensors, slots | {"checkpoints": kept}, whole.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), slots | {"checkpoints": kept}, whole.states.double())
    )
    out, cut_out, plain_out = (torch.empty_like(tensors["v"]) for _ in range(3))

    delta_scan(out, whole.states, **tensors, **slots, checkpoints=kept)
    delta_scan(plain_out, plain.states, **tensors, **slots)
    for slot, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        delta_scan(
            cut_out[start:end],
            pieces.states,
            **tokens_of(tensors, slice(start, end)),
            query_starts=i32([0, end - start]),
            initial_slots=i32([slot]),
            state_slots=i32([slot + 1]),
        )

    # A checkpoint ends a chunk as the end of a prompt does, so that the sums are the same ones.
    order = [2, 3, 4, 1]
    assert torch.equal(out, cut_out)
    assert torch.equal(whole.states[order], pieces.states[1:5])
    check_close(out, exact, naive, slack=lost)
    check_close(plain_out, exact, naive, slack=lost)
    check_close(whole.states[order], exact_states[order], naive_states[order], slack=states_lost)
    check_close(plain.states[1], exact_states[1], naive_states[1], slack=states_lost)


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
def test_delta_scan_in_16_bits_keeps_what_it_would_end_with(channels):
    shape, cuts = (1, 2, 128, 64), [1, 65, 129, 150]
    length = cuts[-1]
    tensors = delta_tensors(length, shape, BF16, generator(3), channels=channels)
    whole, pieces = (delta_states(7, shape, F32) for _ in range(2))
    out, cut_out = (torch.full_like(tensors["v"], float("nan")) for _ in range(2))
    kept = Checkpoints(starts=i32([0, 4]), after_tokens=i32(cuts), slots=i32([2, 0, 4, 5]))

    delta_scan(out, whole.states, **tensors, **one_prompt(length), checkpoints=kept)

    for slot, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        delta_scan(
            cut_out[start:end],
            pieces.states,
            **tokens_of(tensors, slice(start, end)),
            query_starts=i32([0, end - start]),
            initial_slots=i32([slot + 1 if slot else 0]),
            state_slots=i32([slot + 2]),
        )
    assert torch.equal(out, cut_out)
    assert torch.equal(whole.states[[2, 4, 5, 1]], pieces.states[[2, 4, 5, 5]])
    assert whole.states[[3, 6]].isnan().all(), "what is kept in no slot is written nowhere"


def test_delta_scan_goes_on_where_an_update_ended():
    shape = (1, 2, 16, 16)
    rng = generator(5)
    tensors = delta_tensors(20, shape, torch.float32, rng)
    pages = delta_states(3, shape, torch.float32)
    naive, _ = by_reference(tensors, one_prompt(20), pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), one_prompt(20), pages.states.double())
    )
    out = torch.empty_like(tensors["v"])

    for start, end in ((0, 7), (8, 20)):
        delta_scan(
            out[start:end],
            pages.states,
            **tokens_of(tensors, slice(start, end)),
            query_starts=i32([0, end - start]),
            initial_slots=i32([2 if start else 0]),
            state_slots=i32([2]),
        )
        if start == 0:
            delta_update(
                out[7:8],
                pages.states,
                **tokens_of(tensors, slice(7, 8)),
                initial_slots=i32([2]),
                state_slots=i32([2]),
            )

    check_close(out, exact, naive, slack=lost)


def test_delta_scan_stays_near_float64_over_long_prompts():
    rng = generator(7)
    shape, length = (1, 1, 32, 16), 1500
    tensors = delta_tensors(length, shape, torch.float32, rng)
    # Slow decay, so that rounding of the first tokens would still show at the end.
    tensors["A_log"] = tensors["A_log"] - 7
    pages = delta_states(2, shape, torch.float32)
    naive, naive_states = by_reference(tensors, one_prompt(length), pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), one_prompt(length), pages.states.double())
    )
    out = torch.empty_like(tensors["v"])

    delta_scan(out, pages.states, **tensors, **one_prompt(length))

    check_close(out, exact, naive, slack=lost)
    check_close(pages.states[1], exact_states[1], naive_states[1], slack=states_lost)
    assert max_error(pages.states[1], exact_states[1]) < 2e-6 * exact_states[1].abs().max().item()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_delta_scan_takes_keys_that_are_all_alike(dtype):
    # Powers of a chunk's matrix would reach 1e18 here; the inverse itself has no entry above 1.
    shape = (1, 1, 16, 16)
    tensors = delta_tensors(128, shape, dtype, generator(9))
    tensors["k"][:] = tensors["k"][:1]
    tensors["betas"][:] = 8.0
    tensors["gates"][:] = -20.0
    pages = delta_states(2, shape, torch.float32)
    naive, naive_states = by_products(tensors, one_prompt(128), pages.states)
    (exact, exact_states), (lost, states_lost) = exactly(
        lambda: by_reference(widened(tensors), one_prompt(128), pages.states.double())
    )
    out = torch.empty_like(tensors["v"])

    delta_scan(out, pages.states, **tensors, **one_prompt(128))

    check_close(out, exact, naive, slack=lost)
    check_close(pages.states[1], exact_states[1], naive_states[1], slack=states_lost)


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
def test_delta_scan_keeps_neighbours_apart_after_strong_decay(channels):
    # One token forgets everything; what decays are after it must not depend on how much that was.
    shape = (1, 1, 16, 16)
    tensors = delta_tensors(64, shape, torch.float32, generator(8), channels=channels)
    tensors["gates"][:] = -4.0
    tensors["gates"][5] = 2000.0
    tensors["v"][5] = 0
    pages = delta_states(2, shape, torch.float32)
    naive, _ = by_reference(tensors, one_prompt(64), pages.states)
    (exact, _), (lost, _) = exactly(
        lambda: by_reference(widened(tensors), one_prompt(64), pages.states.double())
    )
    out = torch.empty_like(tensors["v"])

    delta_scan(out, pages.states, **tensors, **one_prompt(64))

    check_close(out, exact, naive, slack=lost)


def test_delta_scan_reaches_past_2_to_the_31_elements():
    num_slots = 2**31 // (1 << 20) + 3
    # Slots nobody touches cost no memory, so this arena is mostly not there.
    arena = torch.empty(num_slots, 1 << 20, dtype=torch.float32, device=DEVICE)
    states = arena[:, -256:].unflatten(1, (1, 16, 16))
    shape = (1, 1, 16, 16)
    tensors = delta_tensors(3, shape, torch.float32, generator(2))
    few = delta_states(2, shape, torch.float32)
    out, stepped, want = (torch.empty_like(tensors["v"]) for _ in range(3))
    starts, none, last = i32([0, 3]), i32([0]), i32([num_slots - 1])

    delta_scan(out, states, **tensors, query_starts=starts, initial_slots=none, state_slots=last)
    delta_scan(want, few.states, **tensors, **one_prompt(3))
    scanned = states[-1].clone()
    for token in range(3):
        delta_update(
            stepped[token : token + 1],
            states,
            **tokens_of(tensors, slice(token, token + 1)),
            initial_slots=last if token else none,
            state_slots=last,
        )

    assert arena.numel() > 2**31
    assert torch.equal(scanned, few.states[1])
    assert torch.equal(out, want)
    assert max_error(states[-1], scanned) < 1e-6
    assert max_error(stepped, out) < 1e-6


def good_call():
    tensors, slots, pages, _ = arguments((1, 2, 16, 16), [4, 5], torch.float32, torch.float32)
    return {
        "out": torch.full_like(tensors["v"], float("nan")),
        "states": pages.states,
        **tensors,
        **slots,
    }


BAD_ARGUMENTS = {
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].half()}),
    "states_of_other_heads": ("states", lambda a: {"states": a["states"][:, :1]}),
    "states_of_integers": ("states", lambda a: {"states": a["states"].int()}),
    "v_without_heads": ("v", lambda a: {"v": a["v"][:, 0]}),
    "scattered_keys": ("k", lambda a: {"k": a["k"].repeat(1, 1, 2)[..., ::2]}),
    "query_starts_past_the_tokens": ("query_starts", lambda _: {"query_starts": i32([0, 4, 10])}),
    "query_starts_that_fall": ("query_starts", lambda _: {"query_starts": i32([0, 5, 4])}),
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
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_delta_scan_refuses(name, change):
    args = on_cpu(good_call())
    changed = on_cpu(args | change(args))
    out, states = changed["out"].clone(), changed["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        delta_scan(**changed)

    assert torch.equal(changed["out"].isnan(), out.isnan())
    assert torch.equal(changed["states"].nan_to_num(7), states.nan_to_num(7))


def compile_scans(channels, **choice):
    kept = Checkpoints(starts=i32([0, 1]), after_tokens=i32([3]), slots=i32([1]))
    for dtype, state_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        tensors = delta_tensors(16, (16, 32, 128, 128), dtype, generator(0), channels=channels)
        states = torch.zeros(2, 32, 128, 128, dtype=state_dtype)
        delta_scan(tensors["v"], states, **tensors, **one_prompt(16), checkpoints=kept, **choice)


def compile_heads():
    compile_scans(channels=False, is_portable=False)


def compile_channels():
    compile_scans(channels=True, is_portable=False)


def compile_heads_as_anywhere():
    compile_scans(channels=False, is_portable=True)


def compile_channels_as_anywhere():
    compile_scans(channels=True, is_portable=True)


@pytest.mark.slow
@pytest.mark.parametrize("job", [compile_heads, compile_channels])
def test_delta_scan_whose_loads_run_ahead_compiles_to_warpgroup_products(job):
    kernels = compile_job(job, HOPPER)

    ahead = [kernel for kernel in kernels if kernel.name == "delta_scan_hopper_kernel"]
    assert len(ahead) == 2
    for kernel in ahead:
        assert kernel.stack_bytes == 0, kernel
        # States, and what becomes of them, are left operands as they are.
        assert kernel.counts["wgmma"] == kernel.counts["wgmma_of_registers"] == 28, kernel
        # Of two chunks before the loop, and of one in it.
        assert kernel.counts["tma"] == (27 if job is compile_channels else 21), kernel
        assert kernel.loop_instructions <= (690 if job is compile_channels else 800), kernel
        assert kernel.num_lost_descriptors == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[HOPPER], kernel


def compile_few_and_many():
    for num_requests, channels in ((2, False), (2, True), (3, False)):
        num_tokens = 16 * num_requests
        sizes = (16, 32, 128, 128)
        tensors = delta_tensors(num_tokens, sizes, BF16, generator(0), channels=channels)
        requests = i32(range(1, num_requests + 1))
        slots = {"initial_slots": requests, "state_slots": requests}
        starts = i32(range(0, num_tokens + 1, 16))
        states = torch.zeros(num_requests + 1, 32, 128, 128)
        delta_scan(tensors["v"], states, **tensors, **slots, query_starts=starts)


@pytest.mark.slow
def test_delta_scan_of_few_heads_leaves_hoppers_own_kernel_out():
    """Two requests of 32 heads have 128 programs of it, on 132 processors."""
    kernels = compile_job(compile_few_and_many, HOPPER)

    walks = [kernel for kernel in kernels if "scan" in kernel.name]
    assert [(kernel.name, kernel.grid[1]) for kernel in walks] == [
        ("delta_scan_kernel", 2),
        ("delta_scan_hopper_kernel", 2),  # channels decay on their own
        ("delta_scan_hopper_kernel", 3),
    ]
    # Two programs of many run on a processor, three of those that prepare their chunks.
    assert 2 * (walks[2].shared_bytes + 1024) <= 228 << 10
    chunks = [kernel for kernel in kernels if kernel.name == "delta_chunks_heads_kernel"]
    for kernel in chunks:
        assert kernel.registers <= 168
        assert 3 * (kernel.shared_bytes + 1024) <= 228 << 10


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 89, 120])
@pytest.mark.parametrize("job", [compile_heads_as_anywhere, compile_channels_as_anywhere])
def test_delta_scan_compiles_to_matrix_instructions_without_spills(job, capability):
    kernels = compile_job(job, capability)

    assert len(kernels) == 5
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
    in_half = [kernel for kernel in kernels if kernel.counts["mma"] + kernel.counts["wgmma"]]
    assert len(in_half) == 3
    for kernel in in_half:
        assert kernel.counts["load_128"] >= 8, kernel
        assert kernel.counts["store_128"] >= 6, kernel
        assert kernel.num_lost_descriptors == 0, kernel
        if capability == HOPPER:
            assert kernel.counts["wgmma"] >= 32, kernel
    chunks = in_half[0]
    # Of queries and keys with all keys, and two for each doubling of the inverse's blocks; those
    # of small blocks are a warp's own.
    assert chunks.counts["mma"] == (12 if capability == HOPPER else 92), chunks
    if capability == HOPPER and job is compile_channels_as_anywhere:
        # Left factors of rows and keys lie in shared memory, or registers would not suffice.
        assert chunks.counts["wgmma"] - chunks.counts["wgmma_of_registers"] == 40, chunks
    for kernel in in_half[1:]:
        # Five products of tiles a chunk.
        assert kernel.counts["mma"] == (0 if capability == HOPPER else 96), kernel
        # The next chunk's tiles come while this one is worked on: a turn waits for its own only.
        assert kernel.name == "delta_scan_kernel"
        if capability == HOPPER:
            assert kernel.counts["cp_async_ahead"] == 1, kernel
        # With loads in flight, products of registers could run on into the next turn of the loop.
        assert kernel.counts["wgmma_of_registers"] == 0, kernel
        assert kernel.counts["cp_async"] >= 16, kernel
        # All 16 bytes a thread but decays: two at three places, four by Triton 3.6.
        assert kernel.counts["load_128"] >= kernel.counts["cp_async"] - 12, kernel
        assert kernel.registers <= 240, kernel

"""Steps of `delta_replay` that write every state, between steps that do not."""

import pytest
import torch

from jenga_kernels.checks.histories import DeltaHistory, next_states
from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.recurrent.delta_replay import delta_replay
from jenga_kernels.recurrent.delta_update import delta_update
from jenga_kernels.reference.recurrent import delta_update as plain
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.crossed import crossed
from tests.kernels.delta.delta_cases import delta_tensors, tokens_of
from tests.kernels.delta.test_delta_replay import (
    DTYPES,
    GATES,
    KIMI,
    NUM_SLOTS,
    OLMO,
    OPTIONS,
    QWEN3_NEXT,
    arguments,
    check_call,
    good_call,
    memory,
)
from tests.kernels.recurrent.state_cases import PADDING, far_apart, i32, on_cpu, widened
from tests.kernels.support import DEVICE, check_close, generator, max_error

WRITES = {"query_starts": None, "writes_states": True}

# As in `test_delta_replay`: heads of queries and of values, elements of keys and of values; rows of
# the history; and of each request its tokens, those before them, those in its state before and
# after.
NO_PAST = ((2, 4, 128, 64), 16, [(1, 0, 0, 1), (1, 7, 7, 8), (PADDING, 0, 0, 0), (1, 31, 31, 32)])
CASES = {
    "no_past": NO_PAST,
    "some_past": (
        (2, 4, 32, 48),
        16,
        [(1, 30, 15, 31), (1, 3, 0, 4), (PADDING, 0, 0, 0), (1, 32, 31, 33), (1, 9, 9, 10)],
    ),
    "odd_sizes_and_three_values_a_query": (
        (1, 3, 40, 24),
        5,
        [(1, 9, 5, 10), (1, 4, 0, 5), (1, 6, 6, 7)],
    ),
}


@crossed({"case": CASES, "channels": GATES, "dtype, state_dtype": DTYPES})
def test_a_call_that_writes_every_state_matches_the_rule(case, channels, dtype, state_dtype):
    tensors, counts, kept = arguments(case, dtype, state_dtype, channels=channels)

    check_call(tensors, counts | WRITES, kept)


def test_changes_may_be_more_precise_than_states():
    tensors, counts, kept = arguments(
        CASES["some_past"], torch.float16, torch.float16, change_dtype=torch.float32
    )

    check_call(tensors, counts | WRITES, kept)


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("change", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_call_that_writes_every_state_with_options(change, channels):
    case = ((1, 2, 32, 16), 16, [(1, 9, 4, 10), (1, 7, 7, 8)])
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)

    check_call(tensors | change(tensors), counts | WRITES, kept)


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_without_a_past_a_call_does_what_an_update_does(dtype, channels):
    tensors, counts, kept = arguments(NO_PAST, dtype, dtype, channels=channels)
    copied, slots = kept.changed(torch.clone), counts["slots"]
    out, want = (torch.full_like(tensors["v"], float("nan")) for _ in range(2))
    begins = torch.where(counts["state_tokens"] > 0, slots, NULL_SLOT)

    delta_update(want, copied.states, **tensors, initial_slots=begins, state_slots=slots)
    delta_replay(out, kept.states, kept.history, **tensors, **counts | WRITES)

    # A GPU's compiler may fuse other products with sums.
    limit = 0 if DEVICE.type == "cpu" else 8 * torch.finfo(dtype).eps
    for got, expected in ((out, want), (kept.states.nan_to_num(7), copied.states.nan_to_num(7))):
        error, greatest = max_error(got, expected), expected.abs().max().item()
        assert error <= limit * greatest


@crossed({"least_requests": [1, 3, 99], "history_tokens": [2, 5], "channels": GATES})
def test_requests_that_come_and_go_end_as_they_would_alone(
    least_requests, history_tokens, channels
):
    # Steps of at least so many requests replay, as in an engine. Some are padded.
    shape, lengths = (1, 2, 32, 16), [18, 13, 9, 16, 7, 12]
    rng = generator(history_tokens + least_requests)
    requests = [delta_tensors(n, shape, torch.float32, rng, channels=channels) for n in lengths]
    same = {name: requests[0][name] for name in ("A_log", "dt_bias")}
    requests = [request | same for request in requests]
    kept = memory(shape, history_tokens, torch.float32, torch.float32, channels=channels)
    got = [torch.empty_like(request["v"]) for request in requests]
    computed, stored, ways = [0] * len(lengths), [0] * len(lengths), []
    while running := [index for index, n in enumerate(lengths) if computed[index] < n]:
        wanted = 1 + int(torch.randint(len(running), (), generator=rng))
        chosen = [running[i] for i in torch.randperm(len(running), generator=rng)[:wanted]]
        padding = [PADDING] * int(torch.randint(2, (), generator=rng))
        ids = chosen + padding
        rows = [(requests[i], computed[i]) for i in chosen] + [(requests[0], 0)] * len(padding)
        tokens = [tokens_of(request, slice(token, token + 1)) for request, token in rows]
        step = {
            name: torch.cat([each[name] for each in tokens])
            for name in ("q", "k", "v", "gates", "betas")
        }
        counts = {
            "slots": i32([NULL_SLOT if i == PADDING else 1 + i for i in ids]),
            "computed_tokens": i32([0 if i == PADDING else computed[i] for i in ids]),
            "state_tokens": i32([0 if i == PADDING else stored[i] for i in ids]),
        }
        writes = len(ids) < least_requests
        before = {name: counts[name] for name in ("computed_tokens", "state_tokens")}
        after = next_states(**before, history_tokens=history_tokens, writes_states=writes)
        out = torch.empty_like(step["v"])

        delta_replay(
            out,
            kept.states,
            kept.history,
            **step | same,
            **counts,
            next_state_tokens=after,
            writes_states=writes,
        )

        for row, index in enumerate(chosen):
            got[index][computed[index]] = out[row]
            computed[index], stored[index] = computed[index] + 1, int(after[row])
        ways.append(writes)

    assert len(set(ways)) == (1 if least_requests in (1, 99) else 2)
    for request, out in zip(requests, got, strict=True):
        check_alone(request, out, shape, history_tokens)


def check_alone(tensors, out, shape, history_tokens):
    """Check outputs of a request against steps that write every state."""
    _, num_v_heads, head_k_dim, head_v_dim = shape

    def by_steps(tensors):
        want = torch.empty_like(tensors["v"])
        states = torch.zeros(2, num_v_heads, head_v_dim, head_k_dim, dtype=want.dtype)
        plain.delta_update(
            want,
            states.to(DEVICE),
            **tensors,
            initial_slots=i32([NULL_SLOT]),
            state_slots=i32([[1] * len(want)]),
            query_starts=i32([0, len(want)]),
        )
        return want

    (exact,), (lost,) = exactly(lambda: (by_steps(widened(tensors)),))
    # Over a history, too, products are summed: each rounding adds a step of a random walk.
    slack = history_tokens**0.5 * torch.finfo(torch.float32).eps * exact.abs().max().item()
    check_close(out, exact, by_steps(tensors), slack=slack + lost)


@crossed({"dim": {"slots": 0, "heads": 1, "rows": 2}, "channels": GATES})
def test_a_call_that_writes_states_reaches_past_2_to_the_31_elements(dim, channels):
    requests = [(1, 12, (7, 12)[slot % 2], 13) for slot in range(1, NUM_SLOTS)]
    case = ((2, 2, 16, 16), 8, requests)
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    # Elements nobody touches cost no memory, so this arena is mostly not there.
    arena = torch.empty(2**31 + (1 << 20), dtype=torch.float32, device=DEVICE)
    far = {}
    for number, (name, part) in enumerate(({"states": kept.states} | kept.parts()).items()):
        # A head's decays lie next to each other.
        far_dim = 1 if dim == part.dim() - 1 else dim
        far[name] = far_apart(part, far_dim, arena, number << 17)
    out, want = (torch.full_like(tensors["v"], float("nan")) for _ in range(2))

    delta_replay(want, kept.states, kept.history, **tensors, **counts | WRITES)
    states = far.pop("states")
    delta_replay(out, states, DeltaHistory(**far), **tensors, **counts | WRITES)

    assert torch.equal(out, want)
    assert torch.equal(states.nan_to_num(7), kept.states.nan_to_num(7))


def test_a_call_that_writes_states_refuses_several_tokens():
    args = good_call()
    history = args.pop("history")
    parts = {part: getattr(history, part).cpu() for part in DeltaHistory.__slots__}
    args = on_cpu(args) | {"history": DeltaHistory(**parts)}

    with pytest.raises(ValueError, match=r"^query_starts must be None if writes_states is True"):
        delta_replay(**args, writes_states=True)

    assert args["out"].isnan().all()


NUM_COMPILED = 8


def compile_writes_and_updates():
    for state_dtype in (torch.float32, torch.bfloat16):
        for num_qk_heads, num_v_heads, head_k_dim, head_v_dim, channels in (QWEN3_NEXT, KIMI, OLMO):
            per_token = (head_k_dim,) if channels else ()
            history = DeltaHistory(
                changes=torch.zeros(9, num_v_heads, 16, head_v_dim, dtype=state_dtype),
                keys=torch.zeros(9, num_qk_heads, 16, head_k_dim, dtype=torch.bfloat16),
                decays=torch.zeros(9, num_v_heads, 16, *per_token),
            )
            q = torch.zeros(NUM_COMPILED, num_qk_heads, head_k_dim, dtype=torch.bfloat16)
            v = torch.zeros(NUM_COMPILED, num_v_heads, head_v_dim, dtype=torch.bfloat16)
            gates = torch.zeros(NUM_COMPILED, num_v_heads, *per_token, dtype=torch.bfloat16)
            states = torch.zeros(9, num_v_heads, head_v_dim, head_k_dim, dtype=state_dtype)
            inputs, slots = (q, q, v, gates, v[:, :, 0].contiguous()), i32(range(1, 9))
            options = {
                "A_log": torch.zeros(num_v_heads),
                "dt_bias": torch.zeros(num_v_heads, *per_token),
            }
            nine, ten = i32([9] * NUM_COMPILED), i32([10] * NUM_COMPILED)
            delta_replay(
                v, states, history, *inputs, slots, nine, nine, ten, **options, writes_states=True
            )
            delta_update(v, states, *inputs, slots, slots, **options)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_calls_that_write_states_load_and_store_a_state_as_updates_do(capability):
    kernels = compile_job(compile_writes_and_updates, capability)

    writes = [kernel for kernel in kernels if kernel.name == "delta_replay_write_kernel"]
    updates = [kernel for kernel in kernels if kernel.name == "delta_update_kernel"]
    assert len(writes) == len(updates) == 6
    for write, update in zip(writes, updates, strict=True):
        assert write.stack_bytes == 0, write
        assert write.num_warps == update.num_warps == 1
        assert write.grid == update.grid
        for wide in ("load_128", "store_128"):
            assert write.counts[wide] >= update.counts[wide] > 0, (write, update)
        # As many programs share a multiprocessor, except if channels decay on their own.
        if write.counts["load_128"] == update.counts["load_128"]:
            assert write.registers <= 128, (write, update)

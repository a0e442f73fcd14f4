"""Steps of `state_replay` that write every state, between steps that do not."""

import pytest
import torch

from jenga_kernels.checks.histories import InputHistory, next_states
from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.recurrent.state_replay import state_replay
from jenga_kernels.recurrent.state_update import state_update
from jenga_kernels.reference.recurrent import state_update as plain
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.mamba.test_state_replay import (
    DTYPE_IDS,
    DTYPES,
    NUM_SLOTS,
    SHAPES,
    arguments,
    check_call,
    good_call,
    memory,
    tokens_of,
)
from tests.kernels.recurrent.state_cases import (
    PADDING,
    far_apart,
    i32,
    on_cpu,
    recurrence_tensors,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator, max_error

WRITES = {"query_starts": None, "writes_states": True}

# As in `test_state_replay`: heads, channels of a head, state elements, groups; rows of the history;
# and of each request its tokens, those before them, those in its state before and after.
NO_PAST = ((4, 64, 128, 2), 16, [(1, 0, 0, 1), (1, 7, 7, 8), (PADDING, 0, 0, 0), (1, 31, 31, 32)])
CASES = {
    "no_past": NO_PAST,
    "some_past": (
        (4, 16, 16, 2),
        16,
        [(1, 30, 15, 31), (1, 3, 0, 4), (PADDING, 0, 0, 0), (1, 32, 31, 33), (1, 9, 9, 10)],
    ),
    "odd_sizes": ((3, 24, 40, 1), 5, [(1, 9, 5, 10), (1, 4, 0, 5), (1, 6, 6, 7)]),
    "wide_state": ((2, 32, 256, 1), 16, [(1, 100, 88, 101), (1, 5, 5, 6)]),
}


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_call_that_writes_every_state_matches_the_recurrence(case, dtype, state_dtype):
    tensors, counts, kept = arguments(case, dtype, state_dtype)

    check_call(tensors, counts | WRITES, kept)


@pytest.mark.parametrize("left_out", [["D"], ["z"], ["dt_bias"], ["D", "z", "dt_bias"]], ids=str)
def test_optional_tensors_may_be_left_out(left_out):
    tensors, counts, kept = arguments(CASES["some_past"], torch.float32, torch.float32)
    tensors |= dict.fromkeys(left_out)
    tensors["dt"] = tensors["dt"].abs()
    options = {"dt_softplus": "z" in left_out, "dt_limits": (0.25, 0.75)}

    check_call(tensors | options, counts | WRITES, kept)


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES[:2], ids=DTYPE_IDS[:2])
def test_without_a_past_a_call_does_what_an_update_does(dtype, state_dtype):
    tensors, counts, kept = arguments(NO_PAST, dtype, state_dtype)
    copied, slots = kept.copy(), counts["slots"]
    out, want = (torch.full_like(tensors["x"], float("nan")) for _ in range(2))
    begins = torch.where(counts["state_tokens"] > 0, slots, NULL_SLOT)

    state_update(want, copied.states, **tensors, initial_slots=begins, state_slots=slots)
    state_replay(out, kept.states, kept.history, **tensors, **counts | WRITES)

    # A GPU's compiler may fuse other products with sums.
    limit = 0 if DEVICE.type == "cpu" else 8 * torch.finfo(dtype).eps
    for got, expected in ((out, want), (kept.states.nan_to_num(7), copied.states.nan_to_num(7))):
        error, greatest = max_error(got, expected), expected.abs().max().item()
        assert error <= limit * greatest


@pytest.mark.parametrize("history_tokens", [2, 5])
@pytest.mark.parametrize("least_requests", [1, 3, 99])
def test_requests_that_come_and_go_end_as_they_would_alone(least_requests, history_tokens):
    # Steps of at least so many requests replay, as in an engine. Some are padded.
    shape, lengths = (2, 16, 16, 1), [18, 13, 9, 16, 7, 12]
    rng = generator(history_tokens + least_requests)
    requests = [recurrence_tensors(n, "heads", shape, torch.float32, rng) for n in lengths]
    same = {name: requests[0][name] for name in ("A", "D", "dt_bias")}
    requests = [request | same for request in requests]
    kept = memory(shape, history_tokens, torch.float32, torch.float32)
    got = [torch.empty_like(request["x"]) for request in requests]
    computed, stored, ways = [0] * len(lengths), [0] * len(lengths), []
    while running := [index for index, n in enumerate(lengths) if computed[index] < n]:
        wanted = 1 + int(torch.randint(len(running), (), generator=rng))
        chosen = [running[i] for i in torch.randperm(len(running), generator=rng)[:wanted]]
        padding = [PADDING] * int(torch.randint(2, (), generator=rng))
        ids = chosen + padding
        rows = [(requests[i], computed[i]) for i in chosen] + [(requests[0], 0)] * len(padding)
        tokens = [tokens_of(request, slice(token, token + 1)) for request, token in rows]
        step = {
            name: torch.cat([each[name] for each in tokens]) for name in ("x", "dt", "B", "C", "z")
        }
        counts = {
            "slots": i32([NULL_SLOT if i == PADDING else 1 + i for i in ids]),
            "computed_tokens": i32([0 if i == PADDING else computed[i] for i in ids]),
            "state_tokens": i32([0 if i == PADDING else stored[i] for i in ids]),
        }
        writes = len(ids) < least_requests
        before = {name: counts[name] for name in ("computed_tokens", "state_tokens")}
        after = next_states(**before, history_tokens=history_tokens, writes_states=writes)
        out = torch.empty_like(step["x"])

        state_replay(
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

    def by_steps(tensors):
        want = torch.empty_like(tensors["x"])
        plain.state_update(
            want,
            torch.zeros(2, *shape[:3], dtype=want.dtype, device=DEVICE),
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


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["slots", "heads", "rows"])
def test_a_call_that_writes_states_reaches_past_2_to_the_31_elements(dim):
    requests = [(1, 12, (7, 12)[slot % 2], 13) for slot in range(1, NUM_SLOTS)]
    tensors, counts, kept = arguments(((2, 16, 16, 2), 8, requests), torch.float32, torch.float32)
    # Elements nobody touches cost no memory, so this arena is mostly not there.
    arena = torch.empty(2**31 + (1 << 20), dtype=torch.float32, device=DEVICE)
    parts = {"states": kept.states, "x": kept.history.x, "B": kept.history.B}
    parts["dt"] = kept.history.dt
    far = {}
    for number, (name, part) in enumerate(parts.items()):
        # A head's step sizes lie next to each other.
        far_dim = 1 if dim == part.dim() - 1 else dim
        far[name] = far_apart(part, far_dim, arena, number << 17)
    out, want = (torch.full_like(tensors["x"], float("nan")) for _ in range(2))

    state_replay(want, kept.states, kept.history, **tensors, **counts | WRITES)
    states = far.pop("states")
    state_replay(out, states, InputHistory(**far), **tensors, **counts | WRITES)

    assert torch.equal(out, want)
    assert torch.equal(states.nan_to_num(7), kept.states.nan_to_num(7))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("query_starts", {}),
        ("next_state_tokens", {"query_starts": None}),
    ],
)
def test_a_call_that_writes_states_refuses(name, changes):
    args = good_call()
    history = args["history"]
    args = on_cpu(args) | {
        "history": InputHistory(x=history.x.cpu(), dt=history.dt.cpu(), B=history.B.cpu())
    }
    first = {"slots", "computed_tokens", "state_tokens", "next_state_tokens"}
    if "query_starts" in changes:  # five requests of one token, whose states are not written
        args |= {key: args[key][:5] for key in ("out", "x", "dt", "B", "C", "z")}
        args |= {key: args[key][[0] * 5] for key in first} | {"slots": i32(range(1, 6)).cpu()}

    with pytest.raises(ValueError, match=f"^{name} must be .*writes_states is True"):
        state_replay(**args | changes, writes_states=True)

    assert args["out"].isnan().all()


def compile_writes_and_updates():
    num_requests = 8
    for state_dtype in (torch.float32, torch.bfloat16):
        for num_heads, head_dim, d_state, num_groups in SHAPES:
            x = torch.zeros(num_requests, num_heads, head_dim, dtype=torch.bfloat16)
            B = torch.zeros(num_requests, num_groups, d_state, dtype=torch.bfloat16)
            states = torch.zeros(9, num_heads, head_dim, d_state, dtype=state_dtype)
            history = InputHistory(
                x=torch.zeros(9, num_heads, 16, head_dim, dtype=torch.bfloat16),
                dt=torch.zeros(9, num_heads, 16),
                B=torch.zeros(9, num_groups, 16, d_state, dtype=torch.bfloat16),
            )
            dt, slots = x[:, :, 0].contiguous(), i32(range(1, 9))
            inputs = (x, dt, torch.zeros(num_heads), B, B)
            options = {"D": torch.zeros(num_heads), "dt_bias": torch.zeros(num_heads)}
            nine, ten = i32([9] * num_requests), i32([10] * num_requests)
            state_replay(
                x, states, history, *inputs, slots, nine, nine, ten, **options, writes_states=True
            )
            state_update(x, states, *inputs, slots, slots, **options)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_calls_that_write_states_load_and_store_a_state_as_updates_do(capability):
    kernels = compile_job(compile_writes_and_updates, capability)

    writes = [kernel for kernel in kernels if kernel.name == "state_replay_write_kernel"]
    updates = [kernel for kernel in kernels if kernel.name == "state_update_kernel"]
    assert len(writes) == len(updates) == 2 * len(SHAPES)
    for write, update in zip(writes, updates, strict=True):
        assert write.stack_bytes == 0, write
        assert write.num_warps == update.num_warps == 1
        assert write.grid == update.grid
        for wide in ("load_128", "store_128"):
            assert write.counts[wide] >= update.counts[wide] > 0, (write, update)
        # As many programs share a multiprocessor: its 32 slots take 64 registers of a thread each.
        assert write.registers <= max(64, update.registers + 8), (write, update)

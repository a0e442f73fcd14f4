import math
from dataclasses import dataclass, replace

import pytest
import torch

from jenga_kernels.checks import tensors as checks
from jenga_kernels.checks.histories import InputHistory, next_states
from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.recurrent import state_replay as module
from jenga_kernels.recurrent.state_replay import state_replay
from jenga_kernels.reference.recurrent import state_replay as reference
from jenga_kernels.reference.recurrent import state_update as plain
from jenga_kernels.triton.recurrent.tiles import ReplayTiles
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.crossed import crossed
from tests.kernels.recurrent.state_cases import (
    PADDING,
    far_apart,
    i32,
    on_cpu,
    recurrence_tensors,
    same_elsewhere,
    shuffled_slots,
    state_pages,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator, max_error, randn

NUM_SLOTS = 16
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    pytest.param(torch.float16, torch.float16, marks=pytest.mark.slow),
]
DTYPE_IDS = ["f32", "bf16_state_f32", "bf16", "f16"]


@dataclass(frozen=True)
class Memory:
    """A layer's states and histories in arenas with other layers, every element NaN."""

    states: torch.Tensor
    history: InputHistory
    arenas: tuple

    def copy(self):
        return Memory(
            self.states.clone(),
            InputHistory(
                x=self.history.x.clone(), dt=self.history.dt.clone(), B=self.history.B.clone()
            ),
            (),
        )

    def in_float64(self):
        return Memory(
            self.states.double(),
            InputHistory(
                x=self.history.x.double(), dt=self.history.dt.double(), B=self.history.B.double()
            ),
            (),
        )


def memory(shape, history_tokens, dtype, state_dtype):
    num_heads, head_dim, d_state, num_groups = shape
    states = state_pages(NUM_SLOTS, shape[:3], state_dtype)
    x = state_pages(NUM_SLOTS, (num_heads, history_tokens, head_dim), dtype)
    dt = state_pages(NUM_SLOTS, (num_heads, history_tokens), torch.float32)
    B = state_pages(NUM_SLOTS, (num_groups, history_tokens, d_state), dtype)
    return Memory(
        states.states,
        InputHistory(x=x.states, dt=dt.states, B=B.states),
        (states.arena, x.arena, dt.arena, B.arena),
    )


# heads, channels of a head, state elements, groups; rows of the history; and of each request its
# tokens, those before them, those in its state before and after.
ONE_TOKEN = {
    "beginning": ((4, 16, 16, 2), 8, [(1, 0, 0, 0), (1, 0, 0, 1)]),
    "early_and_late": (
        (4, 64, 128, 2),
        16,
        [(1, 7, 7, 7), (1, 30, 15, 15), (PADDING, 0, 0, 0), (1, 30, 15, 31), (1, 31, 20, 31)],
    ),
    "odd_sizes": ((3, 24, 40, 1), 5, [(1, 9, 5, 5), (1, 9, 5, 10), (1, 3, 0, 0), (1, 4, 0, 5)]),
    "wide_state": ((2, 32, 256, 1), 16, [(1, 100, 88, 88), (1, 100, 88, 101)]),
}
SEVERAL_TOKENS = {
    "drafts": (
        (4, 16, 32, 2),
        16,
        [(4, 10, 5, 5), (4, 12, 0, 13), (4, 16, 4, 16), (4, 16, 4, 18), (4, 3, 3, 7)],
    ),
    "lengths": (
        (3, 24, 40, 1),
        12,
        [(8, 4, 1, 1), (0, 9, 5, 9), (1, 9, 5, 5), (PADDING, 0, 0, 0), (2, 0, 0, 1), (0, 9, 5, 5)],
    ),
}


def arguments(case, dtype, state_dtype):
    """Tensors, counts and a memory in which no element that may be read is NaN."""
    shape, history_tokens, requests = case
    if dtype != torch.float32 and shape[2] % 8:
        shape = (*shape[:2], 24, shape[3])
    rng = generator(0)
    free = shuffled_slots(NUM_SLOTS - 1, NUM_SLOTS, rng)
    starts = [0]
    counts = {"slots": [], "computed_tokens": [], "state_tokens": [], "next_state_tokens": []}
    kept = memory(shape, history_tokens, dtype, state_dtype)
    for tokens, computed, stored, stored_next in requests:
        starts.append(starts[-1] + (1 if tokens == PADDING else tokens))
        slot = NULL_SLOT if tokens == PADDING else free.pop()
        for name, value in zip(counts, (slot, computed, stored, stored_next), strict=True):
            counts[name].append(value)
        if slot != NULL_SLOT and stored:
            kept.states[slot] = randn(shape[:3], state_dtype, rng)
        for token in range(stored, computed):
            row = token % history_tokens
            kept.history.x[slot, :, row] = randn(shape[:2], dtype, rng)
            kept.history.dt[slot, :, row] = randn(shape[:1], torch.float32, rng).exp()
            kept.history.B[slot, :, row] = randn((shape[3], shape[2]), dtype, rng)
    tensors = recurrence_tensors(starts[-1], "heads", shape, dtype, rng)
    counts = {name: i32(values) for name, values in counts.items()}
    return tensors, counts | {"query_starts": i32(starts)}, kept


def by_reference(tensors, counts, kept):
    out = torch.full_like(tensors["x"], float("nan"))
    reference.state_replay(out, kept.states, kept.history, **tensors, **counts)
    return out


def exactly_by_reference(tensors, counts, kept):
    """Output, states and step sizes in float64, and what each may lose."""

    def compute():
        exact = kept.in_float64()
        out = by_reference(widened(tensors), counts, exact)
        return out, exact.states, exact.history.dt

    results, (out_lost, states_lost, steps_lost) = exactly(compute)
    out, states, _ = results
    return results, (
        out_lost + lost_by_sums(out, counts),
        states_lost + lost_by_sums(states, counts),
        steps_lost,
    )


def lost_by_sums(exact, counts):
    """What results may lose because decays are exponentials of sums, not products.

    The sum `s` of the steps of n tokens is rounded n times, by at most half a unit of float32. The
    exponential of -s then errs by at most n / 2 units times s exp(-s), which is at most 1 / e.
    """
    starts = counts["query_starts"]
    new_tokens = 1 if starts is None else starts.diff()
    tokens = new_tokens + counts["computed_tokens"] - counts["state_tokens"]
    unit = torch.finfo(torch.float32).eps
    greatest = max_error(exact.nan_to_num(0), torch.zeros_like(exact))
    return tokens.max().item() / 2 * unit / math.e * greatest


def check_call(tensors, counts, kept):
    """Check what a call returns and writes."""
    before = tuple(arena.clone() for arena in kept.arenas)
    naive = kept.copy()
    naive_out = by_reference(tensors, counts, naive)
    (exact, exact_states, _), (lost, *memory_lost) = exactly_by_reference(tensors, counts, kept)
    out = torch.full_like(tensors["x"], float("nan"))

    state_replay(out, kept.states, kept.history, **tensors, **counts)

    check_close(out, exact, naive_out, slack=lost)
    check_memory(kept, exact_states, naive, before, counts, *memory_lost)


def check_memory(kept, exact_states, naive, before, counts, states_lost, steps_lost):
    """Check that what is to be written is right, and that nothing else is touched."""
    slots = counts["slots"].tolist()
    stored, stored_next = counts["state_tokens"].tolist(), counts["next_state_tokens"].tolist()
    requests = zip(slots, stored, stored_next, strict=True)
    written = [slot for slot, was, will in requests if slot != NULL_SLOT and will > was]
    check_close(
        kept.states[written], exact_states[written], naive.states[written], slack=states_lost
    )
    states, x, dt, B = kept.arenas
    assert same_elsewhere(states, before[0], written)
    live = [slot for slot in slots if slot != NULL_SLOT]
    for arena, old in zip((x, dt, B), before[1:], strict=True):
        assert same_elsewhere(arena, old, live)
    same = {"atol": 0, "rtol": 0, "equal_nan": True}
    torch.testing.assert_close(kept.history.x[live], naive.history.x[live], **same)
    torch.testing.assert_close(kept.history.B[live], naive.history.B[live], **same)
    same |= {"atol": 1e-6 + steps_lost, "rtol": 1e-6}
    torch.testing.assert_close(kept.history.dt[live], naive.history.dt[live], **same)


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    "case", [*ONE_TOKEN.values(), *SEVERAL_TOKENS.values()], ids=[*ONE_TOKEN, *SEVERAL_TOKENS]
)
def test_state_replay_matches_the_recurrence(case, dtype, state_dtype):
    tensors, counts, kept = arguments(case, dtype, state_dtype)
    if all(tokens in (1, PADDING) for tokens, *_ in case[2]):
        counts["query_starts"] = None
    check_call(tensors, counts, kept)


@pytest.mark.parametrize("case", [ONE_TOKEN["beginning"], SEVERAL_TOKENS["drafts"]], ids=str)
def test_a_call_like_an_earlier_one_serves_its_own_tensors(case, monkeypatch):
    # As on a GPU: values are not checked, so the second call only launches.
    monkeypatch.setattr(checks, "LOOKS_AT_VALUES", False)
    monkeypatch.setattr(module, "_calls", {})
    calls = [arguments(case, torch.bfloat16, torch.float32) for _ in range(2)]

    for tensors, counts, kept in calls:
        if case == ONE_TOKEN["beginning"]:
            counts["query_starts"] = None
        check_call(tensors, counts, kept)

    assert len(module._calls) == 1


@pytest.mark.parametrize("case", SEVERAL_TOKENS.values(), ids=SEVERAL_TOKENS.keys())
def test_tokens_at_once_or_one_by_one_give_what_the_recurrence_gives(case, monkeypatch):
    # The kernel that this machine would not take.
    chosen = module.state_replay_tiles

    def others(*args, **options):
        tiles = chosen(*args, **options)
        return replace(tiles, is_at_once=not tiles.is_at_once)

    monkeypatch.setattr(module, "state_replay_tiles", others)
    monkeypatch.setattr(module, "_calls", {})
    tensors, counts, kept = arguments(case, torch.bfloat16, torch.float32)
    check_call(tensors, counts, kept)


def tokens_of(tensors, tokens):
    """Tensors of these tokens alone."""
    per_token = ("x", "dt", "B", "C", "z")
    return {name: value[tokens] if name in per_token else value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("history_tokens", "max_query_tokens"),
    [
        (16, 1),
        (8, 4),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(16, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_of_any_lengths_with_rejected_tokens_end_as_the_accepted_ones_alone(
    history_tokens, max_query_tokens
):
    shape, num_accepted = (2, 16, 16, 1), 60
    rng = generator(history_tokens)
    tensors = recurrence_tensors(num_accepted, "heads", shape, torch.float32, rng)
    wrong = recurrence_tensors(max_query_tokens, "heads", shape, torch.float32, rng)

    def by_steps(tensors):
        out = torch.empty_like(tensors["x"])
        plain.state_update(
            out,
            torch.zeros(2, *shape[:3], dtype=out.dtype, device=DEVICE),
            **tensors,
            initial_slots=i32([NULL_SLOT]),
            state_slots=i32([[1] * num_accepted]),
            query_starts=i32([0, num_accepted]),
        )
        return out

    want = by_steps(tensors)
    (exact,), (lost,) = exactly(lambda: (by_steps(widened(tensors)),))
    kept = memory(shape, history_tokens, torch.float32, torch.float32)
    got = torch.empty_like(want)
    computed, stored, writes = 0, 0, 0
    while computed < num_accepted:
        count = 1 + int(torch.randint(max_query_tokens, (), generator=rng))
        accepted = 1 + int(torch.randint(count, (), generator=rng))
        accepted = min(accepted, num_accepted - computed)
        # What is rejected afterwards is what another request would have brought.
        parts = tokens_of(tensors, slice(computed, computed + accepted))
        others = tokens_of(wrong, slice(accepted, count))
        step = {
            name: torch.cat([value, others[name]]) if len(value) != len(tensors[name]) else value
            for name, value in parts.items()
        }
        out = torch.empty_like(step["x"])
        counts = {"computed_tokens": i32([computed]), "state_tokens": i32([stored])}
        after = next_states(
            **counts,
            query_tokens=len(out),
            history_tokens=history_tokens,
            max_query_tokens=max_query_tokens,
        )

        state_replay(
            out,
            kept.states,
            kept.history,
            **step,
            **counts,
            slots=i32([3]),
            next_state_tokens=after,
            query_starts=None if max_query_tokens == 1 else i32([0, len(out)]),
        )

        got[computed : computed + accepted] = out[:accepted]
        writes += int(after) != stored
        computed, stored = computed + accepted, int(after)
    # Over a history, too, products are summed: each rounding adds a step of a random walk.
    slack = history_tokens**0.5 * torch.finfo(torch.float32).eps * exact.abs().max().item()
    check_close(got, exact, want, slack=slack + lost)
    # As seldom as the history allows: once for as many tokens as a call may leave in it.
    assert writes <= num_accepted // (history_tokens - 2 * max_query_tokens + 2) + 1


@pytest.mark.parametrize("case", [ONE_TOKEN["early_and_late"], SEVERAL_TOKENS["drafts"]])
def test_programs_of_few_channels_give_what_larger_ones_give(case, monkeypatch):
    tensors, counts, kept = arguments(case, torch.bfloat16, torch.float32)
    results = []
    for block_dims in (16, 32):
        tiles = ReplayTiles(block_dims=block_dims, num_warps=4)
        monkeypatch.setattr(module, "state_replay_tiles", lambda *_, tiles=tiles, **__: tiles)
        monkeypatch.setattr(module, "_calls", {})
        copied = kept.copy()
        out = torch.full_like(tensors["x"], float("nan"))
        state_replay(out, copied.states, copied.history, **tensors, **counts)
        results.append((out, copied.states.nan_to_num(7), copied.history.x.nan_to_num(7)))

    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_a_call_may_be_made_again():
    # A benchmark and a graph's replay do: rows that are read are not those that are written.
    tensors, counts, kept = arguments(
        ((2, 16, 16, 1), 8, [(4, 12, 9, 9), (4, 20, 16, 16)]), torch.float32, torch.float32
    )
    outs = torch.full_like(tensors["x"], float("nan")), torch.full_like(tensors["x"], float("nan"))

    for out in outs:
        state_replay(out, kept.states, kept.history, **tensors, **counts)

    assert torch.equal(*outs)


@pytest.mark.parametrize("is_one_token", [True, False])
def test_tokens_outside_of_requests_are_left_alone(is_one_token):
    case = ONE_TOKEN["early_and_late"] if is_one_token else SEVERAL_TOKENS["drafts"]
    tensors, counts, kept = arguments(case, torch.float32, torch.float32)
    want = by_reference(tensors, counts, kept.copy())
    per_token = ("x", "dt", "B", "C", "z")
    wide = {
        name: torch.nn.functional.pad(value, [0, 0] * (value.dim() - 1) + [3, 2], value=7.0)
        if name in per_token
        else value
        for name, value in tensors.items()
    }
    counts["query_starts"] += 3
    out = torch.full_like(wide["x"], 7.0)

    state_replay(out, kept.states, kept.history, **wide, **counts)

    assert (out[:3] == 7).all()
    assert (out[-2:] == 7).all()
    assert max_error(out[3:-2], want) < 1e-4


def test_no_requests_write_nothing():
    tensors, _, kept = arguments(ONE_TOKEN["beginning"], torch.float32, torch.float32)
    before = [arena.clone() for arena in kept.arenas]
    none = i32([])
    out = torch.full_like(tensors["x"], 7.0)

    state_replay(
        out, kept.states, kept.history, **tensors, slots=none, computed_tokens=none,
        state_tokens=none, next_state_tokens=none, query_starts=i32([0]),
    )  # fmt: skip

    assert (out == 7).all()
    assert all(same_elsewhere(*both, []) for both in zip(kept.arenas, before, strict=True))


@pytest.mark.parametrize("slot", [-1, -(2**31)])
def test_slots_below_the_null_slot_are_taken_for_it(slot):
    tensors, counts, kept = arguments(ONE_TOKEN["early_and_late"], torch.float32, torch.float32)
    padded = counts["slots"].clone()
    padded[:3] = NULL_SLOT
    copied = kept.copy()
    want = by_reference(tensors, counts | {"slots": padded}, copied)
    counts["slots"][:3] = slot
    out = torch.full_like(tensors["x"], float("nan"))

    state_replay(out, kept.states, kept.history, **tensors, **counts)

    assert (out[:3] == 0).all()
    assert max_error(out, want) < 1e-4
    assert same_elsewhere(kept.states, copied.states, counts["slots"].tolist()[3:])


def test_a_state_is_brought_up_to_date_without_tokens():
    shape = (2, 16, 16, 1)
    tensors, counts, kept = arguments(
        (shape, 8, [(0, 12, 5, 12), (0, 9, 9, 9)]), torch.float32, torch.float32
    )
    naive, late, fresh = kept.copy(), *counts["slots"].tolist()
    by_reference(tensors, counts, naive)
    (_, exact_states, _), (_, lost, _) = exactly_by_reference(tensors, counts, kept)

    state_replay(tensors["x"].clone(), kept.states, kept.history, **tensors, **counts)

    check_close(kept.states[late], exact_states[late], naive.states[late], slack=lost)
    assert torch.equal(kept.states[fresh], naive.states[fresh])


@pytest.mark.parametrize("left_out", [["D"], ["z"], ["dt_bias"], ["D", "z", "dt_bias"]], ids=str)
@pytest.mark.parametrize("case", [ONE_TOKEN["early_and_late"], SEVERAL_TOKENS["drafts"]])
def test_state_replay_without_optional_tensors(case, left_out):
    tensors, counts, kept = arguments(case, torch.float32, torch.float32)
    tensors |= dict.fromkeys(left_out)
    tensors["dt"] = tensors["dt"].abs()
    options = {"dt_softplus": "z" in left_out, "dt_limits": (0.25, 0.75)}
    naive = by_reference(tensors | options, counts, kept.copy())
    (exact, *_), (lost, *_) = exactly_by_reference(tensors | options, counts, kept)
    out = torch.full_like(tensors["x"], float("nan"))

    state_replay(out, kept.states, kept.history, **tensors, **counts, **options)

    check_close(out, exact, naive, slack=lost)


def test_slots_may_be_a_column_of_a_table():
    tensors, counts, kept = arguments(SEVERAL_TOKENS["drafts"], torch.float32, torch.float32)
    naive = by_reference(tensors, counts, kept.copy())
    (exact, *_), (lost, *_) = exactly_by_reference(tensors, counts, kept)
    out = torch.full_like(tensors["x"], float("nan"))
    table = torch.stack([counts["slots"], counts["slots"] + 1], dim=1)

    state_replay(out, kept.states, kept.history, **tensors, **counts | {"slots": table[:, 0]})

    check_close(out, exact, naive, slack=lost)


@crossed({"dim": {"slots": 0, "heads": 1, "rows": 2}, "tokens": [3, 1]})
def test_state_replay_reaches_past_2_to_the_31_elements(tokens, dim):
    # Every slot has a request, so that one is in the last.
    requests = [(tokens, 12, 7, (7, 13)[slot % 2]) for slot in range(1, NUM_SLOTS)]
    case = ((2, 16, 16, 2), 8, requests)
    tensors, counts, kept = arguments(case, torch.float32, torch.float32)
    if tokens == 1:
        counts["query_starts"] = None
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

    state_replay(want, kept.states, kept.history, **tensors, **counts)
    states = far.pop("states")
    state_replay(out, states, InputHistory(**far), **tensors, **counts)

    assert torch.equal(out, want)
    for name, part in [("states", states), *far.items()]:
        assert torch.equal(part.nan_to_num(7), parts[name].nan_to_num(7))


@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_step_sizes_far_apart_lose_nothing_to_sums(size):
    # A state that has all but gone, and tokens of which only the latest count.
    shape, history_tokens = (2, 16, 16, 1), 16
    tensors, counts, kept = arguments(
        (shape, history_tokens, [(1, 15, 0, 0), (1, 40, 25, 41)]), torch.float32, torch.float32
    )
    kept.history.dt.mul_(size)
    naive, slot = kept.copy(), int(counts["slots"][1])
    naive_out = by_reference(tensors, counts, naive)
    (exact, exact_states, _), (lost, states_lost, _) = exactly_by_reference(tensors, counts, kept)
    out = torch.full_like(tensors["x"], float("nan"))

    state_replay(out, kept.states, kept.history, **tensors, **counts)

    check_close(out, exact, naive_out, slack=lost)
    check_close(kept.states[slot], exact_states[slot], naive.states[slot], slack=states_lost)


def test_states_are_written_once_the_history_is_full():
    computed, stored, writes = i32([0]), i32([0]), []
    for token in range(40):
        after = next_states(computed, stored, history_tokens=16)
        if int(after) != int(stored):
            writes.append(token)
        computed, stored = computed + 1, after

    assert writes == [15, 31]


def test_next_states_refuse_a_history_of_less_than_two_calls():
    with pytest.raises(ValueError, match=r"^history_tokens must be at least 8 for 4 tokens"):
        next_states(i32([0]), i32([0]), history_tokens=7, max_query_tokens=4)


def good_call():
    tensors, counts, kept = arguments(SEVERAL_TOKENS["drafts"], torch.float32, torch.float32)
    out = torch.full_like(tensors["x"], float("nan"))
    return {"out": out, "states": kept.states, "history": kept.history, **tensors, **counts}


def changed_history(args, **changes):
    history = args["history"]
    parts = {"x": history.x, "dt": history.dt, "B": history.B}
    return {"history": InputHistory(**(parts | changes))}


BAD_ARGUMENTS = {
    "decays_of_channels": ("A", lambda a: {"A": a["A"][:, None, None].repeat(1, 16, 32)}),
    "a_history_of_other_heads": (
        "history.x",
        lambda a: changed_history(a, x=a["history"].x[:, :2]),
    ),
    "step_sizes_of_16_bits": (
        "history.dt",
        lambda a: changed_history(a, dt=a["history"].dt.half()),
    ),
    "a_shorter_history_of_projections": (
        "history.B",
        lambda a: changed_history(a, B=a["history"].B[:, :, :4]),
    ),
    "an_expanded_history": (
        "history.dt",
        lambda a: changed_history(a, dt=a["history"].dt[:1].expand(NUM_SLOTS, -1, -1)),
    ),
    "counts_of_64_bits": ("state_tokens", lambda a: {"state_tokens": a["state_tokens"].long()}),
    "counts_of_another_number_of_requests": (
        "computed_tokens",
        lambda a: {"computed_tokens": a["computed_tokens"][:2]},
    ),
    "a_slot_past_the_states": ("slots", lambda a: {"slots": a["slots"] + 99}),
    "a_slot_of_two_requests": ("slots", lambda a: {"slots": a["slots"] * 0 + 3}),
    "more_in_the_state_than_computed": (
        "state_tokens",
        lambda a: {"state_tokens": a["state_tokens"] + 50},
    ),
    "a_state_of_tokens_to_come": (
        "next_state_tokens",
        lambda a: {"next_state_tokens": a["computed_tokens"] + 9},
    ),
    "a_state_from_within_the_history": (
        "next_state_tokens",
        lambda a: {"next_state_tokens": a["computed_tokens"] - 1},
    ),
    "tokens_that_the_history_has_not": (
        "history",
        lambda a: dict.fromkeys(("state_tokens", "next_state_tokens"), a["state_tokens"] * 0),
    ),
    "several_tokens_without_query_starts": ("slots", lambda _: {"query_starts": None}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_state_replay_refuses(name, change):
    args = good_call()
    args = on_cpu(args) | changed_history(
        args,
        x=args["history"].x.cpu(),
        dt=args["history"].dt.cpu(),
        B=args["history"].B.cpu(),
    )
    changed = args | change(args)
    states = changed["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        state_replay(**changed)

    assert changed["out"].isnan().all()
    assert torch.equal(changed["states"].nan_to_num(7), states.nan_to_num(7))


SHAPES = ((128, 64, 128, 8), (128, 64, 128, 1), (24, 128, 256, 1), (48, 64, 64, 1))
"""Heads, channels of a head, state elements, groups."""

NUM_COMPILED = 48
"""Requests, so many that a program has several heads."""


def compile_replays():
    for state_dtype in (torch.float32, torch.bfloat16):
        for num_heads, head_dim, d_state, num_groups in SHAPES:
            for query_starts in (None, i32(range(NUM_COMPILED + 1))):
                x = torch.zeros(NUM_COMPILED, num_heads, head_dim, dtype=torch.bfloat16)
                B = torch.zeros(NUM_COMPILED, num_groups, d_state, dtype=torch.bfloat16)
                history = InputHistory(
                    x=torch.zeros(4, num_heads, 16, head_dim, dtype=torch.bfloat16),
                    dt=torch.zeros(4, num_heads, 16),
                    B=torch.zeros(4, num_groups, 16, d_state, dtype=torch.bfloat16),
                )
                state_replay(
                    x,
                    torch.zeros(4, num_heads, head_dim, d_state, dtype=state_dtype),
                    history,
                    x,
                    x[:, :, 0].contiguous(),
                    torch.zeros(num_heads),
                    B,
                    B,
                    i32([1, 2, 3] + [NULL_SLOT] * (NUM_COMPILED - 3)),
                    i32([9] * NUM_COMPILED),
                    i32([2] * NUM_COMPILED),
                    i32([2] * NUM_COMPILED),
                    query_starts=query_starts,
                    D=torch.zeros(num_heads),
                    dt_bias=torch.zeros(num_heads),
                )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_state_replay_compiles_to_wide_loads_of_a_state(capability):
    kernels = compile_job(compile_replays, capability)

    of_token = [kernel for kernel in kernels if kernel.name == "state_replay_token_kernel"]
    several = [kernel for kernel in kernels if kernel.name.startswith("state_replay_products")]
    several += [kernel for kernel in kernels if kernel.name == "state_replay_kernel"]
    assert len(of_token) == len(several) == 2 * len(SHAPES)
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
    for kernel in of_token:
        # A state's elements of a thread, 64 or more, and nothing of it narrower: what else there is
        # are the history's rows. One warp meets nobody for its sums.
        assert kernel.num_warps == 1, kernel
        assert kernel.counts["load_128"] >= 8, kernel
        assert kernel.counts["store_128"] >= 8, kernel
    for kernel in several:
        assert kernel.num_warps == 4, kernel
        assert kernel.counts["load_128"] >= 4, kernel
        assert kernel.counts["store_128"] >= 4, kernel
        assert kernel.counts["mma"] + kernel.counts["wgmma"] > 0, kernel
        # Two programs a processor.
        assert kernel.registers <= 255, kernel
    # On Hopper several tokens, but of wide states in float32; on Ampere all of states in 16 bits.
    at_once = [kernel for kernel in several if "products" in kernel.name]
    assert len(at_once) == (2 * len(SHAPES) - 1 if capability == 90 else len(SHAPES))

from dataclasses import dataclass, replace

import pytest
import torch

from jenga_kernels.checks import tensors as checks
from jenga_kernels.checks.histories import DeltaHistory, next_states
from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.recurrent import delta_replay as module
from jenga_kernels.recurrent.delta_replay import delta_replay
from jenga_kernels.reference.recurrent import delta_replay as reference
from jenga_kernels.reference.recurrent import delta_update as plain
from tests.kernels.approximations import exactly
from tests.kernels.compiling import compile_job
from tests.kernels.crossed import crossed
from tests.kernels.delta.delta_cases import delta_tensors, tokens_of
from tests.kernels.recurrent.state_cases import (
    PADDING,
    far_apart,
    i32,
    on_cpu,
    same_elsewhere,
    shuffled_slots,
    state_pages,
    widened,
)
from tests.kernels.support import DEVICE, check_close, generator, max_error, randn

NUM_SLOTS = 16
DTYPES = {
    "f32": (torch.float32, torch.float32),
    "bf16_state_f32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16": (torch.float16, torch.float16),
}
GATES = {"heads": False, "channels": True}


@dataclass(frozen=True)
class Memory:
    """A layer's states and histories in arenas with other layers, every element NaN."""

    states: torch.Tensor
    history: DeltaHistory
    arenas: tuple = ()

    def parts(self):
        return {name: getattr(self.history, name) for name in DeltaHistory.__slots__}

    def changed(self, change):
        """A copy of every tensor."""
        history = DeltaHistory(**{name: change(part) for name, part in self.parts().items()})
        return Memory(change(self.states), history)


def memory(shape, history_tokens, dtype, state_dtype, *, channels, change_dtype=None):
    num_qk_heads, num_v_heads, head_k_dim, head_v_dim = shape
    per_token = (head_k_dim,) if channels else ()
    pages = (
        state_pages(NUM_SLOTS, (num_v_heads, head_v_dim, head_k_dim), state_dtype),
        state_pages(
            NUM_SLOTS, (num_v_heads, history_tokens, head_v_dim), change_dtype or state_dtype
        ),
        state_pages(NUM_SLOTS, (num_qk_heads, history_tokens, head_k_dim), dtype),
        state_pages(NUM_SLOTS, (num_v_heads, history_tokens, *per_token), torch.float32),
    )
    states, changes, keys, decays = (part.states for part in pages)
    history = DeltaHistory(changes=changes, keys=keys, decays=decays)
    return Memory(states, history, tuple(part.arena for part in pages))


# heads of queries and of values, elements of keys and of values; rows of the history; and of each
# request its tokens, those before them, those in its state before and after.
ONE_TOKEN = {
    "beginning": ((1, 2, 16, 16), 8, [(1, 0, 0, 0), (1, 0, 0, 1)]),
    "early_and_late": (
        (2, 4, 128, 64),
        16,
        [(1, 7, 7, 7), (1, 30, 15, 15), (PADDING, 0, 0, 0), (1, 30, 15, 31), (1, 31, 20, 31)],
    ),
    "odd_sizes_and_three_values_a_query": (
        (1, 3, 40, 24),
        5,
        [(1, 9, 5, 5), (1, 9, 5, 10), (1, 3, 0, 0), (1, 4, 0, 5)],
    ),
    "a_query_of_each_value_and_no_past": (
        (3, 3, 16, 16),
        1,
        [(1, 5, 5, 5), (1, 6, 6, 7), (1, 0, 0, 0), (1, 0, 0, 1)],
    ),
}
SEVERAL_TOKENS = {
    "drafts": (
        (2, 4, 32, 48),
        16,
        [(4, 10, 5, 5), (4, 12, 0, 13), (4, 16, 4, 16), (4, 16, 4, 18), (4, 3, 3, 7)],
    ),
    "lengths": (
        (1, 2, 40, 24),
        12,
        [(8, 4, 1, 1), (0, 9, 5, 9), (1, 9, 5, 5), (PADDING, 0, 0, 0), (2, 0, 0, 1), (0, 9, 5, 5)],
    ),
    "a_query_of_each_value": ((3, 3, 16, 16), 8, [(3, 9, 5, 5), (3, 20, 16, 21), (2, 0, 0, 1)]),
    "a_long_history": ((1, 2, 24, 16), 20, [(1, 40, 22, 22), (3, 17, 0, 18), (2, 19, 1, 1)]),
    "many_tokens": ((1, 1, 32, 16), 40, [(20, 37, 17, 17), (33, 9, 2, 20), (0, 45, 6, 45)]),
}
CASES = ONE_TOKEN | SEVERAL_TOKENS


def arguments(case, dtype, state_dtype, *, channels=False, change_dtype=None):
    """Tensors, counts and a memory in which no element that may be read is NaN."""
    shape, history_tokens, requests = case
    rng = generator(0)
    free = shuffled_slots(NUM_SLOTS - 1, NUM_SLOTS, rng)
    starts = [0]
    counts = {"slots": [], "computed_tokens": [], "state_tokens": [], "next_state_tokens": []}
    kept = memory(
        shape, history_tokens, dtype, state_dtype, channels=channels, change_dtype=change_dtype
    )
    for tokens, computed, stored, stored_next in requests:
        starts.append(starts[-1] + (1 if tokens == PADDING else tokens))
        slot = NULL_SLOT if tokens == PADDING else free.pop()
        for name, value in zip(counts, (slot, computed, stored, stored_next), strict=True):
            counts[name].append(value)
        if slot != NULL_SLOT and stored:
            kept.states[slot] = randn(kept.states.shape[1:], state_dtype, rng)
        for token in range(stored, computed):
            row = token % history_tokens
            parts = kept.parts()
            for name in ("changes", "keys"):
                part = parts[name][slot, :, row]
                part.copy_(randn(part.shape, part.dtype, rng))
            decays = parts["decays"][slot, :, row]
            decays.copy_(-randn(decays.shape, torch.float32, rng).exp())
    tensors = delta_tensors(starts[-1], shape, dtype, rng, channels=channels)
    counts = {name: i32(values) for name, values in counts.items()}
    return tensors, counts | {"query_starts": i32(starts)}, kept


def by_reference(tensors, counts, kept, **options):
    out = torch.full_like(tensors["v"], float("nan"))
    reference.delta_replay(out, kept.states, kept.history, **tensors, **counts, **options)
    return out


def exactly_by_reference(tensors, counts, kept):
    """Output, states, changes and decays in float64, and what each may lose."""

    def compute():
        exact = kept.changed(torch.Tensor.double)
        out = by_reference(widened(tensors), counts, exact)
        return out, exact.states, exact.history.changes, exact.history.decays

    return exactly(compute)


def check_memory(kept, exact, lost, naive, before, counts):
    """Check that what is to be written is right, and that nothing else is touched.

    `exact` and `lost` are states, changes and decays, and what each may lose.
    """
    slots = counts["slots"].tolist()
    stored, stored_next = counts["state_tokens"].tolist(), counts["next_state_tokens"].tolist()
    requests = zip(slots, stored, stored_next, strict=True)
    written = [slot for slot, was, will in requests if slot != NULL_SLOT and will > was]
    check_close(kept.states[written], exact[0][written], naive.states[written], slack=lost[0])
    assert same_elsewhere(kept.arenas[0], before[0], written)
    live = [slot for slot in slots if slot != NULL_SLOT]
    for arena, old in zip(kept.arenas[1:], before[1:], strict=True):
        assert same_elsewhere(arena, old, live)
    parts, wanted = kept.parts(), naive.parts()
    same = {"atol": 0, "rtol": 0, "equal_nan": True}
    torch.testing.assert_close(parts["keys"][live], wanted["keys"][live], **same)
    same |= {"atol": 1e-6 + lost[2], "rtol": 1e-6}
    torch.testing.assert_close(parts["decays"][live], wanted["decays"][live], **same)
    changes, want = parts["changes"][live], wanted["changes"][live]
    assert torch.equal(changes.isnan(), want.isnan())
    near = exact[1][live].nan_to_num(0)
    check_close(changes.nan_to_num(0), near, want.nan_to_num(0), slack=lost[1])


def check_call(tensors, counts, kept):
    """Check what a call returns and writes."""
    before = tuple(arena.clone() for arena in kept.arenas)
    naive = kept.changed(torch.clone)
    naive_out = by_reference(tensors, counts, naive)
    (exact, *memory), (lost, *memory_lost) = exactly_by_reference(tensors, counts, kept)
    out = torch.full_like(tensors["v"], float("nan"))

    delta_replay(out, kept.states, kept.history, **tensors, **counts)

    check_close(out, exact, naive_out, slack=lost)
    check_memory(kept, memory, memory_lost, naive, before, counts)


@crossed({"case": CASES, "channels": GATES, "dtype, state_dtype": DTYPES})
def test_delta_replay_matches_the_rule(case, channels, dtype, state_dtype):
    tensors, counts, kept = arguments(case, dtype, state_dtype, channels=channels)
    if all(tokens in (1, PADDING) for tokens, *_ in case[2]):
        counts["query_starts"] = None
    check_call(tensors, counts, kept)


def change_tiles(monkeypatch, **changes):
    chosen = module.delta_replay_tiles
    monkeypatch.setattr(
        module,
        "delta_replay_tiles",
        lambda *args, **options: replace(chosen(*args, **options), **changes),
    )
    monkeypatch.setattr(module, "_calls", {})


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
def test_tokens_served_one_by_one_give_what_the_rule_gives(case, monkeypatch):
    # As on GPUs whose products have all operands in registers.
    change_tiles(monkeypatch, is_at_once=False)

    check_call(*arguments(case, torch.bfloat16, torch.float32))


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("tokens", [1, 3])
def test_programs_that_share_a_head_write_its_part_of_a_history_once(tokens, channels, monkeypatch):
    # As on GPUs: the interpreter has a program for each head.
    change_tiles(monkeypatch, block_values=16)
    case = ((2, 4, 16, 40), 8, [(tokens, 9, 5, 5), (tokens, 19, 15, 20), (tokens, 0, 0, 0)])
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    if tokens == 1:
        counts["query_starts"] = None

    check_call(tensors, counts, kept)


def test_changes_may_be_more_precise_than_states():
    case = SEVERAL_TOKENS["drafts"]
    tensors, counts, kept = arguments(
        case, torch.float16, torch.float16, change_dtype=torch.float32
    )
    check_call(tensors, counts, kept)


@crossed(
    {"history_tokens, max_query_tokens": [(16, 1), (8, 4), (2, 1), (16, 4)], "channels": GATES}
)
def test_steps_of_any_lengths_with_rejected_tokens_end_as_the_accepted_ones_alone(
    history_tokens, max_query_tokens, channels
):
    shape, num_accepted = (1, 2, 32, 16), 60
    rng = generator(history_tokens)
    tensors = delta_tensors(num_accepted, shape, torch.float32, rng, channels=channels)
    wrong = delta_tensors(max_query_tokens, shape, torch.float32, rng, channels=channels)

    def by_steps(tensors):
        out = torch.empty_like(tensors["v"])
        plain.delta_update(
            out,
            torch.zeros(2, 2, 16, 32, dtype=out.dtype, device=DEVICE),
            **tensors,
            initial_slots=i32([NULL_SLOT]),
            state_slots=i32([[1] * num_accepted]),
            query_starts=i32([0, num_accepted]),
        )
        return out

    want = by_steps(tensors)
    (exact,), (lost,) = exactly(lambda: (by_steps(widened(tensors)),))
    kept = memory(shape, history_tokens, torch.float32, torch.float32, channels=channels)
    got = torch.empty_like(want)
    computed, stored, writes = 0, 0, 0
    while computed < num_accepted:
        count = 1 + int(torch.randint(max_query_tokens, (), generator=rng))
        accepted = 1 + int(torch.randint(count, (), generator=rng))
        accepted = min(accepted, num_accepted - computed)
        # What is rejected afterwards is what another request would have brought.
        parts = tokens_of(tensors, slice(computed, computed + accepted))
        others = tokens_of(wrong, slice(accepted, count))
        per_token = ("q", "k", "v", "gates", "betas")
        step = {
            name: torch.cat([value, others[name]]) if name in per_token else value
            for name, value in parts.items()
        }
        out = torch.empty_like(step["v"])
        counts = {"computed_tokens": i32([computed]), "state_tokens": i32([stored])}
        after = next_states(
            **counts,
            query_tokens=len(out),
            history_tokens=history_tokens,
            max_query_tokens=max_query_tokens,
        )

        delta_replay(
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


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
def test_a_call_may_be_made_again(channels):
    # A benchmark and a graph's replay do: rows that are read are not those that are written.
    case = ((1, 2, 32, 16), 8, [(4, 12, 9, 9), (4, 20, 16, 16)])
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    outs = torch.full_like(tensors["v"], float("nan")), torch.full_like(tensors["v"], float("nan"))

    for out in outs:
        delta_replay(out, kept.states, kept.history, **tensors, **counts)

    assert torch.equal(*outs)


@pytest.mark.parametrize("case", [ONE_TOKEN["early_and_late"], SEVERAL_TOKENS["drafts"]])
def test_tokens_outside_of_requests_are_left_alone(case):
    tensors, counts, kept = arguments(case, torch.float32, torch.float32)
    want = by_reference(tensors, counts, kept.changed(torch.clone))
    per_token = ("q", "k", "v", "gates", "betas")
    wide = {
        name: torch.nn.functional.pad(value, [0, 0] * (value.dim() - 1) + [3, 2], value=7.0)
        if name in per_token
        else value
        for name, value in tensors.items()
    }
    counts["query_starts"] += 3
    out = torch.full_like(wide["v"], 7.0)

    delta_replay(out, kept.states, kept.history, **wide, **counts)

    assert (out[:3] == 7).all()
    assert (out[-2:] == 7).all()
    assert max_error(out[3:-2], want) < 1e-4


def test_no_requests_write_nothing():
    tensors, _, kept = arguments(ONE_TOKEN["beginning"], torch.float32, torch.float32)
    before = [arena.clone() for arena in kept.arenas]
    none = i32([])
    out = torch.full_like(tensors["v"], 7.0)

    delta_replay(
        out, kept.states, kept.history, **tensors, slots=none, computed_tokens=none,
        state_tokens=none, next_state_tokens=none, query_starts=i32([0]),
    )  # fmt: skip

    assert (out == 7).all()
    assert all(same_elsewhere(*both, []) for both in zip(kept.arenas, before, strict=True))


@pytest.mark.parametrize("slot", [-1, -(2**31)])
@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
def test_slots_below_the_null_slot_are_taken_for_it(channels, slot):
    tensors, counts, kept = arguments(
        ONE_TOKEN["early_and_late"], torch.bfloat16, torch.bfloat16, channels=channels
    )
    counts["slots"][:3] = slot
    before = kept.arenas[0].clone()
    out = torch.full_like(tensors["v"], float("nan"))

    delta_replay(out, kept.states, kept.history, **tensors, **counts)

    assert (out[:3] == 0).all()
    assert out[3:].isfinite().all()
    assert same_elsewhere(kept.arenas[0], before, counts["slots"].tolist()[3:])


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
def test_a_state_is_brought_up_to_date_without_tokens(channels):
    case = ((1, 2, 32, 16), 8, [(0, 12, 5, 12), (0, 9, 9, 9)])
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    naive, late, fresh = kept.changed(torch.clone), *counts["slots"].tolist()
    by_reference(tensors, counts, naive)
    (_, exact_states, *_), (_, lost, *_) = exactly_by_reference(tensors, counts, kept)

    delta_replay(tensors["v"].clone(), kept.states, kept.history, **tensors, **counts)

    check_close(kept.states[late], exact_states[late], naive.states[late], slack=lost)
    assert torch.equal(kept.states[fresh], naive.states[fresh])


OPTIONS = {
    "without_bias": lambda _: {"dt_bias": None},
    "gates_and_betas_ready": lambda a: {
        "A_log": None,
        "dt_bias": None,
        "gates": -a["gates"].abs(),
        "betas": 2 * a["betas"].sigmoid(),  # beyond 1, as models with negative eigenvalues have
    },
    "a_scale": lambda _: {"scale": 0.25},
    "lengths_as_they_are": lambda a: {"qk_l2norm": False, "q": a["q"] / 8, "k": a["k"] / 8},
}


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("change", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("is_one_token", [True, False], ids=["one", "drafts"])
def test_delta_replay_with_options(is_one_token, change, channels):
    case = ((1, 2, 32, 16), 16, [(1, 9, 4, 10), (1, 7, 0, 0)])
    if not is_one_token:
        case = (*case[:2], [(3, 9, 4, 10), (4, 7, 0, 0)])
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    if is_one_token:
        counts["query_starts"] = None
    tensors |= change(tensors)
    check_call(tensors, counts, kept)


def test_slots_may_be_a_column_of_a_table():
    tensors, counts, kept = arguments(SEVERAL_TOKENS["drafts"], torch.float32, torch.float32)
    naive = by_reference(tensors, counts, kept.changed(torch.clone))
    (exact, *_), (lost, *_) = exactly_by_reference(tensors, counts, kept)
    out = torch.full_like(tensors["v"], float("nan"))
    table = torch.stack([counts["slots"], counts["slots"] + 1], dim=1)

    delta_replay(out, kept.states, kept.history, **tensors, **counts | {"slots": table[:, 0]})

    check_close(out, exact, naive, slack=lost)


@crossed({"dim": {"slots": 0, "heads": 1, "rows": 2}, "channels": GATES, "tokens": [3, 1]})
def test_delta_replay_reaches_past_2_to_the_31_elements(tokens, dim, channels):
    # Every slot has a request, so that one is in the last.
    requests = [(tokens, 12, 7, (7, 13)[slot % 2]) for slot in range(1, NUM_SLOTS)]
    case = ((2, 2, 16, 16), 8, requests)
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    if tokens == 1:
        counts["query_starts"] = None
    # Elements nobody touches cost no memory, so this arena is mostly not there.
    arena = torch.empty(2**31 + (1 << 20), dtype=torch.float32, device=DEVICE)
    parts = {"states": kept.states} | kept.parts()
    far = {}
    for number, (name, part) in enumerate(parts.items()):
        # A head's decays lie next to each other.
        far_dim = 1 if dim == part.dim() - 1 else dim
        far[name] = far_apart(part, far_dim, arena, number << 17)
    out, want = (torch.full_like(tensors["v"], float("nan")) for _ in range(2))

    delta_replay(want, kept.states, kept.history, **tensors, **counts)
    states = far.pop("states")
    delta_replay(out, states, DeltaHistory(**far), **tensors, **counts)

    assert torch.equal(out, want)
    for part, near in zip([states, *far.values()], parts.values(), strict=True):
        assert torch.equal(part.nan_to_num(7), near.nan_to_num(7))


def test_inputs_may_be_expanded_and_lie_in_one_another():
    tensors, counts, kept = arguments(SEVERAL_TOKENS["drafts"], torch.float32, torch.float32)
    k = tensors["k"][:, :1].expand(-1, 2, -1)
    gates = tensors["gates"][:1].expand(len(tensors["v"]), -1)
    tensors |= {"k": k, "q": k, "gates": gates, "betas": gates, "v": tensors["v"][:1]}
    tensors["v"] = tensors["v"].expand(len(k), -1, -1)

    check_call(tensors, counts, kept)


@pytest.mark.parametrize("channels", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("size", [1e-3, 60.0])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decays_far_apart_lose_nothing_to_sums(tokens, size, channels):
    # A state that has all but gone, and tokens of which only the latest count.
    case = ((1, 2, 32, 16), 16, [(tokens, 13, 0, 0), (tokens, 38, 25, 39)])
    tensors, counts, kept = arguments(case, torch.float32, torch.float32, channels=channels)
    if tokens == 1:
        counts["query_starts"] = None
    kept.history.decays.mul_(size)
    naive, slot = kept.changed(torch.clone), int(counts["slots"][1])
    naive_out = by_reference(tensors, counts, naive)
    (exact, exact_states, *_), (lost, states_lost, *_) = exactly_by_reference(tensors, counts, kept)
    out = torch.full_like(tensors["v"], float("nan"))

    delta_replay(out, kept.states, kept.history, **tensors, **counts)

    check_close(out, exact, naive_out, slack=lost)
    check_close(kept.states[slot], exact_states[slot], naive.states[slot], slack=states_lost)


def good_call():
    tensors, counts, kept = arguments(SEVERAL_TOKENS["drafts"], torch.float32, torch.float32)
    out = torch.full_like(tensors["v"], float("nan"))
    return {"out": out, "states": kept.states, "history": kept.history, **tensors, **counts}


def changed_history(args, **changes):
    parts = {name: getattr(args["history"], name) for name in DeltaHistory.__slots__}
    return {"history": DeltaHistory(**(parts | changes))}


BAD_ARGUMENTS = {
    "a_history_of_other_heads": (
        "history.changes",
        lambda a: changed_history(a, changes=a["history"].changes[:, :2]),
    ),
    "changes_less_precise_than_states": (
        "history.changes",
        lambda a: changed_history(a, changes=a["history"].changes.half()),
    ),
    "keys_of_another_dtype": (
        "history.keys",
        lambda a: changed_history(a, keys=a["history"].keys.half()),
    ),
    "a_shorter_history_of_keys": (
        "history.keys",
        lambda a: changed_history(a, keys=a["history"].keys[:, :, :4]),
    ),
    "a_history_longer_than_programs_hold": (
        "history.changes",
        lambda a: changed_history(a, changes=a["history"].changes.repeat(1, 1, 5, 1)),
    ),
    "decays_of_channels_for_gates_of_heads": (
        "history.decays",
        lambda a: changed_history(a, decays=a["history"].decays[..., None].repeat(1, 1, 1, 32)),
    ),
    "decays_of_16_bits": (
        "history.decays",
        lambda a: changed_history(a, decays=a["history"].decays.half()),
    ),
    "an_expanded_history": (
        "history.decays",
        lambda a: changed_history(a, decays=a["history"].decays[:1].expand(NUM_SLOTS, -1, -1)),
    ),
    "gradients": (
        "history.changes",
        lambda a: changed_history(a, changes=a["history"].changes.clone().requires_grad_()),
    ),
    "wide_keys": ("q", lambda a: {"q": a["q"].repeat(1, 1, 8), "k": a["k"].repeat(1, 1, 8)}),
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
    "tokens_that_the_history_has_not": (
        "history",
        lambda a: dict.fromkeys(("state_tokens", "next_state_tokens"), a["state_tokens"] * 0),
    ),
    "several_tokens_without_query_starts": ("slots", lambda _: {"query_starts": None}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_delta_replay_refuses(name, change):
    args = good_call()
    history = args.pop("history")
    parts = {part: getattr(history, part).cpu() for part in DeltaHistory.__slots__}
    args = on_cpu(args) | {"history": DeltaHistory(**parts)}
    changed = args | change(args)
    states = changed["states"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        delta_replay(**changed)

    assert changed["out"].isnan().all()
    assert torch.equal(changed["states"].nan_to_num(7), states.nan_to_num(7))


QWEN3_NEXT, KIMI, OLMO = (
    (16, 32, 128, 128, False),
    (32, 32, 128, 128, True),
    (30, 30, 96, 192, False),
)
"""Heads of queries and of values, elements of keys and of values, whether channels decay alone."""

NUM_COMPILED = 4


def compile_replays(models=(QWEN3_NEXT, KIMI, OLMO), rows=16):
    for state_dtype in (torch.float32, torch.bfloat16):
        for num_qk_heads, num_v_heads, head_k_dim, head_v_dim, channels in models:
            per_token = (head_k_dim,) if channels else ()
            history = DeltaHistory(
                changes=torch.zeros(4, num_v_heads, rows, head_v_dim, dtype=state_dtype),
                keys=torch.zeros(4, num_qk_heads, rows, head_k_dim, dtype=torch.bfloat16),
                decays=torch.zeros(4, num_v_heads, rows, *per_token),
            )
            q = torch.zeros(NUM_COMPILED, num_qk_heads, head_k_dim, dtype=torch.bfloat16)
            v = torch.zeros(NUM_COMPILED, num_v_heads, head_v_dim, dtype=torch.bfloat16)
            gates = torch.zeros(NUM_COMPILED, num_v_heads, *per_token, dtype=torch.bfloat16)
            for query_starts in (None, i32(range(NUM_COMPILED + 1))):
                delta_replay(
                    v,
                    torch.zeros(4, num_v_heads, head_v_dim, head_k_dim, dtype=state_dtype),
                    history,
                    q,
                    q,
                    v,
                    gates,
                    v[:, :, 0].contiguous(),
                    i32([1, 2, 3, NULL_SLOT]),
                    i32([9] * NUM_COMPILED),
                    i32([2] * NUM_COMPILED),
                    i32([2] * NUM_COMPILED),
                    A_log=torch.zeros(num_v_heads),
                    dt_bias=torch.zeros(num_v_heads, *per_token),
                    query_starts=query_starts,
                )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_delta_replay_compiles_to_wide_loads_of_a_state(capability):
    kernels = compile_job(compile_replays, capability)

    assert len(kernels) == 12
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.num_warps == 4, kernel
        # A state's elements of a thread, 32 KiB a program or half as many, and nothing narrower.
        assert kernel.counts["load_128"] >= 16, kernel
        assert kernel.counts["store_128"] >= 8, kernel
        # Two programs a processor.
        assert kernel.registers <= 255, kernel
        assert kernel.counts["mma"] + kernel.counts["wgmma"] > 0, kernel
    at_once = [kernel for kernel in kernels if "products" in kernel.name]
    # Of Qwen3-Next and OLMo: both dtypes on Hopper, but for one token of a state in float32.
    assert len(at_once) == (6 if capability == 90 else 4)
    one_by_one = [kernel for kernel in kernels if kernel not in at_once]
    # Three programs a processor for one token and gates of heads.
    assert min(kernel.registers for kernel in one_by_one) <= 170


def compile_long_replays():
    for rows in (20, 33):
        compile_replays((QWEN3_NEXT, KIMI), rows)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_delta_replay_of_long_histories_compiles_without_spills(capability):
    kernels = compile_job(compile_long_replays, capability)

    assert len(kernels) == 16
    # At once: on Hopper 20 rows, gates of heads and states in 16 bits.
    at_once = [kernel for kernel in kernels if "products" in kernel.name]
    assert len(at_once) == (2 if capability == 90 else 0)
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        # What a program may have on any GPU.
        assert kernel.shared_bytes <= 99 << 10, kernel

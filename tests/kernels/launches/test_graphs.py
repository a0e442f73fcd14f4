"""Operations in CUDA graphs: captured once, they serve later batches of the same bounds.

Without a GPU the call itself stands in for its graph: what is written over in place must suffice.
"""

from functools import partial

import pytest
import torch

from jenga_kernels.attention.kv_store import kv_store
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.checks.histories import DeltaHistory, InputHistory
from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.recurrent.conv_update import conv_update
from jenga_kernels.recurrent.delta_replay import delta_replay
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.recurrent.delta_update import delta_update
from jenga_kernels.recurrent.state_replay import state_replay
from jenga_kernels.recurrent.state_scan import state_scan
from jenga_kernels.recurrent.state_update import state_update
from tests.kernels.attention.attention_cases import Options, Shape, make_batch
from tests.kernels.conv.conv_cases import conv_tensors
from tests.kernels.crossed import crossed
from tests.kernels.delta.delta_cases import delta_tensors
from tests.kernels.latent import latent_cases
from tests.kernels.recurrent.state_cases import i32, recurrence_tensors, shuffled_slots
from tests.kernels.support import DEVICE, generator, randn

NUM_REPLAYS = 100 if DEVICE.type == "cuda" else 2


def captured(launch):
    """A launch's graph, to be replayed; the launch itself where there is no GPU."""
    if DEVICE.type != "cuda":
        return launch
    launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def write_over(targets, sources):
    """Put tensors into the first entries of others, in place."""
    for target, source in zip(targets, sources, strict=True):
        target[tuple(slice(size) for size in source.shape)].copy_(source)


def check_replays(launch, load, results):
    """Replay with the inputs of two cases by turns; each gives what its launch gave."""
    wanted = []
    for case in (0, 1):
        load(case)
        launch()
        wanted.append([result.clone() for result in results])
    assert not torch.equal(wanted[0][0], wanted[1][0])
    load(0)
    replay = captured(launch)
    for turn in range(NUM_REPLAYS):
        load(turn % 2)
        replay()
        for got, want in zip(results, wanted[turn % 2], strict=True):
            assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0)), f"replay {turn}"


LONG = ((1, 150), (40, 90), (3, 100), (70, 70), (1, 17))
SHORT = ((1, 20), (40, 40), (3, 7), (70, 130), (1, 1))
"""Requests with as many queries, that have other keys stored."""


@crossed(
    {
        "options": {"full": Options(), "window": Options(window_tokens=30, has_sinks=True)},
        "is_warp_specialized": [False, True],
    }
)
def test_graphs_of_attention_serve_other_lengths_and_pages(options, is_warp_specialized):
    """But on Hopper nothing is specialised."""
    long, short = (
        make_batch(Shape(requests=requests, dtype=torch.float16), options, seed=seed)
        for seed, requests in enumerate((LONG, SHORT))
    )
    plan = long.plan(is_warp_specialized=is_warp_specialized)
    out = torch.empty_like(long.q, memory_format=torch.contiguous_format)
    names = ("q", "k_pages", "v_pages", "page_table", "seq_lens")
    cases = [[getattr(batch, name).clone() for name in names] for batch in (long, short)]

    def launch():
        plan.update(long.query_starts, long.seq_lens)
        paged_attention(**long.arguments, out=out, plan=plan)

    def load(case):
        write_over([getattr(long, name) for name in names], cases[case])

    check_replays(launch, load, [out])


def test_graphs_of_latent_attention_serve_other_lengths_and_pages():
    long, short = (
        latent_cases.make_batch(
            latent_cases.Shape(requests=requests, dtype=torch.float16), seed=seed
        )
        for seed, requests in enumerate((LONG, SHORT))
    )
    plan = long.plan()
    out = long.q.new_empty(*long.q.shape[:2], long.shape.latent_dim)
    names = ("q", "pages", "page_table", "seq_lens")
    cases = [[getattr(batch, name).clone() for name in names] for batch in (long, short)]

    def launch():
        plan.update(long.query_starts, long.seq_lens)
        latent_attention(**long.arguments, out=out, plan=plan)

    def load(case):
        write_over([getattr(long, name) for name in names], cases[case])

    check_replays(launch, load, [out])


def test_graphs_of_stores_serve_other_slots():
    rng = generator(0)
    pages = torch.zeros(2, 9, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    k, v = randn((2, 20, 2, 64), torch.float16, rng)
    slots = torch.zeros(20, dtype=torch.int64, device=DEVICE)
    cases = [torch.randperm(9 * 16, generator=rng)[:20] for _ in range(2)]

    def load(case):
        pages.zero_()
        slots.copy_(cases[case])

    check_replays(lambda: kv_store(k, v, *pages, slots), load, [pages])


HEADS = (2, 16, 16, 1)
"""Heads, elements of one, of its state, groups."""


def scan_in_segments(rng):
    shape = (2, 64, 64, 1)
    tensors = recurrence_tensors(200, "heads", shape, torch.float16, rng) | {"z": None}
    return partial(state_scan, segment_tokens=64), tensors, shape[:3]


def scan_of_the_delta_rule(rng):
    return delta_scan, delta_tensors(200, (1, 2, 64, 64), torch.float16, rng), (2, 64, 64)


@pytest.mark.parametrize("scan", [scan_in_segments, scan_of_the_delta_rule])
def test_graphs_of_scans_serve_prompts_of_other_lengths(scan):
    operation, tensors, state_shape = scan(generator(0))
    _, others, _ = scan(generator(1))
    names = [name for name, value in others.items() if value is not None and len(value) == 200]
    cases = [[given[name].clone() for name in names] for given in (tensors, others)]
    states = torch.zeros(4, *state_shape, device=DEVICE)
    begun = randn(states.shape, torch.float32, generator(2))
    query_starts, initial_slots, state_slots = i32([0, 150, 200]), i32([2, 0]), i32([1, 3])
    out = torch.empty_like(tensors["x" if "x" in tensors else "v"])

    def launch():
        operation(
            out,
            states,
            **tensors,
            query_starts=query_starts,
            initial_slots=initial_slots,
            state_slots=state_slots,
        )

    def load(case):
        write_over([tensors[name] for name in names], cases[case])
        states.copy_(begun)
        query_starts.copy_(i32([0, 150 if case else 40, 200]))

    check_replays(launch, load, [out, states])


def update_of_states(rng):
    tensors = recurrence_tensors(6, "heads", HEADS, torch.float16, rng)
    return state_update, tensors, HEADS[:3]


def update_of_convolutions(rng):
    return conv_update, conv_tensors(6, 32, 4, torch.float16, rng), (32, 3)


def update_by_the_delta_rule(rng):
    shape = (1, 2, 16, 16)
    return delta_update, delta_tensors(6, shape, torch.float16, rng), (2, 16, 16)


@pytest.mark.parametrize(
    "make", [update_of_states, update_of_convolutions, update_by_the_delta_rule]
)
def test_graphs_of_steps_serve_other_slots(make):
    rng = generator(0)
    operation, tensors, shape = make(rng)
    first = randn((24, *shape), torch.float16, rng)
    states = first.clone()
    out = torch.empty_like(tensors["x"] if "x" in tensors else tensors["v"])
    slots = torch.zeros(2, 6, dtype=torch.int32, device=DEVICE)  # initial ones, then those written
    cases = [i32(shuffled_slots(12, 24, rng)).view(2, 6) for _ in range(2)]

    def launch():
        operation(out, states, **tensors, initial_slots=slots[0], state_slots=slots[1])

    def load(case):
        states.copy_(first)
        slots.copy_(cases[case])

    check_replays(launch, load, [out, states])


# Slots, tokens before the call, in the state before it and after it; one state is written.
REPLAYED = (
    [[3, 1, 5], [12, 9, 4], [8, 6, 0], [8, 6, 0]],
    [[7, 0, 2], [15, 3, 6], [9, 1, 6], [16, 3, 6]],
)


def check_histories(operation, kind, first, tensors):
    """Replay steps over states that are seldom written, with other slots and other counts.

    Args:
        operation: What takes the steps.
        kind: The class of its histories.
        first: States and the history's tensors, by name, as they are before a step.
        tensors: Of the tokens.
    """
    memory = {name: each.clone() for name, each in first.items()}
    history = kind(**{name: each for name, each in memory.items() if name != "states"})
    out = torch.empty_like(tensors["x"] if "x" in tensors else tensors["v"])
    cases = [i32(counts) for counts in REPLAYED]
    starts = [i32([0, 2, 3, 6]), i32([0, 1, 5, 6])]
    query_starts, counts = starts[0].clone(), cases[0].clone()

    def launch():
        operation(out, memory["states"], history, **tensors, query_starts=query_starts,
            slots=counts[0], computed_tokens=counts[1], state_tokens=counts[2],
            next_state_tokens=counts[3],
        )  # fmt: skip

    def load(case):
        write_over(memory.values(), first.values())
        counts.copy_(cases[case])
        query_starts.copy_(starts[case])

    check_replays(launch, load, [out, *memory.values()])


def test_graphs_of_replayed_states_serve_other_slots_and_counts():
    rng = generator(0)
    num_heads, head_dim, d_state, num_groups = HEADS
    first = {
        "states": randn((12, *HEADS[:3]), torch.float16, rng),
        "x": randn((12, num_heads, 8, head_dim), torch.float16, rng),
        "dt": randn((12, num_heads, 8), torch.float32, rng).abs(),
        "B": randn((12, num_groups, 8, d_state), torch.float16, rng),
    }
    tensors = recurrence_tensors(6, "heads", HEADS, torch.float16, rng)
    check_histories(state_replay, InputHistory, first, tensors)


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_graphs_of_replayed_delta_states_serve_other_slots_and_counts(channels):
    rng = generator(0)
    first = {
        "states": randn((12, 2, 16, 16), torch.float16, rng),
        "changes": randn((12, 2, 8, 16), torch.float16, rng),
        "keys": randn((12, 1, 8, 16), torch.float16, rng),
        "decays": -randn((12, 2, 8, *((16,) if channels else ())), torch.float32, rng).abs(),
    }
    tensors = delta_tensors(6, (1, 2, 16, 16), torch.float16, rng, channels=channels)
    check_histories(delta_replay, DeltaHistory, first, tensors)

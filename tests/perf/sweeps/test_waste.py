"""Waste with the arena full stays where perf/sweeps/table_waste.py found it, on a few fast
models."""

import pytest

from jenga.geometry import exact_lcm
from jenga.models import KvFormat
from jenga.planning.planner import plan
from jenga.sim.arenas.jenga_arena import ManagedArena
from jenga.sim.arenas.vllm_arena import StockArena
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.batching.need import Need
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import FullAttention, Layer, ModelSpec, SlidingWindow
from perf.sweeps.full_arena import LENGTHS, FullArena, draw_requests, held_bytes
from perf.sweeps.table_geometry import read
from perf.sweeps.table_waste import DOCUMENTS, DOCUMENTS_MODEL, Case, case, measure

PER_CENT = 0.01


def small_case(name, lengths, *, num_requests=32):
    """A model with requests of these lengths, in an arena for few of them."""
    model, _ = read(name, 1, KvFormat.MODEL)
    need = Need(model)
    active = ActiveRequest(next(draw_requests(model, LENGTHS[lengths])))
    active.num_computed = active.total_tokens - 1
    active.begin(1)
    wanted_bytes = num_requests * need.of_step(active)
    return Case(
        name=name,
        model=model,
        ranks=1,
        gpu_gb=80,
        arena_bytes=56_000_000_000,
        wanted_bytes=wanted_bytes,
        lengths=lengths,
    )


def test_bytes_held_are_told_apart_by_what_is_in_them():
    model = ModelSpec(
        name="two",
        layer_types=(
            FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),
            SlidingWindow(
                name="window", layers=(Layer(name="1", slot_bytes=128),), window_tokens=20
            ),
        ),
    )
    arena = ManagedArena(exact_lcm(model), 2048 * 10, prefix_caching=False)
    active = ActiveRequest(Request(name="0", prompt=(Piece("0", 40),), output_tokens=60))

    assert arena.admit(active, 0, 40)
    active.num_computed = 40
    assert arena.grow(active, 41)
    active.begin(1)
    held = held_bytes(arena, [active])

    # 41 tokens in 3 pages of 16, 2 pages to a large one; tokens 21 to 40 in pages 1 and 2.
    assert held.used == 41 * 64 + 20 * 128
    assert held.window == 5 * 128
    assert held.last_page == 7 * 64 + 7 * 128
    assert held.padding == 0
    assert held.empty == 16 * 64
    assert held.waste == 1 - held.used / (4 * 16 * 64 + 2 * 16 * 128)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("llama-3.1-8b", "mmlu"),
        ("ministral-8b-2410", "mid"),
        ("gpt-oss-20b", "mid"),
        ("llama-4-scout", "mmlu"),
        ("jamba-1.5-mini", "mid"),
        ("qwen3-next-80b-a3b", "mid"),
        ("nemotron-h-8b", "short"),
        ("granite-4.0-h-small", "short"),
        ("kimi-linear-48b", "short"),
        ("minimax-text-01", "short"),
    ],
)
def test_waste_is_below_one_per_cent(name, lengths):
    found = measure("planned", small_case(name, lengths))

    assert not found.refusal
    assert found.num_requests > 10
    assert found.held.waste <= PER_CENT


def test_waste_of_long_documents_on_ministral_is_below_four_hundredths_of_a_per_cent():
    found = measure("planned", case(DOCUMENTS_MODEL, DOCUMENTS))

    assert found.num_requests > 5
    assert found.held.waste <= 0.04 * PER_CENT


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-12b", "llama-3.1-8b"])
def test_where_pages_of_sixteen_tokens_allow_no_less_nothing_else_is_wasted(name):
    found = measure("planned", small_case(name, "short", num_requests=96))

    assert found.floor > PER_CENT / 2
    assert found.held.waste - found.floor <= PER_CENT / 5


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("bamba-9b", "short"), ("falcon-h1-7b", "short"), ("gemma-3-4b", "mmlu")],
)
def test_padding_and_empty_pages_take_no_more_than_measured(name, lengths):
    found = measure("planned", small_case(name, lengths, num_requests=96))

    assert found.held.waste - found.floor <= 1.1 * PER_CENT


def test_max_page_wastes_more_than_the_planned_geometry_on_a_hybrid():
    one = small_case("jamba-1.5-mini", "short")

    planned, largest = measure("planned", one), measure("max", one)

    assert largest.held.waste > 10 * planned.held.waste


def test_exact_lcm_of_a_hybrid_does_not_start():
    found = measure("lcm", small_case("bamba-9b", "short"))

    assert "does not start" in found.refusal
    assert exact_lcm(small_case("bamba-9b", "short").model).large_page_bytes > 20e9


def test_scheduler_keeps_the_arena_full():
    one = small_case("jamba-1.5-mini", "short")
    geometry = plan(one.model, arena_bytes=one.arena_bytes)
    run_bytes = one.run_bytes(geometry.large_page_bytes)
    arena = ManagedArena(geometry, run_bytes, prefix_caching=False)
    full = FullArena(arena, draw_requests(one.model, LENGTHS["short"]))
    full.fill(seed=0)

    shares = []
    for _ in range(100):
        full.step()
        shares.append(held_bytes(arena, full.running).held / run_bytes)
        full.finish_step()

    assert min(shares) > 0.9


@pytest.mark.parametrize(
    ("name", "num_groups", "block_bytes"),
    [
        pytest.param("llama-3.1-8b", 1, 2_097_152, id="one_type"),
        pytest.param("gemma-3-27b", 7, 1_310_720, id="padding_layers"),
        pytest.param("jamba-1.5-mini", 8, 1_310_720, id="padded_states"),
        pytest.param("whisper-large-v3", 2, 2_621_440, id="encoder"),
    ],
)
def test_vllm_plans_the_groups_it_is_known_for(name, num_groups, block_bytes):
    pytest.importorskip("vllm")
    model, _ = read(name, 1, KvFormat.MODEL)

    plan_of_vllm = StockArena(model, 10_000_000_000, prefix_caching=False).plan

    assert len(plan_of_vllm.group_layers) == num_groups
    assert plan_of_vllm.block_bytes == block_bytes


def test_vllm_counts_whole_blocks_of_every_group():
    pytest.importorskip("vllm")
    model, _ = read("jamba-1.5-mini", 1, KvFormat.MODEL)
    stock = StockArena(model, 1_000_000_000, prefix_caching=False)
    active = ActiveRequest(Request(name="0", prompt=(Piece("0", 100),), output_tokens=100))

    assert stock.find(active) == 0
    assert stock.admit(active, 0, 100)
    active.begin(100)
    held = held_bytes(stock, [active])

    # 100 tokens take two blocks of 80, each group of states takes one.
    assert held.held == (2 + 7) * 1_310_720
    assert held.used == 100 * 4 * 4096 + 28 * 311_296

"""The work lists of a step: every unit once, evenly over programs, none outside of windows."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jenga_kernels.plans.attention_plan import AttentionKind, AttentionPlan, plan_attention
from tests.kernels.attention.attention_cases import SMALL_TILES
from tests.kernels.attention.test_random_attention import SETTINGS
from tests.kernels.support import DEVICE

BLOCK_N = SMALL_TILES.decode.block_n
BLOCK_M = SMALL_TILES.prefill.block_m
LLAMA_8B = AttentionKind(num_heads=32, num_kv_heads=8, head_dim=128, page_tokens=16)


def i32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def plan_of(requests, kind, *, num_programs, **options) -> AttentionPlan:
    """The plan of (query tokens, tokens stored) of each request."""
    query_starts = [0, *accumulate(queries for queries, _ in requests)]
    return plan_attention(
        i32(query_starts),
        i32([stored for _, stored in requests]),
        kind,
        num_tokens=query_starts[-1],
        dtype=torch.float16,
        tiles=replace(SMALL_TILES, num_programs=num_programs),
        **options,
    )


def units_of(plan: AttentionPlan) -> list[int]:
    """Units of decode work of each request, over all heads."""
    return (plan.unit_starts.diff() * plan.kind.num_kv_heads).tolist()


def tiles_read(queries: int, stored: int, kind: AttentionKind) -> int:
    """Tiles of keys that a decoded request reads; one where it has no key."""
    first_position = max(0, stored - queries)
    start = 0
    if kind.window_tokens is not None:
        start = max(start, first_position - kind.window_tokens + 1)
    if kind.chunk_tokens is not None:
        start = max(start, first_position // kind.chunk_tokens * kind.chunk_tokens)
    if kind.page_tokens % BLOCK_N == 0:
        start -= start % BLOCK_N
    return max(1, -(-(stored - start) // BLOCK_N))


@pytest.mark.parametrize("num_programs", [7, 132, 264])
@pytest.mark.parametrize("bounds", [{}, {"window_tokens": 1024}, {"chunk_tokens": 4096}], ids=str)
def test_no_program_has_a_unit_more_than_its_share_at_any_batch(bounds, num_programs):
    kind = replace(LLAMA_8B, **bounds)
    for batch in (1, 2, 7, *range(10, 18), 64, 300):
        requests = [(1, 5000 + 1700 * (request % 5)) for request in range(batch)]

        plan = plan_of(requests, kind, num_programs=num_programs)

        assert units_of(plan) == [
            kind.num_kv_heads * tiles_read(*request, kind) for request in requests
        ]
        total = sum(units_of(plan))
        assert plan.units_per_program.item() == -(-total // num_programs)


@pytest.mark.parametrize(
    ("min_query_tokens", "is_decoded"), [(None, True), (0, True), (1, True), (5, False)]
)
def test_nothing_is_decoded_where_no_request_has_so_few_tokens(min_query_tokens, is_decoded):
    plan = plan_of([(40, 50), (9, 9)], LLAMA_8B, num_programs=4, min_query_tokens=min_query_tokens)

    assert plan.decode_query_tokens == 4
    assert plan.max_row_tiles > 0
    assert (plan.max_decoded_tokens > 0) == is_decoded
    assert plan.may_split == is_decoded
    assert (plan.partial_out.numel() > 0) == is_decoded


def test_a_plan_refuses_a_least_number_of_tokens_that_is_none():
    with pytest.raises(ValueError, match="min_query_tokens must be an integer and at least 0"):
        plan_of([(40, 50)], LLAMA_8B, num_programs=4, min_query_tokens=-1)


def test_what_lies_before_a_window_is_no_work():
    kind = replace(LLAMA_8B, window_tokens=1024)

    near = plan_of([(1, 1024)] * 3, kind, num_programs=264)
    far = plan_of([(1, 128 << 10)] * 3, kind, num_programs=264)

    assert units_of(far) == units_of(near) == [8 * 1024 // BLOCK_N] * 3


@settings(max_examples=40, **SETTINGS)
@given(st.data())
def test_lists_name_all_work_once(data):
    sizes = st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 60, 100]), st.integers(0, 400))
    requests = data.draw(st.lists(sizes, min_size=1, max_size=12))
    bound = data.draw(st.sampled_from([{}, {"window_tokens": 50}, {"chunk_tokens": 70}]))
    kind = AttentionKind(
        num_heads=data.draw(st.sampled_from([2, 6])),
        num_kv_heads=2,
        head_dim=64,
        page_tokens=data.draw(st.sampled_from([16, 48, 64])),
        **bound,
    )
    num_programs = data.draw(st.integers(1, 40))
    decoded = data.draw(st.integers(0, 4))

    plan = plan_of(requests, kind, num_programs=num_programs, decode_query_tokens=decoded)

    units = [
        2 * tiles_read(queries, stored, kind) if 0 < queries <= decoded else 0
        for queries, stored in requests
    ]
    assert units_of(plan) == units
    ends = list(accumulate(units))
    first_units = [program * plan.units_per_program.item() for program in range(num_programs)]
    assert num_programs * plan.units_per_program.item() >= ends[-1]
    for first_request, unit in zip(plan.first_requests.tolist(), first_units, strict=True):
        if unit < ends[-1]:
            assert ends[first_request] - units[first_request] <= unit < ends[first_request]
    listed = zip(plan.row_tile_requests.tolist(), plan.row_tile_indices.tolist(), strict=True)
    assert sorted(entry for entry in listed if entry[0] >= 0) == [
        (request, index)
        for request, (queries, _) in enumerate(requests)
        if queries > decoded
        for index in range(-(-queries * kind.group_heads // BLOCK_M))
    ]

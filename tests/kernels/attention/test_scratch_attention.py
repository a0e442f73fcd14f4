from dataclasses import replace

import pytest
import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.attention.scratch_attention import scratch_attention
from jenga_kernels.checks.tensors import E5M2_DTYPE, FP8_DTYPE, INT4_DTYPE
from jenga_kernels.plans.scratch_plan import (
    MIN_ROWS_PER_TOKEN,
    SCRATCH_PAGE_TOKENS,
    page_bytes,
    plan_scratch,
    scratch_pages,
)
from tests.kernels.attention.attention_cases import (
    SMALL_TILES,
    Options,
    Shape,
    expected,
    make_batch,
    read_range,
)
from tests.kernels.crossed import crossed
from tests.kernels.support import DEVICE, check_close

MIXED = ((40, 40), (1, 77), (0, 0), (30, 300), (2, 50), (150, 170), (1, 1))
"""Prompts, one of them on a long context, beside decoded requests and one without tokens."""

SHAPES = {
    "mixed": Shape(requests=MIXED, num_padding_tokens=3),
    "prompts_alone": Shape(requests=((40, 40), (30, 300))),
    "odd_page_and_head_dim": Shape(
        requests=MIXED, head_dim=80, num_heads=6, page_tokens=48, is_head_major=False
    ),
    "wide_head": Shape(requests=((20, 140), (1, 77)), head_dim=256, page_tokens=32),
    "values_of_another_width": Shape(requests=MIXED, head_dim=96, value_dim=64),
}

STORED = {
    "e4m3_per_head": (FP8_DTYPE, Options(num_scales=2)),
    "e5m2": (E5M2_DTYPE, Options(num_scales=1)),
    "e4m3_slots": (FP8_DTYPE, Options(has_slot_scales=True)),
    "int8_slots": (torch.int8, Options(has_slot_scales=True)),
    "int4_slots": (INT4_DTYPE, Options(has_slot_scales=True)),
}


def planned(batch, *, decode_query_tokens=3, **changes):
    plan = batch.plan(tiles=SMALL_TILES, decode_query_tokens=decode_query_tokens)
    given = {
        "requests": batch.shape.requests,
        "scratch_bytes": 1 << 30,
        "min_rows_per_token": 0,
        "is_warp_specialized": False,
    }
    return plan_scratch(plan, batch.query_starts, batch.seq_lens, **given | changes)


def scratch_for(plan):
    num_bytes = plan.page_runs.shape[0] * page_bytes(plan.whole.kind, plan.whole.dtype)
    return torch.full((num_bytes,), 0x7E, dtype=torch.uint8, device=DEVICE)


def arguments_of(batch):
    return {name: value for name, value in batch.arguments.items() if name != "spans"}


def check_scratch(batch):
    """Compare results and log-sum-exps with the reference over the quantised pages."""
    plan = planned(batch)
    out = batch.q.new_full((*batch.q.shape[:2], batch.kind.result_dim), 7.0)
    lse = torch.full(out.shape[:2], 7.0, device=out.device)
    used = int(batch.query_starts[-1])

    scratch_attention(**arguments_of(batch), out=out, lse=lse, plan=plan, scratch=scratch_for(plan))

    exact, exact_lse = expected(batch, torch.float64)
    naive, naive_lse = expected(batch)
    slack = 2 * torch.finfo(torch.float32).eps * (batch.options.soft_cap or 0.0)
    largest = exact[:used].abs().max().item()
    check_close(out[:used], exact[:used], naive[:used], slack=slack * largest)
    is_empty = torch.isinf(exact_lse[:used])
    assert torch.equal(torch.isinf(lse[:used]), is_empty)
    lses = [values[:used].masked_fill(is_empty, 0.0) for values in (lse, exact_lse, naive_lse)]
    check_close(*lses, slack=slack)
    assert (out[used:] == 7.0).all()
    assert (lse[used:] == 7.0).all()


@crossed({"shape": SHAPES, "dtype": [torch.bfloat16, torch.float16], "case": STORED})
def test_scratch_attention_agrees_with_the_reference(shape, dtype, case):
    stored, options = case
    if options.num_scales > 1:
        options = replace(options, num_scales=shape.num_kv_heads)

    check_scratch(make_batch(replace(shape, dtype=dtype, pages_dtype=stored), options))


OPTIONS = {
    "window": {"window_tokens": 20, "soft_cap": 2.0, "has_sinks": True},
    "long_window": {"window_tokens": 129},
    "chunk": {"chunk_tokens": 24, "has_alibi": True},
    "chunk_and_window": {"chunk_tokens": 160, "window_tokens": 140},
    "cross": {"is_causal": False},
}


@crossed(
    {"changes": OPTIONS, "case": {name: STORED[name] for name in ("e4m3_per_head", "int4_slots")}}
)
def test_scratch_attention_has_the_options_of_paged_attention(changes, case):
    stored, options = case
    shape = Shape(requests=MIXED, dtype=torch.bfloat16, pages_dtype=stored)

    check_scratch(make_batch(shape, replace(options, **changes)))


def test_decoded_requests_get_the_results_that_they_get_without_a_scratch():
    shape = Shape(requests=MIXED, dtype=torch.bfloat16, pages_dtype=FP8_DTYPE)
    batch = make_batch(shape, Options(num_scales=1))
    plan = planned(batch)
    without = paged_attention(**batch.arguments, plan=plan.whole)

    got = scratch_attention(**arguments_of(batch), plan=plan, scratch=scratch_for(plan))

    starts = batch.query_starts.tolist()
    is_decoded = [query_tokens <= 3 for query_tokens, _ in MIXED]
    for request, decoded in enumerate(is_decoded):
        rows = slice(starts[request], starts[request + 1])
        assert torch.equal(got[rows], without[rows]) or not decoded
    assert not torch.equal(got, without)  # prompts are rounded elsewhere


def host_layout(batch):
    """Token that each page of the scratch should hold, prompt after prompt: (request, token)."""
    pages = []
    for request, (query_tokens, num_tokens) in enumerate(batch.shape.requests):
        if query_tokens <= 3:
            continue
        start, end = read_range(query_tokens, num_tokens, batch.options, ())
        tokens = {}
        for token in range(start, end):
            tokens.setdefault(token // SCRATCH_PAGE_TOKENS, []).append((request, token))
        pages += tokens.values()
    return pages


@pytest.mark.parametrize(
    "options",
    [
        Options(num_scales=1),
        Options(num_scales=1, window_tokens=1),
        Options(num_scales=1, window_tokens=100),
        Options(num_scales=1, chunk_tokens=64),
        Options(num_scales=1, is_causal=False),
    ],
    ids=["all", "window_of_one", "window", "chunks", "cross"],
)
def test_a_scratch_holds_what_prompts_read_and_nothing_else(options):
    shape = Shape(
        requests=((130, 700), (4, 257), (1, 900), (128, 128), (3, 3), (5, 129)),
        pages_dtype=FP8_DTYPE,
    )
    batch = make_batch(shape, options)
    plan = planned(batch)

    runs = [run for run in plan.page_runs.tolist() if run[0] >= 0]
    held = [[(request, token) for token in range(*run)] for request, *run in runs]
    assert held == host_layout(batch)
    for index, (request, start, _) in enumerate(runs):
        assert plan.page_table[request, start // SCRATCH_PAGE_TOKENS] == index
    assert plan.seq_lens.tolist() == [700, 257, 0, 128, 0, 129]


def test_only_what_is_read_is_written_to_the_scratch():
    shape = Shape(requests=((30, 300), (1, 40)), dtype=torch.bfloat16, pages_dtype=FP8_DTYPE)
    batch = make_batch(shape, Options(num_scales=1, window_tokens=20))
    plan = planned(batch)
    scratch = scratch_for(plan)

    scratch_attention(**arguments_of(batch), plan=plan, scratch=scratch)

    k, v = scratch_pages(scratch, batch.kind, torch.bfloat16)
    untouched = scratch.new_full((2,), 0x7E).view(torch.bfloat16)
    start, end = read_range(30, 300, batch.options, ())
    assert start % SCRATCH_PAGE_TOKENS
    first_page = start // SCRATCH_PAGE_TOKENS * SCRATCH_PAGE_TOKENS
    for pages in (k, v):
        rows = pages.reshape(-1, *pages.shape[2:])
        written = (rows != untouched).any(2).any(1).nonzero()[:, 0] + first_page
        assert written.tolist() == list(range(start, end))


def test_a_scratch_is_planned_if_the_prompts_fit_and_not_with_a_byte_less():
    shape = Shape(requests=((40, 300), (1, 900)), dtype=torch.bfloat16, pages_dtype=FP8_DTYPE)
    batch = make_batch(shape, Options(num_scales=1))
    # Three pages of 128 tokens, two KV heads, a key and a value of 64 elements in two bytes.
    num_bytes = 3 * 128 * 2 * 2 * 64 * 2

    assert planned(batch, scratch_bytes=num_bytes) is not None
    assert planned(batch, scratch_bytes=num_bytes - 1) is None


@pytest.mark.parametrize(
    ("options", "request_tokens", "rows"),
    [
        # Two heads in a group: 64 queries read 300 tokens, less half of their own.
        (Options(num_scales=1), (64, 300), 2 * 64 * (300 - 32) // 300),
        (Options(num_scales=1, is_causal=False), (64, 300), 2 * 64),
        # Each of 64 queries reads 33 tokens, of the 96 that one of them reads.
        (Options(num_scales=1, window_tokens=33), (64, 300), 2 * 64 * 33 // 96),
    ],
    ids=["causal", "cross", "window"],
)
def test_a_scratch_is_planned_if_enough_rows_read_a_token(options, request_tokens, rows):
    shape = Shape(requests=(request_tokens, (1, 900)), pages_dtype=FP8_DTYPE)
    batch = make_batch(shape, options)

    assert planned(batch, min_rows_per_token=rows) is not None
    assert planned(batch, min_rows_per_token=rows + 1) is None
    assert rows < MIN_ROWS_PER_TOKEN


def test_no_scratch_is_planned_without_prompts_or_where_batches_are_invariant():
    shape = Shape(requests=((1, 40), (3, 900), (0, 0)), pages_dtype=FP8_DTYPE)
    decoded = make_batch(shape, Options(num_scales=1))
    prompts = make_batch(replace(shape, requests=((40, 40),)), Options(num_scales=1))
    nothing = make_batch(
        replace(shape, requests=((40, 0),)), Options(num_scales=1, is_causal=False)
    )
    invariant = prompts.plan(is_batch_invariant=True, decode_query_tokens=0)

    assert planned(prompts) is not None
    assert planned(decoded) is None
    assert planned(nothing) is None
    assert (
        plan_scratch(
            invariant,
            prompts.query_starts,
            prompts.seq_lens,
            requests=((40, 40),),
            scratch_bytes=1 << 30,
            min_rows_per_token=0,
        )
        is None
    )


def test_a_plan_refuses_pages_of_16_bits_and_other_numbers_of_requests():
    quantised = make_batch(Shape(requests=((40, 40),), pages_dtype=FP8_DTYPE), Options())
    plain = make_batch(Shape(requests=((40, 40),)), Options())

    with pytest.raises(ValueError, match=r"^plan must be for quantised pages"):
        planned(plain)
    with pytest.raises(ValueError, match=r"^requests must have 1 pairs, got 2"):
        planned(quantised, requests=((40, 40), (1, 1)))
    with pytest.raises(ValueError, match=r"^scratch_bytes must be an integer and at least 0"):
        planned(quantised, scratch_bytes=-1)
    with pytest.raises(ValueError, match=r"^min_rows_per_token must be an integer"):
        planned(quantised, min_rows_per_token=0.5)


def refused(batch, plan):
    scratch = scratch_for(plan)
    other = make_batch(replace(batch.shape, page_tokens=32), batch.options)
    yield {"scratch": scratch[:-1]}, r"^scratch must have at least the plan's \d+ bytes, got \d+"
    yield {"scratch": scratch[:100]}, r"^scratch must have at least \d+ bytes, one page"
    yield {"scratch": scratch.view(torch.int8)}, r"^scratch must be torch.uint8"
    yield {"scratch": scratch.view(-1, 64)}, r"^scratch must have shape \(any\)"
    yield {"scratch": scratch.repeat(2)[::2]}, r"^scratch must be contiguous"
    yield {"scale": 0.0}, r"^scale must be a number greater than 0"
    yield {"k_pages": other.k_pages, "v_pages": other.v_pages}, r"^plan must be made for"


@pytest.mark.parametrize("index", range(7))
def test_scratch_attention_refuses_and_writes_nothing(index):
    shape = Shape(requests=((40, 200), (1, 77)), dtype=torch.bfloat16, pages_dtype=FP8_DTYPE)
    batch = make_batch(shape, Options(num_scales=1))
    plan = planned(batch)
    changes, message = list(refused(batch, plan))[index]
    out = batch.q.new_full(batch.q.shape, 7.0)
    given = arguments_of(batch) | {"plan": plan, "scratch": scratch_for(plan), "out": out}

    with pytest.raises(ValueError, match=message):
        scratch_attention(**given | changes)

    assert (out == 7.0).all()

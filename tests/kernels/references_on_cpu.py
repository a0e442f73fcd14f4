"""Operations on a CPU without Triton's interpreter: what their references do, and their errors.

`test_without_kernels` runs these tests in a process in which no kernel runs.
"""

import inspect
from importlib import import_module

import pytest
import torch
import triton

import jenga_kernels
from jenga_kernels import launches
from jenga_kernels.checks.histories import DeltaHistory, InputHistory
from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.plans.attention_plan import AttentionKind, plan_attention
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.plans.scratch_plan import plan_scratch
from tests.kernels.support import generator, randn, shuffled_page_table, strided_layer
from tests.kernels.test_signatures import OPERATIONS

I32 = torch.int32
FLOAT = torch.float32
QUERY_STARTS = torch.tensor([0, 5, 6], dtype=I32)
SLOTS = {
    "initial_slots": torch.tensor([0, 2], dtype=I32),
    "state_slots": torch.tensor([1, 3], dtype=I32),
}
COUNTS = {
    "slots": torch.tensor([1, 3], dtype=I32),
    "computed_tokens": torch.tensor([4, 9], dtype=I32),
    "state_tokens": torch.tensor([2, 9], dtype=I32),
    "next_state_tokens": torch.tensor([6, 9], dtype=I32),
}
PAGE_TABLE = torch.tensor([[3, 1], [2, 4]], dtype=I32)
SEQ_LENS = torch.tensor([21, 9], dtype=I32)
PACKED = {
    "page_table": PAGE_TABLE,
    "sources": torch.tensor([[[0, 5, 19], [3, 4, 20]], [[1, 2, 9], [0, 7, 9]]], dtype=I32),
    "num_kept": torch.tensor([3, 2], dtype=I32),
    "seq_lens": SEQ_LENS,
}


def numbers(*shape, seed=0, dtype=FLOAT):
    return randn(shape, dtype, generator(seed))


def checkpoints():
    """One state besides the last one: of the first request after two tokens."""
    return Checkpoints(
        starts=torch.tensor([0, 1, 1], dtype=I32),
        after_tokens=torch.tensor([2], dtype=I32),
        slots=torch.tensor([4], dtype=I32),
    )


def cached(dtype, num_heads=2, head_dim=32):
    """Keys and values in pages of a strided arena, all of them numbers, and scales of slots."""
    layer = strided_layer(6, 16, num_heads, head_dim, dtype)
    k, v = (numbers(96, num_heads, head_dim, seed=seed) for seed in (1, 2))
    scales = {}
    if dtype in {torch.int8, torch.uint8}:
        shape = (6, 16, num_heads) + ((2,) if dtype == torch.uint8 else ())
        scale_dtype = torch.bfloat16 if dtype == torch.uint8 else FLOAT
        pair = (torch.zeros(shape, dtype=scale_dtype) for _ in "kv")
        scales = dict(zip(("k_slot_scales", "v_slot_scales"), pair, strict=True))
    pages = {"k_pages": layer.k_pages, "v_pages": layer.v_pages} | scales
    import_module("jenga_kernels.reference.attention.kv_store").kv_store(
        k, v, slots=torch.arange(96), **pages
    )
    return pages


def recurrence():
    return {
        "out": torch.zeros(6, 4, 16),
        "states": numbers(5, 4, 16, 32),
        "x": numbers(6, 4, 16, seed=1),
        "dt": numbers(6, 4, seed=2),
        "A": -numbers(4, seed=3).exp(),
        "B": numbers(6, 2, 32, seed=4),
        "C": numbers(6, 2, 32, seed=5),
        "D": numbers(4, seed=6),
        "query_starts": QUERY_STARTS,
    }


def delta_rule():
    return {
        "out": torch.zeros(6, 4, 16),
        "states": numbers(5, 4, 16, 32),
        "q": numbers(6, 2, 32, seed=1),
        "k": numbers(6, 2, 32, seed=2),
        "v": numbers(6, 4, 16, seed=3),
        "gates": -numbers(6, 4, seed=4).exp(),
        "betas": numbers(6, 4, seed=5).sigmoid(),
        "query_starts": QUERY_STARTS,
    }


def convolution():
    return {
        "out": torch.zeros(6, 48),
        "states": numbers(5, 48, 3),
        "x": numbers(6, 48, seed=1),
        "weight": numbers(48, 4, seed=2),
        "query_starts": QUERY_STARTS,
    } | SLOTS


def attention(dtype, **options):
    shared = {"page_table": PAGE_TABLE, "query_starts": QUERY_STARTS, "seq_lens": SEQ_LENS}
    return {"q": numbers(8, 4, 32), "scale": 0.2} | cached(dtype) | shared | options


def planned_attention():
    given = attention(FLOAT, out=torch.full((8, 4, 32), 7.0), lse=torch.zeros(8, 4))
    kind = AttentionKind(num_heads=4, num_kv_heads=2, head_dim=32, page_tokens=16)
    plan = plan_attention(QUERY_STARTS, SEQ_LENS, kind, num_tokens=8, dtype=FLOAT)
    return given | {"plan": plan}


def scratched(dtype):
    """A prompt of five tokens through a scratch, and a decoded request."""
    given = attention(dtype)
    kind = AttentionKind(
        num_heads=4, num_kv_heads=2, head_dim=32, page_tokens=16, is_quantised=True
    )
    plan = plan_attention(
        QUERY_STARTS, SEQ_LENS, kind, num_tokens=8, dtype=FLOAT, decode_query_tokens=1
    )
    through = plan_scratch(
        plan,
        QUERY_STARTS,
        SEQ_LENS,
        requests=((5, 21), (1, 9)),
        scratch_bytes=1 << 20,
        min_rows_per_token=0,
    )
    assert through is not None
    return given | {"plan": through, "scratch": torch.zeros(1 << 20, dtype=torch.uint8)}


def latents(dtype, *, is_planned=False):
    pages = numbers(6, 16, 48, seed=3).to(dtype)
    given = {
        "q": numbers(8, 4, 48),
        "pages": pages,
        "page_table": PAGE_TABLE,
        "query_starts": QUERY_STARTS,
        "seq_lens": SEQ_LENS,
        "scale": 0.2,
        "latent_dim": 32,
    }
    if is_planned:
        kind = AttentionKind(
            num_heads=4, num_kv_heads=1, head_dim=32, page_tokens=16, is_quantised=dtype != FLOAT
        )
        given["plan"] = plan_latent_attention(
            QUERY_STARTS, SEQ_LENS, kind, num_tokens=8, dtype=FLOAT
        )
    return given


def stored(dtype):
    """New tokens of which one is padding, for pages of which most slots are dead."""
    slots = torch.tensor([17, 3, -1, 95], dtype=torch.int64)
    new = {"k": numbers(4, 2, 32), "v": numbers(4, 2, 32, seed=1), "slots": slots}
    return cached(dtype) | new


def dequantised(dtype):
    """Pages of 8 tokens of which one gets none, and one only some."""
    runs = torch.tensor([[0, 16, 21], [1, 0, 8], [-1, 0, 8], [0, 0, 8]], dtype=I32)
    outputs = {name: torch.full((4, 8, 2, 32), torch.nan) for name in ("k_out", "v_out")}
    return cached(dtype) | outputs | {"page_table": PAGE_TABLE, "page_runs": runs}


def merged():
    parts = {"first_out": numbers(5, 2, 16), "second_out": numbers(5, 2, 16, seed=1)}
    sums = {"first_lse": numbers(5, 2, seed=2), "second_lse": numbers(5, 2, seed=3)}
    return parts | sums | {"lse": torch.zeros(5, 2)}


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


CASES = {
    "attention_merge": merged,
    "causal_conv": convolution,
    "conv_update": lambda: convolution() | {
        "state_slots": torch.tensor([[1, 0, 0, 0, 4], [3, 0, 0, 0, 0]], dtype=I32)
    },
    "delta_replay": lambda: delta_rule() | COUNTS | {
        "history": DeltaHistory(
            changes=numbers(5, 4, 8, 16), keys=numbers(5, 2, 8, 32), decays=-numbers(5, 4, 8).abs()
        )
    },
    "delta_scan": lambda: delta_rule() | SLOTS | {"checkpoints": checkpoints()},
    "delta_update": lambda: delta_rule() | SLOTS | {
        "state_slots": torch.tensor([[1, 0, 0, 0, 4], [3, 0, 0, 0, 0]], dtype=I32)
    },
    "dequantise_pages": lambda: dequantised(torch.float8_e4m3fn),
    "dequantise_pages of the other float8": lambda: dequantised(torch.float8_e5m2),
    "dequantise_pages of int8": lambda: dequantised(torch.int8),
    "dequantise_pages of int4": lambda: dequantised(torch.uint8),
    "kv_store": lambda: stored(FLOAT),
    "kv_store of float8": lambda: stored(torch.float8_e4m3fn),
    "kv_store of the other float8": lambda: stored(torch.float8_e5m2),
    "kv_store of int8": lambda: stored(torch.int8),
    "kv_store of int4": lambda: stored(torch.uint8),
    "latent_attention": lambda: latents(FLOAT),
    "latent_attention of float8": lambda: latents(torch.float8_e4m3fn, is_planned=True),
    "latent_store": lambda: {
        "latents": numbers(3, 32),
        "rotary_keys": numbers(3, 16),
        "pages": torch.full((4, 16, 48), torch.nan),
        "slots": ids(20, -1, 4),
    },
    "pack_slots": lambda: cached(FLOAT) | PACKED,
    "page_clear": lambda: {"pages": numbers(6, 32), "page_ids": ids(1, -1, 4)},
    "page_copy": lambda: {
        "pages": numbers(6, 32), "source_ids": ids(1, 2, -1), "target_ids": ids(4, -1, 0)
    },
    "paged_attention": lambda: attention(FLOAT),
    "paged_attention with a plan": planned_attention,
    "paged_attention of windows": lambda: attention(FLOAT, window_tokens=6, sinks=numbers(4)),
    "paged_attention of float8": lambda: attention(torch.float8_e4m3fn),
    "paged_attention of int8": lambda: attention(torch.int8),
    "paged_attention of int4": lambda: attention(torch.uint8),
    "scratch_attention": lambda: scratched(torch.float8_e4m3fn),
    "state_replay": lambda: recurrence() | COUNTS | {
        "history": InputHistory(
            x=numbers(5, 4, 8, 16), dt=numbers(5, 4, 8).abs(), B=numbers(5, 2, 8, 32)
        )
    },
    "state_scan": lambda: recurrence() | SLOTS | {"checkpoints": checkpoints()},
    "token_scores": lambda: {
        "q": numbers(6, 4, 32),
        "k_pages": cached(FLOAT)["k_pages"],
        "page_table": PAGE_TABLE,
        "query_ends": torch.tensor([4, 6], dtype=I32),
        "seq_lens": SEQ_LENS,
        "num_queries": torch.tensor([2, 1], dtype=I32),
        "lse": numbers(6, 4, seed=4),
        "scale": 0.2,
        "out": torch.zeros(2, 2, 24),
    },
    "state_update": lambda: recurrence() | SLOTS | {
        "state_slots": torch.tensor([[1, 0, 0, 0, 4], [3, 0, 0, 0, 0]], dtype=I32)
    },
}  # fmt: skip
"""Operation, and what is special -> arguments, made anew at each call."""


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Fail a test in which a kernel is launched, and show that no kernel could have been."""
    assert not triton.knobs.runtime.interpret
    assert not launches.has_kernels(torch.device("cpu"))

    def run(self, *_, **__):
        pytest.fail(f"{self} was launched")

    monkeypatch.setattr(triton.JITFunction, "run", run)


def operation_and_reference(case):
    name = case.split()[0]
    operation = getattr(jenga_kernels, name)
    home = operation.__module__.replace("jenga_kernels.", "jenga_kernels.reference.")
    return operation, getattr(import_module(home), name)


def in_memory(value):
    """Get the bytes of all tensors of an argument, dead slots of NaN among them."""
    parts = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, (DeltaHistory, InputHistory, Checkpoints)):
        parts = [getattr(value, name) for name in value.__slots__]
    return [part.contiguous().view(torch.uint8).tolist() for part in parts if part.dim()]


def test_every_operation_has_a_case():
    assert {case.split()[0] for case in CASES} == set(OPERATIONS)


@pytest.mark.parametrize("case", CASES)
def test_an_operation_writes_and_returns_what_its_reference_does(case):
    operation, reference = operation_and_reference(case)
    got, want, before = (CASES[case]() for _ in range(3))
    is_padded = got.get("out") is None and "attention" in case and "merge" not in case
    kept = slice(6) if is_padded else slice(None)  # rows past the requests' hold anything

    results = [operation(**got), reference(**want)]

    assert in_memory(results[0][kept] if results[0] is not None else None) == in_memory(
        results[1][kept] if results[1] is not None else None
    )
    for name, value in got.items():
        assert in_memory(value) == in_memory(want[name]), name
    changed = any(in_memory(got[name]) != in_memory(before[name]) for name in got)
    assert changed or results[0] is not None


@pytest.mark.parametrize("case", CASES)
def test_an_operation_called_by_position_twice_does_the_same(case):
    operation, reference = operation_and_reference(case)
    for _ in range(2):
        got, want = CASES[case](), CASES[case]()
        parameters = inspect.signature(operation).parameters.values()
        names = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
        positional = [got[name] for name in names]

        operation(*positional, **{name: got[name] for name in got if name not in names})
        reference(**want)

        for name, value in got.items():
            assert in_memory(value) == in_memory(want[name]), name


@pytest.mark.parametrize("case", CASES)
def test_an_operation_refuses_what_does_not_fit_before_it_writes(case):
    operation, _ = operation_and_reference(case)
    given, before = CASES[case](), CASES[case]()
    wrong = {
        "slots": lambda slots: slots.to(torch.int16),
        "page_ids": lambda ids: ids.to(torch.int16),
        "target_ids": lambda ids: ids[:-1],
        "state_slots": lambda slots: slots.to(torch.int64),
        "seq_lens": lambda lens: lens[:-1],
        "page_runs": lambda runs: runs[:, :2],
        "second_lse": lambda lse: lse[:, :-1],
    }
    name = next(name for name in wrong if name in given)

    with pytest.raises(ValueError, match=name):
        operation(**given | {name: wrong[name](given[name])})

    for name, value in given.items():
        assert in_memory(value) == in_memory(before[name]), name


def test_a_long_prompt_is_attended_to_block_by_block():
    num_tokens = 600  # more than two blocks of queries
    k, v, q = (numbers(num_tokens, 2, 32, seed=seed) for seed in range(3))
    layer = strided_layer(1 + num_tokens, 1, 2, 32, FLOAT)
    table = shuffled_page_table([num_tokens], 1 + num_tokens, generator(4))
    slots = table[0, :num_tokens].long()
    kv_store, paged_attention = jenga_kernels.kv_store, jenga_kernels.paged_attention

    kv_store(k, v, layer.k_pages, layer.v_pages, slots)
    starts = torch.tensor([0, num_tokens], dtype=I32)
    out = paged_attention(
        q, layer.k_pages, layer.v_pages, table, starts, starts[1:].contiguous(), scale=0.1
    )

    by_head = (x.double().transpose(0, 1) for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, scale=0.1)
    torch.testing.assert_close(out.double(), exact.transpose(0, 1), rtol=1e-5, atol=1e-5)

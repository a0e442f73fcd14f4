"""What paged attention refuses, by name, before anything is launched."""

import numpy as np
import pytest
import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.plans.attention_plan import AttentionKind, plan_attention
from tests.kernels.attention.attention_cases import Options, Shape, make_batch
from tests.kernels.support import DEVICE


def good_arguments():
    return make_batch(Shape(requests=((1, 20), (3, 20)), dtype=torch.float16), Options()).arguments


def plan_of(arguments, **changes):
    kind = AttentionKind(num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=16)
    options = {"num_tokens": 4, "dtype": torch.float16} | changes
    return plan_attention(arguments["query_starts"], arguments["seq_lens"], kind, **options)


BAD_ARGUMENTS = {
    "heads_too_wide": ("q", lambda a: {"q": a["q"].repeat(1, 1, 9)}),
    "a_flat_query": ("q", lambda a: {"q": a["q"].flatten(1)}),
    "queries_of_another_head_dim": ("k_pages", lambda a: {"q": a["q"][..., :32]}),
    "integer_queries": ("q", lambda a: {"q": a["q"].int()}),
    "keys_in_float32_of_other_queries": ("k_pages", lambda a: {"k_pages": a["k_pages"].float()}),
    "heads_that_do_not_divide": ("num_heads", lambda a: {"q": a["q"][:, :3]}),
    "values_of_another_layout": ("v_pages", lambda a: {"v_pages": a["v_pages"].contiguous()}),
    "queries_without_heads": ("num_heads", lambda a: {"q": a["q"][:, :0]}),
    "a_64_bit_page_table": ("page_table", lambda a: {"page_table": a["page_table"].long()}),
    "a_transposed_page_table": (
        "page_table",
        lambda a: {"page_table": a["page_table"].T.contiguous().T},
    ),
    "a_page_table_without_columns": (
        "page_table",
        lambda a: {"page_table": a["page_table"][:, :0], "seq_lens": a["seq_lens"] * 0},
    ),
    "too_few_query_starts": ("query_starts", lambda a: {"query_starts": a["query_starts"][:2]}),
    "too_many_lengths": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].repeat(2)}),
    "lengths_of_64_bits": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].long()}),
    "a_scale_of_zero": ("scale", lambda _: {"scale": 0.0}),
    "a_scale_that_is_no_number": ("scale", lambda _: {"scale": float("nan")}),
    "a_scale_on_a_device": ("scale", lambda _: {"scale": torch.tensor(0.125, device=DEVICE)}),
    "a_window_of_zero": ("window_tokens", lambda _: {"window_tokens": 0}),
    "a_window_of_part_of_a_token": ("window_tokens", lambda _: {"window_tokens": 3.5}),
    "a_window_that_is_a_fact": ("window_tokens", lambda _: {"window_tokens": True}),
    "a_negative_chunk": ("chunk_tokens", lambda _: {"chunk_tokens": -1}),
    "a_window_in_cross_attention": (
        "window_tokens",
        lambda _: {"window_tokens": 5, "is_causal": False},
    ),
    "a_chunk_in_floating_point": ("chunk_tokens", lambda _: {"chunk_tokens": 16.0}),
    "a_negative_soft_cap": ("soft_cap", lambda _: {"soft_cap": -1.0}),
    "sinks_of_another_length": ("sinks", lambda _: {"sinks": torch.zeros(3, device=DEVICE)}),
    "slopes_of_another_dtype": (
        "alibi_slopes",
        lambda _: {"alibi_slopes": torch.zeros(4, dtype=torch.float16, device=DEVICE)},
    ),
    "spans_of_another_shape": (
        "spans",
        lambda _: {"spans": torch.zeros(4, 3, dtype=torch.int32, device=DEVICE)},
    ),
    "a_scale_of_pages_that_have_none": (
        "k_scale",
        lambda _: {"k_scale": torch.ones(1, device=DEVICE)},
    ),
    "results_of_another_dtype": ("out", lambda a: {"out": a["q"].float().contiguous()}),
    "queries_that_require_a_gradient": (
        "q",
        lambda a: {"q": a["q"].clone().requires_grad_()},
    ),
    "sinks_that_require_a_gradient": (
        "sinks",
        lambda _: {"sinks": torch.zeros(4, device=DEVICE, requires_grad=True)},
    ),
    "results_onto_queries": ("out", lambda a: dict.fromkeys(("q", "out"), a["q"].contiguous())),
    "scattered_results": ("out", lambda a: {"out": a["q"]}),
    "sums_of_another_shape": ("lse", lambda _: {"lse": torch.zeros(4, 3, device=DEVICE)}),
    "a_plan_for_other_layers": ("plan", lambda a: {"plan": plan_of(a), "window_tokens": 4}),
    "a_plan_for_fewer_tokens": ("plan", lambda a: {"plan": plan_of(a, num_tokens=3)}),
    "a_plan_for_another_dtype": ("plan", lambda a: {"plan": plan_of(a, dtype=torch.float32)}),
    "a_decoding_plan_with_spans": (
        "plan",
        lambda a: {
            "plan": plan_of(a),
            "spans": torch.zeros(4, 2, dtype=torch.int32, device=DEVICE),
        },
    ),
}


@pytest.mark.parametrize("window_tokens", [16.0, 1.0, True])
def test_paged_attention_refuses_a_window_that_equals_an_earlier_one(window_tokens):
    arguments = good_arguments()
    paged_attention(**arguments | {"window_tokens": int(window_tokens)})

    with pytest.raises(ValueError, match=r"^window_tokens "):
        paged_attention(**arguments | {"window_tokens": window_tokens})


@pytest.mark.parametrize("name", ["window_tokens", "chunk_tokens"])
def test_paged_attention_takes_numbers_of_tokens_from_numpy(name):
    arguments = good_arguments()

    out = paged_attention(**arguments | {name: np.int64(3)})

    assert torch.equal(out, paged_attention(**arguments | {name: 3}))


@pytest.mark.parametrize("num_tokens", [2**31 - 1, 2**31, 2**64])
@pytest.mark.parametrize("name", ["window_tokens", "chunk_tokens"])
def test_a_window_wider_than_any_request_is_none(name, num_tokens):
    # In 64 bits it would have the plan's kernel count in them, for which it is not compiled.
    arguments = good_arguments()

    out = paged_attention(**arguments | {name: num_tokens})

    assert torch.equal(out, paged_attention(**arguments))
    kind = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_tokens": 16}
    assert AttentionKind(**kind, **{name: num_tokens}) == AttentionKind(**kind)


def test_plans_take_numbers_from_numpy():
    arguments = good_arguments()
    names = ("num_tokens", "max_query_tokens", "decode_query_tokens")
    counts = dict(zip(names, (4, 3, 1), strict=True))

    plan = plan_of(arguments, **{name: np.int32(count) for name, count in counts.items()})

    out = paged_attention(**arguments | {"plan": plan})
    assert torch.equal(out, paged_attention(**arguments | {"plan": plan_of(arguments, **counts)}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, "float16"], ids=str)
def test_plans_of_queries_that_cannot_be_are_refused(dtype):
    with pytest.raises(ValueError, match=r"^dtype must be "):
        plan_of(good_arguments(), dtype=dtype)


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_paged_attention_refuses(name, change):
    arguments = good_arguments()
    arguments |= change(arguments)

    with pytest.raises(ValueError, match=f"^{name} "):
        paged_attention(**arguments)


def test_paged_attention_takes_parameters_without_their_gradients():
    arguments = good_arguments()
    wanted = paged_attention(**arguments)

    with torch.no_grad():
        out = paged_attention(**arguments | {"q": arguments["q"].clone().requires_grad_()})

    assert torch.equal(out, wanted)

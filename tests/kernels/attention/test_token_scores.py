import pytest
import torch

from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.attention.token_choice import choose_tokens
from jenga_kernels.attention.token_scores import token_scores
from jenga_kernels.reference.attention import token_scores as reference
from tests.kernels.attention.attention_cases import Options, Shape, make_batch
from tests.kernels.compiling import compile_job
from tests.kernels.support import DEVICE, check_close, generator

I32 = torch.int32

SHAPES = {
    # (queries of the step, tokens stored) of each request
    "whole_prompts": Shape(requests=[(40, 40), (17, 17)]),
    "last_chunks": Shape(requests=[(9, 70), (8, 33)], num_heads=6, num_kv_heads=1),
    "odd_page_and_head_dim": Shape(requests=[(12, 50)], page_tokens=24, head_dim=80),
    "token_major": Shape(requests=[(20, 65)], is_head_major=False, head_dim=128),
}


def counts(shape, number):
    """The same number for each request."""
    return torch.full((len(shape.requests),), number, dtype=I32, device=DEVICE)


def scored(shape, options=None, **named):
    """Run a batch, and get the arguments of the operation for it."""
    options = options or Options()
    batch = make_batch(shape, options, seed=3)
    lse = torch.empty(batch.q.shape[:2], dtype=torch.float32, device=DEVICE)
    paged_attention(**batch.arguments, lse=lse)
    max_tokens = int(batch.seq_lens.max()) + 3
    shape_of_out = (len(shape.requests), shape.num_kv_heads, max_tokens)
    return {
        "q": batch.q,
        "k_pages": batch.k_pages,
        "page_table": batch.page_table,
        "query_ends": batch.query_starts[1:].contiguous(),
        "seq_lens": batch.seq_lens,
        "num_queries": counts(shape, 8),
        "lse": lse,
        "scale": shape.head_dim**-0.5,
        "soft_cap": options.soft_cap,
        "out": torch.full(shape_of_out, torch.nan, device=DEVICE),
    } | named


def in_float64(arguments):
    """Get exact scores, from log-sum-exps that are computed again."""
    wide = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    return reference.token_scores(**wide)


@pytest.mark.parametrize("soft_cap", [None, 5.0], ids=["plain", "soft_cap"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_token_scores_agree_with_their_reference(shape, soft_cap):
    arguments = scored(shape, Options(soft_cap=soft_cap))
    naive = reference.token_scores(**arguments | {"out": arguments["out"].clone()})

    got = token_scores(**arguments)

    check_close(got, in_float64(arguments), naive)


def test_scores_of_a_head_sum_up_to_its_queries():
    shape = SHAPES["last_chunks"]

    num_queries = torch.tensor([5, 1], dtype=I32, device=DEVICE)

    got = token_scores(**scored(shape, num_queries=num_queries))

    per_query = shape.num_heads / shape.num_kv_heads
    assert got.sum(2).allclose(per_query * num_queries[:, None].float())
    assert not got[0, :, 70:].any()
    assert not got[1, :, 33:].any()


def test_scores_are_the_weights_that_dense_softmax_gives():
    shape = Shape(requests=[(40, 40)], num_heads=2, num_kv_heads=1)
    arguments = scored(shape, num_queries=counts(shape, 3))
    slots = arguments["page_table"][0].long()
    keys = arguments["k_pages"][slots].flatten(0, 1)[:40, 0]

    got = token_scores(**arguments)

    products = torch.einsum("qhd,kd->hqk", arguments["q"], keys) * shape.head_dim**-0.5
    mask = torch.ones(40, 40, dtype=torch.bool, device=DEVICE).tril()
    weights = products.masked_fill(~mask, -torch.inf).softmax(2)
    assert torch.allclose(got[0, 0, :40], weights[:, -3:].sum((0, 1)), atol=1e-5)


BAD_ARGUMENTS = {
    "integer_queries": ("q", lambda a: {"q": a["q"].int()}),
    "keys_of_another_width": ("k_pages", lambda a: {"k_pages": a["k_pages"][..., :32]}),
    "keys_of_another_dtype": ("k_pages", lambda a: {"k_pages": a["k_pages"].half()}),
    "heads_without_a_group": ("q", lambda a: {"q": a["q"][:, :3]}),
    "wide_page_table": ("page_table", lambda a: {"page_table": a["page_table"].long()}),
    "fewer_ends": ("query_ends", lambda a: {"query_ends": a["query_ends"][:1]}),
    "lengths_of_64_bits": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].long()}),
    "log_sums_of_fewer_heads": ("lse", lambda a: {"lse": a["lse"][:, :2]}),
    "scores_of_another_dtype": ("out", lambda a: {"out": a["out"].double()}),
    "scores_of_more_tokens_than_slots": (
        "out",
        lambda _: {"out": torch.zeros(2, 2, 1000, device=DEVICE)},
    ),
    "wide_counts_of_queries": ("num_queries", lambda a: {"num_queries": a["num_queries"].long()}),
    "a_scale_of_zero": ("scale", lambda _: {"scale": 0.0}),
    "a_negative_cap": ("soft_cap", lambda _: {"soft_cap": -1.0}),
}


@pytest.mark.parametrize(("name", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_token_scores_refuse_and_write_nothing(name, change):
    arguments = scored(Shape(requests=[(9, 9), (8, 8)]))
    arguments |= change(arguments)
    before = arguments["out"].clone()

    with pytest.raises(ValueError, match=f"^{name} "):
        token_scores(**arguments)

    assert torch.equal(arguments["out"], before) or before.isnan().all()


def chosen(scores, seq_len, count, **named):
    options = {"max_kept": count, "sink_tokens": 0, "recent_tokens": 0, "pool_tokens": 1} | named
    return choose_tokens(
        torch.tensor(scores)[None],
        torch.tensor([seq_len], dtype=I32),
        torch.tensor([count], dtype=I32),
        **options,
    )[0].tolist()


def test_choice_keeps_the_greatest_scores_of_each_head_in_order():
    scores = [[0.1, 0.9, 0.2, 0.8, 0.3, 0.7], [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]]

    assert chosen(scores, 6, 3) == [[1, 3, 5], [0, 1, 2]]


def test_choice_keeps_sinks_and_recent_tokens_whatever_their_scores():
    scores = [[0.0, 0.1, 0.9, 0.8, 0.7, 0.0, 0.0]]

    assert chosen(scores, 7, 4, sink_tokens=1, recent_tokens=2) == [[0, 2, 5, 6]]


def test_choice_pools_neighbours_and_leaves_recent_scores_out():
    scores = [[0.0, 0.0, 0.6, 0.0, 0.0, 0.5, 0.0, 0.9]]

    # The last score does not count, so token 6 is as good as token 5, and is left out as later.
    assert chosen(scores, 8, 5, recent_tokens=1, pool_tokens=3) == [[1, 2, 3, 4, 7]]


def test_choice_takes_no_token_past_a_request():
    scores = [[0.1, 0.2, 0.3, 5.0, 5.0]]

    assert chosen(scores, 3, 2) == [[1, 2]]


def test_choice_gives_each_request_its_own_number():
    scores = torch.rand((2, 3, 20), generator=generator(1))
    counts = torch.tensor([4, 9], dtype=I32)

    got = choose_tokens(
        scores,
        torch.tensor([20, 15], dtype=I32),
        counts,
        max_kept=9,
        sink_tokens=1,
        recent_tokens=2,
        pool_tokens=3,
    )

    assert got.shape == (2, 3, 9)
    for row, (count, end) in enumerate([(4, 20), (9, 15)]):
        for kept in got[row, :, :count].tolist():
            assert kept == sorted(set(kept))
            assert kept[0] == 0
            assert kept[-2:] == [end - 2, end - 1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("scores", {"scores": torch.zeros(1, 2, 8).double()}),
        ("seq_lens", {"seq_lens": torch.zeros(2, dtype=I32)}),
        ("num_kept", {"num_kept": torch.zeros(1)}),
        ("sink_tokens", {"sink_tokens": -1}),
        ("pool_tokens", {"pool_tokens": 4}),
        ("max_kept", {"max_kept": 9}),
    ],
)
def test_choice_refuses(name, changes):
    arguments = {
        "scores": torch.zeros(1, 2, 8),
        "seq_lens": torch.tensor([8], dtype=I32),
        "num_kept": torch.tensor([4], dtype=I32),
        "max_kept": 4,
        "sink_tokens": 1,
        "recent_tokens": 1,
        "pool_tokens": 3,
    }

    with pytest.raises(ValueError, match=f"^{name} "):
        choose_tokens(**arguments | changes)


def compile_scores(dtype, head_dim, soft_cap):
    ints = {"dtype": I32}
    token_scores(
        torch.zeros(40, 8, head_dim, dtype=dtype),
        torch.zeros(4, 3, 16, 2, head_dim, dtype=dtype)[:, 1],
        torch.zeros(2, 4, **ints),
        torch.zeros(2, **ints),
        torch.zeros(2, **ints),
        torch.zeros(2, **ints),
        torch.zeros(40, 8),
        scale=0.1,
        soft_cap=soft_cap,
        out=torch.zeros(2, 2, 64),
    )


def compile_all():
    compile_scores(torch.bfloat16, 128, None)
    compile_scores(torch.bfloat16, 256, 50.0)
    compile_scores(torch.float32, 64, None)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
def test_token_scores_compile_without_spills(capability):
    for kernel in compile_job(compile_all, capability):
        assert kernel.stack_bytes == 0, kernel

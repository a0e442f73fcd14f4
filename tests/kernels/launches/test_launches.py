import gc
import weakref

import pytest
import torch

from jenga_kernels import launches
from jenga_kernels.attention.kv_store import kv_store
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.launches import Call, Launch, call_like
from jenga_kernels.plans.attention_plan import AttentionKind, plan_attention
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.recurrent.causal_conv import causal_conv
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.recurrent.state_scan import state_scan
from tests.kernels.delta.delta_cases import delta_tensors
from tests.kernels.recurrent.state_cases import i32, recurrence_tensors
from tests.kernels.support import DEVICE, generator, randn


class Compiled:
    """What a launch gives, where kernels are compiled."""

    def __init__(self, seen, module):
        self.seen, self.module = seen, module

    def __getitem__(self, grid):
        return lambda *args: self.seen.append(("compiled", grid, args))


class Kernel:
    """Notes its launches, by whom and with what."""

    arg_names = ("out_ptr", "size", "BLOCK")

    def __init__(self, module):
        self.seen, self.module = [], module

    def __getitem__(self, grid):
        def run(**arguments):
            self.seen.append(("triton", grid, arguments))
            return Compiled(self.seen, self.module)

        return run


def run_twice(kernel, constants):
    call = Call()
    call.launches = [Launch(kernel=kernel, grid=(4,), constants=constants)]
    first, second = torch.zeros(2, 3)
    call.run({"out_ptr": first, "another_ptr": None})
    call.run({"out_ptr": second, "another_ptr": None})
    return first, second


def test_what_was_compiled_for_a_call_is_launched_by_the_next_one_alike():
    kernel = Kernel(module=object())

    first, second = run_twice(kernel, {"BLOCK": 16, "size": 3, "num_warps": 4, "unused": 1})

    arguments = {"out_ptr": first, "size": 3, "BLOCK": 16, "num_warps": 4}
    (by, grid, given), (by_next, next_grid, next_given) = kernel.seen
    assert (by, grid, by_next, next_grid[:3]) == ("triton", (4,), "compiled", (4, 1, 1))
    assert given.keys() == arguments.keys()
    assert given["out_ptr"] is first
    assert next_given[0] is second
    assert next_given[1:] == (3, 16)


@pytest.mark.parametrize(
    ("module", "constants"),
    [
        (None, {"BLOCK": 16, "size": 3}),  # compiled, and loaded on no GPU
        (object(), {"BLOCK": 16}),  # the kernel has a default
    ],
)
def test_what_cannot_be_launched_as_it_is_goes_by_way_of_triton(module, constants):
    kernel = Kernel(module)

    run_twice(kernel, constants)

    assert [by for by, _, _ in kernel.seen] == ["triton", "triton"]


ROWS = torch.zeros(8, 64)
UNLIKE = {
    "shape": (ROWS[:7], None, 1),
    "stride": (torch.zeros(64, 8).T, None, 1),
    "dtype": (ROWS.half(), None, 1),
    "alignment": (torch.zeros(8 * 64 + 1)[1:].view(8, 64), None, 1),
    "gradient": (torch.zeros(8, 64, requires_grad=True), None, 1),
    "presence": (ROWS, ROWS, 1),
    "a_number": (ROWS, None, 2),
    "its_type": (ROWS, None, 1.0),
    "a_bool": (ROWS, None, True),
}


@pytest.mark.parametrize("arguments", UNLIKE.values(), ids=UNLIKE.keys())
def test_calls_are_alike_but_for_addresses_and_what_tensors_hold(arguments):
    calls = {}

    call = call_like(calls, ROWS, None, 1)

    assert call_like(calls, torch.ones(8, 64), None, 1) is call
    assert call_like(calls, *arguments) is not call
    with torch.no_grad():
        assert call_like(calls, ROWS, None, 1) is not call


def test_calls_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(launches, "MAX_CALLS", 3)
    calls = {}

    for size in range(10):
        call_like(calls, size)
        assert len(calls) <= 3


def attention_inputs(seed):
    rng = generator(seed)
    q = randn((40, 4, 64), torch.bfloat16, rng)
    k_pages, v_pages = randn((2, 9, 16, 2, 64), torch.bfloat16, rng)
    page_table = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[None] + 1
    return q, k_pages, v_pages, page_table.to(DEVICE, torch.int32)


@pytest.mark.parametrize("query_lens", [[40], [1, 39], [1]], ids=["prompt", "mixed", "decode"])
def test_attention_gives_the_same_whether_its_call_is_remembered_or_not(query_lens):
    starts = i32([0, *torch.tensor(query_lens).cumsum(0).tolist()])
    seq_lens = i32([90] * len(query_lens))
    plan, results = None, []
    for seed in (1, 2, 3):
        q, k_pages, v_pages, page_table = attention_inputs(seed)
        q, page_table = q[: sum(query_lens)], page_table.expand(len(query_lens), -1).contiguous()
        arguments = (q, k_pages, v_pages, page_table, starts, seq_lens)
        alone = paged_attention(*arguments, scale=0.125)
        if plan is None:
            kind = AttentionKind(num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=16)
            plan = plan_attention(
                starts,
                seq_lens,
                kind,
                num_tokens=len(q),
                dtype=q.dtype,
                min_query_tokens=min(query_lens),
            )
        results.append((alone, paged_attention(*arguments, scale=0.125, plan=plan)))

    assert len(plan.calls) == 1
    for alone, planned in results:
        assert torch.equal(alone, planned)
    assert not torch.equal(results[0][0], results[1][0])


def latent_inputs(seed):
    rng = generator(seed)
    q, pages = randn((40, 16, 96), torch.bfloat16, rng), randn((9, 16, 96), torch.bfloat16, rng)
    page_table = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[None] + 1
    return q, pages, page_table.to(DEVICE, torch.int32)


@pytest.mark.parametrize("query_lens", [[40], [1, 39], [1]], ids=["prompt", "mixed", "decode"])
def test_attention_over_latents_too(query_lens):
    starts = i32([0, *torch.tensor(query_lens).cumsum(0).tolist()])
    seq_lens = i32([90] * len(query_lens))
    kind = AttentionKind(num_heads=16, num_kv_heads=1, head_dim=64, page_tokens=16)
    plan, results = None, []
    for seed in (1, 2, 3):
        q, pages, page_table = latent_inputs(seed)
        q, page_table = q[: sum(query_lens)], page_table.expand(len(query_lens), -1).contiguous()
        arguments = (q, pages, page_table, starts, seq_lens)
        alone = latent_attention(*arguments, scale=0.125, latent_dim=64)
        if plan is None:
            plan = plan_latent_attention(starts, seq_lens, kind, num_tokens=len(q), dtype=q.dtype)
        planned = latent_attention(*arguments, scale=0.125, latent_dim=64, plan=plan)
        results.append((alone, planned))

    assert len(plan.calls) == 1
    for alone, planned in results:
        assert torch.equal(alone, planned)
    assert not torch.equal(results[0][0], results[1][0])


def test_a_remembered_call_over_latents_keeps_no_tensor_and_what_it_refused():
    q, pages, page_table = latent_inputs(4)
    arguments = {"page_table": page_table, "query_starts": i32([0, 40]), "seq_lens": i32([90])}
    for _ in range(2):
        with pytest.raises(ValueError, match="scale must be"):
            latent_attention(q, pages, **arguments, scale=-1, latent_dim=64)
    kept = [weakref.ref(tensor) for tensor in (q, pages)]
    out = latent_attention(q, pages, **arguments, scale=0.125, latent_dim=64)

    del q, pages
    gc.collect()

    assert out.isfinite().all()
    assert [ref() for ref in kept] == [None] * 2


def test_a_remembered_call_keeps_no_tensor():
    q, k_pages, v_pages, page_table = attention_inputs(4)
    kept = [weakref.ref(tensor) for tensor in (q, k_pages, v_pages)]
    out = paged_attention(q, k_pages, v_pages, page_table, i32([0, 40]), i32([90]), scale=0.125)
    kv_store(k_pages[0], v_pages[0], k_pages, v_pages, torch.arange(16, 32, device=DEVICE))

    del q, k_pages, v_pages
    gc.collect()

    assert out.isfinite().all()
    assert [ref() for ref in kept] == [None] * 3


def test_what_a_call_was_refused_for_is_looked_at_again():
    q, k_pages, v_pages, page_table = attention_inputs(5)
    arguments = (q, k_pages, v_pages, page_table, i32([0, 40]), i32([90]))

    for _ in range(2):
        with pytest.raises(ValueError, match="scale must be"):
            paged_attention(*arguments, scale=-1)
    out = paged_attention(*arguments, scale=0.125)
    for _ in range(2):
        with pytest.raises(ValueError, match="out must not be q"):
            paged_attention(*arguments, scale=0.125, out=q)
    assert torch.equal(paged_attention(*arguments, scale=0.125), out)


def copies_of(values):
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_scans_give_the_same_whether_their_calls_are_remembered_or_not(segment_tokens):
    for dtype in (torch.bfloat16, torch.float32):
        first, second = (
            recurrence_tensors(150, "heads", (2, 64, 64, 1), dtype, generator(seed))
            for seed in (1, 2)
        )
        slots = {"query_starts": i32([0, 150]), "initial_slots": i32([0]), "state_slots": i32([1])}
        results = []
        for tensors in (first, second, copies_of(first)):
            tensors["z"] = None
            out, states = torch.empty_like(tensors["x"]), torch.zeros(2, 2, 64, 64, device=DEVICE)
            state_scan(out, states, **tensors, **slots, segment_tokens=segment_tokens)
            results.append((out, states))
        assert torch.equal(results[0][0], results[2][0])
        assert torch.equal(results[0][1], results[2][1])
        assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("channels", [False, True])
def test_scans_of_the_delta_rule_too(channels):
    slots = {"query_starts": i32([0, 70]), "initial_slots": i32([0]), "state_slots": i32([1])}
    first, second = (
        delta_tensors(70, (1, 2, 64, 64), torch.bfloat16, generator(seed), channels=channels)
        for seed in (1, 2)
    )
    results = []
    for tensors in (first, second, copies_of(first)):
        out, states = torch.empty_like(tensors["v"]), torch.zeros(2, 2, 64, 64, device=DEVICE)
        delta_scan(out, states, **tensors, **slots)
        results.append((out, states))
    assert torch.equal(results[0][0], results[2][0])
    assert torch.equal(results[0][1], results[2][1])
    assert not torch.equal(results[0][0], results[1][0])


def test_values_on_the_cpu_are_looked_at_in_each_call():
    tensors = recurrence_tensors(3, "heads", (1, 16, 16, 1), torch.float32, generator(1))
    out, states = torch.empty_like(tensors["x"]), torch.zeros(3, 1, 16, 16, device=DEVICE)
    slots = {"query_starts": i32([0, 3]), "initial_slots": i32([0]), "state_slots": i32([1])}
    state_scan(out, states, **tensors, **slots)

    slots["state_slots"] = i32([3])

    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="state_slots must be less than the number of slots"):
            state_scan(out, states, **tensors, **slots)


def test_where_tensors_lie_is_looked_at_in_each_call():
    x = randn((8, 32), torch.float32, generator(1))
    states, weight = torch.zeros(2, 32, 3, device=DEVICE), torch.ones(32, 4, device=DEVICE)
    slots = (i32([0, 8]), i32([0]), i32([1]))
    causal_conv(torch.empty_like(x), states, x, weight, *slots)

    with pytest.raises(ValueError, match="out must not overlap x"):
        causal_conv(x, states, x, weight, *slots)

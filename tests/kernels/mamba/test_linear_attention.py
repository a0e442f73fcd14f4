"""Linear attention whose states decay by a fixed factor: a case of `state_scan` and its steps."""

import pytest
import torch

from jenga_kernels.recurrent.state_scan import state_scan
from jenga_kernels.recurrent.state_update import state_update
from tests.kernels.compiling import compile_job
from tests.kernels.recurrent.state_cases import i32
from tests.kernels.support import DEVICE, check_close, generator

HEADS, DIM = 3, 32
LENGTHS = (41, 1, 70)
STEPS = 3


def attended(q, k, v, decays, stored):
    """What a request's queries read, and its last state [HEADS, DIM of values, DIM of keys].

    The state is written, and read again as it was rounded, at the end of the prompt and every step.
    """
    state, out = torch.zeros(HEADS, DIM, DIM, dtype=q.dtype), []
    for token in range(len(q)):
        state = decays[:, None, None] * state + v[token][:, :, None] * k[token][:, None, :]
        out.append((state @ q[token][:, :, None])[..., 0])
        if token >= len(q) - STEPS - 1:
            state = state.to(stored).to(q.dtype)
    return torch.stack(out), state


def in_tf32(values):
    """Cut a float32 down to what a tensor core reads of it."""
    return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("allow_tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_prompts_and_steps_of_linear_attention(state_dtype, allow_tf32):
    rng = generator(3)
    rates = torch.tensor([0.8, 0.1, 0.005])
    requests = [torch.randn(3, n + STEPS, HEADS, DIM, generator=rng) for n in LENGTHS]
    states = torch.full((5, 2, HEADS, DIM, DIM), float("nan"), dtype=state_dtype)[:, 1].to(DEVICE)
    slots, rates_here = i32([4, 1, 2]), (-rates).to(DEVICE)
    options = {"dt_softplus": False}

    def step_sizes(x):
        return torch.ones(HEADS, device=DEVICE).expand(x.shape[:2])

    prompts = [part[:, :n] for part, n in zip(requests, LENGTHS, strict=True)]
    q, k, v = torch.cat(prompts, 1).to(DEVICE)
    out = torch.full_like(v, float("nan"))
    starts = i32([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    null = i32([0, 0, 0])
    state_scan(
        out,
        states,
        v,
        step_sizes(v),
        rates_here,
        k,
        q,
        starts,
        null,
        slots,
        allow_tf32=allow_tf32,
        **options,
    )
    outputs = [[part] for part in out.cpu().split(LENGTHS)]
    for step in range(STEPS):
        rows = [part[:, n + step] for part, n in zip(requests, LENGTHS, strict=True)]
        q, k, v = torch.stack(rows, 1).to(DEVICE)
        out = torch.full_like(v, float("nan"))
        state_update(out, states, v, step_sizes(v), rates_here, k, q, slots, slots, **options)
        for request, row in zip(outputs, out.cpu(), strict=True):
            request.append(row[None])

    for request, parts, slot in zip(requests, outputs, (4, 1, 2), strict=True):
        exact, exact_state = attended(*request.double(), (-rates.double()).exp(), torch.float64)
        read = in_tf32(request) if allow_tf32 else request
        naive, naive_state = attended(*read, (-rates).exp(), state_dtype)
        check_close(torch.cat(parts), exact, naive)
        check_close(states[slot].cpu(), exact_state, naive_state)


def compile_linear_attention():
    num_heads, dim = 8, 128  # of Ling 2.6 on four ranks
    dt = torch.ones(num_heads).expand(16, num_heads)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(16, num_heads, dim, dtype=dtype)
        for state_dtype in (torch.float32, torch.bfloat16):
            states = torch.zeros(20, num_heads, dim, dim, dtype=state_dtype)
            rates, one = -torch.ones(num_heads), i32([1])
            starts = i32([0, 16])
            for allow_tf32 in (False, True)[: 2 if dtype is torch.float32 else 1]:
                state_scan(
                    x,
                    states,
                    x,
                    dt,
                    rates,
                    x,
                    x,
                    starts,
                    one,
                    one,
                    dt_softplus=False,
                    allow_tf32=allow_tf32,
                )
            slots = i32(range(1, 17))
            state_update(x, states, x, dt, rates, x, x, slots, slots, dt_softplus=False)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_linear_attention_compiles_without_spills(capability):
    kernels = compile_job(compile_linear_attention, capability)

    assert len(kernels) == 10
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.counts["load_128"] + kernel.counts["tma"] >= 4, kernel

"""Time linear attention (Ling 2.6) by state_update and state_scan, compared with vLLM's kernels.

python -m perf.kernels.bench_linear_attention [--only b64] [--peers none] [--dry-run]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jenga_kernels.recurrent.state_scan import state_scan
from jenga_kernels.recurrent.state_update import state_update
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.state_shapes import make_arena, slots_in_arena, starts_of

HEAD_DIM = 128
HEADS = {"ling-2.6-flash": 32, "ling-2.6-flash tp4": 8}
"""Number of heads on one rank."""

CASES = {f"b{count}": [1] * count for count in (1, 64, 256)} | {
    "1x8192": [8192],
    "16 odd": [517, 33, 1200, 740, 5, 999, 250, 611] * 2,
}
"""Tokens of each request. With one token each it is a decode step that continues states.

Prompts begin without a state.
"""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
"""Element types of queries, keys and values. States are in bfloat16.

vLLM's layer makes them in float32. Its kernel for prompts rounds products to tf32, and ours is
allowed to do so too.
"""

VLLM_BLOCK_TOKENS = 256
"""`block_size` that vLLM's layer uses for prompts, in tokens."""

VLLM_BLOCK_DIMS = 32
"""Block size that vLLM's layer uses for decode steps, in elements of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearBatch:
    """Tensors of a batch. The states have a row for each element of a value.

    Attributes:
        lengths: Number of tokens of each request.
        query_starts: Index of each request's first token, and the number of tokens: i32.
        slots: Slot of each request's state.
        states: States of all slots.
        out: Tensor for the results.
        q: Queries.
        k: Keys.
        v: Values.
        rates: Logarithm of the factor by which a head's state decays per token; negative.
    """

    lengths: tuple[int, ...]
    query_starts: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    out: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rates: torch.Tensor

    @property
    def is_step(self) -> bool:
        """Whether this is a decode step: one new token per request."""
        return max(self.lengths) == 1


def make_batch(
    num_heads: int,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    head_dim: int = HEAD_DIM,
) -> LinearBatch:
    """Make random tokens and empty states."""
    torch.manual_seed(0)
    state_shape = (num_heads, head_dim, head_dim)
    q, k, v = torch.randn(3, sum(lengths), num_heads, head_dim, device=device).to(dtype)
    return LinearBatch(
        lengths=tuple(lengths),
        query_starts=starts_of(lengths, device),
        slots=slots_in_arena(len(lengths), device),
        states=make_arena(len(lengths) + 1, state_shape, torch.bfloat16, device)[:, 1],
        out=torch.empty_like(v),
        q=q * head_dim**-0.5,
        k=k,
        v=v,
        rates=-torch.logspace(0, -3, num_heads, device=device),
    )


def jenga(batch: LinearBatch) -> Callable[[], None]:
    ones = torch.ones(batch.v.shape[1], device=batch.v.device, dtype=batch.v.dtype)
    inputs = (batch.v, ones.expand(batch.v.shape[:2]), batch.rates, batch.k, batch.q)

    def step() -> None:
        state_update(batch.out, batch.states, *inputs, batch.slots, batch.slots, dt_softplus=False)

    none = torch.zeros_like(batch.slots)

    def prompts() -> None:
        state_scan(
            batch.out,
            batch.states,
            *inputs,
            batch.query_starts,
            none,
            batch.slots,
            dt_softplus=False,
            allow_tf32=True,
        )

    return step if batch.is_step else prompts


def vllm(batch: LinearBatch) -> Callable[[], None]:
    """Prepare vLLM's layer: prompts one by one, in tensors with the heads first."""
    try:
        from vllm.model_executor.layers.lightning_attn import (
            lightning_attention,
            linear_decode_forward_triton,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    if batch.v.dtype != torch.float32:
        msg = "its kernel for prompts takes queries, keys and values in float32"
        raise UnsupportedError(msg)
    rates, out = -batch.rates, batch.out.flatten(1)

    def step() -> None:
        q, k, v = (part.unsqueeze(2).contiguous() for part in (batch.q, batch.k, batch.v))
        attended = linear_decode_forward_triton(
            q, k, v, batch.states, rates, batch.slots, VLLM_BLOCK_DIMS
        )
        out.copy_(attended)

    places = list(zip(batch.slots.tolist(), batch.query_starts.tolist(), strict=False))

    def prompts() -> None:
        for (slot, start), length in zip(places, batch.lengths, strict=True):
            q, k, v = (
                part[start : start + length].transpose(0, 1)[None].contiguous()
                for part in (batch.q, batch.k, batch.v)
            )
            state = torch.zeros_like(batch.states[slot])[None]
            attended, kept = lightning_attention(
                q, k, v, rates, block_size=VLLM_BLOCK_TOKENS, kv_history=state
            )
            batch.states[slot] = kept[0, :, -1]
            batch.out[start : start + length] = attended[0].transpose(0, 1)

    return step if batch.is_step else prompts


def measure(benchmark: Benchmark, name: str, batch: LinearBatch) -> None:
    """Add a row for each implementation that supports the batch."""
    state_bytes = batch.states[0].numel() * batch.states.element_size() * len(batch.lengths)
    num_bytes = 4 * batch.v.numel() * batch.v.element_size()
    num_bytes += state_bytes * (2 if batch.is_step else 1)
    for peer, prepare in {"jenga": jenga, "vllm": vllm}.items():
        if peer != "jenga" and not benchmark.wants_peer(peer):
            continue
        try:
            timing = benchmark.measure(prepare(batch))
        except Exception as error:  # a peer that fails must not end the run
            if peer == "jenga":
                raise
            print(f"  {name}: no {peer}: {str(error)[:300]}", flush=True)
            continue
        benchmark.add(
            Row(
                shape=name,
                implementation=peer,
                timing=timing,
                num_bytes=num_bytes,
                details={"num_tokens": len(batch.v), "num_requests": len(batch.lengths)},
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_linear_attention",
        __doc__ or "",
        ["tests/kernels/mamba/test_linear_attention.py"],
        arguments,
    )
    cases, heads = CASES, HEADS
    if benchmark.is_dry:
        cases, heads = {"b2": [1, 1], "prompts": [5, 40]}, {"dry": 2}
    for model, num_heads in heads.items():
        for label, lengths in cases.items():
            for precision, dtype in DTYPES.items():
                name = f"{model} {precision} {label}"
                if benchmark.wants_shape(name):
                    measure(
                        benchmark, name, make_batch(num_heads, lengths, dtype, benchmark.device)
                    )
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()

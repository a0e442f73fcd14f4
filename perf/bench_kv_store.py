"""Time the writing of new keys and values, beside vLLM's Triton kernel on the same pages.

python -m perf.bench_kv_store [--only 8192] [--peers none] [--dry-run]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jenga_kernels.kv_store import kv_store
from perf.attention_peers import UnsupportedError
from perf.harness import Benchmark, Row, read_roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """One layer of a model and a number of new tokens."""

    name: str
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int = 16
    num_layers: int = 4
    is_scattered: bool = False
    is_fp8: bool = False

    @property
    def num_bytes(self) -> int:
        """Keys and values read once and written once."""
        elements = 2 * self.num_tokens * self.num_kv_heads * self.head_dim
        return elements * (2 + (1 if self.is_fp8 else 2))


SHAPES = (
    StoreShape(name="W1 llama-8b 8192 tokens", num_tokens=8192, num_kv_heads=8, head_dim=128),
    StoreShape(
        name="W2 llama-8b 256 decoded tokens",
        num_tokens=256,
        num_kv_heads=8,
        head_dim=128,
        is_scattered=True,
    ),
    StoreShape(name="W3 gemma-3-27b 8192 tokens", num_tokens=8192, num_kv_heads=16, head_dim=128),
    StoreShape(name="W4 gemma-3-270m 8192 tokens", num_tokens=8192, num_kv_heads=1, head_dim=256),
    StoreShape(
        name="W5 llama-8b fp8 8192 tokens",
        num_tokens=8192,
        num_kv_heads=8,
        head_dim=128,
        is_fp8=True,
    ),
)
DRY_SHAPES = (StoreShape(name="dry", num_tokens=20, num_kv_heads=2, head_dim=64),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBatch:
    """Tensors of a shape."""

    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slots: torch.Tensor
    scale: torch.Tensor | None


def make_batch(shape: StoreShape, device: torch.device) -> StoreBatch:
    """Random tokens, and slots that fill shuffled pages or hit a page each."""
    torch.manual_seed(0)
    num_pages = 1 + max(shape.num_tokens, -(-shape.num_tokens // shape.page_tokens))
    dtype = torch.float8_e4m3fn if shape.is_fp8 else torch.bfloat16
    rows = (shape.num_layers, shape.num_kv_heads, shape.page_tokens, 2 * shape.head_dim)
    arena = torch.zeros(
        num_pages, *rows, dtype=torch.uint8 if shape.is_fp8 else dtype, device=device
    )
    layer = arena.view(dtype)[:, 1].transpose(1, 2)
    pages = 1 + torch.randperm(num_pages - 1)
    tokens = torch.arange(shape.num_tokens)
    slots = pages[tokens // shape.page_tokens] * shape.page_tokens + tokens % shape.page_tokens
    if shape.is_scattered:
        slots = pages[tokens] * shape.page_tokens
    kv = torch.randn(shape.num_tokens, 2 * shape.num_kv_heads, shape.head_dim, device=device).to(
        torch.bfloat16
    )
    return StoreBatch(
        k=kv[:, : shape.num_kv_heads],
        v=kv[:, shape.num_kv_heads :],
        k_pages=layer[..., : shape.head_dim],
        v_pages=layer[..., shape.head_dim :],
        slots=slots.to(device),
        scale=torch.ones(1, device=device) if shape.is_fp8 else None,
    )


def jenga(batch: StoreBatch) -> Callable[[], None]:
    def launch() -> None:
        kv_store(
            batch.k,
            batch.v,
            batch.k_pages,
            batch.v_pages,
            batch.slots,
            k_scale=batch.scale,
            v_scale=batch.scale,
        )

    return launch


def vllm_triton(batch: StoreBatch) -> Callable[[], None]:
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    scale = torch.ones(1, device=batch.k.device) if batch.scale is None else batch.scale
    kind = "auto" if batch.scale is None else "fp8"

    def launch() -> None:
        triton_reshape_and_cache_flash(
            batch.k, batch.v, batch.k_pages, batch.v_pages, batch.slots, kind, scale, scale
        )

    return launch


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_kv_store", __doc__ or "", ["tests/kernels/test_kv_store.py"], arguments
    )
    for shape in DRY_SHAPES if benchmark.is_dry else SHAPES:
        if not benchmark.wants_shape(shape.name):
            continue
        batch = make_batch(shape, benchmark.device)
        for name, prepare in {"jenga": jenga, "vllm-triton": vllm_triton}.items():
            if name != "jenga" and not benchmark.wants_peer(name):
                continue
            try:
                timing = benchmark.measure(prepare(batch))
            except Exception as error:  # a peer that fails must not end the run
                if name == "jenga":
                    raise
                print(f"  {shape.name}: no {name}: {str(error)[:300]}", flush=True)
                continue
            benchmark.add(
                Row(
                    shape=shape.name,
                    implementation=name,
                    timing=timing,
                    num_bytes=shape.num_bytes,
                    details={"page_tokens": shape.page_tokens},
                )
            )
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()

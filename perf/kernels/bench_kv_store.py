"""Time the writing of new keys and values, compared with vLLM's Triton kernels.

The pages of both have the same bytes.

python -m perf.kernels.bench_kv_store [--only 8192] [--peers none] [--dry-run]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jenga_kernels.attention.kv_store import kv_store
from jenga_kernels.attention.rotation import hadamard_rotation
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import UnsupportedError, give_vllm_our_signs, vllm_mode
from perf.shapes.cache_layouts import Cache, CacheShape, Stored, as_vllm_has_it, make_cache

TESTS = (
    "tests/kernels/attention/test_kv_store.py",
    "tests/kernels/attention/test_slot_scales.py",
    "tests/kernels/attention/test_rotation.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """One layer of a model, and a number of new tokens."""

    name: str
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int = 16
    num_layers: int = 4
    is_scattered: bool = False
    stored: Stored = Stored.BF16

    @property
    def cache(self) -> CacheShape:
        """Shape of the layer's cache."""
        return CacheShape(
            stored=self.stored,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            num_layers=self.num_layers,
        )

    @property
    def num_bytes(self) -> int:
        """Least number of bytes: keys and values read once, and written once with their scales."""
        rows = 2 * self.num_tokens * self.num_kv_heads
        return rows * (2 * self.head_dim + self.stored.row_bytes(self.head_dim))


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
        stored=Stored.FP8,
    ),
    StoreShape(
        name="W6 llama-8b int8-slots 8192 tokens",
        num_tokens=8192,
        num_kv_heads=8,
        head_dim=128,
        stored=Stored.INT8_SLOTS,
    ),
    StoreShape(
        name="W7 llama-8b fp8-slots 8192 tokens",
        num_tokens=8192,
        num_kv_heads=8,
        head_dim=128,
        stored=Stored.FP8_SLOTS,
    ),
    StoreShape(
        name="W8 llama-8b int4-slots 8192 tokens",
        num_tokens=8192,
        num_kv_heads=8,
        head_dim=128,
        stored=Stored.INT4_SLOTS,
    ),
    StoreShape(
        name="W9 llama-8b e5m2 8192 tokens",
        num_tokens=8192,
        num_kv_heads=8,
        head_dim=128,
        stored=Stored.E5M2,
    ),
)
DRY_SHAPES = tuple(
    StoreShape(
        name=f"dry {stored.value}", num_tokens=20, num_kv_heads=2, head_dim=64, stored=stored
    )
    for stored in Stored
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBatch:
    """Tensors of a shape. If slots have scales, vLLM's kernels write into a cache of their own."""

    k: torch.Tensor
    v: torch.Tensor
    cache: Cache
    vllm_cache: Cache
    slots: torch.Tensor


def make_batch(shape: StoreShape, device: torch.device) -> StoreBatch:
    """Make random tokens. Their slots fill shuffled pages, or are scattered one to a page."""
    torch.manual_seed(0)
    num_pages = 1 + max(shape.num_tokens, -(-shape.num_tokens // shape.page_tokens))
    cache = make_cache(shape.cache, num_pages, device)
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
        cache=cache,
        vllm_cache=as_vllm_has_it(cache, shape.cache),
        slots=slots.to(device),
    )


def jenga(batch: StoreBatch) -> Callable[[], None]:
    cache = batch.cache
    rotation = None
    if cache.stored.is_rotated:
        rotation = hadamard_rotation(batch.k.shape[-1], batch.k.dtype, batch.k.device).forward

    def launch() -> None:
        k, v = batch.k, batch.v
        if rotation is not None:
            k, v = k @ rotation, v @ rotation
        kv_store(
            k,
            v,
            cache.k_pages,
            cache.v_pages,
            batch.slots,
            k_scale=cache.scale,
            v_scale=cache.scale,
            k_slot_scales=cache.k_slot_scales,
            v_slot_scales=cache.v_slot_scales,
        )

    return launch


def vllm_triton(batch: StoreBatch) -> Callable[[], None]:
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash,
            triton_reshape_and_cache_flash_per_token_head_quant,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    cache = batch.vllm_cache
    if cache.stored is Stored.E5M2:
        msg = "stores float8_e4m3fn under that name"
        raise UnsupportedError(msg)
    pages = (batch.k, batch.v, cache.k_pages, cache.v_pages)
    if cache.stored.is_rotated:
        give_vllm_our_signs(batch.k.shape[-1], batch.k.device)
    if cache.k_slot_scales is not None and cache.v_slot_scales is not None:
        scales = (cache.k_slot_scales, cache.v_slot_scales)
        mode = vllm_mode(cache.stored)
        return lambda: triton_reshape_and_cache_flash_per_token_head_quant(
            *pages, *scales, batch.slots, mode
        )
    scale = torch.ones(1, device=batch.k.device) if cache.scale is None else cache.scale
    kind = "auto" if cache.scale is None else "fp8"
    return lambda: triton_reshape_and_cache_flash(*pages, batch.slots, kind, scale, scale)


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_kv_store",
        __doc__ or "",
        TESTS,
        arguments,
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

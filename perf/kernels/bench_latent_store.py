"""Time the writing of new latents, compared with vLLM's CUDA kernel on the same pages.

python -m perf.kernels.bench_latent_store [--only 8192] [--peers none] [--dry-run]
"""

from dataclasses import dataclass

import torch

from jenga_kernels.latent.latent_store import latent_store
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import Launch, UnsupportedError
from perf.shapes.latent_shapes import LATENT_DIM, WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """New tokens of one layer. Latents have 512 elements, and rotary keys 64."""

    name: str
    num_tokens: int
    page_tokens: int = 64
    num_layers: int = 4
    is_scattered: bool = False
    is_fp8: bool = False

    @property
    def num_bytes(self) -> int:
        """Least number of bytes: each row is read once and written once."""
        return self.num_tokens * WIDTH * (2 + (1 if self.is_fp8 else 2))


SHAPES = (
    StoreShape(name="S1 8192 tokens", num_tokens=8192),
    StoreShape(name="S2 256 decoded tokens", num_tokens=256, is_scattered=True),
    StoreShape(name="S3 fp8 8192 tokens", num_tokens=8192, is_fp8=True),
)
DRY_SHAPES = (StoreShape(name="dry", num_tokens=20, page_tokens=16),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBatch:
    """Tensors of a shape."""

    latents: torch.Tensor
    rotary_keys: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    latent_scale: torch.Tensor | None


def make_batch(shape: StoreShape, device: torch.device) -> StoreBatch:
    """Make random tokens. Their slots fill shuffled pages, or are scattered one to a page."""
    torch.manual_seed(0)
    dtype = torch.float8_e4m3fn if shape.is_fp8 else torch.bfloat16
    num_pages = 1 + (shape.num_tokens if shape.is_scattered else 8192 // shape.page_tokens)
    rows = (num_pages, shape.num_layers, shape.page_tokens, WIDTH)
    arena = torch.zeros(*rows, dtype=torch.uint8 if shape.is_fp8 else dtype, device=device)
    tokens = torch.arange(shape.num_tokens)
    order = 1 + torch.randperm(num_pages - 1)
    slots = order[tokens // shape.page_tokens] * shape.page_tokens + tokens % shape.page_tokens
    if shape.is_scattered:
        slots = order[tokens] * shape.page_tokens
    new = torch.randn(shape.num_tokens, WIDTH, device=device).to(torch.bfloat16)
    return StoreBatch(
        latents=new[:, :LATENT_DIM].contiguous(),
        rotary_keys=new[:, LATENT_DIM:],
        pages=arena.view(dtype)[:, 1 % shape.num_layers],
        slots=slots.to(device),
        latent_scale=torch.ones(1, device=device) if shape.is_fp8 else None,
    )


def jenga(batch: StoreBatch) -> Launch:
    """Prepare our operation."""

    def launch() -> None:
        latent_store(
            batch.latents,
            batch.rotary_keys,
            batch.pages,
            batch.slots,
            latent_scale=batch.latent_scale,
        )

    return launch


def vllm_cuda(batch: StoreBatch) -> Launch:
    """Prepare vLLM's kernel, called as in its attention layers."""
    if batch.pages.device.type != "cuda":
        msg = "needs a GPU"
        raise UnsupportedError(msg)
    try:
        from vllm._custom_ops import concat_and_cache_mla
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    is_fp8 = batch.latent_scale is not None
    pages = batch.pages.view(torch.uint8) if is_fp8 else batch.pages
    scale = batch.latent_scale if is_fp8 else torch.ones(1, device=pages.device)

    def launch() -> None:
        kind = "fp8" if is_fp8 else "auto"
        concat_and_cache_mla(batch.latents, batch.rotary_keys, pages, batch.slots, kind, scale)

    return launch


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_latent_store",
        __doc__ or "",
        ["tests/kernels/latent/test_latent_store.py"],
        arguments,
    )
    for shape in DRY_SHAPES if benchmark.is_dry else SHAPES:
        if not benchmark.wants_shape(shape.name):
            continue
        batch = make_batch(shape, benchmark.device)
        for name, prepare in {"jenga": jenga, "vllm-cuda": vllm_cuda}.items():
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

"""Time the short convolutions of recurrent layers, with our kernels and vLLM's on the same pages.

python -m perf.kernels.bench_conv_update [--only b256] [--peers none] [--dry-run]
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch

from jenga_kernels.recurrent.causal_conv import causal_conv
from jenga_kernels.recurrent.conv_update import conv_update
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.delta_shapes import KIMI_LINEAR, QWEN3_NEXT
from perf.shapes.state_shapes import (
    DRY_MODELS,
    LFM2_CHANNELS,
    MODELS,
    ConvBatch,
    make_conv_batch,
    make_gated_conv_batch,
)

BATCHES = (1, 64, 256)
PROMPTS = {"prompt 1x8192": [8192], "prompts 16 odd": [517, 33, 1200, 740, 5, 999, 250, 611] * 2}
VLLM_BLOCK_TOKENS = 8
"""Number of tokens of one program in vLLM's kernel for prompts."""


def jenga(batch: ConvBatch) -> Callable[[], None]:
    if len(batch.x) == len(batch.slots):

        def launch() -> None:
            conv_update(
                batch.out,
                batch.states,
                batch.x,
                batch.weight,
                batch.slots,
                batch.slots,
                bias=batch.bias,
                silu=batch.silu,
                input_gates=batch.input_gates,
                output_gates=batch.output_gates,
            )

        return launch

    none = torch.zeros_like(batch.slots)

    def launch_prompts() -> None:
        causal_conv(
            batch.out,
            batch.states,
            batch.x,
            batch.weight,
            batch.query_starts,
            none,
            batch.slots,
            bias=batch.bias,
            silu=batch.silu,
            input_gates=batch.input_gates,
            output_gates=batch.output_gates,
        )

    return launch_prompts


def jenga_apart(batch: ConvBatch) -> Callable[[], None]:
    """Prepare our convolution between two multiplications, as without fused gates."""
    input_gates, output_gates = batch.input_gates, batch.output_gates
    if input_gates is None or output_gates is None:
        msg = "inputs and outputs are not gated"
        raise UnsupportedError(msg)
    x = torch.empty_like(batch.out)
    convolve = jenga(replace(batch, x=x, input_gates=None, output_gates=None))

    def launch() -> None:
        torch.mul(input_gates, batch.x, out=x)
        convolve()
        torch.mul(output_gates, batch.out, out=batch.out)

    return launch


def vllm_metadata(batch: ConvBatch) -> SimpleNamespace:
    """Return vLLM's metadata: each program's request, and its block of the request."""
    device = batch.x.device
    blocks = -(-batch.query_starts.diff().cpu() // VLLM_BLOCK_TOKENS)
    requests = torch.arange(len(blocks)).repeat_interleave(blocks)
    offsets = torch.cat([torch.arange(count) for count in blocks.tolist()])
    requests, offsets = (values.to(torch.int32).to(device) for values in (requests, offsets))
    program = {
        "tot": len(requests),
        "mlist": requests,
        "mlist_len": len(requests),
        "offsetlist": offsets,
        "batch_ptr": requests,
        "token_chunk_offset_ptr": offsets,
    }
    return SimpleNamespace(
        nums_dict={VLLM_BLOCK_TOKENS: program},
        batch_ptr=requests,
        token_chunk_offset_ptr=offsets,
    )


def vllm(batch: ConvBatch) -> Callable[[], object]:
    try:
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
            causal_conv1d_fn,
            causal_conv1d_update,
        )
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    activation = "silu" if batch.silu else None
    if len(batch.x) == len(batch.slots):
        return lambda: gated_as_vllm(
            batch,
            lambda x: causal_conv1d_update(
                x,
                batch.states,
                batch.weight,
                batch.bias,
                activation,
                conv_state_indices=batch.slots,
                out=batch.out,
            ),
        )
    metadata = vllm_metadata(batch)
    has_initial = torch.zeros(len(batch.slots), dtype=torch.bool, device=batch.x.device)
    return lambda: gated_as_vllm(
        batch,
        lambda x: (
            causal_conv1d_fn(
                x.T,
                batch.weight,
                batch.bias,
                batch.states,
                batch.query_starts,
                cache_indices=batch.slots,
                has_initial_state=has_initial,
                activation=activation,
                metadata=metadata,
            ).T
        ),
    )


def gated_as_vllm(
    batch: ConvBatch, convolve: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Convolve as vLLM does: gates are multiplications before and after."""
    if batch.input_gates is None or batch.output_gates is None:
        return convolve(batch.x)
    return batch.output_gates * convolve(batch.input_gates * batch.x)


def measure(benchmark: Benchmark, name: str, batch: ConvBatch) -> None:
    """Add a row for each implementation that supports the batch."""
    num_tokens, dim = batch.x.shape
    state_bytes = len(batch.slots) * dim * batch.states.shape[2] * batch.states.element_size()
    is_update = num_tokens == len(batch.slots)
    rows = (batch.x, batch.out, batch.input_gates, batch.output_gates)
    num_bytes = sum(part.numel() * part.element_size() for part in rows if part is not None)
    num_bytes += state_bytes * (2 if is_update else 1)
    implementations = {"jenga": jenga, "vllm": vllm}
    if batch.input_gates is not None:
        implementations["jenga apart"] = jenga_apart
    for peer, prepare in implementations.items():
        if not peer.startswith("jenga") and not benchmark.wants_peer(peer):
            continue
        try:
            timing = benchmark.measure(prepare(batch))
        except Exception as error:  # a peer that fails must not end the run
            if peer.startswith("jenga"):
                raise
            print(f"  {name}: no {peer}: {str(error)[:300]}", flush=True)
            continue
        benchmark.add(
            Row(
                shape=name,
                implementation=peer,
                timing=timing,
                num_bytes=num_bytes,
                details={"num_tokens": num_tokens, "num_requests": len(batch.slots), "dim": dim},
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_conv_update",
        __doc__ or "",
        [
            "tests/kernels/conv/test_conv_update.py",
            "tests/kernels/conv/test_causal_conv.py",
            "tests/kernels/conv/test_gated_conv.py",
        ],
        arguments,
    )
    cases = {f"b{count}": [1] * count for count in BATCHES} | PROMPTS
    if benchmark.is_dry:
        cases = {"b2": [1, 1], "prompts": [5, 40]}
    models = (*MODELS, QWEN3_NEXT, KIMI_LINEAR)
    for model in DRY_MODELS[:1] if benchmark.is_dry else models:
        for label, lengths in cases.items():
            name = f"{model.name} {label}"
            if benchmark.wants_shape(name):
                measure(benchmark, name, make_conv_batch(model.conv_dim, lengths, benchmark.device))
    channels = {"dry gated": 64} if benchmark.is_dry else LFM2_CHANNELS
    for model_name, dim in channels.items():
        for label, lengths in cases.items():
            name = f"{model_name} {label}"
            if benchmark.wants_shape(name):
                measure(benchmark, name, make_gated_conv_batch(dim, lengths, benchmark.device))
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()

"""Time one decode step of recurrent layers, with our kernel and those of vLLM and mamba-ssm.

All run on the same pages.

python -m perf.kernels.bench_state_update [--only nemotron] [--peers vllm] [--dry-run]
"""

from collections.abc import Callable

import torch

from jenga_kernels.recurrent.state_update import state_update
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.state_shapes import DRY_MODELS, MODELS, StateBatch, make_state_batch

BATCHES = (1, 8, 64, 128, 256, 1024)
STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MAX_ARENA_BYTES = 40 << 30
MOST_OF_32_BITS = 2**31 - 1


def jenga(batch: StateBatch) -> Callable[[], None]:
    def launch() -> None:
        state_update(
            batch.out,
            batch.states,
            batch.x,
            batch.dt,
            batch.A,
            batch.B,
            batch.C,
            batch.slots,
            batch.slots,
            D=batch.D,
            dt_bias=batch.dt_bias,
        )

    return launch


def per_channel(batch: StateBatch) -> dict[str, torch.Tensor]:
    """Return dt, A, D and dt_bias in the peers' form: one value per channel, by strides of zero."""
    shape = (batch.model.num_heads, batch.model.head_dim, batch.model.d_state)
    if batch.model.is_per_channel:
        return {"dt": batch.dt, "A": batch.A, "D": batch.D, "dt_bias": batch.dt_bias}
    return {
        "dt": batch.dt[..., None].expand(*batch.dt.shape, shape[1]),
        "A": batch.A[:, None, None].expand(shape),
        "D": batch.D[:, None].expand(shape[:2]),
        "dt_bias": batch.dt_bias[:, None].expand(shape[:2]),
    }


def vllm(batch: StateBatch) -> Callable[[], None]:
    try:
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    wide = per_channel(batch)

    def launch() -> None:
        selective_state_update(
            batch.states,
            batch.x,
            wide["dt"],
            wide["A"],
            batch.B,
            batch.C,
            D=wide["D"],
            dt_bias=wide["dt_bias"],
            dt_softplus=True,
            state_batch_indices=batch.slots,
            out=batch.out,
        )

    return launch


def mamba_ssm(batch: StateBatch) -> Callable[[], None]:
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    if batch.states.stride(0) * len(batch.states) > MOST_OF_32_BITS:
        msg = "its offsets have 32 bits: it would read outside of the arena"
        raise UnsupportedError(msg)
    wide = per_channel(batch)

    def launch() -> None:
        selective_state_update(
            batch.states,
            batch.x,
            wide["dt"],
            wide["A"],
            batch.B,
            batch.C,
            D=wide["D"],
            dt_bias=wide["dt_bias"],
            dt_softplus=True,
            state_batch_indices=batch.slots,
        )

    return launch


PEERS = {"jenga": jenga, "vllm": vllm, "mamba-ssm": mamba_ssm}


def measure(benchmark: Benchmark, name: str, batch: StateBatch) -> None:
    """Add a row for each implementation that supports the batch."""
    num_requests = len(batch.slots)
    state_bytes = batch.model.state_elements * batch.states.element_size()
    token_bytes = batch.model.token_elements * batch.x.element_size()
    for peer, prepare in PEERS.items():
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
                num_bytes=num_requests * (2 * state_bytes + token_bytes),
                details={
                    "num_requests": num_requests,
                    "num_heads": batch.model.num_heads,
                    "state_dtype": str(batch.states.dtype),
                },
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_state_update", __doc__ or "", ["tests/kernels/mamba/test_state_update.py"], arguments
    )
    for model in DRY_MODELS if benchmark.is_dry else MODELS:
        for label, dtype in STATE_DTYPES.items():
            for num_requests in (3,) if benchmark.is_dry else BATCHES:
                name = f"{model.name} {label} b{num_requests}"
                arena_bytes = 2 * num_requests * model.state_elements * dtype.itemsize
                if benchmark.wants_shape(name) and arena_bytes <= MAX_ARENA_BYTES:
                    measure(
                        benchmark,
                        name,
                        make_state_batch(model, [1] * num_requests, dtype, benchmark.device),
                    )
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()

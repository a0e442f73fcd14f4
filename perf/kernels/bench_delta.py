"""Time layers of the gated delta rule, decode steps and prompts, with our kernels and vLLM's.

All run on the same pages.

python -m perf.kernels.bench_delta [--only qwen3-next] [--peers vllm] [--dry-run]

With `--only plans`, prompts run in each way that `delta_scan` has a plan for: with two kernels
("jenga"), with one ("jenga-fused"), in segments of 512 tokens ("jenga-cut-512"), and in the way
that `estimated_delta_plan` chooses ("jenga-estimated").
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.plans.delta_plan import DeltaPlan, estimated_delta_plan
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.recurrent.delta_update import delta_update
from jenga_kernels.triton.lib.tiles import machine_of
from perf.harness.timing import Benchmark, Row, read_roofline
from perf.peers.attention_peers import UnsupportedError
from perf.shapes.delta_shapes import (
    DELTA_MODELS,
    DRY_DELTA_MODELS,
    EIGHT_HEADS,
    KIMI_LINEAR,
    QWEN3_NEXT,
    QWEN3_NEXT_EIGHTH,
    DeltaBatch,
    make_delta_batch,
)

BATCHES = (1, 8, 64, 128, 256, 512, 1024)
DRAFT_TOKENS = 4
"""Number of tokens per request in the rows of speculative steps."""

PROMPTS = {
    "1x2048": [2048],
    "1x8192": [8192],
    "4x2048": [2048] * 4,
    "16 odd": [517, 33, 1200, 740, 5, 999, 250, 611] * 2,
}
PLANS = {
    QWEN3_NEXT: ("4x2048", "16 odd", "1x2048"),
    EIGHT_HEADS: ("1x8192", "1x2048"),
    QWEN3_NEXT_EIGHTH: ("1x8192",),
    KIMI_LINEAR: ("1x8192",),
}
"""Model -> prompts that run in each way of a plan. Segments are for those of few heads."""

STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
CHECKPOINT_TOKENS = 512
"""Number of tokens between two checkpoints in the rows with checkpoints."""

MAX_ARENA_BYTES = 40 << 30


def jenga_update(batch: DeltaBatch) -> Callable[[], None]:
    is_single = batch.slots.shape[1] == 1

    def launch() -> None:
        delta_update(
            batch.out,
            batch.states,
            *batch.qkv,
            batch.gates,
            batch.betas,
            batch.slots[:, 0],
            batch.slots,
            A_log=batch.A_log,
            dt_bias=batch.dt_bias,
            query_starts=None if is_single else batch.query_starts,
        )

    return launch


def vllm_update(batch: DeltaBatch) -> Callable[[], None]:
    """Prepare the kernel that vLLM's layers call after their convolution."""
    try:
        from vllm.models.kimi_k3.nvidia.ops.third_party import kda
        from vllm.third_party.flash_linear_attention import ops
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    is_single = batch.slots.shape[1] == 1
    accepted = None if is_single else torch.ones_like(batch.slots[:, 0])
    q, k, v = (tensor[None] for tensor in batch.qkv)
    if batch.model.is_per_channel:

        def launch_channels() -> None:
            kda.fused_recurrent_kda(
                q=q,
                k=k,
                v=v,
                raw_g=batch.gates[None],
                raw_beta=batch.betas[None],
                A_log=batch.A_log,
                dt_bias=batch.dt_bias.flatten(),
                lower_bound=None,
                initial_state=batch.states,
                cu_seqlens=batch.query_starts,
                ssm_state_indices=batch.slots,
                num_accepted_tokens=accepted,
                out=batch.out[None],
            )

        return launch_channels
    if not is_single:
        # vLLM's layer makes these copies in separate kernels. They are not timed.
        q, k, v = (tensor.contiguous() for tensor in (q, k, v))

        def launch_drafts() -> None:
            ops.fused_sigmoid_gating_delta_rule_update(
                A_log=batch.A_log,
                a=batch.gates,
                b=batch.betas,
                dt_bias=batch.dt_bias,
                q=q,
                k=k,
                v=v,
                initial_state=batch.states,
                cu_seqlens=batch.query_starts,
                ssm_state_indices=batch.slots,
                num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=True,
            )

        return launch_drafts

    def launch() -> None:
        ops.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=batch.mixed,
            a=batch.gates,
            b=batch.betas,
            A_log=batch.A_log,
            dt_bias=batch.dt_bias,
            scale=batch.model.head_dim**-0.5,
            initial_state=batch.states,
            out=batch.out[:, None],
            ssm_state_indices=batch.slots[:, 0],
            use_qk_l2norm_in_kernel=True,
        )

    return launch


def jenga_scan(
    batch: DeltaBatch,
    checkpoints: Checkpoints | None = None,
    *,
    is_portable: bool | None = None,
    plan: DeltaPlan | None = None,
) -> Callable[[], None]:
    slots = batch.slots[:, 0]

    def launch() -> None:
        delta_scan(
            batch.out,
            batch.states,
            *batch.qkv,
            batch.gates,
            batch.betas,
            batch.query_starts,
            slots,
            slots,
            A_log=batch.A_log,
            dt_bias=batch.dt_bias,
            checkpoints=checkpoints,
            is_portable=is_portable,
            plan=plan,
        )

    return launch


def jenga_checkpoints(batch: DeltaBatch) -> Callable[[], None]:
    """Prepare our operation with a checkpoint every CHECKPOINT_TOKENS tokens.

    All checkpoints of a request go to one slot, to limit the size of the arena.
    """
    bounds, after_tokens = [0], []
    for length in batch.query_starts.diff().tolist():
        after_tokens += range(CHECKPOINT_TOKENS, length, CHECKPOINT_TOKENS)
        bounds.append(len(after_tokens))
    device = batch.mixed.device
    slots = batch.slots[:, 0].cpu().repeat_interleave(torch.tensor(bounds).diff())
    return jenga_scan(
        batch,
        Checkpoints(
            starts=torch.tensor(bounds, dtype=torch.int32, device=device),
            after_tokens=torch.tensor(after_tokens, dtype=torch.int32, device=device),
            slots=slots.to(device),
        ),
    )


def jenga_estimated(batch: DeltaBatch) -> Callable[[], None]:
    """Prepare our operation in the way that is estimated to be the fastest."""
    plan = estimated_delta_plan(
        machine_of(batch.mixed.device),
        num_v_heads=batch.model.num_v_heads,
        head_k_dim=batch.model.head_dim,
        head_v_dim=batch.model.head_dim,
        num_requests=len(batch.slots),
        num_tokens=len(batch.mixed),
        is_per_channel=batch.model.is_per_channel,
    )
    return jenga_scan(batch, plan=plan)


def vllm_scan(batch: DeltaBatch) -> Callable[[], None]:
    """Prepare vLLM's operations after the convolution, with gather and scatter of states."""
    try:
        from vllm.models.kimi_k3.nvidia.ops.third_party import kda
        from vllm.third_party.flash_linear_attention import ops
        from vllm.third_party.flash_linear_attention.ops.index import (
            prepare_chunk_indices,
            prepare_chunk_offsets,
        )
        from vllm.third_party.flash_linear_attention.ops.utils import FLA_CHUNK_SIZE
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    slots = batch.slots[:, 0].long()
    if batch.model.is_per_channel:

        def launch_channels() -> None:
            q, k, v = (tensor[None] for tensor in batch.qkv)
            _, final = kda.chunk_kda_with_fused_gate(
                q=q,
                k=k,
                v=v,
                raw_g=batch.gates[None],
                raw_beta=batch.betas[None],
                A_log=batch.A_log,
                g_bias=batch.dt_bias,
                initial_state=batch.states[slots],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=batch.query_starts,
            )
            batch.states[slots] = final.to(batch.states.dtype)

        return launch_channels
    chunks = {
        "chunk_indices": prepare_chunk_indices(batch.query_starts, FLA_CHUNK_SIZE),
        "chunk_offsets": prepare_chunk_offsets(batch.query_starts, FLA_CHUNK_SIZE),
    }

    def launch() -> None:
        prepared = ops.fused_post_conv_prep(
            batch.mixed,
            batch.gates,
            batch.betas,
            batch.A_log,
            batch.dt_bias,
            batch.model.num_qk_heads,
            batch.model.head_dim,
            batch.model.head_dim,
        )
        q, k, v, g, beta = (tensor[None] for tensor in prepared)
        _, final = ops.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=batch.states[slots],
            output_final_state=True,
            cu_seqlens=batch.query_starts,
            **chunks,
        )
        batch.states[slots] = final.to(batch.states.dtype)

    return launch


def flashinfer_scan(batch: DeltaBatch) -> Callable[[], None]:
    """Prepare the operations of vLLM's layers on Hopper if FlashInfer is installed.

    FlashInfer compiles its kernel at the first call.
    """
    try:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule
        from vllm.third_party.flash_linear_attention import ops
    except ImportError as error:
        raise UnsupportedError(str(error)) from error
    if batch.model.is_per_channel:
        msg = "FlashInfer has no kernel for channels that decay on their own"
        raise UnsupportedError(msg)
    slots = batch.slots[:, 0].long()

    def launch() -> None:
        q, k, v, g, beta = ops.fused_post_conv_prep(
            batch.mixed,
            batch.gates,
            batch.betas,
            batch.A_log,
            batch.dt_bias,
            batch.model.num_qk_heads,
            batch.model.head_dim,
            batch.model.head_dim,
        )
        out, final = chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g.exp(),
            beta=beta.float(),
            initial_state=batch.states[slots].float(),
            output_final_state=True,
            cu_seqlens=batch.query_starts.long(),
            backend="flashinfer",
        )
        batch.out.copy_(out)
        batch.states[slots] = final.to(batch.states.dtype)

    return launch


Peers = Mapping[str, Callable[[DeltaBatch], Callable[[], None]]]
"""Name of an implementation -> function that prepares its launch."""

UPDATE_PEERS: Peers = {"jenga": jenga_update, "vllm": vllm_update}
SCAN_PEERS: Peers = {
    "jenga": jenga_scan,
    "jenga-keep-512": jenga_checkpoints,
    "jenga-plain": partial(jenga_scan, is_portable=True),
    "jenga-ahead": partial(jenga_scan, is_portable=False),
    "vllm": vllm_scan,
    "flashinfer": flashinfer_scan,
}
PLAN_PEERS: Peers = {
    "jenga": jenga_scan,
    "jenga-fused": partial(jenga_scan, plan=DeltaPlan(is_fused=True)),
    "jenga-cut-256": partial(jenga_scan, plan=DeltaPlan(segment_tokens=256)),
    "jenga-cut-512": partial(jenga_scan, plan=DeltaPlan(segment_tokens=512)),
    "jenga-cut-1024": partial(jenga_scan, plan=DeltaPlan(segment_tokens=1024)),
    "jenga-estimated": jenga_estimated,
    "vllm": vllm_scan,
    "flashinfer": flashinfer_scan,
}
OURS = ("jenga", "jenga-keep-512")
"""Implementations that are measured whatever peers are selected."""


def measure(benchmark: Benchmark, name: str, batch: DeltaBatch, peers: Peers) -> None:
    """Add a row for each implementation that supports the batch."""
    num_tokens = len(batch.mixed)
    state_bytes = batch.model.state_elements * batch.states.element_size()
    num_bytes = num_tokens * batch.model.token_elements * batch.mixed.element_size()
    # Each request reads one state and writes one to each of its slots.
    num_bytes += state_bytes * (len(batch.slots) + batch.slots.numel())
    for peer, prepare in peers.items():
        if peer not in OURS and not benchmark.wants_peer(peer):
            continue
        try:
            timing = benchmark.measure(prepare(batch))
        except Exception as error:  # a peer that fails must not end the run
            if peer in OURS:
                raise
            print(f"  {name}: no {peer}: {str(error)[:300]}", flush=True)
            continue
        benchmark.add(
            Row(
                shape=name,
                implementation=peer,
                timing=timing,
                num_bytes=num_bytes,
                # For each state element: its decay, the value it holds for the key, its change, and
                # the output.
                num_flops=7 * num_tokens * batch.model.state_elements,
                details={
                    "num_tokens": num_tokens,
                    "num_requests": len(batch.slots),
                    "state_dtype": str(batch.states.dtype),
                },
            )
        )


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_delta",
        __doc__ or "",
        [f"tests/kernels/delta/test_delta_{name}.py" for name in ("update", "scan", "plan")],
        arguments,
    )
    batches = (2,) if benchmark.is_dry else BATCHES
    prompts = {"5+40": [5, 40]} if benchmark.is_dry else PROMPTS
    for model in DRY_DELTA_MODELS if benchmark.is_dry else DELTA_MODELS:
        for label, dtype in STATE_DTYPES.items():
            cases = [(f"b{size}", [1] * size, 1, False) for size in batches]
            cases += [
                (f"b{size} {DRAFT_TOKENS} drafts", [DRAFT_TOKENS] * size, DRAFT_TOKENS, False)
                for size in batches
            ]
            cases += [(text, lengths, 1, True) for text, lengths in prompts.items()]
            for text, lengths, num_steps, is_prompt in cases:
                name = f"{model.name} {label} {text}"
                arena_bytes = 2 * len(lengths) * num_steps * model.state_elements * dtype.itemsize
                if benchmark.wants_shape(name) and arena_bytes <= MAX_ARENA_BYTES:
                    measure(
                        benchmark,
                        name,
                        make_delta_batch(
                            model, lengths, dtype, benchmark.device, num_steps=num_steps
                        ),
                        SCAN_PEERS if is_prompt else UPDATE_PEERS,
                    )
    plans = dict.fromkeys(DRY_DELTA_MODELS, prompts) if benchmark.is_dry else PLANS
    for model, texts in plans.items():
        for text in texts:
            name = f"plans {model.num_qk_heads} and {model.num_v_heads} heads {text}"
            if benchmark.wants_shape(name):
                batch = make_delta_batch(model, prompts[text], torch.float32, benchmark.device)
                measure(benchmark, name, batch, PLAN_PEERS)
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()

"""Count instructions of our kernels and of vLLM's Triton kernels for an H200. No GPU is needed.

python -m perf.counts.static_counts [--only D] [--peers none] [--save FOLDER]

Kernels are compiled for compute capability 9.0 by the installed Triton, and their machine code is
counted. Nothing runs. The counts show how a kernel uses a processor, not how fast it is.
"""

import argparse
import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from jenga_kernels.triton.lib.tiles import WIDE_HEAD
from perf.counts import prompt_counts
from perf.harness.compiled_launches import (
    CAPABILITY,
    TILE_WIDTH,
    Counted,
    compiled_by,
    kinds,
    show_vllm_a_gpu,
)
from perf.harness.machine_code import PretendedGpu
from perf.kernels import (
    bench_conv_update,
    bench_delta,
    bench_delta_replay,
    bench_kv_store,
    bench_latent_attention,
    bench_linear_attention,
    bench_state_replay,
    bench_state_update,
)
from perf.peers import attention_peers, latent_peers
from perf.shapes import latent_shapes
from perf.shapes.attention_shapes import SHAPES, AttentionBatch, make_batch
from perf.shapes.delta_replay_shapes import make_delta_replay_batch
from perf.shapes.delta_shapes import DELTA_MODELS, KIMI_LINEAR, QWEN3_NEXT, make_delta_batch
from perf.shapes.state_replay_shapes import FOUR_DRAFTS, make_replay_batch
from perf.shapes.state_shapes import (
    JAMBA,
    LFM2_CHANNELS,
    NEMOTRON,
    make_conv_batch,
    make_gated_conv_batch,
    make_state_batch,
)

CPU = torch.device("cpu")

MAX_TOKENS = 64
"""Largest number of tokens per request, to which shapes are cut.

The code does not depend on it, but the memory needed here does.
"""

MAX_LINEAR_TOKENS = 256
"""Largest number of tokens of a prompt through linear attention: all its chunks are alike."""

REPLAY_REQUESTS = 16
"""Number of requests in replays. One of them writes its state, as in a long sequence of steps."""

HELPERS = {
    "attention_plan_kernel",
    "attention_splits_kernel",
    "reduce_segments",
    "_fwd_kernel_stage2",
}
"""Kernels that run in addition to the one that reads keys."""

HEADER = f"""\
{"shape":38} {"kernel of":12} {"registers":>9} {"shared":>6} {"programs":>8} {"KiB read":>8} \
{"of":>5} {"per KiB":>7}  {"tile":{TILE_WIDTH}}  by kind"""


def attention(batch: AttentionBatch, *, is_warp_specialized: bool = False) -> Callable[[], object]:
    """Prepare our attention, with a plan for this batch alone.

    Rotations are left out, because PyTorch does them.
    """
    from jenga_kernels.attention.paged_attention import paged_attention
    from jenga_kernels.plans.attention_plan import plan_attention

    shape = batch.shape
    plan = plan_attention(
        batch.query_starts,
        batch.seq_lens,
        shape.kind,
        num_tokens=shape.num_tokens,
        dtype=batch.q.dtype,
        decode_query_tokens=None if max(shape.requests)[0] == 1 else 0,
        max_query_tokens=max(shape.requests)[0],
        is_warp_specialized=is_warp_specialized,
    )
    return lambda: paged_attention(
        batch.q,
        batch.cache.k_pages,
        batch.cache.v_pages,
        batch.page_table,
        batch.query_starts,
        batch.seq_lens,
        scale=shape.head_dim**-0.5,
        window_tokens=shape.window_tokens,
        soft_cap=shape.soft_cap,
        is_causal=shape.is_causal,
        sinks=batch.sinks,
        k_scale=batch.cache.scale,
        v_scale=batch.cache.scale,
        k_slot_scales=batch.cache.k_slot_scales,
        v_slot_scales=batch.cache.v_slot_scales,
        plan=plan,
    )


def cut(
    requests: Sequence[tuple[int, int]], max_tokens: int, max_queries: int, max_requests: int | None
) -> tuple[tuple[int, int], ...]:
    """Shorten requests. Those with stored tokens before their queries keep some if possible.

    Args:
        requests: (query tokens, stored tokens) of each request.
        max_tokens: Largest number of stored tokens of a request.
        max_queries: Largest number of query tokens of a request.
        max_requests: Largest number of requests. None means all.
    """
    cut = []
    for num_queries, num_stored in requests[:max_requests]:
        queries = min(num_queries, max_queries)
        before = min(num_stored - num_queries, max(0, max_tokens - queries))
        cut.append((queries, queries + max(0, before)))
    return tuple(cut)


def _convolutions(
    lengths: list[int],
) -> Iterator[tuple[str, str, Callable[[], Callable[[], object]]]]:
    """Yield launches of convolutions, in the form of `launches`."""
    makes = {NEMOTRON.name: partial(make_conv_batch, NEMOTRON.conv_dim, lengths, CPU)}
    for model, channels in LFM2_CHANNELS.items():
        makes[model] = partial(make_gated_conv_batch, channels, lengths, CPU)
    for model, make in makes.items():
        for owner in ("jenga", "vllm"):
            prepare = getattr(bench_conv_update, owner)
            yield f"M conv_update {model}", owner, lambda m=make, p=prepare: p(m())


def launches(
    max_tokens: int = MAX_TOKENS,
    max_queries: int = MAX_TOKENS,
    max_requests: int | None = None,
) -> Iterator[tuple[str, str, Callable[[], Callable[[], object]]]]:
    """Yield the shape's name, the implementation, and the function that prepares the launch.

    Args:
        max_tokens: Largest number of stored tokens of a request.
        max_queries: Largest number of query tokens of a request.
        max_requests: Largest number of requests. None means all of a shape's requests.
    """
    ones = [1] * min(MAX_TOKENS, max_requests or MAX_TOKENS)
    for shape in SHAPES:
        if shape.name[0] == "X":
            continue
        requests = cut(shape.requests, max_tokens, max_queries, max_requests)
        small = dataclasses.replace(shape, requests=requests)
        yield shape.name, "jenga", lambda s=small: attention(make_batch(s, CPU))
        if shape.name[0] == "P" and not shape.stored.is_quantised and shape.head_dim < WIDE_HEAD:
            yield shape.name, "specialized", lambda s=small: _specialized(make_batch(s, CPU))
        yield shape.name, "vllm", lambda s=small: _vllm_attention(make_batch(s, CPU))
    for model, dtype in (
        (NEMOTRON, torch.float32),
        (NEMOTRON, torch.bfloat16),
        (JAMBA, torch.float32),
    ):
        name = f"M state_update {model.name} {str(dtype)[6:]}"
        one = lambda m=model, d=dtype: make_state_batch(m, ones, d, CPU)  # noqa: E731
        yield name, "jenga", lambda make=one: bench_state_update.jenga(make())
        yield name, "vllm", lambda make=one: bench_state_update.vllm(make())
    for dtype in (torch.float32, torch.bfloat16):
        name = f"M state_replay {NEMOTRON.name} {str(dtype)[6:]}"
        few = partial(make_replay_batch, NEMOTRON, REPLAY_REQUESTS, dtype, CPU)
        yield name, "jenga", lambda make=few: bench_state_replay.jenga(make())
        yield name, "vllm", lambda make=few: bench_state_replay.vllm(make())
        name, few = f"M state_replay 5 tokens {str(dtype)[6:]}", partial(few, drafts=FOUR_DRAFTS)
        yield name, "jenga", lambda make=few: bench_state_replay.jenga(make())
        yield name, "update", lambda make=few: bench_state_replay.jenga_update(make())
    yield from _convolutions(ones)
    linear = partial(bench_linear_attention.make_batch, 8, device=CPU, dtype=torch.float32)
    name = "M linear ling-2.6-flash tp4"
    for owner in ("jenga", "vllm"):
        prepare = getattr(bench_linear_attention, owner)
        yield f"{name} steps", owner, lambda p=prepare: p(linear(lengths=ones))
    tokens = min(max_tokens, MAX_LINEAR_TOKENS)
    # vLLM's kernels for prompts do not run in the emulated GPU.
    prompt = lambda: bench_linear_attention.jenga(linear(lengths=[tokens]))  # noqa: E731
    yield f"{name} prompt", "jenga", prompt
    for model in DELTA_MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"G delta_update {model.name} {str(dtype)[6:]}"
            step = lambda m=model, d=dtype: make_delta_batch(m, ones, d, CPU)  # noqa: E731
            yield name, "jenga", lambda make=step: bench_delta.jenga_update(make())
            yield name, "vllm", lambda make=step: bench_delta.vllm_update(make())
    for model in (QWEN3_NEXT, KIMI_LINEAR):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"G delta_replay {model.name} {str(dtype)[6:]}"
            few = partial(make_delta_replay_batch, model, REPLAY_REQUESTS, dtype, CPU)
            yield name, "jenga", lambda make=few: bench_delta_replay.jenga(make())
            few = partial(few, drafts=FOUR_DRAFTS)
            name = f"G delta_replay 5 tokens {model.name.split('-')[0]} {str(dtype)[6:]}"
            yield name, "jenga", lambda make=few: bench_delta_replay.jenga(make())
            yield name, "update", lambda make=few: bench_delta_replay.jenga_update(make())
    for latent in latent_shapes.SHAPES:
        requests = cut(latent.requests, max_tokens, max_queries, max_requests)
        small = dataclasses.replace(latent, requests=requests)
        name = latent.name if latent.name[0] == "L" else f"L0 {latent.name}"
        yield name, "jenga", lambda s=small: _latent(s, bench_latent_attention.jenga)
        yield name, "vllm", lambda s=small: _latent(s, latent_peers.vllm_triton)
    for store in bench_kv_store.SHAPES:
        small = dataclasses.replace(store, num_tokens=MAX_TOKENS)
        batch = lambda s=small: bench_kv_store.make_batch(s, CPU)  # noqa: E731
        yield store.name, "jenga", lambda make=batch: bench_kv_store.jenga(make())
        yield store.name, "vllm", lambda make=batch: bench_kv_store.vllm_triton(make())


def _specialized(batch: AttentionBatch) -> Callable[[], object]:
    return attention(batch, is_warp_specialized=True)


def _vllm_attention(batch: AttentionBatch) -> Callable[[], object]:
    return attention_peers.vllm_triton(batch, torch.empty_like(batch.q))


def _latent(
    shape: latent_shapes.LatentShape,
    prepare: Callable[[latent_shapes.LatentBatch, torch.Tensor], Callable[[], object]],
) -> Callable[[], object]:
    batch = latent_shapes.make_batch(shape, CPU)
    out = batch.q.new_empty(shape.num_tokens, shape.num_heads, latent_shapes.LATENT_DIM)
    return prepare(batch, out)


def line(shape: str, owner: str, kernel: Counted) -> str:
    """Format a row of the table."""
    return (
        f"{shape[:38]:38} {owner:12} {kernel.code.registers:9} {kernel.shared_bytes / 1024:6.1f} "
        f"{kernel.programs_per_processor:8} {kernel.read_kib:8.1f} {len(kernel.body):5} "
        f"{kernel.per_kib:7.0f}  {kernel.tile[:TILE_WIDTH]:{TILE_WIDTH}}  {kinds(kernel.body)}"
    )


def steps(shape: str, owner: str, prepare: Callable[[], Callable[[], object]]) -> list[str]:
    """Return the rows of the first table for a launch."""
    kernels = [kernel for kernel in compiled_by(prepare) if kernel.name not in HELPERS]
    return [line(shape, owner, kernel) for kernel in kernels]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.counts.static_counts", description=__doc__
    )
    parser.add_argument(
        "--only", default="", help="count only shapes whose name begins with this text"
    )
    parser.add_argument(
        "--peers",
        choices=("vllm", "none"),
        default="vllm",
        help="implementations to compare with (default: %(default)s)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="write the table to this folder"
    )
    options = parser.parse_args(arguments)
    from triton.runtime import driver

    driver.set_active(PretendedGpu(CAPABILITY))
    if options.peers == "vllm":
        show_vllm_a_gpu()
    versions = {name: importlib.metadata.version(name) for name in ("triton", "torch")}
    lines = [
        f"Instructions counted, nothing timed: compute capability 9.0, {versions}",
        "registers of a thread; KiB of shared memory of a program; programs that fit on an SM;",
        "KiB a program loads in the loop, or in all of a kernel without one;",
        "instructions of a warp there; instructions of all warps for each KiB; sizes of blocks;",
        "of which kind",
        "",
        HEADER,
    ]
    print("\n".join(lines), flush=True)

    def add(shape: str, owner: str, rows: Callable[[], list[str]]) -> None:
        if not shape.startswith(options.only) or (owner != "jenga" and options.peers == "none"):
            return
        try:
            found = rows()
        except Exception as error:  # a peer that fails must not end the run
            if owner == "jenga":
                raise
            found = [f"  {shape}: no {owner}: {str(error)[:200]}"]
        lines.extend(found)
        print("\n".join(found), flush=True)

    for shape, owner, prepare in launches():
        if owner == "specialized":  # no loop of its code has both its loads and its products
            continue
        add(shape, owner, lambda s=shape, o=owner, p=prepare: steps(s, o, p))
    if options.only[:1] in ("", "R"):
        legend = ["", *prompt_counts.LEGEND, "", prompt_counts.HEADER]
        lines.extend(legend)
        print("\n".join(legend), flush=True)
    for prompt in prompt_counts.launches():
        add(prompt.name, prompt.owner, lambda p=prompt: prompt_counts.rows(p))
    if options.save:
        text = "\n".join(["# Instruction counts, not speed", "", "```", *lines, "```", ""])
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "static_counts.md").write_text(text)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # With an empty value, vLLM assumes a GPU machine that hides its GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()

"""Count instructions of prompts through recurrent layers on an H200.

These are the rows R of `perf.counts.static_counts`. Prompts run through chains of kernels, and each
kernel walks over a prompt in its own way. So the counts cover all programs of a launch, for each
1024 pairs of a token and a channel of the layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from jenga_kernels.plans.delta_plan import DeltaPlan
from jenga_kernels.triton.recurrent.tiles import CHUNK_TOKENS
from perf.harness.compiled_launches import TILE_WIDTH, Counted, compiled_by, kinds
from perf.kernels import bench_conv_update, bench_delta, bench_state_scan
from perf.shapes.delta_shapes import KIMI_LINEAR, QWEN3_NEXT, make_delta_batch
from perf.shapes.state_shapes import (
    FALCON,
    GRANITE,
    JAMBA,
    NEMOTRON,
    make_conv_batch,
    make_state_batch,
)

PROMPT_TOKENS = 2048
"""Number of tokens of a row's only request."""

Constants = dict[str, int]
Turns = Callable[[Constants, int], tuple[float, ...]]

HEADER = f"""\
{"prompt of one request":32} {"kernel":42} {"registers":>9} {"shared":>6} {"programs":>8} \
{"spilled":>7} {"executed":>8} {"per Ki":>7}  {"tile":{TILE_WIDTH}}  by kind, of all its code"""

LEGEND = (
    f"prompts of {PROMPT_TOKENS} tokens; registers of a thread; KiB of shared memory of a program;",
    "programs that fit on an SM; bytes a thread spills; instructions that a warp executes,",
    "what is skipped outside of loops included; of all warps for 1024 tokens times channels; sizes",
    "of blocks; of a kernel that is tuned, the tiles with the fewest instructions",
)


def _chunk_scan_turns(constants: Constants, num_loops: int) -> tuple[float, ...]:
    # The loop covers the keys of a chunk up to each block of its tokens: half of them on average.
    rows, keys = constants["BLOCK_SIZE_M"], constants["BLOCK_SIZE_K"]
    turns = (constants["dstate"] / keys, (constants["chunk_size"] + rows) / 2 / keys)
    # The first loop exists for wide states, unless the compiler has unrolled it.
    return turns[-num_loops:]


def _passing_turns(constants: Constants, num_loops: int) -> tuple[float, ...]:
    # If the compiler has unrolled the loop, there is a loop of four chunks per turn, and one for
    # the rest.
    num_chunks = PROMPT_TOKENS // constants["chunk_size"]
    return (num_chunks,) if num_loops == 1 else divmod(num_chunks, 4)


def _prompt(unit: str) -> Turns:
    """Turns of a loop over the prompt, after another loop that ends at once.

    The constant `unit` is the number of tokens per turn.
    """
    return lambda c, _loops: (0, PROMPT_TOKENS / c[unit])


def _rows(dividend: str, divisor: str) -> Turns:
    return lambda c, _loops: (c[dividend] / c[divisor],)


TURNS: dict[str, Turns] = {
    # Our kernels begin with the search for a request, or with the loop over padding.
    "causal_conv_kernel": lambda _c, _loops: (0,),
    "state_scan_heads_kernel": _prompt("BLOCK_T"),
    # Two tiles of tokens per turn, after a loop over the rest.
    "state_scan_channels_kernel": lambda c, _loops: (0, 0, PROMPT_TOKENS / (2 * c["BLOCK_T"])),
    # The search for a chunk's request ends at once, because there is only one.
    "delta_chunks_heads_kernel": lambda _c, loops: (0,) * loops,
    # Two products with all keys for each width of blocks, if the compiler has kept the loop.
    "delta_chunks_channels_kernel": lambda _c, loops: (0, *(2,) * (loops - 1)),
    "delta_scan_kernel": _prompt("BLOCK_T"),
    "_causal_conv1d_fwd_kernel": lambda c, _loops: (c["BLOCK_M"],),
    "_chunk_state_fwd_kernel": _rows("chunk_size", "BLOCK_SIZE_K"),
    "_state_passing_fwd_kernel": _passing_turns,
    "_bmm_chunk_fwd_kernel": _rows("K", "BLOCK_SIZE_K"),
    "_chunk_scan_fwd_kernel": _chunk_scan_turns,
    "chunk_scaled_dot_kkt_fwd_kernel": _rows("K", "BK"),
    # All rows except two of each block of 16 on the diagonal.
    "merge_16x16_to_64x64_inverse_kernel": lambda _c, loops: (14,) * loops,
    "recompute_w_u_fwd_kernel": lambda c, _loops: (c["V"] / c["BV"], c["K"] / c["BK"]),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": lambda c, _loops: (PROMPT_TOKENS / c["BT"],),
    "chunk_fwd_kernel_o": _rows("K", "BK"),
    # Tokens of a block up to the program's own: half of them on average.
    "chunk_kda_fwd_kernel_intra_token_parallel": lambda c, _loops: ((c["BC"] + 1) / 2,),
    "chunk_kda_fwd_kernel_inter_solve_fused": lambda c, loops: (
        c["K"] / c["BK"],
        *(14,) * (loops - 1),
    ),
    "chunk_gla_fwd_kernel_o": _rows("K", "BK"),
}
"""Kernel -> function that returns how often each of its loops runs.

Its arguments are the kernel's constants and the number of its loops.
"""

PRODUCT_LOOPS = {
    "state_scan_hopper_kernel": CHUNK_TOKENS,
    "delta_scan_hopper_kernel": CHUNK_TOKENS,
}
"""Kernel -> number of tokens per turn of its loop with matrix products.

A prompt that is not cut into segments does not run the loops inside it.
"""


def executed(kernel: Counted) -> float:
    """Return the instructions that a warp executes, including those outside loops that it skips.

    Raises:
        ValueError: The kernel is unknown, or has another number of loops than before.
    """
    loops = kernel.code.loops
    if tokens := PRODUCT_LOOPS.get(kernel.name):
        turn = len(kernel.code.product_loop)
        return (
            len(kernel.code.instructions)
            - sum(map(len, loops))
            + turn * (PROMPT_TOKENS / tokens - 1)
        )
    # If a loop has no branch back, the compiler has unrolled it completely.
    turns = TURNS.get(kernel.name, lambda _c, _l: ())(kernel.constants, len(loops)) if loops else ()
    if len(turns) != len(loops):
        msg = f"turns of {kernel.name} must be for {len(loops)} loops, got {turns}"
        raise ValueError(msg)
    once = sum(map(len, loops))
    repeated = sum(len(loop) * turn for loop, turn in zip(loops, turns, strict=True))
    return len(kernel.code.instructions) - once + repeated


def issued(kernel: Counted) -> float:
    """Return the instructions that all warps of a launch execute."""
    return executed(kernel) * kernel.num_warps * kernel.num_programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A layer that reads a prompt.

    Attributes:
        name: Operation and model.
        num_channels: Number of channels of the layer.
        owner: Implementation: `jenga` or `vllm`.
        prepare: Function that prepares the launch.
    """

    name: str
    num_channels: int
    owner: str
    prepare: Callable[[], Callable[[], object]]


def launches() -> Iterator[Prompt]:
    """Yield the prompts of all rows."""
    cpu = torch.device("cpu")
    lengths = [PROMPT_TOKENS]
    for model in (NEMOTRON, QWEN3_NEXT):
        conv = lambda m=model: make_conv_batch(m.conv_dim, lengths, cpu)  # noqa: E731
        peers = {"jenga": bench_conv_update.jenga, "vllm": bench_conv_update.vllm}
        yield from _each(f"R causal_conv {model.name}", model.conv_dim, conv, peers)
    for model in (NEMOTRON, GRANITE, FALCON, JAMBA):
        state = lambda m=model: make_state_batch(m, lengths, torch.float32, cpu)  # noqa: E731
        # The prompt is not cut: the states between segments are extra work of the segments. The
        # kernel is the one whose warps all do the same.
        ours = bench_state_scan.jenga
        if not model.is_per_channel:
            ours = partial(bench_state_scan.jenga_whole, is_warp_specialized=False)
        peers = {"jenga": ours, "vllm": bench_state_scan.vllm}
        yield from _each(f"R state_scan {model.name}", model.dim, state, peers)
    for model in (QWEN3_NEXT, KIMI_LINEAR):
        delta = lambda m=model: make_delta_batch(m, lengths, torch.float32, cpu)  # noqa: E731
        peers = {"jenga": bench_delta.jenga_scan, "vllm": bench_delta.vllm_scan}
        channels = model.num_v_heads * model.head_dim
        yield from _each(f"R delta_scan {model.name}", channels, delta, peers)


def delta_plans() -> Iterator[Prompt]:
    """Yield prompts of gated delta nets with plans that are not used by default."""
    cpu = torch.device("cpu")
    for model in (QWEN3_NEXT, KIMI_LINEAR):
        delta = lambda m=model: make_delta_batch(m, [PROMPT_TOKENS], torch.float32, cpu)  # noqa: E731
        channels = model.num_v_heads * model.head_dim
        plans = {"in segments": DeltaPlan(segment_tokens=512)}
        if not model.is_per_channel:
            plans["fused"] = DeltaPlan(is_fused=True)
        for name, plan in plans.items():
            peers = {"jenga": partial(bench_delta.jenga_scan, plan=plan)}
            yield from _each(f"R delta_scan {model.name}, {name}", channels, delta, peers)


def _each(
    name: str,
    num_channels: int,
    make: Callable[[], object],
    peers: dict[str, Callable[..., Callable[[], object]]],
) -> Iterator[Prompt]:
    for owner, peer in peers.items():
        yield Prompt(
            name=name,
            num_channels=num_channels,
            owner=owner,
            prepare=lambda peer=peer: peer(make()),
        )


def rows(prompt: Prompt) -> list[str]:
    """Return rows of the table: one for each kernel, and one for the sum of a chain."""
    kernels = compiled_by(prompt.prepare, issued)
    unit = PROMPT_TOKENS * prompt.num_channels / 1024
    found = [
        f"{prompt.name:32} {f'{prompt.owner} {kernel.name}'[:42]:42} {kernel.code.registers:9} "
        f"{kernel.shared_bytes / 1024:6.1f} {kernel.programs_per_processor:8} "
        f"{kernel.code.stack_bytes:7} {executed(kernel):8.0f} {issued(kernel) / unit:7.0f}  "
        f"{kernel.tile[:TILE_WIDTH]:{TILE_WIDTH}}  {kinds(kernel.code.instructions)}"
        for kernel in kernels
    ]
    if len(kernels) > 1:
        total = sum(map(issued, kernels)) / unit
        found.append(f"{prompt.name:32} {f'{prompt.owner}, all kernels':85} {total:7.0f}")
    return found

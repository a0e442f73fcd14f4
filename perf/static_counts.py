"""Count what kernels consist of on an H200, beside vLLM's Triton kernels. Nothing runs: no GPU.

python -m perf.static_counts [--only D] [--peers none] [--save FOLDER]

Kernels are compiled for compute capability 9.0 by the Triton that is installed, and their machine
code is counted. This tells what a kernel asks of a processor, not how fast it is.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from perf import attention_peers, bench_conv_update, bench_kv_store, bench_state_update
from perf.attention_shapes import SHAPES, AttentionBatch, make_batch
from perf.machine_code import MachineCode, PretendedGpu, count, loaded_bytes, take_apart
from perf.state_shapes import JAMBA, NEMOTRON, make_conv_batch, make_state_batch

CPU = torch.device("cpu")
CAPABILITY = 90
REGISTERS = 65536
SHARED_BYTES = 228 << 10
MAX_WARPS = 64
MAX_PROGRAMS = 32
"""Of an H200, and of one of its processors, from the CUDA programming guide."""

MAX_TOKENS = 64
"""Shapes are cut to so many tokens a request: code does not depend on it, memory here does."""

HELPERS = {"attention_plan_kernel", "attention_splits_kernel", "reduce_segments"}
"""Kernels beside the one that reads keys."""

HEADER = f"""\
{"shape":38} {"kernel of":12} {"registers":>9} {"programs":>8} {"KiB read":>8} {"of":>5} \
{"per KiB":>7}  by kind"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A kernel that a launch compiled."""

    name: str
    num_warps: int
    shared_bytes: int
    code: MachineCode

    @property
    def programs_per_processor(self) -> int:
        """How many programs a processor holds at once, by registers, shared memory and warps."""
        registers = -(-self.code.registers // 8) * 8 * 32 * self.num_warps
        shared = self.shared_bytes + 1024
        return min(
            MAX_PROGRAMS,
            MAX_WARPS // self.num_warps,
            REGISTERS // registers,
            SHARED_BYTES // shared,
        )

    @property
    def body(self) -> tuple[str, ...]:
        """The loop over keys, or all of a kernel that has none."""
        loop = self.code.main_loop
        return (
            loop
            if loaded_bytes(loop) >= loaded_bytes(self.code.instructions) / 16
            else (self.code.instructions)
        )

    @property
    def read_kib(self) -> float:
        """KiB that a program loads in the body."""
        return loaded_bytes(self.body) * 32 * self.num_warps / 1024

    @property
    def per_kib(self) -> float:
        """Instructions of all warps of a program for a KiB it loads in the body."""
        return len(self.body) * self.num_warps / self.read_kib


def show_vllm_a_gpu() -> None:
    """Have vLLM's CPU build define its Triton kernels and choose their tiles for an H200."""
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda _text: False
    # The build for GPUs has operations that its description of a platform loads.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H200(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: ARG003
            return DeviceCapability(*divmod(CAPABILITY, 10))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
            return "NVIDIA H200"

    platforms._current_platform = H200()


def compiled_by(prepare: Callable[[], Callable[[], object]]) -> list[Counted]:
    """The kernels that a launch, and what prepares it, would run."""
    from triton.runtime.jit import JITFunction

    found: dict[int, Counted] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, **kwargs: object) -> object:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        found[id(kernel)] = Counted(
            name=kernel.metadata.name,
            num_warps=kernel.metadata.num_warps,
            shared_bytes=kernel.metadata.shared,
            code=take_apart(kernel.asm["cubin"]),
        )
        return kernel

    JITFunction.run = compile_only
    try:
        prepare()()
    finally:
        JITFunction.run = run
    return list(found.values())


def attention(batch: AttentionBatch) -> Callable[[], object]:
    """Our attention, with a plan for this batch alone."""
    from jenga_kernels.attention_plan import plan_attention
    from jenga_kernels.paged_attention import paged_attention

    shape = batch.shape
    plan = plan_attention(
        batch.query_starts,
        batch.seq_lens,
        shape.kind,
        num_tokens=shape.num_tokens,
        dtype=batch.q.dtype,
        decode_query_tokens=None if max(shape.requests)[0] == 1 else 0,
        max_query_tokens=max(shape.requests)[0],
    )
    return lambda: paged_attention(
        batch.q,
        batch.k_pages,
        batch.v_pages,
        batch.page_table,
        batch.query_starts,
        batch.seq_lens,
        scale=shape.head_dim**-0.5,
        window_tokens=shape.window_tokens,
        soft_cap=shape.soft_cap,
        is_causal=shape.is_causal,
        sinks=batch.sinks,
        k_scale=batch.scale,
        v_scale=batch.scale,
        plan=plan,
    )


def launches() -> Iterator[tuple[str, str, Callable[[], Callable[[], object]]]]:
    """Shape, whose kernel, and what prepares its launch."""
    for shape in SHAPES:
        if shape.name[0] == "X":
            continue
        requests = tuple((min(q, MAX_TOKENS), MAX_TOKENS) for q, _ in shape.requests)
        small = dataclasses.replace(shape, requests=requests)
        yield shape.name, "jenga", lambda s=small: attention(make_batch(s, CPU))
        yield shape.name, "vllm", lambda s=small: _vllm_attention(make_batch(s, CPU))
    for model, dtype in (
        (NEMOTRON, torch.float32),
        (NEMOTRON, torch.bfloat16),
        (JAMBA, torch.float32),
    ):
        name = f"M state_update {model.name} {str(dtype)[6:]}"
        one = lambda m=model, d=dtype: make_state_batch(m, [1] * MAX_TOKENS, d, CPU)  # noqa: E731
        yield name, "jenga", lambda make=one: bench_state_update.jenga(make())
        yield name, "vllm", lambda make=one: bench_state_update.vllm(make())
    conv = lambda: make_conv_batch(NEMOTRON.conv_dim, [1] * MAX_TOKENS, CPU)  # noqa: E731
    yield "M conv_update nemotron-h-8b", "jenga", lambda: bench_conv_update.jenga(conv())
    yield "M conv_update nemotron-h-8b", "vllm", lambda: bench_conv_update.vllm(conv())
    for store in bench_kv_store.SHAPES:
        small = dataclasses.replace(store, num_tokens=MAX_TOKENS)
        batch = lambda s=small: bench_kv_store.make_batch(s, CPU)  # noqa: E731
        yield store.name, "jenga", lambda make=batch: bench_kv_store.jenga(make())
        yield store.name, "vllm", lambda make=batch: bench_kv_store.vllm_triton(make())


def _vllm_attention(batch: AttentionBatch) -> Callable[[], object]:
    return attention_peers.vllm_triton(batch, torch.empty_like(batch.q))


def line(shape: str, owner: str, kernel: Counted) -> str:
    """A row of the table."""
    kinds = "  ".join(f"{kind} {number}" for kind, number in count(kernel.body).most_common())
    return (
        f"{shape[:38]:38} {owner:12} {kernel.code.registers:9} {kernel.programs_per_processor:8} "
        f"{kernel.read_kib:8.1f} {len(kernel.body):5} {kernel.per_kib:7.0f}  {kinds}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.static_counts", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose shape begins with this")
    parser.add_argument("--peers", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="of the table")
    options = parser.parse_args(arguments)
    from triton.runtime import driver

    driver.set_active(PretendedGpu(CAPABILITY))
    if options.peers == "vllm":
        show_vllm_a_gpu()
    versions = {name: importlib.metadata.version(name) for name in ("triton", "torch")}
    lines = [
        f"Instructions counted, nothing timed: compute capability 9.0, {versions}",
        "registers of a thread; programs that fit on a processor; KiB a program loads in the loop,",
        "or in all of a kernel without one;",
        "instructions of a warp there; instructions of all warps for each KiB; of which kind",
        "",
        HEADER,
    ]
    print("\n".join(lines), flush=True)
    for shape, owner, prepare in launches():
        if not shape.startswith(options.only) or (owner != "jenga" and options.peers == "none"):
            continue
        try:
            kernels = compiled_by(prepare)
        except Exception as error:  # a peer that fails must not end the run
            if owner == "jenga":
                raise
            print(f"  {shape}: no {owner}: {str(error)[:200]}", flush=True)
            continue
        for kernel in kernels:
            if kernel.name not in HELPERS:
                lines.append(line(shape, owner, kernel))
                print(lines[-1], flush=True)
    if options.save:
        text = "\n".join(["# Instruction counts, not speed", "", "```", *lines, "```", ""])
        (options.save / "static_counts.md").write_text(text)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # vLLM takes it for a GPU machine that hides its GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()

"""Trials of the kernels written for one kind of GPU, on the GPU at hand.

    python -m jenga_kernels.trials [state_scan ...]

On Hopper some operations have kernels of their own in addition to the generic ones. They are closer
to the hardware, and written in a language (Gluon) that changes from one release of Triton to the
next. A trial makes the same call with both kinds of kernels. Their results may differ only by
rounding. Results of repeated launches must not differ at all. Trials run in a process of their own,
so that a kernel that fails or never ends breaks nothing else. An engine has the calls of its own
layers tried (`trial_calls`). The command line tries usual calls.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from jenga_kernels.trial_calls import FEW_TOKENS, PAGED, Call, check_operation
from jenga_kernels.trial_runs import runs_of
from jenga_kernels.triton.lib.tiles import HOPPER, machine_of

MODULE = "jenga_kernels.trials"
"""Name of this module, which differs from `__name__` when it runs as a program."""

TOLERANCE = 2.0**-6
"""Greatest error of a result, relative to the greatest result: a few roundings to bfloat16."""

NUM_LAUNCHES = 20
"""Number of launches of each kernel, one directly after another."""

LAUNCHES_S = 30.0
"""Seconds that the launches may take, thousands of times what they need."""

PROCESS_S = 300.0
"""Seconds that a process with trials may take. It compiles their kernels."""

ENDED_S = 10.0
"""Seconds to wait for a process that was killed. A GPU may take that long to stop its kernel."""

SPARE_BYTES = 512 << 20
"""Bytes of GPU memory that the arena leaves to queries, results and the compiler's library."""

NOT_PASSED = 1


class TrialError(Exception):
    """A kernel does not end, or its results are not those of the generic kernel."""


class EndlessError(TrialError):
    """A kernel does not end, so no later work on its GPU begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a trial.

    Attributes:
        operation: Operation that the kernels belong to.
        is_passed: Whether the kernels may be used on this machine.
        is_final: Whether another trial on this machine would end the same. False if there was not
            enough memory or time, or if the trial's process ended before it could answer.
        reason: Reason why they did not pass, else empty.
    """

    operation: str
    is_passed: bool
    is_final: bool = True
    reason: str = ""


def has_trials(device: torch.device) -> bool:
    """Whether operations have kernels of their own for this GPU."""
    if device.type != "cuda":
        return False
    # Triton needs a driver that is initialised, and torch may have looked for a GPU without doing
    # so: vLLM's processes set PYTORCH_NVML_BASED_CUDA_CHECK.
    torch.cuda.init()
    return machine_of(device).capability == HOPPER


def hold_trials_apart(
    calls: Sequence[Call], device: torch.device, *, limit_s: float = PROCESS_S
) -> list[Verdict]:
    """Try the kernels that calls use, in another process.

    Args:
        calls: Calls to try.
        device: GPU with kernels to try, which other processes may use too.
        limit_s: Seconds after which the process is ended, for all calls together.

    Returns:
        A verdict for each call. Verdicts of calls that the process did not reach are not final.
    """
    # The other process ends itself, in case this one no longer exists by then.
    command = [sys.executable, "-m", MODULE, "--here", "--device", str(device)]
    command += ["--limit", f"{limit_s + ENDED_S:g}"]
    folder = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said, reason = _conversation(process, [call.to_json() for call in calls], limit_s)
    verdicts = list(_read(said, len(calls)))
    return verdicts + [
        Verdict(operation=call.operation, is_passed=False, is_final=False, reason=reason)
        for call in calls[len(verdicts) :]
    ]


def _conversation(
    process: "subprocess.Popen[str]", lines: Sequence[str], limit_s: float
) -> tuple[str, str]:
    """Send lines to a process, and wait for its answers for a limited time.

    Returns:
        Its output, and the reason why there is no more of it.
    """
    text = "".join(f"{line}\n" for line in lines)
    try:
        said, errors = process.communicate(text, timeout=limit_s)
    except subprocess.TimeoutExpired:
        reason = f"did not end within {limit_s:g} s"
        process.kill()
        try:
            said, _ = process.communicate(timeout=ENDED_S)
        except subprocess.TimeoutExpired as error:
            # The system reaps it later: a process that waits in a driver cannot be killed at once.
            partial = error.stdout or b""
            said = partial if isinstance(partial, str) else partial.decode()
            _abandon(process)
            reason += f", and was not gone {ENDED_S:g} s after it was killed"
        return said, reason
    last = (errors.splitlines() or ["nothing"])[-1]
    return said, f"its process ended with {process.returncode} and said {last}"


def _abandon(process: "subprocess.Popen[str]") -> None:
    """Close a process's pipes and mark it as ended, so that no code waits for it."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    process.returncode = -signal.SIGKILL


def _read(said: str, most: int) -> Iterator[Verdict]:
    """Read verdicts from a process's output, and skip other lines."""
    for line in said.splitlines():
        if most and line.startswith(_MARK):
            try:
                yield Verdict(**json.loads(line.removeprefix(_MARK)))
            except (ValueError, TypeError):
                return
            most -= 1


_MARK = "verdict "
"""First word of a line with a verdict. Other lines come from the compiler."""


def hold_trial(call: Call, arena: torch.Tensor, *, num_launches: int = NUM_LAUNCHES) -> None:
    """Try the kernels that a call uses, in this process.

    Args:
        call: Call to try.
        arena: Memory for its pages, u8[num_bytes], on the device whose kernels are tried.
        num_launches: Number of launches of each kernel, one directly after another.

    Raises:
        TrialError: If a kernel's results are not those of the generic kernel, or differ from launch
            to launch, or if it does not end. The message says which.
        torch.OutOfMemoryError: If there is not enough memory.
    """
    for name, run in runs_of(call, arena):
        expected = run(True)
        first, *others = [run(False) for _ in range(num_launches)]
        _await(name, arena.device)
        for index, (found, wanted) in enumerate(zip(first, expected, strict=True)):
            _check_near(f"{name}, result {index}", found, wanted)
        for results in others:
            if not all(map(_is_same, results, first)):
                msg = f"{name}: another launch gives other results"
                raise TrialError(msg)


def _await(name: str, device: torch.device) -> None:
    """Wait for launched kernels for a limited time.

    Raises:
        EndlessError: If they do not end.
    """
    if device.type != "cuda":
        return
    ended = torch.cuda.Event()
    ended.record(torch.cuda.current_stream(device))
    until = time.monotonic() + LAUNCHES_S
    while not ended.query():
        if time.monotonic() > until:
            msg = f"{name}: does not end within {LAUNCHES_S:g} s"
            raise EndlessError(msg)
        time.sleep(0.001)


def _check_near(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check results. NaN, which marks results that are not written, must be the same in both.

    Raises:
        TrialError: If a result differs too much.
    """
    found, wanted = found.float(), wanted.float()
    if not torch.equal(found.isnan(), wanted.isnan()):
        msg = f"{name}: not the same are numbers"
        raise TrialError(msg)
    most = wanted.nan_to_num(0.0).abs().amax().item()
    error = (found - wanted).nan_to_num(0.0).abs().amax().item()
    if not error <= TOLERANCE * most:
        msg = f"{name}: off by {error:.3g} where the greatest is {most:.3g}"
        raise TrialError(msg)


def _is_same(found: torch.Tensor, first: torch.Tensor) -> bool:
    return torch.equal(found.nan_to_num(0.0), first.nan_to_num(0.0))


def arena_for(calls: Sequence[Call], device: torch.device) -> torch.Tensor:
    """Allocate an arena for the pages of calls, as long as the longest needs and memory allows.

    Returns:
        u8[num_bytes]; no byte of it is written.
    """
    num_bytes = max(call.arena_bytes for call in calls)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        num_bytes = min(num_bytes, max(0, free_bytes - SPARE_BYTES))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def verdicts_here(calls: Sequence[Call], device: torch.device) -> Iterator[Verdict]:
    """Try the kernels that calls use in this process, which may be unusable afterwards.

    Yields:
        A verdict for each call, as soon as it is known. None follow after a kernel that does not
        end.
    """
    try:
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches there
        arena = arena_for(calls, device)
    except Exception as error:
        reason = f"the GPU cannot be used: {error}"
        for call in calls:
            yield _not_final(call, reason)
        return
    for call in calls:
        try:
            hold_trial(call, arena)
        except torch.OutOfMemoryError as error:
            yield _not_final(call, str(error))
        except TrialError as error:
            yield Verdict(operation=call.operation, is_passed=False, reason=str(error))
            if isinstance(error, EndlessError):
                return
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            reason = f"{type(error).__name__}: {said}"
            yield Verdict(operation=call.operation, is_passed=False, reason=reason)
        else:
            yield Verdict(operation=call.operation, is_passed=True)


def _not_final(call: Call, reason: str) -> Verdict:
    return Verdict(operation=call.operation, is_passed=False, is_final=False, reason=reason)


PAGE_BYTES, NUM_PAGES = 1 << 20, (1 << 12) + 64
"""Distance in bytes between small pages of the usual calls, and their number. The last are past
2**31 elements of 16 bits."""


def _pages(*shape: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Make pages of this shape, as far apart as pages of an arena, without memory."""
    arena = torch.empty(NUM_PAGES * PAGE_BYTES, dtype=torch.uint8, device="meta").view(dtype)
    strides = torch.empty(shape, device="meta").stride()
    distance = PAGE_BYTES // dtype.itemsize
    return arena.as_strided((NUM_PAGES, *shape), (distance, *strides), offset)


def _attention_call(dtype: torch.dtype, head_dim: int, **options: float) -> Call:
    num_heads, num_kv_heads, page_tokens = 8, 2, 16
    slots = _pages(num_kv_heads, page_tokens, 2 * head_dim, dtype=dtype).transpose(1, 2)
    return Call.of(
        "paged_attention",
        q=torch.empty(FEW_TOKENS, num_heads, head_dim, dtype=dtype, device="meta"),
        k_pages=slots[..., :head_dim],
        v_pages=slots[..., head_dim:],
        **options,
    )


def _latent_call(stored: torch.dtype, *, page_tokens: int) -> Call:
    num_heads, latent_dim, rotary_dim = 128, 512, 64
    width = latent_dim + rotary_dim
    return Call.of(
        "latent_attention",
        q=torch.empty(FEW_TOKENS, num_heads, width, dtype=torch.bfloat16, device="meta"),
        pages=_pages(page_tokens, width, dtype=stored),
        latent_dim=latent_dim,
    )


HEAD_DIM, STATE_DIM = 64, 128


def _state_scan_call() -> Call:
    num_heads, num_groups, dtype = 16, 2, torch.bfloat16
    widths = (num_heads * HEAD_DIM, num_groups * STATE_DIM, num_groups * STATE_DIM)
    convolved = torch.empty(FEW_TOKENS, sum(widths), dtype=dtype, device="meta")
    x, B, C = convolved.split(widths, dim=-1)
    return Call.of(
        "state_scan",
        x=x.unflatten(-1, (num_heads, HEAD_DIM)),
        dt=torch.empty(FEW_TOKENS, num_heads, dtype=dtype, device="meta"),
        A=torch.empty(num_heads, device="meta"),
        B=B.unflatten(-1, (num_groups, STATE_DIM)),
        C=C.unflatten(-1, (num_groups, STATE_DIM)),
        D=torch.empty(num_heads, device="meta"),
        states=_pages(num_heads, HEAD_DIM, STATE_DIM, dtype=torch.float32),
    )


def _delta_scan_call(*, is_per_channel: bool = False) -> Call:
    num_heads, num_qk_heads, dtype = 8, 8 if is_per_channel else 4, torch.bfloat16
    widths = tuple(heads * STATE_DIM for heads in (num_qk_heads, num_qk_heads, num_heads))
    convolved = torch.empty(FEW_TOKENS, sum(widths), dtype=dtype, device="meta")
    q, k, v = (part.unflatten(-1, (-1, STATE_DIM)) for part in convolved.split(widths, dim=-1))
    channels = (STATE_DIM,) if is_per_channel else ()
    return Call.of(
        "delta_scan",
        q=q,
        k=k,
        v=v,
        gates=torch.empty(FEW_TOKENS, num_heads, *channels, device="meta"),
        betas=torch.empty(FEW_TOKENS, num_heads, device="meta"),
        states=_pages(num_heads, STATE_DIM, STATE_DIM, dtype=torch.float32),
    )


def usual_calls(operation: str) -> list[Call]:
    """Make calls of an operation like those of layers of usual sizes, with pages in a long arena.

    Raises:
        ValueError: If there is no such operation.
    """
    check_operation(operation)
    bfloat16, float16, float8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    if operation == "paged_attention":
        return [
            _attention_call(bfloat16, 128),
            _attention_call(float16, 64, window_tokens=100, soft_cap=20.0),
            _attention_call(bfloat16, 256, reads_spans=True),
        ]
    if operation == "latent_attention":
        kinds = ((bfloat16, 16), (bfloat16, 64), (float8, 64))
        return [_latent_call(stored, page_tokens=tokens) for stored, tokens in kinds]
    if operation == "state_scan":
        return [_state_scan_call()]
    return [_delta_scan_call(), _delta_scan_call(is_per_channel=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run trials from the command line.

    Returns:
        0, or 1 if a kernel did not pass.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jenga_kernels.trials",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operations", nargs="*", metavar="operation", help=", ".join(PAGED))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument(
        "--here", action="store_true", help="try calls that stdin describes, in this process"
    )
    parser.add_argument("--limit", type=float, default=0.0, help="seconds to live, 0 for no limit")
    options = parser.parse_args(arguments)
    if options.limit:
        signal.setitimer(signal.ITIMER_REAL, options.limit)  # ends the process in any case
    operations = options.operations or list(PAGED)
    if unknown := sorted(set(operations) - set(PAGED)):
        parser.error(
            f"unknown operations {', '.join(unknown)}; expected some of {', '.join(PAGED)}"
        )
    if not torch.cuda.is_available() or not has_trials(options.device):
        parser.error(f"{options.device} is no GPU that has kernels of its own: expected a Hopper")
    all_passed = True
    if options.here:
        calls = [Call.from_json(line) for line in sys.stdin if line.strip()]
        for verdict in verdicts_here(calls, options.device):
            _say(_MARK + json.dumps(asdict(verdict)))
            all_passed = all_passed and verdict.is_passed
        return 0 if all_passed else NOT_PASSED
    for operation in operations:
        for verdict in hold_trials_apart(usual_calls(operation), options.device):
            _say(f"{operation}: {'passed' if verdict.is_passed else verdict.reason}")
            all_passed = all_passed and verdict.is_passed
    return 0 if all_passed else NOT_PASSED


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    # A usual exit would wait for a kernel that never ends.
    os._exit(code)

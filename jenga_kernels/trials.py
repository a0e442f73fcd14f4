"""Trials of the kernels written for one kind of GPU, on the GPU at hand.

    python -m jenga_kernels.trials [state_scan ...]

On Hopper some operations have kernels besides those of all GPUs. These are closer to the hardware,
and written in a language (Gluon) that changes from one release of Triton to the next. A trial makes
a call with both, on the same numbers. Results may differ as far as roundings do; those of launches
behind each other may not differ at all. Trials are held in a process of their own, so that a kernel
that fails or never ends takes nothing else with it. An engine has the calls of its own layers tried
(`trial_calls`); from the command line, usual ones are.
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
"""This one, which calls itself otherwise where it is what runs."""

TOLERANCE = 2.0**-6
"""Most that a result may be off, of the greatest one: some roundings to bfloat16, and no more."""

NUM_LAUNCHES = 20
"""Of each kernel, behind each other."""

LAUNCHES_S = 30.0
"""For the launches: thousands of times what they take."""

PROCESS_S = 300.0
"""For trials in a process of their own, which compiles their kernels."""

ENDED_S = 10.0
"""For a process that has been killed: a GPU may take as long to give up its kernel."""

SPARE_BYTES = 512 << 20
"""Of a GPU's memory, what an arena leaves to queries, results and the compiler's library."""

NOT_PASSED = 1


class TrialError(Exception):
    """A kernel does not give what the kernel of all GPUs gives, or does not end."""


class EndlessError(TrialError):
    """A kernel does not end, and nothing behind it on its GPU begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a trial.

    Attributes:
        operation: Whose kernels they are.
        is_passed: Whether they may be used here.
        is_final: Whether another trial on this machine would end the same; not so where there was
            no memory for it, or no time, or where its process ended before it could say.
        reason: Why they did not pass.
    """

    operation: str
    is_passed: bool
    is_final: bool = True
    reason: str = ""


def has_trials(device: torch.device) -> bool:
    """Whether operations have kernels of their own for this GPU."""
    if device.type != "cuda":
        return False
    # Triton asks a driver that someone else has to start, and torch may have looked for a GPU
    # without: vLLM's processes set PYTORCH_NVML_BASED_CUDA_CHECK.
    torch.cuda.init()
    return machine_of(device).capability == HOPPER


def hold_trials_apart(
    calls: Sequence[Call], device: torch.device, *, limit_s: float = PROCESS_S
) -> list[Verdict]:
    """Try the kernels that calls take, in another process.

    Args:
        calls: What to try.
        device: With trials; a GPU that another process may use too.
        limit_s: When it is ended, for all of them together.

    Returns:
        A verdict for each. Those that the process did not come to are not final.
    """
    # Should this process be gone by then, the other one ends itself.
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
    """Tell a process some lines, and wait for its answers, but not for ever.

    Returns:
        What it said, and why it said no more.
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
            # It is left to the system: what waits in a driver cannot be killed at once.
            partial = error.stdout or b""
            said = partial if isinstance(partial, str) else partial.decode()
            _abandon(process)
            reason += f", and was not gone {ENDED_S:g} s after it was killed"
        return said, reason
    last = (errors.splitlines() or ["nothing"])[-1]
    return said, f"its process ended with {process.returncode} and said {last}"


def _abandon(process: "subprocess.Popen[str]") -> None:
    """Let nobody wait for a process any more."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    process.returncode = -signal.SIGKILL


def _read(said: str, most: int) -> Iterator[Verdict]:
    """Verdicts in what a process said, among other lines of it."""
    for line in said.splitlines():
        if most and line.startswith(_MARK):
            try:
                yield Verdict(**json.loads(line.removeprefix(_MARK)))
            except (ValueError, TypeError):
                return
            most -= 1


_MARK = "verdict "
"""How a line with a verdict begins; others are the compiler's."""


def hold_trial(call: Call, arena: torch.Tensor, *, num_launches: int = NUM_LAUNCHES) -> None:
    """Try the kernels that a call takes, in this process.

    Args:
        call: What to try.
        arena: For its pages, u8[num_bytes], on the device whose kernels are tried.
        num_launches: Of each, behind each other.

    Raises:
        TrialError: If a kernel gives something else than the kernel of all GPUs, or other results
            each time, or does not end; the message says which.
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
    """Wait for what was launched, but not for ever.

    Raises:
        EndlessError: If it does not end.
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
    """Check results, where those that are not written are no numbers in both.

    Raises:
        TrialError: If one is off.
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
    """Allocate an arena as long as the longest that calls have pages in, or as there is memory for.

    Returns:
        u8[num_bytes]; no byte of it is written.
    """
    num_bytes = max(call.arena_bytes for call in calls)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        num_bytes = min(num_bytes, max(0, free_bytes - SPARE_BYTES))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def verdicts_here(calls: Sequence[Call], device: torch.device) -> Iterator[Verdict]:
    """Try the kernels that calls take in this process, which may be of no use afterwards.

    Yields:
        A verdict for each, as it comes; none behind a kernel that does not end.
    """
    try:
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where Triton launches
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
"""Of the usual calls: from a small page to the next, and pages past 2**31 elements of 16 bits."""


def _pages(*shape: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Pages of this shape, as far from each other as those of an arena, without memory."""
    arena = torch.empty(NUM_PAGES * PAGE_BYTES, dtype=torch.uint8, device="meta").view(dtype)
    strides = torch.empty(shape, device="meta").stride()
    distance = PAGE_BYTES // dtype.itemsize
    return arena.as_strided((NUM_PAGES, *shape), (distance, *strides), offset)


def _attention_call(
    dtype: torch.dtype, head_dim: int, *, stored: torch.dtype | None = None, **options: float
) -> Call:
    num_heads, num_kv_heads, page_tokens = 8, 2, 16
    slots = _pages(num_kv_heads, page_tokens, 2 * head_dim, dtype=stored or dtype).transpose(1, 2)
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
    """Calls of an operation as layers of usual sizes make them, with pages in a long arena.

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
            _attention_call(bfloat16, 128, stored=float8),
        ]
    if operation == "latent_attention":
        kinds = ((bfloat16, 16), (bfloat16, 64), (float8, 64))
        return [_latent_call(stored, page_tokens=tokens) for stored, tokens in kinds]
    if operation == "state_scan":
        return [_state_scan_call()]
    return [_delta_scan_call(), _delta_scan_call(is_per_channel=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold trials from the command line.

    Returns:
        0, or 1 where a kernel did not pass.
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
        signal.setitimer(signal.ITIMER_REAL, options.limit)  # ends it, whatever it waits for
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
    # Leaving as usual would wait for a kernel that never ends.
    os._exit(code)

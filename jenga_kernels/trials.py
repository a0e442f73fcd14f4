"""Trials of the kernels written for one kind of GPU, on the GPU at hand.

    python -m jenga_kernels.trials [state_scan ...]

On Hopper some operations have kernels besides those of all GPUs. These are closer to the hardware,
and written in a language (Gluon) that changes from one release of Triton to the next. A trial gives
both the same numbers. Results may differ as far as roundings do; those of launches behind each
other may not differ at all. Each operation's is held in a process of its own, so that a kernel that
fails or never ends takes nothing else with it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from jenga_kernels.attention_plan import AttentionKind, plan_attention
from jenga_kernels.delta_scan import delta_scan
from jenga_kernels.latent_attention import latent_attention
from jenga_kernels.latent_plan import plan_latent_attention
from jenga_kernels.paged_attention import paged_attention
from jenga_kernels.state_scan import state_scan
from jenga_kernels.states import NULL_SLOT, Checkpoints
from jenga_kernels.triton.tiles import HOPPER, machine_of

MODULE = "jenga_kernels.trials"
"""This one, which calls itself otherwise where it is what runs."""

TOLERANCE = 2.0**-6
"""Most that a result may be off, of the greatest one: some roundings to bfloat16, and no more."""

NUM_LAUNCHES = 20
"""Of each kernel, behind each other."""

LAUNCHES_S = 30.0
"""For the launches: thousands of times what they take."""

PROCESS_S = 300.0
"""For a trial in a process of its own, which compiles its kernels."""

NOT_PASSED = 1

Results = Sequence[torch.Tensor]
Run = Callable[[bool], Results]
"""Launches an operation, by the kernels of all GPUs if so asked, and returns what that wrote."""


class TrialError(Exception):
    """A kernel does not give what the kernel of all GPUs gives, or does not end."""


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


def hold_trial_apart(
    operation: str, device: torch.device, *, limit_s: float = PROCESS_S
) -> Verdict:
    """Try an operation's kernels in another process.

    Args:
        operation: One of `TRIALS`.
        device: With trials; a GPU that another process may use too.
        limit_s: When it is ended.

    Raises:
        ValueError: If there is no such operation.
    """
    _check_operation(operation)
    command = [sys.executable, "-m", MODULE, operation, "--here", "--device", str(device)]
    folder = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    try:
        ended = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"did not end within {limit_s:g} s"
        return Verdict(operation=operation, is_passed=False, is_final=False, reason=reason)
    lines = ended.stdout.splitlines()
    try:
        return Verdict(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        said = (ended.stderr.splitlines() or ["nothing"])[-1]
        reason = f"its process ended with {ended.returncode} and said {said}"
        return Verdict(operation=operation, is_passed=False, is_final=False, reason=reason)


def hold_trial(operation: str, device: torch.device, *, num_launches: int = NUM_LAUNCHES) -> None:
    """Try an operation's kernels in this process.

    Args:
        operation: One of `TRIALS`.
        device: Whose kernels are tried.
        num_launches: Of each, behind each other.

    Raises:
        TrialError: If a kernel gives something else than the kernel of all GPUs, or other results
            each time, or does not end; the message says which.
        ValueError: If there is no such operation.
    """
    _check_operation(operation)
    for name, run in TRIALS[operation](device):
        expected = run(True)
        first, *others = [run(False) for _ in range(num_launches)]
        _await(name, device)
        for index, (found, wanted) in enumerate(zip(first, expected, strict=True)):
            _check_near(f"{name}, result {index}", found, wanted)
        for results in others:
            if not all(map(_is_same, results, first)):
                msg = f"{name}: another launch gives other results"
                raise TrialError(msg)


def _check_operation(operation: str) -> None:
    if operation not in TRIALS:
        msg = f"operation must be one of {', '.join(TRIALS)}, got {operation!r}"
        raise ValueError(msg)


def _await(name: str, device: torch.device) -> None:
    """Wait for what was launched, but not for ever.

    Raises:
        TrialError: If it does not end.
    """
    if device.type != "cuda":
        return
    ended = torch.cuda.Event()
    ended.record(torch.cuda.current_stream(device))
    until = time.monotonic() + LAUNCHES_S
    while not ended.query():
        if time.monotonic() > until:
            msg = f"{name}: does not end within {LAUNCHES_S:g} s"
            raise TrialError(msg)
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


class _Numbers:
    """Random numbers that are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Normally distributed ones."""
        return torch.randn(shape, generator=self._generator).to(self._device, dtype)

    def page_table(self, seq_lens: Sequence[int], page_tokens: int) -> torch.Tensor:
        """Pages of each request, in no order, of as many as there are for all."""
        columns = -(-max(seq_lens) // page_tokens)
        pages = torch.randperm(len(seq_lens) * columns, generator=self._generator)
        return pages.view(len(seq_lens), columns).to(self._device, torch.int32)

    def integers(self, *values: int) -> torch.Tensor:
        """Those given."""
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def starts(self, counts: Sequence[int]) -> torch.Tensor:
        """Where each of so many begins, and the end."""
        return self.integers(0, *torch.tensor(counts).cumsum(0).tolist())


def _no_numbers(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


QUERIES, KEYS = (200, 130, 300, 1), (200, 700, 333, 500)
"""Of the requests that attend: prompts, two of them with keys before, and a decoding one."""

ATTENTION_PAGE_TOKENS = 16


def _attention_trials(device: torch.device) -> Iterator[tuple[str, Run]]:
    bfloat16, float16, float8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    yield "heads of 128", _attention(device, bfloat16, 128)
    yield "windows and caps", _attention(device, float16, 64, window_tokens=100, soft_cap=20.0)
    yield "heads of 256", _attention(device, bfloat16, 256)
    yield "float8 pages", _attention(device, bfloat16, 128, stored=float8)


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    stored: torch.dtype | None = None,
    window_tokens: int | None = None,
    soft_cap: float | None = None,
) -> Run:
    num_heads, num_kv_heads, page_tokens = 8, 2, ATTENTION_PAGE_TOKENS
    numbers = _Numbers(device)
    q = numbers.normal(sum(QUERIES), num_heads, head_dim, dtype=dtype)
    table = numbers.page_table(KEYS, page_tokens)
    pages = (table.numel(), page_tokens, num_kv_heads, head_dim)
    k_pages, v_pages = (numbers.normal(*pages, dtype=stored or dtype) for _ in range(2))
    starts, lens = numbers.starts(QUERIES), numbers.integers(*KEYS)
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        window_tokens=window_tokens,
        is_quantised=stored is not None,
    )

    def run(is_portable: bool) -> Results:
        plan = plan_attention(
            starts,
            lens,
            kind,
            num_tokens=len(q),
            dtype=dtype,
            is_warp_specialized=not is_portable,
        )
        out, lse = _no_numbers(*q.shape, like=q), _no_numbers(*q.shape[:2], like=lens.float())
        paged_attention(
            q,
            k_pages,
            v_pages,
            table,
            starts,
            lens,
            scale=2 * head_dim**-0.5,  # so that few keys decide each result
            window_tokens=window_tokens,
            soft_cap=soft_cap,
            out=out,
            lse=lse,
            plan=plan,
        )
        return out, lse

    return run


LATENT_DIM, ROTARY_DIM, LATENT_PAGE_TOKENS = 512, 64, 64
LATENTS = (1, 700, 64, 2500)
"""Of the requests that decode over them."""


def _latent_trials(device: torch.device) -> Iterator[tuple[str, Run]]:
    yield "latents", _latents(device, None)
    yield "float8 latents", _latents(device, torch.float8_e4m3fn)


def _latents(device: torch.device, stored: torch.dtype | None) -> Run:
    dtype, num_heads, width = torch.bfloat16, 128, LATENT_DIM + ROTARY_DIM
    numbers = _Numbers(device)
    q = numbers.normal(len(LATENTS), num_heads, width, dtype=dtype)
    table = numbers.page_table(LATENTS, LATENT_PAGE_TOKENS)
    pages = numbers.normal(table.numel(), LATENT_PAGE_TOKENS, width, dtype=stored or dtype)
    starts, lens = numbers.starts([1] * len(LATENTS)), numbers.integers(*LATENTS)
    kind = AttentionKind(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=LATENT_DIM,
        page_tokens=LATENT_PAGE_TOKENS,
        is_quantised=stored is not None,
    )

    def run(is_portable: bool) -> Results:
        plan = plan_latent_attention(
            starts,
            lens,
            kind,
            num_tokens=len(q),
            dtype=dtype,
            max_query_tokens=1,
            is_warp_specialized=not is_portable,
        )
        out = _no_numbers(len(q), num_heads, LATENT_DIM, like=q)
        lse = _no_numbers(*q.shape[:2], like=lens.float())
        latent_attention(
            q,
            pages,
            table,
            starts,
            lens,
            scale=2 * width**-0.5,
            latent_dim=LATENT_DIM,
            out=out,
            lse=lse,
            plan=plan,
        )
        return out, lse

    return run


SCANNED = (700, 64, 1)
"""Tokens of the requests that are scanned."""

INITIAL_SLOTS, STATE_SLOTS, CHECKPOINT_SLOTS, NUM_SLOTS = (1, NULL_SLOT, 2), (3, 4, 2), (5, 6), 7
CHECKPOINTS_AFTER = (100, 640)
"""Tokens of the first request."""

SEGMENT_TOKENS, UNCUT_TOKENS = 256, 1 << 16
HEAD_DIM, STATE_DIM = 64, 128


def _scan_trials(device: torch.device) -> Iterator[tuple[str, Run]]:
    yield "a group of warps", _scan(device, is_warp_specialized=False)
    yield "two groups of warps", _scan(device, is_warp_specialized=True)
    segments = {"segment_tokens": SEGMENT_TOKENS}
    yield "segments", _scan(device, is_warp_specialized=False, **segments)
    yield "segments by two groups of warps", _scan(device, is_warp_specialized=True, **segments)


def _scan(
    device: torch.device, *, is_warp_specialized: bool, segment_tokens: int = UNCUT_TOKENS
) -> Run:
    dtype, num_heads, num_groups, num_tokens = torch.bfloat16, 16, 2, sum(SCANNED)
    numbers = _Numbers(device)
    x = numbers.normal(num_tokens, num_heads, HEAD_DIM, dtype=dtype)
    dt = numbers.normal(num_tokens, num_heads, dtype=dtype)
    # Decays of all sizes: some heads remember a few tokens, others hundreds.
    A = -torch.logspace(-3, 0, num_heads, base=2.0).to(device) / 8
    B, C = (numbers.normal(num_tokens, num_groups, STATE_DIM, dtype=dtype) for _ in range(2))
    D = numbers.normal(num_heads, dtype=torch.float32)
    steps = _Steps(numbers, num_heads, HEAD_DIM, STATE_DIM)

    def run(is_portable: bool) -> Results:
        out, states = _no_numbers(*x.shape, like=x), steps.states.clone()
        state_scan(
            out,
            states,
            x,
            dt,
            A,
            B,
            C,
            *steps.arguments,
            D=D,
            checkpoints=steps.checkpoints,
            segment_tokens=UNCUT_TOKENS if is_portable else segment_tokens,
            is_warp_specialized=is_warp_specialized,
            is_portable=is_portable,
        )
        return out, states

    return run


def _delta_trials(device: torch.device) -> Iterator[tuple[str, Run]]:
    yield "decays of heads", _delta(device)
    yield "decays of channels", _delta(device, is_per_channel=True)


def _delta(device: torch.device, *, is_per_channel: bool = False) -> Run:
    dtype, num_heads, num_qk_heads, num_tokens = torch.bfloat16, 8, 4, sum(SCANNED)
    if is_per_channel:
        num_qk_heads = num_heads
    numbers = _Numbers(device)
    q, k = (numbers.normal(num_tokens, num_qk_heads, STATE_DIM, dtype=dtype) for _ in range(2))
    v = numbers.normal(num_tokens, num_heads, STATE_DIM, dtype=dtype)
    channels = (STATE_DIM,) if is_per_channel else ()
    gates = numbers.normal(num_tokens, num_heads, *channels, dtype=torch.float32).sigmoid().log()
    betas = numbers.normal(num_tokens, num_heads, dtype=torch.float32).sigmoid()
    steps = _Steps(numbers, num_heads, STATE_DIM, STATE_DIM)

    def run(is_portable: bool) -> Results:
        out, states = _no_numbers(*v.shape, like=v), steps.states.clone()
        delta_scan(
            out,
            states,
            q,
            k,
            v,
            gates / 8,
            betas,
            *steps.arguments,
            checkpoints=steps.checkpoints,
            is_portable=is_portable,
        )
        return out, states

    return run


class _Steps:
    """Requests that are scanned, and the states of their layer.

    Attributes:
        states: Before a scan.
        arguments: Where requests begin, and the slots of their states before and after.
        checkpoints: States to keep besides.
    """

    def __init__(self, numbers: _Numbers, num_heads: int, head_dim: int, state_dim: int) -> None:
        shape = (NUM_SLOTS, num_heads, head_dim, state_dim)
        self.states = numbers.normal(*shape, dtype=torch.float32)
        self.arguments = (
            numbers.starts(SCANNED),
            numbers.integers(*INITIAL_SLOTS),
            numbers.integers(*STATE_SLOTS),
        )
        self.checkpoints = Checkpoints(
            starts=numbers.integers(0, *[len(CHECKPOINTS_AFTER)] * len(SCANNED)),
            after_tokens=numbers.integers(*CHECKPOINTS_AFTER),
            slots=numbers.integers(*CHECKPOINT_SLOTS),
        )


TRIALS: dict[str, Callable[[torch.device], Iterator[tuple[str, Run]]]] = {
    "paged_attention": _attention_trials,
    "latent_attention": _latent_trials,
    "state_scan": _scan_trials,
    "delta_scan": _delta_trials,
}
"""What is tried of each operation that has kernels of its own for a GPU."""


def verdict_here(operation: str, device: torch.device) -> Verdict:
    """Try an operation's kernels in this process, which may be of no use afterwards."""
    try:
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where Triton launches
        torch.zeros(1, device=device)
    except Exception as error:
        reason = f"the GPU cannot be used: {error}"
        return Verdict(operation=operation, is_passed=False, is_final=False, reason=reason)
    try:
        hold_trial(operation, device)
    except torch.OutOfMemoryError as error:
        return Verdict(operation=operation, is_passed=False, is_final=False, reason=str(error))
    except TrialError as error:
        return Verdict(operation=operation, is_passed=False, reason=str(error))
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {said}"
        return Verdict(operation=operation, is_passed=False, reason=reason)
    return Verdict(operation=operation, is_passed=True)


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
    parser.add_argument("operations", nargs="*", metavar="operation", help=", ".join(TRIALS))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--here", action="store_true", help="in this process; prints JSON")
    options = parser.parse_args(arguments)
    operations = options.operations or list(TRIALS)
    if unknown := sorted(set(operations) - set(TRIALS)):
        parser.error(
            f"unknown operations {', '.join(unknown)}; expected some of {', '.join(TRIALS)}"
        )
    if not torch.cuda.is_available() or not has_trials(options.device):
        parser.error(f"{options.device} is no GPU that has kernels of its own: expected a Hopper")
    all_passed = True
    for operation in operations:
        if options.here:
            verdict = verdict_here(operation, options.device)
            _say(json.dumps(asdict(verdict)))
        else:
            verdict = hold_trial_apart(operation, options.device)
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

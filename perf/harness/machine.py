"""What a machine is, without torch: no CUDA context, no seconds of imports."""

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

GPU_FIELDS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"


def output_of(*command: str) -> str:
    """Get what a command prints; nothing where it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def module_of(benchmark: str) -> str:
    """Get the dotted name of a benchmark's module, whichever folder of `perf` has it.

    Raises:
        ValueError: No folder has it, or several have.
    """
    found = sorted((ROOT / "perf").glob(f"*/{benchmark}.py"))
    if len(found) != 1:
        msg = f"expected one folder of perf with {benchmark}.py, found {len(found)}"
        raise ValueError(msg)
    return f"perf.{found[0].parent.name}.{benchmark}"


def commit_of(root: Path = ROOT) -> str:
    """Name what is measured: PERF_COMMIT, for copies that are no checkout, or what git says."""
    given = os.environ.get("PERF_COMMIT")
    if given:
        return given
    return output_of("git", "-C", str(root), "describe", "--always", "--dirty") or "unknown"


def gpu_state() -> str:
    """Get the first GPU's name, driver, clocks and power limit; nothing where there is no GPU."""
    lines = output_of("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else ""


def gpu_name() -> str:
    """Get the first GPU's name as folders of results have it; "cpu" where there is none."""
    name = gpu_state().split(",")[0].strip()
    return name.lower().removeprefix("nvidia ").replace(" ", "-") if name else "cpu"


def describe() -> str:
    """Get a line that names the machine."""
    state = gpu_state()
    if state:
        return f"{GPU_FIELDS} = {state}"
    return f"no GPU, {platform.machine()}, {os.cpu_count()} cores: times mean nothing"


def used_gpu_bytes() -> int | None:
    """Get bytes of the first GPU in use by anyone; None where there is no GPU."""
    lines = output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return int(lines.splitlines()[0]) << 20 if lines else None

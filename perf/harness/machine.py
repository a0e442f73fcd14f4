"""Describe a machine without torch: this creates no CUDA context, and spares seconds of imports."""

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

GPU_FIELDS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"


def output_of(*command: str) -> str:
    """Return a command's output; empty if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def module_of(benchmark: str) -> str:
    """Return the dotted name of a benchmark's module, in whichever folder of `perf` it is.

    Raises:
        ValueError: No folder has it, or several have.
    """
    found = sorted((ROOT / "perf").glob(f"*/{benchmark}.py"))
    if len(found) != 1:
        msg = f"expected one folder of perf with {benchmark}.py, found {len(found)}"
        raise ValueError(msg)
    return f"perf.{found[0].parent.name}.{benchmark}"


def path_of_test(folder: str, name: str) -> str:
    """Return the path of a test file, in whichever folder below a folder of `tests` it is.

    Args:
        folder: Folder relative to the repository's root, such as `tests/kernels`.
        name: Name of the file without `.py`.

    Raises:
        ValueError: No folder has it, or several have.
    """
    found = sorted((ROOT / folder).rglob(f"{name}.py"))
    if len(found) != 1:
        msg = f"expected one folder of {folder} with {name}.py, found {len(found)}"
        raise ValueError(msg)
    return found[0].relative_to(ROOT).as_posix()


def commit_of(root: Path = ROOT) -> str:
    """Return the name of the measured commit: PERF_COMMIT if it is set, else git's description.

    PERF_COMMIT is for copies of the files that are not a git checkout.
    """
    given = os.environ.get("PERF_COMMIT")
    if given:
        return given
    return output_of("git", "-C", str(root), "describe", "--always", "--dirty") or "unknown"


def gpu_state() -> str:
    """Return the first GPU's name, driver, clocks and power limit; empty without a GPU."""
    lines = output_of("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else ""


def gpu_name() -> str:
    """Return the first GPU's name as folders of results use it; "cpu" without a GPU."""
    name = gpu_state().split(",")[0].strip()
    return name.lower().removeprefix("nvidia ").replace(" ", "-") if name else "cpu"


def describe() -> str:
    """Return a line that describes the machine."""
    state = gpu_state()
    if state:
        return f"{GPU_FIELDS} = {state}"
    return f"no GPU, {platform.machine()}, {os.cpu_count()} cores: times mean nothing"


def used_gpu_bytes() -> int | None:
    """Return the bytes of the first GPU that any process uses; None without a GPU."""
    lines = output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return int(lines.splitlines()[0]) << 20 if lines else None

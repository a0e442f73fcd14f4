"""GPUs by name: memory, bandwidth and arithmetic, for plans and for models of a step.

Memory is the amount that the driver reports (`nvidia-smi`, memory.total), not that of the data
sheet. An "80 GB" H100 has 81,559 MiB = 85.5 GB, a "24 GB" L4 23,034 MiB = 24.2 GB. CUDA keeps about
0.6 % of it for itself. Bandwidth and dense FLOP/s are the data sheets' peaks; no kernel reaches
them.

Source: the memory of A10, A100, H100, L4, L40S and T4 is listed in modal-labs/modal-client#2797,
that of B200 in NVIDIA/TensorRT-LLM#10278. For the others it is the output of `nvidia-smi`. All
other numbers are from NVIDIA's data sheets, whose figures with sparsity are halved.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from jenga.spec import ELEMENT_BYTES, check_positive

MIB = 1 << 20

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}

LEAST_BARE_BYTES = 1_000_000
"""Fewest bytes of a GPU's or a host's memory that may be given without a unit."""

_SIZE = re.compile(r"(\d[\d_,]*(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: Name that users give: "H100-80G".
        memory_bytes: Bytes of memory that the driver reports.
        bytes_per_s: Peak bandwidth of its memory. None if only the size of the memory is known.
        flops_16_bit: Dense FLOP/s of bfloat16 (float16 on a T4). None if only the size is known.
        flops_8_bit: Dense FLOP/s of float8. None also for a GPU without float8.
        folders: Folders in `perf/results` with rows measured on it. They have the driver's name of
            the GPU.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float | None = None
    flops_16_bit: float | None = None
    flops_8_bit: float | None = None
    folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive(f"gpu {self.name!r}", "memory_bytes", self.memory_bytes)

    @property
    def has_float8(self) -> bool | None:
        """Whether it multiplies float8. None if only the size of its memory is known."""
        return None if self.flops_16_bit is None else self.flops_8_bit is not None

    def flops(self, dtype: str) -> float:
        """Return the dense FLOP/s of matrix products with operands of a dtype.

        Args:
            dtype: A key of `jenga.spec.ELEMENT_BYTES` with one or two bytes. On a GPU without
                float8, one byte counts as 16 bits, because operands are widened there.

        Raises:
            ValueError: Only the memory of the GPU is known, or the dtype is another one.
        """
        if self.flops_16_bit is None:
            msg = (
                f"gpu must be one of {', '.join(GPUS)} where time is modelled, got {self.name!r}, "
                f"of which only the memory is known"
            )
            raise ValueError(msg)
        match ELEMENT_BYTES.get(dtype):
            case 1:
                return self.flops_8_bit or self.flops_16_bit
            case 2:
                return self.flops_16_bit
            case _:
                msg = f"dtype must be a known one of one or two bytes, got {dtype!r}"
                raise ValueError(msg)


def _gpu(
    name: str,
    *,
    mib: int,
    tb_per_s: float,
    tflops: float,
    tflops_8_bit: float | None = None,
    folders: tuple[str, ...] = (),
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=mib * MIB,
        bytes_per_s=tb_per_s * 1e12,
        flops_16_bit=tflops * 1e12,
        flops_8_bit=None if tflops_8_bit is None else tflops_8_bit * 1e12,
        folders=folders or (name.lower(),),
    )


GPUS = {
    each.name: each
    for each in (
        _gpu("T4", mib=15_360, tb_per_s=0.320, tflops=65, folders=("tesla-t4",)),
        _gpu("A10", mib=23_028, tb_per_s=0.600, tflops=125),
        _gpu("L4", mib=23_034, tb_per_s=0.300, tflops=121, tflops_8_bit=242),
        # Figures of tensor cores that accumulate in float32, as vLLM's kernels do.
        _gpu(
            "RTX-4090",
            mib=24_564,
            tb_per_s=1.008,
            tflops=165.2,
            tflops_8_bit=330.3,
            folders=("geforce-rtx-4090",),
        ),
        _gpu("L40S", mib=46_068, tb_per_s=0.864, tflops=362, tflops_8_bit=733),
        _gpu(
            "A100-40G",
            mib=40_960,
            tb_per_s=1.555,
            tflops=312,
            folders=("a100-sxm4-40gb", "a100-pcie-40gb"),
        ),
        _gpu("A100-80G", mib=81_920, tb_per_s=2.039, tflops=312, folders=("a100-sxm4-80gb",)),
        _gpu(
            "H100-80G",
            mib=81_559,
            tb_per_s=3.35,
            tflops=989.4,
            tflops_8_bit=1978.9,
            folders=("h100-80gb-hbm3",),
        ),
        _gpu("H100-PCIe", mib=81_559, tb_per_s=2.0, tflops=756, tflops_8_bit=1513),
        _gpu("H100-NVL", mib=95_830, tb_per_s=3.9, tflops=835, tflops_8_bit=1671),
        _gpu("H20", mib=97_871, tb_per_s=4.0, tflops=148, tflops_8_bit=296),
        _gpu("H200", mib=143_771, tb_per_s=4.8, tflops=989.4, tflops_8_bit=1978.9),
        # Bandwidth of a bus of 7,680 bits at 3,996 MHz: pytorch/ao#4002.
        _gpu("B200", mib=183_359, tb_per_s=7.672, tflops=2250, tflops_8_bit=4500),
    )
}
"""All GPUs that are known by name, those with the least memory first within a generation."""

_ALIASES = {"a100": "A100-80G", "h100": "H100-80G", "4090": "RTX-4090"}


def parse_bytes(text: str, *, least: int = 1) -> int:
    """Return the bytes that a text such as "24GiB", "24 GB" or "25769803776" stands for.

    Args:
        text: A size as users write it.
        least: Fewest bytes that are accepted.

    Raises:
        ValueError: The text stands for no size, or for fewer bytes than `least`.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        msg = f"size must be a number of bytes, or one with a unit such as 24GiB, got {text!r}"
        raise ValueError(msg)
    # Binary floats would lose bytes of 23.7GiB.
    num_bytes = int(Decimal(match[1].replace("_", "").replace(",", "")) * unit_bytes)
    if num_bytes < least:
        msg = f"size must be at least {least} bytes, got {text!r}"
        raise ValueError(msg)
    return num_bytes


def parse_memory(text: str, *, least: int = 1) -> int:
    """Return the bytes of memory that a text stands for, as `parse_bytes` does.

    A number below a million needs a unit, because it hardly means bytes.

    Args:
        text: Memory of a GPU or a host, as users write it.
        least: Fewest bytes that are accepted.

    Raises:
        ValueError: As in `parse_bytes`, or the unit is missing.
    """
    num_bytes = parse_bytes(text, least=least)
    size = _SIZE.fullmatch(text.strip())
    if size and not size[2] and 0 < num_bytes < LEAST_BARE_BYTES:
        msg = f"size needs a unit, such as {size[1]}GB, {size[1]}GiB or {size[1]}B, got {text!r}"
        raise ValueError(msg)
    return num_bytes


def find_gpu(text: str) -> Gpu:
    """Return the GPU with a name, in any case, or a GPU of which only the memory is known.

    Args:
        text: "H100-80G", "l4", "24GiB", "80 GB".

    Raises:
        ValueError: The text is neither a name nor a size with a unit. The message lists the names.
    """
    wanted = text.strip().lower().removesuffix("b")
    for name, gpu in GPUS.items():
        if wanted == name.lower() or _ALIASES.get(wanted) == name:
            return gpu
    size = _SIZE.fullmatch(text.strip())
    if size and not size[2]:
        msg = f"gpu memory needs a unit, such as {size[1]}GiB or {size[1]}GB, got {text!r}"
        raise ValueError(msg)
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        msg = (
            f"gpu must be one of {', '.join(GPUS)}, or its memory such as 24GiB or 80GB, "
            f"got {text!r}"
        )
        raise ValueError(msg) from error
    return Gpu(name=text.strip(), memory_bytes=num_bytes)

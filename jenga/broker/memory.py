"""The bytes of a shared arena: in a file, or on a GPU in memory that a process of its own holds.

CUDA frees memory when the process that allocated it ends. So the broker starts a holder
(`jenga.broker.holder`), which outlives it. The holder writes a handle of the memory to a file, and
engines open the handle (CUDA IPC).
"""

import json
import mmap
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from jenga.broker.cuda import Gpu
from jenga.broker.processes import Process

CPU = "cpu"
"""The device of an arena in a file."""

UNTRIED = "sharing memory of a GPU is experimental: it has never run on a GPU"
"""Warning of a broker and of engines, if they share memory of a GPU."""

_END_SECONDS = 30.0
"""Most seconds until a holder has ended after its signal."""


class MemoryLostError(RuntimeError):
    """The memory of a shared arena is gone, together with all content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """Bytes on a GPU, which torch takes over without a copy.

    Attributes:
        address: Address of the first byte in this process.
        num_bytes: Number of bytes.
    """

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array for other libraries: int8, one dimension, may be written to."""
        return {
            "shape": (self.num_bytes,),
            "typestr": "|i1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class ArenaMemory(Protocol):
    """The bytes of an arena that is there."""

    @property
    def device(self) -> str:
        """Where they are: `cpu`, or `cuda:N` with the number that the broker gave the GPU."""
        ...

    def check(self) -> None:
        """Raise `MemoryLostError` unless this process may map them, or use what it has mapped."""
        ...

    def map(self, ordinal: int) -> mmap.mmap | DeviceArray:
        """Map them in this process, which may write to them.

        Args:
            ordinal: Number of this process's GPU, as it sees GPUs. Memory of the CPU needs none.

        Raises:
            CudaError: The CUDA driver refuses.
            MemoryLostError: The bytes are gone.
            ValueError: They are on another GPU.
        """
        ...

    def remove(self) -> None:
        """Give them up. No process may use them any more.

        Raises:
            TimeoutError: The process that holds them does not end.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileMemory:
    """The bytes are a file. Processes that have mapped it keep them, whatever happens to the file.

    Attributes:
        path: The file.
    """

    path: Path

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> "FileMemory":
        """Reserve memory, filled with zeros.

        Raises:
            OSError: The memory is not there. No file is left then.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Without memory behind each byte, an engine would be killed when it writes there.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return cls(path)

    @property
    def device(self) -> str:
        """See `ArenaMemory`."""
        return CPU

    def check(self) -> None:
        """See `ArenaMemory`."""

    def map(self, ordinal: int) -> mmap.mmap:  # noqa: ARG002  only GPUs have one
        """See `ArenaMemory`."""
        with self.path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    def remove(self) -> None:
        """See `ArenaMemory`."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The bytes are memory of a GPU. A file describes it.

    Attributes:
        path: The file.
        device: The GPU, as the broker numbered it.
        uuid: UUID of the GPU.
        num_bytes: Number of bytes.
        handle: Handle of the memory, for other processes.
        holder: Process that holds it.
    """

    path: Path
    device: str
    uuid: str
    num_bytes: int
    handle: bytes
    holder: Process

    @classmethod
    def create(cls, path: Path, device: str, num_bytes: int) -> "DeviceMemory":
        """Start a process that reserves memory of a GPU, filled with zeros, and holds it.

        Args:
            path: The file to write, which must not exist.
            device: The GPU, `cuda:N`.
            num_bytes: Number of bytes.

        Raises:
            RuntimeError: The memory cannot be had or shared. No file is left then.
        """
        holder = subprocess.Popen(
            [sys.executable, "-m", "jenga.broker.holder", str(path), device, str(num_bytes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # what ends the broker must not end it
        )
        try:
            with holder.stdout as report:  # pyright: ignore[reportOptionalContextManager]
                said = report.read()  # it closes the pipe when it has the memory
        except BaseException:
            holder.kill()
            holder.wait()
            path.unlink(missing_ok=True)
            raise
        if not path.exists():
            holder.kill()
            holder.wait()
            msg = f"no memory of {device} for a shared arena: {said.strip() or 'no reason'}"
            raise RuntimeError(msg)
        holder.returncode = 0  # it is not waited for
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> "DeviceMemory":
        """Read the file that a holder has written.

        Raises:
            ValueError: The file is not one of a holder.
        """
        try:
            fields = json.loads(path.read_text())
            return cls(
                path=path,
                device=fields["device"],
                uuid=fields["uuid"],
                num_bytes=fields["num_bytes"],
                handle=bytes.fromhex(fields["handle"]),
                holder=Process(**fields["holder"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} does not describe memory of a GPU: {error!r}"
            raise ValueError(msg) from error

    def write(self) -> None:
        """Write the file, whole or not at all."""
        fields = {
            "device": self.device,
            "uuid": self.uuid,
            "num_bytes": self.num_bytes,
            "handle": self.handle.hex(),
            "holder": asdict(self.holder),
        }
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        unfinished.write_text(json.dumps(fields))
        unfinished.rename(self.path)

    def check(self) -> None:
        """See `ArenaMemory`."""
        if not self.holder.is_alive:
            msg = (
                f"the memory of the shared arena in {self.path.parent} is lost: process "
                f"{self.holder.pid}, which held it on {self.device}, has ended; end the engines "
                f"that share it, then use `jenga broker remove` and start again"
            )
            raise MemoryLostError(msg)

    def map(self, ordinal: int) -> DeviceArray:
        """See `ArenaMemory`."""
        self.check()
        return DeviceArray(address=_address(self, ordinal), num_bytes=self.num_bytes)

    def remove(self) -> None:
        """See `ArenaMemory`."""
        try:
            descriptor = os.pidfd_open(self.holder.pid)
        except ProcessLookupError:
            descriptor = None
        if descriptor is not None:
            try:
                if self.holder.is_alive:  # and so the descriptor is of this process
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    if not select.select([descriptor], [], [], _END_SECONDS)[0]:
                        msg = f"process {self.holder.pid}, which holds the arena, does not end"
                        raise TimeoutError(msg)
            finally:
                os.close(descriptor)
        self.path.unlink(missing_ok=True)


@cache
def _address(memory: DeviceMemory, ordinal: int) -> int:
    """Open the handle of memory, once in a process."""
    gpu = Gpu(ordinal)
    if gpu.uuid != memory.uuid:
        msg = (
            f"the shared arena in {memory.path.parent} is on the GPU with UUID {memory.uuid}, but "
            f"this process uses the one with UUID {gpu.uuid}; choose it with CUDA_VISIBLE_DEVICES"
        )
        raise ValueError(msg)
    address = gpu.open(memory.handle)
    first, num_bytes = gpu.allocation(address)
    if first != address or num_bytes < memory.num_bytes:
        msg = (
            f"the handle of the shared arena in {memory.path.parent} must open {memory.num_bytes} "
            f"bytes, but opens {num_bytes - (address - first)}"
        )
        raise ValueError(msg)
    return address

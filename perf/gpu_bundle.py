"""vLLM and the peers unpacked from folders, and the plugin made known beside them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from perf.machine import ROOT

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is imported for sampling otherwise
}
"""What vLLM needs to run from a bundle."""


def unpack(bundle: str, site: Path) -> None:
    """Unpack an offline bundle, unless all its archives were unpacked before.

    Args:
        bundle: Its folders, separated by ":"; they may come one after the other.
        site: Where to.

    Raises:
        ValueError: No folder holds `unpack.sh`.
    """
    folders = [Path(folder) for folder in bundle.split(":")]
    archives = {path.name for folder in folders for path in folder.glob("*.tar.xz*")}
    record = site / "unpacked.txt"
    before = set(record.read_text().split()) if record.exists() else set[str]()
    if record.exists() and archives <= before:
        return
    script = next(
        (path for path in (folder / "unpack.sh" for folder in folders) if path.exists()), None
    )
    if script is None:
        msg = f"--bundle must name a folder that holds unpack.sh, got {bundle}"
        raise ValueError(msg)
    # Its own checks import vLLM again and again, and the stages will tell.
    environment = os.environ | {"PYTHON": sys.executable, "CHECK": "0"}
    subprocess.run(["bash", str(script), bundle, str(site)], check=True, env=environment)
    announce_plugin(site)
    record.write_text("\n".join(sorted(archives | before)))


def announce_plugin(site: Path, root: Path = ROOT) -> None:
    """Write beside an uninstalled package what installing it would: the names vLLM looks for.

    Args:
        site: A folder on the path.
        root: Of the repository.
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

"""The wheel as a release would have it, built from a copy of the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("jenga", "jenga_kernels")
FURTHER_SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder):
    """Build the wheel, and get its path.

    The build sees a copy of the packages and no more: one in the checkout would leave its folders
    there, and a later build would take what lies in them.

    Args:
        folder: For the copy and the wheel.
    """
    sources = folder / "sources"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / package, sources / package, ignore=ignored)
    for name in FURTHER_SOURCES:
        shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, *build, "--wheel-dir", folder / "dist", sources], check=True)
    (wheel,) = Path(folder / "dist").glob("*.whl")
    return wheel

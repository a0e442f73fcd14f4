"""Build the wheel, install it where nothing of the checkout is seen, and test it there.

    python -m tests.installation.installed_wheel [ARGUMENT...]

The environment is new, and gets the wheel alone. Packages that it needs are those of the Python
that runs this, which are put behind it on the path, so that nothing is downloaded. Tests run in a
copy of their folder without the packages beside it. Arguments are pytest's; tests that they name
run in the place of the usual ones.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from tests.installation.wheel import ROOT, build_wheel

CHECKS = "tests/installation/installed_checks.py"

SELECTION = (
    CHECKS,
    "tests/test_cli.py",
    "tests/manager/test_manager.py",
    "tests/models/test_known.py",
    "tests/sim/report/test_report.py",
    "tests/kernels/attention/test_kv_store.py",
    "tests/vllm_plugin/scheduler/test_cache_manager.py",
    "-k=not compiles_to",
)
"""Something of every part that is installed: two minutes of a processor's time."""


def make_environment(folder, wheel):
    """Make an environment with a wheel, and get its Python.

    Args:
        folder: For the environment.
        wheel: What is installed in it.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # By then it has no other packages, so that pip takes none of these for an earlier version.
    install = ["--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, *install], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True)
    shared = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    # Lines of it are put behind the environment's own packages; .pth files there are not read, so
    # that the checkout, installed as editable, stays unknown.
    lines = "".join(f"{path}\n" for path in shared)
    (Path(asked.stdout.strip()) / "shared.pth").write_text(lines, encoding="utf-8")
    return python


def run_tests(folder, python, selection):
    """Run tests in a copy of their folder; get the exit code of pytest."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("tests", "perf", "docs"):  # which some tests read
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = os.pathsep.join([str(python.parent), environ.get("PATH", "")])
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *selection]
    return subprocess.run(command, cwd=folder, env=environ, check=False).returncode


def main(arguments):
    """Build, install and test; get the exit code."""
    with tempfile.TemporaryDirectory(prefix="jenga-wheel-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        sys.stdout.write(f"built {wheel.name}, {wheel.stat().st_size:,} bytes\n")
        sys.stdout.flush()
        python = make_environment(folder / "environment", wheel)
        (folder / "beside").mkdir()
        names = [each for each in arguments if not each.startswith("-")]
        selection = [CHECKS] if names else SELECTION
        return run_tests(folder / "beside", python, [*selection, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

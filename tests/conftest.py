"""Choose what kernels run on before any is imported: a GPU, Triton's interpreter, an emulated GPU.

`EMULATED_GPU=90` runs what Triton compiles for that compute capability in `perf.emulator`. With
`ONLY_REFERENCES=1` no kernel runs, and PyTorch references serve on the CPU.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import processor

# A busy machine takes long for an example: the limit of a test in pyproject.toml is the only one.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

HAS_GPU = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0"))
EMULATED_GPU = os.environ.get("EMULATED_GPU")
ONLY_REFERENCES = os.environ.get("ONLY_REFERENCES") == "1"

if EMULATED_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
    # Tests put their tensors on a GPU where they see one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from triton.runtime import driver

    from perf.emulator.driver import EmulatedGpu

    driver.set_active(EmulatedGpu(int(EMULATED_GPU)))
elif ONLY_REFERENCES:
    os.environ.pop("TRITON_INTERPRET", None)
elif not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    # The interpreter's products are to be the same on every processor, in child processes too.
    folder = str(Path(__file__).parent / "interpreter")
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
    sys.path.insert(0, folder)
    import_module("interpreter_hook")

ENVIRONMENT = dict(os.environ)
"""Variables as the tests begin. vLLM sets further ones when a test imports it."""


def pytest_report_header():
    """Say what the results of this run may depend on."""
    return processor.report()


class _EndAtFilesThatCannotBeImported:
    """Ends a run with several workers before its first test. pytest-xdist would go on for long."""

    def pytest_collectreport(self, report):
        if report.failed:
            pytest.exit(f"{report.nodeid} cannot be collected:\n{report.longrepr}", returncode=2)


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    if config.getoption("dist", "no") != "no" and not is_worker:
        config.pluginmanager.register(_EndAtFilesThatCannotBeImported())

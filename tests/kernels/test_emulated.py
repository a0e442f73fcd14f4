"""Kernels as Triton compiles them, in an emulated GPU."""

from pathlib import Path

import pytest

from perf.gpu.sanitize import small_tests
from tests.emulation import ROOT, only_where_interpreted, run_emulated

pytestmark = only_where_interpreted

FOLDER = Path(__file__).parent
WITHOUT_LAUNCHES = {
    "test_compiled_attention.py",
    "test_compiled_latents.py",
    "test_crossed.py",
    "test_interpreter.py",
    Path(__file__).name,
}
PATHS = {path.name: str(path.relative_to(ROOT)) for path in FOLDER.rglob("test_*.py")}
RUNS = [
    (capability, name)
    for capability in (90, 80)
    for name in sorted(PATHS)
    if name not in WITHOUT_LAUNCHES
    # Kernels whose warps specialise are for Hopper.
    if capability == 90 or not name.startswith("test_specialized")
]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))]
)
def test_operations_give_as_compiled_for_hopper_what_their_references_give(part):
    run_emulated(90, *small_tests()[part::3])


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), RUNS)
def test_every_test_of_a_kernel_passes_on_what_is_compiled(capability, name):
    run_emulated(capability, PATHS[name], "-k", "not compile")

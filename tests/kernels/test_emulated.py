"""Kernels as Triton compiles them, in an emulated GPU."""

import pytest

from perf.sanitize import small_tests
from tests.emulation import only_where_interpreted, run_emulated

pytestmark = only_where_interpreted


def test_operations_give_as_compiled_for_hopper_what_their_references_give():
    run_emulated(90, *small_tests())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [90, 80])
def test_every_test_of_a_kernel_passes_on_what_is_compiled(capability):
    run_emulated(capability, "tests/kernels", "-k", "not compile and not emulated")

"""Machines that tests of `jenga doctor` begin with."""

import pytest

from tests.doctor.machines import H100, FakedMachine, make_python


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    return make_python(tmp_path_factory.mktemp("python"))


@pytest.fixture
def machine(tmp_path, bare_python):
    return FakedMachine(tmp_path, bare_python)


@pytest.fixture
def server(machine):
    """A machine that serves."""
    machine.has_everything()
    machine.has_gpus(H100)
    machine.variables["VLLM_ATTENTION_BACKEND"] = "JENGA_TRITON"
    return machine

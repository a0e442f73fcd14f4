"""The extra for CPUs is what vLLM's CPU build asks for, and what is installed."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version

import pytest
from packaging.requirements import Requirement

from tests.installation.cpu_requirements import (
    BEGIN,
    DISTRIBUTION,
    END,
    LEFT_OUT,
    OWN,
    PYPROJECT,
    cpu_requirements,
    with_extra,
)

EXTRA = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["cpu"]


@pytest.fixture
def required():
    """`Requires-Dist` of the installed build."""
    try:
        return requires(DISTRIBUTION)
    except PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed: a GPU's environment has vLLM's CUDA build")


def test_the_extra_is_what_the_script_makes_of_the_builds_metadata(required):
    text = PYPROJECT.read_text(encoding="utf-8")

    assert with_extra(text, cpu_requirements(required)) == text
    assert cpu_requirements(required) == EXTRA


def test_the_build_installed_is_the_one_that_the_makefile_names(required):
    makefile = (PYPROJECT.parent / "Makefile").read_text(encoding="utf-8")

    assert required
    assert f"VLLM_VERSION := {version(DISTRIBUTION)}\n" in makefile


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize("text", EXTRA)
def test_what_is_installed_is_what_the_extra_asks_for(text):
    requirement = Requirement(text)

    if requirement.marker is None or requirement.marker.evaluate():
        assert version(requirement.name) in requirement.specifier


def test_requirements_of_the_builds_own_extras_and_those_without_a_wheel_are_left_out():
    made = cpu_requirements(
        [
            "torch==2.13.0+cpu; platform_machine == 'x86_64'",
            "torchvision",
            "zentorch==2.13.0.1; extra == 'zen'",
            "einops",
            "B_b[two,one]<2,>=1,!=1.5",
            "a; python_version > '3.11'",
            "b-a",
            "b-a",
        ]
    )

    assert made == [*OWN, "a; python_version > '3.11'", "b-a", "B_b[one,two]>=1,!=1.5,<2"]
    assert set(LEFT_OUT) == {"torch", "torchaudio", "torchcodec", "torchvision"}


@pytest.mark.parametrize("text", ["", BEGIN, f"  {END}\n  {BEGIN}\n"])
def test_a_file_without_its_marks_is_refused(text):
    with pytest.raises(ValueError, match="must have"):
        with_extra(text, ["a"])

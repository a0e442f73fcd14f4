"""A release would bring all that the packages need, and nothing else."""

import configparser
import tomllib
import zipfile
from email.parser import Parser

import pytest

from tests.installation.wheel import PACKAGES, ROOT, build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
METADATA = f"jenga_kv-{PROJECT['version']}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    return Parser().parsestr(wheel.read(f"{METADATA}/METADATA").decode())


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel):
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    names = {name for name in wheel.namelist() if not name.startswith(f"{METADATA}/")}

    assert names == files
    assert {"jenga/py.typed", "jenga_kernels/py.typed", "jenga/sim/assets/report.js"} <= names
    assert "jenga/models/data/gemma-3-27b.json" in names
    assert "jenga/sim/assets/measured_shares.json" in names


def test_the_wheel_is_for_every_machine_and_has_the_licence(wheel):
    assert f"jenga_kv-{PROJECT['version']}-py3-none-any.whl" == wheel.filename.rpartition("/")[2]
    assert f"{METADATA}/licenses/LICENSE" in wheel.namelist()


def test_what_is_installed_by_name_is_what_pyproject_lists(metadata):
    extras = PROJECT["optional-dependencies"]

    assert metadata["Name"] == "jenga-kv"
    assert metadata["Version"] == PROJECT["version"]
    assert set(metadata.get_all("Provides-Extra")) == set(extras)
    required = metadata.get_all("Requires-Dist")
    assert len(required) == sum(map(len, extras.values()))
    # The manager, planner and simulator need nothing.
    assert all("extra ==" in each for each in required)


def test_the_extra_for_a_gpu_brings_a_vllm_that_is_served(metadata):
    from packaging.requirements import Requirement

    from jenga.vllm_plugin.patches.patch import SUPPORTED_VERSIONS

    (vllm,) = [
        requirement
        for requirement in map(Requirement, metadata.get_all("Requires-Dist"))
        if requirement.name == "vllm" and requirement.marker.evaluate({"extra": "vllm"})
    ]
    for series in SUPPORTED_VERSIONS:
        assert f"{series}.0" in vllm.specifier
        assert f"{series}.7" in vllm.specifier
    assert "0.31.9" not in vllm.specifier
    assert "0.34.0" not in vllm.specifier


def test_vllm_and_the_shell_find_what_they_call(wheel):
    points = configparser.ConfigParser()
    points.read_string(wheel.read(f"{METADATA}/entry_points.txt").decode())

    assert points["vllm.general_plugins"]["jenga"] == "jenga.vllm_plugin:register"
    assert points["console_scripts"]["jenga"] == "jenga.cli:main"

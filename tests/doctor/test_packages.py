"""Versions of packages, and their import, as `jenga doctor` judges them."""

import sys
import tomllib
from importlib.util import find_spec

import pytest

from tests.doctor.machines import FINE, H100, NOTE, REFUSED, ROOT, refused


def test_without_any_package_that_is_said_and_nothing_else_is_printed(machine):
    code, output, errors = machine.doctor()

    assert (code, errors) == (1, "")
    for name in ("vllm", "torch", "triton"):
        assert f"REFUSED  {name}" in output
    assert "pip install 'jenga-kv[vllm]'" in output
    assert "jenga-kv (not installed)" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.31.2", REFUSED),
        ("0.32.1", FINE),
        ("0.33.0+cu129", FINE),
        ("0.34.0", REFUSED),
        ("1.0.0", REFUSED),
        ("nightly", REFUSED),
    ],
)
def test_another_vllm_is_refused_by_its_version(server, version, status):
    server.has_vllm(version)

    code, findings = server.findings("--quick")

    assert findings["vllm"]["found"] == version
    assert findings["vllm"]["status"] == status
    assert code == (status == REFUSED)
    if status == REFUSED:
        assert findings["vllm"]["advice"] == "expected 0.32.* or 0.33.*"


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.10.0", REFUSED),
        ("torch", "2.11.0", FINE),
        ("triton", "3.5.1", REFUSED),
        ("triton", "3.7.9", FINE),
        ("triton", "3.10.0", NOTE),
        ("torch", "2.14.0", NOTE),
    ],
)
def test_packages_are_served_from_a_least_version_on(server, package, version, status):
    getattr(server, f"has_{package}")(version)

    _, findings = server.findings("--quick")

    assert findings[package]["status"] == status


def test_a_package_that_does_not_tell_its_version_is_a_note(server):
    server.has_module("triton/__init__.py", "from triton.elsewhere import __version__\n")

    code, findings = server.findings("--quick")

    assert code == 0
    assert findings["triton"]["status"] == NOTE
    assert findings["triton"]["advice"] == "expected 3.6 or newer"


def test_amds_build_of_torch_is_refused(server):
    server.has_torch(cuda=None, hip="6.4")

    code, findings = server.findings("--quick")

    assert code == 1
    assert findings["torch"]["status"] == REFUSED
    assert findings["torch"]["found"] == "2.13.0, for HIP 6.4"


def test_greatest_tested_versions_are_those_of_the_environment():
    from jenga.doctor.versions import TESTED_VERSIONS
    from tests.installation.cpu_requirements import OWN

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    major, minor = TESTED_VERSIONS["torch"]
    assert f"TORCH_VERSION := {major}.{minor}." in makefile
    major, minor = TESTED_VERSIONS["triton"]
    assert OWN[0].startswith(f"triton=={major}.{minor}.")


def test_least_versions_are_those_of_the_packages_metadata():
    from jenga.doctor.versions import DISTRIBUTION, LEAST_VERSIONS, PYTHONS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [f"{name}>={major}.{minor}" for name, (major, minor) in LEAST_VERSIONS.items()]
    least, greatest = (".".join(map(str, each)) for each in PYTHONS)

    assert project["name"] == DISTRIBUTION
    assert project["optional-dependencies"]["kernels"] == extra
    assert project["requires-python"] == f">={least},<3.{PYTHONS[1][1] + 1}"
    assert greatest == f"3.{PYTHONS[1][1]}"


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10, 9), REFUSED), ((3, 11, 0), FINE), ((3, 14, 7), FINE), ((3, 15, 0), REFUSED)],
)
def test_pythons_are_served_from_a_least_to_a_greatest_release(version, status):
    from jenga.doctor.versions import python_finding

    assert python_finding(version).status.value == status


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise OSError('libcudart.so.13: not found')", "OSError: libcudart.so.13: not found"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", "ended with status -11"),
    ],
    ids=["error", "exit", "signal"],
)
def test_packages_that_cannot_be_imported_are_refused_in_their_own_words(server, source, words):
    server.has_vllm(source=source)
    server.has_module("triton/__init__.py", f"__version__ = '3.6.0'\n{source}")

    code, findings = server.findings()

    assert code == 1
    assert words in findings["import"]["advice"]
    assert words in findings["names"]["found"]


def test_an_import_that_takes_for_ever_is_given_up():
    from jenga.doctor.processes import Running

    script = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    with Running([sys.executable, "-c", script]) as running:
        ended = running.wait(0.5)

    assert ended.exit_code is None
    assert ended.reason.startswith("no answer within")


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_names_that_are_otherwise_are_told_in_a_sentence_each():
    from jenga.vllm_plugin.patches.patch import Replacement
    from jenga.vllm_plugin.without_engine.self_check import compared

    def named(module, name, *parameters):
        return Replacement(
            module=module, name=name, reason="", parameters=parameters, make=lambda f: f
        )

    answer = compared(
        [
            named("shutil", "which", "cmd", "mode", "path"),
            named("shutil", "which", "cmd"),
            named("shutil", "whither"),
            named("nowhere_at_all", "which"),
        ]
    )

    assert answer["num_names"] == 4
    assert len(answer["mismatches"]) == 3
    assert "shutil.which takes ('cmd', 'mode', 'path')" in answer["mismatches"][0]


def test_without_packages_a_gpu_needs_no_interpreter(machine):
    machine.has_jenga()
    machine.has_gpus(H100)

    _, findings = machine.findings()

    assert refused(findings) == ["torch", "triton", "vllm"]

"""The image is vLLM's with this package in it; nothing here builds one."""

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.installation.wheel import FURTHER_SOURCES, PACKAGES, ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"


def lines_of(path):
    return [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def test_the_image_is_that_of_the_vllm_that_tests_run_on():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^VLLM_VERSION := (.+)$", makefile, re.MULTILINE)

    assert f"ARG VLLM_VERSION={version}" in lines_of(DOCKERFILE)
    assert "FROM vllm/vllm-openai:v${VLLM_VERSION}" in lines_of(DOCKERFILE)


def test_the_wheel_is_built_of_what_the_tests_build_it_of():
    copied = [line.split()[1:-1] for line in lines_of(DOCKERFILE) if line.startswith("COPY")]

    assert {name for names in copied for name in names} == {*FURTHER_SOURCES, *PACKAGES}


def test_all_that_is_copied_reaches_the_build():
    ignored = lines_of(DOCKERFILE.with_name("Dockerfile.dockerignore"))

    for name in (*FURTHER_SOURCES, *PACKAGES, "perf", ".venv", "tests"):
        (last, *_) = [line for line in reversed(ignored) if fnmatch(name, line.lstrip("!"))]
        assert last.startswith("!") is (name in {*FURTHER_SOURCES, *PACKAGES})


def test_the_image_changes_nothing_of_vllms_packages():
    text = DOCKERFILE.read_text(encoding="utf-8")

    (install,) = re.findall(r"uv pip install [^&]+", text)
    assert {"--no-deps", "--no-index"} <= set(install.split())
    assert "ENTRYPOINT" not in "".join(lines_of(DOCKERFILE))
    assert "ENV VLLM_ATTENTION_BACKEND=JENGA_TRITON" in lines_of(DOCKERFILE)


def test_the_linter_finds_nothing():
    beside = Path(sys.executable).with_name("hadolint")
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed; `make env` brings it, and `make lint` runs it")

    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")

"""Checks of the wheel where it is installed; `installed_wheel` runs them, `make test` does not."""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

import jenga
import jenga_kernels

PREFIX = Path(sys.prefix).resolve()


@pytest.mark.parametrize("package", [jenga, jenga_kernels], ids=lambda package: package.__name__)
def test_the_packages_are_the_installed_ones(package):
    (folder,) = package.__path__

    assert Path(folder).resolve().is_relative_to(PREFIX)
    assert (Path(folder) / "py.typed").is_file()
    assert not list(Path.cwd().glob("jenga*"))


def test_the_distribution_is_the_wheel_and_not_a_checkout():
    found = distribution("jenga-kv")

    assert Path(str(found.locate_file(""))).resolve().is_relative_to(PREFIX)
    assert "tests" not in {Path(str(file)).parts[0] for file in found.files}


def test_the_command_is_there_and_knows_every_model():
    script = PREFIX / "bin" / "jenga"

    for arguments in (["--version"], ["plan", "--list"], ["plan", "gemma-3-27b", "--without-vllm"]):
        done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_modelled_seconds_are_those_of_a_checkout():
    replay = [PREFIX / "bin" / "jenga", "replay", "--model=gemma-3-27b", "--gpu=H200", "--quiet"]
    replay.append("--trace=articles:n=2,questions=2,tokens=3000,output=8")

    # `perf` lies beside the tests, and not beside the installed package.
    outputs = [
        subprocess.run([*replay, *rows], capture_output=True, text=True, check=True).stdout
        for rows in ([], ["--measured=perf/results"])
    ]

    assert outputs[0] == outputs[1]
    assert "a roofline of H200 at shares of its peaks: products 78%" in outputs[0]


def test_vllm_loads_the_plugin_by_its_entry_point():
    pytest.importorskip("vllm")
    (point,) = entry_points(group="vllm.general_plugins", name="jenga")
    script = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "print(AttentionBackendEnum['JENGA_TRITON'].get_path())"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert point.load().__module__ == "jenga.vllm_plugin"
    assert done.stdout.splitlines()[-1].startswith("jenga.vllm_plugin.layers.attention.backend.")


def test_the_command_serves_the_model_of_the_demo():
    left_out = ("JENGA_MEMORY_LOG", "TRITON_INTERPRET")  # which the tests set and a user does not
    demo = ["demo", "--json", "--without-documents", "--max-tokens=6", "--prompt=Water boils at"]

    done = subprocess.run(
        [PREFIX / "bin" / "jenga", *demo],
        env={name: value for name, value in os.environ.items() if name not in left_out},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    [completion] = json.loads(done.stdout)["completions"]
    assert completion["text"].strip().startswith("100 degrees Celsius")

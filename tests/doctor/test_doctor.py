"""`jenga doctor` as a whole, on a machine that is made up and on this one."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.doctor.machines import FINE, NOTE, OLD_DRIVER, REFUSED, ROOT, keep, llama_folder, refused


def test_a_machine_with_all_that_is_served_has_nothing_refused(server):
    code, findings = server.findings("--quick")

    assert code == 0
    assert {each["status"] for each in findings.values()} == {FINE}
    assert findings["GPU 0"]["found"] == (
        "NVIDIA H100 80GB HBM3, 81,559 MiB, compute capability 9.0"
    )
    assert findings["torch"]["found"] == "2.13.0, for CUDA 12.9"
    assert findings["selected"]["found"] == "by VLLM_ATTENTION_BACKEND=JENGA_TRITON"


SHAPE = {
    "schema": "int",
    "version": "str",
    "serves": "bool",
    "is_fit_decided": "bool",
    "findings": [
        {"section": "str", "subject": "str", "status": "str", "found": "str", "advice": "str"}
    ],
    "machine": {
        "system": "str",
        "gpus": [
            {
                "index": "int",
                "name": "str",
                "memory_bytes": "int",
                "driver": "str",
                "capability": "int",
            }
        ],
        "trouble": "str",
        "driver": "str",
    },
    "packages": {
        "vllm": {"version": "str", "cuda": "NoneType", "hip": "NoneType"},
        "torch": {"version": "str", "cuda": "str", "hip": "NoneType"},
        "triton": {"version": "str", "cuda": "NoneType", "hip": "NoneType"},
    },
    "settings": {"JENGA_CACHE": "str"},
    "trials": {
        "NVIDIA H100 80GB HBM3": [
            {
                "operation": "str",
                "is_passed": "bool",
                "is_final": "bool",
                "reason": "str",
                "file": "str",
            }
        ]
    },
    "model": "NoneType",
}


def shape_of(value):
    """Get the names of fields and types of a JSON value; of a list those of its first item."""
    if isinstance(value, dict):
        return {name: shape_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value[:1]]
    return type(value).__name__


def test_the_json_has_the_form_that_its_number_names(server, monkeypatch):
    from jenga.doctor.report import SCHEMA

    keep(server, monkeypatch, "a")

    _, output, _ = server.doctor("--quick", "--json")

    report = json.loads(output)
    assert (report["schema"], SCHEMA) == (1, 1)  # another form is another number
    assert shape_of(report) == SHAPE
    assert {each["status"] for each in report["findings"]} <= {FINE, NOTE, REFUSED}
    sections = ("machine", "packages", "plugin", "trials", "model")
    assert {each["section"] for each in report["findings"]} <= set(sections)


def test_a_look_that_fails_is_a_finding():
    from jenga.doctor.findings import Section, Status, looked_at

    (finding,) = looked_at(Section.TRIALS, "trials", lambda: [1 / 0])

    assert finding.status is Status.NOTE
    assert finding.found == "could not be examined: division by zero"


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_this_machines_vllm_has_every_name_that_is_replaced(tmp_path):
    folder = llama_folder(tmp_path / "small")
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JENGA_", "VLLM_"))
    }

    done = subprocess.run(
        [sys.executable, "-m", "jenga", "doctor", "--json", str(folder)],
        env=environ | {"JENGA_CACHE": str(tmp_path), "VLLM_ATTENTION_BACKEND": "JENGA_TRITON"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr == ""
    report = json.loads(done.stdout)
    findings = {each["subject"]: each for each in report["findings"]}
    assert refused(findings) == []
    assert done.returncode == 0
    assert findings["names"]["found"].startswith("all ")
    assert findings["classes"]["found"] == "vLLM's own classes declare the same layers"


def test_the_page_of_installation_says_what_the_command_prints_and_names_targets_that_exist():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for name in (*SHAPE, *SHAPE["findings"][0], *SHAPE["machine"]["gpus"][0], FINE, NOTE, REFUSED):
        assert f"`{name}`" in page
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", page)) <= targets


def test_the_page_of_installation_shows_a_screen_as_it_is_printed(server, monkeypatch):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    server.has_gpus(OLD_DRIVER)
    server.variables |= {"JENGA_LEFT_SHARE": "2"}
    keep(server, monkeypatch, "a")
    keep(server, monkeypatch, "b", operation="paged_attention", is_passed=False, reason="off by 3")

    code, output, _ = server.doctor("--quick")

    assert code == 1
    shown = output.replace(f"{platform.system()} {platform.machine()}", "Linux x86_64", 1)
    assert steady(shown) in steady(page)


def steady(text):
    """Leave out line breaks, and lines with paths of a machine."""
    text = re.sub(r"  ok +(python|JENGA_CACHE) .*?(?=\n  \S|\n\n)", "", text, flags=re.DOTALL)
    text = re.sub(r"once\s+\S+\s+is\s+removed", "", text)
    return " ".join(text.split())

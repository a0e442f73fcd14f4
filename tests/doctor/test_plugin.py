"""How the plugin is installed and set, and trials of kernels, as `jenga doctor` judges them."""

import json

import pytest

from tests.doctor.machines import A100, FINE, NOTE, REFUSED, keep, refused


def test_a_plugin_that_vllm_is_told_to_leave_out_is_refused(server):
    for allowed, expected in (("", 1), ("other", 1), ("other,jenga", 0)):
        server.variables["VLLM_PLUGINS"] = allowed

        code, findings = server.findings("--quick")

        assert code == expected
        assert refused(findings) == ["registered"] * expected


def test_a_package_on_the_path_that_is_not_installed_is_refused(server):
    for file in server.folder.glob("packages/jenga_kv-*/*"):
        file.unlink()
    for folder in server.folder.glob("packages/jenga_kv-*"):
        folder.rmdir()

    code, findings = server.findings("--quick")

    assert (code, refused(findings)) == (1, ["registered"])
    assert "jenga-kv is not installed" in findings["registered"]["found"]


def test_each_odd_setting_is_named_beside_those_that_are_fine(server):
    server.variables |= {
        "JENGA_GEOMETRY": "lcm",
        "JENGA_GEOMETERY": "lcm",
        "JENGA_LEFT_SHARE": "2",
        "JENGA_HISTORY_TOKENS": " ",
    }

    code, findings = server.findings("--quick")

    assert code == 1
    assert refused(findings) == ["JENGA_GEOMETERY", "JENGA_LEFT_SHARE"]
    assert findings["JENGA_GEOMETRY"]["found"] == "lcm"
    assert "unknown environment variable" in findings["JENGA_GEOMETERY"]["advice"]
    assert "JENGA_HISTORY_TOKENS" not in findings


@pytest.mark.parametrize(
    ("value", "status"),
    [("", NOTE), ("FLASH_ATTN", NOTE), ("JENGA_TRITN", REFUSED), (" jenga_triton", FINE)],
)
def test_the_backend_that_the_environment_selects_is_told(server, value, status):
    server.variables["VLLM_ATTENTION_BACKEND"] = value

    _, findings = server.findings("--quick")

    assert findings["selected"]["status"] == status


def test_the_interpreter_on_a_gpu_is_a_note(server):
    server.variables["TRITON_INTERPRET"] = "1"

    code, findings = server.findings("--quick")

    assert code == 0
    assert findings["TRITON_INTERPRET"]["status"] == NOTE


def test_kernels_that_passed_their_trials_and_one_that_did_not_are_told(server, monkeypatch):
    keep(server, monkeypatch, "a")
    keep(server, monkeypatch, "b")
    failed = {"operation": "paged_attention", "is_passed": False, "reason": "off by 3"}
    folder = keep(server, monkeypatch, "c", **failed)
    (folder / "d.json").write_text("{")
    (folder / "e.json").write_text("[]")

    code, findings = server.findings("--quick")

    assert code == 0
    assert findings["state_scan"]["found"] == "passed, 2 calls"
    assert findings["state_scan"]["status"] == FINE
    assert findings["paged_attention"]["status"] == NOTE
    assert findings["paged_attention"]["found"] == "not passed, 1 of 1 call: off by 3"
    assert str(folder / "c.json") in findings["paged_attention"]["advice"]


@pytest.mark.parametrize(
    "other", [{"gpu": "NVIDIA H200"}, {"triton": "3.7.0"}], ids=["gpu", "triton"]
)
def test_trials_on_another_gpu_or_triton_do_not_count(server, monkeypatch, other):
    keep(server, monkeypatch, "a", **other)

    _, findings = server.findings("--quick")

    assert "state_scan" not in findings
    assert "none tried on NVIDIA H100 80GB HBM3 yet" in json.dumps(findings)


def test_a_gpu_without_kernels_of_its_own_has_no_trials(server, monkeypatch):
    server.has_gpus(A100.format(0))
    keep(server, monkeypatch, "a", gpu="NVIDIA A100-SXM4-80GB")

    _, findings = server.findings("--quick")

    assert "state_scan" not in findings
    assert findings["kernels for one kind of GPU"]["status"] == FINE

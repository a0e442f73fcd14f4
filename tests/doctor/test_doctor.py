"""`jenga doctor` on machines that are made up, and on this one."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from jenga.vllm_plugin import kept_trials
from tests.doctor.machines import (
    A100,
    H100,
    OLD_DRIVER,
    ROOT,
    T4,
    FakedMachine,
    llama_folder,
    make_python,
)

FINE, NOTE, REFUSED = "fine", "note", "refused"


@pytest.fixture(scope="module")
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


def refused(findings):
    return sorted(subject for subject, each in findings.items() if each["status"] == REFUSED)


def test_a_machine_with_all_that_is_served_has_nothing_refused(server):
    code, findings = server.findings("--quick")

    assert code == 0
    assert {each["status"] for each in findings.values()} == {FINE}
    assert findings["GPU 0"]["found"] == (
        "NVIDIA H100 80GB HBM3, 81,559 MiB, compute capability 9.0"
    )
    assert findings["torch"]["found"] == "2.13.0, for CUDA 12.9"
    assert findings["selected"]["found"] == "by VLLM_ATTENTION_BACKEND=JENGA_TRITON"


def test_without_any_package_that_is_said_and_nothing_else_is_printed(machine):
    code, output, errors = machine.doctor()

    assert (code, errors) == (1, "")
    for name in ("vllm", "torch", "triton"):
        assert f"REFUSED  {name}" in output
    assert "pip install 'jenga-kv[vllm]'" in output
    assert "jenga-kv (not installed)" in output
    assert "Traceback" not in output


def test_without_a_gpu_a_cpu_build_serves_in_the_interpreter_alone(machine):
    machine.has_everything()
    machine.has_torch("2.13.0+cpu", cuda=None)

    code, findings = machine.findings("--quick")
    assert (code, refused(findings)) == (1, ["TRITON_INTERPRET"])

    machine.variables["TRITON_INTERPRET"] = "1"
    code, findings = machine.findings("--quick")
    assert (code, refused(findings)) == (0, [])
    assert findings["GPU"]["status"] == NOTE


def test_without_a_gpu_a_cuda_build_is_refused(machine):
    machine.has_everything()

    code, findings = machine.findings("--quick")

    assert code == 1
    assert "GPU" in refused(findings)
    assert "CUDA 12.9: vLLM finds no device" in findings["GPU"]["advice"]


def test_a_driver_older_than_torchs_cuda_needs_is_refused_by_both_numbers(server):
    server.has_gpus(OLD_DRIVER)

    code, findings = server.findings("--quick")

    assert (code, refused(findings)) == (1, ["driver"])
    assert findings["driver"]["found"] == "470.82.01"
    assert findings["driver"]["advice"] == (
        "torch is built for CUDA 12.9, which needs driver 525 or newer"
    )


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
        ("triton", "3.10.0", FINE),
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
    ("line", "words"),
    [(T4, "no older GPU"), (A100.format(0), "no test of the kernels has run on such a GPU")],
    ids=["turing", "ampere"],
)
def test_a_gpu_that_no_test_ran_on_is_a_note(server, line, words):
    server.has_gpus(line)

    code, findings = server.findings("--quick")

    assert code == 0
    assert findings["GPU 0"]["status"] == NOTE
    assert words in findings["GPU 0"]["advice"]


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ("echo 'couldn not communicate with the driver'; exit 9", "communicate with the driver"),
        ("exit 12", "ended with status 12"),
        ("printf 'no,table\\n'", "expected index, name"),
        ("printf '0, \\377\\376, many, 580.1, x\\n'", ""),
        ("kill -9 $$", "ended with status -9"),
    ],
    ids=["no_driver", "silent", "no_table", "odd_table", "killed"],
)
def test_a_driver_that_does_not_answer_is_told_and_no_traceback(server, commands, words):
    server.has_program("nvidia-smi", commands)

    code, output, errors = server.doctor("--quick")

    assert errors == ""
    assert code in {0, 1}
    assert words in " ".join(output.split())
    assert "Traceback" not in output


def test_a_driver_that_knows_no_compute_capability_is_asked_without(server):
    server.has_program(
        "nvidia-smi",
        'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field\'; exit 2;; '
        "esac; echo '0, Tesla V100, 16160, 450.80.02'",
    )

    _, findings = server.findings("--quick")

    assert findings["GPU 0"]["found"] == "Tesla V100, 16,160 MiB"
    assert findings["GPU 0"]["status"] == NOTE


def test_a_machine_without_a_gpu_may_have_the_drivers_program(machine):
    machine.has_everything()
    machine.has_torch("2.13.0+cpu", cuda=None)
    machine.has_program("nvidia-smi", "echo No devices were found; exit 6")

    _, findings = machine.findings("--quick")

    assert findings["GPU"]["found"] == "none of NVIDIA's"


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


def keep(machine, monkeypatch, key, *, gpu="NVIDIA H100 80GB HBM3", triton="3.6.0", **verdict):
    """Keep a verdict as an engine on that machine would."""
    monkeypatch.setenv("JENGA_CACHE", str(machine.cache))
    folder = kept_trials.trials_folder(gpu, triton)
    folder.mkdir(parents=True, exist_ok=True)
    said = {"operation": "state_scan", "is_passed": True, "is_final": True, "reason": ""}
    (folder / f"{key}.json").write_text(json.dumps({"verdict": said | verdict, "start": "x"}))
    return folder


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


def test_torch_that_sees_no_gpu_is_refused_in_its_own_words(server):
    words = "CUDA initialization: the driver is too old"
    server.has_torch(gpus=0, warning=words)

    code, findings = server.findings()

    assert code == 1
    assert findings["torch sees"] == {
        "section": "machine",
        "subject": "torch sees",
        "status": REFUSED,
        "found": "no GPU",
        "advice": words,
    }


def test_gpus_that_are_hidden_are_counted(server):
    server.has_gpus(H100, H100.replace("0,", "1,", 1))
    server.variables["CUDA_VISIBLE_DEVICES"] = "1"

    _, findings = server.findings()

    assert findings["torch sees"]["status"] == NOTE
    assert findings["torch sees"]["found"] == "1 of 2 GPUs, with CUDA_VISIBLE_DEVICES='1'"


def test_an_old_driver_with_libraries_that_stand_in_for_it_is_a_note(server):
    server.has_gpus(OLD_DRIVER)

    _, findings = server.findings()

    assert findings["driver"]["status"] == NOTE


def test_a_torch_for_cpus_beside_a_gpu_is_a_note(server):
    server.has_torch("2.13.0+cpu", cuda=None)

    _, findings = server.findings("--quick")

    assert findings["torch sees"]["advice"] == "this torch is built for CPUs"


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


def test_a_model_gets_what_jenga_plan_says_for_the_gpu_that_is_here(server, tmp_path):
    folder = llama_folder(tmp_path / "small")

    code, output, errors = server.doctor("--quick", "--json", str(folder))

    assert (code, errors) == (0, "")
    model = json.loads(output)["model"]
    assert model["budget"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert model["budget"]["memory_bytes"] == 81559 << 20
    (table,) = model["geometry"]["page_tables"]
    assert table["small_page_bytes"] == 16 * 4 * 2 * 2 * 64 * 2
    code, output, _ = server.doctor("--quick", str(folder))
    assert "small is understood" in output
    assert "Requests that fit at once: " in output


def test_a_model_too_large_for_one_gpu_is_planned_on_as_many_as_hold_it(server):
    server.has_gpus(*(A100.format(index) for index in range(4)))

    code, findings = server.findings("--quick", "llama-3.1-70b")

    assert code == 0
    assert findings["weights"]["advice"] == "start vLLM with --tensor-parallel-size 2"

    server.has_gpus(A100.format(0))
    code, findings = server.findings("--quick", "llama-3.1-70b")
    assert (code, refused(findings)) == (1, ["model"])
    assert "weights do not fit on NVIDIA A100" in findings["model"]["advice"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "nobody"}, "no reader is for model_type 'nobody'"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
        ({"canvas_length": 32}, "generation by diffusion"),
        ({"index_topk": 2048}, "sparse multi-head latent attention"),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}},
            "nvfp4",
        ),
    ],
    ids=["unknown", "odd_field", "diffusion", "sparse", "nvfp4"],
)
def test_a_model_that_is_refused_is_so_by_name(server, tmp_path, fields, words):
    folder = llama_folder(tmp_path / "odd", **fields, architectures=["NobodyForCausalLM"])

    code, findings = server.findings("--quick", str(folder))

    assert code == 1
    (subject,) = refused(findings)
    assert words in findings[subject]["found"] + findings[subject]["advice"]


def test_float8_caches_are_refused_on_a_gpu_without_float8(server, tmp_path):
    quantization = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    folder = llama_folder(tmp_path / "small", quantization_config=quantization)

    assert server.findings("--quick", str(folder))[0] == 0
    server.has_gpus(A100.format(0))
    code, findings = server.findings("--quick", str(folder))

    assert (code, refused(findings)) == (1, ["cache"])
    assert "compute capability 8.9" in findings["cache"]["advice"]


@pytest.mark.parametrize("text", ["/nowhere", "gemma-3-72b", ""])
def test_a_model_that_is_not_found_is_one_finding(server, text):
    code, findings = server.findings("--quick", text)

    assert (code, refused(findings)) == (1, ["model"])


SHAPE = {
    "schema": "int",
    "version": "str",
    "serves": "bool",
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


def test_refused_models_are_those_that_the_engine_refuses():
    pytest.importorskip("vllm")
    from jenga.vllm_plugin import config, refused_models

    assert config.SPARSE_MODEL_TYPES is refused_models.SPARSE_MODEL_TYPES


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


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_names_that_are_otherwise_are_told_in_a_sentence_each():
    from jenga.vllm_plugin.replacement import Replacement
    from jenga.vllm_plugin.self_check import compared

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


def test_the_page_of_installation_says_what_the_command_prints_and_names_targets_that_exist():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for name in (*SHAPE, *SHAPE["findings"][0], *SHAPE["machine"]["gpus"][0], FINE, NOTE, REFUSED):
        assert f"`{name}`" in page
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", page)) <= targets

"""GPUs and their driver, as `jenga doctor` judges them."""

import pytest

from tests.doctor.machines import A100, FINE, H100, NOTE, OLD_DRIVER, REFUSED, T4, refused


def test_without_a_gpu_a_cpu_build_serves_by_references_or_in_the_interpreter(machine):
    machine.has_everything()
    machine.has_torch("2.13.0+cpu", cuda=None)

    code, findings = machine.findings("--quick")
    assert (code, refused(findings)) == (0, [])
    assert findings["GPU"]["status"] == NOTE
    assert findings["TRITON_INTERPRET"]["status"] == FINE
    assert "PyTorch references compute" in findings["TRITON_INTERPRET"]["found"]

    machine.variables["TRITON_INTERPRET"] = "1"
    code, findings = machine.findings("--quick")
    assert (code, refused(findings)) == (0, [])
    assert findings["TRITON_INTERPRET"]["status"] == NOTE


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


def test_an_old_driver_with_libraries_that_stand_in_for_it_is_a_note(server):
    server.has_gpus(OLD_DRIVER)

    _, findings = server.findings()

    assert findings["driver"]["status"] == NOTE


@pytest.mark.parametrize(
    ("line", "words"),
    [(T4, "never tried on an older GPU"), (A100.format(0), "have run only on 9.0")],
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

    assert findings["GPU"]["found"] == "no NVIDIA GPU"


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


def test_a_torch_for_cpus_beside_a_gpu_is_a_note(server):
    server.has_torch("2.13.0+cpu", cuda=None)

    _, findings = server.findings("--quick")

    assert findings["torch sees"]["advice"] == "this torch is built for CPUs"

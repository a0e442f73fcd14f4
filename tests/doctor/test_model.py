"""What a model gets, and what is refused of it, as `jenga doctor` tells it."""

import json

import pytest

from jenga.models import KvFormat, unserved
from tests.doctor.machines import A100, NOTE, llama_folder, refused


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
    assert "Requests that fit at once on 1 x NVIDIA H100 80GB HBM3: " in output


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
            {
                "model_type": "hymba",
                "sliding_window": 64,
                "global_attn_idx": [0],
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
            },
            "two pieces are missing",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}},
            "nvfp4",
        ),
    ],
    ids=["unknown", "odd_field", "diffusion", "sparse", "hymba", "nvfp4"],
)
def test_a_model_that_is_refused_is_so_by_name(server, tmp_path, fields, words):
    folder = llama_folder(tmp_path / "odd", **fields, architectures=["NobodyForCausalLM"])

    code, findings = server.findings("--quick", str(folder))

    assert code == 1
    (subject,) = refused(findings)
    assert words in findings[subject]["found"] + findings[subject]["advice"]


def test_without_a_gpu_it_is_not_decided_whether_a_model_fits(machine):
    machine.has_everything()
    machine.has_torch(cuda=None, gpus=0)

    for name, command in (
        ("gemma-3-27b", "jenga doctor gemma-3-27b --gpu H100-80G"),
        ("qwen3-next-80b-a3b", "jenga doctor qwen3-next-80b-a3b --gpu H100-80G --tp 4"),
    ):
        code, findings = machine.findings("--quick", name)
        assert (code, refused(findings)) == (0, [])
        assert findings["memory"]["status"] == NOTE
        assert "no GPU was found on this machine" in findings["memory"]["found"]
        _, output, _ = machine.doctor("--quick", name)
        last = " ".join(output.split("\n\n")[-1].split())
        assert "Whether the model fits is not decided" in last
        assert f"`{command}`" in last

    _, output, _ = machine.doctor("--quick", "--json", "qwen3-next-80b-a3b")
    assert json.loads(output)["is_fit_decided"] is False


def test_a_gpu_that_the_user_names_decides_whether_a_model_fits(machine):
    machine.has_everything()
    machine.has_torch(cuda=None, gpus=0)
    model = "qwen3-next-80b-a3b"

    code, findings = machine.findings("--quick", model, "--gpu", "H100-80G")
    assert (code, refused(findings)) == (1, ["model"])
    assert "weights do not fit on H100-80G" in findings["model"]["advice"]

    code, output, _ = machine.doctor("--quick", model, "--gpu", "H100-80G", "--tp", "4")
    assert code == 0
    assert "Requests that fit at once on 4 x H100-80G: " in output
    assert "The model was planned for H100-80G, as asked." in " ".join(output.split())


def test_a_model_gets_no_more_ranks_than_there_are_gpus(server):
    code, findings = server.findings("--quick", "gemma-3-4b", "--tp", "2")

    assert (code, refused(findings)) == (1, ["ranks"])
    assert "this machine has 1" in findings["ranks"]["found"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H200"], "--gpu and --tp need MODEL"),
        (["gemma-3-4b", "--gpu", "H300"], "gpu must be one of"),
        (["gemma-3-4b", "--tp", "0"], "--tp must be a positive integer"),
    ],
)
def test_options_of_a_model_are_checked_first(server, arguments, words):
    code, _, errors = server.doctor("--quick", *arguments)

    assert code == 2
    assert words in errors


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


def test_refused_models_and_formats_are_those_that_the_engine_refuses():
    pytest.importorskip("vllm")
    from jenga.vllm_plugin import config

    assert config.SPARSE_MODEL_TYPES is unserved.SPARSE_MODEL_TYPES
    served = {each.value for each in KvFormat} - {each.value for each in unserved.UNSERVED_FORMATS}
    assert served - {KvFormat.MODEL.value} <= set(config.CACHE_DTYPES)
    assert not {each.value for each in unserved.UNSERVED_FORMATS} & set(config.CACHE_DTYPES)

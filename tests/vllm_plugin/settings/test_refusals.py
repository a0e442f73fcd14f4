"""Each feature that is refused: by name, when the engine starts, with what to use meanwhile."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import jenga.vllm_plugin
from jenga.vllm_plugin.patches.patch import SUPPORTED_VERSIONS, series_of
from jenga.vllm_plugin.settings.refusals import Refusal
from tests import warm
from tests.vllm_plugin.conftest import V2_RUNNER, engine_environment

HERE = Path(__file__).parent

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
DRAFT = {"method": "draft_model", "model": "{llama}", "num_speculative_tokens": 2}

CONFIGURED = {
    "PLATFORM": {"options": {}, "platform": "rocm", "met": "rocm"},
    "EXTERNAL_LAUNCHER": {
        "options": {
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "external_launcher",
        }
    },
    "DECODE_CONTEXT_PARALLELISM": {
        "options": {"decode_context_parallel_size": 2, "tensor_parallel_size": 4}
    },
    "PREFILL_CONTEXT_PARALLELISM": {
        "options": {},
        "fields": {"parallel_config.prefill_context_parallel_size": 2},
    },
    "MICROBATCHES": {"options": {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"}},
    "KV_CONNECTORS": {
        "options": {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "/tmp"},
            }
        }
    },
    "ENCODER_CACHE_CONNECTORS": {
        "options": {
            "ec_transfer_config": {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_both",
                "ec_connector_extra_config": {"shared_storage_path": "/tmp"},
            }
        }
    },
    "CACHE_DTYPE": {"options": {"kv_cache_dtype": "nvfp4"}, "met": "nvfp4"},
    "CACHE_DTYPE-latents": {
        "options": {"model": "{deepseek_v3}", "kv_cache_dtype": "fp8_ds_mla"},
        "met": "fp8_ds_mla",
    },
    "BLOCK_SIZE": {"options": {"block_size": 24}, "met": "24"},
    "BLOCKS_OVERRIDE": {
        "options": {"num_gpu_blocks_override": 1},
        "states": [],
        "met": "1, where 17 are needed",
    },
    "SHARED_ARENA": {
        "options": {"num_gpu_blocks_override": 64},
        "environment": {
            "JENGA_SHARED_ARENA": "/dev/shm/none",
            "JENGA_SHARED_ARENA_GUARANTEE": "1048576",
        },
        "met": "--num-gpu-blocks-override",
    },
    "ONE_CACHE_GROUP": {"options": {"disable_hybrid_kv_cache_manager": True}},
    "ONE_CACHE_GROUP-later": {
        "options": {},
        "fields": {"scheduler_config.disable_hybrid_kv_cache_manager": True},
        "states": [],
    },
    "OFFLOADING_BACKEND": {
        "options": {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
        "met": "lmcache",
    },
    "OFFLOADING_SIZE": {"options": {"kv_offloading_size": 0.0}, "met": "0.0"},
    "OFFLOADING_SIZE-of_a_page": {
        "options": {"kv_offloading_size": 1e-6},
        "states": [],
        "met": "1e-06 GiB, where 2 large pages",
    },
    "OFFLOADING_WITHOUT_CACHING": {
        "options": {"kv_offloading_size": 1.0, "enable_prefix_caching": False},
        "states": [],
    },
    "CACHE_METRICS": {"options": {"kv_cache_metrics": True}},
    "ROUTED_EXPERTS": {"options": {"model": "{gpt_oss}", "enable_return_routed_experts": True}},
    "KV_SHARING_FAST_PREFILL": {"options": {"kv_sharing_fast_prefill": True}},
    "HISPARSE": {"options": {}, "fields": {"attention_config.hisparse_config": "asked for"}},
    "BACKEND_PER_KIND": {
        "options": {"attention_config": {"backend_per_kind": {"full_attention": "TRITON_ATTN"}}},
        "met": "full_attention: TRITON_ATTN",
    },
    "SPARSE_LATENTS": {"options": {"model": "{deepseek_v3}", "hf_overrides": {"index_topk": 64}}},
    "QUERY_QUANTIZATION": {
        "options": {
            "model": "{deepseek_v3}",
            "kv_cache_dtype": "fp8",
            "attention_config": {"use_prefill_query_quantization": True},
        }
    },
    "IMAGE_ATTENTION": {
        "options": {"model": "{mllama}", "kv_cache_dtype": "int4_per_token_head"},
        "met": "--kv-cache-dtype int4_per_token_head",
    },
    "IMAGE_ATTENTION-runner": {
        "options": {"model": "{mllama}", "speculative_config": NGRAM},
        "environment": {V2_RUNNER: "1"},
        "met": "speculative decoding",
    },
    "IMAGE_ATTENTION-cache_of_pixels": {
        "options": {"model": "{mllama}", "mm_processor_cache_type": "shm"},
        "met": "--mm-processor-cache-type shm",
    },
    "EMBEDDINGS_IN_KV_PAGES": {
        "options": {"model": "{mllama}"},
        "environment": {"JENGA_EMBEDDINGS_IN_KV_PAGES": "1"},
        "met": "layers of cross attention read the images",
    },
    "TOKEN_BUDGETS": {
        "options": {
            "hf_overrides": {"kv_token_budgets": {"layers": [128, None, 64]}},
            "kv_cache_dtype": "fp8_e5m2",
            "speculative_config": NGRAM,
        },
        "met": "speculative decoding, --kv-cache-dtype fp8_e5m2",
    },
    "TOKEN_BUDGETS-steps": {
        "options": {
            "hf_overrides": {"kv_token_budgets": {"layers": [128, None, 64]}},
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
        },
        "met": "--max-num-batched-tokens below 72, --max-num-seqs and twice recent_tokens",
    },
    "PROMPT_SCRATCH": {
        "options": {"kv_cache_dtype": "bfloat16"},
        "environment": {"JENGA_PROMPT_SCRATCH_BYTES": "1000000", "VLLM_BATCH_INVARIANT": "1"},
        "met": "--kv-cache-dtype bfloat16, VLLM_BATCH_INVARIANT",
    },
    "PROMPT_SCRATCH-latents": {
        "options": {"model": "{deepseek_v3}", "kv_cache_dtype": "fp8"},
        "environment": {"JENGA_PROMPT_SCRATCH_BYTES": "1000000"},
        "met": "latent attention",
    },
    "DIFFUSION": {"options": {"model": "{gemma2 canvas_length=32}"}},
    # Its own configuration needs the code that comes with it.
    "HYMBA": {
        "options": {
            "hf_overrides": {"architectures": ["HymbaForCausalLM"], "model_type": "hymba"},
        }
    },
    "ENCODER_ALONE": {"options": {"model": "{whisper}", "mm_encoder_only": True}},
    "INVARIANT_STATES": {
        "options": {"model": "{granite_hybrid}"},
        "environment": {"VLLM_BATCH_INVARIANT": "1"},
    },
    "INVARIANT_SPECIALIZED": {
        "options": {},
        "environment": {"VLLM_BATCH_INVARIANT": "1", "JENGA_SPECIALIZED_PREFILL": "1"},
    },
    # vLLM refuses it by itself where there is no GPU.
    "STOCHASTIC_ROUNDING": {
        "options": {"model": "{granite_hybrid}"},
        "fields": {"mamba_config.enable_stochastic_rounding": True},
    },
    "HISTORIES": {
        "options": {"model": "{granite_hybrid}", "use_replayssm": True, "replayssm_buffer_len": 1},
        "met": "--replayssm-buffer-len 1, where twice the tokens of a decoding step are 2",
    },
    "HISTORIES-drafts": {
        "options": {
            "model": "{granite_hybrid}",
            "use_replayssm": True,
            "replayssm_buffer_len": 5,
            "speculative_config": NGRAM,
        },
        "met": "--replayssm-buffer-len 5, where twice the tokens of a decoding step are 6",
    },
    "HISTORIES-variable": {
        "options": {"model": "{granite_hybrid}"},
        "environment": {"JENGA_HISTORY_TOKENS": "1"},
        "met": "JENGA_HISTORY_TOKENS 1, where",
    },
    "HISTORIES-two_lengths": {
        "options": {"model": "{granite_hybrid}", "use_replayssm": True},
        "environment": {"JENGA_HISTORY_TOKENS": "8"},
        "met": "--replayssm-buffer-len 16 beside JENGA_HISTORY_TOKENS 8",
    },
    "HISTORIES-no_such_layers": {
        "options": {},
        "environment": {"JENGA_HISTORY_TOKENS": "8"},
        "states": [],
        "met": "a model without Mamba-2",
    },
    "DRAFT_METHOD": {
        "options": {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
        "met": "ngram_gpu",
    },
    "DRAFT_MTP_LAYERS": {
        "options": {"model": "{mimo}", "speculative_config": MTP},
        "met": "mimo_mtp",
    },
    "DRAFT_SEVERAL_MTP_LAYERS": {
        "options": {
            "model": "{deepseek_v3_mtp num_nextn_predict_layers=2}",
            "speculative_config": MTP,
        }
    },
    "DRAFT_WITH_STATES": {"options": {"speculative_config": DRAFT | {"model": "{granite_hybrid}"}}},
    "DRAFT_BACKEND": {
        "options": {"speculative_config": DRAFT | {"attention_backend": "CPU_ATTN"}},
        "met": "CPU_ATTN",
    },
    "DRAFT_STATES_OF_TARGET": {
        "options": {"speculative_config": NGRAM},
        "states": ["SHORT_CONV"],
        "met": "SHORT_CONV, where MAMBA1 and MAMBA2 are ours",
    },
    "DRAFT_ENCODER_DECODER": {"options": {"model": "{whisper}", "speculative_config": NGRAM}},
    "DRAFT_PIPELINE": {"options": {"pipeline_parallel_size": 2, "speculative_config": NGRAM}},
    "DRAFT_PARALLEL": {
        "options": {"speculative_config": DRAFT},
        "fields": {"speculative_config.parallel_drafting": True},
    },
}
"""What asks for a feature, by the refusal's name and, behind a hyphen, the case's."""


@pytest.fixture(scope="module")
def model_path(tiny_model, tmp_path_factory):
    """Get the folder of a tiny model by name, or of its configuration alone with some changes."""

    def get(words):
        name, *changes = words.split()
        if not changes and name not in ("mimo", "mllama"):
            return str(tiny_model(name))
        path = tmp_path_factory.mktemp(name)
        if name == "mllama":
            from transformers import MllamaConfig

            MllamaConfig(architectures=["MllamaForConditionalGeneration"]).save_pretrained(path)
            return str(path)
        changed = {key: int(value) for key, _, value in (each.partition("=") for each in changes)}
        if name == "mimo":
            name = "llama"
            changed = {
                "model_type": "qwen2",
                "architectures": ["MiMoForCausalLM"],
                "num_nextn_predict_layers": 1,
            }
        config = json.loads((tiny_model(name) / "config.json").read_text()) | changed
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return get


@pytest.fixture(scope="module")
def messages(model_path, tmp_path_factory):
    """Get the message of every case of `CONFIGURED`, and what their process printed."""

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        is_model = isinstance(value, str) and value.startswith("{")
        return model_path(value.strip("{}")) if is_model else value

    folder = tmp_path_factory.mktemp("refusals")
    cases = {
        name: filled({"model": "{llama}"} | case["options"]) for name, case in CONFIGURED.items()
    }
    cases = {name: CONFIGURED[name] | {"options": options} for name, options in cases.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    done = warm.run(
        [HERE / "refusals_process.py", folder / "cases.json", folder / "messages.json"],
        engine_environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "messages.json").read_text())


def assert_refuses(message, name, met=""):
    words = Refusal[name].value
    assert "JENGA_TRITON does not support" in message
    assert words.feature in message
    assert words.reason in message
    assert words.instead in message
    assert met in message


@pytest.mark.vllm
@pytest.mark.parametrize("case", CONFIGURED)
def test_a_feature_is_refused_by_name_when_the_engine_starts(case, messages):
    assert_refuses(messages[case], case.split("-")[0], CONFIGURED[case].get("met", ""))


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.3.2"])
def test_other_versions_of_vllm_are_refused(version):
    with pytest.raises(ValueError, match=version) as caught:
        series_of(version)

    assert_refuses(str(caught.value), "VERSION")
    assert all(series in Refusal.VERSION.value.feature for series in SUPPORTED_VERSIONS)


def test_builds_of_a_supported_version_are_of_its_series():
    assert series_of("0.33.1+cu130") == series_of("0.33.0rc1") == "0.33"


@pytest.mark.vllm
def test_caches_that_are_laid_out_in_another_way_are_refused():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowMLASpec

    from jenga.vllm_plugin.specs.layer_types import model_spec

    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    padded = FullAttentionSpec(**shape, page_size_padded=1 << 20)
    windows = SlidingWindowMLASpec(**shape, sliding_window=32)

    for spec, met in ((padded, "padded pages"), (windows, "SlidingWindowMLASpec")):
        with pytest.raises(ValueError, match=f"layer 'attn' with .*{met}") as caught:
            model_spec({"attn": spec})
        assert_refuses(str(caught.value), Refusal.CACHE_LAYOUT.name)


@pytest.mark.vllm
def test_states_behind_which_the_next_would_not_be_aligned_are_refused():
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from jenga.vllm_plugin.specs.layer_types import model_spec

    spec = MambaSpec(
        block_size=256,
        shapes=((3, 5), (16, 16)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
        mamba_cache_mode="none",
    )

    with pytest.raises(ValueError, match="60 bytes in layer 'mixer'") as caught:
        model_spec({"mixer": spec})
    assert_refuses(str(caught.value), Refusal.STATE_ALIGNMENT.name)


LATENTS = {"head_size": 576, "use_mla": True}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "met"),
    [
        pytest.param({"attn_type": "encoder_only"}, "attention type", id="without_a_cache"),
        pytest.param({"head_size": 48}, "head_size", id="heads_of_48_elements"),
        pytest.param({"use_non_causal": True}, "non-causal", id="use_non_causal"),
        pytest.param(
            {**LATENTS, "kv_cache_dtype": "fp8_ds_mla"},
            "kv_cache_dtype",
            id="latents_beside_their_scales",
        ),
        pytest.param(
            {**LATENTS, "kv_cache_dtype": "int8_per_token_head"},
            "kv_cache_dtype",
            id="latents_with_scales_of_heads",
        ),
        pytest.param(
            {**LATENTS, "kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype",
            id="latents_in_float8_e5m2",
        ),
    ],
)
def test_layers_that_cannot_be_served_are_refused_with_the_reason(options, met):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from jenga.vllm_plugin.config import checked_backend_path

    layer = AttentionSelectorConfig(
        head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16
    )
    assert checked_backend_path(layer).endswith("JengaTritonBackend")

    with pytest.raises(ValueError, match=f"{met}.* not supported") as caught:
        checked_backend_path(layer._replace(**options))
    assert_refuses(str(caught.value), Refusal.ATTENTION_LAYER.name)


@pytest.mark.vllm
def test_latents_with_slopes_windows_or_caps_are_refused():
    from jenga.vllm_plugin.layers.attention.latent import JengaLatentImpl

    layer = {
        "num_heads": 4,
        "head_size": 576,
        "scale": 1.0,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": 64,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": 30.0,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }

    with pytest.raises(ValueError, match="sliding windows, soft caps") as caught:
        JengaLatentImpl(**layer)
    assert_refuses(str(caught.value), Refusal.LATENT_FEATURES.name)


@pytest.mark.vllm
def test_quantised_results_are_refused():
    from jenga.vllm_plugin.layers.attention.backend import JengaTritonImpl

    layer, rows = JengaTritonImpl(4, 64, 1.0), torch.zeros(1, 4, 64)

    with pytest.raises(ValueError, match="output is quantised") as caught:
        layer.forward(None, rows, rows, rows, rows, None, rows, output_scale=torch.ones(1))
    assert_refuses(str(caught.value), Refusal.QUANTISED_OUTPUT.name)


@pytest.mark.vllm
def test_page_tables_of_layers_that_read_images_differently_are_refused():
    from jenga.vllm_plugin.layers.attention.attention_builder import image_reach

    layers = {
        "layers.0.attn": SimpleNamespace(mm_prefix_clamp_sliding_window=True),
        "layers.1.attn": SimpleNamespace(),
    }
    context = SimpleNamespace(static_forward_context=layers)

    with pytest.raises(ValueError, match=r"layers\.0\.attn.*layers\.1\.attn") as caught:
        image_reach(SimpleNamespace(compilation_config=context), list(layers))
    assert_refuses(str(caught.value), Refusal.IMAGE_REACH.name)


@pytest.mark.vllm
def test_drafts_of_several_layer_types_are_refused():
    from jenga.vllm_plugin.settings.speculation import check_draft

    check_draft(["full"])
    with pytest.raises(ValueError, match="full and sliding_64") as caught:
        check_draft(["full", "sliding_64"])
    assert_refuses(str(caught.value), Refusal.DRAFT_LAYER_TYPES.name)


@pytest.mark.vllm
def test_layers_with_kernels_of_their_own_are_refused(monkeypatch):
    from jenga.vllm_plugin.layers import served_layers

    class OwnAttention:
        def get_attn_backend(self):
            return type("OwnBackend", (), {"get_name": staticmethod(lambda: "OWN")})

    monkeypatch.setattr(
        "vllm.config.get_layers_from_vllm_config", lambda *_: {"own": OwnAttention()}
    )

    with pytest.raises(ValueError, match=r"1 of them, of which 'own' is a .*OWN") as caught:
        served_layers.check_layers(None, {"own"})
    assert_refuses(str(caught.value), Refusal.OWN_KERNELS.name)


CHECKED = {
    "ATTENTION_LAYER": test_layers_that_cannot_be_served_are_refused_with_the_reason,
    "CACHE_LAYOUT": test_caches_that_are_laid_out_in_another_way_are_refused,
    "DRAFT_LAYER_TYPES": test_drafts_of_several_layer_types_are_refused,
    "IMAGE_REACH": test_page_tables_of_layers_that_read_images_differently_are_refused,
    "LATENT_FEATURES": test_latents_with_slopes_windows_or_caps_are_refused,
    "OWN_KERNELS": test_layers_with_kernels_of_their_own_are_refused,
    "QUANTISED_OUTPUT": test_quantised_results_are_refused,
    "STATE_ALIGNMENT": test_states_behind_which_the_next_would_not_be_aligned_are_refused,
    "VERSION": test_other_versions_of_vllm_are_refused,
}
"""Tests of refusals that no configuration meets alone."""


def name_of_test(name):
    """Get the name of the test of a refusal."""
    if name in CHECKED:
        return CHECKED[name].__name__
    return f"{test_a_feature_is_refused_by_name_when_the_engine_starts.__name__}[{name}]"


def test_every_refusal_has_a_test():
    assert CHECKED.keys() | {case.split("-")[0] for case in CONFIGURED} == set(Refusal.__members__)


def test_no_module_refuses_a_feature_in_words_of_its_own():
    folder = Path(jenga.vllm_plugin.__file__).parent
    refused = set()
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and path.name != "refusals.py":
                assert "does not support" not in node.value, path
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Refusal":
                refused.add(node.attr)

    assert refused == set(Refusal.__members__)

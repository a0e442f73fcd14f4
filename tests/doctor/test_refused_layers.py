"""A model whose layers attend with kernels of their own is refused before an engine is started."""

import json
import os
from importlib.util import find_spec

import pytest

from jenga.doctor.findings import Status
from jenga.doctor.machine import Machine
from jenga.doctor.model import examine_model, find_target
from jenga.vllm_plugin.settings.refusals import Refusal
from tests.vllm_plugin.conftest import engine_environment

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SPARSE = {
    "use_sparse_attention": True,
    "sparse_index_dim": 128,
    "sparse_num_index_heads": 4,
    "sparse_topk_blocks": 16,
    "sparse_block_size": 128,
    "sparse_disable_index_value": [0, 1],
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0, 1],
}
TEXT = {
    "model_type": "minimax_m3_text",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 256,
    "dense_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "moe_layer_freq": [0, 0],
    "partial_rotary_factor": 0.5,
    "sparse_attention_config": SPARSE,
}
VISION = {
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    "patch_size": 14,
    "num_channels": 3,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "image_size": 224,
    "rope_theta": 10000.0,
}
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "projector_hidden_size": 128,
    "text_config": TEXT,
    "vision_config": VISION,
}


def test_a_layer_with_kernels_of_its_own_is_refused_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAX_M3))
    for name, value in engine_environment(reads_images=True).items():
        monkeypatch.setitem(os.environ, name, value)

    target = find_target(Machine(system="any"))
    examined = examine_model(str(tmp_path), target, asks_vllm=True)

    assert examined.plan is None
    (finding,) = examined.findings
    assert finding.status is Status.REFUSED
    words = Refusal.OWN_KERNELS.value
    assert f"JENGA_TRITON does not support {words.feature}, got " in finding.advice
    assert "of them, of which 'language_model.model.layers.1." in finding.advice
    assert f"({words.reason}; use instead: {words.instead})" in finding.advice

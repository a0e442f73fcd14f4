"""Configurations of every architecture, as an engine needs them to build the model's class.

Most begin with what transformers has by default. What vLLM's classes read besides, and published
configurations have, is filled in here.
"""

import json

_LAYERS_OF_FOUR = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
_MIMO_V2 = {
    "num_hidden_layers": 12,
    "layer_types": "absent",
    "mlp_layer_types": "absent",
    "layernorm_epsilon": 1e-5,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1] * 2,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "v_head_dim": 128,
    "sliding_window_size": 128,
    "moe_layer_freq": [0] + [1] * 11,
    "n_routed_experts": 4,
    "attention_bias": False,
    "swa_rope_theta": 10000.0,
    "attention_value_scale": None,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
_ERNIE_VISION = {
    "embed_dim": 1280,
    "depth": 2,
    "num_heads": 16,
    "mlp_ratio": 4,
    "hidden_act": "quick_gelu",
    "hidden_size": 1280,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
}

COMPLETIONS = {
    "afmoe": {
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"moe_intermediate_size": 1408},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm4v_moe": {"text_config": {"head_dim": 128, "use_qk_norm": False}},
    "gpt_oss": {"intermediate_size": 3072},
    "hunyuan_v1_dense": {"head_dim": 128, "rope_parameters": _ROTATION},
    "hunyuan_v1_moe": {"head_dim": 128, "rope_parameters": _ROTATION, "num_experts": 4},
    "hy_v3": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 1536,
        "route_norm": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 128,
    },
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"]},
    "lfm2": {"block_dim": 2560, "conv_dim": 2560},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv"] * 2},
    "lfm2_vl": {"text_config": {"block_dim": 2560, "conv_dim": 2560}},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_num": 4,
        "zero_expert_type": "identity",
    },
    "mellum": {
        "num_hidden_layers": 4,
        "mlp_layer_types": "absent",
        "num_experts": 4,
        "layer_types": _LAYERS_OF_FOUR,
    },
    "mimo_v2_flash": _MIMO_V2,
    "minimax": {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "minimax_m2": {"rotary_dim": 64, "head_dim": 128, "scoring_func": "sigmoid"},
    "mistral4": {"num_hidden_layers": 2, "n_routed_experts": 4},
    "phimoe": {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 512},
    "solar_open": {"num_hidden_layers": 2, "n_routed_experts": 4},
    "flex_olmo": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "ministral": {"rope_parameters": _ROTATION, "head_dim": 128},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]
    },
    "dots1": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "layer_types": "absent",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""`model_type` -> fields to add to transformers' defaults."""

_VISION_SECTIONS = {"gemma4": "gemma4_vision", "gemma4_unified": "gemma4_unified_vision"}
"""Models without a vision encoder by default -> that of the published ones."""

_TEXT = {"vocab_size": 1024, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_LLAMA = _TEXT | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
_LATENT = _LLAMA | {
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_INTERN_VISION = {
    "model_type": "intern_vit_6b",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 448,
    "patch_size": 14,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
    "qk_normalization": False,
    "initializer_factor": 1.0,
    "hidden_act": "gelu",
}
_BAILING = _LATENT | {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 7,
    "layer_group_size": 3,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "embedding_dropout": 0.0,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "group_norm_size": 4,
    "linear_silu": False,
    "first_k_dense_replace": 7,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    **_EXPERTS,
}


def _nas_block(heads_in_group):
    """A block of Nemotron-NAS; one without attention where there is no group."""
    is_absent = heads_in_group is None
    attention = {"n_heads_in_group": heads_in_group, "no_op": is_absent}
    return {
        "attention": attention | {"replace_with_linear": False},
        "ffn": {"ffn_mult": 1.3, "no_op": False, "replace_with_linear": False},
    }


PUBLISHED = {
    "NVLM_D": {
        "architectures": ["NVLM_D"],
        "model_type": "NVLM_D",
        "llm_config": _LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": _INTERN_VISION,
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "ps_version": "v2",
        "template": "chatml",
    },
    "baichuan": _LLAMA | {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"},
    "bailing_hybrid": _BAILING | {"architectures": ["BailingMoeV2_5ForCausalLM"]},
    "bailing_hybrid-3": _BAILING | {"architectures": ["BailingMoeV3ForCausalLM"]},
    "bailing_moe": _LLAMA
    | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "head_dim": 64,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "rope_theta": 10000.0,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        **_EXPERTS,
    },
    "bailing_moe_linear": _LLAMA
    | {
        "architectures": ["BailingMoeLinearV2ForCausalLM"],
        "model_type": "bailing_moe_linear",
        "layer_group_size": 2,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "n_embed": 512,
        "n_layer": 3,
        "num_attention_heads": 8,
    },
    "character_llama": _LLAMA
    | {
        "architectures": ["CharacterLlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "num_key_value_heads": 1,
        "layer_types": _LAYERS_OF_FOUR * 2,
        "sliding_window": 512,
        "kv_sharing": {"1": 0, "4": 2, "6": 5, "7": 3},
    },
    "chatglm": {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "hidden_size": 512,
        "num_layers": 4,
        "num_attention_heads": 8,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 64,
        "ffn_hidden_size": 1024,
        "seq_length": 8192,
        "padded_vocab_size": 1024,
        "original_rope": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v3-of-its-own-type": _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "first_k_dense_replace": 4,
        "num_nextn_predict_layers": 1,
    },
    "ernie4_5_moe_vl": _LLAMA
    | {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "model_type": "ernie4_5_moe_vl",
        "vision_config": _ERNIE_VISION,
        "pixel_hidden_size": 1280,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "rope_theta": 10000.0,
        "use_bias": False,
        "freq_allocation": 20,
        "moe_num_experts": [4, 4],
        "moe_intermediate_size": [128, 64],
        "moe_k": 2,
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [3, 3],
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 1,
        "moe_capacity": [128, 128, 128],
        "im_patch_id": 3,
    },
    "exaone": {
        "architectures": ["ExaoneForCausalLM"],
        "model_type": "exaone",
        **{name: value for name, value in _LLAMA.items() if name != "num_hidden_layers"},
        "num_layers": 4,
    },
    "falcon-of-groups": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 4,
        "num_attention_heads": 16,
        "hidden_size": 1024,
        "num_hidden_layers": 3,
    },
    "gpt2-as-published": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 1024,
    },
    "hymba": _TEXT
    | {
        "architectures": ["HymbaForCausalLM"],
        "model_type": "hymba",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "sliding_window": 1024,
        "global_attn_idx": [0, 3],
        "kv_reuse_group": [[1, 2]],
        "num_memory_tokens": 128,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "internlm2": _LLAMA
    | {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "rope_theta": 10000.0,
        "bias": False,
    },
    "internlm3": _LLAMA
    | {
        "architectures": ["InternLM3ForCausalLM"],
        "model_type": "internlm3",
        "rope_theta": 10000.0,
        "bias": False,
        "qkv_bias": False,
    },
    "internvl_chat": {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": _LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": _INTERN_VISION,
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "ps_version": "v2",
        "template": "chatml",
    },
    "kimi_vl": {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": _LATENT
        | {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "first_k_dense_replace": 4,
        },
        "vision_config": {"model_type": "moonvit"},
    },
    "mimo": _LLAMA
    | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "use_sliding_window": False,
        "sliding_window": 1024,
        "max_window_layers": 4,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000.0,
    },
    "minicpm": _LLAMA
    | {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
        "rope_theta": 10000.0,
    },
    "nemotron-nas": _LLAMA
    | {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "num_key_value_heads": None,
        "block_configs": [_nas_block(heads) for heads in (4, None, 8, 2)],
    },
    "orion": _LLAMA
    | {"architectures": ["OrionForCausalLM"], "model_type": "orion", "rope_theta": 10000.0},
    "phi3_v": _LLAMA
    | {
        "architectures": ["Phi3VForCausalLM"],
        "model_type": "phi3_v",
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 1024,
            "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
    },
    "plamo3": _LLAMA
    | {
        "architectures": ["Plamo3ForCausalLM"],
        "model_type": "plamo3",
        "num_hidden_layers": 16,
        "window_size": 2048,
        "sliding_window_pattern": 8,
        "rope_theta": 1000000,
        "rope_local_theta": 10000,
        "head_dim": 128,
        # Of the class that comes with the model, which says so of the two fields above.
        "layer_types": (["sliding_attention"] * 7 + ["full_attention"]) * 2,
        "interleaved_sliding_window": ([2048] * 7 + [None]) * 2,
    },
    "step3p5": {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        **{name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"},
        "num_attention_groups": 4,
        "max_seq_len": 8192,
        "head_dim": 128,
        "moe_intermediate_size": 128,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 128,
        "sliding_window": 512,
        "num_nextn_predict_layers": 1,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 16,
            "num_attention_groups": 4,
            "head_dim": 128,
        },
        "partial_rotary_factors": [0.5] * 5,
        "rope_theta": 10000.0,
        "use_rope_layers": [],
        "moe_layers_enum": "3",
        "use_moe": True,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 2.5,
        "norm_expert_weight": True,
        "use_head_wise_attn_gate": True,
        "swiglu_limits": [0.0] * 5,
        "swiglu_limits_shared": [0.0] * 5,
    },
}
PUBLISHED["step3p7"] = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": PUBLISHED["step3p5"],
    "vision_config": {"model_type": "perception_encoder", "image_size": 728, "patch_size": 14},
}
"""Of models that transformers does not know, or knows under other names, as people have them."""

VARIATIONS = {
    "llama-with-a-window": ("llama", {"sliding_window": 1024}),
    "llama-with-a-window-of-zero": ("llama", {"sliding_window": 0}),
    "llama-of-wide-heads": ("llama", {"head_dim": 256, "num_key_value_heads": None}),
    "llama-of-no-head_dim": ("llama", {"head_dim": 0}),
    "llama-with-values-of-a-width": ("llama", {"v_head_dim": 64}),
    "mistral-that-names-no-heads": ("mistral", {"num_key_value_heads": "absent"}),
    "mixtral-that-names-no-window": ("mixtral", {"sliding_window": "absent"}),
    "gemma2-that-names-no-width": ("gemma2", {"head_dim": "absent"}),
    "qwen3-that-names-no-width": ("qwen3", {"head_dim": "absent"}),
    "gpt_oss-that-names-no-heads": (
        "gpt_oss",
        {"head_dim": "absent", "num_key_value_heads": "absent"},
    ),
    "llama-of-a-stretched-rotation": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_window": 4096,
        },
    ),
    "mistral-that-names-no-window": ("mistral", {"sliding_window": "absent"}),
    "mistral-of-two-kinds": (
        "mistral",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "sliding_window": 1024,
        },
    ),
    "mistral-without-a-window": ("mistral", {"sliding_window": None}),
    "mistral-with-a-window-of-zero": ("mistral", {"sliding_window": 0}),
    "mixtral-with-a-window": ("mixtral", {"sliding_window": 1024}),
    "phi3-with-a-window": ("phi3", {"sliding_window": 2047}),
    "starcoder2-with-a-window": ("starcoder2", {"sliding_window": 4096}),
    "starcoder2-with-a-window-of-all-it-reads": (
        "starcoder2",
        {"sliding_window": 4096, "max_position_embeddings": 4096},
    ),
    "qwen2-whose-window-is-off": ("qwen2", {"sliding_window": 1024, "use_sliding_window": False}),
    "qwen3-whose-window-is-off": ("qwen3", {"sliding_window": 1024, "use_sliding_window": False}),
    "gemma2-with-another-window": ("gemma2", {"sliding_window": 1024}),
    "gemma3_text-by-a-pattern": (
        "gemma3_text",
        {"sliding_window_pattern": 3, "layer_types": "absent"},
    ),
    "gemma3_text-of-four": (
        "gemma3_text",
        {"num_hidden_layers": 4, "layer_types": _LAYERS_OF_FOUR},
    ),
    "cohere2-of-four": ("cohere2", {"num_hidden_layers": 4, "layer_types": _LAYERS_OF_FOUR}),
    "olmo3-of-four": ("olmo3", {"num_hidden_layers": 4, "layer_types": _LAYERS_OF_FOUR}),
    "llama4_text-with-an-empty-list": ("llama4_text", {"no_rope_layers": []}),
    "llama4_text-with-no-list": ("llama4_text", {"no_rope_layers": None}),
    "llama4_text-without-chunks": ("llama4_text", {"attention_chunk_size": None}),
    "bamba-of-granites-fields": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "mamba_n_groups": 8,
        },
    ),
    "jamba-of-another-period": ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 2}),
    "qwen3_next-of-another-interval": (
        "qwen3_next",
        {"full_attention_interval": 2, "layer_types": "absent"},
    ),
}
"""Name -> architecture and fields that differ from its configuration above."""

NOT_BUILT = {
    "baichuan": "BaichuanForCausalLM was supported in vLLM until",
    "bailing_moe_linear": "'BailingMoeLinearV2ForCausalLM'. are not supported",
    "bamba": "does not dispatch through the Transformers attention interface",
    "deepseek_v32": "JENGA_TRITON does not support: sparse multi-head latent attention",
    "deepseek_v4": "`mlp_layer_types` entries must be|sparse multi-head latent attention",
    "ernie4_5_vl_moe": "has no attribute 'embed_dim'",
    "exaone": "has no attribute 'num_hidden_layers'",
    "glm_moe_dsa": "JENGA_TRITON does not support: sparse multi-head latent attention",
    "hymba": "JENGA_TRITON does not support: Hymba .*two pieces are missing",
    "kimi_linear": "torch.cuda.Stream|No module named 'cutlass'",
    "minimax": "does not dispatch through the Transformers attention interface",
    "nemotron-nas": "'dict' object has no attribute 'attention'",
}
"""What vLLM and the plugin do not build a model of, here or at all -> what they say.

EXAONE 3 and Nemotron-NAS need the configuration class that comes with the model, Kimi Linear a GPU.
"""

NO_CLASS = {"character_ai", "mimo_v2", "minimax_text_01", "pyramid_kv"}
"""Designs that no class of vLLM is for, and a second name of one that stands above."""

IN_SECTIONS = {
    "ernie4_5_vl_moe_text",
    "glm4v_moe_text",
    "glm4v_text",
    "mllama_text_model",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
}
"""Language models that stand in the configuration of another, where an engine builds them."""


def default_config(model_type):
    """Get what transformers writes for a model of a type, with what vLLM's class reads besides."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    config = AutoConfig.for_model(model_type)
    for names in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        if config.architectures is None and model_type in names:
            found = names[model_type]
            config.architectures = [found if isinstance(found, str) else found[0]]
    fields = json.loads(config.to_json_string(use_diff=True))
    if model_type in _VISION_SECTIONS:
        vision = AutoConfig.for_model(_VISION_SECTIONS[model_type])
        fields["vision_config"] = json.loads(vision.to_json_string(use_diff=True))
    return merged(fields, COMPLETIONS.get(model_type, {}))


def merged(fields, changes):
    """Fields with others in their place; sections are merged, `absent` takes a field away."""
    result = dict(fields)
    for name, value in changes.items():
        if value == "absent":
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def all_configs():
    """Get every configuration by name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from jenga.models import MODEL_TYPES

    others = {*PUBLISHED, *NO_CLASS, *IN_SECTIONS}
    configs = {
        model_type: default_config(model_type)
        for model_type in MODEL_TYPES
        if model_type not in others and model_type in CONFIG_MAPPING
    }
    configs |= PUBLISHED
    return configs | {
        name: merged(configs[base], changes) for name, (base, changes) in VARIATIONS.items()
    }

"""Tiny models with random weights, one per combination of layer types that the plugin serves.

They are wide enough that attention is far from uniform.
"""

VOCAB_SIZE = 512
HEAD_DIM = 64

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Where the head dimension cannot be set apart, it is hidden_size / num_attention_heads.
_TWO_HEADS = COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=3, head_dim=HEAD_DIM))


def character_llama():
    """Get a Llama in character.ai's design: layers read neighbours, and layers of other blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **COMMON | {"num_key_value_heads": 1},
        num_hidden_layers=8,
        head_dim=HEAD_DIM,
        layer_types=[*["sliding_attention"] * 3, "full_attention"] * 2,
        sliding_window=40,
        kv_sharing={"1": 0, "4": 2, "6": 5, "7": 3},
    )
    return LlamaForCausalLM(config)


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **COMMON,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        sliding_window=40,
        query_pre_attn_scalar=HEAD_DIM,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )
    return Gemma2ForCausalLM(config)


def gemma3(**others):
    """Get a Gemma 3 whose layers two ranks of a pipeline cannot divide evenly."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = {
        "num_hidden_layers": 7,
        "layer_types": [
            *["sliding_attention"] * 2,
            "full_attention",
            *["sliding_attention"] * 3,
            "full_attention",
        ],
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, sliding_window=40, **(kinds | others)))


def gemma3_256():
    """Get a Gemma 3 with heads as wide as those of real ones."""
    layer_types = ["sliding_attention", "full_attention"]
    return gemma3(num_hidden_layers=2, layer_types=layer_types, head_dim=256)


def gemma4(**others):
    """Get a Gemma 4: full layers with wide heads, keys as values; the last two layers share."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **COMMON,
        num_hidden_layers=6,
        head_dim=HEAD_DIM,
        global_head_dim=8 * HEAD_DIM,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=40,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=30.0,
        vocab_size_per_layer_input=VOCAB_SIZE,
        **({"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2} | others),
    )
    return Gemma4ForCausalLM(config)


def gemma4_experts():
    """Get a Gemma 4 of experts: every layer with keys of its own, none with inputs of its own."""
    return gemma4(
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    )


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )
    return GptOssForCausalLM(config)


def mimo_v2():
    """Get a MiMo-V2: values narrower than keys, and other heads in layers with a window."""
    from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

    windows = ["full_attention", "sliding_attention", "sliding_attention"]
    config = MiMoV2FlashConfig(
        **COMMON | {"num_key_value_heads": 1},
        num_hidden_layers=4,
        layer_types=[*windows, "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        head_dim=96,
        v_head_dim=64,
        sliding_window=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        rope_parameters={
            "full_attention": _rotation(50000.0),
            "sliding_attention": _rotation(10000.0),
        },
    )
    return MiMoV2FlashForCausalLM(config)


def _rotation(theta):
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}


def llama4():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        intermediate_size_mlp=256,
        attention_chunk_size=32,
        no_rope_layers=[1, 1, 0, 1],
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        attn_temperature_tuning=False,
    )
    return Llama4ForCausalLM(config)


def bloom():
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=2 * HEAD_DIM,
        n_layer=3,
        n_head=2,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return BloomForCausalLM(config)


def granite_hybrid(num_heads=8, head_dim=32, d_state=32):
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_TWO_HEADS,
        num_hidden_layers=5,
        layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
        mamba_n_heads=num_heads,
        mamba_d_head=head_dim,
        mamba_n_groups=1,
        mamba_d_state=d_state,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        num_local_experts=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
        attention_multiplier=0.125,
    )
    return GraniteMoeHybridForCausalLM(config)


def jamba():
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        **_TWO_HEADS,
        num_hidden_layers=6,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )
    return JambaForCausalLM(config)


def nemotron_h():
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **COMMON,
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
        head_dim=HEAD_DIM,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=32,
        conv_kernel=4,
        expand=2,
        chunk_size=64,
    )
    return NemotronHForCausalLM(config)


_DELTA_NETS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}


def qwen3_next(**delta_net):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_TWO_HEADS,
        **_DELTA_NETS | delta_net,
        head_dim=HEAD_DIM,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


def qwen3_5():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **_TWO_HEADS, **_DELTA_NETS, head_dim=HEAD_DIM, linear_num_value_heads=4
    )
    return Qwen3_5ForCausalLM(config)


_SHORT_CONVS = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_dim": COMMON["hidden_size"],  # read by vLLM alone
}


def lfm2():
    """Get an LFM2 of one head: of several vLLM's rotation on a CPU takes each for a token."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **COMMON | _SHORT_CONVS | {"num_attention_heads": 1, "num_key_value_heads": 1},
        block_auto_adjust_ff_dim=False,
        block_dim=COMMON["hidden_size"],  # read by vLLM alone
    )
    return Lfm2ForCausalLM(config)


def lfm2_moe():
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    config = Lfm2MoeConfig(
        **_TWO_HEADS | _SHORT_CONVS,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
        moe_intermediate_size=64,
    )
    return Lfm2MoeForCausalLM(config)


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=16,
        d_model=2 * HEAD_DIM,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=50,  # of one second: three pages and two tokens
        max_target_positions=256,
        init_std=0.15,
        bos_token_id=1,
        decoder_start_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return WhisperForConditionalGeneration(config)


DEEPSEEK = COMMON | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def deepseek_v2(**changes):
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    experts = {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    }
    # The widths that vLLM's own backend for a CPU is compiled for.
    widths = {"q_lora_rank": None, "kv_lora_rank": 512, "v_head_dim": 32}
    config = DeepseekV2Config(**DEEPSEEK | experts | widths | changes)
    return DeepseekV2ForCausalLM(config)


def deepseek_v2_64_heads():
    return deepseek_v2(num_attention_heads=64, num_key_value_heads=64, qk_nope_head_dim=16)


def deepseek_v3():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**DEEPSEEK, q_lora_rank=48, kv_lora_rank=256, v_head_dim=48)
    return DeepseekV3ForCausalLM(config)


MAKERS = {
    "llama": llama,
    "llama_fp8_cache": llama,
    "character_llama": character_llama,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_256": gemma3_256,
    "gemma4": gemma4,
    "gemma4_experts": gemma4_experts,
    "gpt_oss": gpt_oss,
    "mimo_v2": mimo_v2,
    "llama4": llama4,
    "bloom": bloom,
    "deepseek_v2": deepseek_v2,
    "deepseek_v2_64_heads": deepseek_v2_64_heads,
    "deepseek_v3": deepseek_v3,
    "whisper": whisper,
    "granite_hybrid": granite_hybrid,
    "granite_hybrid_64": lambda: granite_hybrid(num_heads=4, head_dim=64, d_state=64),
    "jamba": jamba,
    "nemotron_h": nemotron_h,
    "qwen3_next": qwen3_next,
    "qwen3_next_64": lambda: qwen3_next(linear_key_head_dim=64, linear_value_head_dim=64),
    "qwen3_5": qwen3_5,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
}
"""By name."""

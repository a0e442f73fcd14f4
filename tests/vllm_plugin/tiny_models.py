"""Tiny models with random weights, one per combination of layer types that the plugin serves.

The weights are saved as a Hugging Face directory, so that vLLM loads them as it loads any model and
both backends read the same numbers. They are wide enough that attention is far from uniform.
"""

import json
from pathlib import Path

VOCAB_SIZE = 512
HEAD_DIM = 64

_COMMON = {
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
_TWO_HEADS = _COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1}


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=3, head_dim=HEAD_DIM))


def _gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_COMMON,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        sliding_window=40,
        query_pre_attn_scalar=HEAD_DIM,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )
    return Gemma2ForCausalLM(config)


def _perturb(model):
    """Change a model a little, so that it mostly drafts what the original would say."""
    import torch

    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.dim() == 2:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
    return model


def _llama_draft():
    """Get a Llama that drafts for the other, with twice its heads of keys, each of them twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = _perturb(_llama()).state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (-1, HEAD_DIM))
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    sizes = _COMMON | {"num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, head_dim=HEAD_DIM))
    model.load_state_dict(weights)
    return model


def _calm(model, share=0.02):
    """Let a model's layers say little, so that its next token follows from the last one."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj", "output_linear")):
            parameter.data.mul_(share)
    return model


def _llama_calm():
    return _calm(_llama())


def _llama_calmer():
    return _calm(_llama(), 0.005)


def _speaking_as(model, other):
    """Give a model the words of another: its embeddings, and the head over them."""
    model.get_input_embeddings().weight.data.copy_(other.get_input_embeddings().weight)
    model.get_output_embeddings().weight.data.copy_(other.get_output_embeddings().weight)
    return model


def _eagle_head(num_key_value_heads=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _COMMON | {"num_key_value_heads": num_key_value_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, head_dim=HEAD_DIM))


def _save_eagle_head(path):
    """Make a Llama of one layer one that passes on its token, and reads what the target said."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    layer = {
        name.removeprefix("model."): tensor * (0.05 if "o_proj" in name or "down" in name else 1)
        for name, tensor in tensors.items()
        if ".layers." in name and "input_layernorm" not in name
    }
    size = _COMMON["hidden_size"]
    passed_on = torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1)
    save_file(layer | {"fc.weight": passed_on}, path / "model.safetensors")


def _save_eagle3_head(path):
    """Make a Llama of one layer one that passes on its token, and reads what the target said.

    Only attention sees the token, so each query must find its own: it is its key.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    layer = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
        for name, tensor in tensors.items()
        if ".layers." in name or name == "model.norm.weight"
    }
    size, num_heads = _COMMON["hidden_size"], _COMMON["num_attention_heads"]
    nothing, token = torch.zeros(size, size), torch.eye(size)
    key = layer["midlayer.self_attn.k_proj.weight"]
    query = key.unflatten(0, (-1, HEAD_DIM)).repeat_interleave(num_heads // 2, dim=0).flatten(0, 1)
    first_of_group = token.unflatten(1, (2, 1, HEAD_DIM)).expand(-1, -1, num_heads // 2, -1)
    layer |= {
        "midlayer.self_attn.q_proj.weight": torch.cat((query, 0.01 * query), dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat((key, 0.01 * key), dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat((token, nothing), dim=1),
        "midlayer.self_attn.o_proj.weight": first_of_group.flatten(1) / (num_heads // 2),
        "midlayer.mlp.down_proj.weight": 0.05 * layer["midlayer.mlp.down_proj.weight"],
        "midlayer.hidden_norm.weight": torch.ones(size),
        "fc.weight": torch.cat([0.1 * token] * 3, dim=1),
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in layer.items()}, path / "model.safetensors"
    )
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (path / "config.json").write_text(json.dumps(config))


def _gemma4(**others):
    """Get a Gemma 4: full layers with wide heads, keys as values; the last two layers share."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **_COMMON,
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


def _gemma4_experts():
    """Get a Gemma 4 of experts: every layer with keys of its own, none with inputs of its own."""
    return _gemma4(
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    )


def _gemma4_assistant():
    """Get what drafts for a Gemma 4 from its keys and values, a window and all, without its own."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    text = _gemma4().config.to_dict() | {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 8 * HEAD_DIM, "num_key_value_heads": 1}},
        "num_attention_heads": 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=_COMMON["hidden_size"])
    model = Gemma4AssistantForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            parameter.data.mul_(0.9)  # its token is to weigh more than what its layers add
    return model


def _save_gemma4_assistant(path):
    """Let it pass its token on, in the words of the model that it drafts for."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    size = _COMMON["hidden_size"]
    tensors["pre_projection.weight"] = torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1)
    torch.manual_seed(0)
    words = _gemma4().get_input_embeddings().weight.data
    for name in tensors:
        if name.endswith("embed_tokens.weight") or name == "lm_head.weight":
            tensors[name] = words.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _gemma2_draft():
    """Get a Gemma 2 that drafts for the other, without its windows: vLLM drafts in one group."""
    from transformers import Gemma2ForCausalLM

    original = _gemma2()
    config = original.config
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Gemma2ForCausalLM(config)
    model.load_state_dict(original.state_dict())
    return _perturb(model)


def _gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_COMMON,
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


def _llama4():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_COMMON,
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


def _bloom():
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


def _granite_hybrid():
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_TWO_HEADS,
        num_hidden_layers=5,
        layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        num_local_experts=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
        attention_multiplier=0.125,
    )
    return GraniteMoeHybridForCausalLM(config)


def _jamba():
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


_DELTA_NETS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}


def _qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_TWO_HEADS,
        **_DELTA_NETS,
        head_dim=HEAD_DIM,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


def _qwen3_5():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **_TWO_HEADS, **_DELTA_NETS, head_dim=HEAD_DIM, linear_num_value_heads=4
    )
    return Qwen3_5ForCausalLM(config)


def _whisper():
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


_DEEPSEEK = _COMMON | {
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


def _deepseek_v2():
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
    config = DeepseekV2Config(**_DEEPSEEK | experts | widths)
    return DeepseekV2ForCausalLM(config)


def _deepseek_v3():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**_DEEPSEEK, q_lora_rank=48, kv_lora_rank=256, v_head_dim=48)
    return DeepseekV3ForCausalLM(config)


def _deepseek_v2_draft():
    """Get a DeepSeek-V2 that drafts for the other."""
    return _perturb(_deepseek_v2())


def _deepseek_v2_calm():
    """Get a DeepSeek-V2 that says mostly what the calmer Llama says."""
    llama = _llama_calmer()
    return _speaking_as(_calm(_deepseek_v2(), 0.005), llama)


def _deepseek_v3_mtp():
    """Get a calm DeepSeek-V3 whose last layer is to draft for the others."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = _DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 4}
    config = DeepseekV3Config(**sizes, q_lora_rank=48, kv_lora_rank=256, v_head_dim=48)
    return _calm(DeepseekV3ForCausalLM(config), 0.005)


def _save_mtp(path):
    """Make the last layer one that passes on its token, and reads what the target said."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    size, layer = config["hidden_size"], "model.layers.3"
    tensors |= {
        f"{layer}.enorm.weight": torch.ones(size),
        f"{layer}.hnorm.weight": torch.ones(size),
        f"{layer}.eh_proj.weight": torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1),
        f"{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{layer}.shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{layer}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def _save_qwen_mtp(path):
    """Add a layer, a copy of one of attention, that passes on its token and reads the target."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    size, layer = config["hidden_size"], "model.layers.1."
    tensors |= {
        name.replace(layer, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    tensors |= {
        "mtp.fc.weight": torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1),
        "mtp.norm.weight": tensors["model.norm.weight"].clone(),
        # Norms of this model are one more than their weights.
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(size),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(size),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}  # of each model's words
    (path / "config.json").write_text(json.dumps(config))


def _save_latent_eagle_head(path):
    """Make of the layer that would predict further tokens an EAGLE head, which is no part of it."""
    from safetensors.torch import load_file, save_file

    _save_mtp(path)
    last, head = "model.layers.3.", {}
    renamed = {"eh_proj": "fc", "shared_head.norm": "norm", "shared_head.head": "lm_head"}
    for name, tensor in load_file(path / "model.safetensors").items():
        own = name.removeprefix(last).removesuffix(".weight")
        if name.startswith(last):
            in_layer = own.startswith(("self_attn.", "mlp.", "input_", "post_attention_"))
            head[f"layers.0.{own}.weight" if in_layer else f"{renamed.get(own, own)}.weight"] = (
                tensor
            )
    save_file(head, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


def _save_processor(path):
    """Save what turns a second of audio into a tiny Whisper's inputs; its text is single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer(str(path / "vocab.json"), str(path / "merges.txt"))
    words = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    WhisperProcessor(extractor, tokenizer).save_pretrained(path)


def _save_scales(path):
    """Make a checkpoint one whose cache is float8_e4m3fn with a scale for each head of keys."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for kind, scales in (("q", 4 * [1.0]), ("k", [0.02, 0.05]), ("v", [0.01, 0.003])):
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            tensors[name] = torch.tensor(scales)[:, None, None] * (1 + layer)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "attn_head",
            "symmetric": True,
            "dynamic": False,
        },
    }
    (path / "config.json").write_text(json.dumps(config))


def _echo_of(model):
    """Get a Llama that drafts what follows from the last token alone, in the words of a model."""
    return _speaking_as(_calm(_eagle_head(), 0.0), model)


_MAKERS = {
    "llama": _llama,
    "llama_fp8_cache": _llama,
    "llama_draft": _llama_draft,
    "llama_calm": _llama_calm,
    "llama_calmer": _llama_calmer,
    "eagle_head": _eagle_head,
    "eagle3_head": lambda: _eagle_head(num_key_value_heads=2),
    "gemma2": _gemma2,
    "gemma2_draft": _gemma2_draft,
    "gemma4": _gemma4,
    "gemma4_experts": _gemma4_experts,
    "gemma4_repeating": _gemma4,
    "gemma4_assistant": _gemma4_assistant,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "bloom": _bloom,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v2_calm": _deepseek_v2_calm,
    "deepseek_v2_draft": _deepseek_v2_draft,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_mtp": _deepseek_v3_mtp,
    "latent_eagle_head": _deepseek_v3_mtp,
    "whisper": _whisper,
    "granite_hybrid": _granite_hybrid,
    "jamba": _jamba,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "granite_calm": lambda: _calm(_granite_hybrid(), 0.005),
    "granite_echo": lambda: _echo_of(_granite_hybrid()),
    "jamba_calm": lambda: _calm(_jamba(), 0.005),
    "jamba_echo": lambda: _echo_of(_jamba()),
    "qwen3_next_calm": lambda: _calm(_qwen3_next(), 0.005),
    "qwen3_next_echo": lambda: _echo_of(_qwen3_next()),
    "qwen3_next_mtp": lambda: _calm(_qwen3_next(), 0.005),
    "qwen3_5_mtp": lambda: _calm(_qwen3_5(), 0.005),
}
_FINISHERS = {
    "gemma4_assistant": _save_gemma4_assistant,
    "llama_fp8_cache": _save_scales,
    "deepseek_v3_mtp": _save_mtp,
    "qwen3_next_mtp": _save_qwen_mtp,
    "qwen3_5_mtp": _save_qwen_mtp,
    "latent_eagle_head": _save_latent_eagle_head,
    "eagle_head": _save_eagle_head,
    "eagle3_head": _save_eagle3_head,
    "whisper": _save_processor,
}
NAMES = tuple(_MAKERS)


def save(name: str, directory: Path) -> Path:
    """Make the model named `name` and save it under `directory`."""
    import torch

    torch.manual_seed(0)
    model = _MAKERS[name]().to(torch.float32).eval()
    if name in ("gemma2", "gemma2_draft", "gemma4", "gemma4_experts", "bloom", "whisper"):
        # They tie their heads to their embeddings: at full width every token predicts itself.
        model.get_input_embeddings().weight.data.mul_(0.4)
    if name == "gpt_oss":
        # Sinks start at zero in a fresh model; give them weight, so that leaving them out shows.
        for layer_name, parameter in model.named_parameters():
            if layer_name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=1.0, std=1.0)
    if name in ("qwen3_next", "qwen3_next_calm", "qwen3_next_mtp", "qwen3_5", "qwen3_5_mtp"):
        # Fresh rates of decay forget nearly all within a token; keep what shows over a prompt.
        for layer_name, parameter in model.named_parameters():
            if layer_name.endswith("A_log"):
                torch.nn.init.uniform_(parameter, -4.0, 0.0)
    path = directory / name
    model.save_pretrained(path)
    if name in _FINISHERS:
        _FINISHERS[name](path)
    return path

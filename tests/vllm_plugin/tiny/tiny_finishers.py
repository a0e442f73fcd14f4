"""What is done to the directories of some tiny models after they were saved."""

import json


def save_processor(path):
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


def save_scales(path):
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


def name_as_published(path):
    """Give a MiMo-V2's configuration the names of the published ones, which vLLM reads."""
    config = json.loads((path / "config.json").read_text())
    rotations = config["rope_parameters"]
    config |= {
        "rope_theta": rotations["full_attention"]["rope_theta"],
        "swa_rope_theta": rotations["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rotations["full_attention"]["partial_rotary_factor"],
        "hybrid_layer_pattern": [int(kind != "full_attention") for kind in config["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "sliding_window_size": config["sliding_window"],
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": config["rms_norm_eps"],
    }
    (path / "config.json").write_text(json.dumps(config))


def share_keys_and_values(path):
    """Name our class, and drop the keys and values of layers that read those of another."""
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["CharacterLlamaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    dropped = {
        f"model.layers.{reader}.self_attn.{name}_proj.weight"
        for reader in config["kv_sharing"]
        for name in ("k", "v")
    }
    tensors = load_file(path / "model.safetensors")
    assert dropped <= tensors.keys()
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


FINISHERS = {
    "character_llama": share_keys_and_values,
    "llama_fp8_cache": save_scales,
    "mimo_v2": name_as_published,
    "whisper": save_processor,
}
"""By the model's name."""

"""Tiny models that draft for others, and others that are easy to draft for."""

import json

from tests.vllm_plugin.tiny import tiny_models as served
from tests.vllm_plugin.tiny.tiny_finishers import name_as_published
from tests.vllm_plugin.tiny.tiny_models import COMMON, DEEPSEEK, HEAD_DIM


def _perturb(model):
    """Change a model a little, so that it mostly drafts what the original would say."""
    import torch

    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.dim() == 2:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
    return model


def _calm(model, share=0.02):
    """Let a model's layers say little, so that its next token follows from the last one."""
    outputs = ("o_proj", "out_proj", "down_proj", "output_linear", "feed_forward.w2")
    for name, parameter in model.named_parameters():
        if any(part in name for part in outputs):
            parameter.data.mul_(share)
    return model


def _speaking_as(model, other):
    """Give a model the words of another: its embeddings, and the head over them."""
    model.get_input_embeddings().weight.data.copy_(other.get_input_embeddings().weight)
    model.get_output_embeddings().weight.data.copy_(other.get_output_embeddings().weight)
    return model


def _echo_of(model):
    """Get a Llama that drafts what follows from the last token alone, in the words of a model."""
    return _speaking_as(_calm(_eagle_head(), 0.0), model)


def _llama_draft():
    """Get a Llama that drafts for the other, with twice its heads of keys, each of them twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = _perturb(served.llama()).state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (-1, HEAD_DIM))
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    sizes = COMMON | {"num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, head_dim=HEAD_DIM))
    model.load_state_dict(weights)
    return model


def _llama_calm():
    return _calm(served.llama())


def _llama_calmer():
    return _calm(served.llama(), 0.005)


def _gemma2_draft():
    """Get a Gemma 2 that drafts for the other, without its windows: vLLM drafts in one group."""
    from transformers import Gemma2ForCausalLM

    original = served.gemma2()
    config = original.config
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Gemma2ForCausalLM(config)
    model.load_state_dict(original.state_dict())
    return _perturb(model)


def _deepseek_v2_draft():
    """Get a DeepSeek-V2 that drafts for the other."""
    return _perturb(served.deepseek_v2())


def _deepseek_v2_calm():
    """Get a DeepSeek-V2 that says mostly what the calmer Llama says."""
    llama = _llama_calmer()
    return _speaking_as(_calm(served.deepseek_v2(), 0.005), llama)


def _eagle_head(num_key_value_heads=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = COMMON | {"num_key_value_heads": num_key_value_heads}
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
    size = COMMON["hidden_size"]
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
    size, num_heads = COMMON["hidden_size"], COMMON["num_attention_heads"]
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


def _deepseek_v3_mtp():
    """Get a calm DeepSeek-V3 whose last layer is to draft for the others."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 4}
    config = DeepseekV3Config(**sizes, q_lora_rank=48, kv_lora_rank=256, v_head_dim=48)
    return _calm(DeepseekV3ForCausalLM(config), 0.005)


def _glm4_moe_mtp():
    """Get a calm GLM-4.5 whose last layer, one of experts as that before, is to draft for all."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=HEAD_DIM,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return _calm(Glm4MoeForCausalLM(config), 0.005)


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


def _save_mimo_v2_mtp(path):
    """Add a layer, of the window's attention, that passes on its token and reads the target."""
    import torch
    from safetensors.torch import load_file, save_file

    name_as_published(path)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    size, drafting = config["hidden_size"], "model.mtp.layers.0."
    # That layer's attention, and the multilayer perceptron of the first: experts draft nothing.
    copied = {"model.layers.1.self_attn.": "self_attn.", "model.layers.0.mlp.": "mlp."}
    tensors |= {
        name.replace(layer, drafting + own): tensor.clone()
        for name, tensor in tensors.items()
        for layer, own in copied.items()
        if name.startswith(layer)
    }
    norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    tensors |= {f"{drafting}{norm}.weight": torch.ones(size) for norm in norms}
    passed_on = torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1)
    tensors[f"{drafting}eh_proj.weight"] = passed_on
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _save_nemotron_mtp(path):
    """Add a layer, a copy of that of attention, that passes on its token and reads the target."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    size, (layer,) = (
        config["hidden_size"],
        {name.split("mixer")[0] for name in tensors if "mixer.k_proj" in name},
    )
    tensors |= {
        name.replace(layer, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    tensors |= {
        f"mtp.layers.0.{norm}.weight": torch.ones(size)
        for norm in ("enorm", "hnorm", "final_layernorm")
    }
    passed_on = torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1)
    tensors["mtp.layers.0.eh_proj.weight"] = passed_on
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention"]}
    (path / "config.json").write_text(json.dumps(config))


def _gemma4_assistant():
    """Get what drafts for a Gemma 4 from its keys and values, a window and all, without its own."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    text = served.gemma4().config.to_dict() | {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 8 * HEAD_DIM, "num_key_value_heads": 1}},
        "num_attention_heads": 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=COMMON["hidden_size"])
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
    size = COMMON["hidden_size"]
    tensors["pre_projection.weight"] = torch.cat((torch.eye(size), 0.01 * torch.eye(size)), dim=1)
    torch.manual_seed(0)
    words = served.gemma4().get_input_embeddings().weight.data
    for name in tensors:
        if name.endswith("embed_tokens.weight") or name == "lm_head.weight":
            tensors[name] = words.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


MAKERS = {
    "llama_draft": _llama_draft,
    "llama_calm": _llama_calm,
    "llama_calmer": _llama_calmer,
    "eagle_head": _eagle_head,
    "eagle3_head": lambda: _eagle_head(num_key_value_heads=2),
    "gemma2_draft": _gemma2_draft,
    "gemma4_repeating": served.gemma4,
    "gemma4_assistant": _gemma4_assistant,
    "deepseek_v2_calm": _deepseek_v2_calm,
    "deepseek_v2_draft": _deepseek_v2_draft,
    "deepseek_v3_mtp": _deepseek_v3_mtp,
    "glm4_moe_mtp": _glm4_moe_mtp,
    "latent_eagle_head": _deepseek_v3_mtp,
    "granite_calm": lambda: _calm(served.granite_hybrid(), 0.005),
    "granite_echo": lambda: _echo_of(served.granite_hybrid()),
    "jamba_calm": lambda: _calm(served.jamba(), 0.005),
    "jamba_echo": lambda: _echo_of(served.jamba()),
    "qwen3_next_calm": lambda: _calm(served.qwen3_next(), 0.005),
    "qwen3_next_echo": lambda: _echo_of(served.qwen3_next()),
    "lfm2_calm": lambda: _calm(served.lfm2(), 0.05),
    "lfm2_echo": lambda: _echo_of(served.lfm2()),
    "mimo_v2_mtp": lambda: _calm(served.mimo_v2(), 0.005),
    "nemotron_h_mtp": lambda: _calm(served.nemotron_h(), 0.005),
    "qwen3_next_mtp": lambda: _calm(served.qwen3_next(), 0.005),
    "qwen3_5_mtp": lambda: _calm(served.qwen3_5(), 0.005),
}
"""By name."""

FINISHERS = {
    "gemma4_assistant": _save_gemma4_assistant,
    "deepseek_v3_mtp": _save_mtp,
    "glm4_moe_mtp": _save_mtp,
    "mimo_v2_mtp": _save_mimo_v2_mtp,
    "nemotron_h_mtp": _save_nemotron_mtp,
    "qwen3_next_mtp": _save_qwen_mtp,
    "qwen3_5_mtp": _save_qwen_mtp,
    "latent_eagle_head": _save_latent_eagle_head,
    "eagle_head": _save_eagle_head,
    "eagle3_head": _save_eagle3_head,
}
"""What is done to the directory of some, by name."""

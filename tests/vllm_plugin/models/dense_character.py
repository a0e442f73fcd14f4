"""character.ai's design as a dense model in plain PyTorch: the reference for the engine's.

It reads a tiny checkpoint with its own eyes and computes every token of a sequence anew.
"""

import json

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu


class DenseCharacter:
    """The model of a directory, in float32."""

    def __init__(self, path):
        self.config = json.loads((path / "config.json").read_text())
        self.weights = load_file(path / "model.safetensors")
        self.head_dim = self.config["head_dim"]
        self.theta = self.config["rope_parameters"]["rope_theta"]

    def project(self, hidden, name):
        return linear(hidden, self.weights[f"model.{name}.weight"])

    def norm(self, hidden, name):
        mean = hidden.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return hidden * mean.rsqrt() * self.weights[f"model.{name}.weight"]

    def rotated(self, heads):
        """Rotate [tokens, heads, head_dim] by the place of each token."""
        half = self.head_dim // 2
        rates = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def is_seen(self, layer, num_tokens):
        """Which key each query reads, [queries, keys]."""
        ages = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
        has_window = self.config["layer_types"][layer] == "sliding_attention"
        return (ages >= 0) & (ages < (self.config["sliding_window"] if has_window else num_tokens))

    def attend(self, hidden, layer, stored):
        """Attend in one layer; `stored` collects the keys and values of layers with their own."""
        prefix, shape = f"layers.{layer}.self_attn", (len(hidden), -1, self.head_dim)
        q = self.rotated(self.project(hidden, f"{prefix}.q_proj").view(shape))
        source = self.config["kv_sharing"].get(str(layer))
        if source is None:
            k = self.rotated(self.project(hidden, f"{prefix}.k_proj").view(shape))
            stored[layer] = k, self.project(hidden, f"{prefix}.v_proj").view(shape)
        k, v = stored[layer if source is None else source]  # of one head
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * self.head_dim**-0.5
        scores = scores.masked_fill(~self.is_seen(layer, len(hidden)), float("-inf"))
        heads = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v[:, 0])
        return self.project(heads.flatten(1), f"{prefix}.o_proj")

    def logits(self, tokens, num_last):
        """Get the logits behind each of the last tokens, [num_last, vocabulary]."""
        hidden, stored = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)], {}
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            inner = self.norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self.attend(inner, layer, stored)
            inner = self.norm(hidden, f"{name}.post_attention_layernorm")
            gate = silu(self.project(inner, f"{name}.mlp.gate_proj"))
            inner = gate * self.project(inner, f"{name}.mlp.up_proj")
            hidden = hidden + self.project(inner, f"{name}.mlp.down_proj")
        return linear(self.norm(hidden[-num_last:], "norm"), self.weights["lm_head.weight"])

    def answer(self, prompt, answer):
        """Choose the likeliest token behind a prompt and behind each token of an answer but one.

        Up to the first token that differs, these are the tokens that this model would generate.
        """
        logits = self.logits([*prompt, *answer[:-1]], len(answer))
        top = logits.log_softmax(-1).topk(5)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        logprobs = [dict(zip(map(str, tokens), values, strict=True)) for tokens, values in rows]
        return {"prompt": prompt, "tokens": top.indices[:, 0].tolist(), "logprobs": logprobs}


def dense_answers(path, result):
    """Get the answers of the dense model of a directory to the prompts of an engine's result."""
    assert "error" not in result, result["error"][-4000:]
    model, outputs = DenseCharacter(path), result["outputs"]
    return {"outputs": [model.answer(each["prompt"], each["tokens"]) for each in outputs]}

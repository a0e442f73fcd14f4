"""Token budgets in dense models of transformers: the reference for the engine's, and for quality.

A model runs twice. The first run reads a prompt with full attention, and each layer with a budget
chooses the tokens that each of its KV heads keeps. The second run reads the tokens after the
prompt, all at once: a layer sees what it kept of the prompt, and the tokens before in this run.
"""

import torch
from transformers import AttentionInterface

NAME = "dense_token_budgets"


def kept_tokens(weights, num_kept, *, recent_tokens, sink_tokens, pool_tokens):
    """Choose the tokens that a KV head keeps, in ascending order.

    Args:
        weights: Attention weights of a prompt's last queries, [rows, prompt tokens].
        num_kept: Number of tokens to keep.
        recent_tokens: Number of last tokens that are kept.
        sink_tokens: Number of first tokens that are kept.
        pool_tokens: Number of neighbours of which the best one counts.
    """
    sums = weights.sum(0).tolist()
    num_tokens, reach = len(sums), pool_tokens // 2
    old = sums[: num_tokens - recent_tokens]
    pooled = [max(old[max(0, at - reach) : at + reach + 1]) for at in range(len(old))]
    kept = {*range(sink_tokens), *range(len(old), num_tokens)}
    by_score = sorted(range(len(old)), key=lambda at: (-pooled[at], at))
    kept |= set([at for at in by_score if at not in kept][: num_kept - len(kept)])
    return sorted(kept)


def num_kept_tokens(prompt_tokens, budget_tokens, page_tokens=16):
    """Count the tokens that are kept of a prompt if whole pages are dropped."""
    num_kept = prompt_tokens
    while num_kept > budget_tokens:
        num_kept -= page_tokens
    return num_kept


class DenseBudgets:
    """A model with budgets.

    Attributes:
        kept: Layer -> tokens that each KV head keeps of the last prompt.
    """

    def __init__(self, model, *, recent_tokens, sink_tokens, pool_tokens):
        """Take over a model's attention.

        Args:
            model: Model of transformers for causal language modelling.
            recent_tokens: As in `kept_tokens`; their queries choose.
            sink_tokens: As in `kept_tokens`.
            pool_tokens: As in `kept_tokens`.
        """
        self.model = model.eval()
        self.options = {
            "recent_tokens": recent_tokens,
            "sink_tokens": sink_tokens,
            "pool_tokens": pool_tokens,
        }
        self.prompt, self.stored, self.kept, self.prompt_tokens = {}, {}, {}, 0
        self.reads_prompt = True
        AttentionInterface.register(NAME, self._attend)
        model.config._attn_implementation = NAME

    def _attend(self, module, query, key, value, _mask, scaling=None, softcap=None, **named):
        layer, window = module.layer_idx, named.get("sliding_window")
        q, k, v = query[0], key[0], value[0]  # [heads, tokens, head_dim]
        num_queries, group = q.shape[1], q.shape[0] // k.shape[0]
        positions = self.prompt_tokens + torch.arange(num_queries).expand(len(k), -1)
        if not self.reads_prompt:
            old_k, old_v, old_positions = self.stored[layer]
            k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
            positions = torch.cat([old_positions, positions], 1)
        ages = positions[:, None, -num_queries:, None] - positions[:, None, None, :]
        is_read = ages >= 0 if not window else (ages >= 0) & (ages < window)
        scale = module.head_dim**-0.5 if scaling is None else scaling
        products = torch.einsum("hgqd,hkd->hgqk", q.unflatten(0, (-1, group)), k) * scale
        if softcap is not None:
            products = softcap * torch.tanh(products / softcap)
        weights = products.masked_fill(~is_read, float("-inf")).softmax(-1)
        out = torch.einsum("hgqk,hkd->hgqd", weights, v).flatten(0, 1)
        if self.reads_prompt:
            last = weights[:, :, -self.options["recent_tokens"] :].flatten(1, 2)
            self.prompt[layer] = last.clone(), k, v, positions
        return out.transpose(0, 1)[None], None

    @torch.inference_mode()
    def read(self, prompt):
        """Read a prompt with full attention, and get the logits behind it, [1, vocabulary]."""
        self.prompt, self.reads_prompt, self.prompt_tokens = {}, True, 0
        tokens = torch.tensor([prompt])
        logits = self.model(tokens, use_cache=False, logits_to_keep=1).logits[0]
        self.prompt_tokens = len(prompt)
        return logits

    def choose(self, weights, num_kept):
        """Choose the tokens of each KV head, from weights [num_kv_heads, rows, prompt tokens]."""
        return [kept_tokens(rows, num_kept, **self.options) for rows in weights]

    def keep(self, layers):
        """Keep of the prompt what each layer's budget lets it keep; None keeps it all."""
        self.kept, self.stored = {}, {}
        for layer, (weights, k, v, positions) in self.prompt.items():
            budget = layers[layer]
            if budget is None or self.prompt_tokens <= budget:
                self.stored[layer] = k, v, positions
                continue
            num_kept = num_kept_tokens(self.prompt_tokens, budget)
            self.kept[layer] = self.choose(weights, num_kept)
            index = torch.tensor(self.kept[layer])
            self.stored[layer] = (
                torch.take_along_dim(k, index[..., None], 1),
                torch.take_along_dim(v, index[..., None], 1),
                torch.take_along_dim(positions, index, 1),
            )

    @torch.inference_mode()
    def follow(self, tokens):
        """Get the logits behind each token after the prompt, [num_tokens, vocabulary]."""
        self.reads_prompt = False
        places = self.prompt_tokens + torch.arange(len(tokens))
        given = {"position_ids": places[None], "use_cache": False}
        return self.model(torch.tensor([tokens]), **given).logits[0]

    def answer(self, prompt, layers, answer):
        """Choose the likeliest token behind a prompt and behind each token of an answer but one.

        Up to the first token that differs, these are the tokens that this model would generate.
        """
        logits = self.read(prompt)
        self.keep(layers)
        if len(answer) > 1:
            logits = torch.cat([logits, self.follow(answer[:-1])])
        top = logits.log_softmax(-1).topk(5)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        logprobs = [dict(zip(map(str, tokens), values, strict=True)) for tokens, values in rows]
        return {"prompt": prompt, "tokens": top.indices[:, 0].tolist(), "logprobs": logprobs}


def dense_answers(path, budgets, result):
    """Get the answers of the dense model of a directory to the prompts of an engine's result.

    Args:
        path: Directory of the model.
        budgets: The field `kv_token_budgets` of its configuration.
        result: The engine's result.
    """
    from transformers import AutoModelForCausalLM

    assert "error" not in result, result["error"][-4000:]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    layers, options = budgets["layers"], budgets.copy()
    del options["layers"]
    dense = DenseBudgets(model, **options)
    outputs = result["outputs"]
    return {"outputs": [dense.answer(one["prompt"], layers, one["tokens"]) for one in outputs]}

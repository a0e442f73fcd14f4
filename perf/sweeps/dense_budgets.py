"""Token budgets in dense models of transformers: the reference for the engine's, and for quality.

A model reads a prompt with full attention, and each layer with a budget chooses the tokens that
each of its KV heads keeps. Then the model reads the tokens after the prompt, all at once: a layer
sees what it kept, and the tokens before in this run. With `output_tokens` a run ends after so many
tokens, and the layers choose again among all tokens that they still have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

NAME = "dense_token_budgets"


def kept_tokens(
    weights: torch.Tensor,
    num_kept: int,
    *,
    recent_tokens: int,
    sink_tokens: int,
    pool_tokens: int,
) -> list[int]:
    """Choose the tokens that a KV head keeps, in ascending order.

    Args:
        weights: Attention weights of the last queries, [rows, tokens].
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


def num_kept_tokens(num_tokens: int, budget_tokens: int, page_tokens: int = 16) -> int:
    """Count the tokens that are kept if whole pages are dropped."""
    num_kept = num_tokens
    while num_kept > budget_tokens:
        num_kept -= page_tokens
    return num_kept


@dataclass(frozen=True)
class Held:
    """The tokens that a layer has, and what its last queries read.

    Attributes:
        weights: Attention weights of the last queries, [num_kv_heads, rows, tokens].
        k: Keys, [num_kv_heads, tokens, head_dim].
        v: Values, as k.
        positions: Positions of the tokens, i64[num_kv_heads, tokens].
    """

    weights: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor


class DenseBudgets:
    """A model with budgets.

    Attributes:
        kept: Layer -> tokens that each KV head kept of those that it had, choice by choice.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        *,
        recent_tokens: int,
        sink_tokens: int,
        pool_tokens: int,
        output_tokens: int | None = None,
    ) -> None:
        """Take over a model's attention.

        Args:
            model: Model of transformers for causal language modelling.
            recent_tokens: As in `kept_tokens`; their queries choose.
            sink_tokens: As in `kept_tokens`.
            pool_tokens: As in `kept_tokens`.
            output_tokens: Number of tokens after which layers choose again; None means never.
        """
        self.model = model.eval()
        self.options = {
            "recent_tokens": recent_tokens,
            "sink_tokens": sink_tokens,
            "pool_tokens": pool_tokens,
        }
        self.output_tokens = output_tokens
        self.layers: Sequence[int | None] = ()
        self.prompt: dict[int, Held] = {}
        self.held: dict[int, Held] = {}
        self.kept: dict[int, list[list[list[int]]]] = {}
        self.prompt_tokens = self.num_tokens = 0
        AttentionInterface.register(NAME, self._attend)
        model.config._attn_implementation = NAME

    def _attend(
        self,
        module: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: object,
        scaling: float | None = None,
        softcap: float | None = None,
        **named: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, None]:
        layer, window = module.layer_idx, named.get("sliding_window")
        q, k, v = query[0], key[0], value[0]  # [heads, tokens, head_dim]
        num_queries, group = q.shape[1], q.shape[0] // k.shape[0]
        positions = self.num_tokens + torch.arange(num_queries).expand(len(k), -1)
        if layer in self.held:
            before = self.held[layer]
            k, v = torch.cat([before.k, k], 1), torch.cat([before.v, v], 1)
            positions = torch.cat([before.positions, positions], 1)
        ages = positions[:, None, -num_queries:, None] - positions[:, None, None, :]
        is_read = ages >= 0 if not window else (ages >= 0) & (ages < window)
        scale = module.head_dim**-0.5 if scaling is None else scaling
        products = torch.einsum("hgqd,hkd->hgqk", q.unflatten(0, (-1, group)), k) * scale
        if softcap is not None:
            products = softcap * torch.tanh(products / softcap)
        weights = products.masked_fill(~is_read, float("-inf")).softmax(-1)
        out = torch.einsum("hgqk,hkd->hgqd", weights, v).flatten(0, 1)
        last = weights[:, :, -self.options["recent_tokens"] :].flatten(1, 2)
        self.held[layer] = Held(last.clone(), k, v, positions)
        return out.transpose(0, 1)[None], None

    @torch.inference_mode()
    def read(self, prompt: Sequence[int]) -> torch.Tensor:
        """Read a prompt with full attention, and get the logits behind it, [1, vocabulary]."""
        self.held, self.num_tokens = {}, 0
        tokens = torch.tensor([list(prompt)])
        logits = self.model(tokens, use_cache=False, logits_to_keep=1).logits[0]
        self.prompt, self.prompt_tokens = self.held, len(prompt)
        return logits

    def choose(self, weights: torch.Tensor, num_kept: int) -> list[list[int]]:
        """Choose the tokens of each KV head, from weights [num_kv_heads, rows, tokens]."""
        return [kept_tokens(rows, num_kept, **self.options) for rows in weights]

    def keep(self, layers: Sequence[int | None]) -> None:
        """Keep of the prompt what each layer's budget lets it keep; None keeps it all."""
        self.layers, self.kept = layers, {}
        self.held, self.num_tokens = dict(self.prompt), self.prompt_tokens
        self._choose_all()

    def _choose_all(self) -> None:
        for layer, held in self.held.items():
            budget = self.layers[layer]
            if budget is None or self.num_tokens <= budget:
                continue
            num_kept = num_kept_tokens(self.num_tokens, budget)
            if num_kept >= held.k.shape[1]:
                continue
            kept = self.choose(held.weights, num_kept)
            self.kept.setdefault(layer, []).append(kept)
            index = torch.tensor(kept)
            self.held[layer] = Held(
                held.weights,
                torch.take_along_dim(held.k, index[..., None], 1),
                torch.take_along_dim(held.v, index[..., None], 1),
                torch.take_along_dim(held.positions, index, 1),
            )

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int]) -> torch.Tensor:
        """Get the logits behind each token after the prompt, [num_tokens, vocabulary].

        It is called once after `keep`.
        """
        found: list[torch.Tensor] = []
        run_tokens = self.output_tokens or len(tokens)
        for start in range(0, len(tokens), run_tokens):
            run = list(tokens[start : start + run_tokens])
            places = self.num_tokens + torch.arange(len(run))
            given = {"position_ids": places[None], "use_cache": False}
            found.append(self.model(torch.tensor([run]), **given).logits[0])
            self.num_tokens += len(run)
            if len(run) == self.output_tokens:
                self._choose_all()
        return torch.cat(found)

    def answer(
        self, prompt: Sequence[int], layers: Sequence[int | None], answer: Sequence[int]
    ) -> dict[str, Any]:
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

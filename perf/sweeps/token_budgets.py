"""Measure the loss of Gemma 3 270M with token budgets, compared with the full cache.

    python -m perf.sweeps.token_budgets [--windows N] [--prompt N] [--tokens N] [--again N]

A window of text is a prompt and the tokens after it. The prompt is read with full attention. Then
the layers with full attention keep a share of it, on average over these layers, and the loss of the
tokens after it is measured. Layers with a window (512 tokens) keep what they always keep.
Everything is float32. The text is Python's language reference, which comes with Python. No speed is
measured. With `--again`, these layers choose again after so many tokens behind the prompt
(`output_tokens`), among what they still have.

Each share is kept in three ways:

- "pyramid": budgets that fall from layer to layer, and scores of the last queries;
- "equal": the same budget for each layer, and scores;
- "last": the same budget, of the first tokens and the last ones, without scores.

The columns are:

- the tokens that each layer may keep; whole pages of 16 are dropped;
- the loss in nats per token;
- its increase over the full cache, and the standard error of this increase over windows;
- "same", the share of tokens whose likeliest successor is unchanged.

Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms).
"""

import argparse
import platform
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jenga.demo.weights import gemma3_270m_directory
from jenga.spec import Layer, TokenBudget
from jenga_kernels.attention.token_choice import choose_tokens
from perf.sweeps.dense_budgets import DenseBudgets

RECENT_TOKENS, SINK_TOKENS, POOL_TOKENS = 32, 4, 7
STEEPNESS = 4
"""Divisor of the mean budget that gives the last layer's."""

SHARES = (2, 4, 8)
"""Divisors of the prompt that give the mean budget."""


class ChoosingModel(DenseBudgets):
    """A model whose layers choose by the operation that the engine uses, or by place alone."""

    has_scores = True

    def choose(self, weights: torch.Tensor, num_kept: int) -> list[list[int]]:
        """Choose the tokens of each KV head."""
        scores = weights.sum(1)[None].contiguous()
        if not self.has_scores:
            scores = torch.arange(scores.shape[2]).float().expand_as(scores).contiguous()
        kept = choose_tokens(
            scores,
            torch.tensor([scores.shape[2]], dtype=torch.int32),
            torch.tensor([num_kept], dtype=torch.int32),
            max_kept=num_kept,
            **self.options,
        )
        return kept[0].tolist()


def pyramid(mean_tokens: int, num_layers: int, prompt_tokens: int) -> list[int]:
    """Compute budgets that fall from layer to layer, as in PyramidKV."""
    return [
        TokenBudget(
            name="budget",
            layers=(Layer(name="0", slot_bytes=1),),
            mean_budget_tokens=mean_tokens,
            recent_tokens=RECENT_TOKENS,
            steepness=STEEPNESS,
            layer_index=index,
            num_layers=num_layers,
        ).budget_tokens(prompt_tokens)
        for index in range(num_layers)
    ]


def cases(prompt_tokens: int, num_full: int) -> list[tuple[str, bool, list[int]]]:
    """List what is compared: a name, whether scores choose, and the budget of each full layer."""
    found: list[tuple[str, bool, list[int]]] = []
    for share in SHARES:
        mean_tokens = prompt_tokens // share
        equal = [mean_tokens] * num_full
        found += [
            (f"1/{share} pyramid", True, pyramid(mean_tokens, num_full, prompt_tokens)),
            (f"1/{share} equal", True, equal),
            (f"1/{share} last", False, equal),
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--windows", type=int, default=8, help="number of windows of text (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt", type=int, default=1024, help="tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens after a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--again", type=int, help="tokens after which layers choose again (default: never)"
    )
    options = parser.parse_args(arguments)
    directory = gemma3_270m_directory("float32")
    model = AutoModelForCausalLM.from_pretrained(directory)
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    begin, body = tokens[0], tokens[1:]
    window_tokens = options.prompt + options.tokens - 1
    kinds = model.config.layer_types
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    dense = ChoosingModel(
        model,
        recent_tokens=RECENT_TOKENS,
        sink_tokens=SINK_TOKENS,
        pool_tokens=POOL_TOKENS,
        output_tokens=options.again,
    )
    compared = [("full cache", True, [None] * len(full)), *cases(options.prompt, len(full))]
    losses = torch.zeros(len(compared), options.windows)
    likeliest = torch.zeros(len(compared), options.windows, options.tokens - 1, dtype=torch.long)
    for window in range(options.windows):
        start = window * window_tokens
        part = [begin, *body[start : start + window_tokens]]
        prompt, after = part[: options.prompt], part[options.prompt :]
        dense.read(prompt)
        for number, (_, has_scores, budgets) in enumerate(compared):
            layers = [None] * len(kinds)
            for index, budget in zip(full, budgets, strict=True):
                layers[index] = budget
            dense.has_scores = has_scores
            dense.keep(layers)
            logits = dense.follow(after)[:-1]
            successors = torch.tensor(after[1:])[:, None]
            losses[number, window] = -logits.log_softmax(-1).gather(-1, successors).mean()
            likeliest[number, window] = logits.argmax(-1)
    print(
        f"Gemma 3 270M, {options.windows} windows of {options.prompt} tokens and {options.tokens} "
        f"after them; layers with full attention: {full}"
    )
    if options.again:
        print(f"layers choose again after every {options.again} tokens")
    print(f"Python {platform.python_version()}'s language reference, torch {torch.__version__}")
    print()
    print(f"{'kept':<16}{'tokens':>20}{'loss':>10}{'more':>10}{'+-':>9}{'same':>9}")
    for number, (name, _, budgets) in enumerate(compared):
        more = losses[number] - losses[0]
        error = more.std() / options.windows**0.5
        same = 100 * (likeliest[number] == likeliest[0]).float().mean()
        shown = "all" if number == 0 else ", ".join(map(str, budgets))
        print(
            f"{name:<16}{shown:>20}{losses[number].mean():>10.4f}{more.mean():>10.4f}"
            f"{error:>9.4f}{same:>8.2f}%"
        )


if __name__ == "__main__":
    main()

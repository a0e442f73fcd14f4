"""Answers of a dense model with token budgets to the prompts of an engine."""

import torch

from perf.sweeps.dense_budgets import DenseBudgets


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

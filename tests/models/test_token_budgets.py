"""Budgets of tokens from a model's configuration, for plans and for the engine."""

import pytest

from jenga.models.config import Config
from jenga.models.reader import read_config
from jenga.models.readers.token_budgets import token_budgets
from jenga.planning.planner import plan
from jenga.policies import RequestFacts
from jenga.spec import FullAttention, SlidingWindow, TokenBudget

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
SHARED = GEMMA | {
    "architectures": ["CharacterLlamaForCausalLM"],
    "model_type": "llama",
    "layer_types": ["full_attention"] * 4,
    "kv_sharing": {"1": 0},
}


def read(fields, layers, **others):
    fields = fields | {"kv_token_budgets": {"layers": layers} | others}
    return read_config(Config(fields, source="config.json"), name="model").layer_types


def test_layers_of_one_budget_are_one_layer_type():
    full, first, second = read(LLAMA, [512, None, 256, 512])

    assert (type(full), [layer.name for layer in full.layers]) == (FullAttention, ["layers.1"])
    assert [layer.name for layer in first.layers] == ["layers.0", "layers.3"]
    assert [layer.name for layer in second.layers] == ["layers.2"]
    assert [each.budget_tokens(10_000) for each in (first, second)] == [512, 256]
    assert [each.budget_tokens(300) for each in (first, second)] == [300, 256]


def test_windows_stay_beside_budgets():
    sliding, budget = read(GEMMA, [None, None, None, 1024])

    assert isinstance(sliding, SlidingWindow)
    assert isinstance(budget, TokenBudget)


def test_a_plan_counts_what_is_kept():
    fields = LLAMA | {"kv_token_budgets": {"layers": [512, 384, 256, 128]}}
    model = read_config(Config(fields, source="config.json"), name="model")

    geometry = plan(model)

    tables = {table.name: table for table in geometry.page_tables}
    slots = {name: len(table.layer_type.needed_slots(8192)) for name, table in tables.items()}
    assert sorted(slots.values()) == [128, 256, 384, 512]


def test_layers_that_choose_again_hold_a_word_for_each_head_of_a_slot():
    full, growing = read(LLAMA, [512, None, 512, 512], output_tokens=128)
    again = read(LLAMA, [512, None, 512, 512], output_tokens=None)

    assert (growing.output_tokens, again[1].output_tokens) == (128, None)
    slot_bytes = 2 * 2 * 64 * 2
    assert [layer.slot_bytes for layer in full.layers] == [slot_bytes]
    assert [layer.slot_bytes for layer in growing.layers] == [slot_bytes + 2 * 4] * 3
    assert [layer.slot_bytes for layer in again[1].layers] == [slot_bytes] * 3


def test_a_plan_counts_the_tokens_until_the_next_choice():
    _, growing = read(LLAMA, [512, None, 512, 512], output_tokens=128)
    facts = RequestFacts(prompt_tokens=100)

    assert growing.keeps == "about 512 tokens, and 128 more at most"
    assert growing.policy(16).peak_slots(facts, 10_000, 1) == 512 + 128


def test_a_model_without_the_field_has_no_budgets():
    assert token_budgets(Config(LLAMA, source="config.json")) is None


def test_defaults_are_those_of_the_documentation():
    budgets = token_budgets(
        Config(LLAMA | {"kv_token_budgets": {"layers": [64, None, 64, 99]}}, source="config.json")
    )

    assert (budgets.recent_tokens, budgets.sink_tokens, budgets.pool_tokens) == (32, 4, 7)
    assert budgets.output_tokens is None
    assert budgets.layer_tokens == (64, None, 64, 99)


@pytest.mark.parametrize(
    ("fields", "budgets", "words"),
    [
        (LLAMA, {"layers": [64, 64, 64]}, "'layers' must be a list of 4 items"),
        (LLAMA, {"layers": [64, 64, 64, 36]}, "above the 36 that are always kept"),
        (LLAMA, {"layers": [64, 64, 64, 0]}, "'layers' must be"),
        (LLAMA, {"layers": [64, 64, 64, True]}, "'layers' must be"),
        (LLAMA, {"layers": [64, 64, 64, "64"]}, "'layers' must be"),
        (LLAMA, {"layers": [None] * 4}, "not all of them null"),
        (LLAMA, {}, "'layers' must be .*got nothing"),
        (LLAMA, {"layers": [64] * 4, "pool_tokens": 2}, "'pool_tokens' must be odd"),
        (LLAMA, {"layers": [64] * 4, "sink_tokens": -1}, "'sink_tokens' must be"),
        (LLAMA, {"layers": [64] * 4, "recent_tokens": 0}, "'recent_tokens' must be"),
        (LLAMA, {"layers": [64] * 4, "output_tokens": 31}, "null, or at least the 32 recent_tok"),
        (LLAMA, {"layers": [64] * 4, "output_tokens": 0}, "'output_tokens' must be"),
        (LLAMA, {"layers": [64] * 4, "output_tokens": True}, "'output_tokens' must be"),
        (LLAMA, {"layers": [64] * 4, "output_tokens": "64"}, "'output_tokens' must be"),
        (LLAMA, {"layers": [64] * 4, "mean": 1}, "without \\['mean'\\]"),
        (LLAMA, 64, "'kv_token_budgets' must be an object"),
        (GEMMA, {"layers": [64, None, None, 64]}, "null for layers.0: a layer with a budget"),
        (SHARED, {"layers": [64, None, 64, 64]}, "null for layers.0: a layer with a budget"),
        (SHARED, {"layers": [None, 64, 64, 64]}, "null for layers.1: a layer with a budget"),
    ],
)
def test_a_wrong_budget_is_refused_by_name(fields, budgets, words):
    fields = fields | {"kv_token_budgets": budgets}

    with pytest.raises(ValueError, match=words):
        read_config(Config(fields, source="config.json"), name="model")

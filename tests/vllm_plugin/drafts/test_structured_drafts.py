"""Structured outputs in the real engine, with drafts that may break the form.

A grammar rejects drafted tokens after they got their slots, and those before them are kept. What is
generated, and how many drafts are accepted, must be as in stock vLLM.
"""

import json
import re
from itertools import product
from string import ascii_lowercase

import pytest

from tests.vllm_plugin.conftest import assert_same_generation, tokens_lost_to_a_head
from tests.vllm_plugin.drafts.test_speculation import JENGA, MTP, PROMPTS, by_draft
from tests.vllm_plugin.tiny.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.vllm

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 24},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "number", "kind"],
    "additionalProperties": False,
}
CHOICES = ["a small one", "a large one", "none of them"]
PATTERN = "[a-z]{24,40}-[0-9]{2}"
FORMS = [{"json": SCHEMA}, {"choice": CHOICES}, {"regex": PATTERN}, None]
"""Of each prompt. Drafts of the last one break no form."""
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Get the directory of a tokenizer whose tokens are printable characters and pairs of them."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<begin>", "<end>", "<unknown>"]
    space = "\u0120"  # as byte-level tokenizers write it
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), space]
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    pairs = pairs[: VOCAB_SIZE - len(names) - len(characters)]
    words = {word: number for number, word in enumerate([*names, *characters, *pairs])}
    made = Tokenizer(BPE(words, [tuple(pair) for pair in pairs]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    pad, begin, end, unknown = names
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end, unk_token=unknown
    ).save_pretrained(folder)
    return folder


def check_forms(texts):
    """Check that each answer has the form that was asked for."""
    in_json, chosen, matched, _ = texts
    value = json.loads(in_json)
    assert list(value) == list(SCHEMA["properties"])
    assert 12 <= len(value["name"]) <= 24
    assert 0 <= value["number"] <= 999
    assert value["kind"] in ("small", "large")
    assert chosen in CHOICES
    assert re.fullmatch(PATTERN, matched)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "method", "head"),
    [
        pytest.param("llama_calmer", "eagle", "eagle_head", id="eagle"),
        pytest.param("glm4_moe_mtp", "mtp", None, id="mtp"),
    ],
)
def test_answers_in_a_form_are_those_of_stock_vllm_whoever_drafts(
    target, method, head, tiny_model, tokenizer, run_engine
):
    drafts = by_draft(tiny_model(head), method=method) if head else MTP
    options = drafts | {
        "tokenizer": str(tokenizer),
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    job = {
        "forms": FORMS,
        "max_tokens": MAX_TOKENS,
        "script": "structured_process.py",
        "by_references": True,
    }

    stock = run_engine(tiny_model(target), PROMPTS, rounds=1, options=options, **job)
    ours = run_engine(
        tiny_model(target),
        PROMPTS,
        rounds=2,
        options=options | JENGA | {"enable_prefix_caching": True},
        fill_arena=True,
        **job,
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * 2})
    assert ours["texts"] == stock["texts"] * 2
    check_forms(stock["texts"])
    assert ours["drafts"] == stock["drafts"] * 2
    for form, (drafted, accepted) in zip(FORMS, stock["drafts"], strict=True):
        is_short = form is not None and "choice" in form
        assert is_short or 0 < accepted < drafted
    assert ours["request_tokens"] == {}
    hits = [output["cached_tokens"] for output in ours["outputs"][len(PROMPTS) :]]
    lost = tokens_lost_to_a_head()
    assert hits == [max(0, (len(prompt) - 1) // 16 * 16 - lost) for prompt in PROMPTS]

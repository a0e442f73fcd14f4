import json
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import ENVIRONMENT
from tests.demo.stock_process import REQUEST_TOKENS
from tests.demo.timelines import TOKEN_BYTES

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
WINDOW_TOKENS = 40


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    (directory / "config.json").write_text(json.dumps(config))
    process = warm.run(
        ["-m", "tests.demo.stock_process", directory],
        ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
        folder=ROOT,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def pages(block_tokens, *, window_tokens=None):
    """Count the blocks of one group after each step, from the definition of a window.

    A step's tokens read from the window of its first token on; what lies before was given back.
    """
    counts, computed = [], {}
    for tokens in REQUEST_TOKENS:
        count = 0
        for request_id, num_tokens in tokens.items():
            begin = computed.get(request_id, 0)
            begin = begin if begin <= num_tokens else 0
            skipped = max(0, begin - window_tokens + 1) if window_tokens else 0
            count += -(-num_tokens // block_tokens) - skipped // block_tokens
        computed = dict(tokens)
        counts.append(count)
    return counts


def held(run, layer_type):
    return [step[layer_type] for step in run["held_bytes"]]


@pytest.mark.parametrize(("index", "block_tokens"), [(0, 128), (1, 16)], ids=["default", "ours"])
def test_replay_holds_whole_blocks_of_every_group(replays, index, block_tokens):
    run = replays["windows"][index]
    block_bytes = 2 * block_tokens * TOKEN_BYTES

    # Groups of two layers: full; sliding 2 + 2 + 1 with a layer of padding.
    assert (run["num_groups"], run["block_tokens"]) == (4, block_tokens)
    assert run["block_bytes"] == block_bytes
    assert held(run, "full") == [n * block_bytes for n in pages(block_tokens)]
    sliding_pages = pages(block_tokens, window_tokens=WINDOW_TOKENS)
    assert held(run, "sliding") == [3 * n * block_bytes for n in sliding_pages]


def test_replay_without_the_hybrid_manager_keeps_every_token_in_every_layer(replays):
    run = replays["windows"][2]

    assert run["num_groups"] == 1
    assert run["block_bytes"] == 7 * 128 * TOKEN_BYTES
    assert held(run, "sliding") == [n * 5 * 128 * TOKEN_BYTES for n in pages(128)]
    assert held(run, "full") == [n * 2 * 128 * TOKEN_BYTES for n in pages(128)]


def test_replay_raises_attention_blocks_to_a_state_and_pads_the_state(replays):
    (run,) = replays["states"]

    # As a real engine of vLLM 0.32 chose for these layers: 128 tokens, states padded to 65,536
    # bytes, groups of two layers: full, states 2 + 1.
    assert (run["num_groups"], run["block_tokens"], run["block_bytes"]) == (3, 128, 2 * 65536)
    num_requests = [len(tokens) for tokens in REQUEST_TOKENS]
    assert held(run, "mamba2") == [2 * n * 2 * 65536 for n in num_requests]
    assert held(run, "full") == [n * 2 * 65536 for n in pages(128)]

"""Sleep mode: what the cache held is lost, and what is generated after is what it would have been.

On a GPU the arena gets other memory when the engine wakes up, and weights are lost with all that
was made while they were loaded. Here the arena and host memory are filled with NaN instead.
"""

import pytest
import torch

from tests.vllm_plugin.caching.test_prefix_caching import prompts_over_shared_prefixes
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.states.test_hybrid_engine import CUTS

pytestmark = pytest.mark.vllm

JENGA = {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
ON_V1, ON_V2 = {V2_RUNNER: "0"}, {V2_RUNNER: "1"}
NUM_PROMPTS = 4
SLEEPS = [
    {"level": 1, "mode": "abort"},
    {"level": 1, "mode": "keep", "after_steps": 12},
    {"level": 2, "mode": "abort"},
    {"level": 2, "mode": "keep", "after_steps": 5},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arena_bytes", "runner", "options"),
    [
        pytest.param("gpt_oss", 1 << 20, ON_V1, {}, id="windows"),
        pytest.param("granite_hybrid", 5 << 19, ON_V2, graphs_of(1, 2, 4), id="states_in_graphs"),
        pytest.param("deepseek_v2", 1 << 22, ON_V1, {}, id="latents"),
    ],
)
def test_an_engine_that_slept_generates_what_one_does_that_did_not(
    name, arena_bytes, runner, options, tiny_model, run_engine
):
    model, prompts = tiny_model(name), prompts_over_shared_prefixes(NUM_PROMPTS, seed=41)

    stock = run_engine(model, prompts, options=CUTS)
    ours = run_engine(
        model,
        prompts,
        script="sleep_process.py",
        sleeps=SLEEPS,
        captures=bool(options),
        options=CUTS
        | JENGA
        | {"kv_cache_memory_bytes": arena_bytes, "kv_offloading_size": 1 / 32}
        | options,
        environment=runner,
    )

    assert_same_generation(ours, stock | {"outputs": stock["outputs"] * len(SLEEPS)})
    assert all(ours["asleep_with"])  # requests ran when it fell asleep amid them
    assert ours["preemptions"] >= sum(ours["asleep_with"])
    assert bool(ours["replays"]) == bool(options)


def test_alibi_slopes_do_not_lie_where_weights_are_lost():
    from jenga.vllm_plugin.layers.attention.backend import JengaTritonImpl

    with torch.device("meta"):  # where weights are loaded
        layer = JengaTritonImpl(2, 64, 0.125, alibi_slopes=[0.5, 0.25])

    assert layer._slopes(torch.device("cpu")).tolist() == [0.5, 0.25]

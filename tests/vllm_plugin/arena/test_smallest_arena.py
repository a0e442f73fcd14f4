"""The smallest arena that an engine starts with runs its longest request to the end."""

from collections import deque

import pytest
import torch

from tests.vllm_plugin.scheduler.test_cache_manager import request

pytestmark = pytest.mark.vllm

MAX_TOKENS = 256
LAYOUT = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


@pytest.fixture(scope="module")
def engine_config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("gpt_oss")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        attention_backend="JENGA_TRITON",
    )
    return options.create_engine_config()


def specs_of(kind, page_tokens):
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )

    layout = LAYOUT | {"block_size": page_tokens}

    def sliding(window, **changes):
        return SlidingWindowSpec(**layout | changes, sliding_window=window)

    # Chunks of 40 tokens begin within a page.
    chunked = ChunkedLocalAttentionSpec(**layout, attention_chunk_size=40)
    others = {
        "one_window": {"sliding.0": sliding(32), "sliding.1": sliding(32)},
        "two_windows": {"short": sliding(32), "long": sliding(100, num_kv_heads=1)},
        "chunks": {"chunked.0": chunked, "chunked.1": chunked},
    }
    return {"full": FullAttentionSpec(**layout)} | others[kind]


def smallest_arena(config, specs):
    """Get the layout of the fewest bytes with which an engine starts."""
    from jenga.vllm_plugin.arena.layout import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
        max_memory_usage_bytes_from_groups,
        pool_bytes_per_block,
    )

    groups = get_kv_cache_groups(config, specs)
    # vLLM sets the null page aside before it compares what is needed with what there is.
    least_bytes = max_memory_usage_bytes_from_groups(config, groups)
    least_bytes += pool_bytes_per_block(config, groups)
    return get_kv_cache_config_from_groups(config, groups, least_bytes)


def run_alone(scheduler, name, *, num_ahead):
    """Run the one request of a scheduler, so many steps scheduled ahead, or as far as it gets."""
    from vllm.v1.outputs import ModelRunnerOutput

    ahead = deque()
    for _ in range(100):
        step = scheduler.schedule()
        alone = scheduler.requests.get(name)
        is_read = alone is not None and alone.num_computed_tokens >= alone.num_tokens
        names = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={each: index for index, each in enumerate(names)},
            sampled_token_ids=[[7] if is_read else [] for _ in names],
        )
        ahead.append((step, output))
        if len(ahead) > num_ahead:
            scheduler.update_from_output(*ahead.popleft())
            scheduler.kv_cache_manager.manager.check()


@pytest.mark.parametrize("page_tokens", [16, 48])
@pytest.mark.parametrize("kind", ["one_window", "two_windows", "chunks"])
@pytest.mark.parametrize(
    ("num_ahead", "lookahead_tokens"),
    [
        pytest.param(0, 0, id="one_step_at_a_time"),
        pytest.param(1, 0, id="steps_scheduled_ahead"),
        pytest.param(0, 7, id="slots_for_drafts"),
    ],
)
@pytest.mark.parametrize("step_tokens", [16, 33])
def test_the_smallest_arena_runs_the_longest_request(
    kind, page_tokens, num_ahead, lookahead_tokens, step_tokens, engine_config, monkeypatch
):
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import resolve_kv_cache_block_sizes
    from vllm.v1.structured_output import StructuredOutputManager

    cache, scheduling = engine_config.cache_config, engine_config.scheduler_config
    monkeypatch.setattr(cache, "block_size", page_tokens)
    monkeypatch.setattr(scheduling, "async_scheduling", bool(num_ahead))
    monkeypatch.setattr(scheduling, "max_num_batched_tokens", step_tokens)
    monkeypatch.setattr(scheduling, "max_num_scheduled_tokens", None)
    monkeypatch.setattr(VllmConfig, "num_lookahead_tokens", lookahead_tokens)
    layout = smallest_arena(engine_config, specs_of(kind, page_tokens))
    cache.num_gpu_blocks = layout.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(layout, engine_config)
    scheduler = (AsyncScheduler if num_ahead else Scheduler)(
        vllm_config=engine_config,
        kv_cache_config=layout,
        structured_output_manager=StructuredOutputManager(engine_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
    )
    scheduler.add_request(request("alone", list(range(3, 243)), MAX_TOKENS - 240))

    run_alone(scheduler, "alone", num_ahead=num_ahead)

    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.manager.request_tokens() == {}

"""From how many requests on steps seldom write states: docs/recurrent-states.md and its rows."""

import pytest

from jenga.vllm_plugin.specs.replay_kinds import LEAST_DELTA_BYTES, LEAST_MAMBA2_BYTES
from perf.tables.readme_tables import H100, H200, read

MIB = 1 << 20

pytestmark = pytest.mark.vllm


def times(rows, implementation, prefix):
    """Last time of each shape, by what follows a prefix of its name, in microseconds."""
    return {
        row["shape"].removeprefix(prefix): row["p50_us"]
        for row in rows
        if row["implementation"] == implementation and row["shape"].startswith(prefix)
    }


@pytest.mark.parametrize(
    ("dtype", "element_bytes", "expected"), [("f32", 4, "41"), ("bf16", 2, "39")]
)
def test_mamba2_steps_that_replay_hold_more_states_than_where_their_times_meet(
    dtype, element_bytes, expected
):
    updates = times(read(f"{H100}/variants.jsonl"), "update", "replay nemotron ")
    replays = times(read(f"{H100}/bench_state_replay.jsonl"), "jenga", "nemotron-h-8b ")
    few, many = (replays[f"{dtype} b{n}"] - updates[f"{dtype} b{n}"] for n in (8, 64))
    state_bytes = 128 * 64 * 128 * element_bytes
    assert few > 0 > many

    meeting = (8 + 56 * few / (few - many)) * state_bytes

    assert f"{meeting / MIB:.0f}" == expected
    assert meeting < LEAST_MAMBA2_BYTES < 64 * state_bytes


def test_gated_delta_steps_that_replay_hold_the_fewest_states_that_were_timed():
    updates = times(read(f"{H200}/bench_delta.jsonl"), "jenga", "qwen3-next-80b-a3b f32 ")
    replays = times(read(f"{H200}/bench_delta_replay.jsonl"), "jenga", "qwen3-next-80b-a3b f32 ")

    fewest = min(int(name.removeprefix("b")) for name in replays)

    assert fewest * 32 * 128 * 128 * 4 == LEAST_DELTA_BYTES
    assert f"{replays[f'b{fewest}'] / updates[f'b{fewest}']:.2f}" == "0.95"

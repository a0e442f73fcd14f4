"""The baseline of one page table holds what no layer reads, and says so."""

import pytest

from jenga.models import known_model
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.workload.generators import long_documents, mmmu_pro

ARENA_BYTES = 60 * 10**9


def wastes(manager, name, num_tokens):
    arena = make_arena(manager, known_model(name).spec(), ARENA_BYTES, prefix_caching=False)
    requests = long_documents(num_requests=1, prompt_tokens=(num_tokens, num_tokens))
    run = Replay(requests, arena, clock=constant_clock(1.0))
    return [
        (memory.waste, memory) for step in run if step.num_decoding for memory in [run.memory()]
    ]


def test_paged_attention_wastes_what_windows_have_left():
    (waste, memory), *_ = wastes("paged", "ministral-8b-2410", 131_072)

    # Three layers of four read a window of a quarter of the tokens: 56.25 % in the paper.
    assert waste == pytest.approx(0.5625, abs=0.001)
    assert memory.tables["all"].useless_bytes == memory.useless_bytes


def test_paged_attention_wastes_nothing_where_every_layer_reads_every_token():
    assert max(waste for waste, _ in wastes("paged", "llama-3.1-8b", 20_000)) < 0.001


def test_our_manager_holds_windows_alone():
    assert max(waste for waste, _ in wastes("jenga", "ministral-8b-2410", 131_072)) < 0.001


def test_paged_attention_takes_slots_for_an_encoders_tokens_in_every_layer():
    arena = make_arena("paged", known_model("llama-3.2-11b-vision").spec(), ARENA_BYTES)
    requests = mmmu_pro(num_requests=3, image_in_prompt=False)
    run = Replay(requests, arena, clock=constant_clock(1.0))

    wastes = [run.memory().waste for step in run if step.num_decoding > 1]

    # 6,193 tokens of images and 43 of text waste 79.6 % in the paper; answers are text, too.
    assert run.num_finished == 3
    assert max(wastes) == pytest.approx(0.796, abs=0.01)

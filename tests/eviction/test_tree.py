"""The tree of checkpoints: whole or not at all, whatever is kept, split, evicted and waited for."""

import random

import pytest

from jenga.eviction import tree
from jenga.eviction.known import EVICTION_POLICIES
from jenga.eviction.points import Kind, Past
from tests.eviction.arena import Arena, hashes
from tests.machines.geometries import cross, full, geometry, sliding, state

FULL = geometry("full", full(tokens=4))
TWO_SIZES = geometry(
    "page tables of two sizes", full("a", tokens=4), full("b", tokens=8, slot_bytes=8)
)
WINDOWED = geometry("windowed", full(tokens=4), sliding(tokens=4, window=10))
STATES = geometry(
    "states",
    full(tokens=4, slot_bytes=8, per_large=4),
    state("one", slot_bytes=64, per_large=2),
    state("other", slot_bytes=128),
)
STATES_ALONE = geometry("states alone", state("one", slot_bytes=64, per_large=2))
MIXED = geometry(
    "mixed",
    full("a", tokens=4, slot_bytes=8, per_large=4),
    full("b", tokens=8, slot_bytes=8, per_large=2),
    sliding(tokens=2, slot_bytes=16, per_large=4, window=7),
    state(slot_bytes=64, per_large=2),
)
IMAGES = geometry("images", full(tokens=4), cross(slot_bytes=4, per_large=4))
CUTS = (FULL, TWO_SIZES, WINDOWED, STATES, STATES_ALONE, MIXED, IMAGES)

TEXT = "the quick brown fox jumps over the lazy dog and runs away"


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(tree, "CUT_TOKENS", 8)


def test_two_texts_with_the_same_prefix_and_different_next_tokens_are_kept_apart():
    # What is cached of a prefix depends on the tokens after it.
    for cut in (FULL, STATES):
        arena = Arena(cut, ahead_tokens=1)
        texts = [TEXT[:16] + name * 16 for name in "xyz"]
        for text in texts:
            arena.written(text, 16)
        for text in texts:
            arena.written(text, 24)
            assert arena.is_kept(text, 16)

"""Numbers that suit documents of forty tokens, so that all that is done with long ones is done."""

import pytest

from jenga.prefix import checkpoint_tree, checkpoints, eviction_pool


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    for module in (checkpoints, checkpoint_tree):
        monkeypatch.setattr(module, "QUESTION_TOKENS", 8)
    monkeypatch.setattr(checkpoint_tree, "CUT_TOKENS", 8)
    monkeypatch.setattr(eviction_pool, "NUM_DRAWN", 4)

"""Numbers that suit documents of forty tokens, so that all that is done with long ones is done."""

import pytest

from jenga.prefix import checkpoint_tree, eviction_pool, question_length


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(question_length, "QUESTION_TOKENS", 8)
    monkeypatch.setattr(checkpoint_tree, "CUT_TOKENS", 8)
    monkeypatch.setattr(eviction_pool, "NUM_DRAWN", 4)

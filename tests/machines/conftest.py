"""Numbers that suit documents of forty tokens, so that all that is done with long ones is done."""

import pytest

from jenga import checkpoints
from jenga.eviction import tree


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    for module in (checkpoints, tree):
        monkeypatch.setattr(module, "QUESTION_TOKENS", 8)
    monkeypatch.setattr(tree, "CUT_TOKENS", 8)
    monkeypatch.setattr(tree, "NUM_DRAWN", 4)

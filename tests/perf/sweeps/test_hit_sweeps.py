"""Sweeps of prefix hits replay a small case and keep its rows and table."""

import json
import sys

import pytest

from jenga.eviction.known import EVICTION_POLICIES
from perf.sweeps import sweep_eviction, sweep_host_memory

pytest.importorskip("torch", reason="rows name torch's version")

CASE = ("--models", "nemotron-h-8b", "--workloads", "3 articles")
BOUND = 87.41
"""Percent of tokens that a cache without end finds, which is seven of eight articles."""


def rows_of(module, monkeypatch, folder, *options):
    """Run a sweep of one case twice, as one that goes on does; return the rows that are kept."""
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["sweep", *CASE, *options, "--save", str(folder)])
        module.main()
    (path,) = folder.glob("*.jsonl")
    assert path.with_suffix(".md").exists()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_eviction_policy_is_replayed_beside_the_bounds(monkeypatch, tmp_path, capsys):
    rows = rows_of(sweep_eviction, monkeypatch, tmp_path, "--systems", *EVICTION_POLICIES)

    hits = {row["system"]: row["hit_percent"] for row in rows}
    assert list(hits) == ["unlimited", "best", *EVICTION_POLICIES]
    assert len(rows) == len(hits)
    assert hits["unlimited"] == hits["best"] == BOUND
    assert all(0 < hits[name] <= BOUND for name in EVICTION_POLICIES)
    assert "learned" in capsys.readouterr().out


def test_host_memory_is_replayed_in_each_size(monkeypatch, tmp_path, capsys):
    rows = rows_of(sweep_host_memory, monkeypatch, tmp_path, "--times", "0", "1")

    assert [row["times"] for row in rows] == [0, 1]
    assert all(0 < row["hit_percent"] <= BOUND for row in rows)
    assert "1 x arena" in capsys.readouterr().out

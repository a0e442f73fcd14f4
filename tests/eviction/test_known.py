"""Policies by name: those of the package, and those of a module of one's own."""

import re

import pytest

from jenga.cli import main
from jenga.eviction.known import EVICTION_POLICIES, policy_by_name, source_of
from jenga.sim.results.rows import RunRow, read_rows

OWN = """
class NewestFirst:
    weighs_guesses = False

    def begin(self, *, arena_bytes):
        pass

    def observe(self, point, waited_bytes, *, was_read):
        pass

    def learn(self, waiting, time):
        pass

    def worth(self, candidate, time):
        return -candidate.point.last_kept

    def heir_of(self, candidate, heir, time, /):
        return None


class NoPolicy:
    weighs_guesses = False


NO_CLASS = 1
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "broken_policies.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    policy_by_name.cache_clear()


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_policies_of_the_package_are_found_by_name(name):
    assert policy_by_name(name) is EVICTION_POLICIES[name]
    assert source_of(name) == ""


@pytest.mark.usefixtures("own_module")
def test_a_policy_of_an_own_module_is_found_with_its_source():
    policy = policy_by_name("own_policies:NewestFirst")()

    assert type(policy).__name__ == "NewestFirst"
    assert source_of("own_policies:NewestFirst") == OWN


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fifo", "must be one of learned, lru, or module:Class, got 'fifo'"),
        ("own_policies:", "must be one of learned, lru, or module:Class, got 'own_policies:'"),
        ("no_such_policies:A", "module cannot be imported: No module named 'no_such_policies'"),
        ("broken_policies:A", "module cannot be imported: No module named 'no_such_module'"),
        ("own_policies:Missing", "module 'own_policies' has no class 'Missing'"),
        ("own_policies:NO_CLASS", "module 'own_policies' has no class 'NO_CLASS'"),
        (
            "own_policies:NoPolicy",
            "its class must have begin, observe, learn, worth, heir_of",
        ),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_what_is_no_policy_is_refused_with_the_reason(name, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        policy_by_name(name)


@pytest.mark.usefixtures("own_module")
def test_a_replay_takes_an_own_policy_and_names_it_in_its_row(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    command = [
        "replay",
        "--model",
        "llama-3.2-1b",
        "--arena",
        "40MB",
        "--quiet",
        "--out",
        str(rows),
    ]
    command += ["--trace", "articles:n=3,questions=2,tokens=160,output=4,rate=1"]
    command += ["--eviction", "lru", "own_policies:NewestFirst"]

    assert main(command) == 0
    assert main(command) == 0

    runs = [row for row in read_rows(rows) if isinstance(row, RunRow)]
    assert [run.eviction for run in runs] == ["lru", "own_policies:NewestFirst"]
    assert "eviction_source" in runs[1].options
    assert "own_policies:NewestFirst" in capsys.readouterr().out


def test_a_replay_refuses_what_is_no_policy(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["replay", "--model", "llama-3.2-1b", "--trace", "articles", "--eviction", "fifo"])

    assert "must be one of learned, lru, or module:Class, got 'fifo'" in capsys.readouterr().err

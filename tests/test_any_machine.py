"""Tests pass on slow machines and on any processor, and say which one they ran on."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import processor

ROOT = Path(__file__).parents[1]
LIMITS = re.compile(
    r"mark\.timeout|\b(?:communicate|wait|join|urlopen|run|result|get)\([^()]*\btimeout="
    r"|^\s+timeout=\d|\bdeadline=(?!None)",
    re.MULTILINE,
)
"""Ways in which a test would set a time limit of its own."""


def test_no_test_has_a_limit_of_its_own_that_a_slow_machine_meets():
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    del texts[Path(__file__)]

    limited = {
        str(path): found[0] for path, text in texts.items() if (found := LIMITS.search(text))
    }

    assert limited == {}


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.timeout(60)",
        "process.wait(timeout=60)",
        "urlopen(request, timeout=240)",
        "    subprocess.run(\n        command,\n        timeout=300,\n    )",
        "@settings(max_examples=3, deadline=200)",
    ],
)
def test_limits_of_a_test_are_found_however_they_are_set(text):
    assert LIMITS.search(text)


def test_the_limit_of_a_test_is_generous():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

    assert options["timeout"] >= 3600


def test_examples_may_take_as_long_as_they_do():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_the_header_says_what_results_may_depend_on(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")

    text = processor.report()

    assert re.fullmatch(r"processor: .+, .+; numpy's BLAS .+; torch [A-Z0-9 ]+", text)
    assert "OPENBLAS_CORETYPE=Haswell" in text
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert "OPENBLAS_CORETYPE" not in processor.report()


def test_the_header_is_made_on_processors_that_describe_themselves_otherwise(monkeypatch):
    arm = "processor\t: 0\nFeatures\t: fp asimd bf16\n\nprocessor\t: 1\n"
    for described, expected in ((arm, "unknown, asimd bf16;"), ("", "unknown, none known;")):
        monkeypatch.setattr(Path, "read_text", lambda _self, described=described: described)
        assert processor.report().startswith(f"processor: {expected}")

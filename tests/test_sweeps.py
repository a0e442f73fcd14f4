"""Sweeps measure their points as the benchmark of attention does, and draw them."""

from pathlib import Path

import pytest

from perf.attention_shapes import DRY_SHAPES
from perf.sweeps import Point, run_sweep

pytest.importorskip("matplotlib", reason="extra `plots` is not installed")


def test_a_sweep_writes_the_rows_of_its_points_and_a_picture(capsys):
    dry = [Point(series=shape.name, x=shape.page_tokens, shape=shape) for shape in DRY_SHAPES[:1]]

    run_sweep("sweep", "", (), dry=dry, axis="tokens", arguments=["--dry-run", "--peers", "none"])

    said = capsys.readouterr().out
    rows, picture = (
        Path(next(line for line in said.splitlines() if line.startswith(name)).split()[1])
        for name in ("rows:", "picture:")
    )
    assert f'"shape": "{DRY_SHAPES[0].name}"' in rows.read_text()
    assert "tokens" in picture.read_text()

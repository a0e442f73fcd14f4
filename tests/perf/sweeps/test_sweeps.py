"""Sweeps measure their points as the benchmark of attention does, and draw them."""

import json
from pathlib import Path

import pytest
import torch

from perf.kernels import bench_paged_attention
from perf.shapes.attention_shapes import DRY_SHAPES
from perf.sweeps import sweep_attention_tiles
from perf.sweeps.sweeps import Point, run_sweep

pytest.importorskip("matplotlib", reason="extra `plots` is not installed")


def test_a_sweep_writes_the_rows_of_its_points_and_a_picture(capsys):
    dry = [Point(series=shape.name, x=shape.page_tokens, shape=shape) for shape in DRY_SHAPES[:1]]

    run_sweep(
        "sweep_page_size",
        "",
        (),
        dry=dry,
        axis="tokens",
        arguments=["--dry-run", "--peers", "none"],
    )

    said = capsys.readouterr().out
    rows, picture = (
        Path(next(line for line in said.splitlines() if line.startswith(name)).split()[1])
        for name in ("rows:", "picture:")
    )
    assert f'"shape": "{DRY_SHAPES[0].name}"' in rows.read_text()
    assert "tokens" in picture.read_text()


def test_a_shape_that_does_not_fit_the_gpu_is_named_and_left_out(capsys, monkeypatch):
    make_batch = bench_paged_attention.make_batch

    def make_small_batch(shape, device):
        if shape is DRY_SHAPES[0]:
            raise torch.OutOfMemoryError
        return make_batch(shape, device)

    monkeypatch.setattr(bench_paged_attention, "make_batch", make_small_batch)
    dry = [Point(series=shape.name, x=shape.page_tokens, shape=shape) for shape in DRY_SHAPES[:2]]

    run_sweep(
        "sweep_page_size",
        "",
        (),
        dry=dry,
        axis="tokens",
        arguments=["--dry-run", "--peers", "none"],
    )

    said = capsys.readouterr().out
    assert f"{DRY_SHAPES[0].name}: the arena does not fit this GPU" in said
    assert f"{DRY_SHAPES[0].name}: jenga" not in said
    assert f"{DRY_SHAPES[1].name}: jenga" in said


def test_other_tiles_than_those_chosen_are_timed_beside_them(capsys):
    sweep_attention_tiles.main(["--dry-run", "--peers", "none", "--only", "dry decode"])

    rows = Path(capsys.readouterr().out.split("rows: ")[1].strip()).read_text().splitlines()
    names = [json.loads(row)["implementation"] for row in rows]
    assert names[0] == "jenga"
    assert len(names) == 1 + len(sweep_attention_tiles.DECODE_TILES) == len(set(names))
    assert all(json.loads(row)["max_difference_from_jenga"] < 0.02 for row in rows)

"""Kernels are compiled for each kind of GPU without one, and the committed rows hold for all."""

import pytest

from jenga_kernels.triton.lib import tiles
from perf.counts import architectures
from perf.counts.architectures import GPUS, OUT, Fitted, as_row, describe, newest, read_rows
from perf.harness.machine_code import SHARED_BYTES


def kernel(**kwargs):
    return Fitted(**{"name": "one", "registers": 40, "stack_bytes": 0, "shared_bytes": 0} | kwargs)


def test_a_row_names_the_kernels_that_spill_or_do_not_fit():
    most = SHARED_BYTES[89]
    kernels = [
        kernel(shared_bytes=most),
        kernel(name="wide", registers=255, stack_bytes=8),
        kernel(name="large", shared_bytes=most + 1),
    ]

    row = as_row(89, "D1", kernels)

    assert row["kernels"] == ["large", "one", "wide"]
    assert (row["registers"], row["shared_bytes"], row["shared_limit_bytes"]) == (
        255,
        most + 1,
        99 << 10,
    )
    assert row["spilled_bytes"] == {"wide": 8}
    assert row["too_large"] == ["large"]
    assert "wide spills 8 B; large does not fit" in describe(row)


def test_the_last_row_of_a_shape_and_gpu_counts():
    old, new = ({"capability": 80, "shape": "D1", "registers": n} for n in (1, 2))
    other = {"capability": 89, "shape": "D1", "registers": 3}

    assert newest([old, other, new]) == [new, other]


@pytest.fixture(scope="module")
def rows():
    return newest(read_rows(OUT))


@pytest.mark.parametrize("capability", GPUS)
def test_every_shape_has_a_row_for_every_gpu(capability, rows):
    of_gpu = {row["shape"] for row in rows if row["capability"] == capability}
    of_hopper = {row["shape"] for row in rows if row["capability"] == tiles.HOPPER}

    assert of_gpu == {shape for shape in of_hopper if not shape.endswith("specialised")} or (
        capability == tiles.HOPPER
    )
    assert len(of_gpu) > 50


def test_all_kernels_can_be_launched_on_every_gpu(rows):
    assert [describe(row) for row in rows if row.get("too_large")] == []


def test_only_float8_is_refused_and_only_before_ada(rows):
    refused = [row for row in rows if "refused" in row]

    assert {row["capability"] for row in refused} == {80}
    assert all("compute capability 8.9" in row["refused"] for row in refused)


@pytest.mark.slow
def test_rows_are_made_without_a_gpu(tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    for _ in range(2):  # the second run finds the rows of the first
        architectures.main(["--only", "W1 ", "--gpus", "80", "120", "--out", str(out)])

    made = read_rows(out)
    assert [row["capability"] for row in made] == [80, 120]
    assert all(row["kernels"] and not row["too_large"] for row in made)

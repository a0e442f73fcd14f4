"""The package has the shares of GPUs' peaks that the rows of perf/results give."""

import json

import pytest

from jenga.sim.batching.measured import measured
from jenga.sim.batching.step_time import PEAKS
from jenga.sim.hardware.gpus import GPUS
from perf.tables.measured_shares import FILE, RESULTS, shares_text


def test_the_packages_shares_are_those_of_the_rows():
    text = FILE.read_text(encoding="utf-8")

    assert text == shares_text(RESULTS), "python -m perf.tables.measured_shares writes them"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_a_replay_without_rows_at_hand_has_the_shares_of_the_rows(gpu):
    assert measured(gpu) == measured(gpu, RESULTS)


def test_shares_were_measured_on_the_gpus_that_the_docs_name():
    assert set(json.loads(shares_text(RESULTS))) == {"H100-80G", "H200"}


def test_no_gpu_is_listed_without_rows(tmp_path):
    assert json.loads(shares_text(tmp_path)) == {}
    assert measured(GPUS["H200"], tmp_path) == PEAKS

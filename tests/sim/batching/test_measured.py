"""Shares of a GPU's peaks come from rows measured on it, and are 1 where there are none."""

import json

import pytest

from jenga.sim.batching.measured import measured
from jenga.sim.batching.step_time import PEAKS
from jenga.sim.hardware.gpus import GPUS

H200 = GPUS["H200"]
BYTES_PER_S, FLOPS = 4.8e12, 989.4e12


def row(shape, *, implementation="jenga", seconds=1e-3, num_bytes=0.0, num_flops=0.0):
    return {
        "shape": shape,
        "implementation": implementation,
        "p50_us": 1e6 * seconds,
        "num_bytes": max(num_bytes, 1.0),
        "num_flops": num_flops,
        "machine": "made up",
    }


def write(results, name, *rows, folder="h200"):
    (results / folder).mkdir(exist_ok=True)
    lines = [json.dumps(each) + "\n" for each in rows]
    (results / folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def test_a_gpu_without_rows_has_its_peaks(tmp_path):
    write(tmp_path, "roofline", row("read", num_bytes=1e9), folder="l4")

    assert measured(H200, tmp_path) == PEAKS
    assert measured(H200, tmp_path / "nowhere") == PEAKS


def test_rows_of_the_roofline_are_shares_for_weights(tmp_path):
    write(
        tmp_path,
        "roofline",
        row("read", implementation="roofline", num_bytes=0.5e-3 * BYTES_PER_S),
        row("read", implementation="roofline", num_bytes=0.8e-3 * BYTES_PER_S),
        row("hop 4 KiB every 64 KiB over 1 GiB", implementation="roofline", num_bytes=1e6),
        row("matmul", implementation="roofline", num_flops=0.7e-3 * FLOPS),
    )

    found = measured(H200, tmp_path)

    # The later of two rows of one shape.
    assert found.bandwidth_share == pytest.approx(0.8)
    assert found.arithmetic_share == pytest.approx(0.7)
    assert (found.attention_bandwidth_share, found.attention_arithmetic_share) == (1.0, 1.0)
    assert found.overhead_s == 0.0


def test_rows_of_attention_are_weighed_by_their_time_and_peers_are_left_out(tmp_path):
    write(
        tmp_path,
        "bench_paged_attention",
        row("decode long", seconds=3e-3, num_bytes=0.8 * 3e-3 * BYTES_PER_S, num_flops=1e9),
        row("decode short", seconds=1e-3, num_bytes=0.4 * 1e-3 * BYTES_PER_S),
        row("prefill", num_bytes=1e6, num_flops=0.5e-3 * FLOPS),
        row("prefill", implementation="a peer", num_bytes=1e6, num_flops=0.9e-3 * FLOPS),
    )

    found = measured(H200, tmp_path)

    assert found.attention_bandwidth_share == pytest.approx((3 * 0.8 + 0.4) / 4)
    assert found.attention_arithmetic_share == pytest.approx(0.5)
    assert (found.bandwidth_share, found.arithmetic_share) == (1.0, 1.0)


def test_prompts_of_the_specialized_kernel_count_where_the_other_file_has_none(tmp_path):
    flops = {"num_flops": 0.5e-3 * FLOPS}
    write(tmp_path, "bench_specialized_prefill", row("P1", **flops), row("P2", **flops))
    write(tmp_path, "bench_paged_attention", row("P2", num_flops=0.7e-3 * FLOPS))

    assert measured(H200, tmp_path).attention_arithmetic_share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "a row must be one JSON object"),
        ('{"implementation": "roofline", "shape": "read"}', "p50_us must be a positive number"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path, line, words):
    write(tmp_path, "roofline", row("read", implementation="roofline", num_bytes=1e9))
    with (tmp_path / "h200" / "roofline.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")

    with pytest.raises(ValueError, match=rf"roofline.jsonl:2: {words}"):
        measured(H200, tmp_path)


def test_every_gpu_has_a_folder_of_its_own():
    folders = [folder for gpu in GPUS.values() for folder in gpu.folders]

    assert len(set(folders)) == len(folders) >= len(GPUS)

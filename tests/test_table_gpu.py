"""Tables of a GPU's rows compare what one commit has timed."""

import json

from perf import table_gpu


def row(shape, implementation, p50_us, commit, date="2026-01-01", **others):
    return {
        "shape": shape,
        "implementation": implementation,
        "p20_us": p50_us - 1,
        "p50_us": p50_us,
        "p80_us": p50_us + 1,
        "gigabytes_per_second": 100.0,
        "teraflops": 2.0,
        "commit": commit,
        "date": date,
        "machine": f"a GPU, jenga {commit}",
    } | others


def test_a_shape_shows_its_newest_rows_beside_those_of_the_same_commit(tmp_path):
    rows = [
        row("D1", "jenga", 10.0, "old"),
        row("D1", "peer", 15.0, "old"),
        row("D1", "jenga", 8.0, "new", "2026-01-02"),
        row("D1", "peer", 16.0, "new", "2026-01-02"),
        row("D1", "jenga", 7.0, "alone", "2026-01-03"),
        row("D2", "jenga", 5.0, "alone", "2026-01-03"),
        row("D3", "peer", 5.0, "old"),
    ]
    path = tmp_path / "bench_paged_attention.jsonl"
    path.write_text("\n".join(map(json.dumps, rows[:4])) + "\n")
    other = tmp_path / "bench_specialized_prefill.jsonl"
    other.write_text("\n".join(map(json.dumps, rows[4:])) + "\n")

    assert table_gpu.main([str(tmp_path)]) == 0

    text = (tmp_path / "summary.md").read_text()
    assert "| D1 | 8.0 (7.0 to 9.0) | 100 | 2 | 2.00 |" in text
    assert "| D2 | 5.0 (4.0 to 6.0) | 100 | 2 |  |" in text
    assert "D3" not in text
    assert "Geometric means: peer 2.00 (1 shapes)." in text
    assert "- a GPU, jenga new" in text


def test_a_folder_without_rows_is_named(tmp_path, capsys):
    assert table_gpu.main([str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err

import json

from perf.harness.geometric_means import geometric_means

ROWS = [
    ("D1 one", "jenga", 10.0, "here"),
    ("D1 one", "vllm-triton", 40.0, "here"),
    ("D1 one", "flashinfer", 5.0, "here"),
    ("D2 two", "vllm-triton", 90.0, "here"),
    ("D2 two", "jenga", 90.0, "here"),
    ("D2 two", "jenga", 10.0, "here"),
    ("D3 without peers", "jenga", 10.0, "here"),
    ("D4 of another commit", "jenga", 1.0, "there"),
    ("P1 prompt", "jenga", 2.0, "here"),
    ("P1 prompt", "flash-attention-3", 1.0, "here"),
    ("dry", "jenga", 1.0, "here"),
    ("dry", "vllm-triton", 1.0, "here"),
]


def test_geometric_means_are_of_one_commits_latest_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = ("shape", "implementation", "p50_us", "commit")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in ROWS))

    assert geometric_means(path, "here").splitlines() == [
        "decode: best peer takes 2.12 times as long (geometric mean of 2 of 3 shapes)",
        "decode: vllm-triton takes 6.00 times as long (geometric mean of 2 of 3 shapes)",
        "decode: flashinfer takes 0.50 times as long (geometric mean of 1 of 3 shapes)",
        "prefill: best peer takes 0.50 times as long (geometric mean of 1 of 1 shapes)",
        "prefill: flash-attention-3 takes 0.50 times as long (geometric mean of 1 of 1 shapes)",
    ]
    assert geometric_means(path, "nowhere") == ""

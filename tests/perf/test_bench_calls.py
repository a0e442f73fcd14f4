import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
def test_calls_are_timed_beside_vllms_without_a_gpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "perf.manager.bench_calls",
        "--only",
        "kv_store",
        "--save",
        tmp_path,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = map(json.loads, (tmp_path / "bench_calls.jsonl").read_text().splitlines())
    for side in ("jenga", "vllm", "jenga, first"):
        middle, low, high = row[side]
        assert 0 < low <= middle <= high
    # By far less than it is seen to, so that no load on the machine decides.
    assert row["jenga"][0] < row["jenga, first"][0]
    assert row["case"] in (tmp_path / "bench_calls.md").read_text().replace("\n", " ")


LOADED_LIBRARIES = """
from perf.harness.compiled_launches import show_vllm_a_gpu
show_vllm_a_gpu()
import vllm._custom_ops
print(*{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
"""


@pytest.mark.vllm
def test_vllm_that_sees_a_gpu_loads_no_library_for_one_kind_of_processor():
    done = subprocess.run(
        [sys.executable, "-c", LOADED_LIBRARIES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    names = [Path(path).name for path in done.stdout.split() if Path(path).parent.name == "vllm"]
    assert [name for name in names if name.startswith("_C")] == []
    assert "torch" in done.stdout

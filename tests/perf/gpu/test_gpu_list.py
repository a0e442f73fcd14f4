"""What a GPU that is lent for minutes runs: kernels compiled ahead, and a list of benchmarks."""

import json
from pathlib import Path

import pytest

from perf.gpu import gpu_list, precompiled
from perf.harness.machine import module_of
from perf.harness.timing import Benchmark


def test_packed_kernels_are_found_under_the_names_of_another_triton(tmp_path):
    folder, cache = tmp_path / "compiled", tmp_path / "cache"
    key = f"{precompiled.TRITONS_OWN}-source-ptxas"
    place = folder / precompiled.place_of(key)
    place.mkdir(parents=True)
    (folder / precompiled.KEYS).write_text(json.dumps(key) + "\n" + json.dumps(key) + "\n")
    digest = precompiled.hashlib.sha256(key.encode()).hexdigest()
    names = ["k.cubin", "k.json", "k.ptx"]
    (place / "k.cubin").write_bytes(b"\x7fELF")
    (place / "k.ptx").write_text("text")
    (place / "k.json").write_text(json.dumps({"hash": digest, "shared": 3}))
    group = {"child_paths": {name: str(place / name) for name in names}}
    (place / "__grp__k.json").write_text(json.dumps(group))
    archive = tmp_path / "kernels.tar.xz"

    assert precompiled.pack(folder, archive) == 1
    assert precompiled.unpack(archive, cache, tritons_own="3.6.0-of-another-python") == 1

    here = key.replace(precompiled.TRITONS_OWN, "3.6.0-of-another-python")
    there = cache / precompiled.place_of(here)
    paths = json.loads((there / "__grp__k.json").read_text())["child_paths"]
    assert paths == {name: str(there / name) for name in names[:2]}
    assert all(Path(path).is_file() for path in paths.values())
    new = precompiled.hashlib.sha256(here.encode()).hexdigest()
    assert json.loads((there / "k.json").read_text()) == {"hash": new, "shared": 3}


def test_tests_are_compiled_for_in_an_emulated_gpu_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("EMULATED_GPU", raising=False)

    with pytest.raises(SystemExit):
        precompiled.main([str(tmp_path), "tests/kernels/attention/test_kv_store.py"])

    assert "EMULATED_GPU=90" in capsys.readouterr().err


def test_peers_are_those_of_a_list(tmp_path, capsys):
    with pytest.raises(SystemExit):
        precompiled.main([str(tmp_path), "--peers"])

    assert "--peers goes with --list" in capsys.readouterr().err


def test_a_line_wants_shapes_by_parts_and_by_ends_of_their_names():
    text = "bench_state_scan; 8b 1x2048$|falcon; vllm\nbench_paged_attention; D13 ; none"
    scan, attention = gpu_list.read_list(text)

    assert scan.wants("nemotron-h-8b 1x2048")
    assert scan.wants("falcon-h1-7b 4x2048")
    assert not scan.wants("nemotron-h-8b 1x2048 more")
    assert attention.wants("D13 gpt-oss-120b window decode 128x8k")
    assert not attention.wants("D1 llama-8b decode 1x1k")


def test_the_own_list_names_benchmarks_that_exist():
    for item in gpu_list.read_list(gpu_list.BEHIND):
        assert module_of(item.benchmark)


def test_a_line_without_three_fields_is_named():
    with pytest.raises(ValueError, match="got 'bench_pages'"):
        gpu_list.read_list("bench_pages")


def test_benchmarks_run_in_order_and_one_that_fails_ends_no_other(tmp_path, capsys):
    text = "bench_missing; ; none\nbench_pages; ; none\nbench_latent_store; ; none"
    wants_shape = Benchmark.wants_shape

    failed = gpu_list.run(gpu_list.read_list(text), tmp_path, seconds=60, is_dry=True)

    said = capsys.readouterr()
    assert failed == (1, 0)
    assert "bench_missing" in said.err
    assert said.out.index("clear 2 pages") < said.out.index("bench_latent_store.jsonl")
    assert Benchmark.wants_shape is wants_shape

    assert gpu_list.run(gpu_list.read_list(text), tmp_path, seconds=0, is_dry=True) == (0, 3)
    assert "no time for bench_pages" in capsys.readouterr().out

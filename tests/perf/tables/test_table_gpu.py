"""Tables of a GPU's rows compare what one commit has timed, and say how old that is."""

import json

import pytest

from perf.tables import gpu_rows, table_gpu
from perf.tables.gpu_rows import GROUPS, SHIPPED, compare, read_groups
from perf.tables.kernel_sources import FILE_NAME, KERNELS, digests_here


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


def write_rows(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def keep_digests(folder, **commits):
    (folder / FILE_NAME).write_text(json.dumps(commits))


def test_a_shape_shows_its_newest_rows_beside_those_of_the_same_commit(tmp_path):
    rows = [
        row("D1 a", "jenga", 10.0, "old"),
        row("D1 a", "peer", 15.0, "old"),
        row("D1 a", "jenga", 8.0, "new", "2026-01-02", page_tokens=16),
        row("D1 a", "peer", 16.0, "new", "2026-01-02"),
        row("D1 a", "jenga", 7.0, "alone", "2026-01-03"),
        row("D2 a", "jenga", 5.0, "alone", "2026-01-03"),
        row("D3 a", "peer", 5.0, "old"),
    ]
    write_rows(tmp_path, "bench_paged_attention", rows[:4])
    write_rows(tmp_path, "bench_specialized_prefill", rows[4:])

    assert table_gpu.main([str(tmp_path)]) == 0

    text = (tmp_path / "summary.md").read_text()
    assert "| D1 a | 8.0 (7.0 to 9.0) | 100 | 2 | 2.00 | new | unknown |" in text
    assert "| D2 a | 5.0 (4.0 to 6.0) | 100 | 2 |  | alone | unknown |" in text
    assert "D3" not in text
    assert "- peer: 2.00, one shape; changed since: 1." in text
    assert "pages of 16 tokens" in text
    assert "- a GPU, jenga new" in text


def test_a_table_says_of_how_many_shapes_a_mean_is_and_how_many_are_behind(tmp_path):
    ratios = (0.5, 1.0, 1.0, 4.0)
    rows = [
        each
        for number, ratio in enumerate(ratios, start=1)
        for each in (
            row(f"D{number} a", "jenga", 10.0, "new"),
            row(f"D{number} a", "peer", 10.0 * ratio, "new"),
        )
    ]
    write_rows(tmp_path, "bench_paged_attention", rows)
    keep_digests(tmp_path, new=digests_here())

    assert (
        "- peer: 0.50 to 4.00, geometric mean 1.19, median 1.00, 4 shapes, 1 of them below 1.00."
        in table_gpu.summary(tmp_path)
    )


def test_a_row_older_than_its_kernel_is_marked(tmp_path):
    here = digests_here()
    code, tiles = here["attention_decode"]
    write_rows(
        tmp_path,
        "bench_paged_attention",
        [
            row("D1 a", "jenga", 10.0, "same"),
            row("D2 a", "jenga", 10.0, "tiles"),
            row("D3 a", "jenga", 10.0, "kernel"),
            row("P1 a", "jenga", 10.0, "kernel"),
        ],
    )
    keep_digests(
        tmp_path,
        same=here,
        tiles=here | {"attention_decode": (code, "other")},
        kernel=here | {"attention_decode": ("other", tiles)},
    )

    text = table_gpu.summary(tmp_path)

    assert "| D1 a | 10.0 (9.0 to 11.0) | 100 | 2 | same |  |" in text
    assert "| D2 a | 10.0 (9.0 to 11.0) | 100 | 2 | tiles | tiles |" in text
    assert "| D3 a | 10.0 (9.0 to 11.0) | 100 | 2 | kernel | kernel |" in text
    assert "| P1 a | 10.0 (9.0 to 11.0) | 100 | 2 | kernel |  |" in text
    assert "- Decoding, 16-bit caches: kernel 1, tiles 1 of 3" in text


def test_what_is_shipped_is_ours_where_the_benchmark_calls_something_else(tmp_path):
    shape, shipped = next(iter(SHIPPED.items()))
    write_rows(
        tmp_path,
        "bench_paged_attention",
        [row(shape, "jenga", 20.0, "new"), row(shape, shipped, 10.0, "new")],
    )

    ((found,),) = read_groups(tmp_path).values()

    assert found.ratio("jenga") == 1
    assert found.ratio("jenga-unshipped") == 2
    assert shipped not in found.rows


def test_a_peer_that_moved_between_commits_is_named(tmp_path):
    write_rows(
        tmp_path,
        "bench_paged_attention",
        [
            row("D1 a", "jenga", 100.0, "one"),
            row("D1 a", "peer", 100.0, "one"),
            row("D1 a", "peer", 110.0, "two"),
            row("D2 a", "peer", 10.0, "one"),
            row("D2 a", "peer", 20.0, "two"),
        ],
    )

    assert "peer's of D1 a, by 10 %" in table_gpu.summary(tmp_path)


def test_a_peer_without_rows_is_compared_with_nothing(tmp_path):
    write_rows(tmp_path, "bench_paged_attention", [row("D1 a", "jenga", 10.0, "new")])

    assert compare(read_groups(tmp_path)["decode"], "peer") is None


def test_groups_name_kernels_that_there_are():
    assert {name for group in GROUPS for name in group.kernels} == set(KERNELS)


@pytest.mark.parametrize("gpu", ["h100-80gb-hbm3", "h200"])
def test_every_shape_that_a_gpu_has_timed_is_in_one_table(gpu):
    folder = gpu_rows.Path(table_gpu.__file__).parents[1] / "results" / gpu
    benchmarks = {group.benchmark for group in GROUPS}
    timed = {
        (gpu_rows.TOGETHER.get(path.stem, path.stem), each["shape"])
        for path in folder.glob("bench_*.jsonl")
        for each in map(json.loads, path.read_text().splitlines())
        if each["implementation"] == "jenga" and path.stem != "bench_engine"
    }
    placed = [
        (group.benchmark, shape.name)
        for group in GROUPS
        for shape in read_groups(folder).get(group.name, [])
    ]

    assert {benchmark for benchmark, _ in timed} <= benchmarks
    assert sorted(timed) == sorted(placed)


def test_a_folder_without_rows_is_named(tmp_path, capsys):
    assert table_gpu.main([str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err

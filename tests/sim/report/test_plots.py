"""Figures show the rows' numbers."""

import pytest

from jenga.cli import main
from jenga.sim.report import plots
from jenga.sim.results.rows import write_rows
from jenga.sim.results.runs import read_runs
from tests.sim.made_rows import ARENA_BYTES, made_run, made_steps, made_summary, write_runs

pytest.importorskip("matplotlib", reason="extra `plots` is not installed")


@pytest.fixture(name="runs")
def two_runs(tmp_path):
    return read_runs([write_runs(tmp_path / "rows.jsonl")])


def article_runs(tmp_path):
    file = tmp_path / "articles.jsonl"
    for manager, penalty in (("jenga", 0.01), ("vllm", 0.02)):
        for number in (24, 3, 12):
            run = f"{manager}-{number}"
            write_rows(
                file,
                [
                    made_run(run, manager=manager, trace=f"articles:n={number}"),
                    made_summary(run, hit_rate=0.9 - penalty * number),
                ],
            )
    return file


def heights(collection):
    """Upper edge less lower edge of a stack's layer, at its middle step."""
    vertices = collection.get_paths()[0].vertices
    middle = sorted({x for x, _ in vertices})[len({x for x, _ in vertices}) // 2]
    ys = [y for x, y in vertices if x == middle]
    return max(ys) - min(ys)


def test_timeline_stacks_every_byte_of_the_arena(runs):
    figure = plots.timeline(runs)

    for run, (left, right) in zip(runs, (figure.axes[:2], figure.axes[2:]), strict=True):
        classes = [heights(layer) for layer in left.collections]
        assert sum(classes) == pytest.approx(ARENA_BYTES / 1e9, rel=1e-6)
        # Used and unused bytes of two page tables.
        held = sum(heights(layer) for layer in right.collections)
        assert held == pytest.approx(sum(classes[:3]), rel=1e-6)
        assert left.get_title(loc="left") == f"{run.label}: by class"


def test_timeline_may_run_over_time(runs):
    figure = plots.timeline(runs, over="time")

    assert figure.axes[0].get_xlim()[1] == pytest.approx(0.05 * 200)


def test_timeline_refuses_a_run_without_steps(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, [made_run()])

    with pytest.raises(ValueError, match="run 'a' has no steps"):
        plots.timeline(read_runs([file]))


def test_batch_draws_a_line_for_each_run_with_its_mean(runs):
    (axis,) = plots.decode_batch(runs).axes

    assert [list(line.get_ydata()) for line in axis.lines] == [
        [step.num_decoding for step in run.steps] for run in runs
    ]
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert texts == ["jenga (mean 5.39, 100 steps)", "vllm (mean 2.69, 200 steps)"]


def test_hit_rate_is_drawn_against_the_number_of_articles(tmp_path):
    runs = read_runs([article_runs(tmp_path)])

    (axis,) = plots.against(runs, parameter="n", metric="hit_rate").axes

    ours, stock = axis.lines
    assert list(ours.get_xdata()) == list(stock.get_xdata()) == [3, 12, 24]
    assert list(stock.get_ydata()) == pytest.approx([0.84, 0.66, 0.42])


def test_bars_have_a_height_for_each_model_and_manager(tmp_path):
    file = tmp_path / "rows.jsonl"
    for run, (model, manager, waste) in {
        "a": ("gemma-3-27b", "jenga", 0.01),
        "b": ("gemma-3-27b", "vllm", 0.12),
        "c": ("gpt-oss-20b", "jenga", 0.02),
        "d": ("gpt-oss-20b", "jenga", 0.04),
    }.items():
        write_rows(
            file, [made_run(run, model=model, manager=manager), made_summary(run, waste=waste)]
        )

    (axis,) = plots.bars(read_runs([file]), metric="waste").axes

    assert sorted(bar.get_height() for bar in axis.patches) == pytest.approx([0.01, 0.03, 0.12])
    # vLLM has no run of the second model.
    assert "-" in [text.get_text() for text in axis.texts]


@pytest.mark.parametrize("name", ["timeline", "batch", "hits", "latency", "waste", "throughput"])
def test_command_draws_every_figure(name, tmp_path, capsys):
    steps = name in {"timeline", "batch"}
    rows = write_runs(tmp_path / "rows.jsonl") if steps else article_runs(tmp_path)
    out = tmp_path / f"{name}.svg"

    code = main(["plot", name, str(rows), "--out", str(out), "--parameter", "n"])

    assert (code, capsys.readouterr().err) == (0, "")
    assert out.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hits", "--out", "x.svg"], "must have a number 'n'"),
        (["waste", "--out", "x.gif"], "must end in .svg"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(arguments, message, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [made_run(), *made_steps(num_steps=3), made_summary()])
    name, *rest = arguments

    assert main(["plot", name, str(rows), *rest]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

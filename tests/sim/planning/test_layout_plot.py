"""The picture of a large page."""

import sys
import xml.etree.ElementTree as ET

import pytest

from jenga.cli import main
from jenga.models import known_model
from jenga.planning.planner import plan
from jenga.sim.planning.layout_plot import draw_layout

pytest.importorskip("matplotlib", reason="extra `plots` is not installed")


def bars(axis):
    """Left edge, width and bottom of every bar."""
    return [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in axis.patches]


@pytest.mark.parametrize("name", ["gemma-3-27b", "nemotron-h-8b", "deepseek-v4-flash"])
def test_bars_are_the_geometrys_bytes(name):
    geometry = plan(known_model(name).spec())
    table = geometry.page_tables[0]

    axis = draw_layout(geometry, title=name).axes[0]

    lower = [bar for bar in bars(axis) if bar[2] == pytest.approx(0.4)]
    layers = [bar for bar in lower if bar[1] < 1]
    assert len(layers) == len(table.layers)
    for (left, width, _), layer, offset in zip(
        layers, table.layers, table.layer_offset_bytes, strict=True
    ):
        assert left == pytest.approx(offset / table.small_page_bytes)
        assert width == pytest.approx(
            layer.slot_bytes * table.slots_per_page / table.small_page_bytes
        )


def test_like_page_tables_are_drawn_once():
    geometry = plan(known_model("pyramidkv-llama-8b").spec())

    figure = draw_layout(geometry, title="")

    assert len(geometry.page_tables) == 32
    assert len(figure.axes) == 1
    assert figure.axes[0].get_title(loc="left").startswith("budget_0 .. budget_31: ")


def test_command_draws_the_same_svg_every_time(tmp_path):
    files = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for file in files:
        assert (
            main(["plan", "gemma-3-4b", "--gpu", "L4", "--without-vllm", "--plot", str(file)]) == 0
        )

    first, second = (file.read_bytes() for file in files)
    assert first == second
    text = " ".join(ET.fromstring(first).itertext())
    assert "one large page of 9,502,720 bytes" in text
    assert "sliding" in text


def test_command_refuses_another_format(tmp_path, capsys):
    file = tmp_path / "layout.bmp"

    assert main(["plan", "gemma-3-4b", "--without-vllm", "--plot", str(file)]) == 2
    assert "must end in .svg, .png, .pdf" in capsys.readouterr().err
    assert not file.exists()


def test_command_says_what_to_install_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    code = main(["plan", "gemma-3-4b", "--without-vllm", "--plot", str(tmp_path / "page.svg")])

    printed = capsys.readouterr()
    assert code == 2
    assert "Layer types" in printed.out
    assert "package 'matplotlib' is not installed" in printed.err
    assert "jenga-kv[plots]" in printed.err

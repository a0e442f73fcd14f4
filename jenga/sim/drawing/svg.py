"""Charts as SVG text, with the numbers that a page shows at the mouse pointer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 560, 230
"""Size of a chart, in units of its own. A page scales it."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 38

_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of values in a chart.

    Attributes:
        name: Its name on the page.
        colour: Its colour, such as "#0072B2".
        x: Positions of the values, ascending.
        y: The values.
        css_class: CSS class of its shapes, with which a page can hide them.
    """

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    css_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart's picture and its numbers.

    Attributes:
        svg: The complete SVG element.
        numbers: Numbers that a page shows at the mouse pointer, ready for JSON.
    """

    svg: str
    numbers: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of a chart. Both begin at 0.

    Attributes:
        x_label: Label below the chart.
        y_label: Label beside the chart. It is also the unit of the values.
        x_max: Value at the right end.
        y_max: Value at the upper end.
    """

    x_label: str
    y_label: str
    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        """Return the horizontal position of a value, in the chart's units."""
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / (self.x_max or 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value from the top, in the chart's units."""
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / (self.y_max or 1)


def stacked(name: str, axes: Axes, series: Sequence[Series]) -> Chart:
    """Draw areas on top of each other, the first one at the bottom.

    Args:
        name: Name of the chart, unique in the page.
        axes: Axes of the chart.
        series: Series of the areas. All have the same x.
    """
    x = series[0].x
    below = [0.0] * len(x)
    areas: list[str] = []
    for one in series:
        above = [low + value for low, value in zip(below, one.y, strict=True)]
        forth = [_point(axes, *each) for each in zip(x, above, strict=True)]
        back = [_point(axes, *each) for each in zip(reversed(x), reversed(below), strict=True)]
        points = " ".join([*forth, *back])
        areas.append(f'<polygon class="{one.css_class}" points="{points}" fill="{one.colour}"/>')
        below = above
    return _chart(name, axes, series, areas)


def lines(name: str, axes: Axes, series: Sequence[Series]) -> Chart:
    """Draw a line for each series. Each has an x of its own.

    Args:
        name: Name of the chart, unique in the page.
        axes: Axes of the chart.
        series: Series of the lines. The last one is drawn on top.
    """
    drawn = [
        f'<polyline class="line {one.css_class}" stroke="{one.colour}" points="'
        + " ".join(_point(axes, *each) for each in zip(one.x, one.y, strict=True))
        + '"/>'
        for one in series
    ]
    return _chart(name, axes, series, drawn)


def ticks(top: float) -> list[float]:
    """Return a few round values from 0 up to `top`, which must be positive."""
    step = 10.0 ** floor(log10(top / _TICKS))
    for factor in (1, 2, 5, 10):
        if top / (step * factor) <= _TICKS:
            step *= factor
            break
    return [step * index for index in range(int(top / step + 1e-9) + 1)]


def _point(axes: Axes, x: float, y: float) -> str:
    return f"{axes.x(x):.1f},{axes.y(y):.1f}"


def _chart(name: str, axes: Axes, series: Sequence[Series], drawn: Sequence[str]) -> Chart:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    middle, height = (_LEFT + right) / 2, (_TOP + bottom) / 2
    x_label, y_label = escape(axes.x_label), escape(axes.y_label)
    parts = [
        f'<svg class="chart" id="{escape(name)}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{y_label} over {x_label}</title>",
        *(_y_tick(axes, value, right) for value in ticks(axes.y_max or 1)),
        *drawn,
        *(_x_tick(axes, value, bottom) for value in ticks(axes.x_max or 1)),
        f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<text class="label" x="{middle}" y="{HEIGHT - 4}">{x_label}</text>',
        f'<text class="label" transform="rotate(-90)" x="{-height}" y="12">{y_label}</text>',
        f'<line class="cursor" x1="0" y1="{_TOP}" x2="0" y2="{bottom}"/>',
        "</svg>",
    ]
    numbers: dict[str, object] = {
        "left": _LEFT,
        "right": right,
        "xMax": axes.x_max,
        "xLabel": axes.x_label,
        "unit": axes.y_label,
        "series": [
            {
                "name": one.name,
                "colour": one.colour,
                "cssClass": one.css_class,
                "x": [_rounded(value) for value in one.x],
                "y": [_rounded(value) for value in one.y],
            }
            for one in series
        ],
    }
    return Chart(svg="\n".join(parts), numbers=numbers)


def _rounded(value: float) -> float:
    """Round to six digits. No page shows more."""
    return float(f"{value:.6g}")


def _y_tick(axes: Axes, value: float, right: float) -> str:
    y = axes.y(value)
    return (
        f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        f'<text class="tick end" x="{_LEFT - 6}" y="{y + 3.5:.1f}">{value:g}</text>'
    )


def _x_tick(axes: Axes, value: float, bottom: float) -> str:
    x = axes.x(value)
    return f'<text class="tick" x="{x:.1f}" y="{bottom + 14}">{value:g}</text>'

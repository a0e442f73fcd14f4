"""A report of several runs as one HTML file: charts, numbers and a choice of runs, no server.

The page fetches nothing: styles, script, pictures and numbers are in the file. Without a script
everything can still be read. Only the choice of runs and the values at the mouse pointer are
missing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby
from math import ceil

from jenga.sim.drawing.figures import CLASSES, SERIES
from jenga.sim.drawing.svg import Axes, Chart, Series, lines, stacked
from jenga.sim.drawing.text import bytes_text
from jenga.sim.results.rows import StepRow, SummaryRow
from jenga.sim.results.runs import Run, of_each

MAX_POINTS = 400
"""Most points of a line or an area. A chart is about as many pixels wide."""

GB = 1e9

_PARAMETERS = {"n": "number of articles", "rate": "requests per second"}
"""Parameters against which hit rates are drawn if they differ between runs, with their label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A number of a summary.

    Attributes:
        title: Title in the table.
        value: Function that reads the number.
        text: Function that writes it.
        best: Function that returns the better value, `max` or `min`. None if neither is better.
        bars: Whether the number is also drawn as bars.
    """

    title: str
    value: Callable[[SummaryRow], float | None]
    text: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None
    bars: bool = False

    def shown(self, summary: SummaryRow) -> str:
        """Return the number as text, or "-" if there is none."""
        value = self.value(summary)
        return "-" if value is None else self.text(value)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"  # noqa: PLR2004  four digits


def _seconds(value: float) -> str:
    return f"{value:,.3g} s"


_COLUMNS = (
    _Column(title="waste", value=lambda row: row.waste, text=_percent, best=min, bars=True),
    _Column(title="hit rate", value=lambda row: row.hit_rate, text=_percent, best=max, bars=True),
    _Column(
        title="mean decode batch",
        value=lambda row: row.mean_decode_batch,
        text=lambda value: f"{value:,.2f}",
        best=max,
        bars=True,
    ),
    _Column(
        title="output tokens per second",
        value=lambda row: row.tokens_per_s,
        text=_number,
        best=max,
        bars=True,
    ),
    _Column(title="requests per second", value=lambda row: row.requests_per_s, text=_number),
    _Column(title="waste while busy", value=lambda row: row.busy_waste, text=_percent, best=min),
    _Column(title="waste of bytes", value=lambda row: row.waste_of_bytes, text=_percent, best=min),
    _Column(title="steps", value=lambda row: row.num_steps, text=_count, best=min),
    _Column(title="seconds", value=lambda row: row.seconds, text=_number),
    _Column(title="preemptions", value=lambda row: row.num_preemptions, text=_count, best=min),
    _Column(title="evicted pages", value=lambda row: row.evicted_pages, text=_count),
    _Column(title="requests", value=lambda row: row.num_requests, text=_count),
    _Column(title="TTFT, mean", value=lambda row: row.ttft_s.mean, text=_seconds, best=min),
    _Column(title="TTFT, p99", value=lambda row: row.ttft_s.p99, text=_seconds, best=min),
    _Column(title="TPOT, mean", value=lambda row: row.tpot_s.mean, text=_seconds, best=min),
)


def report_html(runs: Sequence[Run], *, title: str = "Replays") -> str:
    """Return the complete page.

    Args:
        runs: Runs to compare, in the order of the page.
        title: Title of the page.
    """
    charts: dict[str, Chart] = {}
    colours = _colours(runs)
    body = [
        f"<h1>{escape(title)}</h1>",
        _introduction(runs),
        _chooser(runs, colours),
        _summary_table(runs, colours),
        _bars(runs, colours),
        _against(runs, charts),
        _batches(runs, colours, charts),
        '<h2>Memory</h2>\n<div class="runs">',
        *(_run_card(index, colours[index], runs, charts) for index in range(len(runs))),
        "</div>",
        '<div id="tip" role="status"></div>',
    ]
    numbers = json.dumps({name: chart.numbers for name, chart in charts.items()})
    # In JSON, "<" occurs only within strings. The escape means the same there and ends no script.
    numbers = numbers.replace("<", "\\u003c")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_asset('report.css')}</style>\n</head>\n<body>",
            *(part for part in body if part),
            f'<script type="application/json" id="numbers">{numbers}</script>',
            f"<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _asset(name: str) -> str:
    return (resources.files("jenga.sim") / "assets" / name).read_text(encoding="utf-8")


def _css_class(index: int) -> str:
    return f"run-{index}"


def _colours(runs: Sequence[Run]) -> list[str]:
    """Return a colour for each run, or for each manager if there are more runs than colours."""
    keys = [run.manager for run in runs] if len(runs) > len(SERIES) else range(len(runs))
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [SERIES[places[key] % len(SERIES)] for key in keys]


def _chip(colour: str) -> str:
    return f'<span class="chip" style="background:{colour}"></span>'


def _introduction(runs: Sequence[Run]) -> str:
    common = [
        f"{words} {escape(value)}"
        for words, values in (
            ("model", {run.row.model for run in runs}),
            ("trace", {run.row.trace for run in runs}),
            ("GPU", {run.row.gpu for run in runs}),
            ("arena", {bytes_text(run.row.arena_bytes) for run in runs}),
        )
        if len(values) == 1
        for value in values
        if value
    ]
    versions = of_each(run.row.jenga_version for run in runs if run.row.jenga_version)
    written = f" Written by jenga {', '.join(map(escape, versions))}." if versions else ""
    return (
        f'<p>{", ".join(common)}</p>\n<p class="muted">Bytes, tokens and steps are counted. '
        f"Seconds are modelled, not measured.{written}</p>"
    )


def _chooser(runs: Sequence[Run], colours: Sequence[str]) -> str:
    boxes = [
        f'<label><input type="checkbox" value="{_css_class(index)}" checked>'
        f"{_chip(colours[index])}{escape(run.label)}</label>"
        for index, run in enumerate(runs)
    ]
    buttons = '<button value="all">all</button><button value="none">none</button>'
    return f'<div class="chooser">{"".join(boxes)}{buttons}</div>'


def _summary_table(runs: Sequence[Run], colours: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(column.title)}</th>" for column in _COLUMNS)
    rows: list[str] = []
    for index, run in enumerate(runs):
        summary = run.summary
        if summary is None:
            cells = f'<td colspan="{len(_COLUMNS)}" class="muted">did not end</td>'
        else:
            rivals = [
                each.summary
                for each in runs
                if each.summary is not None
                and (each.row.model, each.row.trace) == (run.row.model, run.row.trace)
            ]
            cells = "".join(_cell(column, summary, rivals) for column in _COLUMNS)
        rows.append(
            f'<tr class="{_css_class(index)}"><td>{_chip(colours[index])}{escape(run.label)}</td>'
            f"{cells}</tr>"
        )
    return (
        '<h2>Results</h2>\n<div class="scroll"><table class="summary">'
        f"<thead><tr><th>run</th>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(column: _Column, summary: SummaryRow, rivals: Sequence[SummaryRow]) -> str:
    """Write a number. It is bold if no run of the same model and trace has a better one."""
    text = column.shown(summary)
    values = [value for each in rivals if (value := column.value(each)) is not None]
    # The written texts are compared, because digits that are not shown make nothing better.
    texts = {column.text(value) for value in values}
    is_best = (
        column.best is not None and len(texts) > 1 and text == column.text(column.best(values))
    )
    css_class = "best" if is_best else "usual"
    return f'<td class="{css_class}">{escape(text)}</td>'


def _bars(runs: Sequence[Run], colours: Sequence[str]) -> str:
    """Draw bars of the main numbers by model, with a bar for each run."""
    blocks: list[str] = []
    for column in _COLUMNS:
        if not column.bars:
            continue
        values = {
            index: value
            for index, run in enumerate(runs)
            if run.summary is not None and (value := column.value(run.summary)) is not None
        }
        most = max(values.values(), default=0.0)
        if not most:
            continue
        groups = [
            f'<div class="model"><div class="group">{escape(model)}</div>'
            + "".join(
                _bar(
                    _css_class(index),
                    escape(runs[index].label),
                    colour=colours[index],
                    share=values[index] / most,
                    value=column.text(values[index]),
                )
                for index in indices
                if index in values
            )
            + "</div>"
            for model, indices in _by_model(runs)
        ]
        blocks.append(f"<div><h3>{escape(column.title)}</h3>{''.join(groups)}</div>")
    return f'<h2>Comparison</h2>\n<div class="bars">{"".join(blocks)}</div>' if blocks else ""


def _bar(css_class: str, label: str, *, colour: str, share: float, value: str) -> str:
    return (
        f'<div class="bar {css_class}"><span title="{label}">{label}</span>'
        f'<span class="track"><div class="fill" style="width:{100 * share:.2f}%;'
        f'background:{colour}"></div></span><span class="value">{escape(value)}</span></div>'
    )


def _by_model(runs: Sequence[Run]) -> list[tuple[str, list[int]]]:
    models = of_each(run.row.model for run in runs)
    return [
        (model, [index for index, run in enumerate(runs) if run.row.model == model])
        for model in models
    ]


def _against(runs: Sequence[Run], charts: dict[str, Chart]) -> str:
    """Draw hit rates against a parameter that differs between runs of one model and manager.

    The result is empty if no parameter differs. The lines are of all runs, chosen or not, because a
    line belongs to several runs.
    """
    for parameter, words in _PARAMETERS.items():
        points: list[tuple[tuple[str, str], float, float]] = []
        for run in runs:
            value = _parameter(run, parameter)
            if value is not None and run.summary is not None:
                key = (run.row.model, run.manager)
                points.append((key, value, run.summary.hit_rate))
        points.sort()
        groups = [(key, list(group)) for key, group in groupby(points, lambda each: each[0])]
        if not any(len(group) > 1 for _, group in groups):
            continue
        names = {" ".join(filter(None, key)): group for key, group in groups}
        series = [
            Series(
                name=name,
                colour=SERIES[index % len(SERIES)],
                x=[x for _, x, _ in group],
                y=[100 * y for _, _, y in group],
            )
            for index, (name, group) in enumerate(names.items())
        ]
        axes = Axes(
            x_label=words,
            y_label="% of prompt tokens hit",
            x_max=max(x for one in series for x in one.x),
            y_max=100,
        )
        charts["against"] = chart = lines("against", axes, series)
        return (
            f'<h2>Hit rate against the {words}</h2>\n<div class="wide">'
            f"{_legend({one.name: one.colour for one in series})}{chart.svg}</div>"
        )
    return ""


def _parameter(run: Run, name: str) -> float | None:
    try:
        return run.parameter(name)
    except ValueError:
        return None


def _batches(runs: Sequence[Run], colours: Sequence[str], charts: dict[str, Chart]) -> str:
    """Draw the number of decoding requests, with a line for each run."""
    shown = [(index, run, _thinned(run.steps)) for index, run in enumerate(runs) if run.steps]
    if not shown:
        return ""
    series = [
        Series(
            name=run.label,
            colour=colours[index],
            x=[float(step.step) for step in steps],
            y=[float(step.num_decoding) for step in steps],
            css_class=_css_class(index),
        )
        for index, run, steps in shown
    ]
    axes = Axes(
        x_label="step",
        y_label="decoding requests",
        x_max=max(one.x[-1] for one in series),
        y_max=max(1.0, *(max(one.y) for one in series)),
    )
    charts["batch"] = chart = lines("batch", axes, series)
    return f'<h2>Decode batch</h2>\n<div class="wide">{chart.svg}</div>'


def _run_card(index: int, colour: str, runs: Sequence[Run], charts: dict[str, Chart]) -> str:
    run = runs[index]
    row = run.row
    facts = [
        row.model,
        f"manager {run.manager}",
        f"{row.gpu}, arena {bytes_text(row.arena_bytes)}"
        if row.gpu
        else f"arena {bytes_text(row.arena_bytes)}",
        f"tp {row.tp}" if row.tp > 1 else "",
        f"trace {row.trace}, {row.num_requests:,} requests",
        *(f"{name} {value}" for name, value in row.options.items()),
    ]
    parts = [
        f'<section class="run {_css_class(index)}">',
        f"<h3>{_chip(colour)}{escape(run.label)}</h3>",
        f'<p class="muted">{escape(", ".join(filter(None, facts)))}</p>',
    ]
    if run.steps:
        x_max = max(float(each.steps[-1].step) for each in runs if each.steps)
        steps = _thinned(run.steps)
        for name, series in (
            ("class", _class_series(steps)),
            ("table", _table_series(steps)),
        ):
            if not series:
                continue
            axes = Axes(x_label="step", y_label="GB", x_max=x_max, y_max=row.arena_bytes / GB)
            chart = stacked(f"{name}-{index}", axes, series)
            charts[f"{name}-{index}"] = chart
            shown = {one.name: one.colour for one in series if not one.name.endswith("not used")}
            parts += [_legend(shown), chart.svg]
    else:
        parts.append('<p class="muted">The rows of this run have no steps.</p>')
    return "\n".join([*parts, "</section>"])


def _legend(colours: Mapping[str, str]) -> str:
    entries = (f"<span>{_chip(colour)}{escape(name)}</span>" for name, colour in colours.items())
    return f'<div class="legend">{"".join(entries)}</div>'


def _thinned(steps: Sequence[StepRow]) -> Sequence[StepRow]:
    return steps[:: ceil(len(steps) / MAX_POINTS)]


def _class_series(steps: Sequence[StepRow]) -> list[Series]:
    x = [float(step.step) for step in steps]
    return [
        Series(
            name=words,
            colour=colour,
            x=x,
            y=[getattr(step, f"{name}_bytes") / GB for step in steps],
        )
        for name, (words, colour) in CLASSES.items()
    ]


def _table_series(steps: Sequence[StepRow]) -> list[Series]:
    """Return the used bytes of each page table and, in a paler colour above, its unused bytes."""
    x = [float(step.step) for step in steps]
    names = of_each(name for step in steps for name in step.tables)
    series: list[Series] = []
    for index, name in enumerate(names):
        tables = [step.tables.get(name) for step in steps]
        used = [table.used_bytes / GB if table else 0.0 for table in tables]
        unused = [
            (table.useless_bytes + table.empty_bytes) / GB if table else 0.0 for table in tables
        ]
        colour = SERIES[index % len(SERIES)]
        series += [
            Series(name=name, colour=colour, x=x, y=used),
            Series(name=f"{name}, not used", colour=f"{colour}66", x=x, y=unused),
        ]
    return series

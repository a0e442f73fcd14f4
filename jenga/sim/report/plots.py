"""Figures from the rows of replays, with one function for each figure (extra `plots`)."""

from collections.abc import Callable, Sequence
from typing import Any

from jenga.sim.drawing.figures import CLASSES, GREY, PALE, SERIES, plotting
from jenga.sim.results.rows import StepRow, SummaryRow
from jenga.sim.results.runs import Run, of_each

GB = 1e9

METRICS: dict[str, tuple[str, Callable[[SummaryRow], float | None]]] = {
    "tokens_per_s": ("output tokens per second (modelled)", lambda row: row.tokens_per_s),
    "requests_per_s": ("requests per second (modelled)", lambda row: row.requests_per_s),
    "mean_decode_batch": ("mean number of decoding requests", lambda row: row.mean_decode_batch),
    "num_preemptions": ("preemptions", lambda row: float(row.num_preemptions)),
    "hit_rate": ("share of prompt tokens hit", lambda row: row.hit_rate),
    "waste": ("waste: share of held bytes not used", lambda row: row.waste),
    "busy_waste": ("waste of busy steps", lambda row: row.busy_waste),
    "waste_of_bytes": ("waste of the bytes of all steps", lambda row: row.waste_of_bytes),
    "ttft_s": ("mean TTFT, s (modelled)", lambda row: row.ttft_s.mean),
    "tpot_s": ("mean TPOT, s (modelled)", lambda row: row.tpot_s.mean),
    "e2e_s": ("mean time of a request, s (modelled)", lambda row: row.e2e_s.mean),
}
"""Numbers of a summary, with the label of their axis and the function that reads them."""

AXES: dict[str, tuple[str, Callable[[StepRow], float]]] = {
    "steps": ("step", lambda step: float(step.step)),
    "time": ("modelled time, s", lambda step: step.time_s),
}
"""Possible horizontal axes of a timeline, with their label and the function that reads a step."""


_PARAMETERS = {"n": "number of articles", "rate": "requests per second"}
"""Labels of the axes of run parameters."""


def timeline(runs: Sequence[Run], *, over: str = "steps") -> Any:  # noqa: ANN401  matplotlib
    """Draw the bytes of each run's arena over time: by class left, by page table right.

    The figure is the paper's 15, with used, wasted (held but useless, empty in held large pages)
    and unallocated bytes. Cached bytes are a class of their own. On the right, the pale part of
    each page table is the bytes that it holds and does not use.

    Args:
        runs: Runs to draw. Each gets one row of the figure.
        over: Name in `AXES`.

    Raises:
        ValueError: A run has no steps.
    """
    x_label, x_of = AXES[over]
    for run in runs:
        if not run.steps:
            msg = f"{run.source}: run {run.row.run!r} has no steps to draw"
            raise ValueError(msg)
    with plotting() as plt:
        figure, axes = plt.subplots(
            len(runs), 2, figsize=(11, 0.8 + 2.4 * len(runs)), squeeze=False, sharex=False
        )
        last_x = max(x_of(run.steps[-1]) for run in runs)
        for run, (left, right) in zip(runs, axes, strict=True):
            x = [x_of(step) for step in run.steps]
            _draw_classes(left, run, x)
            _draw_tables(right, run, x)
            left.set_title(f"{run.label}: by class")
            right.set_title(f"{run.label}: by page table")
            for axis in (left, right):
                axis.set_xlim(0, last_x)
                axis.set_ylim(0, run.row.arena_bytes / GB)
                axis.set_ylabel("GB")
        for axis in axes[-1]:
            axis.set_xlabel(x_label)
        _legend_below(figure, axes[0, 0])
        figure.tight_layout(rect=(0, 0.06 / len(runs), 1, 1))
    return figure


def _draw_classes(axis: Any, run: Run, x: Sequence[float]) -> None:  # noqa: ANN401
    axis.stackplot(
        x,
        [[getattr(step, f"{name}_bytes") / GB for step in run.steps] for name in CLASSES],
        labels=[words for words, _ in CLASSES.values()],
        colors=[colour for _, colour in CLASSES.values()],
        linewidth=0,
    )


def _draw_tables(axis: Any, run: Run, x: Sequence[float]) -> None:  # noqa: ANN401
    names = of_each(name for step in run.steps for name in step.tables)
    if not names:
        axis.text(0.5, 0.5, "the rows have no page tables", ha="center", color=GREY)
        return
    layers: list[list[float]] = []
    colours: list[str] = []
    labels: list[str] = []
    for index, name in enumerate(names):
        colour = SERIES[index % len(SERIES)]
        used = [_table_bytes(step, name, "used_bytes") / GB for step in run.steps]
        unused = [
            sum(_table_bytes(step, name, each) for each in ("useless_bytes", "empty_bytes")) / GB
            for step in run.steps
        ]
        layers += [used, unused]
        colours += [colour, f"{colour}66"]
        labels += [name, f"_{name}"]
    axis.stackplot(x, layers, labels=labels, colors=colours, linewidth=0)
    axis.legend(loc="upper right", fontsize=7, frameon=True, framealpha=0.85, ncols=2)


def _table_bytes(step: StepRow, name: str, field: str) -> int:
    table = step.tables.get(name)
    return getattr(table, field) if table is not None else 0


def _legend_below(figure: Any, axis: Any) -> None:  # noqa: ANN401
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8)


def decode_batch(runs: Sequence[Run], *, over: str = "steps") -> Any:  # noqa: ANN401
    """Draw the number of decoding requests in each step, a line for each run.

    The legend has the mean over steps in which a request decodes, and the number of steps.

    Args:
        runs: Runs with steps.
        over: Name in `AXES`.
    """
    x_label, x_of = AXES[over]
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(8, 3.6))
        for index, (run, colour) in enumerate(zip(runs, _colours(runs), strict=True)):
            label = run.label
            if run.summary is not None:
                label += (
                    f" (mean {run.summary.mean_decode_batch:.2f}, {run.summary.num_steps:,} steps)"
                )
            axis.step(
                [x_of(step) for step in run.steps],
                [step.num_decoding for step in run.steps],
                where="post",
                color=colour,
                label=label,
                linewidth=_width(index, len(runs)),
            )
        axis.set_xlabel(x_label)
        axis.set_ylabel("decoding requests")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.legend(fontsize=8)
        figure.tight_layout()
    return figure


def against(runs: Sequence[Run], *, parameter: str, metric: str) -> Any:  # noqa: ANN401
    """Draw a number of the summaries against a parameter of the runs.

    The hit rate against the number of articles is the paper's figure 18, latency against the
    request rate its figure 15. Each model has a panel, each manager a line.

    Args:
        runs: Runs with summaries.
        parameter: Name for `Run.parameter`.
        metric: Name in `METRICS`.

    Raises:
        ValueError: A run has no such parameter or no summary.
    """
    y_label, _ = METRICS[metric]
    models = of_each(run.row.model for run in runs)
    managers = of_each(run.manager for run in runs)
    with plotting() as plt:
        figure, axes = plt.subplots(
            1, len(models), figsize=(1.2 + 3.4 * len(models), 3.4), squeeze=False, sharey=True
        )
        for model, axis in zip(models, axes[0], strict=True):
            for index, manager in enumerate(managers):
                points = sorted(
                    (run.parameter(parameter), _value(run, metric))
                    for run in runs
                    if run.row.model == model and run.manager == manager
                )
                if points:
                    axis.plot(
                        [x for x, _ in points],
                        [y for _, y in points],
                        marker="o",
                        markersize=4,
                        color=SERIES[index % len(SERIES)],
                        linewidth=_width(index, len(managers)),
                        label=manager,
                    )
            if all(run.parameter(parameter).is_integer() for run in runs):
                axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_title(model)
            axis.set_xlabel(_PARAMETERS.get(parameter, parameter))
            axis.set_ylim(bottom=0)
        axes[0, 0].set_ylabel(y_label)
        axes[0, 0].legend(fontsize=8)
        figure.tight_layout()
    return figure


def bars(runs: Sequence[Run], *, metric: str) -> Any:  # noqa: ANN401
    """Draw a number of the summaries for each model, with a bar for each manager.

    Several runs of one model and manager are averaged.

    Args:
        runs: Runs with summaries.
        metric: Name in `METRICS`.

    Raises:
        ValueError: A run has no summary.
    """
    label, _ = METRICS[metric]
    models = of_each(run.row.model for run in runs)
    managers = of_each(run.manager for run in runs)
    width = 0.8 / len(managers)
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(max(5, 1.5 + 0.35 * len(models) * len(managers)), 3.6))
        for index, manager in enumerate(managers):
            for place, model in enumerate(models):
                values = [
                    _value(run, metric)
                    for run in runs
                    if run.row.model == model and run.manager == manager
                ]
                left = place - 0.4 + (index + 0.5) * width
                if not values:
                    axis.text(left, 0, "-", ha="center", va="bottom", color=GREY)
                    continue
                value = sum(values) / len(values)
                axis.bar(
                    left,
                    value,
                    width=0.9 * width,
                    color=SERIES[index % len(SERIES)],
                    label=manager if place == 0 else None,
                )
                axis.text(left, value, _short(metric, value), ha="center", va="bottom", fontsize=6)
        axis.set_xticks(range(len(models)), models, rotation=15)
        axis.set_ylabel(label)
        if metric in _SHARES:
            axis.yaxis.set_major_formatter(_percent)
        axis.grid(axis="y", color=PALE)
        axis.set_axisbelow(True)
        axis.legend(
            fontsize=8, ncols=min(4, len(managers)), loc="lower left", bbox_to_anchor=(0, 1)
        )
        figure.tight_layout()
    return figure


def _value(run: Run, metric: str) -> float:
    """Return a number of the run's summary."""
    value = METRICS[metric][1](run.required_summary())
    if value is None:
        msg = (
            f"{run.source}: run {run.row.run!r} has no {metric}: no sampled step has a decoding "
            f"request, or an older version wrote its rows; replay it again, with --every 1 if it "
            f"is short"
        )
        raise ValueError(msg)
    return value


def _width(index: int, count: int) -> float:
    """Return the width of a line. Lines drawn first are wider, so that equal lines are all seen."""
    return 1.2 + min(1.5 * (count - 1 - index), 6.0)


_SHARES = {"waste", "busy_waste", "waste_of_bytes", "hit_rate"}


def _short(metric: str, value: float) -> str:
    return f"{value:.2%}" if metric in _SHARES else f"{value:.3g}"


def _percent(share: float, _place: int) -> str:
    return f"{100 * share:g} %"


def _colours(runs: Sequence[Run]) -> list[str]:
    return [SERIES[index % len(SERIES)] for index in range(len(runs))]

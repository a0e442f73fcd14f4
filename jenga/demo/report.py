"""Report of a demo's result, as text for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jenga.demo.documents import OUTPUT_TOKENS
from jenga.demo.ending import Ending
from jenga.demo.memory import Step, StoredTable, Timeline
from jenga.demo.modelled import LARGE_MODEL
from jenga.demo.picture import bars_text
from jenga.demo.run import Completion, DemoResult
from jenga.demo.stock import StockTimeline
from jenga.sim.arenas.vllm_plan import BLOCK_TOKENS
from jenga.sim.drawing.text import wrapped

_MAX_ROWS = 18
"""Largest number of steps shown of a timeline. The peak is always among them."""

_WIDTH = 100
"""Largest number of characters in a line of prose."""

_SHOWN_CHARACTERS = 66
"""Number of characters shown of a longer prompt, counted from its end."""


def as_json(result: DemoResult) -> str:
    """Get the whole result of the demo as JSON."""
    return json.dumps(asdict(result), indent=2)


def as_text(result: DemoResult) -> str:
    """Get the report as text."""
    sections = [
        _generation(result.completions),
        _geometry(result.timeline, result.arena_bytes),
        _memory(result.timeline, result.stock),
        _speed(result),
        *_ending(result),
    ]
    return "\n\n".join(sections)


def _heading(text: str) -> str:
    return f"{text}\n{'-' * len(text)}"


def _generation(completions: Sequence[Completion]) -> str:
    lines = [_heading("Generated text")]
    for completion in completions:
        prompt = completion.prompt.replace("\n", "\\n")
        if len(prompt) > _SHOWN_CHARACTERS:
            prompt = "..." + prompt[-_SHOWN_CHARACTERS:]
        text = completion.text.replace("\n", "\\n")
        lines.append(f"[{completion.num_prompt_tokens} tokens] {prompt}")
        lines.append(f"    -> {text}")
    return "\n".join(lines)


def _geometry(timeline: Timeline, arena_bytes: int) -> str:
    rows = [_table_row(table, timeline.large_page_bytes) for table in timeline.tables]
    header = ("page table", "layers", "tokens/page", "small page", "small/large", "padding")
    num_large_pages = arena_bytes // timeline.large_page_bytes
    arena = (
        f"arena {_bytes(arena_bytes)} = {num_large_pages} large pages of "
        f"{_bytes(timeline.large_page_bytes)}, the null page included"
    )
    return "\n".join(
        [
            _heading(f"Geometry ({timeline.geometry_name})"),
            arena,
            *_aligned([header, *rows]),
        ]
    )


def _table_row(table: StoredTable, large_page_bytes: int) -> tuple[str, ...]:
    padding = table.small_pages_per_large_page * table.padding_bytes / large_page_bytes
    return (
        table.name,
        str(len(table.layers)),
        "a state" if table.is_state else str(table.tokens_per_page),
        _bytes(table.small_page_bytes),
        str(table.small_pages_per_large_page),
        f"{padding:.2%}",
    )


def _memory(timeline: Timeline, stock: Sequence[StockTimeline]) -> str:
    numbers = [f"[{number}]" for number in range(1, len(stock) + 1)]
    groups = ["", "", ""]
    header = ["step", "requests", "tokens"]
    for layer_type in timeline.layer_types:
        groups += [layer_type, "", *("" for _ in numbers[:1])]
        header += ["needed", "jenga", *numbers[:1]]
    groups += ["all types", "", *("" for _ in numbers)]
    header += ["needed", "jenga", *numbers]
    rows = [
        _memory_row(index, timeline.steps[index], [run.held_bytes[index] for run in stock])
        for index in _shown_steps(timeline.steps)
    ]
    legend = [
        f"[{number}] {run.name}: groups: {run.num_groups}, block: {run.block_tokens} tokens, "
        f"{_bytes(run.block_bytes)}"
        for number, run in enumerate(stock, start=1)
    ]
    return "\n".join(
        [
            _heading("Memory held over the run, in KiB"),
            "needed: slots that a next token reads or writes. jenga: large pages held, with the",
            "empty small pages in them. [n]: blocks that vLLM's own manager holds when its planner",
            "groups the same layers and the manager is given the same requests in the same steps:",
            *legend,
            "",
            *_aligned([tuple(groups), tuple(header), *rows]),
            "",
            *_totals(timeline, stock),
        ]
    )


def _memory_row(index: int, step: Step, stock_bytes: Sequence[dict[str, int]]) -> tuple[str, ...]:
    row = [str(index), str(len(step.request_tokens)), str(sum(step.request_tokens.values()))]
    held = [step.needed_bytes, step.held_bytes, *stock_bytes]
    for layer_type in step.held_bytes:
        row += [_kib(by_type[layer_type]) for by_type in held[:3]]
    row += [_kib(sum(by_type.values())) for by_type in held]
    return tuple(row)


def _totals(timeline: Timeline, stock: Sequence[StockTimeline]) -> list[str]:
    """Compare held with needed bytes, summed over all steps. Pages held for longer count more."""
    needed_bytes = sum(sum(step.needed_bytes.values()) for step in timeline.steps)
    if not needed_bytes:
        return []
    series = [("jenga", [step.held_bytes for step in timeline.steps])]
    series += [(f"[{n}] {run.name}", list(run.held_bytes)) for n, run in enumerate(stock, start=1)]
    rows = [("", "peak", "held / needed, over all steps")]
    for name, steps in series:
        totals = [sum(step.values()) for step in steps]
        rows.append((name, _bytes(max(totals)), f"{sum(totals) / needed_bytes:.3f}"))
    return _aligned(rows)


def _shown_steps(steps: Sequence[Step]) -> list[int]:
    """Choose steps spread over the run, and the first of those at which most bytes are held."""
    if len(steps) <= _MAX_ROWS:
        return list(range(len(steps)))
    spread = {round(i * (len(steps) - 1) / (_MAX_ROWS - 2)) for i in range(_MAX_ROWS - 1)}
    peak = max(range(len(steps)), key=lambda index: sum(steps[index].held_bytes.values()))
    return sorted(spread | {peak})


def _speed(result: DemoResult) -> str:
    prompt_tokens = sum(completion.num_prompt_tokens for completion in result.completions)
    tokens = sum(completion.num_tokens for completion in result.completions)
    speed = (prompt_tokens + tokens) / result.generate_s
    what = f"{Path(result.model).name} in {result.dtype} on {result.machine}"
    lines = [
        _heading("Speed of what ran"),
        f"{what}, attention by {result.computed_by}",
        f"engine ready in {result.start_s:.0f} s",
        f"{prompt_tokens} prompt tokens read, {tokens} generated in {result.generate_s:.1f} s",
        f"{speed:.2f} tokens/s, read and generated together",
    ]
    if result.computed_by != "compiled kernels":
        lines.append("(on a CPU the engine runs for its results; its speed is no measure)")
    return "\n".join(lines)


def _ending(result: DemoResult) -> list[str]:
    ending = result.ending
    if ending is None:
        reason = result.ending_failure or result.ending_left_out
        return [f"Questions on documents are left out: {reason}"] if reason else []
    return [
        "\n".join(
            [
                *_documents(ending),
                "",
                *bars_text([ending.stock.bar, ending.ours.bar]),
                "",
                *_picture(ending),
            ]
        ),
        _seconds(ending),
        _plan(ending),
    ]


def _documents(ending: Ending) -> list[str]:
    others = ", ".join(f"{name} {found:,}" for name, found in ending.found_by_setting.items())
    texts = "equal" if ending.has_equal_texts else "not equal"
    what = (
        f"{ending.num_documents} documents of {ending.document_tokens:,} tokens, "
        f"{ending.num_questions} questions on each, in turns; {OUTPUT_TOKENS} tokens an answer. "
        f"Each cache has {_bytes(ending.arena_bytes)}, and all tokens in all layers would take "
        f"{_bytes(ending.all_bytes)}."
    )
    how = (
        f"vLLM runs with blocks of {BLOCK_TOKENS} tokens and {ending.stock.setting}. Tokens found "
        f"in each setting, by a replay on its manager: {others}."
    )
    same = f"The texts that both engines generated are {texts}."
    return [
        _heading("Questions on documents, by two engines (counted)"),
        *(line for text in (what, how, same) for line in wrapped(text, width=_WIDTH)),
    ]


def _picture(ending: Ending) -> list[str]:
    if ending.picture is None:
        return [f"No picture was written: {ending.picture_refusal}"]
    return [f"picture: {ending.picture}"]


def _seconds(ending: Ending) -> str:
    gpu = ending.gpu
    where = gpu.timed if gpu.name else f"{gpu.timed}, assumed: no GPU is here"
    if gpu.name and gpu.timed != gpu.planned:
        where = f"{gpu.timed}, in place of {gpu.name}, which the model of time does not know"
    rows = [("", ending.stock.name, ending.ours.name)]
    if ending.stock.seconds is not None and ending.ours.seconds is not None:
        rows.append(("this model", _ms(ending.stock.seconds), _ms(ending.ours.seconds)))
    rows.append(
        (
            f"{LARGE_MODEL}, for the same tokens",
            _ms(ending.stock.large_model_seconds),
            _ms(ending.ours.large_model_seconds),
        )
    )
    return "\n".join(
        [
            _heading(f"Time to read these prompts on a GPU (modelled: {where})"),
            *_aligned(rows),
            "A roofline gives these times; nobody measured them. A CPU's seconds say nothing.",
        ]
    )


def _plan(ending: Ending) -> str:
    gpu = ending.gpu
    where = f"your {gpu.name}" if gpu.name else f"an {gpu.planned}, assumed: no GPU is here"
    lines = [_heading(f"`jenga plan` for {where}")]
    if ending.plan is None:
        lines.append(f"It refuses: {ending.plan_refusal}")
    else:
        lines += [f"$ {ending.plan.command}", "...", ending.plan.text]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.0f}"


def _bytes(num_bytes: int) -> str:
    """Write a number of bytes in the largest binary unit in which it is at least 1."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.4g} {unit}"
    return f"{num_bytes} bytes"

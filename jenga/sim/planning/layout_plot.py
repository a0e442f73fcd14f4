"""A picture of one large page, with the layer, slot or padding to which its bytes belong.

Every page table has two bars. The upper bar is the large page, cut into small pages. The lower bar
is the first small page, enlarged and cut into layers and their slots. Hatched bytes never hold
data.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jenga.geometry import Geometry, PageTable
from jenga.sim.drawing.figures import GREY, PALE, SERIES, plotting
from jenga.sim.drawing.text import bytes_text

_MAX_LINES = 128
"""Most small pages, layers or slots that lines separate. More lines would blacken the bar."""

_MAX_NAMES = 12
"""Most layers that are named in a bar. If there are more, the first and last are named below it."""

_NAMED_PADDING = 0.04
"""Least share of a small page, 0 to 1, at which its padding has room for a name."""

_HATCH = "////"


def draw_layout(geometry: Geometry, *, title: str) -> Any:  # noqa: ANN401  matplotlib
    """Draw a figure of a geometry's large page.

    Args:
        geometry: Any geometry.
        title: Text above the figure, before the large page's bytes.
    """
    groups = [list(group) for _, group in groupby(geometry.page_tables, _alike)]
    with plotting() as plt:
        figure, axes = plt.subplots(
            len(groups), 1, figsize=(10, 0.7 + 1.75 * len(groups)), squeeze=False
        )
        for axis, tables, colour in zip(axes[:, 0], groups, _cycle(len(groups)), strict=True):
            _draw_table(axis, tables, geometry.large_page_bytes, colour)
        figure.suptitle(
            f"{title}: one large page of {geometry.large_page_bytes:,} bytes, "
            f"as each page table cuts it",
            x=0.01,
            ha="left",
        )
        figure.tight_layout()
    return figure


def _alike(table: PageTable) -> object:
    """Return a key that is equal for page tables that look the same. These are drawn once."""
    return (
        type(table.layer_type),
        table.small_page_bytes,
        table.layer_offset_bytes,
        table.tokens_per_page,
        table.payload_bytes,
    )


def _cycle(count: int) -> list[str]:
    return [SERIES[index % len(SERIES)] for index in range(count)]


def _draw_table(axis: Any, tables: Sequence[PageTable], large_page_bytes: int, colour: str) -> None:  # noqa: ANN401
    table = tables[0]
    _draw_large_page(axis, table, large_page_bytes, colour)
    _draw_small_page(axis, table, colour)
    # Dotted lines show which part is enlarged.
    right = table.small_page_bytes / large_page_bytes
    for upper, lower in ((0, 0), (right, 1)):
        axis.plot((upper, lower), (1.3, 1.0), color=GREY, linewidth=0.7, linestyle=":")
    names = tables[0].name if len(tables) == 1 else f"{tables[0].name} .. {tables[-1].name}"
    axis.set_title(f"{names}: {_words(table, large_page_bytes)}", pad=4)
    axis.set_xlim(0, 1)
    axis.set_ylim(-0.35, 2.35)
    axis.axis("off")


def _words(table: PageTable, large_page_bytes: int) -> str:
    count = table.small_pages_per_large_page
    pages = "one small page" if count == 1 else f"{count:,} small pages"
    kept = "one state" if table.is_state else f"{table.tokens_per_page} tokens"
    layers = "one layer" if len(table.layers) == 1 else f"{len(table.layers)} layers"
    padding = table.padding_bytes * count
    wasted = f", {padding / large_page_bytes:.2%} of it padding" if padding else ", no padding"
    return f"{pages} of {table.small_page_bytes:,} bytes, {kept} in {layers}{wasted}"


def _draw_large_page(axis: Any, table: PageTable, large_page_bytes: int, colour: str) -> None:  # noqa: ANN401
    share = table.small_page_bytes / large_page_bytes
    count = table.small_pages_per_large_page
    payload = table.payload_bytes / table.small_page_bytes
    _bar(axis, 0, 1, bottom=1.3, colour=_lighter(colour, 0.35))
    if count <= _MAX_LINES:
        for index in range(count):
            if payload < 1:
                left = share * (index + payload)
                _bar(axis, left, share * (1 - payload), bottom=1.3, colour=PALE, hatch=_HATCH)
            axis.plot((share * index,) * 2, (1.3, 1.9), color="white", linewidth=0.8)
    _bar(axis, 0, share, bottom=1.3, colour=colour)
    axis.text(0, 2.0, "0", ha="left", fontsize=7, color=GREY)
    axis.text(1, 2.0, f"{large_page_bytes:,}", ha="right", fontsize=7, color=GREY)


def _draw_small_page(axis: Any, table: PageTable, colour: str) -> None:  # noqa: ANN401
    total = table.small_page_bytes
    _bar(axis, 0, 1, bottom=0.4, colour=PALE, hatch=_HATCH)
    layers = list(zip(table.layers, table.layer_offset_bytes, strict=True))
    widths = [layer.slot_bytes * table.slots_per_page / total for layer, _ in layers]
    for index, ((layer, offset), width) in enumerate(zip(layers, widths, strict=True)):
        left = offset / total
        shade = 0.85 if index % 2 else 0.55
        _bar(axis, left, width, bottom=0.4, colour=_lighter(colour, shade))
        _draw_slots(axis, table, index, left, width)
        if len(layers) <= _MAX_NAMES:
            axis.text(
                left + width / 2, 0.7, _short(layer.name), ha="center", va="center", fontsize=7
            )
    end = layers[-1][1] / total + widths[-1]
    first, last = "0", f"{total:,}"
    if len(layers) > _MAX_NAMES:
        first = f"0: {_short(layers[0][0].name)}"
        last = f"{_short(layers[-1][0].name)} to {last}"
    axis.text(0, 0.3, first, ha="left", va="top", fontsize=7, color=GREY)
    axis.text(1, 0.3, last, ha="right", va="top", fontsize=7, color=GREY)
    axis.text(0.5, 0.3, _slot_words(table), ha="center", va="top", fontsize=7)
    if 1 - end > _NAMED_PADDING:
        axis.text(
            (1 + end) / 2,
            0.7,
            f"padding {bytes_text(table.padding_bytes)}",
            ha="center",
            va="center",
            fontsize=7,
            backgroundcolor="white",
        )


def _short(name: str) -> str:
    """Return a layer's name without the prefix that all layers share."""
    return name.rsplit("/", 1)[-1].removeprefix("layers.")


def _slot_words(table: PageTable) -> str:
    sizes = sorted({layer.slot_bytes for layer in table.layers})
    words = " or ".join(f"{slot_bytes:,}" for slot_bytes in sizes)
    if table.is_state:
        parts = " + ".join(f"{part.name} {part.num_bytes:,}" for part in table.layers[0].parts)
        return f"in each layer one state of {words} bytes{f' ({parts})' if parts else ''}"
    slots = "one slot" if table.slots_per_page == 1 else f"{table.slots_per_page} slots"
    return f"in each layer {slots} of {words} bytes"


def _draw_slots(axis: Any, table: PageTable, index: int, left: float, width: float) -> None:  # noqa: ANN401
    """Draw lines between the slots of a layer, or between the parts of its state."""
    total = table.small_page_bytes
    edges: list[float] = []
    parts = table.part_offset_bytes[index] if table.part_offset_bytes else ()
    if len(parts) > 1:
        edges = [offset / total for offset in parts[1:]]
    elif len(table.layers) * table.slots_per_page <= _MAX_LINES:
        edges = [
            left + width * slot / table.slots_per_page for slot in range(1, table.slots_per_page)
        ]
    for edge in edges:
        axis.plot((edge, edge), (0.4, 0.55), color="white", linewidth=0.5)


def _lighter(colour: str, share: float) -> str:
    """Mix a colour with white. The result is opaque, so that no hatch shows through."""
    parts = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def _bar(axis: Any, left: float, width: float, *, bottom: float, colour: str, **look: Any) -> None:  # noqa: ANN401
    axis.barh(
        bottom + 0.3,
        width,
        left=left,
        height=0.6,
        color=colour,
        edgecolor="white" if "hatch" not in look else GREY,
        linewidth=0.4,
        **look,
    )

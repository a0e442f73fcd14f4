"""Bars of found and computed tokens, as text for the terminal and as an SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CELLS = 50
"""Number of characters of the longest bar."""

_FOUND, _COMPUTED = "#", "."

_WIDTH, _ROW, _TOP, _LEFT, _RIGHT = 720, 46, 64, 150, 60
"""Sizes of the picture in its own units: width, bar row, and three margins."""

_FOUND_COLOUR, _COMPUTED_COLOUR = "#0072B2", "#E69F00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Numbers of tokens of one manager.

    Attributes:
        name: Name of the manager.
        found_tokens: Number of tokens found in its cache.
        computed_tokens: Number of tokens that were computed.
    """

    name: str
    found_tokens: int
    computed_tokens: int


def bars_text(bars: Sequence[Bar]) -> list[str]:
    """Draw bars with plain characters, one line for each, and add a line that explains them."""
    most_tokens = max(bar.found_tokens + bar.computed_tokens for bar in bars)
    width = max(len(bar.name) for bar in bars)
    lines: list[str] = []
    for bar in bars:
        found = round(_CELLS * bar.found_tokens / most_tokens)
        both = round(_CELLS * (bar.found_tokens + bar.computed_tokens) / most_tokens)
        drawn = (_FOUND * found + _COMPUTED * (both - found)).ljust(_CELLS)
        lines.append(
            f"{bar.name:{width}}  {drawn}  {bar.found_tokens:,} found, {bar.computed_tokens:,} "
            f"computed"
        )
    return [*lines, f"{'':{width}}  {_FOUND} found in the cache   {_COMPUTED} computed"]


def bars_svg(title: str, bars: Sequence[Bar]) -> str:
    """Draw the same bars as a complete SVG picture, with a title and a legend."""
    most_tokens = max(bar.found_tokens + bar.computed_tokens for bar in bars)
    scale = (_WIDTH - _LEFT - _RIGHT) / most_tokens
    height = _TOP + _ROW * len(bars) + 12
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="13">'
    )
    parts = [
        begin,
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15">{escape(title)}</text>',
        *_key(_LEFT, _FOUND_COLOUR, "found in the cache"),
        *_key(_LEFT + 180, _COMPUTED_COLOUR, "computed"),
    ]
    for index, bar in enumerate(bars):
        y = _TOP + _ROW * index
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 20}" text-anchor="end">{escape(bar.name)}</text>'
        )
        x = float(_LEFT)
        for tokens, colour in (
            (bar.found_tokens, _FOUND_COLOUR),
            (bar.computed_tokens, _COMPUTED_COLOUR),
        ):
            width = tokens * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" fill="{colour}"/>'
            )
            if tokens:
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 20}" text-anchor="middle" '
                    f'fill="white">{tokens:,}</text>'
                )
            x += width
    return "\n".join([*parts, "</svg>", ""])


def _key(x: int, colour: str, text: str) -> tuple[str, str]:
    return (
        f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>',
        f'<text x="{x + 18}" y="47">{text}</text>',
    )

"""Shared parts of all figures: matplotlib, loaded when it is needed, colours, and saving.

Colours are Okabe and Ito's, which people with any colour vision can tell apart.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#999999", "#E8E8E8"

SERIES = (BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW, BLACK)
"""Colours of things of one kind: runs, page tables, models."""

CLASSES: Mapping[str, tuple[str, str]] = {
    "used": ("used by the next tokens", BLUE),
    "useless": ("held but useless", RED),
    "empty": ("empty in held large pages", ORANGE),
    "cached": ("cached", GREEN),
    "unallocated": ("unallocated", PALE),
}
"""Classes of an arena's bytes, lowest in a stack first, with their name in figures and colour."""

_FORMATS = (".svg", ".png", ".pdf")

_STYLE = {
    "figure.dpi": 120,
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    # Names of models and managers are plain text, even with dollar signs in them.
    "text.parse_math": False,
    # Text stays text, so that files are smaller and words can be found in them.
    "svg.fonttype": "none",
    # Without a random salt, the same figure has the same bytes.
    "svg.hashsalt": "jenga",
}


@contextmanager
def plotting() -> Generator[Any]:
    """Return matplotlib.pyplot with the style of the figures.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    mpl: Any = import_module("matplotlib")
    mpl.use("Agg")
    with mpl.rc_context(_STYLE):
        yield import_module("matplotlib.pyplot")


def check_format(path: Path) -> None:
    """Check that a figure can be written to a file.

    Raises:
        ValueError: The name does not end in a known format.
    """
    if path.suffix.lower() not in _FORMATS:
        msg = f"file must end in {', '.join(_FORMATS)}, got {str(path)!r}"
        raise ValueError(msg)


def save(figure: Any, path: Path) -> None:  # noqa: ANN401  matplotlib ships no complete types
    """Write a figure in the format of the file's name, and close it.

    Raises:
        ValueError: The name does not end in a known format.
        OSError: The file cannot be written.
    """
    check_format(path)
    with plotting() as plt:
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, bbox_inches="tight", metadata=metadata)
        plt.close(figure)

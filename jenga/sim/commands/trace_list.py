"""List of the workloads and formats that `jenga replay --trace` takes, with their arguments."""

import argparse
from collections.abc import Iterator
from textwrap import fill

from jenga.sim.workload.sources import FORMATS, GENERATORS, arguments_of, summary_of

_WIDTH = 100

_INTRODUCTION = """\
Arguments follow a colon: --trace articles:n=24,questions=8. All but those with three dots may be
left out, and then have the values below. A range is written tokens=1000-2000. A file without
arguments is given by its path alone: --trace trace.jsonl. Its beginning tells its format."""


class ListTraces(argparse.Action):
    """An option that prints the list and ends the program, as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the list."""
        print("\n".join(_lines()))
        parser.exit()


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for title, names in (("Workloads", GENERATORS), ("Files", FORMATS)):
        yield f"\n{title}"
        for name in names:
            yield fill(
                f"{name}: {summary_of(name)}", _WIDTH, initial_indent="  ", subsequent_indent="  "
            )
            arguments = ", ".join(arguments_of(name))
            yield fill(arguments, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)

"""`jenga report`: write runs side by side to one HTML file."""

import argparse
from pathlib import Path

from jenga.sim.report.html import report_html
from jenga.sim.results.runs import read_runs

DESCRIPTION = """\
Compare replays in one HTML file. It shows the numbers of each run, and its decode batch and memory
in each step. Runs can be selected, and the mouse pointer shows values. The file needs no server, no
network and no other file."""

EPILOG = """\
examples:
  jenga report rows.jsonl --out report.html
  jenga report jenga.jsonl vllm.jsonl --out report.html --title "Ministral, 20 long documents\""""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga report`."""
    parser.add_argument(
        "rows", nargs="+", type=Path, metavar="ROWS", help="files that `jenga replay --out` wrote"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="HTML file to write"
    )
    parser.add_argument(
        "--title", default="Replays", help="title of the page (default: %(default)s)"
    )
    parser.set_defaults(run=run, extras="jenga-kv")


def run(options: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        ValueError: Rows cannot be read.
        OSError: A file cannot be read or written.
    """
    page = report_html(read_runs(options.rows), title=options.title)
    options.out.write_text(page, encoding="utf-8")
    print(options.out)
    return 0

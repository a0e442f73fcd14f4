"""Arguments and exit status of `jenga doctor`."""

import argparse
import os

from jenga.doctor.examine import examine
from jenga.doctor.report import report_json, report_text

DESCRIPTION = """\
Examine this machine before a server is started: GPUs, driver, Python, torch, Triton and vLLM, how
the plugin is installed and set, which kernels have passed their trials, and what a model gets.
No GPU is used, nothing is downloaded. Exit status: 0 where an engine would serve, 1 where
something would be refused, 2 where the arguments are wrong."""

EPILOG = """\
examples:
  jenga doctor
  jenga doctor ~/models/granite-4.0-h-tiny
  jenga doctor --quick --json | jq -r '.findings[] | select(.status == "refused") | .subject'"""

EXIT_REFUSED = 1
"""Exit code if an engine would not serve."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jenga doctor` to a parser."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model's folder, its config.json or a name of `jenga plan --list`",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="import neither torch nor vLLM, which takes 10 s: versions are read from files",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run, extras="jenga-kv[vllm]")


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the report.

    Returns:
        0, or `EXIT_REFUSED`.
    """
    report = examine(os.environ, model=options.model, imports=not options.quick)
    print(report_json(report) if options.json else report_text(report))
    return EXIT_REFUSED if report.refused else 0

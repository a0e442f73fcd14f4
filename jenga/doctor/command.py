"""Arguments and exit status of `jenga doctor`."""

import argparse
import os

from jenga.doctor.examine import examine
from jenga.doctor.report import report_json, report_text
from jenga.sim.hardware.gpus import GPUS, find_gpu
from jenga.spec import check_positive

DESCRIPTION = """\
Check this machine before you start a server: its GPUs, driver, Python, torch, Triton and vLLM, how
the plugin is installed and configured, and which specialised kernels have passed their trials. With
MODEL, also show its layer types, its pages and how many requests fit. Without a GPU, name one with
--gpu: otherwise it is not decided whether the model fits. No GPU is used, and nothing is
downloaded. Exit status: 0 if an engine would serve, 1 if something would be refused, 2 if the
arguments are wrong."""

EPILOG = """\
examples:
  jenga doctor
  jenga doctor ~/models/granite-4.0-h-tiny
  jenga doctor qwen3-next-80b-a3b --gpu H100-80G --tp 4
  jenga doctor --quick --json | jq -r '.findings[] | select(.status == "refused") | .subject'"""

EXIT_REFUSED = 1
"""Exit code if an engine would not serve."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jenga doctor` to a parser."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of a model, its config.json, or a name from `jenga plan --list`",
    )
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help=f"GPU to plan MODEL for: {', '.join(GPUS)}, or an amount of memory such as 24GiB "
        "(default: those of this machine)",
    )
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="number of tensor-parallel ranks of MODEL (default: 1 with --gpu, and otherwise as "
        "few of this machine's GPUs as hold the weights)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="do not import torch and vLLM, which takes 10 s; read their versions from files",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run, extras="jenga-kv[vllm]")


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the report.

    Returns:
        0, or `EXIT_REFUSED`.

    Raises:
        ValueError: An option is refused.
    """
    if options.model is None and (options.gpu is not None or options.tp is not None):
        msg = "--gpu and --tp need MODEL: they say for which GPUs to plan it"
        raise ValueError(msg)
    if options.tp is not None:
        check_positive("doctor", "--tp", options.tp)
    report = examine(
        os.environ,
        model=options.model,
        imports=not options.quick,
        gpu=None if options.gpu is None else find_gpu(options.gpu),
        ranks=options.tp,
    )
    print(report_json(report) if options.json else report_text(report))
    return EXIT_REFUSED if report.refused else 0

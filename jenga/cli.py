"""The command line: `jenga <command>`."""

import argparse
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jenga import broker_command
from jenga.doctor import command as doctor_command
from jenga.sim.commands import plan_command, plot_command, replay_command, report_command

if TYPE_CHECKING:
    from jenga.sim.batching.arena import Memory
    from jenga.sim.batching.scheduler import StepScheduler
    from jenga.sim.replays.session import Machine, Settings

_DISTRIBUTION = "jenga-kv"

EXIT_MISTAKE = 2
"""Exit code of a command that could not do its work; argparse uses the same for bad arguments."""

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Variables by which other packages keep to errors; what is set already counts."""

EXIT_UNREAD = 141
"""Exit code when the reader of the output has closed the pipe (`| head`), as after SIGPIPE."""

_DEMO_DESCRIPTION = """\
Serve a few prompts with a real vLLM engine on JENGA_TRITON and show what memory it held.

Without --model the model is Gemma 3 270M (15 sliding-window and 3 full-attention layers), whose
weights come with the extra `demo`. On a machine without an NVIDIA GPU, plain PyTorch references
take the kernels' place; with TRITON_INTERPRET=1 Triton's interpreter runs the kernels.

At the end stock vLLM and JENGA_TRITON, with the same bytes for their caches, are asked several
questions on documents, and what each found and computed is counted."""

_DEMO_EPILOG = """\
examples:
  jenga demo
  jenga demo --prompt "The tallest mountain on Earth is" --max-tokens 32
  jenga demo --model ~/models/granite-4.0-h-tiny --json > demo.json"""


class _Command(Protocol):
    """A module that implements one command."""

    @property
    def DESCRIPTION(self) -> str:  # noqa: N802  a module's constant
        """Description of the command, for its help text."""
        ...

    @property
    def EPILOG(self) -> str:  # noqa: N802  a module's constant
        """Examples, for its help text."""
        ...

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add arguments to the command's parser, and set the defaults `run` and `extras`."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after `jenga`; the process's own by default.

    Returns:
        The command's own status, 0 on success. After an error it is 2, and one line on standard
        error names the error. If the reader of the output has closed the pipe, it is 141.
    """
    options = _parser().parse_args(arguments)
    try:
        with _quiet_packages():
            code = options.run(options)
        print(end="", flush=True)
    except BrokenPipeError:
        _drop_output()
        return EXIT_UNREAD
    except MemoryError:
        message = "not enough memory on this machine for what was asked"
    except ModuleNotFoundError as error:
        message = (
            f"package {error.name!r} is not installed; `make env` builds an environment with it, "
            f"or install {options.extras}"
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
    except KeyboardInterrupt:
        message = "interrupted"
    else:
        return code
    print(f"jenga: error: {message}", file=sys.stderr)
    return EXIT_MISTAKE


@contextmanager
def _quiet_packages() -> Generator[None]:
    """Let vLLM and transformers, here and in processes started, say no more than errors.

    vLLM's loggers write on standard error before an engine configures them.
    """
    loggers = [logging.getLogger(name) for name in ("vllm", "transformers")]
    levels = [logger.level for logger in loggers]
    missing = {key: value for key, value in _QUIET.items() if key not in os.environ}
    os.environ.update(missing)
    if "VLLM_LOGGING_LEVEL" in missing:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for key in missing:
            os.environ.pop(key, None)


def _drop_output() -> None:
    """Redirect output to the null device; else Python would fail again when it flushes at exit."""
    with Path(os.devnull).open("w") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jenga",
        description="Memory management and paged kernels for serving hybrid models with vLLM.",
        epilog="`jenga <command> --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"jenga {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True)
    _configure_demo(
        commands.add_parser(
            "demo",
            help="serve a few prompts with a real engine and show the memory held",
            description=_DEMO_DESCRIPTION,
            epilog=_DEMO_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    _add_command(
        commands,
        "doctor",
        doctor_command,
        summary="check this machine, its packages and a model before you start a server",
    )
    _add_command(
        commands,
        "plan",
        plan_command,
        summary="show a model's page sizes, how many requests fit, and how much memory is wasted",
    )
    replay = _add_command(
        commands,
        "replay",
        replay_command,
        summary="run requests through memory managers without a GPU, and count hits and waste",
    )
    replay.set_defaults(engine=_make_engine)
    _add_command(commands, "plot", plot_command, summary="draw a figure of replays")
    _add_command(commands, "report", report_command, summary="compare replays in one HTML file")
    _add_command(
        commands,
        "broker",
        broker_command,
        summary="let several engines share one arena, large page by large page",
    )
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",  # pyright: ignore[reportPrivateUsage]
    name: str,
    module: _Command,
    *,
    summary: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=module.DESCRIPTION,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(parser)
    return parser


def _make_engine(
    manager: str, machine: "Machine", settings: "Settings"
) -> tuple["StepScheduler", "Memory"]:
    """Make vLLM's scheduler for a replay.

    The simulator gets it from here because it imports neither vLLM nor the plugin.
    """
    from jenga.engine_scheduler import make_engine

    return make_engine(manager, machine, settings)


def _version() -> str:
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


def _configure_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        dest="prompts",
        metavar="TEXT",
        help="a prompt to continue; give it several times for several requests "
        "(default: three short ones and one longer than the model's window)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive_integer,
        default=12,
        metavar="N",
        help="tokens to generate for each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIRECTORY",
        help="a local model in Hugging Face's form to serve instead",
    )
    parser.add_argument(
        "--arena-mib",
        type=_positive_integer,
        default=128,
        metavar="N",
        help="size of the arena, in MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--without-documents",
        action="store_true",
        help="leave out the ending: two engines more, asked about documents (about a minute)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("jenga-demo.svg"),
        metavar="FILE",
        help="where the ending's picture is written, as SVG (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON on standard output"
    )
    parser.set_defaults(run=_demo, extras="jenga-kv[vllm,demo]")


def _positive_integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        msg = f"must be a positive integer, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return value


def _demo(options: argparse.Namespace) -> int:
    from jenga.demo.report import as_json, as_text
    from jenga.demo.run import run_demo

    result = run_demo(
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        model_directory=options.model,
        arena_bytes=options.arena_mib << 20,
        picture=None if options.without_documents else options.picture,
    )
    print(as_json(result) if options.json else as_text(result))
    if result.ending_failure:
        print(f"jenga: error: {result.ending_failure}", file=sys.stderr)
        return EXIT_MISTAKE
    return 0

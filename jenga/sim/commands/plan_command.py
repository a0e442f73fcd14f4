"""`jenga plan`: its arguments and its output."""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from jenga.models import ModelFacts, ReadOptions
from jenga.sim.hardware.budget import RESERVED_BYTES, UTILIZATION, memory_budget
from jenga.sim.hardware.gpus import GPUS, find_gpu, parse_bytes
from jenga.sim.planning.engine_layers import (
    Question,
    comparison,
    declared_model,
    find_served_model,
    is_installed,
)
from jenga.sim.planning.plan import (
    KV_DTYPES,
    LENGTHS,
    Plan,
    StockSystem,
    formats_of,
    plan_model,
    served_model,
)
from jenga.sim.planning.plan_text import known_models_text, plan_json, plan_text

DESCRIPTION = """\
Show what a model does to the memory of a GPU: its layer types, how the arena is cut, how many
requests fit and what is wasted, beside the exact LCM, the MAX page, PagedAttention and vLLM's own
planner. Nothing runs and nothing is downloaded."""

EPILOG = """\
examples:
  jenga plan gemma-3-27b --gpu H200
  jenga plan qwen3-next-80b-a3b --gpu H100-80G --tp 4 --length 2048 65536
  jenga plan gemma-3-27b --gpu L4 --tp 2 --pp 2
  jenga plan llama-3.1-70b --draft llama-3.2-1b --gpu H200 --tp 2
  jenga plan ~/models/granite-4.0-h-tiny --gpu 24GiB --plot layout.svg
  jenga plan --list"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `jenga plan`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a known name, a Hugging Face config.json or a directory that holds one",
    )
    parser.add_argument("--list", action="store_true", help="list the models known by name")
    parser.add_argument(
        "--gpu",
        default="H100-80G",
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or its memory such as 24GiB (default: %(default)s)",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument(
        "--pp",
        "--pipeline-parallel",
        type=int,
        default=1,
        metavar="N",
        help="pipeline ranks, of so many tensor-parallel ranks each",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=tuple(KV_DTYPES),
        default="auto",
        help="how keys and values are stored (default: as the checkpoint says, else as the model, "
        "bfloat16)",
    )
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help=f"lengths of requests to count (default: {' '.join(map(str, LENGTHS))}, as far as "
        f"the model reads them)",
    )
    parser.add_argument("--draft", metavar="MODEL", help="a model that drafts, in the same arena")
    parser.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens drafted for a step, by whatever: recurrent layers keep so many states more",
    )
    parser.add_argument(
        "--history-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens of which Mamba-2 and gated delta layers keep beside a state what they brought "
        "in, as with vLLM's --use-replayssm: drafts then take no states; at most 64 of gated delta "
        "layers",
    )
    parser.add_argument(
        "--weights",
        type=_reserve,
        metavar="BYTES",
        help="bytes of all weights, all ranks together, where they are not known or others",
    )
    parser.add_argument(
        "--arena", type=_arena, metavar="BYTES", help="the arena, in place of --gpu"
    )
    parser.add_argument(
        "--utilization",
        type=float,
        default=UTILIZATION,
        metavar="SHARE",
        help="share of the GPU's memory that the engine takes (default: %(default)s, as vLLM)",
    )
    parser.add_argument(
        "--reserve",
        type=_reserve,
        default=RESERVED_BYTES,
        metavar="BYTES",
        help="set aside for activations and graphs (default: 1.5GiB)",
    )
    parser.add_argument(
        "--without-vllm",
        action="store_true",
        help="leave out vLLM's planner and the comparison with its classes, whose import takes "
        "seconds",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw one large page, every byte of it, as .svg or .png (extra `plots`)",
    )
    parser.set_defaults(run=run, extras="jenga-kv[plots]")


def _arena(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _reserve(text: str) -> int:
    try:
        return parse_bytes(text, least=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(options: argparse.Namespace) -> int:
    """Plan and print.

    Raises:
        ValueError: The model, the GPU or an option is refused, or the weights do not fit.
    """
    if options.list:
        print(known_models_text())
        return 0
    if options.model is None:
        msg = "MODEL must be given; `jenga plan --list` shows the known names"
        raise ValueError(msg)
    plan = _plan(options)
    print(plan_json(plan) if options.json else plan_text(plan))
    if options.plot is not None:
        _draw(plan, options.plot)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    names = [name for name in (options.model, options.draft) if name is not None]
    models = [find_served_model(name) for name in names]
    kv_format, model_dtype = formats_of(options.kv_dtype, models[0])
    read = ReadOptions(
        tensor_parallel=options.tp,
        kv_format=kv_format,
        model_dtype=model_dtype,
        draft_tokens=options.draft_tokens,
        history_tokens=options.history_tokens,
    )
    # Refuse a model that is not understood first, because no option can change that.
    served_model(models, read)
    arena = options.arena or memory_budget(
        models,
        find_gpu(options.gpu),
        ranks=options.tp * options.pp,
        weight_bytes=options.weights,
        utilization=options.utilization,
        reserved_bytes=options.reserve,
    )
    with ExitStack() as stack:
        questions = [
            (facts, stack.enter_context(Question(facts.config.as_dict(), read)))
            for facts in models[:1]
            if _is_compared(facts) and not options.without_vllm
        ]
        plan = plan_model(
            models,
            arena=arena,
            options=read,
            lengths=options.length or _lengths(models[0]),
            stock=None if options.without_vllm or options.pp > 1 else _stock_system(),
            pipeline_parallel=options.pp,
        )
        notes = [
            comparison(facts, facts.spec(read).layer_types, asked) for facts, asked in questions
        ]
    notes += [
        f"The layers of {facts.name} are those that vLLM's own classes declare; embeddings of "
        f"images are not counted."
        for facts in models
        if facts.reader is declared_model
    ]
    return replace(plan, notes=tuple(notes))


def _is_compared(facts: ModelFacts) -> bool:
    """Whether vLLM can be asked for a model's layers. Models known by name lack fields for that."""
    return not facts.model_id and facts.reader is not declared_model and is_installed()


def _stock_system() -> StockSystem:
    from jenga.sim.planning.vllm_fit import stock_system

    return stock_system


def _lengths(model: ModelFacts) -> tuple[int, ...]:
    """Return the default lengths that the model can read."""
    context_tokens = model.context_tokens or LENGTHS[-1]
    return tuple(each for each in LENGTHS if each <= context_tokens) or (context_tokens,)


def _draw(plan: Plan, path: Path) -> None:
    if plan.geometry is None:
        msg = f"there is no geometry to draw: {plan.systems[0].refusal}"
        raise ValueError(msg)
    from jenga.sim.drawing.figures import save
    from jenga.sim.planning.layout_plot import draw_layout

    save(draw_layout(plan.geometry, title=plan.model.name), path)

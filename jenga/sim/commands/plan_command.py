"""`jenga plan`: its arguments and its output."""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from jenga.models import KvFormat, ModelFacts, ReadOptions
from jenga.models.unserved import UNSERVED_FORMATS, unserved_features, unserved_format
from jenga.sim.drawing.figures import check_format, save
from jenga.sim.hardware.budget import RESERVED_BYTES, UTILIZATION, Budget, memory_budget
from jenga.sim.hardware.gpus import GPUS, Gpu, find_gpu, parse_bytes, parse_memory
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
Plan the cache memory of a model on a GPU: its layer types, the sizes of its pages, the number of
requests that fit, and the share of memory that is wasted. The plan is compared with the exact LCM,
the MAX page, PagedAttention and vLLM's own planner. The model is not run, and nothing is
downloaded."""

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
        help="name of a known model, a Hugging Face config.json, or a directory that holds one",
    )
    parser.add_argument("--list", action="store_true", help="list the models known by name")
    parser.add_argument(
        "--gpu",
        default="H100-80G",
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or an amount of memory such as 24GiB (default: %(default)s)",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="number of tensor-parallel ranks"
    )
    parser.add_argument(
        "--pp",
        "--pipeline-parallel",
        type=int,
        default=1,
        metavar="N",
        help="number of pipeline ranks; each consists of --tp tensor-parallel ranks",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=tuple(KV_DTYPES),
        default="auto",
        help="data type of cached keys and values (default: as the checkpoint says; otherwise that "
        f"of the model, bfloat16); {' and '.join(each.value for each in UNSERVED_FORMATS)} are "
        "planned, but the vLLM plugin refuses them",
    )
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="lengths of the requests, in tokens (default: those of "
        f"{' '.join(map(str, LENGTHS))} that the model can read)",
    )
    parser.add_argument(
        "--draft", metavar="MODEL", help="draft model, which shares the arena with the model"
    )
    parser.add_argument(
        "--draft-tokens",
        type=int,
        default=0,
        metavar="N",
        help="number of tokens drafted for a step, with any method; recurrent layers without a "
        "history keep that many additional states for each request",
    )
    parser.add_argument(
        "--history-tokens",
        type=int,
        metavar="N",
        help="number of recent tokens whose inputs Mamba-2 and gated delta layers keep beside a "
        "state, as with vLLM's --use-replayssm; drafts then need no additional states; at most 64 "
        "for gated delta layers (default: 16 with drafts, and none in vLLM's own pages)",
    )
    parser.add_argument(
        "--weights",
        type=_reserve,
        metavar="BYTES",
        help="size of the weights of all ranks together, if it is unknown or differs from the "
        "known one",
    )
    parser.add_argument(
        "--arena", type=_arena, metavar="BYTES", help="size of the arena, instead of --gpu"
    )
    parser.add_argument(
        "--large-page-bytes",
        type=_page_bytes,
        metavar="BYTES",
        help="size of a large page, as in an arena that several engines share (`jenga broker`); by "
        "default the planner chooses it",
    )
    parser.add_argument(
        "--utilization",
        type=float,
        default=UTILIZATION,
        metavar="SHARE",
        help="share of the GPU's memory that the engine takes (default: %(default)s, as in vLLM)",
    )
    parser.add_argument(
        "--reserve",
        type=_reserve,
        default=RESERVED_BYTES,
        metavar="BYTES",
        help="memory set aside for activations and CUDA graphs (default: 1.5GiB)",
    )
    parser.add_argument(
        "--without-vllm",
        action="store_true",
        help="leave out vLLM's planner and the comparison with vLLM's model classes; importing "
        "vLLM takes seconds",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw one large page, byte by byte, as .svg or .png (needs the extra `plots`)",
    )
    parser.set_defaults(run=run, extras="jenga-kv[plots]")


def _page_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _arena(text: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _reserve(text: str) -> int:
    try:
        return parse_memory(text, least=0)
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
    if options.plot is not None:
        check_format(options.plot)
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
        history_tokens=options.history_tokens or 0,
    )
    of_stock = read
    if options.history_tokens is None:
        read = models[0].engine_options(read)
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
            stock_options=of_stock,
            lengths=options.length or _lengths(models[0]),
            stock=None if options.without_vllm or options.pp > 1 else _stock_system(),
            pipeline_parallel=options.pp,
            large_page_bytes=options.large_page_bytes,
        )
        notes = [
            comparison(facts, facts.spec(read).layer_types, asked) for facts, asked in questions
        ]
    notes += [
        f"The layers of {facts.name} are those that vLLM's own classes declare. Embeddings of "
        f"images are not counted."
        for facts in models
        if facts.reader is declared_model
    ]
    notes += _refusals(models, kv_format, arena.gpu if isinstance(arena, Budget) else None)
    return replace(plan, notes=(*plan.notes, *notes))


def _refusals(models: list[ModelFacts], kv_format: KvFormat, gpu: Gpu | None) -> list[str]:
    """Return a sentence for each thing that is planned although the plugin refuses it."""
    notes = [
        f"{facts.name} is planned, but the vLLM plugin refuses it: {words.text()}."
        for facts in models
        for words in unserved_features(facts.config)
    ]
    if reason := unserved_format(kv_format, has_float8=gpu and gpu.has_float8):
        notes.append(
            f"Keys and values in {kv_format.value} are planned, but the vLLM plugin refuses them: "
            f"{reason}."
        )
    return notes


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
    from jenga.sim.planning.layout_plot import draw_layout

    save(draw_layout(plan.geometry, title=plan.model.name), path)

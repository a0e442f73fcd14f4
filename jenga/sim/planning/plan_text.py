"""A plan as text for people, and as JSON for programs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from jenga.geometry import PageTable
from jenga.models import ModelFacts, known_model, known_names
from jenga.models.unserved import unserved_features
from jenga.sim.drawing.text import aligned, bytes_text, count_text, heading, share_text, wrapped
from jenga.sim.hardware.budget import Budget
from jenga.sim.planning.image_fits import ImageFits, image_fits
from jenga.sim.planning.plan import CHUNK_TOKENS, Fit, Plan, System
from jenga.spec import LayerType

WIDTH = 100
"""Most characters of a line."""

_LENGTHS_IN_A_TABLE = 4

_BELOW_STATE = "holds no state"
"""Cell of a layout whose slots for a request are smaller than its states."""


def plan_text(plan: Plan) -> str:
    """Write the plan as a report for people."""
    images = image_fits(plan)
    return "\n\n".join(
        [
            _title(plan),
            _memory(plan),
            types_text(plan),
            geometry_text(plan),
            *_tables(plan),
            *([] if images is None else [_images_text(images)]),
        ]
    )


def plan_json(plan: Plan) -> str:
    """Write the whole plan as JSON, with bytes and tokens as numbers."""
    geometry, images = plan.geometry, image_fits(plan)
    return json.dumps(
        {
            "model": plan.model.name,
            "models": [
                {
                    "name": facts.name,
                    "model_id": facts.model_id,
                    "total_parameters": facts.total_parameters,
                    "active_parameters": facts.active_parameters,
                    "weight_bytes": facts.weight_bytes,
                    "parameters_source": facts.parameters_source,
                }
                for facts in plan.facts
            ],
            "tensor_parallel": plan.options.tensor_parallel,
            "kv_format": plan.options.kv_format.value,
            "model_dtype": plan.options.model_dtype,
            "draft_tokens": plan.options.draft_tokens,
            "history_tokens": plan.options.history_tokens,
            "pipeline_parallel": plan.pipeline_parallel,
            "budget": _budget_fields(plan.budget),
            "arena_bytes": plan.arena_bytes,
            "layer_types": [
                {
                    "name": each.name,
                    "keeps": each.keeps,
                    "num_layers": len(each.layers),
                    "num_readers": sum(len(layer.readers) for layer in each.layers),
                    "slot_bytes": each.slot_bytes,
                }
                for each in plan.model.layer_types
            ],
            "geometry": geometry
            and {
                "large_page_bytes": geometry.large_page_bytes,
                "num_large_pages": plan.systems[0].num_units,
                "page_tables": [_table_fields(table) for table in geometry.page_tables],
                "pipeline_ranks": _stage_fields(plan),
            },
            "needed": [
                {"num_tokens": num_tokens, "num_bytes": num_bytes, "num_requests": num_requests}
                for num_tokens, num_bytes, num_requests in plan.needed
            ],
            "systems": [asdict(system) for system in plan.systems],
            "images": images and asdict(images),
            "notes": list(plan.notes),
        },
        indent=2,
    )


def _budget_fields(budget: Budget | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    return {
        "gpu": budget.gpu.name,
        "memory_bytes": budget.gpu.memory_bytes,
        "utilization": budget.utilization,
        "usable_bytes": budget.usable_bytes,
        "weight_bytes_per_rank": budget.weight_bytes,
        "reserved_bytes": budget.reserved_bytes,
    }


def _table_fields(table: PageTable) -> dict[str, Any]:
    return {
        "name": table.name,
        "layer_type": table.layer_type.name,
        "layer_start": table.layer_start,
        "layer_end": table.layer_end,
        "tokens_per_page": table.tokens_per_page,
        "small_page_bytes": table.small_page_bytes,
        "padding_bytes": table.padding_bytes,
        "layer_offset_bytes": list(table.layer_offset_bytes),
        "small_pages_per_large_page": table.small_pages_per_large_page,
    }


def _stage_fields(plan: Plan) -> list[dict[str, Any]]:
    stages = plan.pipeline.stages if plan.pipeline is not None else ()
    return [
        {
            "large_page_bytes": stage.large_page_bytes,
            "left_bytes": plan.arena_bytes - plan.systems[0].num_units * stage.large_page_bytes,
            "page_tables": [
                {
                    "num_layers": len(share.layers),
                    "small_page_bytes": share.small_page_bytes,
                    "padding_bytes": share.padding_bytes,
                }
                for share in stage.shares
            ],
        }
        for stage in stages
    ]


def known_models_text() -> str:
    """Write a line for every model that is known by name."""
    rows = [("name", "model", "parameters", "layer types")]
    for name in known_names():
        facts = known_model(name)
        kinds = [each.kind for each in facts.spec().layer_types]
        counts = [(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]
        text = ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts)
        if unserved_features(facts.config):
            text += " (planned only: the vLLM plugin refuses it)"
        rows.append((name, facts.model_id, count_text(facts.total_parameters or 0), text))
    return "\n".join(aligned(rows, alignment="<<><"))


def _title(plan: Plan) -> str:
    lines: list[str] = []
    for facts in plan.facts:
        words = [_model_words(facts)]
        if facts is not plan.facts[0]:
            words.insert(0, "draft")
        lines += wrapped(", ".join(words), width=WIDTH)
    ranks = plan.options.tensor_parallel
    kv_format = plan.options.kv_format.value
    kept = plan.options.model_dtype if kv_format == "model" else kv_format
    divided = f"; {ranks} tensor-parallel ranks, bytes of one of them" if ranks > 1 else ""
    if plan.pipeline_parallel > 1:
        divided += f"; {plan.pipeline_parallel} pipeline ranks"
    return "\n".join([*lines, f"keys and values in {kept}{divided}"])


def _model_words(facts: ModelFacts) -> str:
    words = [facts.name if not facts.model_id else f"{facts.name} ({facts.model_id})"]
    if facts.total_parameters:
        words.append(f"{count_text(facts.total_parameters)} parameters")
    active = facts.active_parameters
    if active and active != facts.total_parameters:
        words.append(f"{count_text(active)} active")
    return ", ".join(words)


def _memory(plan: Plan) -> str:
    budget = plan.budget
    if budget is None:
        return "\n".join(
            [heading("Memory"), f"arena  {bytes_text(plan.arena_bytes)}{_of_each(plan)}, as given"]
        )
    memory = bytes_text(budget.gpu.memory_bytes)
    source = "; ".join(
        f"{facts.name}: {facts.parameters_source}"
        if len(plan.facts) > 1
        else facts.parameters_source
        for facts in plan.facts
        if facts.parameters_source
    )
    known = sum(facts.weight_bytes or 0 for facts in plan.facts)
    if known != budget.total_weight_bytes:
        source = "as given"
    part = f", 1/{budget.ranks} on each rank" if budget.ranks > 1 else ""
    rows = [
        (
            "engine",
            bytes_text(budget.usable_bytes),
            f"{budget.utilization:g} of the {memory} of {_article(budget.gpu.name)}",
        ),
        ("weights", bytes_text(budget.weight_bytes), f"{source}{part}"),
        ("set aside", bytes_text(budget.reserved_bytes), "activations and CUDA graphs (assumed)"),
        ("arena", bytes_text(plan.arena_bytes), f"remaining memory{_of_each(plan)}"),
    ]
    lines: list[str] = []
    for line in aligned(rows, alignment="<><"):
        lines += _hanging(line, 9 + 2 + max(len(row[1]) for row in rows) + 2)
    return "\n".join([heading("Memory"), *lines])


def _of_each(plan: Plan) -> str:
    return (
        f" on each of {plan.pipeline_parallel} pipeline ranks" if plan.pipeline_parallel > 1 else ""
    )


def _hanging(line: str, indent: int) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    rest = wrapped(line[indent:], width=WIDTH, indent=" " * indent)
    return [line[:indent] + rest[0].strip(), *rest[1:]]


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "AHL" else f"a {name}"


def types_text(plan: Plan) -> str:
    """Write a table of the layer types. Equal neighbours share a row."""
    header = ("layer type", "keeps", "layers", "read by more", "bytes a slot")
    rows: list[tuple[str, ...]] = [header]
    for group in _folded(plan.model.layer_types, _type_key):
        first = group[0]
        readers = sum(len(layer.readers) for layer in first.layers)
        slot_bytes = sum(layer.slot_bytes for layer in first.layers)
        rows.append(
            (
                _folded_name([each.name for each in group]),
                first.keeps,
                f"{len(first.layers)}",
                f"{readers}" if readers else "-",
                f"{slot_bytes:,}",
            )
        )
    if all(row[3] == "-" for row in rows[1:]):
        rows = [(*row[:3], row[4]) for row in rows]
    alignment = "<<" + ">" * (len(rows[0]) - 2)
    note = "A slot is one token's place, or one state, in all layers of the type."
    lines = [heading("Layer types"), *aligned(rows, alignment=alignment), note]
    for each in plan.notes:
        lines += wrapped(each, width=WIDTH)
    return "\n".join(lines)


def _type_key(layer_type: LayerType) -> object:
    return type(layer_type), layer_type.keeps, len(layer_type.layers), layer_type.slot_bytes


def geometry_text(plan: Plan) -> str:
    """Write the large page and a table of the page tables."""
    geometry = plan.geometry
    if geometry is None:
        return "\n".join([heading("Geometry"), "none; the reason is below"])
    rows = [("page table", "layers", "tokens", "small page", "in a large page", "padding")]
    for group in _folded(geometry.page_tables, _table_key):
        first = group[0]
        rows.append(
            (
                _folded_name([table.name for table in group]),
                f"{len(first.layers)}",
                "a state" if first.is_state else f"{first.tokens_per_page}",
                f"{first.small_page_bytes:,} B",
                f"{first.small_pages_per_large_page:,}",
                share_text(first.padding_bytes / first.small_page_bytes),
            )
        )
    line = (
        f"{plan.systems[0].num_units:,} large pages of {geometry.large_page_bytes:,} B in the "
        f"arena, one of them the null page; {len(geometry.page_tables)} page tables per request"
    )
    lines = [heading("Geometry"), *wrapped(line, width=WIDTH), *aligned(rows)]
    return "\n".join([*lines, *_stages(plan)])


def _stages(plan: Plan) -> list[str]:
    """Write a table of what each rank of a pipeline stores."""
    if plan.pipeline is None:
        return []
    rows = [("pipeline rank", "layers that store", "large page", "padding", "left of its arena")]
    for rank, stage in enumerate(plan.pipeline.stages):
        left_bytes = plan.arena_bytes - plan.systems[0].num_units * stage.large_page_bytes
        padding = [share.padding_bytes / share.small_page_bytes for share in stage.shares]
        rows.append(
            (
                f"{rank}",
                f"{sum(len(share.layers) for share in stage.shares)}",
                f"{stage.large_page_bytes:,} B",
                f"{share_text(min(padding))} to {share_text(max(padding))}",
                share_text(left_bytes / plan.arena_bytes),
            )
        )
    note = (
        "Bytes in the tables above are those of all pipeline ranks together. Padding is the share "
        "of a small page that holds nothing on this rank, from the least to the most among page "
        "tables."
    )
    return ["", *aligned(rows), *wrapped(note, width=WIDTH)]


def _table_key(table: PageTable) -> object:
    return (
        type(table.layer_type),
        len(table.layers),
        table.tokens_per_page,
        table.small_page_bytes,
        table.payload_bytes,
    )


def _folded(items: Sequence[Any], key: Callable[[Any], object]) -> list[list[Any]]:
    """Group neighbours that are alike."""
    return [list(group) for _, group in groupby(items, key)]


def _folded_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} .. {names[-1]}"


def _tables(plan: Plan) -> list[str]:
    """Write tables of capacity and waste, a few lengths in each, and explain the numbers."""
    texts: list[str] = []
    for start in range(0, len(plan.needed), _LENGTHS_IN_A_TABLE):
        lengths = slice(start, start + _LENGTHS_IN_A_TABLE)
        texts.append("\n".join(_capacity(plan, lengths)))
    notes = wrapped(
        "Each cell has the number of requests of this length that the arena holds at once, in the "
        "middle of decode, and their waste: the share of held bytes that their next tokens do not "
        'need. The line "needed" is the most requests that any layout could hold. "Longest" is '
        "the longest request that fits alone, prefilled in chunks of 8,192 tokens.",
        width=WIDTH,
    )
    if any(fit.is_below_state for system in plan.systems for fit in system.fits):
        notes += wrapped(
            f'"{_BELOW_STATE}": the slots of so short a request are smaller than the states that '
            "PagedAttention would have to keep in them.",
            width=WIDTH,
        )
    if plan.pipeline_parallel > 1:
        notes += wrapped(
            "The MAX page, PagedAttention and vLLM's planner are left out, because they are "
            "modelled for one pipeline rank only.",
            width=WIDTH,
        )
    for system in plan.systems:
        if system.refusal:
            notes += wrapped(f"{system.label} does not start: {system.refusal}", width=WIDTH)
    notes += _shortages(plan)
    texts.append("\n".join(notes))
    return texts


def _capacity(plan: Plan, lengths: slice) -> list[str]:
    shown = plan.needed[lengths]
    header = ("", "cut into", *(f"{each[0]:,}" for each in shown), "longest")
    rows: list[tuple[str, ...]] = [header]
    rows.append(("needed", "", *(_cell(each[2], None) for each in shown), ""))
    for system in plan.systems:
        if system.refusal:
            rows.append((system.label, "-", *("-" for _ in shown), "-"))
            continue
        longest = system.longest_tokens
        rows.append(
            (
                system.label,
                bytes_text(system.unit_bytes),
                *(_fit_cell(fit) for fit in system.fits[lengths]),
                _longest(system) if longest is not None else "no limit",
            )
        )
    return [heading("Requests that fit, and waste, by request length in tokens"), *aligned(rows)]


def _images_text(images: ImageFits) -> str:
    """Write a table of the requests with images that fit."""
    header = ("embeddings", "set aside", *(f"{fit.num_tokens:,}" for fit in images.in_arena))
    rows: list[tuple[str, ...]] = [header]
    for label, set_aside_bytes, fits in (
        ("in the arena", 0, images.in_arena),
        ("in vLLM's encoder cache", images.cache_bytes, images.in_cache),
    ):
        cells = [f"{fit.num_requests:,} / {fit.num_unread:,}" for fit in fits]
        rows.append((label, bytes_text(set_aside_bytes), *cells))
    title = (
        f"Requests with an image of {images.image_tokens:,} tokens "
        f"({bytes_text(images.image_bytes)}) that fit, by request length in tokens"
    )
    note = (
        "Each cell: the requests that fit after their images were read / before any was. vLLM's "
        f"cache has room for the {CHUNK_TOKENS:,} tokens of a step, and at least for one image."
    )
    return "\n".join([heading(title), *aligned(rows), *wrapped(note, width=WIDTH)])


def _longest(system: System) -> str:
    return f"{system.longest_tokens:,}" if system.longest_tokens else "-"


def _fit_cell(fit: Fit) -> str:
    if fit.is_below_state:
        return _BELOW_STATE
    return _cell(fit.num_requests, fit.waste) if fit.waste is not None else "no room"


def _cell(num_requests: int, waste: float | None) -> str:
    share = "" if waste is None else share_text(waste)
    return f"{num_requests:,} {share:>7}"


def _shortages(plan: Plan) -> list[str]:
    """Explain why not even one request of some lengths fits the planned geometry."""
    planned = plan.systems[0]
    lines: list[str] = []
    for (num_tokens, num_bytes, _), fit in zip(plan.needed, planned.fits, strict=False):
        if fit.num_requests:
            continue
        against = f"the arena has {bytes_text(plan.arena_bytes)}"
        if num_bytes <= plan.arena_bytes:
            against += (
                f". More memory is needed while the prompt is read: at most "
                f"{planned.longest_tokens:,} tokens fit"
            )
        lines += wrapped(
            f"A request of {num_tokens:,} tokens does not fit: it needs {bytes_text(num_bytes)} "
            f"to decode, and {against}.",
            width=WIDTH,
        )
    return lines

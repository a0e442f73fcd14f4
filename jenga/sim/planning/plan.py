"""Plans: a model's geometry on a GPU, the number of requests that fit, and the memory wasted.

A plan is arithmetic on lengths, and no request runs. `jenga replay` runs requests.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

from jenga.geometry import Geometry, check_arena
from jenga.models import KvFormat, ModelFacts, ReadOptions
from jenga.planning.demand import UNSHARED_TAIL, held_pages
from jenga.planning.pipeline import Pipeline, plan_pipeline
from jenga.planning.planner import plan
from jenga.policies import Image, RequestFacts
from jenga.sim.arenas.baseline_geometries import geometry_by_name, needed_bytes
from jenga.sim.hardware.budget import Budget
from jenga.sim.planning.stages import stages_of
from jenga.spec import ModelSpec, check_positive, combine
from jenga.tables.capacity import Capacity

LENGTHS = (1024, 8192, 32_768, 131_072)
"""Default request lengths of a plan, in tokens."""

CHUNK_TOKENS = 8192
"""Most prompt tokens that a step computes: vLLM's default on an H100."""

LONGEST_TOKENS = 1 << 24
"""Number of tokens from which on a request counts as having no limit."""

GEOMETRIES = {
    "given": "Jenga, given",
    "planned": "Jenga, planned",
    "lcm": "exact LCM",
    "max": "MAX page",
    "homogeneous": "PagedAttention",
}
"""Rules of `jenga.sim.arenas.baseline_geometries` that are compared, with their names in texts.

"given" is the plan for a large page of a given size, and is compared only if one is given.
"""

PIPELINE_GEOMETRIES = ("planned", "lcm")
"""Rules that are compared if a model is spread over the ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Requests of one length that fit in an arena, all of them in decode.

    Attributes:
        num_tokens: Tokens of each request.
        num_requests: Number of requests that the arena holds at once.
        held_bytes: Bytes that one of them is expected to hold.
        waste: Share of the held bytes that its next token does not need, 0 to 1. None if no
            request fits, or if `is_below_state`.
        is_below_state: Whether a request needs more bytes than the layout gives it. A layout that
            knows only tokens gives a short request slots that are smaller than its state.
    """

    num_tokens: int
    num_requests: int
    held_bytes: int
    waste: float | None
    is_below_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to manage the arena.

    Attributes:
        name: "given", "planned", "lcm", "max", "homogeneous" or "vllm".
        label: Its name in texts.
        unit_bytes: Bytes of the unit into which it cuts the arena.
        num_units: Number of units in the arena.
        num_page_tables: Number of page tables of a request.
        fits: One result for each length.
        longest_tokens: Tokens of the longest request that fits in the empty arena. None if no
            request is too long.
        refusal: Reason why it does not start. Empty if it starts. If it does not, the fields above
            are zero or empty, except the name and the label.
    """

    name: str
    label: str
    unit_bytes: int = 0
    num_units: int = 0
    num_page_tables: int = 0
    fits: tuple[Fit, ...] = ()
    longest_tokens: int | None = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a model.

    Attributes:
        model: Layer types of all served models.
        facts: Facts of each of them, the draft last.
        options: Options with which they are run.
        budget: Memory of a rank, from which the arena's bytes follow. None if they were given.
        arena_bytes: Bytes of the arena of one rank.
        geometry: The planned geometry, of all ranks of a pipeline. None if it does not start.
        pipeline: Stages of the pipeline, with what each rank stores. None without a pipeline, or if
            the planned geometry does not start.
        pipeline_parallel: Number of ranks of the pipeline.
        needed: For each length (num_tokens, bytes, requests): bytes that the next token of a
            request needs, and the number of such requests that would fill the arena.
        systems: Ways to manage the arena, first that of `geometry`.
        notes: Sentences on the layers: their source, what is left out, and what is refused.
    """

    model: ModelSpec
    facts: tuple[ModelFacts, ...]
    options: ReadOptions
    budget: Budget | None
    arena_bytes: int
    geometry: Geometry | None
    pipeline: Pipeline | None
    pipeline_parallel: int
    needed: tuple[tuple[int, int, int], ...]
    systems: tuple[System, ...]
    notes: tuple[str, ...] = ()


StockSystem = Callable[[ModelSpec, int, Sequence[int]], System]
"""Function that asks vLLM's planner, for a model, an arena's bytes and lengths."""


def served_model(models: Sequence[ModelFacts], options: ReadOptions) -> ModelSpec:
    """Return the layer types of one model, or of several that share an arena.

    Args:
        models: The models. The one that is drafted for comes first.
        options: Options with which they are run.

    Raises:
        ValueError: A configuration is not understood, or two models have the same name.
    """
    of_drafts = replace(options, draft_tokens=0, history_tokens=0)
    specs = [model.spec(of_drafts if index else options) for index, model in enumerate(models)]
    if len(specs) == 1:
        return specs[0]
    return combine("+".join(spec.name for spec in specs), specs)


def plan_model(  # noqa: PLR0913  all options of a plan
    models: Sequence[ModelFacts],
    *,
    arena: Budget | int,
    options: ReadOptions | None = None,
    stock_options: ReadOptions | None = None,
    lengths: Sequence[int] = LENGTHS,
    stock: StockSystem | None = None,
    pipeline_parallel: int = 1,
    large_page_bytes: int | None = None,
) -> Plan:
    """Plan for a model, and compare the plan with other ways to manage the arena.

    Args:
        models: The model, and the draft that is served with it.
        arena: Bytes of the arena of one rank, or the budget that leaves them.
        options: Options with which the models are run.
        stock_options: Options of stock vLLM, and of PagedAttention with one page size. None means
            the same.
        lengths: Tokens of the requests for which capacities are given.
        stock: Function that asks vLLM's planner. None leaves it out, as does a pipeline.
        pipeline_parallel: Number of pipeline ranks over which the model's layers are spread.
        large_page_bytes: Bytes of a large page, as in an arena that several engines share. None
            lets the planner choose.

    Raises:
        ValueError: An argument is out of range, the weights do not fit, or a model or a large page
            of the given size is refused.
    """
    if not lengths:
        msg = "lengths must name at least one"
        raise ValueError(msg)
    for num_tokens in lengths:
        check_positive("plan", "every length", num_tokens)
    options = options or ReadOptions()
    model = served_model(models, options)
    stock_model = served_model(models, stock_options or options)
    notes: tuple[str, ...] = ()
    if pipeline_parallel > 1 or large_page_bytes is not None:
        # As `jenga.vllm_plugin.specs.image_rows.why_not_in_arena` decides.
        where = "in a pipeline" if pipeline_parallel > 1 else "in an arena that engines share"
        if any(each.is_consumed for each in model.layer_types):
            notes = (f"Embeddings are not planned: {where} they stay in vLLM's encoder cache.",)
        model, stock_model = without_embeddings(model), without_embeddings(stock_model)
    arena_bytes = arena.require_arena() if isinstance(arena, Budget) else arena
    check_positive("plan", "arena_bytes", arena_bytes)

    check_positive("plan", "pipeline_parallel", pipeline_parallel)
    if pipeline_parallel > 1:
        if len(models) > 1:
            msg = "a draft must be planned without a pipeline: vLLM runs none beside one"
            raise ValueError(msg)
        if large_page_bytes is not None:
            msg = "a large page must be given without a pipeline, whose ranks have several sizes"
            raise ValueError(msg)
        names = PIPELINE_GEOMETRIES
        stages = stages_of(models[0], model, pipeline_parallel)
        stock = None
    else:
        names, stages = tuple(GEOMETRIES)[large_page_bytes is None :], None
    systems = [
        _system(
            name,
            stock_model if name == "homogeneous" else model,
            arena_bytes,
            lengths,
            stages,
            large_page_bytes,
        )
        for name in names
    ]
    if stock is not None:
        systems.append(stock(stock_model, arena_bytes, lengths))
    if large_page_bytes is not None and systems[0].refusal:
        raise ValueError(systems[0].refusal)
    geometry, pipeline = None, None
    if not systems[0].refusal:
        geometry, _, pipeline = _cut(names[0], model, arena_bytes, stages, large_page_bytes)
    return Plan(
        model=model,
        facts=tuple(models),
        options=options,
        budget=arena if isinstance(arena, Budget) else None,
        arena_bytes=arena_bytes,
        geometry=geometry,
        pipeline=pipeline,
        pipeline_parallel=pipeline_parallel,
        needed=tuple(
            (num_tokens, num_bytes, arena_bytes * pipeline_parallel // num_bytes)
            for num_tokens in lengths
            for num_bytes in [decode_bytes(model, num_tokens)]
        ),
        systems=tuple(systems),
        notes=notes,
    )


def without_embeddings(model: ModelSpec) -> ModelSpec:
    """Return a model without the embeddings of images, whose tokens are read only once."""
    kept = [each for each in model.layer_types if not each.is_consumed]
    return ModelSpec(name=model.name, layer_types=tuple(kept))


def decode_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Return the bytes that a decoding request's next token needs, without image embeddings."""
    return needed_bytes(without_embeddings(model), num_tokens)


def _cut(
    name: str,
    model: ModelSpec,
    arena_bytes: int,
    stages: Sequence[Collection[str]] | None,
    large_page_bytes: int | None,
) -> tuple[Geometry, int, Pipeline | None]:
    """Cut the arena. Return the geometry, its number of large pages, and the pipeline.

    Raises:
        ValueError: The rule has no geometry for the model, or the geometry does not fit the arena.
    """

    def rule(model: ModelSpec) -> Geometry:
        if name == "given":
            return plan(model, arena_bytes=arena_bytes, large_page_bytes=large_page_bytes)
        geometry = geometry_by_name(name, model)
        if name == "planned":
            geometry = geometry_by_name(name, model, arena_bytes=arena_bytes)
        return geometry

    if stages is None:
        geometry = rule(model)
        return geometry, check_arena(geometry, arena_bytes), None
    pipeline = plan_pipeline(model, stages, rule)
    num_large_pages = min(
        check_arena(
            replace(pipeline.geometry, large_page_bytes=stage.large_page_bytes), arena_bytes
        )
        for stage in pipeline.stages
    )
    return pipeline.geometry, num_large_pages, pipeline


def _system(
    name: str,
    model: ModelSpec,
    arena_bytes: int,
    lengths: Sequence[int],
    stages: Sequence[Collection[str]] | None,
    large_page_bytes: int | None,
) -> System:
    label = GEOMETRIES[name]
    try:
        geometry, num_large_pages, _ = _cut(name, model, arena_bytes, stages, large_page_bytes)
        fits = tuple(
            fit_of(
                geometry,
                num_large_pages,
                num_tokens,
                needed=decode_bytes(model, num_tokens),
                # A layout of one type knows no encoder, so the encoder's tokens take slots, too.
                further_tokens=_encoder_tokens(model) if name == "homogeneous" else 0,
            )
            for num_tokens in lengths
        )
    except ValueError as error:
        return System(name=name, label=label, refusal=str(error))
    longest_tokens = longest_request(geometry, model, num_large_pages)
    return System(
        name=name,
        label=label,
        unit_bytes=geometry.large_page_bytes,
        num_units=num_large_pages,
        num_page_tables=len(geometry.page_tables),
        # A request whose prompt cannot be computed never decodes.
        fits=tuple(
            replace(fit, num_requests=0)
            if longest_tokens is not None and fit.num_tokens > longest_tokens
            else fit
            for fit in fits
        ),
        longest_tokens=longest_tokens,
    )


def fit_of(
    geometry: Geometry,
    num_large_pages: int,
    num_tokens: int,
    *,
    needed: int,
    further_tokens: int = 0,
    holds_images: bool = False,
) -> Fit:
    """Return the number of requests of a length that an arena holds, all of them in decode.

    Requests share large pages, except for the part of a tail that the planner expects to be
    unshared. One large page is the null page.

    Args:
        geometry: The way in which the arena is cut.
        num_large_pages: Number of large pages, the null page included.
        num_tokens: Tokens of each request.
        needed: Bytes that its next token needs.
        further_tokens: Tokens that take slots in addition to `num_tokens`.
        holds_images: Whether each request also holds the embeddings of a typical image.
    """
    tables = [
        each for each in geometry.page_tables if holds_images or not each.layer_type.is_consumed
    ]
    pages = [
        held_pages(table.layer_type, table.tokens_per_page, num_tokens + further_tokens)
        for table in tables
    ]
    expected = [
        count
        if table.layer_type.is_packed or not count
        else count + UNSHARED_TAIL * (table.small_pages_per_large_page - 1) / 2
        for count, table in zip(pages, tables, strict=True)
    ]
    held = sum(
        count * table.small_page_bytes for count, table in zip(expected, tables, strict=True)
    )
    if held < needed:
        return Fit(
            num_tokens=num_tokens,
            num_requests=0,
            held_bytes=round(held),
            waste=None,
            is_below_state=True,
        )

    def large_pages(num_requests: int, per_request: Sequence[float]) -> int:
        return sum(
            ceil(num_requests * count / table.small_pages_per_large_page)
            for count, table in zip(per_request, tables, strict=True)
        )

    num_free = num_large_pages - 1
    fitting, too_many = 0, 2 + int(num_free * geometry.large_page_bytes / held)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if large_pages(middle, expected) <= num_free:
            fitting = middle
        else:
            too_many = middle
    if not fitting and large_pages(1, pages) <= num_free:
        fitting = 1
    return Fit(
        num_tokens=num_tokens,
        num_requests=fitting,
        held_bytes=round(held),
        waste=1 - needed / held,
    )


def longest_request(geometry: Geometry, model: ModelSpec, num_large_pages: int) -> int | None:
    """Return the longest request that fits in the empty arena.

    Its prompt is computed in chunks of `CHUNK_TOKENS`. It has an image if the model takes images.

    Returns:
        Number of tokens. 0 if not even one image fits, None if no request is too long.
    """
    policies = [table.policy() for table in geometry.page_tables]
    capacity = Capacity(geometry, policies, num_large_pages)

    def fits(num_tokens: int) -> bool:
        return capacity.can_ever_fit(
            num_tokens,
            chunk_tokens=min(num_tokens, CHUNK_TOKENS),
            facts=_facts(model, num_tokens),
        )

    if fits(LONGEST_TOKENS):
        return None
    fitting, too_many = 0, LONGEST_TOKENS
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def _facts(model: ModelSpec, prompt_tokens: int) -> RequestFacts:
    """Return the facts of a prompt, which begins with an image if the model takes images."""
    image_tokens = max(each.typical_tokens for each in model.layer_types)
    if any(each.is_consumed for each in model.layer_types):
        # The image's tokens are tokens of the prompt.
        image_tokens = min(image_tokens, prompt_tokens - 1)
    if image_tokens <= 0:
        return RequestFacts(prompt_tokens=prompt_tokens)
    image = Image(start_token=0, num_tokens=image_tokens)
    return RequestFacts(prompt_tokens=prompt_tokens, images=(image,))


def _encoder_tokens(model: ModelSpec) -> int:
    """Return the tokens that cross attention keeps of a request's image or audio."""
    return max(
        (each.typical_tokens for each in model.layer_types if each.keeps_encoder_tokens),
        default=0,
    )


KV_DTYPES: dict[str, tuple[KvFormat, str]] = {
    "auto": (KvFormat.MODEL, "bfloat16"),
    "bfloat16": (KvFormat.MODEL, "bfloat16"),
    "float16": (KvFormat.MODEL, "float16"),
    **{each.value: (each, "bfloat16") for each in KvFormat if each is not KvFormat.MODEL},
}
"""Values of `--kv-dtype`: the format of keys and values, and the model's dtype."""


def formats_of(kv_dtype: str, facts: ModelFacts) -> tuple[KvFormat, str]:
    """Return the format of keys and values, and the dtype of a model.

    Args:
        kv_dtype: A key of `KV_DTYPES`. "auto" takes the format for which the checkpoint was made.
        facts: The model.
    """
    kv_format, model_dtype = KV_DTYPES[kv_dtype]
    return (facts.kv_format if kv_dtype == "auto" else kv_format), model_dtype

"""What a model does to the memory of a GPU: its geometry, how many requests fit, what is wasted.

Everything here is arithmetic on lengths; nothing runs. `jenga replay` runs requests.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

from jenga.geometry import Geometry, check_arena
from jenga.models import KvFormat, ModelFacts, ReadOptions
from jenga.planning.demand import UNSHARED_TAIL, held_pages, is_packed
from jenga.planning.pipeline import Pipeline, plan_pipeline
from jenga.policies import Image, RequestFacts, policy_of
from jenga.sim.arenas.baseline_geometries import geometry_by_name, needed_bytes
from jenga.sim.hardware.budget import Budget
from jenga.sim.planning.stages import stages_of
from jenga.spec import CrossAttention, ImageEmbedding, ModelSpec, check_positive, combine
from jenga.tables.capacity import Capacity

LENGTHS = (1024, 8192, 32_768, 131_072)
"""Request lengths that a plan answers for where none are given."""

CHUNK_TOKENS = 8192
"""Prompt tokens of a step: vLLM's default on an H100."""

LONGEST_TOKENS = 1 << 24
"""A request that reaches so many tokens counts as without end."""

GEOMETRIES = {
    "planned": "Jenga, planned",
    "lcm": "exact LCM",
    "max": "MAX page",
    "homogeneous": "PagedAttention",
}
"""Rules of `jenga.sim.arenas.baseline_geometries` that are compared, with what a reader calls
them."""

PIPELINE_GEOMETRIES = ("planned", "lcm")
"""Those that are compared where a model is spread over the ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Requests of one length, all in mid decode.

    Attributes:
        num_tokens: Of each request.
        num_requests: How many the arena holds at once.
        held_bytes: What one of them is expected to hold.
        waste: Share of that which its next token does not need; None where the layout has less
            room for such a request than it needs: one that knows tokens alone holds no states of a
            request that is shorter than they are.
    """

    num_tokens: int
    num_requests: int
    held_bytes: int
    waste: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to manage the arena.

    Attributes:
        name: "planned", "lcm", "max", "homogeneous" or "vllm".
        label: What a reader calls it.
        unit_bytes: The unit it cuts the arena into.
        num_units: How many of them.
        num_page_tables: Page tables of a request.
        fits: One per length.
        longest_tokens: The longest request that the arena could hold alone; None where none is
            too long.
        refusal: Why it does not start; empty if it does, and the fields above are zero or empty
            otherwise.
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
    """A model's plan.

    Attributes:
        model: The layer types of all models served.
        facts: Of each of them, the draft last.
        options: How they are run.
        budget: Where the arena's bytes come from; None where they were given.
        arena_bytes: For caches, on one rank.
        geometry: The planned one, of all ranks of a pipeline; None where it does not start.
        pipeline: What each rank of a pipeline stores of it; None where there is one, or none
            starts.
        pipeline_parallel: Ranks of the pipeline.
        needed: Bytes that the next token of a request needs, and how many such requests would fill
            the arena, per length: (num_tokens, bytes, requests).
        systems: Planned first.
        notes: Sentences on where its layers come from.
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
"""vLLM's planner asked for a model, an arena's bytes and lengths."""


def served_model(models: Sequence[ModelFacts], options: ReadOptions) -> ModelSpec:
    """The layer types of one model, or of several that share an arena.

    Args:
        models: The one that is drafted for comes first.
        options: How they are run.

    Raises:
        ValueError: A configuration that is not understood, or two models of one name.
    """
    of_drafts = replace(options, draft_tokens=0, history_tokens=0)
    specs = [model.spec(of_drafts if index else options) for index, model in enumerate(models)]
    if len(specs) == 1:
        return specs[0]
    return combine("+".join(spec.name for spec in specs), specs)


def plan_model(
    models: Sequence[ModelFacts],
    *,
    arena: Budget | int,
    options: ReadOptions | None = None,
    lengths: Sequence[int] = LENGTHS,
    stock: StockSystem | None = None,
    pipeline_parallel: int = 1,
) -> Plan:
    """Plan for a model and compare with the other ways to manage its arena.

    Args:
        models: The model, and the draft that is served with it.
        arena: Its bytes on one rank, or the budget that leaves them.
        options: How the models are run.
        lengths: Tokens of the requests that capacities are given for.
        stock: Asks vLLM's planner; left out where None, and for a pipeline.
        pipeline_parallel: Ranks over which the model's layers are spread, in a row.

    Raises:
        ValueError: An argument out of its range, weights that do not fit, or a model or geometry
            that is refused.
    """
    if not lengths:
        msg = "lengths must name at least one"
        raise ValueError(msg)
    for num_tokens in lengths:
        check_positive("plan", "every length", num_tokens)
    options = options or ReadOptions()
    model = served_model(models, options)
    arena_bytes = arena.require_arena() if isinstance(arena, Budget) else arena
    check_positive("plan", "arena_bytes", arena_bytes)

    check_positive("plan", "pipeline_parallel", pipeline_parallel)
    if pipeline_parallel > 1:
        if len(models) > 1:
            msg = "a draft must be planned without a pipeline: vLLM runs none beside one"
            raise ValueError(msg)
        names = PIPELINE_GEOMETRIES
        stages = stages_of(models[0], model, pipeline_parallel)
        stock = None
    else:
        names, stages = tuple(GEOMETRIES), None
    systems = [_system(name, model, arena_bytes, lengths, stages) for name in names]
    if stock is not None:
        systems.append(stock(model, arena_bytes, lengths))
    geometry, pipeline = None, None
    if not systems[0].refusal:
        geometry, _, pipeline = _cut("planned", model, arena_bytes, stages)
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
    )


def decode_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes that the next token of a request in mid decode needs: image embeddings are gone."""
    kept = [each for each in model.layer_types if not isinstance(each, ImageEmbedding)]
    return needed_bytes(ModelSpec(name=model.name, layer_types=tuple(kept)), num_tokens)


def _cut(
    name: str, model: ModelSpec, arena_bytes: int, stages: Sequence[Collection[str]] | None
) -> tuple[Geometry, int, Pipeline | None]:
    """Cut the arena: the geometry, its large pages, and the ranks of a pipeline.

    Raises:
        ValueError: The rule has no geometry for the model, or the arena does not hold it.
    """

    def rule(model: ModelSpec) -> Geometry:
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
) -> System:
    label = GEOMETRIES[name]
    try:
        geometry, num_large_pages, _ = _cut(name, model, arena_bytes, stages)
        fits = tuple(
            fit_of(
                geometry,
                num_large_pages,
                num_tokens,
                needed=decode_bytes(model, num_tokens),
                # A layout of one type knows no encoder: its tokens are tokens like all others.
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
        # A prompt that cannot be prefilled is never decoded.
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
) -> Fit:
    """How many requests of a length an arena holds, all in mid decode.

    Requests share large pages, but for the part of a tail that the planner expects to be shared
    with nobody. One large page is the null page.

    Args:
        geometry: How the arena is cut.
        num_large_pages: The null page included.
        num_tokens: Of each request.
        needed: Bytes that its next token needs.
        further_tokens: Tokens that it takes slots for beyond those.
    """
    tables = [each for each in geometry.page_tables if not _is_image(each.layer_type)]
    pages = [
        held_pages(table.layer_type, table.tokens_per_page, num_tokens + further_tokens)
        for table in tables
    ]
    expected = [
        count
        if is_packed(table.layer_type) or not count
        else count + UNSHARED_TAIL * (table.small_pages_per_large_page - 1) / 2
        for count, table in zip(pages, tables, strict=True)
    ]
    held = sum(
        count * table.small_page_bytes for count, table in zip(expected, tables, strict=True)
    )
    if held < needed:
        return Fit(num_tokens=num_tokens, num_requests=0, held_bytes=round(held), waste=None)

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
    """The longest request, with an image where the model takes them, that fits alone.

    Its prompt comes in chunks of `CHUNK_TOKENS`.

    Returns:
        Tokens; 0 where not even one image fits, None where no request is too long.
    """
    policies = [policy_of(table) for table in geometry.page_tables]
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
    """A prompt that begins with an image where the model takes images."""
    encoders = [e for e in model.layer_types if isinstance(e, CrossAttention | ImageEmbedding)]
    image_tokens = max((each.typical_tokens for each in encoders), default=0)
    if any(map(_is_image, encoders)):
        # The image's tokens are tokens of the prompt.
        image_tokens = min(image_tokens, prompt_tokens - 1)
    if image_tokens <= 0:
        return RequestFacts(prompt_tokens=prompt_tokens)
    image = Image(start_token=0, num_tokens=image_tokens)
    return RequestFacts(prompt_tokens=prompt_tokens, images=(image,))


def _encoder_tokens(model: ModelSpec) -> int:
    """Tokens that cross attention keeps of a request's image or audio."""
    return max(
        (each.typical_tokens for each in model.layer_types if isinstance(each, CrossAttention)),
        default=0,
    )


def _is_image(layer_type: object) -> bool:
    return isinstance(layer_type, ImageEmbedding)


KV_DTYPES: dict[str, tuple[KvFormat, str]] = {
    "auto": (KvFormat.MODEL, "bfloat16"),
    "bfloat16": (KvFormat.MODEL, "bfloat16"),
    "float16": (KvFormat.MODEL, "float16"),
    **{each.value: (each, "bfloat16") for each in KvFormat if each is not KvFormat.MODEL},
}
"""What `--kv-dtype` takes: the format of keys and values, and the model's dtype."""


def formats_of(kv_dtype: str, facts: ModelFacts) -> tuple[KvFormat, str]:
    """Get the format of keys and values, and the dtype of a model.

    Args:
        kv_dtype: Of `KV_DTYPES`; "auto" is what the checkpoint was made for.
        facts: The model.
    """
    kv_format, model_dtype = KV_DTYPES[kv_dtype]
    return (facts.kv_format if kv_dtype == "auto" else kv_format), model_dtype

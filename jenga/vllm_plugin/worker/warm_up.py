"""A warm-up step that compiles kernels before the first request.

vLLM warms up with prompts of a few tokens, which our layers treat as decoding. One more step
processes a longer prompt and one token of another request. If the model has states, the step also
copies one state and keeps one in its middle, as steps do for prefix caching.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

from jenga.geometry import Geometry
from jenga.page_ids import SmallPageId
from jenga.vllm_plugin.arena.layout import first_layers, geometry_of, group_tables
from jenga.vllm_plugin.orders.copy_rounds import CopyRound
from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders, attach_orders

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

WARM_UP_TOKENS = 128
"""Number of tokens in the step: those of a prompt, and one of another request."""

KEPT_AFTER_TOKENS = 16


def on_pages_apart(
    execute_model: Callable[["SchedulerOutput"], Any], geometry: Geometry
) -> Callable[["SchedulerOutput"], Any]:
    """Wrap a function so that vLLM's warm-up steps use pages that do not overlap.

    vLLM numbers warm-up pages as if a page number meant the same bytes in every group. In each page
    table, number n is replaced by the first small page of large page n.

    Args:
        execute_model: Function that runs a step of the worker.
        geometry: Geometry of the arena.

    Returns:
        A function that renumbers the pages of a step and then runs it.
    """
    parts = [table.small_pages_per_large_page for table in group_tables(geometry)]

    def apart(page_ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        return tuple([n * k for n in ids] for ids, k in zip(page_ids, parts, strict=True))

    def execute(step: "SchedulerOutput") -> object:
        for new in step.scheduled_new_reqs:
            new.block_ids = apart(new.block_ids)
        cached = step.scheduled_cached_reqs
        cached.new_block_ids = [ids and apart(ids) for ids in cached.new_block_ids]
        return execute_model(step)

    return execute


def warm_up(
    model_runner: Any,  # noqa: ANN401 (vLLM's second model runner)
    execute_model: Callable[["SchedulerOutput"], Any],
    sample_tokens: Callable[[Any], Any],
) -> None:
    """Run the warm-up step. The arena must not hold anything yet.

    Args:
        model_runner: vLLM's second model runner, after its arena is allocated.
        execute_model: Function that runs a step of the worker.
        sample_tokens: Function that samples and so ends the step.
    """
    config = model_runner.kv_cache_config
    geometry, num_large_pages = geometry_of(config), config.num_blocks
    layers = first_layers(config)

    # With states of a kind that cannot be kept, prefix caching is off, and no builder takes orders.
    keeps_states = model_runner.vllm_config.cache_config.enable_prefix_caching

    def execute_with_orders(step: "SchedulerOutput") -> object:
        orders = orders_of(step, geometry, num_large_pages, layers) if keeps_states else None
        if orders is not None:
            attach_orders(step, orders)
        return execute_model(step)

    most_tokens = min(model_runner.max_num_tokens, model_runner.max_model_len)
    num_tokens = min(WARM_UP_TOKENS, most_tokens)
    execute = on_pages_apart(execute_with_orders, geometry)
    run_mixed_prefill_decode_warmup(model_runner, execute, sample_tokens, num_tokens)


def orders_of(
    step: "SchedulerOutput",
    geometry: Geometry,
    num_large_pages: int,
    layers: Sequence[Sequence[str]],
) -> StepOrders | None:
    """Make orders that copy one state per page table and keep one state of a step's prompt.

    Args:
        step: A warm-up step. Its requests have the first pages of the arena, and the orders use the
            last.
        geometry: Geometry of the arena.
        num_large_pages: Number of large pages in the arena.
        layers: For each page table, its first layer on each rank of the pipeline that has any.

    Returns:
        The orders, or None if the step has no long prompt or the model no states.
    """
    prompts = [
        new
        for new in step.scheduled_new_reqs
        if step.num_scheduled_tokens[new.req_id] > KEPT_AFTER_TOKENS
    ]
    tables = [(index, table) for index, table in enumerate(geometry.page_tables) if table.is_state]
    if not prompts or not tables:
        return None
    copies: list[CopyRound] = []
    checkpoints: dict[str, tuple[CheckpointWrite, ...]] = {}
    for index, table in tables:
        num_pages = num_large_pages * table.small_pages_per_large_page
        source, target = SmallPageId(num_pages - 2), SmallPageId(num_pages - 1)
        copies.append(
            CopyRound(
                small_pages_per_large_page=table.small_pages_per_large_page,
                source_pages=(source,),
                target_pages=(target,),
            )
        )
        running_page = SmallPageId(prompts[0].block_ids[index][0])
        write = CheckpointWrite(
            running_page=running_page, after_tokens=KEPT_AFTER_TOKENS, page=target
        )
        checkpoints |= dict.fromkeys(layers[index], (write,))
    return StepOrders(copies=tuple(copies), checkpoints=checkpoints)

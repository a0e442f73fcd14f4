"""Makes a step's orders from the decisions of the manager and of the keeper of states.

At the end of vLLM's `schedule`, `jenga.state_keeper` decides which pages are copied and which
states are kept for other requests. This module turns the decisions into orders that name layers
and pages.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from jenga.manager import Manager
from jenga.page_ids import SmallPageId
from jenga.state_keeper import KeptInPassing, StateKeeper, end_step
from jenga.vllm_plugin.orders.copy_rounds import copy_rounds
from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders


def make_orders(
    manager: Manager,
    keeper: StateKeeper | None,
    *,
    num_tokens: int,
    first_layers: Sequence[Sequence[str]] | None = None,
) -> StepOrders:
    """Make all orders of a step, once all of its requests are known.

    Args:
        manager: Manager that gives pages and knows which copies to make.
        keeper: Keeper of the step's states, or None if no states are kept.
        num_tokens: Number of tokens that the step computes.
        first_layers: For each page table, the name of its first layer on each rank of the pipeline
            that has any. None means that all layers are on one rank.
    """
    step = end_step(manager, keeper, num_tokens=num_tokens)
    if first_layers is None:
        first_layers = [(table.layers[0].name,) for table in manager.geometry.page_tables]
    return StepOrders(
        copies=copy_rounds(step.copies, manager.geometry),
        checkpoints=_checkpoints(manager, step.kept, first_layers),
        ahead=copy_rounds(step.ahead, manager.geometry),
    )


def _checkpoints(
    manager: Manager, kept: Iterable[KeptInPassing], first_layers: Sequence[Sequence[str]]
) -> dict[str, tuple[CheckpointWrite, ...]]:
    """Get the states that layers write within a step, in the form of `StepOrders.checkpoints`.

    States that have lost their page are left out. In a full arena, a state that was kept or loaded
    later may have taken it.
    """
    writes: dict[str, list[CheckpointWrite]] = {}
    for each in kept:
        copy = each.copy
        # Both pages of the copy are in the arena.
        running_page, page = cast("SmallPageId", copy.source), cast("SmallPageId", copy.target)
        if manager.keeps_state(copy.table_index, each.prefix_hash, page):
            write = CheckpointWrite(
                running_page=running_page, after_tokens=each.after_tokens, page=page
            )
            for name in first_layers[copy.table_index]:
                writes.setdefault(name, []).append(write)
    return {name: tuple(orders) for name, orders in writes.items()}

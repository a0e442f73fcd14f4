"""All orders of one step: pages that workers copy, and checkpoints that layers write.

They travel in an attribute of their own on the step's `SchedulerOutput`. Every executor of vLLM
pickles that object as a whole for its workers, or passes it on as it is. No field of vLLM gets
another meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jenga.page_ids import SmallPageId
from jenga.vllm_plugin.orders.copy_rounds import CopyRound

_ATTRIBUTE = "jenga_orders"
"""Attribute of a `SchedulerOutput` that holds the step's orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWrite:
    """A recurrent state to keep in the middle of a step.

    Attributes:
        running_page: A page of the request's running state. Layers identify the request by it.
        after_tokens: Number of the request's tokens in this step after which to keep the state.
        page: Small page to keep the state in.
    """

    running_page: SmallPageId
    after_tokens: int
    page: SmallPageId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """All orders of one step.

    Attributes:
        copies: Copies to make before any layer runs, in this order.
        checkpoints: Layer name -> states that the layers of its page table keep. A page table is
            named by one layer on each rank of the pipeline that has any. States of one request are
            in the order of its tokens.
        ahead: Copies to and from host memory that run beside the layers. They begin after `copies`
            and end before the copies of the next step.
    """

    copies: tuple[CopyRound, ...] = ()
    checkpoints: Mapping[str, tuple[CheckpointWrite, ...]] = field(default_factory=dict)
    ahead: tuple[CopyRound, ...] = ()


def attach_orders(scheduler_output: Any, orders: StepOrders) -> None:  # noqa: ANN401 (vLLM's)
    """Attach orders to the output of vLLM's scheduler for the same step."""
    setattr(scheduler_output, _ATTRIBUTE, orders)


def attached_orders(scheduler_output: Any) -> StepOrders | None:  # noqa: ANN401
    """Get the orders attached to an output of vLLM's scheduler, or None if it has none."""
    return getattr(scheduler_output, _ATTRIBUTE, None)

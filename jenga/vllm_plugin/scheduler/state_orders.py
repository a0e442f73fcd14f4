"""Orders from the scheduler to the workers to copy pages and to keep recurrent states.

At the end of vLLM's `schedule`, `jenga.state_keeper` decides which states are kept for other
requests. This module turns the decisions into orders that name layers and pages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jenga import state_keeper
from jenga.manager import Manager
from jenga.state_keeper import KeptInPassing
from jenga.vllm_plugin.scheduler.cache_events import CacheEvents
from jenga.vllm_plugin.scheduler.copy_rounds import CopyRound, copy_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWrite:
    """A state to keep in the middle of a step.

    Attributes:
        running_page: A page of the request's running state. Layers identify the request by it.
        after_tokens: Number of the request's tokens in this step after which to keep the state.
        page: Small page to keep the state in.
    """

    running_page: int
    after_tokens: int
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """All orders of one step.

    Attributes:
        copies: Copies to make before any layer runs, in this order.
        writes: Layer name -> states that the layers of its page table keep. A page table is named
            by one layer on each rank of the pipeline that has any. States of one request are in the
            order of its tokens.
        ahead: Copies to and from host memory that run beside the layers. They begin after `copies`
            and end before the copies of the next step.
    """

    copies: tuple[CopyRound, ...] = ()
    writes: Mapping[str, tuple[StateWrite, ...]] = field(default_factory=dict)
    ahead: tuple[CopyRound, ...] = ()


class StateKeeper(state_keeper.StateKeeper):
    """Decides at the end of each step which states to keep, and names layers that write them."""

    __slots__ = ("_first_layers",)

    def __init__(
        self,
        manager: Manager,
        *,
        hash_tokens: int,
        events: CacheEvents | None = None,
        first_layers: Sequence[Sequence[str]] | None = None,
        history_query_tokens: int = 0,
    ) -> None:
        """Start without states to keep.

        Args:
            manager: Manager that gives the pages.
            hash_tokens: Number of tokens that each further hash of a request covers.
            events: Cache events that record kept states, or None.
            first_layers: For each page table, the name of its first layer on each rank of the
                pipeline that has any. None means that all layers are on one rank.
            history_query_tokens: As in `jenga.state_keeper.StateKeeper`.
        """
        super().__init__(
            manager,
            hash_tokens=hash_tokens,
            on_keep=events.note if events is not None else None,
            history_query_tokens=history_query_tokens,
        )
        self._first_layers = first_layers or [
            (table.layers[0].name,) for table in manager.geometry.page_tables
        ]

    def writes(self, kept: Iterable[KeptInPassing]) -> dict[str, tuple[StateWrite, ...]]:
        """Get the states that layers write within a step, in the form of `StepOrders.writes`.

        States that have lost their page are left out. In a full arena, a state that was kept or
        loaded later may have taken it.
        """
        writes: dict[str, list[StateWrite]] = {}
        for each in kept:
            copy = each.copy
            if self._manager.keeps_state(copy.table_index, each.prefix_hash, copy.target):
                write = StateWrite(
                    running_page=copy.source, after_tokens=each.after_tokens, page=copy.target
                )
                for name in self._first_layers[copy.table_index]:
                    writes.setdefault(name, []).append(write)
        return {name: tuple(orders) for name, orders in writes.items()}


def take_orders(manager: Manager, keeper: StateKeeper | None, *, num_tokens: int) -> StepOrders:
    """Get all orders of a step, once all of its requests are known.

    Args:
        manager: Manager that gives pages and knows which copies to make.
        keeper: Keeper of the step's states, or None if no states are kept.
        num_tokens: Number of tokens that the step computes.
    """
    step = state_keeper.end_step(manager, keeper, num_tokens=num_tokens)
    return StepOrders(
        copies=copy_rounds(list(step.copies), manager.geometry),
        writes=keeper.writes(step.kept) if keeper is not None else {},
        ahead=copy_rounds(list(step.ahead), manager.geometry),
    )

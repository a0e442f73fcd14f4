"""What the scheduler asks of the workers so that recurrent states are kept for other requests.

Which states are kept is decided in `jenga.state_keeper`, at the end of vLLM's `schedule`. Here the
decisions become orders that name layers and pages.
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
    """A state to keep on the way through a step.

    Attributes:
        running_page: A page of the request's running state, which names it to the layers.
        after_tokens: Tokens of this step after which the state is kept.
        page: Page to keep it in.
    """

    running_page: int
    after_tokens: int
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """All orders of one step.

    Attributes:
        copies: To be made in this order before any layer runs.
        writes: A layer of a page table, one of every rank of a pipeline that has any -> states that
            its layers keep, those of one request in the order of its tokens.
        ahead: Copies to host memory and from there to be begun after the others, beside the
            layers, and to be over before the next step's.
    """

    copies: tuple[CopyRound, ...] = ()
    writes: Mapping[str, tuple[StateWrite, ...]] = field(default_factory=dict)
    ahead: tuple[CopyRound, ...] = ()


class StateKeeper(state_keeper.StateKeeper):
    """Decides at the end of each step which states it keeps, and says which layers write them."""

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
        """Nothing to keep.

        Args:
            manager: Gives the pages.
            hash_tokens: Tokens that each further hash of a request covers.
            events: Told of what is kept, if anybody is.
            first_layers: Of each page table the first layer on every rank of a pipeline that has
                any; where None, all are on one rank.
            history_query_tokens: As of `jenga.state_keeper.StateKeeper`.
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
        """Get the states that layers write on their way, as `StepOrders` has them.

        In a full arena a state may have lost its page to what was kept, or loaded, after it.
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
    """Get all orders of a step, once all requests of it are known.

    Args:
        manager: Gives pages, and says what is copied.
        keeper: Of the step; None where no states are kept.
        num_tokens: That the step computes.
    """
    step = state_keeper.end_step(manager, keeper, num_tokens=num_tokens)
    return StepOrders(
        copies=copy_rounds(list(step.copies), manager.geometry),
        writes=keeper.writes(step.kept) if keeper is not None else {},
        ahead=copy_rounds(list(step.ahead), manager.geometry),
    )

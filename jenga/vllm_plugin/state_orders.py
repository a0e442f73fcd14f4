"""What the scheduler asks of the workers so that recurrent states are kept for other requests.

A state is kept in the pass that computes it: the layers write it to a page of its own on their way
through a prompt. Of an answer, a copy of the running state is kept now and then, before a step goes
on from it. A request that starts from a kept state starts with a copy of it. The scheduler's
process decides both at the end of `schedule`, when all requests of the step are known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jenga.manager import Manager
from jenga.request import CopyPath, PageCopy
from jenga.spec import State
from jenga.vllm_plugin.cache_events import CacheEvents
from jenga.vllm_plugin.copy_rounds import CopyRound, copy_rounds

if TYPE_CHECKING:
    from vllm.v1.request import Request


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    """The tokens of a request that a step computes."""

    request: "Request"
    start_tokens: int
    end_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInPassing:
    """A state that layers write on their way, if its page is not given to others before.

    Attributes:
        prefix_hash: Of the tokens that went into it.
        copy: From the request's running page to the page it is kept in; not to be made.
        after_tokens: Tokens of the step after which it is there.
    """

    prefix_hash: bytes
    copy: PageCopy
    after_tokens: int


class StateKeeper:
    """Decides at the end of each step which states it keeps."""

    __slots__ = (
        "_answer_tokens",
        "_answers",
        "_events",
        "_first_layers",
        "_geometry",
        "_hash_tokens",
        "_manager",
        "_passages",
        "_passed",
        "_slots",
    )

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
            history_query_tokens: Most tokens of a decoding step where these are kept beside the
                states, and a page has the state after any of its last step's; 0 where none are.
        """
        self._manager = manager
        self._events = events
        self._geometry = manager.geometry
        self._first_layers = first_layers or [
            (table.layers[0].name,) for table in manager.geometry.page_tables
        ]
        self._hash_tokens = hash_tokens
        # Steps of so many tokens leave the state after each of them in a slot of the request.
        self._slots = history_query_tokens or max(
            table.layer_type.slots_per_request
            for table in self._geometry.page_tables
            if isinstance(table.layer_type, State)
        )
        self._answer_tokens = manager.answer_interval_tokens
        # Request -> tokens after which its last step left each state that it computed in a slot.
        self._answers: dict[str, int] = {}
        self._passages: dict[str, _Passage] = {}
        self._passed: dict[str, tuple[Request, list[int]]] = {}

    def step_starts(self) -> None:
        """Begin a step: keep what the last one could not write on its way."""
        for request_id, (request, states) in self._passed.items():
            if self._manager.is_running(request_id):
                for num_tokens in states:
                    self._keep_state(request, num_tokens)
        self._passed.clear()
        self._passages.clear()

    def schedule(self, request: "Request", start_tokens: int, end_tokens: int) -> None:
        """Note that the step computes these tokens of a request, and keep what it starts from."""
        # A step of the request's last token and drafts is a decoding one: its prompt is kept.
        if start_tokens < request.num_tokens - 1:
            self._passages[request.request_id] = _Passage(
                request=request, start_tokens=start_tokens, end_tokens=end_tokens
            )
            # The next prompt of a session: of the states that it passes slots have only the last.
            self._answers.pop(request.request_id, None)
        elif self._answer_tokens:
            slots, past_tokens = self._slots, start_tokens % self._answer_tokens
            if slots > 1:
                self._answers.setdefault(request.request_id, start_tokens)
            if past_tokens < slots:
                self._keep_answer(request, start_tokens - past_tokens)
            if slots > 1:
                # As many tokens as there are slots leave nothing of what the step starts from.
                self._answers[request.request_id] = start_tokens + 1

    def _keep_answer(self, request: "Request", num_tokens: int) -> None:
        """Keep a state of what a request generates, if its slots have it and its tokens are known.

        Where a step is still to say which of its drafts it accepts, slots have what it writes.
        """
        is_known = num_tokens <= len(request.block_hashes) * self._hash_tokens
        is_there = self._slots == 1 or (
            not request.num_in_flight_tokens and num_tokens >= self._answers[request.request_id]
        )
        if num_tokens and is_known and is_there:
            self._keep_state(request, num_tokens)

    def forget(self, request_id: str) -> None:
        """Note that a request has ended or lost its place in the step."""
        self._passages.pop(request_id, None)
        self._passed.pop(request_id, None)
        self._answers.pop(request_id, None)

    def keep_passed(self, copies: list[PageCopy]) -> list[KeptInPassing]:
        """Give pages to the states that the step passes, once all of it is known.

        Args:
            copies: To be made before the step; those are added that save what was in these pages.
        """
        return [
            kept
            for request_id, passage in self._passages.items()
            for kept in self._keep(request_id, passage, copies)
        ]

    def writes(self, kept: Iterable[KeptInPassing]) -> dict[str, tuple[StateWrite, ...]]:
        """What layers write on their way, as `StepOrders` has it, of states that have their pages.

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

    def _keep(
        self, request_id: str, passage: _Passage, copies: list[PageCopy]
    ) -> list[KeptInPassing]:
        """Give pages to a request's states.

        Args:
            request_id: Whose.
            passage: What the step computes of it.
            copies: To which those are added that save what was in these pages.
        """
        kept: list[KeptInPassing] = []
        start_tokens, end_tokens = passage.start_tokens, passage.end_tokens
        for num_tokens in self._manager.checkpoint_tokens(request_id):
            if not start_tokens < num_tokens <= end_tokens:
                continue
            if end_tokens - start_tokens <= self._slots:
                # Layers take so few tokens for decoding, which writes running states only.
                self._passed.setdefault(request_id, (passage.request, []))[1].append(num_tokens)
            elif self._keep_state(passage.request, num_tokens, in_passing=True):
                prefix_hash = self._hash(passage.request, num_tokens)
                for copy in self._manager.take_copies():
                    if copy.path == CopyPath.IN_ARENA:
                        after_tokens = num_tokens - start_tokens
                        kept.append(
                            KeptInPassing(
                                prefix_hash=prefix_hash, copy=copy, after_tokens=after_tokens
                            )
                        )
                    else:
                        copies.append(copy)
        return kept

    def _keep_state(self, request: "Request", num_tokens: int, *, in_passing: bool = False) -> bool:
        prefix_hash = self._hash(request, num_tokens)
        is_kept = self._manager.keep_state(
            request.request_id, prefix_hash, num_tokens, in_passing=in_passing
        )
        if self._events is not None:
            self._events.note(request)
        return is_kept

    def _hash(self, request: "Request", num_tokens: int) -> bytes:
        return request.block_hashes[num_tokens // self._hash_tokens - 1]


def take_orders(manager: Manager, keeper: StateKeeper | None, *, num_tokens: int) -> StepOrders:
    """All orders of a step, once all requests of it are known.

    Args:
        manager: Gives pages, and says what is copied.
        keeper: Of the step; None where no states are kept.
        num_tokens: That the step computes.
    """
    copies = manager.take_copies()
    kept = keeper.keep_passed(copies) if keeper is not None else []
    loaded = manager.load_ahead(num_tokens)
    copies += manager.take_copies()  # what makes room for that
    # What is saved may take the place of what was loaded.
    ahead = [*loaded, *manager.save_ahead()]
    return StepOrders(
        copies=copy_rounds(copies, manager.geometry),
        writes=keeper.writes(kept) if keeper is not None else {},
        ahead=copy_rounds(ahead, manager.geometry),
    )

"""Decides for each step of an engine which states of recurrent layers are kept for other requests.

A state of a prompt is kept in the pass that computes it: the layers write it to a page of its own
on their way through the prompt. A state of an answer is a copy of the running state. It is made now
and then, before a step goes on from that state. A request that starts from a kept state starts with
a copy of it. All of this is decided when every request of the step is known.

The plugin and the simulator both decide here, so that a replay keeps the same states as an engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jenga.manager import Manager
from jenga.spec import State
from jenga.tables.request import CopyPath, PageCopy


class EngineRequest(Protocol):
    """A request as a scheduler knows it, with vLLM's names."""

    @property
    def request_id(self) -> str:
        """Name of the request."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt and the tokens generated so far."""
        ...

    @property
    def num_in_flight_tokens(self) -> int:
        """Number of tokens of steps that are not over."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hash i covers the first `(i + 1) * hash_tokens` known tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    """The tokens of a request that a step computes."""

    request: EngineRequest
    start_tokens: int
    end_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInPassing:
    """A state that layers write on their way, unless its page is given to others before.

    Attributes:
        prefix_hash: Hash of the tokens that the state contains.
        copy: Copy from the request's running page to the page of the kept state. It must not be
            made.
        after_tokens: Number of tokens of the step after which the state is there.
    """

    prefix_hash: bytes
    copy: PageCopy
    after_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopies:
    """Copies and states of a step, decided once all requests of the step are known.

    Attributes:
        copies: Copies to make in this order before any layer runs.
        kept: States that layers write on their way.
        ahead: Copies to and from host memory. They begin after the other copies, run concurrently
            with the layers, and end before the next step's copies.
    """

    copies: tuple[PageCopy, ...] = ()
    kept: tuple[KeptInPassing, ...] = ()
    ahead: tuple[PageCopy, ...] = ()


class StateKeeper:
    """Decides at the end of each step's scheduling which states the step keeps."""

    __slots__ = (
        "_answer_tokens",
        "_answers",
        "_hash_tokens",
        "_manager",
        "_on_keep",
        "_passages",
        "_passed",
        "_slots",
    )

    def __init__(
        self,
        manager: Manager,
        *,
        hash_tokens: int,
        on_keep: Callable[[Any], None] | None = None,
        history_query_tokens: int = 0,
    ) -> None:
        """Start without states to keep.

        Args:
            manager: Allocates the pages.
            hash_tokens: Number of tokens that each further hash of a request covers.
            on_keep: Called with a request when a state of it was to be kept, or can be found now.
            history_query_tokens: Most tokens of a decode step, if a history is kept beside the
                states. A page then has the state after any token of its last step. 0 without
                histories.
        """
        self._manager = manager
        self._on_keep = on_keep
        self._hash_tokens = hash_tokens
        # A step of at most this many tokens leaves the state after each token in a slot of the
        # request.
        self._slots = history_query_tokens or max(
            table.layer_type.slots_per_request
            for table in manager.geometry.page_tables
            if isinstance(table.layer_type, State)
        )
        self._answer_tokens = manager.answer_interval_tokens
        # Request -> number of tokens from which on its slots have each state of its last step.
        self._answers: dict[str, int] = {}
        self._passages: dict[str, _Passage] = {}
        self._passed: dict[str, tuple[EngineRequest, list[int]]] = {}

    def step_ends(self) -> None:
        """Report the states that the last step wrote on its way.

        Call this before `Manager.new_step`.
        """
        if self._on_keep is None:
            return
        for request_id, passage in self._passages.items():
            if self._manager.is_running(request_id):
                self._manager.keep_written(request_id)
                self._on_keep(passage.request)

    def step_starts(self) -> None:
        """Begin a step. Keep the states that the last step could not write on its way."""
        for request_id, (request, states) in self._passed.items():
            if self._manager.is_running(request_id):
                for num_tokens in states:
                    self._keep_state(request, num_tokens)
        self._passed.clear()
        self._passages.clear()

    def schedule(self, request: EngineRequest, start_tokens: int, end_tokens: int) -> None:
        """Record that the step computes tokens of a request, and keep the state it starts from."""
        # A step of the request's last token and drafts is a decode step. Its prompt is kept
        # already.
        if start_tokens < request.num_tokens - 1:
            self._passages[request.request_id] = _Passage(
                request=request, start_tokens=start_tokens, end_tokens=end_tokens
            )
            # This is the next prompt of a session. Slots have only the last of the states that it
            # passes.
            self._answers.pop(request.request_id, None)
        elif self._answer_tokens:
            slots, past_tokens = self._slots, start_tokens % self._answer_tokens
            if slots > 1:
                self._answers.setdefault(request.request_id, start_tokens)
            if past_tokens < slots:
                self._keep_answer(request, start_tokens - past_tokens)
            if slots > 1:
                # If a step has as many tokens as there are slots, it writes over the state it
                # starts from.
                self._answers[request.request_id] = start_tokens + 1

    def _keep_answer(self, request: EngineRequest, num_tokens: int) -> None:
        """Keep a state of a request's output, if a slot has the state and its tokens are known.

        While a step has not reported which drafts it accepts, slots have the states that it writes.
        """
        is_known = num_tokens <= len(request.block_hashes) * self._hash_tokens
        is_there = self._slots == 1 or (
            not request.num_in_flight_tokens and num_tokens >= self._answers[request.request_id]
        )
        if num_tokens and is_known and is_there:
            self._keep_state(request, num_tokens)

    def forget(self, request_id: str) -> None:
        """Record that a request has ended, or was removed from the step."""
        self._passages.pop(request_id, None)
        self._passed.pop(request_id, None)
        self._answers.pop(request_id, None)

    def keep_passed(self, copies: list[PageCopy]) -> list[KeptInPassing]:
        """Give pages to the states that the step passes, once the whole step is known.

        Args:
            copies: Copies to make before the step. Copies that save the old content of these pages
                are appended.
        """
        return [
            kept
            for request_id, passage in self._passages.items()
            for kept in self._keep(request_id, passage, copies)
        ]

    def _keep(
        self, request_id: str, passage: _Passage, copies: list[PageCopy]
    ) -> list[KeptInPassing]:
        """Give pages to a request's states.

        Args:
            request_id: Name of the request.
            passage: Its tokens that the step computes.
            copies: List to which copies that save the old content of these pages are appended.
        """
        kept: list[KeptInPassing] = []
        start_tokens, end_tokens = passage.start_tokens, passage.end_tokens
        for num_tokens in self._manager.checkpoint_tokens(request_id):
            if not start_tokens < num_tokens <= end_tokens:
                continue
            if end_tokens - start_tokens <= self._slots:
                # Layers treat so few tokens as decoding, which writes running states only.
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

    def _keep_state(
        self, request: EngineRequest, num_tokens: int, *, in_passing: bool = False
    ) -> bool:
        prefix_hash = self._hash(request, num_tokens)
        is_kept = self._manager.keep_state(
            request.request_id, prefix_hash, num_tokens, in_passing=in_passing
        )
        if self._on_keep is not None:
            self._on_keep(request)
        return is_kept

    def _hash(self, request: EngineRequest, num_tokens: int) -> bytes:
        return request.block_hashes[num_tokens // self._hash_tokens - 1]


def end_step(manager: Manager, keeper: StateKeeper | None, *, num_tokens: int) -> StepCopies:
    """Decide which copies and states a step has, once all requests of the step are known.

    Args:
        manager: Allocates pages, and returns copies.
        keeper: State keeper of the engine. None if no states are kept.
        num_tokens: Number of tokens that the step computes.
    """
    copies = manager.take_copies()
    kept = keeper.keep_passed(copies) if keeper is not None else []
    loaded = manager.prefetch_pages(num_tokens)
    copies += manager.take_copies()  # copies that make room for these
    # Loads come first, because saved content may overwrite host pages that they read.
    ahead = [*loaded, *manager.write_back_pages()]
    return StepCopies(copies=tuple(copies), kept=tuple(kept), ahead=tuple(ahead))

"""A memory manager and its arena, as the scheduler of a replay sees them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jenga.policies import RequestFacts
from jenga.prefix.eviction_log import Eviction
from jenga.prefix.miss_log import Miss
from jenga.sim.results.rows import TableBytes
from jenga.sim.workload.requests import Request, prefix_hashes


class ActiveRequest:
    """A request that has arrived, and its progress.

    Attributes:
        request: The request of the trace.
        name: Name of the request.
        arrival_s: Arrival time in seconds.
        prompt_tokens: Number of tokens of its prompt.
        total_tokens: Number of tokens with which it ends.
        num_tokens: Number of known tokens: the prompt and the tokens generated so far.
        num_computed: Number of computed tokens, those of steps in flight included.
        num_in_flight: Number of tokens in steps that were scheduled and have not ended.
        num_stale: Number of tokens in flight that were scheduled before the request was preempted.
        num_expected: Most tokens that steps in flight generate, drafted ones included.
        num_drafted: Number of tokens drafted for its next step.
        is_prefilling: Whether known tokens are left to compute after the steps in flight.
        facts: Facts that a manager is given. After a preemption, generated tokens are prompt.
        found: Result of the arena's last prefix lookup.
        hit_tokens: Tokens of the prefix hit at its first admission. None before the admission.
        num_preemptions: Number of times it was preempted.
        first_token_s: Time of its first generated token. -1 before.
        finished_s: Time of its last generated token. -1 before.
        refusal: Reason why it never runs. Empty for a request that may run.
    """

    __slots__ = (
        "_hash_tokens",
        "_hashes",
        "arrival_s",
        "facts",
        "finished_s",
        "first_token_s",
        "found",
        "hit_tokens",
        "is_prefilling",
        "name",
        "num_computed",
        "num_drafted",
        "num_expected",
        "num_in_flight",
        "num_preemptions",
        "num_stale",
        "num_tokens",
        "prompt_tokens",
        "refusal",
        "request",
        "total_tokens",
    )

    def __init__(self, request: Request, *, arrival_s: float | None = None) -> None:
        """Begin without computed tokens.

        Args:
            request: The request of the trace.
            arrival_s: Arrival time in seconds. None for the time in the request.
        """
        self.request = request
        self.name = request.name
        self.arrival_s = request.arrival_s if arrival_s is None else arrival_s
        self.facts = request.facts
        self.prompt_tokens = self.num_tokens = self.facts.prompt_tokens
        self.total_tokens = self.prompt_tokens + request.output_tokens
        self.num_computed = self.num_in_flight = self.num_stale = 0
        self.num_expected = self.num_drafted = self.num_preemptions = 0
        self.is_prefilling = False
        self.found: Any = None
        self.hit_tokens: int | None = None
        self.first_token_s = self.finished_s = -1.0
        self.refusal = ""
        self._hashes: list[bytes] = []
        self._hash_tokens = 0

    @property
    def num_processed(self) -> int:
        """Number of tokens in its pages whose step has ended."""
        return self.num_computed - (self.num_in_flight - self.num_stale)

    def hashes(self, hash_tokens: int) -> list[bytes]:
        """Hash `i` is that of the first `(i + 1) * hash_tokens` tokens, future ones included."""
        if hash_tokens != self._hash_tokens:
            self._hashes = prefix_hashes(self.request.pieces, hash_tokens)
            self._hash_tokens = hash_tokens
        return self._hashes

    def begin(self, num_tokens: int) -> None:
        """Record that a step which computes `num_tokens` further tokens was scheduled."""
        self.num_computed += num_tokens
        self.num_in_flight += num_tokens

    def restart(self) -> None:
        """Record that the request lost all its pages. Generated tokens become part of its prompt.

        Steps in flight still deliver the tokens that they generate.
        """
        self.num_computed = self.num_drafted = self.num_expected = 0
        self.num_stale = self.num_in_flight
        self.num_preemptions += 1
        self.found = None
        self.facts = RequestFacts(prompt_tokens=self.num_tokens, images=self.facts.images)


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens of one request that a step computes.

    Attributes:
        active: The request.
        start: Number of its tokens that were computed before.
        num_tokens: Number of tokens that the step computes.
        num_drafted: Number of drafted tokens among them.
        is_padded: Whether the drafted tokens are padding instead of drafts. Padding makes the
            request's part of the step as long as that of decoding requests.
        generates: Whether the step computes the last known token, and so generates further tokens.
    """

    active: ActiveRequest
    start: int
    num_tokens: int
    num_drafted: int = 0
    is_padded: bool = False
    generates: bool = False

    @property
    def end(self) -> int:
        """Number of its tokens that are computed after the step, if all drafts are right."""
        return self.start + self.num_tokens


class MovedBytes(NamedTuple):
    """Bytes that were copied between an arena and host memory so far.

    Attributes:
        stored: Bytes copied to host memory.
        ahead: Bytes of both directions that were copied while the kernels of a step ran.
        loaded: Bytes copied from host memory.
    """

    stored: int = 0
    ahead: int = 0
    loaded: int = 0


NOTHING_MOVED = MovedBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaBytes:
    """Bytes of an arena by use; see `jenga.sim.results.rows.StepRow`."""

    used_bytes: int
    useless_bytes: int
    cached_bytes: int
    empty_bytes: int
    unallocated_bytes: int
    tables: dict[str, TableBytes] = field(default_factory=dict[str, TableBytes])

    @property
    def waste(self) -> float:
        """Share of held bytes that no next token uses. Cached bytes are not held."""
        held = self.used_bytes + self.useless_bytes + self.empty_bytes
        return 1 - self.used_bytes / held if held else 0.0


class Memory(Protocol):
    """Account of the bytes of an arena."""

    @property
    def num_evicted(self) -> int:
        """Number of cached small pages that were evicted so far."""
        ...

    def record_evictions(self) -> None:
        """Record lost checkpoints and look-ups from now on, if the manager has checkpoints."""
        ...

    def take_evictions(self) -> list[Eviction]:
        """Return the checkpoints that were lost since the last call, in order."""
        ...

    def take_misses(self) -> list[Miss]:
        """Return what each request found that was admitted since the last call, in order."""
        ...

    @property
    def moved_bytes(self) -> MovedBytes:
        """Bytes that were copied to and from host memory so far."""
        ...

    def memory(self, running: list[ActiveRequest], /) -> ArenaBytes:
        """Return the bytes of the arena by use."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless the manager's records agree with each other."""
        ...


class Arena(Memory, Protocol):
    """Memory for requests, and a cache of content that later requests may need.

    Attributes:
        leaves_room: Whether prompts leave room in a step for short requests behind them.
    """

    leaves_room: bool

    def new_step(self) -> None:
        """Record that the scheduler begins a step."""
        ...

    def waits(self, active: ActiveRequest, /, *, first: bool = False) -> None:
        """Record that a request waits, at the end of the queue or, with `first`, at its head."""
        ...

    def find(self, active: ActiveRequest, /) -> int:
        """Return the tokens of a waiting request's longest cached prefix. Nothing changes."""
        ...

    def chunk_tokens(self, active: ActiveRequest, start: int, num_tokens: int, /) -> int:
        """Return how many of `num_tokens` tokens to compute next. 0 means that it must wait."""
        ...

    def rest_tokens(self, active: ActiveRequest, /) -> int | None:
        """Return how many tokens a waiting request would compute if it were admitted now.

        None means that no prompt should leave room for it in a step. Nothing changes.
        """
        ...

    def admit(
        self, active: ActiveRequest, hit_tokens: int, num_tokens: int, lookahead_tokens: int = 0, /
    ) -> bool:
        """Give a waiting request slots for its first tokens, if all its known tokens would fit.

        Args:
            active: The request.
            hit_tokens: Tokens of the prefix hit.
            num_tokens: Tokens that need slots, those of the hit included.
            lookahead_tokens: Further slots, for a model that drafts.

        Returns:
            Whether the request was admitted.
        """
        ...

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0, /) -> bool:
        """Give a running request slots for its first tokens, drafted ones included.

        Returns:
            Whether there was room for them.
        """
        ...

    def end_step(self) -> None:
        """Record that the scheduler adds nothing more to the step."""
        ...

    def settle(
        self, active: ActiveRequest, num_tokens: int, /, *, ends_prompt: bool = False
    ) -> None:
        """Record that a running request's first tokens are known, before its next step.

        Args:
            active: The request.
            num_tokens: Number of known tokens.
            ends_prompt: Whether the step that has ended computed the end of its prompt.
        """
        ...

    def free(self, active: ActiveRequest, /) -> None:
        """Free the pages of a running request that has finished or is preempted."""
        ...

    def refuse(self, active: ActiveRequest, /) -> None:
        """Record that a waiting request was refused or leaves the queue."""
        ...

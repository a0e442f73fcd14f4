"""A memory manager and its arena as the scheduler sees them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jenga.policies import RequestFacts
from jenga.sim.results.rows import TableBytes
from jenga.sim.workload.requests import Request, prefix_hashes


class ActiveRequest:
    """A request that has arrived, and how far it is.

    Attributes:
        request: As it came.
        name: Of the request.
        arrival_s: When it arrived.
        prompt_tokens: Tokens of its prompt.
        total_tokens: Tokens with which it ends.
        num_tokens: Tokens known: the prompt and what is generated so far.
        num_computed: Tokens computed, those of steps in flight included.
        num_in_flight: Tokens of steps that were scheduled and are not over.
        num_stale: Of those, tokens scheduled before the request lost its pages.
        num_expected: Tokens that steps in flight generate at most, drafted ones included.
        num_drafted: Tokens drafted for its next step.
        is_prefilling: Whether known tokens are left to compute after the steps in flight.
        facts: What a manager is told of it; after a preemption what was generated is prompt.
        found: What the arena found when it was asked for a prefix.
        hit_tokens: Tokens found at its first admission; None before.
        num_preemptions: How often it lost its pages.
        first_token_s: When its first token was there.
        finished_s: When its last token was there.
        refusal: Why it never runs; empty for a request that may.
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
        """Nothing is computed.

        Args:
            request: As it came.
            arrival_s: When it arrived; None for the time that the request says.
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
        """Tokens of its pages whose step is over."""
        return self.num_computed - (self.num_in_flight - self.num_stale)

    def hashes(self, hash_tokens: int) -> list[bytes]:
        """Hash i is of the first `(i + 1) * hash_tokens` tokens, those to come included."""
        if hash_tokens != self._hash_tokens:
            self._hashes = prefix_hashes(self.request.pieces, hash_tokens)
            self._hash_tokens = hash_tokens
        return self._hashes

    def begin(self, num_tokens: int) -> None:
        """Record that a step which computes so many further tokens was scheduled."""
        self.num_computed += num_tokens
        self.num_in_flight += num_tokens

    def restart(self) -> None:
        """Record that all pages are lost, and what was generated is prompt.

        Steps in flight still bring the tokens that they generate.
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
        start: Its tokens computed before.
        num_tokens: Tokens that the step computes.
        num_drafted: Those of them that were drafted.
        is_padded: Whether these stand for no drafts, but make the step as long as that of others.
        generates: Whether the step computes the last known token, and so generates further ones.
    """

    active: ActiveRequest
    start: int
    num_tokens: int
    num_drafted: int = 0
    is_padded: bool = False
    generates: bool = False

    @property
    def end(self) -> int:
        """Its tokens computed after the step, if all drafts are right."""
        return self.start + self.num_tokens


class MovedBytes(NamedTuple):
    """Bytes copied between an arena and host memory so far.

    Attributes:
        stored: To host memory.
        ahead: Of both, what was copied beside the kernels of a step.
        loaded: From host memory.
    """

    stored: int = 0
    ahead: int = 0
    loaded: int = 0


NOTHING_MOVED = MovedBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaBytes:
    """Where the bytes of an arena are; see `jenga.sim.results.rows.StepRow`."""

    used_bytes: int
    useless_bytes: int
    cached_bytes: int
    empty_bytes: int
    unallocated_bytes: int
    tables: dict[str, TableBytes] = field(default_factory=dict[str, TableBytes])

    @property
    def waste(self) -> float:
        """The share of bytes held that no next token uses; cached bytes are not held."""
        held = self.used_bytes + self.useless_bytes + self.empty_bytes
        return 1 - self.used_bytes / held if held else 0.0


class Memory(Protocol):
    """Tells where the bytes of an arena are."""

    @property
    def num_evicted(self) -> int:
        """Cached small pages given to others so far."""
        ...

    @property
    def moved_bytes(self) -> MovedBytes:
        """Bytes that were copied to host memory and from there so far."""
        ...

    def memory(self, running: list[ActiveRequest], /) -> ArenaBytes:
        """Where the bytes are."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless the books agree."""
        ...


class Arena(Memory, Protocol):
    """Gives requests memory, and keeps what others may need again."""

    def new_step(self) -> None:
        """Record that the scheduler begins a step."""
        ...

    def waits(self, active: ActiveRequest, /, *, first: bool = False) -> None:
        """Record that a request waits, at the end of the queue or at its head."""
        ...

    def find(self, active: ActiveRequest, /) -> int:
        """Tokens of the longest cached prefix of a waiting request; changes nothing."""
        ...

    def chunk_tokens(self, active: ActiveRequest, start: int, num_tokens: int, /) -> int:
        """Tokens to compute next, of those that the scheduler would have; 0 to wait."""
        ...

    def admit(
        self, active: ActiveRequest, hit_tokens: int, num_tokens: int, lookahead_tokens: int = 0, /
    ) -> bool:
        """Give a waiting request slots for its first tokens, if all it knows could be held.

        Args:
            active: The request.
            hit_tokens: Tokens that were found.
            num_tokens: Tokens to have slots for, those of the hit included.
            lookahead_tokens: Further slots, for a model that drafts.
        """
        ...

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0, /) -> bool:
        """Give a running request slots for its first tokens, drafted ones among them."""
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
            num_tokens: How many.
            ends_prompt: Whether its prompt ended with the step that is over.
        """
        ...

    def free(self, active: ActiveRequest, /) -> None:
        """End a running request: it finished or is preempted."""
        ...

    def refuse(self, active: ActiveRequest, /) -> None:
        """Record that a waiting request was sent away."""
        ...

"""A memory manager and its arena as the scheduler sees them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jenga.policies import RequestFacts
from jenga.sim.rows import TableBytes
from jenga.sim.workload import Request, prefix_hashes


class ActiveRequest:
    """A request that has arrived, and how far it is.

    Attributes:
        request: As it came.
        name: Of the request.
        arrival_s: When it arrived.
        prompt_tokens: Tokens of its prompt.
        total_tokens: Tokens with which it ends.
        num_tokens: Tokens known: the prompt and what is generated so far.
        num_computed: Tokens whose step is over.
        num_scheduled: Tokens that the current step computes.
        num_drafted: Those of them that were drafted.
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
        "name",
        "num_computed",
        "num_drafted",
        "num_preemptions",
        "num_scheduled",
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
        self.num_computed = self.num_scheduled = self.num_drafted = self.num_preemptions = 0
        self.found: Any = None
        self.hit_tokens: int | None = None
        self.first_token_s = self.finished_s = -1.0
        self.refusal = ""
        self._hashes: list[bytes] = []
        self._hash_tokens = 0

    def hashes(self, hash_tokens: int) -> list[bytes]:
        """Hash i is of the first `(i + 1) * hash_tokens` tokens, those to come included."""
        if hash_tokens != self._hash_tokens:
            self._hashes = prefix_hashes(self.request.pieces, hash_tokens)
            self._hash_tokens = hash_tokens
        return self._hashes

    def restart(self) -> None:
        """Note that all pages are lost, and what was generated is prompt."""
        self.num_computed = self.num_drafted = 0
        self.num_preemptions += 1
        self.found = None
        self.facts = RequestFacts(prompt_tokens=self.num_tokens, images=self.facts.images)


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
    """Where the bytes of an arena are; see `jenga.sim.rows.StepRow`."""

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


class Arena(Protocol):
    """Gives requests memory, and keeps what others may need again."""

    @property
    def num_evicted(self) -> int:
        """Cached small pages given to others so far."""
        ...

    @property
    def moved_bytes(self) -> MovedBytes:
        """What was copied to host memory and from there so far."""
        ...

    def new_step(self) -> None:
        """Note that a step begins."""
        ...

    def waits(self, active: ActiveRequest, /, *, first: bool = False) -> None:
        """Note that a request waits, at the end of the queue or at its head."""
        ...

    def find(self, active: ActiveRequest, /) -> int:
        """Tokens of the longest cached prefix of a waiting request; changes nothing."""
        ...

    def chunk_tokens(self, active: ActiveRequest, start: int, num_tokens: int, /) -> int:
        """Tokens to compute next, of those that the scheduler would have; 0 to wait."""
        ...

    def admit(self, active: ActiveRequest, hit_tokens: int, num_tokens: int, /) -> bool:
        """Give a waiting request slots for its first tokens, if all it knows could be held."""
        ...

    def grow(self, active: ActiveRequest, num_tokens: int, /) -> bool:
        """Give a running request slots for its first tokens, drafted ones among them."""
        ...

    def end_step(self) -> None:
        """Note that nothing more is scheduled in this step."""
        ...

    def computed(self, active: ActiveRequest, start: int, end: int, /) -> None:
        """Note that a chunk of a prompt was computed."""
        ...

    def free(self, active: ActiveRequest, /) -> None:
        """End a running request: it finished or is preempted."""
        ...

    def refuse(self, active: ActiveRequest, /) -> None:
        """Note that a waiting request was sent away."""
        ...

    def memory(self, running: list[ActiveRequest], /) -> ArenaBytes:
        """Where the bytes are."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless the books agree."""
        ...

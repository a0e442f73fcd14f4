"""How long a step would take: a roofline, not a measurement.

A step is as slow as its arithmetic at the GPU's peak, or as its memory traffic at the peak
bandwidth, whichever is slower. Kernels reach a part of the peaks and an engine adds time of its
own: where these were measured they are given (`Achieved`, of `jenga.sim.batching.measured`), by
default as 1 and 0, so that seconds are the least that the GPU allows.

Arithmetic: two operations for each active parameter and token; four for each query element and key
that attention pairs. Traffic: the weights that the step's tokens touch (with experts, as many as
that many tokens choose at random), and the slots that the last token of each request reads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jenga.admission.reserve import STEP_TOKENS
from jenga.models import ModelFacts, ReadOptions
from jenga.sim.batching.arena import NOTHING_MOVED, Chunk, Memory, MovedBytes
from jenga.sim.batching.need import Need
from jenga.sim.hardware.gpus import Gpu
from jenga.spec import ChunkedLocal, FullAttention, ModelSpec, SlidingWindow, State, TokenBudget

HOST_BYTES_PER_S = 25e9
"""Between a GPU and host memory, either way: sixteen lanes of PCIe 4.0 carry about as much."""

_OPERATIONS_PER_PARAMETER = 2
_OPERATIONS_PER_PAIR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """What was measured on a GPU; by default its peaks and no time besides.

    Attributes:
        arithmetic_share: Of the peak of arithmetic, by products with weights.
        bandwidth_share: Of the peak of bandwidth, by reading weights.
        attention_arithmetic_share: The first, by attention.
        attention_bandwidth_share: The second, by reading what is stored of tokens.
        overhead_s: Of each step, whatever it computes.
    """

    arithmetic_share: float = 1.0
    bandwidth_share: float = 1.0
    attention_arithmetic_share: float = 1.0
    attention_bandwidth_share: float = 1.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in SHARES:
            share = getattr(self, name)
            if not 0 < share <= 1:
                msg = f"{name} must be in (0, 1], got {share}"
                raise ValueError(msg)
        if not 0 <= self.overhead_s < math.inf:
            msg = f"overhead_s must be finite and not negative, got {self.overhead_s}"
            raise ValueError(msg)


SHARES = (
    "arithmetic_share",
    "bandwidth_share",
    "attention_arithmetic_share",
    "attention_bandwidth_share",
)
"""Fields of `Achieved` that are shares of a peak."""

PEAKS = Achieved()
"""Nothing was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step costs however fast the GPU is, of one rank.

    Attributes:
        product_operations: Floating point operations of products with weights.
        attention_operations: Those of attention.
        weight_bytes: Bytes of weights read.
        cache_bytes: Bytes read of what is stored of tokens.
    """

    product_operations: float
    attention_operations: float
    weight_bytes: float
    cache_bytes: float

    @property
    def operations(self) -> float:
        """All floating point operations."""
        return self.product_operations + self.attention_operations

    @property
    def traffic_bytes(self) -> float:
        """All bytes read."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The parameters of one rank.

    Attributes:
        num_bytes: Of all.
        total: Parameters.
        active: Those that one token is multiplied with.
        query_elements: Heads times their size, of one attention layer; 0 leaves attention's
            arithmetic out.
        dtype: In which products are computed; a key of `jenga.spec.ELEMENT_BYTES`.
    """

    num_bytes: float
    total: float
    active: float
    query_elements: int = 0
    dtype: str = "bfloat16"

    def touched_bytes(self, num_tokens: int) -> float:
        """Bytes of the weights that so many tokens are multiplied with."""
        untouched = (1 - self.active / self.total) ** num_tokens
        return self.num_bytes * (1 - untouched)


def weights_of(facts: ModelFacts, *, ranks: int = 1) -> Weights:
    """Parameters as published, divided evenly over some ranks.

    Raises:
        ValueError: Nothing says how many there are.
    """
    if facts.total_parameters is None or facts.weight_bytes is None:
        msg = f"parameters of {facts.name!r} must be known for a model of time"
        raise ValueError(msg)
    section = facts.config
    for name in ("text_config", "llm_config"):
        if name in section:
            section = section.section(name)
    query_elements = 0
    if "num_attention_heads" in section:
        num_heads = section.integer("num_attention_heads")
        hidden_size = section.integer("hidden_size", default=num_heads * 128)
        query_elements = num_heads * section.integer("head_dim", default=hidden_size // num_heads)
    return Weights(
        num_bytes=facts.weight_bytes / ranks,
        total=facts.total_parameters / ranks,
        active=(facts.active_parameters or facts.total_parameters) / ranks,
        query_elements=query_elements // ranks,
    )


class StepTime:
    """A clock for `Replay`: seconds of a step by the roofline of a GPU."""

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        gpu: Gpu,
        *,
        achieved: Achieved = PEAKS,
    ) -> None:
        """A roofline.

        Args:
            model: Its layers, of one rank.
            weights: Of one rank.
            gpu: Of each rank.
            achieved: What was measured on it.

        Raises:
            ValueError: The GPU is known by its memory only.
        """
        if gpu.bytes_per_s is None:
            msg = f"gpu must be known by name where time is modelled, got {gpu.name!r}"
            raise ValueError(msg)
        self._weights = weights
        flops = gpu.flops(weights.dtype)
        self._products_per_s = flops * achieved.arithmetic_share
        self._attention_per_s = flops * achieved.attention_arithmetic_share
        self._weight_bytes_per_s = gpu.bytes_per_s * achieved.bandwidth_share
        self._cache_bytes_per_s = gpu.bytes_per_s * achieved.attention_bandwidth_share
        self._overhead_s = achieved.overhead_s
        need = Need(model)
        self._token_bytes = self._fixed_bytes = 0.0
        self._limited: list[tuple[int, float]] = []  # (most tokens, bytes of one)
        num_full = 0
        self._limits: list[tuple[int, int]] = []  # (most tokens paired, layers)
        for layer_type, token_bytes in need.types:
            num_layers = sum(1 + len(layer.readers) for layer in layer_type.layers)
            match layer_type:
                case FullAttention():
                    self._token_bytes += token_bytes
                    num_full += num_layers
                case SlidingWindow(window_tokens=limit) | ChunkedLocal(chunk_tokens=limit):
                    self._limited.append((limit, token_bytes))
                    self._limits.append((limit, num_layers))
                case State():
                    self._fixed_bytes += token_bytes
                case TokenBudget(mean_budget_tokens=limit):
                    self._limited.append((limit, token_bytes))
                    self._limits.append((limit, num_layers))
                case _:
                    self._fixed_bytes += token_bytes * layer_type.typical_tokens
        self._num_full = num_full

    @property
    def step_tokens(self) -> float:
        """Tokens of a prompt multiplied with weights in the time it takes to read all of these."""
        weights = self._weights
        token_s = _OPERATIONS_PER_PARAMETER * weights.active / self._products_per_s
        return (self._overhead_s + weights.num_bytes / self._weight_bytes_per_s) / token_s

    def work(self, chunks: Sequence[Chunk], each_tokens: int | None = None) -> Work:
        """What a step costs that computes some chunks, or so many tokens of each of their requests.

        Args:
            chunks: Of the step.
            each_tokens: In place of those of the chunks, if given.
        """
        num_tokens = 0
        end_tokens = 0
        pairs = 0.0  # of queries and keys, times layers
        limited_bytes = 0.0
        for chunk in chunks:
            chunk_tokens = each_tokens or chunk.num_tokens
            num_tokens += chunk_tokens
            end = chunk.start + chunk_tokens
            end_tokens += end
            middle = end - chunk_tokens / 2
            pairs += chunk_tokens * middle * self._num_full
            for limit, num_layers in self._limits:
                pairs += chunk_tokens * min(middle, limit) * num_layers
            for limit, token_bytes in self._limited:
                limited_bytes += min(end, limit) * token_bytes
        weights = self._weights
        cache_bytes = limited_bytes + end_tokens * self._token_bytes
        return Work(
            product_operations=_OPERATIONS_PER_PARAMETER * weights.active * num_tokens,
            attention_operations=_OPERATIONS_PER_PAIR * weights.query_elements * pairs,
            weight_bytes=weights.touched_bytes(num_tokens),
            cache_bytes=cache_bytes + len(chunks) * self._fixed_bytes,
        )

    def __call__(self, chunks: Sequence[Chunk], each_tokens: int | None = None) -> float:
        """Seconds of the step; see `work`."""
        work = self.work(chunks, each_tokens)
        arithmetic_s = work.product_operations / self._products_per_s
        arithmetic_s += work.attention_operations / self._attention_per_s
        traffic_s = work.weight_bytes / self._weight_bytes_per_s
        traffic_s += work.cache_bytes / self._cache_bytes_per_s
        return self._overhead_s + max(arithmetic_s, traffic_s)


class DraftedTime:
    """A clock where one model drafts for another: the target's steps, and the draft's between them.

    The draft reads what the target reads, and then one token of each decoding request after the
    other; the target's step has all of them. What neither does at once is added.
    """

    def __init__(self, target: StepTime, draft: StepTime, *, draft_tokens: int) -> None:
        """Two rooflines.

        Args:
            target: Of the model that is drafted for.
            draft: Of the one that drafts.
            draft_tokens: Tokens drafted for a step.
        """
        self._target = target
        self._draft = draft
        self._num_passes = draft_tokens - 1

    def __call__(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step of both."""
        seconds = self._target(chunks) + self._draft(chunks)
        drafting = [chunk for chunk in chunks if chunk.num_drafted]
        if drafting and self._num_passes:
            seconds += self._num_passes * self._draft(drafting, 1)
        return seconds

    @property
    def step_tokens(self) -> float:
        """See `StepTime`, of the target."""
        return self._target.step_tokens


def step_tokens_of(clock: Callable[[Sequence[Chunk]], float]) -> float:
    """What a manager is told a step costs (`jenga.manager.Manager`), as far as a clock says."""
    return clock.step_tokens if isinstance(clock, StepTime | DraftedTime) else STEP_TOKENS


class HostedTime:
    """A clock where pages go to host memory and come back.

    What is copied ahead is copied beside the kernels of a step, all else before them.
    """

    def __init__(
        self,
        clock: Callable[[Sequence[Chunk]], float],
        arena: Memory,
        bytes_per_s: float,
        *,
        moved_bytes: MovedBytes = NOTHING_MOVED,
    ) -> None:
        """Copies take their time beside that of another clock.

        Args:
            clock: Seconds of a step without them.
            arena: Says how many bytes were moved.
            bytes_per_s: At which they are.
            moved_bytes: Those of steps that were scheduled before.

        Raises:
            ValueError: No byte is ever moved at that rate.
        """
        if not 0 < bytes_per_s < math.inf:
            msg = f"bytes_per_s must be positive and finite, got {bytes_per_s}"
            raise ValueError(msg)
        self._clock = clock
        self._arena = arena
        self._bytes_per_s = bytes_per_s
        self._moved_bytes = moved_bytes

    def __call__(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step with the copies ordered since the last one."""
        before, moved = self._moved_bytes, self._arena.moved_bytes
        self._moved_bytes = moved
        ahead_bytes = moved.ahead - before.ahead
        waited_bytes = moved.stored + moved.loaded - before.stored - before.loaded - ahead_bytes
        return waited_bytes / self._bytes_per_s + max(
            self._clock(chunks), ahead_bytes / self._bytes_per_s
        )


def drafted_time(
    models: Sequence[ModelFacts],
    options: ReadOptions,
    gpu: Gpu,
    *,
    weights: Weights,
    achieved: Achieved = PEAKS,
) -> DraftedTime:
    """The clock of a model and the one that drafts for it.

    Args:
        models: Those two, the draft last.
        options: How the first is run; the draft is run alike.
        gpu: Of each rank.
        weights: Of the first.
        achieved: What was measured on the GPU.

    Raises:
        ValueError: Nothing says how many parameters the draft has, or the GPU is known by its
            memory only.
    """
    target, draft = models
    of_draft = weights_of(draft, ranks=options.tensor_parallel)
    return DraftedTime(
        StepTime(target.spec(options), weights, gpu, achieved=achieved),
        StepTime(draft.spec(options), of_draft, gpu, achieved=achieved),
        draft_tokens=options.draft_tokens,
    )

"""Modelled duration of a step: a roofline, not a measurement.

A step takes as long as its arithmetic at the GPU's peak, or as its memory traffic at the peak
bandwidth, whichever is slower. Real kernels reach only a share of the peaks, and an engine adds
time of its own. `Achieved` has the shares and the time where they were measured
(`jenga.sim.batching.measured`). Its defaults are 1 and 0, so that seconds are the least that the
GPU allows.

Arithmetic is two operations for each active parameter and token, and four for each query element
and key that attention pairs. Traffic is the weights that the step's tokens touch, and the slots
that the last token of each request reads. With experts, the touched weights are as many as that
many tokens choose at random.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jenga.admission.reserve import STEP_TOKENS
from jenga.models import ModelFacts, ReadOptions
from jenga.policies import NEVER
from jenga.sim.batching.arena import NOTHING_MOVED, Chunk, Memory, MovedBytes
from jenga.sim.batching.need import Need
from jenga.sim.hardware.gpus import Gpu
from jenga.spec import ModelSpec

HOST_BYTES_PER_S = 25e9
"""Bandwidth between a GPU and host memory in each direction: about 16 lanes of PCIe 4.0."""

_OPERATIONS_PER_PARAMETER = 2
_OPERATIONS_PER_PAIR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Measured performance of a GPU. The defaults are its peaks, and no overhead.

    Attributes:
        arithmetic_share: Share of peak arithmetic that products with weights reach.
        bandwidth_share: Share of peak bandwidth that reading weights reaches.
        attention_arithmetic_share: Share of peak arithmetic that attention reaches.
        attention_bandwidth_share: Share of peak bandwidth that reading the cache reaches.
        overhead_s: Seconds that each step takes in addition, whatever it computes.
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
"""Names of the fields of `Achieved` that are shares of a peak."""

PEAKS = Achieved()
"""The peaks, for a GPU without measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a step on one rank. It does not depend on the speed of the GPU.

    Attributes:
        product_operations: Floating point operations of products with weights.
        attention_operations: Floating point operations of attention.
        weight_bytes: Bytes of weights that are read.
        cache_bytes: Bytes of cached tokens and states that are read.
    """

    product_operations: float
    attention_operations: float
    weight_bytes: float
    cache_bytes: float

    @property
    def operations(self) -> float:
        """Number of all floating point operations."""
        return self.product_operations + self.attention_operations

    @property
    def traffic_bytes(self) -> float:
        """Number of all bytes that are read."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters of one rank.

    Attributes:
        num_bytes: Bytes of all parameters.
        total: Number of parameters.
        active: Number of parameters that one token is multiplied with.
        query_elements: Number of query heads times their size, in one attention layer. 0 leaves
            the arithmetic of attention out.
        dtype: Type in which products are computed, a key of `jenga.spec.ELEMENT_BYTES`.
    """

    num_bytes: float
    total: float
    active: float
    query_elements: int = 0
    dtype: str = "bfloat16"

    def touched_bytes(self, num_tokens: int) -> float:
        """Return the expected bytes of the weights that `num_tokens` tokens are multiplied with."""
        untouched = (1 - self.active / self.total) ** num_tokens
        return self.num_bytes * (1 - untouched)


def weights_of(facts: ModelFacts, *, ranks: int = 1) -> Weights:
    """Return a model's published parameters, divided evenly over its ranks.

    Raises:
        ValueError: The number of parameters is unknown.
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
    """A clock for `Replay`: the seconds of a step by the roofline of a GPU."""

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        gpu: Gpu,
        *,
        achieved: Achieved = PEAKS,
    ) -> None:
        """Build the roofline.

        Args:
            model: Layers of one rank.
            weights: Parameters of one rank.
            gpu: GPU of each rank.
            achieved: Measured performance of the GPU.

        Raises:
            ValueError: Only the memory of the GPU is known.
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
        self._limited: list[tuple[int, float]] = []  # (most tokens read, bytes of one token)
        num_full = 0
        self._limits: list[tuple[int, int]] = []  # (most keys that a query pairs with, layers)
        for layer_type, token_bytes in need.types:
            num_layers = sum(1 + len(layer.readers) for layer in layer_type.layers)
            if layer_type.is_state:
                self._fixed_bytes += token_bytes
            elif layer_type.typical_tokens:
                self._fixed_bytes += token_bytes * layer_type.typical_tokens
            elif (limit := layer_type.most_read_tokens) >= NEVER:
                self._token_bytes += token_bytes
                num_full += num_layers
            else:
                self._limited.append((limit, token_bytes))
                self._limits.append((limit, num_layers))
        self._num_full = num_full

    @property
    def step_tokens(self) -> float:
        """Number of prompt tokens whose products take as long as the overhead and all weights.

        The latter is the time to read the weights once.
        """
        weights = self._weights
        token_s = _OPERATIONS_PER_PARAMETER * weights.active / self._products_per_s
        return (self._overhead_s + weights.num_bytes / self._weight_bytes_per_s) / token_s

    def work(self, chunks: Sequence[Chunk], each_tokens: int | None = None) -> Work:
        """Return the work of a step that computes some chunks.

        Args:
            chunks: Chunks of the step.
            each_tokens: Number of tokens of each request, instead of those of its chunk. None for
                those of the chunks.
        """
        num_tokens = 0
        end_tokens = 0
        pairs = 0.0  # pairs of a query and a key, times layers
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
        """Return the seconds of a step; see `work` for the arguments."""
        work = self.work(chunks, each_tokens)
        arithmetic_s = work.product_operations / self._products_per_s
        arithmetic_s += work.attention_operations / self._attention_per_s
        traffic_s = work.weight_bytes / self._weight_bytes_per_s
        traffic_s += work.cache_bytes / self._cache_bytes_per_s
        return self._overhead_s + max(arithmetic_s, traffic_s)


class DraftedTime:
    """A clock for a model and a second one that drafts for it.

    In each step the draft model computes the same chunks as the target. It then computes one token
    of each decoding request in further passes, one after another. The target checks all drafts in
    one step. The models do not run at the same time, so their times are added.
    """

    def __init__(self, target: StepTime, draft: StepTime, *, draft_tokens: int) -> None:
        """Combine two rooflines.

        Args:
            target: Clock of the model that is drafted for.
            draft: Clock of the model that drafts.
            draft_tokens: Number of tokens drafted for a step.
        """
        self._target = target
        self._draft = draft
        self._num_passes = draft_tokens - 1

    def __call__(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a step of both models."""
        seconds = self._target(chunks) + self._draft(chunks)
        drafting = [chunk for chunk in chunks if chunk.num_drafted]
        if drafting and self._num_passes:
            seconds += self._num_passes * self._draft(drafting, 1)
        return seconds

    @property
    def step_tokens(self) -> float:
        """The target's `StepTime.step_tokens`."""
        return self._target.step_tokens


def step_tokens_of(clock: Callable[[Sequence[Chunk]], float]) -> float:
    """Return the cost of a step for `jenga.manager.Manager`: the clock's, or else the default."""
    return clock.step_tokens if isinstance(clock, StepTime | DraftedTime) else STEP_TOKENS


class HostedTime:
    """A clock for an arena with host memory.

    Pages that are copied ahead are copied while the kernels of a step run. All other copies come
    before the kernels.
    """

    def __init__(
        self,
        clock: Callable[[Sequence[Chunk]], float],
        arena: Memory,
        bytes_per_s: float,
        *,
        moved_bytes: MovedBytes = NOTHING_MOVED,
    ) -> None:
        """Add the time of copies to that of another clock.

        Args:
            clock: Clock of a step without copies.
            arena: Arena that counts the copied bytes.
            bytes_per_s: Bandwidth of the copies.
            moved_bytes: Bytes that were copied for steps scheduled before.

        Raises:
            ValueError: The bandwidth is not positive, or not finite.
        """
        if not 0 < bytes_per_s < math.inf:
            msg = f"bytes_per_s must be positive and finite, got {bytes_per_s}"
            raise ValueError(msg)
        self._clock = clock
        self._arena = arena
        self._bytes_per_s = bytes_per_s
        self._moved_bytes = moved_bytes

    def __call__(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a step with the copies that were ordered since the last one."""
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
    """Return the clock of a model and of a second one that drafts for it.

    Args:
        models: The two models, the draft last.
        options: Options with which both models are run.
        gpu: GPU of each rank.
        weights: Parameters of the first model.
        achieved: Measured performance of the GPU.

    Raises:
        ValueError: The number of parameters of the draft is unknown, or only the memory of the GPU
            is known.
    """
    target, draft = models
    of_draft = weights_of(draft, ranks=options.tensor_parallel)
    return DraftedTime(
        StepTime(target.spec(options), weights, gpu, achieved=achieved),
        StepTime(draft.spec(options), of_draft, gpu, achieved=achieved),
        draft_tokens=options.draft_tokens,
    )

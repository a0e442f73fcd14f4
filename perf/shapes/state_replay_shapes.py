"""Random batches of recurrent layers whose states lag behind the tokens, by different numbers."""

import math
from dataclasses import dataclass, replace

import torch

from jenga_kernels.checks.histories import InputHistory, next_states
from perf.shapes.state_shapes import (
    DTYPE,
    StateBatch,
    StateModel,
    make_arena,
    make_state_batch,
    slots_in_arena,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Tokens of each request in a call.

    Attributes:
        query_tokens: Number of new tokens of a request.
        accepted_tokens: Number of them that are accepted, in every call.
        history_tokens: Number of rows of a history.
    """

    query_tokens: int
    accepted_tokens: int
    history_tokens: int

    def next_states(
        self, computed_tokens: torch.Tensor, state_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the number of tokens that each state should have after the call."""
        return next_states(
            computed_tokens,
            state_tokens,
            self.query_tokens,
            history_tokens=self.history_tokens,
            max_query_tokens=self.query_tokens,
        )


NO_DRAFTS = Drafts(query_tokens=1, accepted_tokens=1, history_tokens=16)
"""Each state is written once in 16 calls."""

FOUR_DRAFTS = Drafts(query_tokens=5, accepted_tokens=3, history_tokens=16)
"""Two of four drafted tokens are accepted. Each state is written once in three calls."""

LONG_HISTORY = Drafts(query_tokens=5, accepted_tokens=3, history_tokens=32)
"""The same with a longer history: each state is written once in eight calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBatch:
    """Tensors of a batch. The names are those of the operation's arguments.

    Attributes:
        tokens: Tensors that layers without a history need too. Its slots are those of states and
            histories.
        history: Inputs of recent tokens.
        draft_slots: Slots of the state after each token of a request, for kernels that write one
            after every token, i32[num_requests, query_tokens]. The first slot of a request is that
            in `tokens`.
        computed_tokens: Number of computed tokens of each request before the call.
        state_tokens: Number of tokens in each state before the call.
        next_state_tokens: Number of tokens in each state after the call.
    """

    tokens: StateBatch
    history: InputHistory
    draft_slots: torch.Tensor
    computed_tokens: torch.Tensor
    state_tokens: torch.Tensor
    next_state_tokens: torch.Tensor

    @property
    def query_tokens(self) -> int:
        """Number of new tokens of each request."""
        return self.draft_slots.shape[1]

    @property
    def history_tokens(self) -> int:
        """Number of rows of the history."""
        return self.history.dt.shape[-1]

    @property
    def num_written(self) -> int:
        """Number of requests whose state is written."""
        return int((self.next_state_tokens > self.state_tokens).sum())

    @property
    def num_bytes(self) -> int:
        """Least number of bytes that a call moves.

        It is the sum of these parts:

        - All states are read, and those that are due are written (one in 16 if there are many
          requests).
        - The used rows of histories are read (7.5 of 16 on average).
        - The rows of the new tokens are written, except those that the written state includes.
        - The tokens themselves are read or written.
        """
        tokens = self.tokens
        model, num_requests = tokens.model, len(tokens.slots)
        state_bytes = model.state_elements * tokens.states.element_size()
        row_bytes = (model.dim + model.num_groups * model.d_state) * tokens.x.element_size()
        row_bytes += model.num_heads * self.history.dt.element_size()
        read = self.computed_tokens - self.state_tokens
        end = self.computed_tokens + self.query_tokens
        kept = (end - self.next_state_tokens).clamp(max=self.query_tokens)
        return (
            (num_requests + self.num_written) * state_bytes
            + int((read + kept).sum()) * row_bytes
            + len(tokens.x) * model.token_elements * tokens.x.element_size()
        )


def tokens_since_states(num_requests: int, drafts: Drafts) -> list[int]:
    """Return the number of tokens of each request since its state was written.

    The numbers are spread as evenly as in a long sequence of steps.
    """
    computed, stored = torch.zeros(2, 1, dtype=torch.int32)
    met: list[int] = []
    while (since := int(computed - stored)) not in met:
        met.append(since)
        stored = drafts.next_states(computed, stored)
        computed = computed + drafts.accepted_tokens
    cycle = sorted(met[met.index(since) :])
    places = [(2 * request + 1) * len(cycle) for request in range(num_requests)]
    return [cycle[place // (2 * num_requests)] for place in places]


def make_replay_batch(
    model: StateModel,
    num_requests: int,
    state_dtype: torch.dtype,
    device: torch.device,
    *,
    drafts: Drafts = NO_DRAFTS,
) -> ReplayBatch:
    """Make random tokens, states and histories, with requests staggered as after many steps.

    A call can be repeated: it reads no row of a history that it writes, and counts stay unchanged.
    """
    history_tokens, query_tokens = drafts.history_tokens, drafts.query_tokens
    num_slots = num_requests * query_tokens
    parts = {
        "states": ((model.num_heads, model.head_dim, model.d_state), state_dtype),
        "x": ((model.num_heads, history_tokens, model.head_dim), DTYPE),
        "dt": ((model.num_heads, history_tokens), torch.float32),
        "B": ((model.num_groups, history_tokens, model.d_state), DTYPE),
    }
    layer = make_layer(parts, num_slots + 1, device)
    tokens = make_state_batch(
        model, [query_tokens] * num_requests, state_dtype, device, states=layer["states"]
    )
    slots = slots_in_arena(num_slots, device).unflatten(0, (num_requests, query_tokens))
    for name in ("states", "x", "B"):
        layer[name].normal_()
    layer["dt"].uniform_(0.001, 0.05)
    return ReplayBatch(
        tokens=replace(tokens, slots=slots[:, 0].contiguous()),
        history=InputHistory(x=layer["x"], dt=layer["dt"], B=layer["B"]),
        draft_slots=slots,
        **make_counts(num_requests, drafts, device),
    )


def make_counts(num_requests: int, drafts: Drafts, device: torch.device) -> dict[str, torch.Tensor]:
    """Make the counts of computed tokens, and of tokens in states before and after a call."""
    # The first token since the state is in row 0, where vLLM's kernel expects it.
    state_tokens = torch.full((num_requests,), 4 * drafts.history_tokens, dtype=torch.int32)
    since = torch.tensor(tokens_since_states(num_requests, drafts), dtype=torch.int32)
    computed_tokens = state_tokens + since
    counts = {
        "computed_tokens": computed_tokens,
        "state_tokens": state_tokens,
        "next_state_tokens": drafts.next_states(computed_tokens, state_tokens),
    }
    return {name: tokens.to(device) for name, tokens in counts.items()}


def make_layer(
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]], num_slots: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Make one layer's states and histories, which lie next to each other in each slot.

    Args:
        parts: Name of a tensor -> shape of its part of a slot, and dtype.
        num_slots: Number of slots.
        device: Device of the tensors.
    """
    num_bytes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts.values()]
    layer = make_arena(num_slots, (sum(num_bytes),), torch.uint8, device)[:, 1]
    return {
        name: part.view(dtype).unflatten(1, shape)
        for (name, (shape, dtype)), part in zip(
            parts.items(), layer.split(num_bytes, 1), strict=True
        )
    }

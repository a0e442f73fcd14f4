"""Random batches of gated delta layers whose states lag behind the tokens."""

from dataclasses import dataclass

import torch

from jenga_kernels.checks.histories import DeltaHistory
from perf.shapes.delta_shapes import DeltaBatch, DeltaModel, make_delta_batch
from perf.shapes.state_replay_shapes import NO_DRAFTS, Drafts, make_counts, make_layer
from perf.shapes.state_shapes import DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReplayBatch:
    """Tensors of a batch. The names are those of the operation's arguments.

    Attributes:
        tokens: Tensors that layers without a history need too. They have a slot for each token of a
            request.
        history: Changes, keys and decays of recent tokens.
        slots: Slots of states and histories, the first of each request, i32[num_requests].
        computed_tokens: Number of computed tokens of each request before the call.
        state_tokens: Number of tokens in each state before the call.
        next_state_tokens: Number of tokens in each state after the call.
    """

    tokens: DeltaBatch
    history: DeltaHistory
    slots: torch.Tensor
    computed_tokens: torch.Tensor
    state_tokens: torch.Tensor
    next_state_tokens: torch.Tensor

    @property
    def query_tokens(self) -> int:
        """Number of new tokens of each request."""
        return self.tokens.slots.shape[1]

    @property
    def history_tokens(self) -> int:
        """Number of rows of the history."""
        return self.history.keys.shape[2]

    @property
    def num_written(self) -> int:
        """Number of requests whose state is written."""
        return int((self.next_state_tokens > self.state_tokens).sum())

    @property
    def num_bytes(self) -> int:
        """Least number of bytes that a call moves.

        It is the sum of these parts:

        - All states are read, and those that are due are written.
        - The used rows of histories are read.
        - The rows of the new tokens are written, except those that the written state includes.
        - The tokens themselves are read or written.
        """
        tokens, history = self.tokens, self.history
        state_bytes = tokens.model.state_elements * tokens.states.element_size()
        parts = (history.changes, history.keys, history.decays)
        row_bytes = sum(part[0, :, 0].numel() * part.element_size() for part in parts)
        read = self.computed_tokens - self.state_tokens
        end = self.computed_tokens + self.query_tokens
        kept = (end - self.next_state_tokens).clamp(max=self.query_tokens)
        return (
            (len(self.slots) + self.num_written) * state_bytes
            + int((read + kept).sum()) * row_bytes
            + len(tokens.mixed) * tokens.model.token_elements * tokens.mixed.element_size()
        )


def make_delta_replay_batch(
    model: DeltaModel,
    num_requests: int,
    state_dtype: torch.dtype,
    device: torch.device,
    *,
    drafts: Drafts = NO_DRAFTS,
) -> DeltaReplayBatch:
    """Make random tokens, states and histories, with requests staggered as after many steps.

    A call can be repeated: it reads no row of a history that it writes, and counts stay unchanged.
    """
    history_tokens, query_tokens = drafts.history_tokens, drafts.query_tokens
    decays = (model.num_v_heads, history_tokens)
    parts = {
        "states": ((model.num_v_heads, model.head_dim, model.head_dim), state_dtype),
        "changes": ((model.num_v_heads, history_tokens, model.head_dim), state_dtype),
        "keys": ((model.num_qk_heads, history_tokens, model.head_dim), DTYPE),
        "decays": ((*decays, model.head_dim) if model.is_per_channel else decays, torch.float32),
    }
    layer = make_layer(parts, num_requests * query_tokens + 1, device)
    tokens = make_delta_batch(
        model,
        [query_tokens] * num_requests,
        state_dtype,
        device,
        num_steps=query_tokens,
        states=layer["states"],
    )
    for name in ("states", "changes", "keys"):
        layer[name].normal_()
    layer["decays"].uniform_(-0.5, -0.001)
    return DeltaReplayBatch(
        tokens=tokens,
        history=DeltaHistory(changes=layer["changes"], keys=layer["keys"], decays=layer["decays"]),
        slots=tokens.slots[:, 0].contiguous(),
        **make_counts(num_requests, drafts, device),
    )

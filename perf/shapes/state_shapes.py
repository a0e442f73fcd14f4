"""Recurrent layers of real models, and random batches in an arena that several layers share.

Sizes are those of the models' Hugging Face configurations (jenga/models/data).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_LAYERS = 24
"""Number of layers in the arena, so that slots are as far apart as in a served hybrid."""

ARENA_BYTES = 16 << 30
"""Largest size of an arena, in bytes. If the slots of all layers need more, it has fewer layers."""

DTYPE = torch.bfloat16
"""Element type of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateModel:
    """A recurrent layer.

    Attributes:
        name: Name of the model.
        num_heads: Number of heads. 1 means that every channel decays on its own (Mamba-1).
        head_dim: Number of channels of a head.
        d_state: Number of state elements per channel.
        num_groups: Number of groups of heads that share B and C.
        conv_dim: Number of channels of the convolution.
    """

    name: str
    num_heads: int
    head_dim: int
    d_state: int
    num_groups: int
    conv_dim: int

    @property
    def is_per_channel(self) -> bool:
        """Whether every channel and state element decays on its own."""
        return self.num_heads == 1

    @property
    def dim(self) -> int:
        """Number of channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_elements(self) -> int:
        """Number of elements of one request's state."""
        return self.dim * self.d_state

    @property
    def token_elements(self) -> int:
        """Number of elements of x, dt, B, C and the output of one token."""
        steps = self.dim if self.is_per_channel else self.num_heads
        return 2 * self.dim + steps + 2 * self.num_groups * self.d_state


JAMBA = StateModel(
    name="jamba-1.5-mini", num_heads=1, head_dim=8192, d_state=16, num_groups=1, conv_dim=8192
)
NEMOTRON = StateModel(
    name="nemotron-h-8b", num_heads=128, head_dim=64, d_state=128, num_groups=8, conv_dim=10240
)
GRANITE = StateModel(
    name="granite-4.0-h-small",
    num_heads=128,
    head_dim=64,
    d_state=128,
    num_groups=1,
    conv_dim=8448,
)
FALCON = StateModel(
    name="falcon-h1-7b", num_heads=24, head_dim=128, d_state=256, num_groups=1, conv_dim=3584
)
MODELS = (JAMBA, NEMOTRON, GRANITE, FALCON)

NEMOTRON_EIGHTH = StateModel(
    name="nemotron-h-8b tp8", num_heads=16, head_dim=64, d_state=128, num_groups=1, conv_dim=1280
)
GRANITE_QUARTER = StateModel(
    name="granite-4.0-h-small tp4",
    num_heads=32,
    head_dim=64,
    d_state=128,
    num_groups=1,
    conv_dim=2304,
)
SPREAD_MODELS = (NEMOTRON_EIGHTH, GRANITE_QUARTER)
"""Layers with tensor parallelism: the part of one of eight GPUs, or of four."""

LFM2_CHANNELS = {"lfm2-1.2b": 2048}
"""Model -> number of channels of its gated convolutions."""

DRY_MODELS = (
    StateModel(name="dry-1", num_heads=1, head_dim=64, d_state=16, num_groups=1, conv_dim=64),
    StateModel(name="dry-2", num_heads=2, head_dim=16, d_state=16, num_groups=1, conv_dim=64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Tensors of a batch. The names are those of the operations' arguments."""

    model: StateModel
    query_starts: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    out: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvBatch:
    """Tensors of a batch of a model's convolution.

    Attributes:
        query_starts: Index of each request's first token, and the number of tokens: i32.
        slots: Slot of each request's state: i32.
        states: States of all slots.
        out: Tensor for the results.
        x: Inputs.
        weight: Weights of the convolution.
        bias: Bias of the convolution. None if there is none.
        silu: Whether SiLU is applied to the outputs.
        input_gates: Factors of x. None if there are no gates.
        output_gates: Factors of the outputs. None if there are no gates.
    """

    query_starts: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    out: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool = True
    input_gates: torch.Tensor | None = None
    output_gates: torch.Tensor | None = None


def slots_in_arena(num_requests: int, device: torch.device) -> torch.Tensor:
    """Return the requests' slots in random order. No request has slot 0."""
    return (1 + torch.randperm(num_requests)).to(torch.int32).to(device)


def starts_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Return the index of each request's first token, and the total number of tokens."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def make_state_batch(
    model: StateModel,
    lengths: list[int],
    state_dtype: torch.dtype,
    device: torch.device,
    *,
    states: torch.Tensor | None = None,
) -> StateBatch:
    """Make random tokens of requests with these lengths, and states that are empty or given."""
    torch.manual_seed(0)
    num_tokens, num_requests = sum(lengths), len(lengths)
    state_shape = (model.num_heads, model.head_dim, model.d_state)
    if states is None:
        states = make_arena(num_requests + 1, state_shape, state_dtype, device)[:, 1]
    per_channel = (model.num_heads, model.head_dim)
    steps = per_channel if model.is_per_channel else per_channel[:1]
    rates = state_shape if model.is_per_channel else per_channel[:1]
    x = torch.randn(num_tokens, *per_channel, device=device).to(DTYPE)
    projections = torch.randn(2, num_tokens, model.num_groups, model.d_state, device=device)
    projections = projections.to(DTYPE)
    return StateBatch(
        model=model,
        query_starts=starts_of(lengths, device),
        slots=slots_in_arena(num_requests, device),
        states=states,
        out=torch.empty_like(x),
        x=x,
        dt=torch.randn(num_tokens, *steps, device=device).to(DTYPE),
        A=-torch.rand(rates, device=device) * 8 - 1,
        B=projections[0],
        C=projections[1],
        D=torch.ones(steps, device=device),
        dt_bias=torch.randn(steps, device=device) - 4,
    )


def make_arena(
    num_slots: int, state_shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make empty states of several layers in each slot, [num_slots, num_layers, *state_shape]."""
    layer_bytes = num_slots * math.prod(state_shape) * dtype.itemsize
    # Nothing is timed on a CPU.
    most_layers = 2 if device.type == "cpu" else ARENA_BYTES // layer_bytes
    num_layers = max(2, min(NUM_LAYERS, most_layers))
    return torch.zeros(num_slots, num_layers, *state_shape, dtype=dtype, device=device)


def make_conv_batch(conv_dim: int, lengths: list[int], device: torch.device) -> ConvBatch:
    """Make random tokens and empty states for requests of these lengths, channels innermost."""
    torch.manual_seed(0)
    width = 4
    arena = make_arena(len(lengths) + 1, (width - 1, conv_dim), DTYPE, device)
    x = torch.randn(sum(lengths), conv_dim, device=device).to(DTYPE)
    return ConvBatch(
        query_starts=starts_of(lengths, device),
        slots=slots_in_arena(len(lengths), device),
        states=arena[:, 1].transpose(1, 2),
        out=torch.empty_like(x),
        x=x,
        weight=torch.randn(conv_dim, width, device=device).to(DTYPE),
        bias=torch.randn(conv_dim, device=device).to(DTYPE),
    )


def make_gated_conv_batch(conv_dim: int, lengths: list[int], device: torch.device) -> ConvBatch:
    """Make the batch of a gated convolution of width 3 (LFM2).

    Gates and inputs are parts of one projection. Otherwise it is like `make_conv_batch`.
    """
    torch.manual_seed(0)
    width = 3
    arena = make_arena(len(lengths) + 1, (width - 1, conv_dim), DTYPE, device)
    projected = torch.randn(sum(lengths), 3 * conv_dim, device=device).to(DTYPE)
    input_gates, output_gates, x = projected.chunk(3, dim=-1)
    return ConvBatch(
        query_starts=starts_of(lengths, device),
        slots=slots_in_arena(len(lengths), device),
        states=arena[:, 1].transpose(1, 2),
        out=torch.empty(x.shape, dtype=DTYPE, device=device),
        x=x,
        weight=torch.randn(conv_dim, width, device=device).to(DTYPE),
        bias=None,
        silu=False,
        input_gates=input_gates,
        output_gates=output_gates,
    )

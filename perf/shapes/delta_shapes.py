"""Layers of the gated delta rule of real models, and random batches of these layers.

Sizes are the defaults of the models' configurations in transformers (qwen3_next, kimi_linear).
"""

from dataclasses import dataclass

import torch

from perf.shapes.state_shapes import DTYPE, make_arena, slots_in_arena, starts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaModel:
    """A layer of the gated delta rule.

    Attributes:
        name: Name of the model.
        num_qk_heads: Number of heads of queries and of keys.
        num_v_heads: Number of heads of values.
        head_dim: Number of elements of a query, a key and a value.
        is_per_channel: Whether every key channel decays on its own.
    """

    name: str
    num_qk_heads: int
    num_v_heads: int
    head_dim: int = 128
    is_per_channel: bool = False

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return (2 * self.num_qk_heads + self.num_v_heads) * self.head_dim

    @property
    def state_elements(self) -> int:
        """Number of elements of one request's state."""
        return self.num_v_heads * self.head_dim**2

    @property
    def token_elements(self) -> int:
        """Number of elements of q, k, v, gates, betas and the output of one token."""
        gates = self.num_v_heads * (self.head_dim if self.is_per_channel else 1)
        return self.conv_dim + gates + self.num_v_heads * (1 + self.head_dim)


QWEN3_NEXT = DeltaModel(name="qwen3-next-80b-a3b", num_qk_heads=16, num_v_heads=32)
QWEN3_NEXT_HALF = DeltaModel(name="qwen3-next-80b-a3b tp2", num_qk_heads=8, num_v_heads=16)
QWEN3_NEXT_EIGHTH = DeltaModel(name="qwen3-next-80b-a3b tp8", num_qk_heads=2, num_v_heads=4)
EIGHT_HEADS = DeltaModel(name="2 and 8 heads", num_qk_heads=2, num_v_heads=8)
KIMI_LINEAR = DeltaModel(
    name="kimi-linear-48b-a3b", num_qk_heads=32, num_v_heads=32, is_per_channel=True
)
DELTA_MODELS = (QWEN3_NEXT, QWEN3_NEXT_HALF, KIMI_LINEAR)
DRY_DELTA_MODELS = (
    DeltaModel(name="dry-heads", num_qk_heads=1, num_v_heads=2, head_dim=16),
    DeltaModel(
        name="dry-channels", num_qk_heads=2, num_v_heads=2, head_dim=16, is_per_channel=True
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBatch:
    """Tensors of a batch. The names are those of the operations' arguments.

    Attributes:
        mixed: q, k and v next to each other, as the convolution writes them.
        slots: Slots of each request's states, i32[num_requests, num_steps].
    """

    model: DeltaModel
    query_starts: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    out: torch.Tensor
    mixed: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as views, [num_tokens, heads, head_dim] each."""
        model = self.model
        heads = self.mixed.unflatten(1, (-1, model.head_dim))
        q, k, v = heads.split([model.num_qk_heads, model.num_qk_heads, model.num_v_heads], 1)
        return q, k, v


def make_delta_batch(
    model: DeltaModel,
    lengths: list[int],
    state_dtype: torch.dtype,
    device: torch.device,
    *,
    num_steps: int = 1,
    states: torch.Tensor | None = None,
) -> DeltaBatch:
    """Make random tokens of requests with these lengths, and `num_steps` states for each request.

    The states are empty unless they are given.
    """
    torch.manual_seed(0)
    num_tokens, num_requests = sum(lengths), len(lengths)
    num_slots = num_requests * num_steps
    state_shape = (model.num_v_heads, model.head_dim, model.head_dim)
    if states is None:
        states = make_arena(num_slots + 1, state_shape, state_dtype, device)[:, 1]
    gates = (model.num_v_heads, model.head_dim) if model.is_per_channel else (model.num_v_heads,)
    values = (num_tokens, model.num_v_heads, model.head_dim)
    return DeltaBatch(
        model=model,
        query_starts=starts_of(lengths, device),
        slots=slots_in_arena(num_slots, device).unflatten(0, (num_requests, num_steps)),
        states=states,
        out=torch.empty(values, dtype=DTYPE, device=device),
        mixed=torch.randn(num_tokens, model.conv_dim, device=device).to(DTYPE),
        gates=torch.randn(num_tokens, *gates, device=device).to(DTYPE),
        betas=torch.randn(num_tokens, model.num_v_heads, device=device).to(DTYPE),
        A_log=torch.log(torch.rand(model.num_v_heads, device=device) * 15 + 1),
        dt_bias=torch.randn(gates, device=device) - 4,
    )

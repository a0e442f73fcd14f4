"""Mamba layers' operations where vLLM has none of its own."""

import torch

from jenga_kernels.state_scan import state_scan
from jenga_kernels.states import NULL_SLOT


def selective_scan(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 (vLLM's names)
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None,  # noqa: N803
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    *,
    delta_softplus: bool,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> torch.Tensor:
    """Scan prompts of a Mamba-1 layer, in the words of vLLM's `selective_scan_fn`.

    Args:
        u: Inputs, [dim, num_tokens].
        ssm_states: Written in place, [num_slots, dim, d_state].
        delta: Projected step sizes, [dim, num_tokens].
        A: Decay rates, [dim, d_state].
        B: Input projections, [d_state, num_tokens].
        C: Output projections, shape of B.
        D: Weight of the input, [dim].
        z: Gates, shape of u.
        delta_bias: [dim].
        delta_softplus: Whether step sizes pass through softplus.
        query_start_loc: i32[num_requests + 1].
        cache_indices: State slot of each request, i32[num_requests].
        has_initial_state: bool[num_requests].

    Returns:
        Outputs, [dim, num_tokens].
    """
    # One head of all channels, one group; the kernel reads token by token.
    x = u.t().contiguous().unsqueeze(1)
    out = torch.empty_like(x)
    state_scan(
        out,
        ssm_states.unsqueeze(1),
        x,
        delta.t().contiguous().unsqueeze(1),
        A.float().unsqueeze(0),
        B.t().contiguous().unsqueeze(1),
        C.t().contiguous().unsqueeze(1),
        query_start_loc,
        torch.where(has_initial_state, cache_indices, NULL_SLOT),
        cache_indices,
        D=None if D is None else D.unsqueeze(0),
        z=None if z is None else z.t().contiguous().unsqueeze(1),
        dt_bias=None if delta_bias is None else delta_bias.unsqueeze(0),
        dt_softplus=delta_softplus,
    )
    return out.squeeze(1).t()


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None,  # noqa: N803
    dt_bias: torch.Tensor | None,
    *,
    z: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Apply one token per request in a Mamba-1 layer, in the words of vLLM's function of this name.

    Args:
        state: Written in place, [num_slots, dim, d_state].
        x: Inputs, [num_requests, dim].
        dt: Projected step sizes, shape of x.
        A: Decay rates, [dim, d_state].
        B: Input projections, [num_requests, d_state].
        C: Output projections, shape of B.
        D: Weight of the input, [dim].
        dt_bias: [dim].
        z: Gates, shape of x.
        dt_softplus: Whether step sizes pass through softplus.
        state_batch_indices: State slot of each request, i32[num_requests].
        out: Written in place, shape of x.
    """
    num_requests = x.shape[0]
    result = torch.empty_like(x, memory_format=torch.contiguous_format).unsqueeze(1)
    slots = state_batch_indices.flatten()
    state_scan(
        result,
        state.unsqueeze(1),
        x.contiguous().unsqueeze(1),
        dt.contiguous().unsqueeze(1),
        A.float().unsqueeze(0),
        B.contiguous().unsqueeze(1),
        C.contiguous().unsqueeze(1),
        torch.arange(num_requests + 1, dtype=torch.int32, device=x.device),
        slots,
        slots,
        D=None if D is None else D.unsqueeze(0),
        z=None if z is None else z.contiguous().unsqueeze(1),
        dt_bias=None if dt_bias is None else dt_bias.float().unsqueeze(0),
        dt_softplus=dt_softplus,
    )
    out.copy_(result.squeeze(1))

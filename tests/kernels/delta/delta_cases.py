"""What tests of the gated delta rule share: random tokens, and the rule by matrix products."""

import torch

from jenga_kernels.checks.states import NULL_SLOT
from jenga_kernels.reference.recurrent.delta_update import delta_steps
from jenga_kernels.reference.recurrent.state_scan import checkpoints_of
from tests.kernels.recurrent.state_cases import state_pages
from tests.kernels.support import DEVICE, randn


def delta_tensors(num_tokens, shape, dtype, rng, *, channels=False):
    """q, k, v, gates, betas, A_log, dt_bias, as a layer has them after its convolution.

    shape is heads of queries, heads of values, elements of keys and of values.
    """
    num_qk_heads, num_v_heads, head_k_dim, head_v_dim = shape
    # Aligned parts of one tensor, as wide as those of models.
    qk_elements, v_elements = num_qk_heads * head_k_dim, num_v_heads * head_v_dim
    mixed = randn((num_tokens, 2 * qk_elements + v_elements), dtype, rng)
    q, k, v = mixed.split([qk_elements, qk_elements, v_elements], 1)
    per_head = (num_v_heads, head_k_dim) if channels else (num_v_heads,)
    return {
        "q": q.unflatten(1, (num_qk_heads, head_k_dim)),
        "k": k.unflatten(1, (num_qk_heads, head_k_dim)),
        "v": v.unflatten(1, (num_v_heads, head_v_dim)),
        "gates": randn((num_tokens, *per_head), dtype, rng),
        "betas": randn((num_tokens, num_v_heads), dtype, rng),
        "A_log": torch.log(0.01 + 4 * torch.rand(num_v_heads, generator=rng)).to(DEVICE),
        "dt_bias": randn(per_head, torch.float32, rng),
    }


def delta_states(num_slots, shape, dtype):
    """States of one layer among others, every element NaN."""
    _, num_v_heads, head_k_dim, head_v_dim = shape
    return state_pages(num_slots, (num_v_heads, head_v_dim, head_k_dim), dtype)


def fill(pages, slots, rng):
    """Random states in some slots."""
    for slot in slots:
        pages.states[slot] = randn(pages.states.shape[1:], pages.states.dtype, rng)


def tokens_of(tensors, tokens):
    """The tensors with these tokens only; weights as they are."""
    per_token = ("q", "k", "v", "gates", "betas")
    return {name: value[tokens] if name in per_token else value for name, value in tensors.items()}


def by_products(tensors, slots, states):
    """The rule by PyTorch's matrix products over whole prompts, in the dtype of v.

    Where a triangular system is to be solved, that is done in float32.
    """
    steps = delta_steps(**tensors, scale=None, qk_l2norm=True)
    dtype = tensors["v"].dtype
    states = states.clone()
    out = torch.zeros_like(tensors["v"])
    starts = slots["query_starts"].tolist()
    for request, slot in enumerate(slots["state_slots"].tolist()):
        rows = slice(starts[request], starts[request + 1])
        if slot == NULL_SLOT or rows.start == rows.stop:
            continue
        initial = int(slots["initial_slots"][request])
        h = torch.zeros_like(states[0]) if initial == NULL_SLOT else states[initial].clone()
        q, k = (x[rows].movedim(1, 0).to(dtype) for x in (steps.q, steps.k))  # [H, T, K]
        v = steps.v[rows].movedim(1, 0)  # [H, T, V]
        beta = steps.betas[rows].T[..., None]  # [H, T, 1]
        total = steps.decays[rows].log().cumsum(0).movedim(1, 0)  # [H, T, 1 or K]
        between = pairwise_decay(total)
        lower = (pairs(k, k, between) * beta).tril(-1)
        identity = torch.eye(lower.shape[-1], device=DEVICE).expand_as(lower)
        solution = torch.linalg.solve_triangular(identity + lower, identity, upper=False)
        solution = (solution * beta.mT).to(dtype)
        held = ((k * total.exp()).to(dtype) @ h.to(dtype).mT).float()
        changes = (solution @ (v - held).to(dtype)).to(dtype)  # [H, T, V]
        y = ((q * total.exp()).to(dtype) @ h.to(dtype).mT).float()
        y += (pairs(q, k, between).to(dtype) @ changes).float()
        out[rows] = y.movedim(0, 1).to(dtype)
        asked = checkpoints_of(slots.get("checkpoints"), request) | {len(q[0]): slot}
        for num_tokens, kept_slot in asked.items():
            until = total[:, num_tokens - 1 : num_tokens] - total[:, :num_tokens]
            kept = (k[:, :num_tokens] * until.exp()).to(dtype)
            kept = (changes[:, :num_tokens].mT @ kept).float()
            kept += h.float() * total[:, num_tokens - 1 : num_tokens].exp()
            states[kept_slot] = kept.to(states.dtype)
    return out, states


def pairwise_decay(total):
    """Decay from each token to each later one, [H, T, T, 1 or K], of its logarithms up to each."""
    between = total[:, :, None] - total[:, None]
    is_past = torch.ones(between.shape[1:3], dtype=torch.bool, device=DEVICE).tril()
    return torch.exp(between.masked_fill(~is_past[..., None], float("-inf")))


def pairs(a, b, between):
    """Scores of a and b, [H, T, K] each, with the decay between their tokens; in float32."""
    if between.shape[-1] == 1:
        return (a @ b.mT).float() * between[..., 0]
    return torch.einsum("hik,hjk,hijk->hij", a.float(), b.float(), between)

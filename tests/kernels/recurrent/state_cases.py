"""What tests of recurrent layers share: states in an arena with dead slots, and random cases."""

from dataclasses import dataclass

import torch

from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from tests.kernels.support import DEVICE, randn

PADDING = -1
"""Length of a request that is padding: its slots are null and it has a token all the same."""


def i32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class StatePages:
    """Pages of states of one layer in an arena shared by several layers."""

    states: torch.Tensor
    arena: torch.Tensor


def state_pages(num_slots, shape, dtype, *, num_layers=3, layer=1) -> StatePages:
    """States of one layer, every element NaN; a slot holds all layers, each with room to spare."""
    elements = 1
    for size in shape:
        elements *= size
    pitch = -(-elements // 16) * 16 + 16
    arena = torch.full((num_slots, num_layers, pitch), float("nan")).to(dtype).to(DEVICE)
    return StatePages(arena[:, layer, :elements].unflatten(1, shape), arena)


def shuffled_slots(count, num_slots, rng):
    """Distinct slots, never the null slot."""
    return (1 + torch.randperm(num_slots - 1, generator=rng)[:count]).tolist()


@dataclass(frozen=True)
class Recurrence:
    """Arguments of a scan or an update but out and states, and which slots matter."""

    tensors: dict
    slots: dict
    initial: list
    written: list


def recurrence_tensors(num_tokens, kind, shape, dtype, rng):
    """x, dt, A, B, C, D, z, dt_bias; kind is "channels" (Mamba-1) or "heads" (Mamba-2)."""
    num_heads, head_dim, d_state, num_groups = shape
    x = randn((num_tokens, num_heads, 2 * head_dim), dtype, rng)
    BC = randn((num_tokens, num_groups, 2 * d_state), dtype, rng)
    per_token = (num_heads, head_dim) if kind == "channels" else (num_heads,)
    rates = (num_heads, head_dim, d_state) if kind == "channels" else (num_heads,)
    return {
        "x": x[..., :head_dim],
        "dt": randn((num_tokens, *per_token), dtype, rng),
        "A": -4 * torch.rand(rates, generator=rng).to(DEVICE),
        "B": BC[..., :d_state],
        "C": BC[..., d_state:],
        "D": randn(per_token, torch.float32, rng),
        "z": x[..., head_dim:],
        "dt_bias": randn(per_token, torch.float32, rng),
    }


def prompt_slots(lengths, num_slots, rng, *, checkpoints=True):
    """Slots of prompts, some beginning from zero, and checkpoints at any position.

    Returns query_starts, initial_slots, state_slots and checkpoints, the slots that are read and
    those that are written.
    """
    free = shuffled_slots(num_slots - 1, num_slots, rng)
    starts, initial, final = [0], [], []
    bounds, after_tokens, kept = [0], [], []
    for request, length in enumerate(lengths):
        starts.append(starts[-1] + (1 if length == PADDING else length))
        if length == PADDING:
            initial.append(NULL_SLOT)
            final.append(NULL_SLOT)
        else:
            # Every third prompt begins, every third goes on, every third goes on in another slot.
            final.append(free.pop())
            initial.append((NULL_SLOT, final[-1], free.pop())[request % 3])
            if checkpoints and length > 2:
                count = min(3, length - 1)
                chosen = 1 + torch.randperm(length - 1, generator=rng)[:count]
                after_tokens += sorted(chosen.tolist())
                kept += [free.pop() for _ in range(count)]
        bounds.append(len(kept))
    slots = {
        "query_starts": i32(starts),
        "initial_slots": i32(initial),
        "state_slots": i32(final),
        "checkpoints": Checkpoints(
            starts=i32(bounds), after_tokens=i32(after_tokens), slots=i32(kept)
        )
        if checkpoints
        else None,
    }
    read = [slot for slot in initial if slot != NULL_SLOT]
    written = [slot for slot in [*final, *kept] if slot != NULL_SLOT]
    return slots, read, written


def step_slots(lengths, num_slots, rng):
    """Slots of a few tokens per request, one for each, and as `prompt_slots` the slots used.

    A request without tokens has a slot too, to which nothing is written.
    """
    free = shuffled_slots(num_slots - 1, num_slots, rng)
    most = max(lengths)
    starts, initial, final, written = [0], [], [], []
    for request, length in enumerate(lengths):
        starts.append(starts[-1] + (1 if length == PADDING else length))
        if length == PADDING:
            initial.append(NULL_SLOT)
            final.append([NULL_SLOT] * most)
            continue
        row = [free.pop() for _ in range(max(1, length))]
        row += [NULL_SLOT] * (most - len(row))
        if length > 2:
            row[1] = NULL_SLOT
        final.append(row)
        initial.append((NULL_SLOT, row[0], row[max(1, length) - 1])[request % 3])
        written += [slot for slot in row[:length] if slot != NULL_SLOT]
    slots = {
        "query_starts": i32(starts),
        "initial_slots": i32(initial),
        "state_slots": i32(final),
    }
    read = [slot for slot in initial if slot != NULL_SLOT]
    return slots, read, written


def widened(tensors):
    """The tensors in float64; other arguments as they are."""
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in tensors.items()
    }


def on_cpu(arguments):
    """The arguments on the CPU, the only place where operations look at slots and positions.

    What is refused there would on a GPU be launched, and write past its states.
    """
    moved = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            moved[name] = value.cpu()
        elif isinstance(value, Checkpoints):
            moved[name] = Checkpoints(
                starts=value.starts.cpu(),
                after_tokens=value.after_tokens.cpu(),
                slots=value.slots.cpu(),
            )
        else:
            moved[name] = value
    return moved


def same_elsewhere(got, before, written):
    """Whether all slots but those written hold what they held, NaN and all."""
    others = [slot for slot in range(len(got)) if slot not in written]
    return torch.equal(
        got[others].contiguous().view(torch.uint8), before[others].contiguous().view(torch.uint8)
    )


def far_apart(part, dim, arena, first):
    """A copy whose last index of a dimension lies past 2**31 elements, from `first` on."""
    strides, step = [0] * part.dim(), 1
    for other in reversed(range(part.dim())):
        if other != dim:
            strides[other] = step
            step *= part.shape[other]
    strides[dim] = 2**31 // (part.shape[dim] - 1) // 64 * 64 + 64
    assert strides[dim] * (part.shape[dim] - 1) > 2**31
    return arena.as_strided(part.shape, strides, first).copy_(part)

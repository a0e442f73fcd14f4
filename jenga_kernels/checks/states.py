"""Recurrent states in pages: their slots and checkpoints, and checks of operations on them."""

from dataclasses import dataclass

import torch

from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_at_least,
    check_dtype,
    check_no_gradients,
    check_rows,
    check_same_device,
    check_shape,
    shows_values,
)

NULL_SLOT = 0
"""Slot that belongs to no request: a state read from it is zero, a state written to it is dropped.

Lower slots, which engines use as padding, mean the same.
"""


MIN_WIDTH, MAX_WIDTH = 2, 4
"""Fewest and most taps of the convolutions of recurrent layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """States to keep from the middle of requests, written in the pass that computes the last one.

    Attributes:
        starts: First checkpoint of each request in the other two tensors, then their end,
            i32[num_requests + 1].
        after_tokens: Number of the request's tokens of this call after which the state is kept,
            i32[num_checkpoints]; at least 1 and rising within a request.
        slots: Slot to which each checkpoint is written, i32[num_checkpoints].
    """

    starts: torch.Tensor
    after_tokens: torch.Tensor
    slots: torch.Tensor


def checkpoint_tensors(
    checkpoints: Checkpoints | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return starts, after_tokens and slots of checkpoints; each is None without checkpoints."""
    if checkpoints is None:
        return None, None, None
    return checkpoints.starts, checkpoints.after_tokens, checkpoints.slots


def check_contiguous_rows(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's last dimension is contiguous.

    Raises:
        ValueError: If it is not.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        msg = f"{name} must be contiguous in its last dimension, got stride {tensor.stride(-1)}"
        raise ValueError(msg)


def check_not_expanded(name: str, tensor: torch.Tensor) -> None:
    """Check that no dimension of a tensor that is written has stride 0.

    Raises:
        ValueError: If one does.
    """
    if 0 not in tensor.stride():
        return
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            msg = f"{name} must have elements of its own, got stride 0 in dimension {dim}"
            raise ValueError(msg)


def check_no_overlap(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check that two tensors of the same shape [num_rows, num_columns] and dtype share no element.

    Raises:
        ValueError: If they may. Columns side by side in rows of the same stride do not.
    """
    if tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return
    num_rows, num_columns = tensor.shape
    stride, other_stride = tensor.stride(0), other.stride(0)
    start, other_start = tensor.storage_offset(), other.storage_offset()
    last_row = num_rows - 1
    is_behind = start > other_start + last_row * other_stride + num_columns - 1
    is_before = other_start > start + last_row * stride + num_columns - 1
    is_beside = (
        stride == other_stride > 0
        and num_columns <= (start - other_start) % stride <= stride - num_columns
    )
    if tensor.numel() and not (is_behind or is_before or is_beside):
        msg = f"{name} must not overlap {other_name}, got views of the same elements"
        raise ValueError(msg)


def check_slots(name: str, slots: torch.Tensor, num_slots: int) -> None:
    """Check slot ids. Values are checked only on the CPU, where reading them waits for nothing.

    Raises:
        ValueError: If the dtype is wrong or a slot is not in the pages.
    """
    check_dtype(name, slots, (torch.int32,))
    if shows_values(slots) and slots.numel() and int(slots.max()) >= num_slots:
        msg = f"{name} must be less than the number of slots, {num_slots}, got {int(slots.max())}"
        raise ValueError(msg)


def check_query_starts(query_starts: torch.Tensor, num_tokens: int) -> int:
    """Check the starts of requests among the tokens; return num_requests.

    Raises:
        ValueError: If shape or dtype is wrong or, on the CPU, if they do not rise.
    """
    check_shape("query_starts", query_starts, (None,))
    check_dtype("query_starts", query_starts, (torch.int32,))
    check_at_least("the length of query_starts", query_starts.shape[0], 1)
    check_contiguous_rows("query_starts", query_starts)
    if shows_values(query_starts):
        starts = query_starts.tolist()
        if starts[0] < 0 or starts[-1] > num_tokens or sorted(starts) != starts:
            msg = f"query_starts must rise from 0 or more to at most {num_tokens}, got {starts}"
            raise ValueError(msg)
    return query_starts.shape[0] - 1


def check_checkpoints(
    checkpoints: Checkpoints | None, query_starts: torch.Tensor, num_slots: int
) -> None:
    """Check checkpoints; their positions and order only on the CPU.

    Raises:
        ValueError: If a shape, dtype or device is wrong or, on the CPU, a value is wrong.
    """
    if checkpoints is None:
        return
    starts, after_tokens, slots = checkpoints.starts, checkpoints.after_tokens, checkpoints.slots
    check_shape("checkpoints.starts", starts, query_starts.shape)
    check_dtype("checkpoints.starts", starts, (torch.int32,))
    check_shape("checkpoints.after_tokens", after_tokens, (None,))
    check_dtype("checkpoints.after_tokens", after_tokens, (torch.int32,))
    check_shape("checkpoints.slots", slots, after_tokens.shape)
    check_slots("checkpoints.slots", slots, num_slots)
    check_same_device(
        query_starts=query_starts,
        **{"checkpoints.starts": starts, "checkpoints.after_tokens": after_tokens},
        **{"checkpoints.slots": slots},
    )
    for name, tensor in (("starts", starts), ("after_tokens", after_tokens), ("slots", slots)):
        check_contiguous_rows(f"checkpoints.{name}", tensor)
    if not shows_values(starts):
        return
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] > len(slots) or sorted(bounds) != bounds:
        msg = f"checkpoints.starts must rise from 0 to at most {len(slots)}, got {bounds}"
        raise ValueError(msg)
    lengths = query_starts.diff().tolist()
    for length, start, end in zip(lengths, bounds, bounds[1:], strict=False):
        after = after_tokens[start:end].tolist()
        if after and (after[0] < 1 or after[-1] > length or sorted(set(after)) != after):
            msg = (
                f"checkpoints.after_tokens must rise from 1 or more to at most the request's "
                f"{length} tokens, got {after}"
            )
            raise ValueError(msg)


def check_prompts(
    query_starts: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    checkpoints: Checkpoints | None,
    *,
    num_tokens: int,
    num_slots: int,
) -> int:
    """Check the requests, slots and checkpoints of a scan over prompts; return num_requests.

    Values are checked only on the CPU.

    Args:
        query_starts: First token of each request, then the number of tokens.
        initial_slots: Slot from which each request's state is read.
        state_slots: Slot to which each request's last state is written.
        checkpoints: States to write in addition to the last ones.
        num_tokens: Number of tokens of the call.
        num_slots: Number of slots of the states.

    Raises:
        ValueError: If a shape, dtype, stride, device or value does not fit.
    """
    num_requests = check_query_starts(query_starts, num_tokens)
    slots = {"initial_slots": initial_slots, "state_slots": state_slots}
    for name, tensor in slots.items():
        check_shape(name, tensor, (num_requests,))
    for name, tensor in slots.items():
        check_slots(name, tensor, num_slots)
    check_checkpoints(checkpoints, query_starts, num_slots)
    check_same_device(query_starts=query_starts, **slots)
    check_slots_apart(initial_slots, state_slots, checkpoints=checkpoints)
    return num_requests


def check_steps(
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor | None,
    num_tokens: int,
    num_slots: int,
) -> torch.Tensor:
    """Check the slots of an update of a few tokens; return i32[num_requests, max_tokens].

    Raises:
        ValueError: If a shape, dtype or, on the CPU, a value does not fit.
    """
    if query_starts is None:
        num_requests = num_tokens
    else:
        num_requests = check_query_starts(query_starts, num_tokens)
    check_shape("initial_slots", initial_slots, (num_requests,))
    if state_slots.dim() == 1:
        check_shape("state_slots", state_slots, (num_requests,))
        state_slots = state_slots[:, None]
    check_shape("state_slots", state_slots, (num_requests, None))
    check_at_least("the columns of state_slots", state_slots.shape[1], 1)
    check_slots("initial_slots", initial_slots, num_slots)
    check_slots("state_slots", state_slots, num_slots)
    if query_starts is not None and shows_values(query_starts) and num_requests:
        most = int(query_starts.diff().max())
        if most > state_slots.shape[1]:
            msg = f"state_slots must have {most} columns, one a token, got {state_slots.shape[1]}"
            raise ValueError(msg)
    return state_slots


def check_slots_apart(
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Check on the CPU that no request writes a slot that another one reads or writes.

    Requests run in parallel, in any order. The arguments have passed the other checks.

    Args:
        initial_slots: Slots from which states are read, i32[num_requests].
        state_slots: Slots to which they are written, i32[num_requests] or
            i32[num_requests, max_tokens].
        query_starts: First token of each request. A request writes one slot of its row for each
            token. None means one slot.
        checkpoints: Further slots that are written.

    Raises:
        ValueError: If a request does so.
    """
    if not shows_values(state_slots):
        return
    rows = (state_slots if state_slots.dim() > 1 else state_slots[:, None]).tolist()
    live = [request for request, row in enumerate(rows) if row[0] > NULL_SLOT]
    if query_starts is None:
        written = [row[:1] for row in rows]
    else:
        counts = query_starts.diff().tolist()
        written = [row[:count] for row, count in zip(rows, counts, strict=True)]
    if checkpoints is not None:
        bounds, kept = checkpoints.starts.tolist(), checkpoints.slots.tolist()
        written = [row + kept[bounds[r] : bounds[r + 1]] for r, row in enumerate(written)]
    writers: dict[int, int] = {}
    for request in live:
        for slot in written[request]:
            writer = writers.setdefault(slot, request)
            if writer != request and slot > NULL_SLOT:
                msg = (
                    f"state_slots and checkpoints must not have a slot of two requests, got slot "
                    f"{slot} of requests {writer} and {request}"
                )
                raise ValueError(msg)
    initial = initial_slots.tolist()
    for request in live:
        slot = initial[request]
        writer = writers.get(slot, request)
        if writer != request and slot > NULL_SLOT:
            msg = (
                f"initial_slots must not have a slot that another request writes, got slot {slot} "
                f"of request {request}, which request {writer} writes"
            )
            raise ValueError(msg)


def check_recurrence(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_limits: tuple[float, float],
) -> None:
    """Check the tensors of a selective state space model.

    Raises:
        ValueError: If a shape, dtype, stride, alignment or device does not fit.
    """
    check_shape("x", x, (None, None, None))
    num_tokens, num_heads, head_dim = x.shape
    check_shape("out", out, x.shape)
    check_shape("states", states, (None, num_heads, head_dim, None))
    d_state = states.shape[3]
    is_per_channel = A.dim() > 1
    check_shape("A", A, (num_heads, head_dim, d_state) if is_per_channel else (num_heads,))
    check_shape("dt", dt, x.shape if is_per_channel else (num_tokens, num_heads))
    check_shape("B", B, (num_tokens, None, d_state))
    check_shape("C", C, B.shape)
    num_groups = B.shape[1]
    if num_groups == 0 or num_heads % num_groups:
        msg = f"B must have a number of groups that divides the {num_heads} heads, got {num_groups}"
        raise ValueError(msg)
    if z is not None:
        check_shape("z", z, x.shape)
    if dt_bias is not None:
        check_shape("dt_bias", dt_bias, dt.shape[1:])
    if D is not None:
        check_shape("D", D, (num_heads,) if D.dim() == 1 else (num_heads, head_dim))

    check_dtype("x", x, FLOAT_DTYPES)
    check_dtype("states", states, FLOAT_DTYPES)
    check_dtype("A", A, (torch.float32,))
    for name, tensor in (("out", out), ("B", B), ("C", C), ("z", z)):
        if tensor is not None:
            check_dtype(name, tensor, (x.dtype,))
    for name, tensor in (("dt", dt), ("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_dtype(name, tensor, FLOAT_DTYPES)

    check_rows("states", states)
    check_not_expanded("states", states)
    check_not_expanded("out", out)
    rows = {"out": out, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z}
    for name, tensor in (rows | {"dt_bias": dt_bias}).items():
        if tensor is not None:
            check_contiguous_rows(name, tensor)
    if not A.is_contiguous():
        msg = f"A must be contiguous, got strides {A.stride()}"
        raise ValueError(msg)
    check_same_device(**rows, dt_bias=dt_bias, states=states)
    check_no_gradients(**rows, dt_bias=dt_bias, states=states)
    low, high = dt_limits
    # NumPy's numbers would pass the comparison, but Triton does not take them.
    are_numbers = all(isinstance(limit, int | float) for limit in (low, high))
    if not are_numbers or not 0 <= low <= high:
        msg = f"dt_limits must be two numbers of at least 0 that do not fall, got {dt_limits}"
        raise ValueError(msg)


def per_channel(weights: torch.Tensor | None, num_heads: int, head_dim: int) -> torch.Tensor | None:
    """Return weights of heads or of channels as a view [num_heads, head_dim]."""
    if weights is None or weights.dim() > 1:
        return weights
    return weights[:, None].expand(num_heads, head_dim)


def check_convolution(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    input_gates: torch.Tensor | None,
    output_gates: torch.Tensor | None,
) -> None:
    """Check the tensors of a short causal convolution.

    Raises:
        ValueError: If a shape, dtype, stride or device does not fit.
    """
    check_shape("x", x, (None, None))
    dim = x.shape[1]
    check_shape("out", out, x.shape)
    check_shape("weight", weight, (dim, None))
    width = weight.shape[1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        msg = f"weight must have {MIN_WIDTH} to {MAX_WIDTH} columns, got {width}"
        raise ValueError(msg)
    check_shape("states", states, (None, dim, None))
    if states.shape[2] < width - 1:
        msg = f"states must have at least {width - 1} columns, got {states.shape[2]}"
        raise ValueError(msg)
    check_dtype("x", x, FLOAT_DTYPES)
    check_dtype("out", out, (x.dtype,))
    check_dtype("states", states, FLOAT_DTYPES)
    check_dtype("weight", weight, FLOAT_DTYPES)
    check_contiguous_rows("x", x)
    check_contiguous_rows("out", out)
    check_not_expanded("states", states)
    check_not_expanded("out", out)
    if bias is not None:
        check_shape("bias", bias, (dim,))
        check_dtype("bias", bias, FLOAT_DTYPES)
        check_contiguous_rows("bias", bias)
    gates = {"input_gates": input_gates, "output_gates": output_gates}
    for name, tensor in gates.items():
        if tensor is not None:
            check_shape(name, tensor, x.shape)
            check_dtype(name, tensor, (x.dtype,))
            check_contiguous_rows(name, tensor)
    tensors = {"x": x, "out": out, "states": states, "weight": weight, "bias": bias} | gates
    check_same_device(**tensors)
    check_no_gradients(**tensors)


def check_ring(
    states: torch.Tensor,
    weight: torch.Tensor,
    computed_tokens: torch.Tensor,
    initial_slots: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    query_starts: torch.Tensor | None,
    num_tokens: int,
) -> None:
    """Check the arguments of a step of a convolution whose states are rings.

    Raises:
        ValueError: If a shape or dtype or, on the CPU, a value does not fit.
    """
    num_requests = num_tokens
    if query_starts is not None:
        num_requests = check_query_starts(query_starts, num_tokens)
    check_shape("state_slots", state_slots, (num_requests,))
    check_computed_tokens(computed_tokens, num_requests)
    if not shows_values(computed_tokens):
        return
    if not torch.equal(initial_slots, state_slots):
        msg = (
            f"initial_slots must be state_slots, {state_slots.tolist()}, where states are rings, "
            f"got {initial_slots.tolist()}"
        )
        raise ValueError(msg)
    most = 1 if query_starts is None else int(query_starts.diff().max()) if num_requests else 0
    least = weight.shape[1] - 2 + most
    if states.shape[2] < least:
        msg = f"states must have {least} columns for {most} tokens, got {states.shape[2]}"
        raise ValueError(msg)


def check_computed_tokens(computed_tokens: torch.Tensor, num_requests: int) -> None:
    """Check how many tokens requests had before a call.

    Raises:
        ValueError: If a shape or dtype or, on the CPU, a value does not fit.
    """
    check_shape("computed_tokens", computed_tokens, (num_requests,))
    check_dtype("computed_tokens", computed_tokens, (torch.int32,))
    if shows_values(computed_tokens) and num_requests and int(computed_tokens.min()) < 0:
        msg = f"computed_tokens must be at least 0, got {int(computed_tokens.min())}"
        raise ValueError(msg)

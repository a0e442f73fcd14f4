"""Checkpoints of a step, in the form that the kernels of recurrent layers take."""

from collections.abc import Mapping, Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.vllm_plugin.orders.step_orders import CheckpointWrite
from jenga_kernels.checks.states import Checkpoints


def checkpoints_of(
    writes: Sequence[CheckpointWrite],
    running_pages: torch.Tensor,
    few_tokens: Mapping[int, int] | None = None,
) -> Checkpoints:
    """Convert writes to the kernels' form, sorted by request, without waiting for the device.

    Args:
        writes: States to keep, each of a request of the batch.
        running_pages: Pages of each request's running states, i32[num_requests, slots]. They are in
            the order in which the request's tokens write them.
        few_tokens: Row of the batch -> number of the request's tokens in the step. It names the
            requests that write the state after each token to the next of their running pages.

    Raises:
        InvariantError: A write is of a request that is not in the batch. This is checked only on
            the CPU.
    """
    device = running_pages.device
    fields = [[write.running_page, write.after_tokens, write.page] for write in writes]
    table = async_tensor_h2d(fields, dtype=torch.int32, device=device).view(-1, 3)
    pages, after_tokens, slots = table.t()
    is_of = (running_pages[:, :, None] == pages).any(dim=1)  # [num_requests, num_writes]
    if device.type == "cpu" and not bool(is_of.any(dim=0).all()):
        msg = f"states of {writes} are to be kept, but the step computes {running_pages.tolist()}"
        raise InvariantError(msg)
    requests = is_of.int().argmax(dim=0)
    if few_tokens:
        # The state after the last token is written anyway, and needs no checkpoint.
        steps = [[row, n] for row, count in few_tokens.items() for n in range(1, count)]
        rows, numbers = async_tensor_h2d(steps, dtype=torch.int32, device=device).t()
        requests = torch.cat([requests, rows])
        after_tokens = torch.cat([after_tokens, numbers])
        slots = torch.cat([slots, running_pages[rows.long(), numbers.long() - 1]])
    requests, order = requests.sort(stable=True)
    bounds = torch.arange(len(running_pages) + 1, dtype=requests.dtype, device=device)
    return Checkpoints(
        starts=torch.searchsorted(requests, bounds, out_int32=True),
        after_tokens=after_tokens[order],
        slots=slots[order],
    )

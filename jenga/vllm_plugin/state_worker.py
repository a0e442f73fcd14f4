"""A worker's side of a step's orders: copies before it, states written on the way through it.

vLLM's model runner hands over a step's orders once, before it asks the metadata builders of all
layers for the step's metadata; in between they wait here, by the name of the first layer of the
page table they concern.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.request import CopyPath
from jenga.vllm_plugin.copy_rounds import CopyRound
from jenga.vllm_plugin.host_memory import (
    copy_ahead,
    copy_through_host,
    finish_ahead,
    first_cache,
)
from jenga.vllm_plugin.state_orders import StateWrite, StepOrders
from jenga_kernels.page_copy import page_copy
from jenga_kernels.states import Checkpoints

_waiting: dict[str, tuple[StateWrite, ...]] = {}
_layers: set[str] = set()  # those that take their orders here: others are on other ranks


def deliver_orders(kv_caches: Iterable[Any], num_large_pages: int, orders: StepOrders) -> None:
    """Make a step's copies, begin those beside it, and let its writes wait for the layers.

    Args:
        kv_caches: vLLM's caches, tensors or sequences of tensors, all views of the arena.
        num_large_pages: Of the arena.
        orders: What the scheduler asks for.

    Raises:
        InvariantError: The layers did not take the orders of an earlier step, or pages are ordered
            to host memory and there is none.
    """
    if _waiting:
        msg = f"states of {sorted(_waiting)} were to be kept in an earlier step and were not"
        raise InvariantError(msg)
    _waiting.update({name: writes for name, writes in orders.writes.items() if name in _layers})
    finish_ahead()
    if orders.copies:
        arena = arena_of(kv_caches)
        for copies in orders.copies:
            if copies.path == CopyPath.IN_ARENA:
                copy_pages(arena, num_large_pages, copies)
            else:
                copy_through_host(kv_caches, arena, num_large_pages, copies)
    if orders.ahead:
        copy_ahead(kv_caches, arena_of(kv_caches), num_large_pages, orders.ahead)


def expect_orders(layer_names: Iterable[str]) -> None:
    """Note that layers are on this rank, and will take the writes that wait for them."""
    _layers.update(layer_names)


def arena_of(kv_caches: Iterable[Any]) -> torch.Tensor:
    """View the one buffer that all caches lie in, i8[arena_bytes]."""
    tensor = first_cache(kv_caches)
    arena = torch.empty(0, dtype=torch.int8, device=tensor.device)
    return arena.set_(tensor.untyped_storage())


def copy_pages(arena: torch.Tensor, num_large_pages: int, copies: CopyRound) -> None:
    """Make one round of copies within the arena.

    Args:
        arena: Written in place, i8[arena_bytes].
        num_large_pages: Of the arena.
        copies: What to copy.
    """
    num_pages = num_large_pages * copies.small_pages_per_large_page
    pages = arena.view(num_pages, -1)  # [num_pages, page_bytes]
    ids = async_tensor_h2d(
        [copies.source_pages, copies.target_pages], dtype=torch.int64, device=arena.device
    )
    page_copy(pages, ids[0], ids[1])


def take_writes(layer_names: Sequence[str]) -> tuple[StateWrite, ...]:
    """Take the writes that wait for a page table's layers."""
    for name in layer_names:
        if name in _waiting:
            return _waiting.pop(name)
    return ()


def checkpoints_of(
    writes: Sequence[StateWrite],
    running_pages: torch.Tensor,
    few_tokens: Mapping[int, int] | None = None,
) -> Checkpoints:
    """Order the states that prompts leave on their way, without waiting for the device.

    Args:
        writes: Each of a request of the batch.
        running_pages: Pages of each request's running states, in the order in which its tokens
            write them, i32[num_requests, slots].
        few_tokens: Requests of the batch that leave the state after each of their tokens in those
            pages -> how many tokens.

    Raises:
        InvariantError: On the CPU, a write is of a request that is not in the batch.
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
        # The last token's state is the request's own, and needs no checkpoint.
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

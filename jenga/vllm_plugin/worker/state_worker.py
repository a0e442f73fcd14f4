"""A worker's side of a step's orders: copies before it, states written on the way through it.

A model runner has one `StepMailbox`. It delivers a step's orders there, before it asks the metadata
builders of all layers for the step's metadata; in between they wait, by the name of the first layer
of the page table they concern. Nothing is kept for a process, so that its engines share nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.tables.request import CopyPath
from jenga.vllm_plugin.scheduler.copy_rounds import CopyRound
from jenga.vllm_plugin.scheduler.state_orders import StateWrite, StepOrders
from jenga.vllm_plugin.worker.host_memory import HostMemory
from jenga_kernels.checks.states import Checkpoints
from jenga_kernels.page_copy import page_copy


class StepMailbox:
    """What a model runner leaves for its layers in a step.

    Attributes:
        host_memory: Beside the runner's arena; None where there is none.
        encoded_rows: Rows of the batch whose encoder inputs were encoded for the last step in which
            there were any, in their order. Runners build a step's metadata, then encode, then run
            the layers, which read them.
    """

    __slots__ = ("_layers", "_writes", "encoded_rows", "host_memory")

    def __init__(self, layer_names: Iterable[str] = ()) -> None:
        """Nothing to read.

        Args:
            layer_names: Layers that take the writes that wait for them; others are on other ranks.
        """
        self.host_memory: HostMemory | None = None
        self.encoded_rows: tuple[int, ...] = ()
        self._layers = frozenset(layer_names)
        self._writes: dict[str, tuple[StateWrite, ...]] = {}

    def deliver(self, kv_caches: Iterable[Any], num_large_pages: int, orders: StepOrders) -> None:
        """Make a step's copies, begin those beside it, and let its writes wait for the layers.

        Args:
            kv_caches: vLLM's caches, tensors or sequences of tensors, all views of the arena.
            num_large_pages: Of the arena.
            orders: What the scheduler asks for.

        Raises:
            InvariantError: The layers did not take the orders of an earlier step, or pages are
                ordered to host memory and there is none.
        """
        if self._writes:
            waiting = sorted(self._writes)
            msg = f"states of {waiting} were to be kept in an earlier step and were not"
            raise InvariantError(msg)
        self._writes = {
            name: writes for name, writes in orders.writes.items() if name in self._layers
        }
        if self.host_memory is not None:
            self.host_memory.finish_ahead()
        if not (orders.copies or orders.ahead):
            return
        arena = arena_of(kv_caches)
        for copies in orders.copies:
            if copies.path == CopyPath.IN_ARENA:
                copy_pages(arena, num_large_pages, copies)
            else:
                self._host().copy(arena, num_large_pages, copies)
        if orders.ahead:
            self._host().copy_ahead(arena, num_large_pages, orders.ahead)

    def take_writes(self, layer_names: Sequence[str]) -> tuple[StateWrite, ...]:
        """Take the writes that wait for a page table's layers."""
        for name in layer_names:
            if name in self._writes:
                return self._writes.pop(name)
        return ()

    def _host(self) -> HostMemory:
        if self.host_memory is None:
            msg = "pages are to be copied to host memory or from there, and there is none"
            raise InvariantError(msg)
        return self.host_memory


@runtime_checkable
class TakesMail(Protocol):
    """A metadata builder that reads what its model runner leaves for a step.

    Attributes:
        mailbox: The runner's; one of its own until it has been told which.
        ordered_layers: Names of the layers that take writes.
    """

    mailbox: StepMailbox
    ordered_layers: tuple[str, ...]


def open_mailbox(model_runner: Any) -> StepMailbox:  # noqa: ANN401 (either of vLLM's)
    """Give a model runner, which has its metadata builders, a mailbox that these read."""
    builders = [each for each in builders_of(model_runner) if isinstance(each, TakesMail)]
    mailbox = StepMailbox(name for each in builders for name in each.ordered_layers)
    for builder in builders:
        builder.mailbox = mailbox
    model_runner.jenga_mailbox = mailbox
    if hasattr(model_runner, "model_state"):  # what encodes, in the second model runner
        model_runner.model_state.jenga_mailbox = mailbox
    return mailbox


def mailbox_of(owner: Any) -> StepMailbox | None:  # noqa: ANN401
    """Get the mailbox of a model runner or of its model's state; None of another backend's."""
    return getattr(owner, "jenga_mailbox", None)


def builders_of(model_runner: Any) -> Iterator[Any]:  # noqa: ANN401
    """Get the metadata builders of a model runner's layers, those that draft too."""
    drafting = getattr(model_runner, "drafter", None) or getattr(model_runner, "speculator", None)
    groups = [group for groups in model_runner.attn_groups for group in groups]
    groups += getattr(drafting, "draft_attn_groups", [])
    for more in getattr(drafting, "attn_groups", []):
        groups += more
    for group in groups:
        yield from group.metadata_builders


def arena_of(kv_caches: Iterable[Any]) -> torch.Tensor:
    """View the one buffer that all caches lie in, i8[arena_bytes]."""
    first = next(iter(kv_caches))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
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

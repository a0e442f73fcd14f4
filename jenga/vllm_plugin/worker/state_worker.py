"""A step's orders in a worker: copies before the step, and states written within it.

Each model runner has one `StepMailbox`. It delivers a step's orders there before it asks the
layers' metadata builders for the step's metadata. The writes wait under the name of a layer of
their page table until the builder of that layer takes them. There is no global state, so engines
in one process share nothing.
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
    """Data of a step that a model runner passes to its layers.

    Attributes:
        host_memory: Host memory beside the runner's arena, or None.
        encoded_rows: Rows of the batch whose inputs were encoded, in order. They are of the last
            step in which there were any. Runners build a step's metadata, then encode, then run
            the layers, which read this field.
    """

    __slots__ = ("_layers", "_writes", "encoded_rows", "host_memory")

    def __init__(self, layer_names: Iterable[str] = ()) -> None:
        """Start with an empty mailbox.

        Args:
            layer_names: Layers whose builders take writes. Writes for other layers are for other
                ranks, and are dropped.
        """
        self.host_memory: HostMemory | None = None
        self.encoded_rows: tuple[int, ...] = ()
        self._layers = frozenset(layer_names)
        self._writes: dict[str, tuple[StateWrite, ...]] = {}

    def deliver(self, kv_caches: Iterable[Any], num_large_pages: int, orders: StepOrders) -> None:
        """Make a step's copies, begin those that run beside it, and store writes for the layers.

        Args:
            kv_caches: vLLM's caches, tensors or sequences of tensors, all views of the arena.
            num_large_pages: Number of large pages in the arena.
            orders: Orders of the scheduler.

        Raises:
            InvariantError: The layers did not take the writes of an earlier step, or pages are to
                be copied to or from host memory and there is none.
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
        """Take the stored writes for a page table, given the names of its layers."""
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
    """A metadata builder that reads its model runner's mailbox.

    Attributes:
        mailbox: Mailbox of the model runner. Before `open_mailbox`, an empty one of the builder.
        ordered_layers: Names of the builder's layers that take writes.
    """

    mailbox: StepMailbox
    ordered_layers: tuple[str, ...]


def open_mailbox(model_runner: Any) -> StepMailbox:  # noqa: ANN401 (either of vLLM's)
    """Give a model runner and its metadata builders a mailbox.

    The model runner must already have its metadata builders.
    """
    builders = [each for each in builders_of(model_runner) if isinstance(each, TakesMail)]
    mailbox = StepMailbox(name for each in builders for name in each.ordered_layers)
    for builder in builders:
        builder.mailbox = mailbox
    model_runner.jenga_mailbox = mailbox
    if hasattr(model_runner, "model_state"):  # it encodes, in the second model runner
        model_runner.model_state.jenga_mailbox = mailbox
    return mailbox


def mailbox_of(owner: Any) -> StepMailbox | None:  # noqa: ANN401
    """Get the mailbox of a model runner or of its model's state. Other backends have None."""
    return getattr(owner, "jenga_mailbox", None)


def builders_of(model_runner: Any) -> Iterator[Any]:  # noqa: ANN401
    """Get the metadata builders of a model runner's layers, draft layers included."""
    drafting = getattr(model_runner, "drafter", None) or getattr(model_runner, "speculator", None)
    groups = [group for groups in model_runner.attn_groups for group in groups]
    groups += getattr(drafting, "draft_attn_groups", [])
    for more in getattr(drafting, "attn_groups", []):
        groups += more
    for group in groups:
        yield from group.metadata_builders


def arena_of(kv_caches: Iterable[Any]) -> torch.Tensor:
    """Get a view of the whole buffer that all caches lie in, i8[arena_bytes]."""
    first = next(iter(kv_caches))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
    arena = torch.empty(0, dtype=torch.int8, device=tensor.device)
    return arena.set_(tensor.untyped_storage())


def copy_pages(arena: torch.Tensor, num_large_pages: int, copies: CopyRound) -> None:
    """Make one round of copies within the arena.

    Args:
        arena: The arena, i8[arena_bytes]. It is written in place.
        num_large_pages: Number of large pages in the arena.
        copies: The copies.
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

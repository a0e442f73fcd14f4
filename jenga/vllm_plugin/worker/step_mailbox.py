"""The mailbox of a model runner: what a step passes to the runner's layers.

Each model runner has one `StepMailbox`. A step's orders are delivered there before the runner asks
its metadata builders for the step's metadata. Copies are made at once. Checkpoints wait under the
name of a layer of their page table until the builder of that layer takes them. There is no global
state, so engines in one process share nothing.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from jenga.errors import InvariantError
from jenga.tables.request import CopyPath
from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders
from jenga.vllm_plugin.worker.host_memory import HostMemory
from jenga.vllm_plugin.worker.page_copies import arena_of, copy_pages


class StepMailbox:
    """Data of a step that a model runner passes to its layers.

    Attributes:
        host_memory: Host memory beside the runner's arena, or None.
        encoded_rows: Rows of the batch whose inputs were encoded, in order. They are of the last
            step in which there were any. Runners build a step's metadata, then encode, then run
            the layers, which read this field.
        is_warming_up: Whether steps are vLLM's own warm-up. Their pages overlap, so nothing that a
            step left in a page may be read in the next one.
    """

    __slots__ = ("_checkpoints", "_layers", "encoded_rows", "host_memory", "is_warming_up")

    def __init__(self, layer_names: Iterable[str] = ()) -> None:
        """Start with an empty mailbox.

        Args:
            layer_names: Layers whose builders take checkpoints. Those for other layers are for
                other ranks, and are dropped.
        """
        self.host_memory: HostMemory | None = None
        self.encoded_rows: tuple[int, ...] = ()
        self.is_warming_up = False
        self._layers = frozenset(layer_names)
        self._checkpoints: dict[str, tuple[CheckpointWrite, ...]] = {}

    def deliver(self, kv_caches: Iterable[Any], num_large_pages: int, orders: StepOrders) -> None:
        """Make a step's copies, begin those that run beside it, and store its checkpoints.

        Args:
            kv_caches: vLLM's caches, tensors or sequences of tensors, all views of the arena.
            num_large_pages: Number of large pages in the arena.
            orders: Orders of the scheduler.

        Raises:
            InvariantError: The layers did not take the checkpoints of an earlier step, or pages are
                to be copied to or from host memory and there is none.
        """
        if self._checkpoints:
            waiting = sorted(self._checkpoints)
            msg = f"states of {waiting} were to be kept in an earlier step and were not"
            raise InvariantError(msg)
        self._checkpoints = {
            name: writes for name, writes in orders.checkpoints.items() if name in self._layers
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

    def take_checkpoints(self, layer_names: Sequence[str]) -> tuple[CheckpointWrite, ...]:
        """Take the checkpoints of a page table's states, given the names of its layers."""
        for name in layer_names:
            if name in self._checkpoints:
                return self._checkpoints.pop(name)
        return ()

    @contextmanager
    def warming_up(self) -> Generator[None]:
        """Run vLLM's own warm-up steps."""
        self.is_warming_up = True
        try:
            yield
        finally:
            self.is_warming_up = False

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
        ordered_layers: Names of the builder's layers that take checkpoints.
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

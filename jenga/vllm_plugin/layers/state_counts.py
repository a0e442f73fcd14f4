"""How many tokens went into the states of each page, where steps seldom write them.

See `state_history`. A prompt that goes on from a page brings its states up to date before it is
scanned.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from jenga.vllm_plugin.specs.history_kinds import HISTORY_KINDS, NUM_STATES
from jenga_kernels.checks.histories import next_states
from jenga_kernels.checks.states import Checkpoints

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import MambaSpec


_is_warming_up: ContextVar[bool] = ContextVar("is_warming_up", default=False)


@contextmanager
def warming_up() -> Generator[None]:
    """Run steps of vLLM's own, whose pages lie over one another: counts are not read from them."""
    token = _is_warming_up.set(True)
    try:
        yield
    finally:
        _is_warming_up.reset(token)


def parts_behind(states: torch.Tensor, spec: "MambaSpec") -> list[torch.Tensor]:
    """View what lies behind a layer's states in its pages, in the order of the spec.

    vLLM hands a layer those states alone that it asks for.

    Args:
        states: The last of them, [num_slots, ...], in pages of any stride.
        spec: Of the layer, with the shapes of a slot.

    Returns:
        [num_slots, *shape] each.
    """
    arena = torch.empty(0, dtype=torch.int8, device=states.device)
    arena.set_(states.untyped_storage())
    stride_bytes = states.stride(0) * states.element_size()
    first = (states.storage_offset() + states[0].numel()) * states.element_size()
    parts: list[torch.Tensor] = []
    for shape, dtype in zip(spec.shapes[NUM_STATES:], spec.dtypes[NUM_STATES:], strict=True):
        num_bytes = prod(shape) * dtype.itemsize
        part = arena.as_strided((len(states), num_bytes), (stride_bytes, 1), first)
        parts.append(part.view(dtype).unflatten(1, shape))
        first += num_bytes
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How many tokens are in the states of some requests of a step, each i32[num_requests].

    Attributes:
        computed_tokens: Of each request before the step.
        state_tokens: In its states before it.
        next_state_tokens: In its states after it, or for a prompt before it is scanned.
        histories: By layer name, each as the kernels of the layer's kind take it.
        query_starts: Where each request's tokens begin, and the end, i32[num_requests + 1]: all 0
            for prompts, whose tokens are scanned afterwards; None for a token each.
        is_current: Whether there is nothing to bring up to date before a scan.
    """

    histories: Mapping[str, Any]
    computed_tokens: torch.Tensor
    state_tokens: torch.Tensor
    next_state_tokens: torch.Tensor
    query_starts: torch.Tensor | None = None
    is_current: bool = False


class StateCounts:
    """How many tokens went into the states in each page of a page table.

    They lie in the pages themselves. What decoding requests need of them is handed on in tensors
    that stay where they are, for CUDA graphs.
    """

    def __init__(
        self,
        spec: "MambaSpec",
        layer_names: Sequence[str],
        vllm_config: "VllmConfig",
        device: torch.device,
        *,
        max_requests: int,
        max_query_tokens: int,
    ) -> None:
        """Before the arena is there.

        Args:
            spec: Of the layers.
            layer_names: Of the page table.
            vllm_config: Of the engine.
            device: Of the arena.
            max_requests: Most requests that decode in a step, padding included.
            max_query_tokens: Most tokens of one of them.
        """
        self._spec = spec
        self._max_query_tokens = max_query_tokens
        self._history_tokens = spec.shapes[NUM_STATES + 1][1]  # behind the count
        self._history_of = HISTORY_KINDS[spec.mamba_type.name].history
        self._layers = vllm_config.compilation_config.static_forward_context
        self._layer_names = tuple(layer_names)
        self._histories: dict[str, Any] = {}
        self._counts = torch.empty(0)
        self._place = (0, 0)
        self._is_warm = False
        self._kept = torch.zeros(3, max_requests, dtype=torch.int32, device=device)

    def decode(
        self,
        step: "CommonAttentionMetadata",
        slots: torch.Tensor,
        num_requests: int,
        query_starts: torch.Tensor | None,
    ) -> Replay:
        """Count what decoding requests leave in their states.

        Args:
            step: The step, decoding requests first.
            slots: Their state slots, i32[num_requests or more]; what is more is padding.
            num_requests: How many there are.
            query_starts: Where their tokens begin, as `Replay` has it.
        """
        self._find_histories()
        counts, pages = self._counts, slots[:num_requests].long()
        computed, stored = self._before(step, pages, 0)
        after = next_states(
            computed,
            stored,
            step.query_start_loc.diff()[:num_requests],
            history_tokens=self._history_tokens,
            max_query_tokens=self._max_query_tokens,
        )
        counts[pages] = after
        self._kept[:, :num_requests] = torch.stack([computed, stored, after])
        kept = self._kept[:, : len(slots)]
        return Replay(
            histories=self._histories,
            computed_tokens=kept[0],
            state_tokens=kept[1],
            next_state_tokens=kept[2],
            query_starts=query_starts,
        )

    def read(
        self,
        step: "CommonAttentionMetadata",
        slots: torch.Tensor,
        first: int,
        checkpoints: Checkpoints | None,
    ) -> Replay:
        """Count what prompts will have read, and what is in the states they leave on the way.

        Args:
            step: The step, with the prompts from row `first` on.
            slots: State slots of the prompts, i32[num_requests].
            first: Number of decoding requests.
            checkpoints: States to keep, if any.

        Returns:
            What brings the states that prompts go on from up to date.
        """
        self._find_histories()
        counts, pages = self._counts, slots.long()
        computed, stored = self._before(step, pages, first)
        end = first + len(pages)
        counts[pages] = step.seq_lens[first:end]
        if checkpoints is not None:
            rows = torch.arange(len(pages), device=pages.device)
            num_kept = checkpoints.starts.diff()
            rows = rows.repeat_interleave(num_kept, output_size=len(checkpoints.slots))
            counts[checkpoints.slots.long()] = computed[rows] + checkpoints.after_tokens
        lens = step.seq_lens_cpu_upper_bound
        query_lens = step.query_start_loc_cpu.diff()
        all_begin = lens is not None and not (lens[first:end] > query_lens[first:end]).any()
        # Compiled with the first prompt, which comes before any request does.
        is_current, self._is_warm = bool(all_begin) and self._is_warm, True
        return Replay(
            histories=self._histories,
            computed_tokens=computed,
            state_tokens=stored,
            next_state_tokens=computed,
            query_starts=torch.zeros(len(pages) + 1, dtype=torch.int32, device=pages.device),
            is_current=is_current,
        )

    def _find_histories(self) -> None:
        """View the histories of all layers and the counts, unless the arena is where it was."""
        states = [self._layers[name].kv_cache[-1] for name in self._layer_names]
        place = (states[0].data_ptr(), len(states[0]))
        if place == self._place:
            return
        self._histories = {}
        for name, of_layer in zip(self._layer_names, states, strict=True):
            counts, *parts = parts_behind(of_layer, self._spec)
            if not self._histories:
                self._counts = counts[:, 0]
            self._histories[name] = self._history_of(parts)
        self._place = place

    def _before(
        self, step: "CommonAttentionMetadata", pages: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Get how many tokens requests have, and their states, before a step."""
        rows = slice(first, first + len(pages))
        computed = step.seq_lens[rows] - step.query_start_loc.diff()[rows]
        stored = computed if _is_warming_up.get() else self._counts[pages]
        return computed, torch.where(computed > 0, stored, 0)

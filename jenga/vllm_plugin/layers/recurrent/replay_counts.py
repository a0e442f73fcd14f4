"""Number of tokens in the states of each page, for layers whose steps seldom write states.

See `replay_layout`. Before a prompt that starts from such a page is scanned, the states in the page
are brought up to date.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from jenga.vllm_plugin.specs.replay_kinds import HISTORY_KINDS, NUM_STATES
from jenga.vllm_plugin.specs.replay_layout import history_requests
from jenga_kernels.checks.histories import next_states
from jenga_kernels.checks.states import Checkpoints

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import MambaSpec


def parts_behind(states: torch.Tensor, spec: "MambaSpec") -> list[torch.Tensor]:
    """Get views of the parts after a layer's states in its pages, in the order of the spec.

    vLLM passes a layer only the states that the layer asks for.

    Args:
        states: The layer's last state tensor, [num_slots, ...], in pages of any stride.
        spec: Spec of the layer, with the shapes of all parts of a slot.

    Returns:
        The parts, [num_slots, *shape] each.
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
    """Numbers of tokens in the states of some requests of a step, and their histories.

    Attributes:
        histories: Layer name -> history, in the form that the kernels of the layer's kind take.
        computed_tokens: Number of tokens of each request before the step, i32[num_requests].
        state_tokens: Number of tokens in its states before the step, i32[num_requests].
        next_state_tokens: Number of tokens in its states after the step, i32[num_requests]. For a
            prompt, before it is scanned.
        query_starts: Index of each request's first token, and the end, i32[num_requests + 1]. All 0
            for prompts, whose tokens are scanned afterwards. None if each request has one token.
        is_current: Whether the states need no update before a scan.
        writes_states: Whether all states are written in the step, because its requests are few.
            Each request then has one token.
    """

    histories: Mapping[str, Any]
    computed_tokens: torch.Tensor
    state_tokens: torch.Tensor
    next_state_tokens: torch.Tensor
    query_starts: torch.Tensor | None = None
    is_current: bool = False
    writes_states: bool = False


class ReplayCounts:
    """Numbers of tokens in the states in each page of a page table.

    They are stored in the pages. Counts of decoding requests are passed on in tensors that keep
    their addresses, for CUDA graphs.
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
        """Prepare, before the arena is allocated.

        Args:
            spec: Spec of the layers.
            layer_names: Names of the page table's layers.
            vllm_config: Configuration of the engine.
            device: Device of the arena.
            max_requests: Largest number of decoding requests in a step, padding included.
            max_query_tokens: Largest number of tokens that one of them has in a step.
        """
        self._spec = spec
        self._max_query_tokens = max_query_tokens
        self._history_tokens = spec.shapes[NUM_STATES + 1][1]  # the part after the count
        self._least_requests = history_requests(vllm_config, spec)
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
        *,
        is_warming_up: bool,
    ) -> Replay:
        """Compute and store the counts of decoding requests after a step.

        Few requests have all of their states written. The number of slots decides, padding
        included, because it is the same whenever a CUDA graph is replayed. Steps with drafts do not
        write all states: a page has one state, and it may not include a draft.

        Args:
            step: The step, with its decoding requests first.
            slots: Their state slots, i32[num_requests or more]. Further slots are padding.
            num_requests: Number of decoding requests.
            query_starts: As in `Replay`.
            is_warming_up: Whether pages overlap, so that counts are not read from them.
        """
        self._find_histories()
        counts, pages = self._counts, slots[:num_requests].long()
        computed, stored = self._before(step, pages, 0, is_warming_up=is_warming_up)
        writes_states = query_starts is None and len(slots) < self._least_requests
        after = next_states(
            computed,
            stored,
            step.query_start_loc.diff()[:num_requests],
            history_tokens=self._history_tokens,
            max_query_tokens=self._max_query_tokens,
            writes_states=writes_states,
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
            writes_states=writes_states,
        )

    def read(
        self,
        step: "CommonAttentionMetadata",
        slots: torch.Tensor,
        first: int,
        checkpoints: Checkpoints | None,
        *,
        is_warming_up: bool,
    ) -> Replay:
        """Store the counts of prompts after a step, and of states kept in their middle.

        Args:
            step: The step, with its prompts from row `first` on.
            slots: State slots of the prompts, i32[num_requests].
            first: Number of decoding requests.
            checkpoints: States to keep, or None.
            is_warming_up: Whether pages overlap, so that counts are not read from them.

        Returns:
            Counts to bring the states that prompts start from up to date.
        """
        self._find_histories()
        counts, pages = self._counts, slots.long()
        computed, stored = self._before(step, pages, first, is_warming_up=is_warming_up)
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
        # The first prompt comes before any request. Its states are brought up to date in any case,
        # so that the kernel is compiled.
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
        """Make views of all layers' histories and of the counts, unless the arena is unchanged."""
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
        self,
        step: "CommonAttentionMetadata",
        pages: torch.Tensor,
        first: int,
        *,
        is_warming_up: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Get the numbers of tokens of requests, and of their states, before a step.

        Args:
            step: The step.
            pages: State pages of the requests.
            first: Row of the first of them in the step.
            is_warming_up: Whether counts are not read from pages.
        """
        rows = slice(first, first + len(pages))
        computed = step.seq_lens[rows] - step.query_start_loc.diff()[rows]
        stored = computed if is_warming_up else self._counts[pages]
        return computed, torch.where(computed > 0, stored, 0)

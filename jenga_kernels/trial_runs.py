"""Calls that an engine has described, made with a trial's own numbers.

The calls have the engine's heads, windows and page sizes. Their pages are as far apart as the
engine's, in an arena of as many bytes as memory allows. Slots of a page behind a request's last
token hold NaN, and so do results before they are written.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from jenga_kernels.attention.paged_attention import kind_of, paged_attention
from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.latent.latent_attention import latent_attention, latent_kind_of
from jenga_kernels.plans.attention_plan import (
    AttentionKind,
    plan_attention,
    specialized_prefill_tiles,
)
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.recurrent.delta_scan import delta_scan
from jenga_kernels.recurrent.state_scan import state_scan
from jenga_kernels.trial_calls import BY_TOKEN, Call, View
from jenga_kernels.triton.delta.tiles import delta_scan_tiles, has_hopper_delta_scan
from jenga_kernels.triton.latent.tiles import specialized_latent_tiles
from jenga_kernels.triton.lib.tiles import MIN_ROWS, Machine
from jenga_kernels.triton.recurrent.tiles import hopper_scan_tiles

Results = Sequence[torch.Tensor]
Run = Callable[[bool], Results]
"""Launches an operation, with its generic kernels if the argument is True, and returns results."""


def has_own_kernels(call: Call, machine: Machine) -> bool:
    """Whether a GPU has kernels of its own that can serve a call."""
    return _HAS_OWN_KERNELS[call.operation](call, machine)


def runs_of(call: Call, arena: torch.Tensor) -> Iterator[tuple[str, Run]]:
    """Prepare runs of a call, with numbers that are the same on every device.

    Args:
        call: Call to make.
        arena: Memory for its pages, u8[num_bytes]. As many pages as needed are used, anywhere in
            the arena, the last one included.

    Yields:
        Name of a variant of the call, and a function that runs it.

    Raises:
        torch.OutOfMemoryError: If the arena has too few pages.
    """
    return _RUNS[call.operation](call, arena)


class _Numbers:
    """Random numbers that are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw normally distributed numbers."""
        return torch.randn(shape, generator=self._generator).to(self._device, dtype)

    def rows(self, view: View, num_rows: int | None = None) -> torch.Tensor:
        """Draw normally distributed numbers in the layout of a call's tensor, with `num_rows`."""
        view = view if num_rows is None else view.with_rows(num_rows)
        numbers = self.normal(view.num_elements, dtype=view.torch_dtype)
        return numbers.as_strided(view.shape, view.strides)

    def integers(self, *values: int) -> torch.Tensor:
        """Make a tensor of these values, i32."""
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def starts(self, counts: Sequence[int]) -> torch.Tensor:
        """Make the running sums of counts, with 0 at the start: starts of requests, and the end."""
        return self.integers(0, *torch.tensor(counts).cumsum(0).tolist())

    def page_ids(self, num_pages: int, count: int, *, first: int = 0) -> list[int]:
        """Draw ids of `count` pages in random order, from `first` on, the last page included.

        Raises:
            torch.OutOfMemoryError: If there are too few pages.
        """
        if num_pages - first < count:
            msg = f"{count} pages are needed, and there is memory for {num_pages - first}"
            raise torch.OutOfMemoryError(msg)
        drawn = torch.randperm(num_pages - first - 1, generator=self._generator)[: count - 1]
        ids = torch.cat([drawn + first, torch.tensor([num_pages - 1])])
        return ids[torch.randperm(count, generator=self._generator)].tolist()

    def page_table(
        self, pages: Sequence[torch.Tensor], seq_lens: Sequence[int], page_tokens: int
    ) -> torch.Tensor:
        """Give pages to requests, write their tokens, and write NaN to the slots behind them.

        Args:
            pages: Tensors to write in place, [num_pages, page_tokens, ...] each.
            seq_lens: Number of tokens of each request.
            page_tokens: Slots of a page.

        Returns:
            Page table, i32[num_requests, max_pages].
        """
        counts = [-(-seq_len // page_tokens) for seq_len in seq_lens]
        ids = iter(self.page_ids(len(pages[0]), sum(counts)))
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
            for column in range(count):
                page_id = next(ids)
                table[row, column] = page_id
                num_tokens = min(page_tokens, seq_len - column * page_tokens)
                for stored in pages:
                    page = stored[page_id]
                    numbers = self.normal(*page.shape, dtype=torch.float32)
                    numbers[num_tokens:] = float("nan")
                    page.copy_(numbers.to(stored.dtype))
        return table.to(self._device)


def _no_numbers(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def _on(arena: torch.Tensor, views: Sequence[View]) -> list[torch.Tensor]:
    """Make tensors with as many pages as the arena has room for in all of them."""
    num_pages = min(view.within(arena.numel()).shape[0] for view in views)
    return [view.with_rows(num_pages).on(arena) for view in views]


QUERIES, KEYS = (200, 130, 300, 1), (200, 700, 333, 500)
"""Numbers of query tokens and of keys of the requests that attend. Three are prompts, two of them
with keys before, and one decodes."""

MORE_KEYS = 150
"""Number of keys of the second request before its window, if that is longer than `KEYS` says."""

MOST_KEYS = 20_000
"""Most keys of the second request. Longer windows then hold all of its keys."""

SPAN = (190, 320)
"""First token and end of an image in the third request, whose tokens read each other."""


def _attention_kind(call: Call) -> AttentionKind:
    q, k_pages, v_pages = (view.meta() for view in (call.view("q"), *call.pages))
    return kind_of(
        q,
        k_pages,
        v_pages,
        window_tokens=call.arguments.get("window_tokens"),
        chunk_tokens=call.arguments.get("chunk_tokens"),
        is_causal=call.arguments.get("is_causal", True),
        has_slot_scales=call.view("k_slot_scales") is not None,
    )


def _has_own_attention(call: Call, machine: Machine) -> bool:
    kind, dtype = _attention_kind(call), call.view("q").torch_dtype
    return specialized_prefill_tiles(machine, kind, dtype) is not None


def _attention_runs(call: Call, arena: torch.Tensor) -> Iterator[tuple[str, Run]]:
    yield "prompts", _attention(call, arena, has_spans=False)
    if call.arguments.get("reads_spans", False):
        yield "images", _attention(call, arena, has_spans=True)


def _attention(call: Call, arena: torch.Tensor, *, has_spans: bool) -> Run:
    kind, numbers = _attention_kind(call), _Numbers(arena.device)
    k_pages, v_pages = _on(arena, call.pages)
    reach = kind.window_tokens or kind.chunk_tokens or 0
    seq_lens = [*KEYS]
    seq_lens[1] = max(seq_lens[1], min(reach + MORE_KEYS, MOST_KEYS))
    q = numbers.rows(call.view("q"), sum(QUERIES))
    table = numbers.page_table((k_pages, v_pages), seq_lens, kind.page_tokens)
    starts, lens = numbers.starts(QUERIES), numbers.integers(*seq_lens)
    given: dict[str, torch.Tensor | None] = {}
    for name in ("sinks", "alibi_slopes"):
        view = call.view(name)
        given[name] = None if view is None else numbers.rows(view)
    for name in ("k_scale", "v_scale"):
        view = call.view(name)
        given[name] = None if view is None else numbers.rows(view).abs() + 0.5
    if has_spans:
        spans = torch.zeros(sum(QUERIES), 2, dtype=torch.int32)
        first = sum(QUERIES[:2]) - (seq_lens[2] - QUERIES[2])
        spans[first + SPAN[0] : first + SPAN[1]] = torch.tensor(SPAN, dtype=torch.int32)
        given["spans"] = spans.to(arena.device)

    def run(is_portable: bool) -> Results:
        plan = plan_attention(
            starts,
            lens,
            kind,
            num_tokens=len(q),
            dtype=q.dtype,
            decode_query_tokens=0 if has_spans else call.arguments.get("decode_query_tokens"),
            is_warp_specialized=not is_portable,
        )
        out = _no_numbers(len(q), kind.num_heads, kind.result_dim, like=q)
        paged_attention(
            q,
            k_pages,
            v_pages,
            table,
            starts,
            lens,
            scale=2 * kind.head_dim**-0.5,  # great enough that few keys decide each result
            window_tokens=kind.window_tokens,
            chunk_tokens=kind.chunk_tokens,
            is_causal=kind.is_causal,
            soft_cap=call.arguments.get("soft_cap"),
            out=out,
            plan=plan,
            **given,
        )
        return (out,)

    return run


LATENTS = (1, 700, 64, 2500)
"""Numbers of latents of the requests that decode."""


def _latent_kind(call: Call) -> AttentionKind:
    q, pages = (view.meta() for view in (call.view("q"), *call.pages))
    return latent_kind_of(q, pages, latent_dim=call.arguments["latent_dim"])


def _has_own_latents(call: Call, machine: Machine) -> bool:
    kind, (pages,) = _latent_kind(call), call.pages
    query_tokens = call.arguments.get("decode_query_tokens")
    tiles = specialized_latent_tiles(
        machine,
        num_heads=kind.num_heads,
        latent_dim=kind.head_dim,
        page_tokens=kind.page_tokens,
        query_tokens=max(1, MIN_ROWS // kind.num_heads) if query_tokens is None else query_tokens,
        element_bytes=call.view("q").torch_dtype.itemsize,
        stored_bytes=pages.torch_dtype.itemsize,
    )
    return tiles is not None


def _latent_runs(call: Call, arena: torch.Tensor) -> Iterator[tuple[str, Run]]:
    kind, numbers = _latent_kind(call), _Numbers(arena.device)
    query_tokens = call.arguments.get("decode_query_tokens")
    counts = [min(seq_len, query_tokens or 1) for seq_len in LATENTS]
    (pages,) = _on(arena, call.pages)
    q = numbers.rows(call.view("q"), sum(counts))
    table = numbers.page_table((pages,), LATENTS, kind.page_tokens)
    starts, lens = numbers.starts(counts), numbers.integers(*LATENTS)
    scale_view = call.view("latent_scale")
    latent_scale = None if scale_view is None else numbers.rows(scale_view).abs() + 0.5

    def run(is_portable: bool) -> Results:
        plan = plan_latent_attention(
            starts,
            lens,
            kind,
            num_tokens=len(q),
            dtype=q.dtype,
            max_query_tokens=max(counts),
            decode_query_tokens=query_tokens,
            is_warp_specialized=not is_portable,
        )
        out = _no_numbers(len(q), kind.num_heads, kind.head_dim, like=q)
        latent_attention(
            q,
            pages,
            table,
            starts,
            lens,
            scale=2 * q.shape[2] ** -0.5,
            latent_dim=kind.head_dim,
            latent_scale=latent_scale,
            out=out,
            plan=plan,
        )
        return (out,)

    yield "latents", run


SCANNED = (700, 64, 1)
"""Numbers of tokens of the requests that are scanned. The second begins with zero, and the third
writes its state to the slot that it is read from."""

CHECKPOINTS_AFTER = (100, 640)
"""Numbers of tokens of the first request after which its state is kept."""

SEGMENT_TOKENS, UNCUT_TOKENS = 256, 1 << 16


class _Scan:
    """Requests that are scanned, and the states of their layer.

    Attributes:
        arguments: Starts of requests, and the slots of their states before and after.
        checkpoints: States to keep in addition.
    """

    def __init__(self, numbers: _Numbers, arena: torch.Tensor, view: View) -> None:
        (self._states,) = _on(arena, [view])
        num_slots = len(self._states)
        first, second, last, *others = numbers.page_ids(num_slots, 6, first=NULL_SLOT + 1)
        self._slots = [first, second, last, *others]
        self._before = numbers.normal(len(self._slots), *view.shape[1:], dtype=view.torch_dtype)
        self.arguments = (
            numbers.starts(SCANNED),
            numbers.integers(first, NULL_SLOT, last),
            numbers.integers(second, others[0], last),
        )
        self.checkpoints = Checkpoints(
            starts=numbers.integers(0, *[len(CHECKPOINTS_AFTER)] * len(SCANNED)),
            after_tokens=numbers.integers(*CHECKPOINTS_AFTER),
            slots=numbers.integers(*others[1:]),
        )

    def begin(self) -> torch.Tensor:
        """Write the states as they are before a scan; return all states of the arena."""
        for slot, state in zip(self._slots, self._before, strict=True):
            self._states[slot].copy_(state)
        return self._states

    def written(self) -> torch.Tensor:
        """Copy the states that a scan has written or left unchanged."""
        return torch.stack([self._states[slot] for slot in self._slots])


def _has_own_state_scan(call: Call, machine: Machine) -> bool:
    x, B, C, A = (call.view(name) for name in ("x", "B", "C", "A"))
    if len(A.shape) > 1:
        return False
    z = call.view("z")
    meta = [None if view is None else view.meta() for view in (x, B, C, z)]
    return hopper_scan_tiles(machine, *meta) is not None


def _state_scan_runs(call: Call, arena: torch.Tensor) -> Iterator[tuple[str, Run]]:
    segments = {"segment_tokens": SEGMENT_TOKENS}
    # A step that keeps no states launches kernels compiled without checkpoints.
    for keeps_states in (True, False):
        wherein = "" if keeps_states else ", no states kept"
        one = {"keeps_states": keeps_states, "is_warp_specialized": False}
        two = {"keeps_states": keeps_states, "is_warp_specialized": True}
        yield f"a group of warps{wherein}", _state_scan(call, arena, **one)
        yield f"two groups of warps{wherein}", _state_scan(call, arena, **two)
        yield f"segments{wherein}", _state_scan(call, arena, **one, **segments)
        name = f"segments by two groups of warps{wherein}"
        yield name, _state_scan(call, arena, **two, **segments)


def _state_scan(
    call: Call,
    arena: torch.Tensor,
    *,
    keeps_states: bool,
    is_warp_specialized: bool,
    segment_tokens: int = UNCUT_TOKENS,
) -> Run:
    numbers = _Numbers(arena.device)
    x, dt, B, C = (numbers.rows(call.view(name), sum(SCANNED)) for name in ("x", "dt", "B", "C"))
    # Decays of all sizes: some heads forget after a few tokens, others after hundreds.
    A = -torch.logspace(-3, 0, x.shape[1], base=2.0).to(arena.device) / 8
    views = {name: call.view(name) for name in ("D", "dt_bias")}
    given = {name: None if view is None else numbers.rows(view) for name, view in views.items()}
    scan = _Scan(numbers, arena, call.pages[0])

    def run(is_portable: bool) -> Results:
        out, states = _no_numbers(*x.shape, like=x), scan.begin()
        state_scan(
            out,
            states,
            x,
            dt,
            A,
            B,
            C,
            *scan.arguments,
            dt_softplus=call.arguments.get("dt_softplus", True),
            allow_tf32=call.arguments.get("allow_tf32", False),
            checkpoints=scan.checkpoints if keeps_states else None,
            segment_tokens=UNCUT_TOKENS if is_portable else segment_tokens,
            is_warp_specialized=is_warp_specialized,
            is_portable=is_portable,
            **given,
        )
        return out, scan.written()

    return run


def _has_own_delta_scan(call: Call, machine: Machine) -> bool:
    q, v, gates = (call.view(name) for name in ("q", "v", "gates"))
    tiles = delta_scan_tiles(
        machine,
        q.shape[2],
        v.shape[2],
        v.torch_dtype.itemsize,
        is_per_channel=_is_per_channel(gates),
    )
    return has_hopper_delta_scan(machine, q.shape[2], v.meta(), tiles.block_tokens)


def _is_per_channel(gates: View) -> bool:
    """Whether every key channel has its own decay."""
    return len(gates.shape) > 2  # noqa: PLR2004 - tokens, heads, channels


def _delta_scan_runs(call: Call, arena: torch.Tensor) -> Iterator[tuple[str, Run]]:
    numbers, num_tokens = _Numbers(arena.device), sum(SCANNED)
    q, k, v, gates, betas = (
        numbers.rows(call.view(name), num_tokens) for name in BY_TOKEN["delta_scan"]
    )
    views = {name: call.view(name) for name in ("A_log", "dt_bias")}
    given = {name: None if view is None else numbers.rows(view) for name, view in views.items()}
    if given["A_log"] is None:
        gates.copy_(gates.float().sigmoid().log() / 8)
        betas.copy_(betas.float().sigmoid())
    scan = _Scan(numbers, arena, call.pages[0])

    def run(is_portable: bool, *, keeps_states: bool) -> Results:
        out, states = _no_numbers(*v.shape, like=v), scan.begin()
        delta_scan(
            out,
            states,
            q,
            k,
            v,
            gates,
            betas,
            *scan.arguments,
            checkpoints=scan.checkpoints if keeps_states else None,
            is_portable=is_portable,
            **given,
        )
        return out, scan.written()

    name = "decays of channels" if _is_per_channel(call.view("gates")) else "decays of heads"
    yield name, partial(run, keeps_states=True)
    yield f"{name}, no states kept", partial(run, keeps_states=False)


_HAS_OWN_KERNELS: dict[str, Callable[[Call, Machine], bool]] = {
    "paged_attention": _has_own_attention,
    "latent_attention": _has_own_latents,
    "state_scan": _has_own_state_scan,
    "delta_scan": _has_own_delta_scan,
}

_RUNS: dict[str, Callable[[Call, torch.Tensor], Iterator[tuple[str, Run]]]] = {
    "paged_attention": _attention_runs,
    "latent_attention": _latent_runs,
    "state_scan": _state_scan_runs,
    "delta_scan": _delta_scan_runs,
}

"""The work of one engine step, counted once for all layers that read the same keys."""

from dataclasses import dataclass, field, replace

import torch
import triton

from jenga_kernels.checks.tensors import (
    FLOAT_DTYPES,
    check_at_least,
    check_dtype,
    check_same_device,
    check_shape,
)
from jenga_kernels.launches import Calls, launch
from jenga_kernels.triton.attention.plan import MAX_SPLITS, attention_plan_kernel
from jenga_kernels.triton.lib.tiles import (
    SPECIALIZED_ROWS,
    AttentionTiles,
    Machine,
    SpecializedTiles,
    attention_tiles,
    machine_of,
    max_decode_rows,
    specialized_tiles,
)

BLOCK_REQUESTS = 256
"""Number of requests that the plan's kernel looks at together: a few values in each thread."""

BLOCK_ENTRIES = 32
"""Number of entries of the work lists that one program makes."""

MAX_POSITIONS = 2**31 - 1
"""Most tokens of a request: its length is an i32."""

FREE_ROWS = 16
"""Rows of the smallest matrix product. A decoding request with as many rows costs no more than one
with one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Properties that layers must have in common to share a plan.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads, a divisor of num_heads.
        head_dim: Elements of a query and of a key.
        page_tokens: Slots of a small page.
        window_tokens: Number of keys that a query reads: its own and the window_tokens - 1 before
            it. None means all.
        chunk_tokens: Number of tokens of a chunk of chunked attention. A query reads no key before
            the start of its chunk. None means no chunks.
        is_causal: Whether a query reads only keys up to its own position.
        is_quantised: Whether pages hold elements of one byte or half a byte: float8, int8, or two
            of four bits in a uint8.
        has_slot_scales: Whether each slot and head of quantised pages has scales of its own.
        is_int4: Whether pages hold elements of four bits. These always have slot scales.
        is_other_float: Whether pages hold float16 or bfloat16, and queries another float type.
        value_dim: Elements of a value if they are not head_dim, else None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    is_causal: bool = True
    is_quantised: bool = False
    has_slot_scales: bool = False
    is_int4: bool = False
    is_other_float: bool = False
    value_dim: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("num_heads", "num_kv_heads", "head_dim", "page_tokens"):
            object.__setattr__(self, name, check_at_least(name, getattr(self, name), 1))
        if self.num_heads % self.num_kv_heads:
            msg = f"num_heads must be a multiple of {self.num_kv_heads}, got {self.num_heads}"
            raise ValueError(msg)
        for name in ("window_tokens", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None:
                num_keys = check_at_least(name, value, 1)
                if not self.is_causal:
                    msg = f"{name} must be None without a causal mask, got {value}"
                    raise ValueError(msg)
                # A window that holds every position of 32 bits is the same as none.
                object.__setattr__(self, name, num_keys if num_keys < MAX_POSITIONS else None)
        if self.has_slot_scales and not self.is_quantised:
            msg = "has_slot_scales must be False where is_quantised is, got True"
            raise ValueError(msg)
        if self.is_int4 and not self.has_slot_scales:
            msg = "is_int4 must be False where has_slot_scales is, got True"
            raise ValueError(msg)
        if self.is_other_float and self.is_quantised:
            msg = "is_other_float must be False where is_quantised is True, got True"
            raise ValueError(msg)
        if self.value_dim is not None:
            value_dim = check_at_least("value_dim", self.value_dim, 1)
            # Equal layers must compare equal, whether or not value_dim was given.
            object.__setattr__(self, "value_dim", None if value_dim == self.head_dim else value_dim)

    @property
    def group_heads(self) -> int:
        """Number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def result_dim(self) -> int:
        """Number of elements of a value, and so of a result."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Work lists of one step, on the device; made by `plan_attention`.

    All sizes follow from numbers that the host knows, so a plan may be updated and used in a CUDA
    graph. Launches depend only on upper bounds, and the kernels read the real counts.

    Attributes:
        kind: Properties that the layers have in common.
        tiles: Tiles of the kernels.
        dtype: Element type of the queries.
        num_tokens: Rows of the queries.
        num_requests: Number of requests, padding included.
        decode_query_tokens: Most query tokens of a request that the decode kernel serves.
        max_decoded_tokens: Most query tokens that a decoded request of this step has.
        is_batch_invariant: Whether a request's result must not depend on the others.
        max_row_tiles: Upper bound of the row tiles of the prefill kernel; 0 if it has no work.
        unit_starts: Units of decode work before each request, i32[num_requests + 1].
        units_per_program: Units of decode work of one program, i32[1].
        first_requests: Request where each decode program begins, i32[num_programs].
        row_tile_requests: Request of each tile of prefill rows, i32[max_row_tiles]; -1 for none.
        row_tile_indices: Index of each tile among those of its request, i32[max_row_tiles].
        partial_out: Buffer for the partial results of splits, f32[parts, rows, value_dim].
        partial_lse: Buffer for their log-sum-exps, f32[parts, rows].
        calls: Recorded calls of operations with this plan.
    """

    kind: AttentionKind
    tiles: AttentionTiles
    dtype: torch.dtype
    num_tokens: int
    num_requests: int
    decode_query_tokens: int
    max_decoded_tokens: int
    is_batch_invariant: bool
    max_row_tiles: int
    unit_starts: torch.Tensor = field(repr=False)
    units_per_program: torch.Tensor = field(repr=False)
    first_requests: torch.Tensor = field(repr=False)
    row_tile_requests: torch.Tensor = field(repr=False)
    row_tile_indices: torch.Tensor = field(repr=False)
    partial_out: torch.Tensor = field(repr=False)
    partial_lse: torch.Tensor = field(repr=False)
    calls: Calls = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def may_split(self) -> bool:
        """Whether a decoded request's keys may be split over several programs."""
        is_decoding = self.max_decoded_tokens > 0
        return is_decoding and (self.is_batch_invariant or self.tiles.num_programs > 1)

    def check(
        self, kind: AttentionKind, dtype: torch.dtype, num_tokens: int, num_requests: int
    ) -> None:
        """Check that the plan was made for a call.

        Raises:
            ValueError: If it was made for other layers, queries or numbers.
        """
        made_for = (self.kind, self.dtype, self.num_tokens, self.num_requests)
        if made_for != (kind, dtype, num_tokens, num_requests):
            msg = (
                f"plan must be made for {kind}, {dtype}, {num_tokens} tokens and {num_requests} "
                f"requests, got {self.kind}, {self.dtype}, {self.num_tokens} and "
                f"{self.num_requests}"
            )
            raise ValueError(msg)

    def update(self, query_starts: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Make the lists again, in place, for another step with the same bounds.

        Args:
            query_starts: First query token of each request, then the number of query tokens,
                i32[num_requests + 1].
            seq_lens: Number of tokens of each request whose keys are stored, i32[num_requests].

        Raises:
            ValueError: If a shape, dtype or device does not fit.
        """
        check_steps(query_starts, seq_lens, self.num_requests)
        check_same_device(
            unit_starts=self.unit_starts, query_starts=query_starts, seq_lens=seq_lens
        )
        num_entries = max(self.tiles.num_programs, self.max_row_tiles)
        launch(
            attention_plan_kernel,
            (triton.cdiv(num_entries, BLOCK_ENTRIES),),
            seq_lens.device,
            unit_starts_ptr=self.unit_starts,
            units_per_program_ptr=self.units_per_program,
            first_requests_ptr=self.first_requests,
            row_tile_requests_ptr=self.row_tile_requests,
            row_tile_indices_ptr=self.row_tile_indices,
            query_starts_ptr=query_starts,
            seq_lens_ptr=seq_lens,
            window_tokens=self.kind.window_tokens,
            chunk_tokens=self.kind.chunk_tokens,
            num_requests=self.num_requests,
            num_programs=self.tiles.num_programs,
            max_row_tiles=self.max_row_tiles,
            NUM_KV_HEADS=self.kind.num_kv_heads,
            GROUP=self.kind.group_heads,
            QUERY_TOKENS=self.decode_query_tokens,
            PAGE_TOKENS=self.kind.page_tokens,
            IS_INVARIANT=self.is_batch_invariant,
            BLOCK_N=self.tiles.decode.block_n,
            BLOCK_M=self.tiles.prefill.block_m,
            BLOCK_REQUESTS=BLOCK_REQUESTS,
            BLOCK_ENTRIES=BLOCK_ENTRIES,
            enable_fp_fusion=True,
        )


def plan_attention(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kind: AttentionKind,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    max_query_tokens: int | None = None,
    min_query_tokens: int | None = None,
    decode_query_tokens: int | None = None,
    is_batch_invariant: bool = False,
    is_warp_specialized: bool | None = None,
    tiles: AttentionTiles | None = None,
) -> AttentionPlan:
    """Count the work of a step, for every `paged_attention` of layers of one kind.

    Requests of up to `decode_query_tokens` query tokens are decoded: their keys are split, so that
    all programs read about the same number of tokens, windows counted. For all other requests, one
    program for each tile of queries reads all keys.

    Args:
        query_starts: First query token of each request, then the number of query tokens,
            i32[num_requests + 1]. Requests may have none. Rows of the queries past the last number
            are padding.
        seq_lens: Number of tokens of each request whose keys are stored, queries included,
            i32[num_requests]. Without a causal mask, the number of keys to read.
        kind: Properties that the layers have in common.
        num_tokens: Rows of the queries, padding included.
        dtype: Element type of the queries.
        max_query_tokens: Most query tokens of any request. None means num_tokens. If it does not
            exceed decode_query_tokens, the prefill kernel is not launched.
        min_query_tokens: Fewest query tokens of any request that has some. None means that some may
            have one. If it exceeds decode_query_tokens, the decode kernel is not launched.
        decode_query_tokens: Most query tokens of a request that is decoded; 0 sends all requests to
            the prefill kernel. None means as many as cost no more than one token. With speculative
            decoding, pass 1 + the number of draft tokens. Tiles for heads of more than 256 elements
            have fewer rows; for these, the number is lowered to what the GPU has room for.
        is_batch_invariant: Whether to split a request's keys by its own length alone. Then its
            result does not depend, to the last bit, on the rest of the batch. With
            decode_query_tokens 0, a token's result does not depend on the other tokens of its
            request in the step either: prompts may be cut anywhere, and decoded tokens may be
            computed again as tokens of a prompt. Warp-specialised kernels give no such guarantee.
        is_warp_specialized: Whether to serve prompts with the warp-specialised kernel on Hopper. It
            needs queries of 16 bits, pages of the same dtype, and keys and values of the same
            width, at most 256. For other layers it changes nothing. None means True unless
            is_batch_invariant is set. An H200 takes 0.62 to 0.77 of the other kernel's time
            (`perf.kernels.bench_specialized_prefill`).
        tiles: Tiles to use instead of those chosen for the machine.

    Returns:
        The plan, valid for one step. `AttentionPlan.update` makes it valid for the next.

    Raises:
        ValueError: If a shape, dtype, device or size does not fit.
    """
    check_shape("seq_lens", seq_lens, (None,))
    num_requests = seq_lens.shape[0]
    check_steps(query_starts, seq_lens, num_requests)
    num_tokens = check_at_least("num_tokens", num_tokens, 0)
    check_query_dtype(dtype)
    if decode_query_tokens is None:
        decode_query_tokens = max(1, FREE_ROWS // kind.group_heads)
    decode_query_tokens = check_at_least("decode_query_tokens", decode_query_tokens, 0)
    if max_query_tokens is None:
        max_query_tokens = num_tokens
    max_query_tokens = check_at_least("max_query_tokens", max_query_tokens, 0)
    if min_query_tokens is not None:
        min_query_tokens = check_at_least("min_query_tokens", min_query_tokens, 0)
    if tiles is None:
        machine = machine_of(seq_lens.device)
        widest = max(kind.head_dim, kind.result_dim)
        max_rows = max_decode_rows(machine, head_dim=widest, element_bytes=dtype.itemsize)
        if max_rows is not None:
            decode_query_tokens = min(decode_query_tokens, max_rows // kind.group_heads)
        tiles = attention_tiles(
            machine,
            head_dim=widest,
            element_bytes=dtype.itemsize,
            stored_bytes=1 if kind.is_quantised else dtype.itemsize,
            has_slot_scales=kind.has_slot_scales,
            is_int4=kind.is_int4,
            decode_rows=decode_query_tokens * kind.group_heads,
            window_tokens=kind.window_tokens,
        )
        is_wanted = is_warp_specialized
        if is_wanted is None:
            is_wanted = not is_batch_invariant
        if is_wanted:
            specialized = specialized_prefill_tiles(machine, kind, dtype)
            tiles = replace(tiles, specialized_prefill=specialized)
    _check_tiles(tiles, kind, decode_query_tokens)
    max_row_tiles = 0
    if max_query_tokens > decode_query_tokens:
        num_prefills = min(num_requests, num_tokens // (decode_query_tokens + 1))
        max_row_tiles = num_tokens * kind.group_heads // tiles.prefill.block_m + num_prefills
    max_decoded_tokens = min(decode_query_tokens, max_query_tokens)
    if min_query_tokens is not None and min_query_tokens > decode_query_tokens:
        max_decoded_tokens = 0
    num_pairs = num_requests * kind.num_kv_heads
    if max_decoded_tokens == 0 or (tiles.num_programs == 1 and not is_batch_invariant):
        num_partials = 0
    elif is_batch_invariant:
        num_partials = num_pairs * MAX_SPLITS.value
    else:
        num_partials = tiles.num_programs + min(num_pairs, tiles.num_programs)
    rows = decode_query_tokens * kind.group_heads

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=seq_lens.device)

    plan = AttentionPlan(
        kind=kind,
        tiles=tiles,
        dtype=dtype,
        num_tokens=num_tokens,
        num_requests=num_requests,
        decode_query_tokens=decode_query_tokens,
        max_decoded_tokens=max_decoded_tokens,
        is_batch_invariant=is_batch_invariant,
        max_row_tiles=max_row_tiles,
        unit_starts=empty(num_requests + 1),
        units_per_program=empty(1),
        first_requests=empty(tiles.num_programs),
        row_tile_requests=empty(max_row_tiles),
        row_tile_indices=empty(max_row_tiles),
        partial_out=empty(num_partials, rows, kind.result_dim, dtype=torch.float32),
        partial_lse=empty(num_partials, rows, dtype=torch.float32),
    )
    plan.update(query_starts, seq_lens)
    return plan


def specialized_prefill_tiles(
    machine: Machine, kind: AttentionKind, dtype: torch.dtype
) -> SpecializedTiles | None:
    """Get the tiles of the warp-specialised prefill kernel; None if it does not serve the layers.

    Args:
        machine: GPU on which the kernel would run.
        kind: Properties that the layers have in common.
        dtype: Element type of the queries.
    """
    # The TMA copies of that kernel load elements ready for matrix products.
    if kind.value_dim is not None or kind.is_quantised or kind.is_other_float:
        return None
    return specialized_tiles(
        machine,
        head_dim=kind.head_dim,
        page_tokens=kind.page_tokens,
        element_bytes=dtype.itemsize,
        window_tokens=kind.window_tokens,
    )


def _check_tiles(tiles: AttentionTiles, kind: AttentionKind, decode_query_tokens: int) -> None:
    decode_rows = decode_query_tokens * kind.group_heads
    if tiles.decode.block_m < decode_rows and tiles.specialized_decode is None:
        msg = f"tiles must have at least {decode_rows} decode rows, got {tiles.decode.block_m}"
        raise ValueError(msg)
    if tiles.specialized_prefill is None:
        return
    if kind.value_dim is not None:
        msg = f"tiles must have no specialized_prefill for values of {kind.value_dim} elements"
        raise ValueError(msg)
    if kind.is_quantised or kind.is_other_float:
        msg = "tiles must have no specialized_prefill where pages have another dtype than queries"
        raise ValueError(msg)
    if tiles.prefill.block_m != SPECIALIZED_ROWS:
        msg = f"tiles must have {SPECIALIZED_ROWS} prefill rows, got {tiles.prefill.block_m}"
        raise ValueError(msg)


def check_query_dtype(dtype: torch.dtype) -> None:
    """Check the element type of the queries that work is planned for.

    Raises:
        ValueError: If queries cannot have this type.
    """
    if dtype not in FLOAT_DTYPES:
        wanted = " or ".join(str(allowed) for allowed in FLOAT_DTYPES)
        msg = f"dtype must be {wanted}, got {dtype}"
        raise ValueError(msg)


def check_page_table(page_table: torch.Tensor) -> int:
    """Check a page table; return num_requests.

    Raises:
        ValueError: If shape, dtype or strides do not fit.
    """
    check_shape("page_table", page_table, (None, None))
    num_requests, max_pages = page_table.shape
    check_dtype("page_table", page_table, (torch.int32,))
    if max_pages > 1 and page_table.stride(1) != 1:
        msg = (
            f"page_table must be contiguous in its last dimension, got strides "
            f"{page_table.stride()}"
        )
        raise ValueError(msg)
    # A kernel looks up a request's first page before it knows whether the request has any.
    if max_pages == 0 and num_requests:
        msg = f"page_table must have at least one column, got shape {tuple(page_table.shape)}"
        raise ValueError(msg)
    return num_requests


def check_steps(query_starts: torch.Tensor, seq_lens: torch.Tensor, num_requests: int) -> None:
    """Check query_starts and seq_lens.

    Raises:
        ValueError: If a shape, dtype or device does not fit.
    """
    check_shape("query_starts", query_starts, (num_requests + 1,))
    check_shape("seq_lens", seq_lens, (num_requests,))
    check_same_device(query_starts=query_starts, seq_lens=seq_lens)
    for name, tensor in (("query_starts", query_starts), ("seq_lens", seq_lens)):
        check_dtype(name, tensor, (torch.int32,))
        if tensor.numel() > 1 and tensor.stride(0) != 1:
            msg = f"{name} must be contiguous, got stride {tensor.stride(0)}"
            raise ValueError(msg)

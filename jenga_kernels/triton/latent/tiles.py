"""Tile sizes, warps and stages of `latent_attention`, by shape and machine.

A program keeps results as wide as a latent in registers. For 64 rows and 512 elements, these are
128 per thread, so a row tile has few rows. The sizes are those that compile without spills
(tests/kernels/latent/test_compiled_latents.py).
"""

from dataclasses import replace

from jenga_kernels.triton.lib.tiles import (
    BLACKWELL,
    HOPPER,
    MIN_ROWS,
    WARPGROUP_ROWS,
    AttentionTiles,
    LoopTiles,
    Machine,
    TeamTiles,
    power_of_two,
)

INTERPRETER_ROWS = 1024
"""Rows of a program in the interpreter, whose cost is per operation: as many as ever occur."""

SPECIALIZED_LATENT_DIM = 512
"""Elements of a latent for which there is a warp-specialised kernel."""

SPECIALIZED_KEYS = 128
"""Keys of a step of that kernel, 64 for each group of warps that multiplies."""

SPECIALIZED_PAGE_STEP = 16
"""Divisor of the tokens of its pages. Smaller boxes would be too many to look up."""

SPECIALIZED_MIN_ROWS = 33
"""Fewest rows of a request for that kernel. Tiles for fewer waste less of a matrix instruction."""


def latent_rows(machine: Machine, *, element_bytes: int, is_converted: bool) -> int:
    """Most rows of a program. A row is one head of one query token.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        element_bytes: Bytes of an element of the queries.
        is_converted: Whether pages hold another element type than queries.
    """
    if machine.is_interpreter:
        return INTERPRETER_ROWS
    if element_bytes > 2:  # noqa: PLR2004 - float32 products need registers
        return 16
    # Converted latents pass through registers and leave none for more rows.
    if _has_warpgroups(machine) and not is_converted:
        return WARPGROUP_ROWS
    return 32


def _has_warpgroups(machine: Machine) -> bool:
    """Whether the GPU has warpgroup matrix instructions, which only Hopper has."""
    return HOPPER <= machine.capability < BLACKWELL


def group_heads(num_heads: int, query_tokens: int, max_rows: int) -> int:
    """Number of heads that share a program: the greatest divisor of `num_heads` that fits."""
    fitting = (
        heads
        for heads in range(1, num_heads + 1)
        if num_heads % heads == 0 and heads * query_tokens <= max_rows
    )
    return max(fitting, default=1)


def specialized_latent_tiles(
    machine: Machine,
    *,
    num_heads: int,
    latent_dim: int,
    page_tokens: int,
    query_tokens: int,
    element_bytes: int,
    stored_bytes: int,
) -> AttentionTiles | None:
    """Choose tiles for `latent_attention` with the warp-specialised decode kernel.

    None means that the kernel cannot run.

    Args:
        machine: GPU, or interpreter, that would run the kernel.
        num_heads: Query heads.
        latent_dim: Elements of a latent.
        page_tokens: Slots of a page.
        query_tokens: Most query tokens of a decoding request.
        element_bytes: Bytes of an element of the queries.
        stored_bytes: Bytes of an element in the pages.
    """
    num_rows = num_heads * query_tokens
    can_run = (
        _has_warpgroups(machine)
        and element_bytes == 2  # noqa: PLR2004 - the swizzle patterns are for 16 bits
        and latent_dim == SPECIALIZED_LATENT_DIM
        and page_tokens % SPECIALIZED_PAGE_STEP == 0
        and (num_heads % WARPGROUP_ROWS == 0 or WARPGROUP_ROWS % num_heads == 0)
        and num_rows >= SPECIALIZED_MIN_ROWS
    )
    if not can_run:
        return None
    num_members = -(-num_rows // WARPGROUP_ROWS)
    plain = latent_tiles(
        machine,
        element_bytes=element_bytes,
        stored_bytes=stored_bytes,
        is_converted=stored_bytes != element_bytes,
        decode_rows=latent_rows(
            machine, element_bytes=element_bytes, is_converted=stored_bytes != element_bytes
        ),
    )
    return replace(
        plain,
        decode=LoopTiles(
            block_m=WARPGROUP_ROWS, block_n=SPECIALIZED_KEYS, num_warps=4, num_stages=1
        ),
        # Shared memory has room for one program.
        num_programs=max(1, machine.num_processors // num_members),
        specialized_decode=TeamTiles(num_members=num_members, takes_turns=True),
    )


def latent_tiles(
    machine: Machine,
    *,
    element_bytes: int,
    stored_bytes: int,
    is_converted: bool,
    decode_rows: int,
) -> AttentionTiles:
    """Choose tiles for `latent_attention`.

    Args:
        machine: GPU, or interpreter, that runs the kernel.
        element_bytes: Bytes of an element of the queries.
        stored_bytes: Bytes of an element in the pages, at most element_bytes.
        is_converted: Whether pages hold another element type than queries.
        decode_rows: Most rows of a request that a decode program serves, at most `latent_rows`.
    """
    decode_rows = max(MIN_ROWS, power_of_two(decode_rows))
    if machine.is_interpreter:
        return AttentionTiles(
            decode=LoopTiles(block_m=decode_rows, block_n=1024, num_warps=1, num_stages=1),
            prefill=LoopTiles(block_m=1024, block_n=512, num_warps=1, num_stages=1),
            num_programs=1,
            block_splits=16,
        )
    max_rows = latent_rows(machine, element_bytes=element_bytes, is_converted=is_converted)

    def tiles_of(block_m: int) -> LoopTiles:
        block_n, num_warps, num_stages = _STEPS[
            machine.has_large_tiles, element_bytes, stored_bytes, block_m
        ]
        return LoopTiles(
            block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
        )

    # The shared memory of 64 rows and two steps leaves none for a second program.
    programs_per_processor = 1 if decode_rows == WARPGROUP_ROWS else 2
    return AttentionTiles(
        decode=tiles_of(decode_rows),
        prefill=tiles_of(max_rows),
        num_programs=programs_per_processor * machine.num_processors,
        block_splits=16,
    )


_STEPS = {
    # Has large tiles, bytes of an element of queries and pages, rows -> keys a step, warps, stages
    (True, 2, 2, 16): (32, 4, 5),
    (True, 2, 2, 32): (32, 8, 5),
    (True, 2, 2, 64): (64, 8, 2),
    (True, 2, 1, 16): (32, 4, 5),
    (True, 2, 1, 32): (32, 8, 5),
    (True, 4, 4, 16): (16, 8, 1),
    (True, 4, 1, 16): (16, 8, 1),
    (False, 2, 2, 16): (32, 4, 3),
    (False, 2, 2, 32): (32, 8, 3),
    (False, 2, 1, 16): (64, 8, 3),
    (False, 2, 1, 32): (32, 8, 3),
    (False, 4, 4, 16): (16, 8, 1),
    (False, 4, 1, 16): (16, 8, 1),
}

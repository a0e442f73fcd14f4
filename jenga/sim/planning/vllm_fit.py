"""Number of requests that fit under vLLM's planner and manager, to compare in `jenga plan`."""

from collections.abc import Sequence
from importlib.util import find_spec

from jenga.sim.arenas.vllm_arena import StockArena
from jenga.sim.batching.arena import ActiveRequest
from jenga.sim.planning.plan import CHUNK_TOKENS, LONGEST_TOKENS, Fit, System, decode_bytes
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import ModelSpec

LABEL = "vLLM's planner"


def stock_system(model: ModelSpec, arena_bytes: int, lengths: Sequence[int]) -> System:
    """Measure vLLM's own manager, without prefix caching, by one request of each length.

    All blocks have the same size, and any request can use any block. So every request takes as many
    blocks as the one that is run.

    Args:
        model: Model with the layers.
        arena_bytes: Bytes of the arena.
        lengths: Tokens of the requests.
    """
    if find_spec("vllm") is None:
        return System(name="vllm", label=LABEL, refusal="vLLM 0.32 or 0.33 is not installed")
    try:
        arena = StockArena(model, arena_bytes, prefix_caching=False)
    except ValueError as error:
        return System(name="vllm", label=LABEL, refusal=str(error))
    num_blocks = arena.plan.kv_cache_config.num_blocks
    longest_tokens = _longest(arena)
    return System(
        name="vllm",
        label=LABEL,
        unit_bytes=arena.plan.block_bytes,
        num_units=num_blocks,
        num_page_tables=len(arena.plan.group_layers),
        fits=tuple(
            _fit(arena, num_blocks, num_tokens, decode_bytes(model, num_tokens), longest_tokens)
            for num_tokens in lengths
        ),
        longest_tokens=longest_tokens,
    )


def _request(num_tokens: int) -> ActiveRequest:
    return ActiveRequest(
        Request(name="one", prompt=(Piece("prompt", num_tokens),), output_tokens=1)
    )


def _fit(
    arena: StockArena, num_blocks: int, num_tokens: int, needed: int, longest_tokens: int | None
) -> Fit:
    """Run the prompt of one request, and count its blocks."""
    if longest_tokens is not None and num_tokens > longest_tokens:
        return Fit(num_tokens=num_tokens, num_requests=0, held_bytes=0, waste=None)
    active = _request(num_tokens)
    arena.new_step()
    arena.find(active)
    held = arena.admit(active, 0, min(num_tokens, CHUNK_TOKENS))
    while held and active.num_computed + CHUNK_TOKENS < num_tokens:
        active.num_computed += CHUNK_TOKENS
        arena.new_step()
        held = arena.grow(active, min(num_tokens, active.num_computed + CHUNK_TOKENS))
    # Schedule the next token, so that blocks outside of every window are freed.
    active.num_computed = num_tokens - 1
    arena.new_step()
    held = held and arena.grow(active, num_tokens)
    memory = arena.memory([])
    arena.free(active)
    if not held:
        return Fit(num_tokens=num_tokens, num_requests=0, held_bytes=0, waste=None)
    held_bytes = memory.used_bytes + memory.useless_bytes
    return Fit(
        num_tokens=num_tokens,
        num_requests=(num_blocks - 1) * arena.plan.block_bytes // held_bytes,
        held_bytes=held_bytes,
        waste=1 - needed / held_bytes,
    )


def _longest(arena: StockArena) -> int | None:
    """Return the longest prompt that vLLM admits to an empty arena. None if none is too long."""

    def admits(num_tokens: int) -> bool:
        active = _request(num_tokens)
        arena.new_step()
        arena.find(active)
        if not arena.admit(active, 0, min(num_tokens, CHUNK_TOKENS)):
            return False
        arena.free(active)
        return True

    if admits(LONGEST_TOKENS - 1):
        return None
    fitting, too_many = 0, LONGEST_TOKENS - 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if admits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting

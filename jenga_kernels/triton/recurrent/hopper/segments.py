# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Gluon's layouts and loops are what its compiler takes them for.
"""Segments of prompts for kernels in Gluon; `segments` says what they are, and has the twins."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jenga_kernels.triton.recurrent.tiles import CHUNK_TOKENS as _CHUNK_TOKENS

CHUNK_TOKENS = gl.constexpr(_CHUNK_TOKENS)
"""Tokens that a segment's are a multiple of, but for a request's last."""

CHECKPOINTS = gl.constexpr(128)
"""Checkpoints that are looked at at once."""

_INT32_MAX = gl.constexpr(2**31 - 1)

NUMBERS_LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])))
"""Of numbers of requests or checkpoints, which every warp has all of and adds up alone."""


@gluon.jit
def let_next_begin(IS_FOLLOWED: gl.constexpr):
    """As that of `device`."""
    if IS_FOLLOWED:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def await_kernel_before(IS_OVERLAPPED: gl.constexpr):
    """As that of `device`."""
    if IS_OVERLAPPED:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def segment_at(segment, query_starts_ptr, num_requests, segment_tokens, BLOCK_R: gl.constexpr):
    """Which segment of which request has a number among those of all.

    Returns:
        The request; its number among the request's own, and of how many. Past the last segment of
        all the request is BLOCK_R and has none.
    """
    requests = gl.arange(0, BLOCK_R, NUMBERS_LAYOUT)
    is_one = requests < num_requests
    starts = gl.load(query_starts_ptr + requests, mask=is_one, other=0)
    stops = gl.load(query_starts_ptr + requests + 1, mask=is_one, other=0)
    counts = (stops - starts + segment_tokens - 1) // segment_tokens
    counts = gl.where(is_one, gl.maximum(counts, 1), 0)
    # A scan is of tiles, here of a single column.
    ends = gl.sum(gl.associative_scan(counts[:, None], 0, _add), 1)
    request = gl.sum((ends <= segment).to(gl.int32), 0)
    is_it = requests == request
    first = gl.sum(gl.where(is_it, ends - counts, 0), 0)
    return request, segment - first, gl.sum(gl.where(is_it, counts, 0), 0)


@gluon.jit
def segment_range(number, num_segments, num_tokens):
    """Tokens [first, stop) of one of a request's segments, all about as long."""
    tokens_each = (num_tokens + num_segments - 1) // num_segments
    tokens_each = (tokens_each + CHUNK_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    first = gl.minimum(number * tokens_each, num_tokens)
    return first, gl.minimum(first + tokens_each, num_tokens)


@gluon.jit
def checkpoints_through(checkpoint_after_ptr, first, end, token):
    """The end of those of checkpoints [first, end) that come after at most `token` tokens."""
    last = first
    for tile in range(first, end, CHECKPOINTS):
        places = tile + gl.arange(0, CHECKPOINTS, NUMBERS_LAYOUT)
        after = gl.load(checkpoint_after_ptr + places, mask=places < end, other=_INT32_MAX)
        last += gl.sum((after <= token).to(gl.int32), 0)
    return last

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Pyright does not understand the layouts and loops of Gluon.
"""Segments of prompts for kernels in Gluon: `recurrent.segments` explains them, for Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jenga_kernels.triton.recurrent.tiles import CHUNK_TOKENS as _CHUNK_TOKENS

CHUNK_TOKENS = gl.constexpr(_CHUNK_TOKENS)
"""Divisor of a segment's tokens, except for a request's last segment."""

CHECKPOINTS = gl.constexpr(128)
"""Number of checkpoints that are searched at once."""

_INT32_MAX = gl.constexpr(2**31 - 1)

NUMBERS_LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])))
"""Layout of numbers of requests or checkpoints. Every warp has all of them, and sums them alone."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def segment_at(segment, query_starts_ptr, num_requests, segment_tokens, BLOCK_R: gl.constexpr):
    """Find the request of a segment, given the segment's index among all.

    Returns:
        The request, the segment's index within it, and the request's number of segments. Past the
        last segment of all, the request is BLOCK_R, with 0 segments.
    """
    requests = gl.arange(0, BLOCK_R, NUMBERS_LAYOUT)
    is_one = requests < num_requests
    starts = gl.load(query_starts_ptr + requests, mask=is_one, other=0)
    stops = gl.load(query_starts_ptr + requests + 1, mask=is_one, other=0)
    counts = (stops - starts + segment_tokens - 1) // segment_tokens
    counts = gl.where(is_one, gl.maximum(counts, 1), 0)
    # Scans take tiles, here of a single column.
    ends = gl.sum(gl.associative_scan(counts[:, None], 0, _add), 1)
    request = gl.sum((ends <= segment).to(gl.int32), 0)
    is_it = requests == request
    first = gl.sum(gl.where(is_it, ends - counts, 0), 0)
    return request, segment - first, gl.sum(gl.where(is_it, counts, 0), 0)


@gluon.jit
def segment_range(number, num_segments, num_tokens):
    """Tokens [first, stop) of one of a request's segments, which are about equally long."""
    tokens_each = (num_tokens + num_segments - 1) // num_segments
    tokens_each = (tokens_each + CHUNK_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    first = gl.minimum(number * tokens_each, num_tokens)
    return first, gl.minimum(first + tokens_each, num_tokens)


@gluon.jit
def checkpoints_through(checkpoint_after_ptr, first, end, token):
    """End of those of checkpoints [first, end) that come after at most `token` tokens."""
    last = first
    for tile in range(first, end, CHECKPOINTS):
        places = tile + gl.arange(0, CHECKPOINTS, NUMBERS_LAYOUT)
        after = gl.load(checkpoint_after_ptr + places, mask=places < end, other=_INT32_MAX)
        last += gl.sum((after <= token).to(gl.int32), 0)
    return last
